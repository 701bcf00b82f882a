"""Figures of acceptance: by benchmark, by position in the block, by threshold, by place in the answer, by turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftsmith.evaluation.breakdown import length_name
from draftsmith.evaluation.grid import Grid, number, percent
from draftsmith.evaluation.page_model import Body, Page, Shown
from draftsmith.evaluation.page_plot import (
    FULL,
    HOLLOW,
    Figure,
    Points,
    Trace,
    axis,
    bar,
    dodge,
    faint,
    layout,
    line,
    span,
)
from draftsmith.evaluation.page_tables import PLAIN_LENGTH
from draftsmith.evaluation.paired import Bonus

MIN_ROUNDS = 20
"""Shares of fewer rounds than this are drawn grey."""
MEAN = "mean"
LENGTH_TITLE = {"with": "tokens a round, bonus included", "without": "drafted tokens a round"}


def accepted_length_figure(page: Page, temperature: float, bonus: Bonus) -> Figure:
    """Bars of accepted length by benchmark and their mean; plain decoding is a line at 1, or 0 without the bonus."""
    column = length_name(bonus, "micro")
    names = [item.name for item in page.benchmarks]
    traces, lines = [], []
    for item in page.evaluated(temperature):
        found: dict[str, Body] = item.rows(temperature)
        average = item.average(temperature)
        places = [*(name for name in names if name in found), *([MEAN] if average is not None else [])]
        rows = [average if place == MEAN and average is not None else found[place] for place in places]
        for place, row in zip(places, rows, strict=True):
            behind = _behind(row)
            lines.append((place, item.label, number(row[column], digits=2), span(row[f"{column}_interval"]), behind))
        hover = [
            f"{item.label}, {place}: {number(row[column], digits=2)} ({_interval(row[f'{column}_interval'])}; "
            f"{_behind(row)})"
            for place, row in zip(places, rows, strict=True)
        ]
        points = Points(places, [row[column] for row in rows], [row[f"{column}_interval"] for row in rows], hover=hover)
        traces.append(bar(item, points))
    plain = PLAIN_LENGTH[bonus]
    return Figure(
        name=f"accepted-length-{temperature:g}-{bonus}",
        title=f"Accepted length by benchmark, {_WITH[bonus]}, temperature {temperature:g}",
        traces=traces,
        layout=layout(
            x=axis("", showgrid=False, categoryorder="array", categoryarray=[*names, MEAN]),
            y=axis(LENGTH_TITLE[bonus], rangemode="tozero"),
            barmode="group",
            bargap=0.25,
            shapes=[_rule(plain, name=f"plain decoding: {plain}")],
        ),
        numbers=Grid(("benchmark", "drafter", "accepted length", "95 % interval", "behind it"), tuple(lines)),
        height=380,
    )


def acceptance_figure(page: Page, temperature: float, benchmark: str) -> Figure:
    """Conditional acceptance over the position in the block on one benchmark."""
    drafters = [item for item in page.evaluated(temperature) if benchmark in item.rows(temperature)]
    traces: list[Trace] = []
    lines = []
    for index, item in enumerate(drafters):
        row = item.rows(temperature)[benchmark]
        points = _positions(item, row, shift=dodge(index, of=len(drafters)))
        traces += _enough_and_few(item, points)
        for slot, (value, interval, rounds) in enumerate(zip(points.y, points.intervals, points.rounds, strict=True)):
            few_mark = " (few)" if rounds < MIN_ROUNDS else ""
            lines.append((str(slot + 1), item.label, percent(value), _shares(interval), f"{rounds:,}{few_mark}"))
    return Figure(
        name=f"acceptance-{benchmark}-{temperature:g}",
        title=f"{benchmark}, temperature {temperature:g}",
        traces=traces,
        layout=layout(
            x=axis("position in the block", range=[0.5, page.block_size + 0.5], dtick=1, tick0=1),
            y=axis("share accepted", range=[-0.02, 1.02], tickformat=".0%"),
        ),
        numbers=Grid(("position", "drafter", "accepted", "95 % interval", "rounds"), tuple(lines)),
        height=300,
        size="panel",
    )


def threshold_figures(page: Page, temperature: float) -> list[Figure]:
    """Accepted and rejected tokens a round, and the share accepted, over the threshold; empty without any sweep."""
    sweeps = [(item, item.at("thresholds", temperature)) for item in page.evaluated(temperature)]
    swept = [(item, points) for item, points in sweeps if points]
    if not swept:
        return []
    counts, shares, lines = [], [], []
    for item, points in swept:
        at = [point["threshold"] for point in points]
        for part, style in (("accepted", FULL), ("rejected", HOLLOW)):
            values = [point[part] / point["num_rounds"] for point in points]
            hover = [
                f"{item.label}, threshold {threshold:.2f}: {value:.2f} {part} a round ({point['num_rounds']:,} rounds)"
                for threshold, value, point in zip(at, values, points, strict=True)
            ]
            counts.append(line(item, Points(at, values, hover=hover), name=f"{item.label}: {part}", style=style))
        rates = [point["acceptance_rate"] for point in points]
        hover = [
            f"{item.label}, threshold {threshold:.2f}: {percent(rate)} of {point['verified']:,} verified tokens"
            for threshold, rate, point in zip(at, rates, points, strict=True)
        ]
        # Here the tokens verified are what a share rests on.
        shares += _enough_and_few(item, Points(at, rates, rounds=[point["verified"] for point in points], hover=hover))
        lines += [_threshold_line(item, point) for point in points]
    grid = Grid(
        ("threshold", "drafter", "verified a round", "accepted a round", "rejected a round", "accepted of verified",
         "accepted length, bonus included", "rounds"),
        tuple(lines),
    )  # fmt: skip
    x = axis("confidence threshold", range=[-0.02, 1.0], dtick=0.2)
    return [
        Figure(
            name=f"threshold-tokens-{temperature:g}",
            title=f"Draft tokens accepted and rejected a round, temperature {temperature:g}",
            traces=counts,
            layout=layout(x=x, y=axis("draft tokens a round", rangemode="tozero")),
            numbers=grid,
            size="half",
        ),
        Figure(
            name=f"threshold-rate-{temperature:g}",
            title=f"Accepted share of verified tokens, temperature {temperature:g}",
            traces=shares,
            layout=layout(x=x, y=axis("accepted of verified", range=[-0.02, 1.02], tickformat=".0%")),
            numbers=grid,
            size="half",
        ),
    ]


def place_figure(page: Page, temperature: float) -> Figure:
    """Accepted length over the place of a round's anchor in the answer."""
    labels: dict[int, str] = {}
    traces: list[Trace] = []
    lines = []
    for item in page.evaluated(temperature):
        found = item.at("output_positions", temperature)
        places = [f"{row['first']}–{row['last']}" for row in found]
        labels |= {row["first"]: place for row, place in zip(found, places, strict=True)}
        points = _lengths(item, places, found, what="tokens ")
        traces += _enough_and_few(item, points)
        lines += _length_lines(item, places, found)
    ordered = [labels[first] for first in sorted(labels)]
    return Figure(
        name=f"output-position-{temperature:g}",
        title=f"Accepted length over the place in the answer, bonus included, temperature {temperature:g}",
        traces=traces,
        layout=layout(
            x=axis("token of the answer (0 is the first)", type="category", categoryorder="array",
                   categoryarray=ordered),
            y=axis(LENGTH_TITLE["with"], rangemode="tozero"),
        ),
        numbers=Grid(("tokens", "drafter", "accepted length", "95 % interval", "rounds"), tuple(lines)),
    )  # fmt: skip


