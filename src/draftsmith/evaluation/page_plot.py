"""Figures of the evaluation's page: Plotly traces and layout as plain data, colours by name, numbers as a table.

Colours are written `var(--series-0)`: the page's script puts in those of the light or dark style sheet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from draftsmith.evaluation.grid import MISSING, Grid
from draftsmith.evaluation.page_html import details, escape, plot_text, script_json, table
from draftsmith.evaluation.page_model import Body, Shown

NUM_COLOURS = 6
"""Drafters with colours of their own; markers and dashes differ as well, and go on where colours come again."""
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot", "solid")
DODGE = 0.07
"""Sideways step between drafters at one position, so that their intervals do not hide each other."""
FAINT = "var(--faint)"

Trace = dict[str, Any]
Interval = Sequence[float] | None


@dataclass(frozen=True)
class LineStyle:
    """Tells two lines of one drafter apart: the dash, and what Plotly's name of its marker ends with."""

    dash: str
    suffix: str


FULL, HOLLOW = LineStyle("solid", ""), LineStyle("dot", "-open")


@dataclass(frozen=True)
class Figure:
    """One plot. `name` is unique on the page; `numbers` are the plotted values; `note` says what it counts."""

    name: str
    title: str
    traces: Sequence[Trace]
    layout: dict[str, Any]
    numbers: Grid
    note: str = ""
    height: int = 340
    size: str = "wide"  # or "panel": one of several side by side


@dataclass(frozen=True)
class Points:
    """A series of one drafter: labels or places, values, intervals, and the rounds behind each."""

    x: Sequence[Any]
    y: Sequence[float | None]
    intervals: Sequence[Interval] = field(default_factory=tuple)
    rounds: Sequence[int] = field(default_factory=tuple)
    hover: Sequence[str] = field(default_factory=tuple)


def figure_html(figure: Figure, *, subtitle: str) -> str:
    """The figure with its title, a button that saves it, and its numbers. `subtitle` goes into the saved image."""
    spec = {
        "data": figure.traces,
        "layout": figure.layout,
        "title": plot_text(figure.title),
        "subtitle": plot_text(subtitle),
        "file": figure.name,
    }
    note = f"<p>{escape(figure.note)}</p>" if figure.note else ""
    return (
        f'<figure class="{figure.size}"><figcaption><h3>{escape(figure.title)}</h3>{note}</figcaption>'
        f'<div class="plot" id="{escape(figure.name)}" style="height:{figure.height}px" role="img" '
        f'aria-label="{escape(figure.title)}; the numbers are in the table below"></div>'
        f'<script type="application/json">{script_json(spec)}</script>'
        f'<div class="tools"><button type="button" class="save">Save as SVG</button>'
        f"{details('Numbers', table(figure.numbers, caption=figure.title))}</div></figure>"
    )


def colour(slot: int) -> str:
    """The colour of a drafter."""
    return f"var(--series-{slot % NUM_COLOURS})"


def dodge(index: int, *, of: int) -> float:
    """How far to the side the `index`-th of `of` drafters is drawn."""
    return DODGE * (index - (of - 1) / 2)


def bar(shown: Shown, points: Points) -> Trace:
    """Bars of one drafter with their intervals."""
    return {
        "type": "bar",
        "name": plot_text(shown.label),
        "x": [plot_text(place) for place in points.x],
        "y": list(points.y),
        "error_y": _errors(points, "var(--ink)"),
        "marker": {"color": colour(shown.slot), "line": {"width": 0}},
        **_hover(points),
    }


def line(
    shown: Shown,
    points: Points,
    *,
    name: str | None = None,
    style: LineStyle | None = None,
    mode: str = "lines+markers",
) -> Trace:
    """A line of one drafter with its intervals; `name` and `style` where it is one of two of that drafter."""
    symbol = SYMBOLS[shown.slot % len(SYMBOLS)]
    return {
        "type": "scatter",
        "mode": mode,
        "name": plot_text(name or shown.label),
        "x": list(points.x),
        "y": list(points.y),
        "error_y": _errors(points, colour(shown.slot)),
        "line": {
            "color": colour(shown.slot),
            "width": 2,
            "dash": style.dash if style else DASHES[shown.slot % len(DASHES)],
        },
        "marker": {"color": colour(shown.slot), "size": 7, "symbol": symbol + (style.suffix if style else "")},
        **_hover(points),
    }


