"""Signs over what is made up, on pages and in saved images, that nobody overlooks."""

from __future__ import annotations

from typing import Any

from draftsmith.evaluation.page_html import escape

MADE_UP = "SYNTHETIC: nothing here was measured"


def made_up(scenario: str) -> str:
    """A large line over a part of a page."""
    return f'<p class="made-up" role="note">{escape(MADE_UP)} ({escape(scenario)})</p>'


def watermark() -> dict[str, Any]:
    """Parts of a figure's layout: a word across it."""
    mark = {
        "text": "SYNTHETIC",
        "xref": "paper",
        "yref": "paper",
        "x": 0.5,
        "y": 0.5,
        "showarrow": False,
        "opacity": 0.22,
        "textangle": -14,
        "font": {"size": 46, "color": "var(--faint)"},
    }
    return {"annotations": [mark]}
