"""HTML of the evaluation's page: escaping, tables, switches, and blocks that show at some positions of the switches."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.evaluation.grid import MISSING, Grid

When = Mapping[str, str]
"""Positions of switches at which a block shows, by the name of the switch; empty: always."""

# Inside <script> a parser looks for "</script" and "<!--" alone; "&" for those who read the page as XML.
_NUMBER = re.compile(r"[+-]?[\d.,]+( %)?( (to|or) [+-]?[\d.,]+( %)?)*( \[.*\])?( \(few\))?")
_IN_SCRIPT = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


@dataclass(frozen=True)
class Block:
    """A piece of a section and when it shows."""

    html: str
    when: When


@dataclass(frozen=True)
class Choice:
    """A position of a switch: its value in `When` and what the reader sees."""

    value: str
    label: str


def escape(text: object) -> str:
    """Text for an element or a quoted attribute. Half of a surrogate pair, which no encoding holds, becomes U+FFFD."""
    whole = str(text).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return html.escape(whole.replace("\0", "�"), quote=True)


def plot_text(text: object) -> str:
    """Text for a label inside a figure: Plotly reads some tags and entities in it."""
    return html.escape(str(text), quote=False)


def script_json(value: Any) -> str:
    """JSON that may stand inside a script element, whatever strings are in it; ASCII alone."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return "".join(_IN_SCRIPT.get(letter, letter) for letter in text)


def blocks(items: Iterable[Block], *, initial: When) -> str:
    """All blocks, those hidden that do not show at the switches' first positions."""
    return "\n".join(_block(item, initial=initial) for item in items)


def _block(item: Block, *, initial: When) -> str:
    if not item.when:
        return item.html
    attributes = " ".join(f'data-when-{name}="{escape(value)}"' for name, value in item.when.items())
    hidden = "" if all(initial[name] == value for name, value in item.when.items()) else " hidden"
    return f'<div class="when" {attributes}{hidden}>{item.html}</div>'


def paragraph(text: str, *, kind: str = "") -> str:
    """A paragraph of plain text."""
    return f"<p{_class(kind)}>{escape(text)}</p>"


def notice(title: str, text: str) -> str:
    """A warning that nobody overlooks."""
    return f'<div class="notice" role="note"><strong>{escape(title)}</strong> {escape(text)}</div>'


def details(summary: str, body: str) -> str:
    """A part that opens on demand."""
    return f"<details><summary>{escape(summary)}</summary>{body}</details>"


def table(grid: Grid, *, caption: str) -> str:
    """A table of plain text: the first column names the row, numbers stand to the right. Scrolls sideways by itself."""
    numeric = [_is_numeric(row[place] for row in grid.rows) for place in range(len(grid.headers))]
    head = "".join(
        f'<th scope="col"{_class("number" if right else "")}>{escape(text)}</th>'
        for text, right in zip(grid.headers, numeric, strict=True)
    )
    lines = []
    for first, *rest in grid.rows:
        cells = "".join(
            f"<td{_class('number' if right else '')}>{escape(text)}</td>"
            for text, right in zip(rest, numeric[1:], strict=True)
        )
        lines.append(f'<tr><th scope="row">{escape(first)}</th>{cells}</tr>')
    return scrolling(f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>", label=caption)


def scrolling(content: str, *, label: str) -> str:
    """Content that may be wider than the screen: a region of its own, which the keyboard can scroll."""
    return f'<div class="scroll" role="region" aria-label="{escape(label)}" tabindex="0">{content}</div>'


def switch(name: str, label: str, choices: Sequence[Choice], *, chosen: str, place: str) -> str:
    """A row of radio buttons; nothing if there is nothing to choose.

    A switch may stand in several sections (`place`): all its copies move together.
    """
    if len(choices) < 2:
        return ""
    buttons = "".join(
        f'<label><input type="radio" name="{escape(name)}-{escape(place)}" value="{escape(choice.value)}"'
        f"{' checked' if choice.value == chosen else ''}><span>{escape(choice.label)}</span></label>"
        for choice in choices
    )
    return f'<fieldset class="switch" data-switch="{escape(name)}"><legend>{escape(label)}</legend>{buttons}</fieldset>'


def section(name: str, title: str, *, lead: str, body: str, before: str = "", switches: str = "") -> str:
    """A section of the page: what it counts (`lead`, plain text), what comes `before` its switches, and the rest."""
    controls = f'<div class="switches">{switches}</div>' if switches else ""
    return (
        f'<section id="{escape(name)}" aria-labelledby="{escape(name)}-title">'
        f'<h2 id="{escape(name)}-title">{escape(title)}</h2>'
        f'<p class="lead">{escape(lead)}</p>{before}{controls}{body}</section>'
    )


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""


def _is_numeric(cells: Iterable[str]) -> bool:
    """True if every cell is a number (or two ends of an interval) with its unit, or the sign for what is missing."""
    return all(cell == MISSING or _NUMBER.fullmatch(cell) for cell in cells)