def faint(shown: Shown, points: Points) -> Trace:
    """Points that rest on few rounds: grey, hollow and unconnected."""
    symbol = SYMBOLS[shown.slot % len(SYMBOLS)]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": plot_text(shown.label),
        "showlegend": False,
        "x": list(points.x),
        "y": list(points.y),
        "error_y": _errors(points, FAINT),
        "marker": {"color": FAINT, "size": 7, "symbol": f"{symbol}-open"},
        **_hover(points),
    }


def axis(title: str, **more: Any) -> dict[str, Any]:
    """An axis with a title; nothing on the page is zoomed by dragging, which would trap the finger on a phone."""
    return {
        "title": {"text": title, "standoff": 8},
        "automargin": True,
        "fixedrange": True,
        "gridcolor": "var(--grid)",
        "linecolor": "var(--rule)",
        "zerolinecolor": "var(--rule)",
        "tickcolor": "var(--rule)",
        **more,
    }


def layout(*, x: dict[str, Any], y: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The common layout: legend on top, margins by need."""
    return {
        "xaxis": x,
        "yaxis": y,
        "margin": {"l": 8, "r": 8, "t": 8, "b": 8},
        "paper_bgcolor": "var(--card)",
        "plot_bgcolor": "var(--card)",
        "font": {"color": "var(--ink)", "size": 12},
        "legend": {
            "orientation": "h",
            "x": 0,
            "xanchor": "left",
            "y": 1.02,
            "yanchor": "bottom",
            "traceorder": "normal",
        },
        "showlegend": True,
        "hovermode": "closest",
        "hoverlabel": {"bgcolor": "var(--card)", "bordercolor": "var(--rule)", "font": {"color": "var(--ink)"}},
        "dragmode": False,
        **more,
    }


def span(interval: Interval, *, digits: int = 2) -> str:
    """An interval for people."""
    return MISSING if interval is None else f"{interval[0]:.{digits}f} to {interval[1]:.{digits}f}"


def by_drafter(drafters: Sequence[Shown], values: Sequence[str]) -> str:
    """`x`, where all drafters have the same, or `a: x, b: y`."""
    if len(set(values)) == 1:
        return values[0]
    return ", ".join(f"{item.label}: {value}" for item, value in zip(drafters, values, strict=True))


def basis(drafters: Sequence[Shown], temperature: float) -> str:
    """What is behind the figures at a temperature: prompts, rounds, batch size, machine."""
    rows = [list(item.rows(temperature).values()) for item in drafters]
    benchmarks = by_drafter(drafters, [str(len(found)) for found in rows])
    prompts = by_drafter(drafters, [f"{_total(found, 'num_prompts'):,}" for found in rows])
    batch = by_drafter(drafters, [" or ".join(sorted({str(row["batch_size"]) for row in found})) for found in rows])
    rounds = ", ".join(
        f"{item.label} {_total(found, 'num_rounds'):,}" for item, found in zip(drafters, rows, strict=True)
    )
    machine = by_drafter(drafters, [str(item.evaluate["machine"]) for item in drafters])
    return (
        f"Temperature {temperature:g}, batch size {batch}; benchmarks: {benchmarks}; prompts: {prompts}; "
        f"rounds: {rounds}. Machine: {machine}."
    )


def _total(rows: Sequence[Body], name: str) -> int:
    return sum(row[name] for row in rows)


def _errors(points: Points, shade: str) -> dict[str, Any]:
    """Plotly's lengths up and down from the values; null where there is no interval."""
    pairs = list(zip(points.y, points.intervals, strict=True)) if points.intervals else []
    known = [(value, ends) if value is not None and ends is not None else None for value, ends in pairs]
    return {
        "type": "data",
        "symmetric": False,
        "array": [None if pair is None else pair[1][1] - pair[0] for pair in known],
        "arrayminus": [None if pair is None else pair[0] - pair[1][0] for pair in known],
        "visible": any(pair is not None for pair in known),
        "color": shade,
        "thickness": 1.3,
        "width": 3,
    }


def _hover(points: Points) -> Trace:
    return {"customdata": [plot_text(text) for text in points.hover], "hovertemplate": "%{customdata}<extra></extra>"}