def turn_figures(page: Page, temperature: float) -> list[Figure]:
    """Accepted length by turn, a panel for each benchmark of several turns."""
    figures = []
    for benchmark in page.benchmarks:
        traces, lines = [], []
        for item in page.evaluated(temperature):
            turns = item.rows(temperature).get(benchmark.name, {"turns": []})["turns"]
            if len(turns) < 2:
                continue
            places = [f"turn {turn['turn'] + 1}" for turn in turns]
            traces.append(bar(item, _lengths(item, places, turns, what="")))
            lines += _length_lines(item, places, turns)
        if traces:
            figures.append(
                Figure(
                    name=f"turns-{benchmark.name}-{temperature:g}",
                    title=f"{benchmark.name}: accepted length by turn, bonus included, temperature {temperature:g}",
                    traces=traces,
                    layout=layout(
                        x=axis("", showgrid=False),
                        y=axis(LENGTH_TITLE["with"], rangemode="tozero"),
                        barmode="group",
                        shapes=[_rule(1, name="plain decoding: 1")],
                    ),
                    numbers=Grid(("turn", "drafter", "accepted length", "95 % interval", "rounds"), tuple(lines)),
                    height=320,
                    size="half",
                )
            )
    return figures


_WITH = {"with": "bonus included", "without": "bonus not counted"}


