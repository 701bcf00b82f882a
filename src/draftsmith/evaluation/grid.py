"""Tables of text cells, and how they are written in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MISSING = "-"


@dataclass(frozen=True)
class Grid:
    """A table of text cells: what Markdown and the terminal both print."""

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def markdown(grid: Grid) -> str:
    """The grid as a Markdown table whose columns line up in a terminal too, all but the first to the right."""
    headers = tuple(header.replace("\n", " ") for header in grid.headers)
    lines = [headers, *grid.rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    head, *rest = [" | ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines]
    rule = "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])])
    return "\n".join([f"| {head} |", f"|{rule}|", *(f"| {text} |" for text in rest)]) + "\n"


def number(value: float | None, *, digits: int) -> str:
    """A number with so many digits after the point, or the sign for what is missing."""
    return MISSING if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """A share in percent with one digit after the point, or the sign for what is missing."""
    return MISSING if value is None else f"{100 * value:.1f} %"


def with_interval(value: float | None, interval: Sequence[float] | None, *, digits: int = 2) -> str:
    """`2.00 [1.50, 2.50]`, or the number alone where there is no interval."""
    text = number(value, digits=digits)
    return text if interval is None else f"{text} [{interval[0]:.{digits}f}, {interval[1]:.{digits}f}]"
