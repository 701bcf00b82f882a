"""The HTML document around the sections of a page: everything inside, nothing from outside.

Plotly's script, the style sheet and the page's own script are in it; a content security policy forbids it to load
anything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

from plotly.offline import get_plotlyjs

from draftsmith.evaluation.page_html import escape

POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:; "
    "base-uri 'none'; form-action 'none'"
)


def document(*, title: str, sections: Sequence[tuple[str, str]], body: str, without_script: str) -> str:
    """The whole page. `sections`: id and title of each, for the navigation; `without_script`: what needs the script."""
    parts = files("draftsmith.evaluation")
    style, script = (parts.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    links = "".join(f'<li><a href="#{name}">{escape(text)}</a></li>' for name, text in sections)
    theme = "".join(f'<option value="{value}">{value}</option>' for value in ("auto", "light", "dark"))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f'<title>{escape(title)}</title>\n<link rel="icon" href="data:,">\n<style>\n{style}</style>\n</head>\n<body>\n'
        f'<header><h1>{escape(title)}</h1><label class="theme">Colours <select id="theme">{theme}</select></label>'
        f'<nav aria-label="Sections"><ol>{links}</ol></nav>'
        f"<noscript><p>Without JavaScript the tables below show; {escape(without_script)} do not.</p>"
        f"</noscript></header>\n<main>\n{body}\n</main>\n"
        f"<script>{get_plotlyjs()}</script>\n<script>\n{script}</script>\n</body>\n</html>\n"
    )