def _positions(shown: Shown, row: Body, *, shift: float) -> Points:
    slots = range(len(row["conditional_acceptance"]))
    shares, intervals, rounds = (
        row[name] for name in ("conditional_acceptance", "conditional_acceptance_interval", "num_conditional")
    )
    return Points(
        x=[slot + 1 + shift for slot in slots],
        y=shares,
        intervals=intervals,
        rounds=rounds,
        hover=[
            f"{shown.label}, position {slot + 1}: {percent(shares[slot])} accepted ({_shares(intervals[slot])}; "
            f"{rounds[slot]:,} rounds{', few' if rounds[slot] < MIN_ROUNDS else ''})"
            for slot in slots
        ],
    )


def _lengths(shown: Shown, places: Sequence[str], rows: Sequence[Body], *, what: str) -> Points:
    values = [row["accepted_length"] for row in rows]
    intervals = [row["accepted_length_interval"] for row in rows]
    rounds = [row["num_rounds"] for row in rows]
    hover = [
        f"{shown.label}, {what}{place}: {number(value, digits=2)} ({_interval(interval)}; {count:,} rounds"
        f"{', few' if count < MIN_ROUNDS else ''})"
        for place, value, interval, count in zip(places, values, intervals, rounds, strict=True)
    ]
    return Points(places, values, intervals, rounds, hover)


def _length_lines(shown: Shown, places: Sequence[str], rows: Sequence[Body]) -> list[tuple[str, ...]]:
    return [
        (
            place,
            shown.label,
            number(row["accepted_length"], digits=2),
            span(row["accepted_length_interval"]),
            f"{row['num_rounds']:,}{' (few)' if row['num_rounds'] < MIN_ROUNDS else ''}",
        )
        for place, row in zip(places, rows, strict=True)
    ]


def _threshold_line(shown: Shown, point: Body) -> tuple[str, ...]:
    rounds = point["num_rounds"]
    return (
        f"{point['threshold']:.2f}",
        shown.label,
        *(number(point[name] / rounds, digits=2) for name in ("verified", "accepted", "rejected")),
        percent(point["acceptance_rate"]),
        number(point["accepted_length"], digits=2),
        f"{rounds:,}",
    )


def _enough_and_few(shown: Shown, points: Points) -> list[Trace]:
    """A line through the points of enough rounds, and those of few, if any, in grey; each has null in the other's."""
    enough = [rounds >= MIN_ROUNDS for rounds in points.rounds]

    def only(wanted: bool) -> Points:
        values = [value if good == wanted else None for value, good in zip(points.y, enough, strict=True)]
        return Points(points.x, values, points.intervals, points.rounds, points.hover)

    few = only(False)
    return [line(shown, only(True)), *([faint(shown, few)] if any(value is not None for value in few.y) else [])]


def _rule(value: float, *, name: str) -> dict[str, Any]:
    """A dashed line across the plot, named in the legend."""
    return {
        "type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": value, "y1": value,
        "line": {"color": "var(--ink)", "width": 1.5, "dash": "dash"}, "name": name, "showlegend": True,
    }  # fmt: skip


def _behind(row: Body) -> str:
    if "num_prompts" in row:
        return f"{row['num_prompts']:,} prompts, {row['num_rounds']:,} rounds"
    return f"mean of {row['num_benchmarks']} benchmarks, each counting the same; {row['num_rounds']:,} rounds"


def _interval(ends: Sequence[float] | None) -> str:
    return "no interval" if ends is None else f"95 %: {span(ends)}"


def _shares(ends: Sequence[float] | None) -> str:
    return "no interval" if ends is None else f"{percent(ends[0])} to {percent(ends[1])}"
