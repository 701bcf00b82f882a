"""Figures of the closed loop: throughput against speed for one user, verification by load, early exits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from draftsmith.evaluation.grid import MISSING, Grid, number, percent
from draftsmith.evaluation.page_plot import Figure, Trace, axis, layout
from draftsmith.serving.page_marks import watermark
from draftsmith.serving.page_model import Body, Scenario, Style, hovering, rounded, short, signed, users

WIDE_RANGE = 24
"""Loads whose most is so many times the least stand on logarithmic axes, or the low ones would share a pixel."""
LEGEND_LINE = 12
"""Height that each policy's name takes."""
RATE, SPEED = "tokens/s of all users", "tokens/s of the median user"


def pareto_figure(scenario: Scenario) -> Figure:
    """Throughput against what one user gets; every point is a number of users."""
    traces: list[Trace] = [_frontier(scenario)]
    lines = []
    found = [point for points in scenario.points.values() for point in points]
    for name, points in scenario.points.items():
        traces.append(
            scenario.line(
                name,
                x=rounded([point["user_tokens_per_s"]["p50"] for point in points]),
                y=[point["tokens_per_s"] for point in points],
                hover=[point_text(scenario.labels[name], point) for point in points],
            )
        )
        lines += [_numbers(scenario.labels[name], point) for point in points]
    wide = scenario.loads[-1] >= WIDE_RANGE * scenario.loads[0]
    return Figure(
        name=f"frontier-{scenario.name}",
        title="Throughput against speed for one user",
        traces=traces,
        layout=layout(
            x=axis(SPEED, **scale([point["user_tokens_per_s"]["p50"] for point in found], wide=wide)),
            y=axis(RATE, **scale([point["tokens_per_s"] for point in found], wide=wide)),
            **marked(scenario),
        ),
        numbers=Grid(
            ("policy, users", "tokens/s", "error", "median user's tokens/s", "over no drafter", "accepted length",
             "budget", "acceptance", "on the frontier"),
            tuple(lines),
        ),
        note="To the right: faster for each user; up: more tokens for all. The wide grey line joins the points that no "
        "other beats in both. A click on the legend shows or hides a policy.",
        height=430 + LEGEND_LINE * len(traces),
    )  # fmt: skip


def scale(values: Sequence[float], *, wide: bool) -> dict[str, Any]:
    """An axis from 0, or a logarithmic one with ticks at 1, 2 and 5 times powers of ten."""
    if not wide:
        return {"rangemode": "tozero"}
    low, high = min(values), max(values)
    powers = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)
    ticks = [step * 10.0**power for power in powers for step in (1, 2, 5)]
    kept = [tick for tick in ticks if low / 1.2 <= tick <= high * 1.2]
    return {"type": "log", "tickvals": kept, "ticktext": [short(tick) for tick in kept]}


def point_text(label: str, point: Body) -> str:
    """All that a point of the closed loop is, for the pointer."""
    return "\n".join(
        (
            f"{label}, {users(point['concurrency'])}",
            f"{short(point['tokens_per_s'])} tokens/s, ± {percent(point['tokens_per_s_error'])}",
            f"{short(point['user_tokens_per_s']['p50'])} tokens/s for the median user",
            f"{signed(point['speedup'] - 1)} over no drafter",
            f"accepted length {point['accepted_length']:.2f} of {point['budget']:.2f} verified",
            f"acceptance {percent(point['acceptance'])}, drafting {percent(point['draft_share'])} of the time",
        )
    )


def _numbers(label: str, point: Body) -> tuple[str, ...]:
    return (
        f"{label}, {users(point['concurrency'])}",
        short(point["tokens_per_s"]),
        percent(point["tokens_per_s_error"]),
        short(point["user_tokens_per_s"]["p50"]),
        signed(point["speedup"] - 1),
        number(point["accepted_length"], digits=2),
        number(point["budget"], digits=2),
        percent(point["acceptance"]),
        "yes" if point["on_frontier"] else "no",
    )


def _frontier(scenario: Scenario) -> Trace:
    points = scenario.study["frontier"]
    return {
        "type": "scatter",
        "mode": "lines",
        "name": "frontier",
        "x": rounded([point["user_tokens_per_s"] for point in points]),
        "y": rounded([point["tokens_per_s"] for point in points]),
        "line": {"color": "var(--rule)", "width": 11},
        **hovering([f"{scenario.labels[point['policy']]}, {users(point['concurrency'])}" for point in points]),
    }


def by_load_figures(scenario: Scenario) -> list[Figure]:
    """Over the number of users: the gain, how much is verified, what is accepted."""

    def of(name: str) -> Callable[[Body], float | None]:
        def value(point: Body) -> float | None:
            found: float | None = point[name]
            return found

        return value

    return [
        _by_load(scenario, "speedup", "Tokens/s over no drafter", "times no drafter", of("speedup")),
        _by_load(scenario, "budget", "Tokens verified a round", "tokens, the anchor included", of("budget")),
        _by_load(scenario, "accepted", "Accepted length", "tokens a round, bonus included", of("accepted_length")),
        _by_load(scenario, "acceptance", "Acceptance of verified draft tokens", "share accepted", of("acceptance"),
                 tickformat=".0%"),
    ]  # fmt: skip


def _by_load(
    scenario: Scenario, what: str, title: str, unit: str, value: Callable[[Body], float | None], **more: Any
) -> Figure:
    traces, lines = [], []
    for name, points in scenario.points.items():
        values = [value(point) for point in points]
        lines.append((scenario.labels[name], *(number(item, digits=3) for item in values)))
        if name not in scenario.first_shown or all(item is None for item in values):
            continue
        loads = [point["concurrency"] for point in points]
        hover = [point_text(scenario.labels[name], point) for point in points]
        traces.append(scenario.line(name, x=loads, y=values, hover=hover))
    return Figure(
        name=f"{what}-{scenario.name}",
        title=title,
        traces=traces,
        layout=layout(x=load_axis(scenario.loads), y=axis(unit, rangemode="tozero", **more), **marked(scenario)),
        numbers=Grid(("policy", *map(users, scenario.loads)), tuple(lines)),
        note="The policies that the frontier opens with; the others are in the numbers.",
        height=380,
        size="half",
    )


def early_exit_figures(scenario: Scenario) -> list[Figure]:
    """What single requests that stop drafting gain, over drafting always and over no drafter."""
    rows = scenario.study["early_exit"]["rows"]
    return [
        _exits(scenario, rows, "gain", "Over the same policy that always drafts"),
        _exits(scenario, rows, "gain_over_none", "Over no drafter"),
        _exits(scenario, rows, "drafting_share", "Share of rounds that drafted"),
    ]


def _exits(scenario: Scenario, rows: Sequence[Body], what: str, title: str) -> Figure:
    series: dict[str, list[Body]] = {}
    for row in rows:
        series.setdefault(f"{row['policy']}+{row['early_exit']}", []).append(row)
    loads = sorted({int(row["concurrency"]) for row in rows})
    traces, lines = [], []
    for place, (name, group) in enumerate(series.items()):
        label, style = scenario.labels[name], Style(place, place)
        told = signed if what != "drafting_share" else percent
        hover = [
            f"{label}, {users(row['concurrency'])}: {told(row[what])}"
            + ("" if row["clear"] or what != "gain" else ", within the noise")
            for row in group
        ]
        trace = scenario.line(
            name, x=[row["concurrency"] for row in group], y=[row[what] for row in group], hover=hover
        )
        hollow = [what == "gain" and not row["clear"] for row in group]
        symbols = [f"{style.marker}-open" if open_ else style.marker for open_ in hollow]
        trace["line"] |= {"color": style.shade, "dash": style.dash}
        trace["marker"] |= {"color": style.shade, "symbol": symbols}
        traces.append(trace | {"visible": True})
        found = {int(row["concurrency"]): told(row[what]) for row in group}
        lines.append((label, *(found.get(load, MISSING) for load in loads)))
    return Figure(
        name=f"exit-{what.replace('_', '-')}-{scenario.name}",
        title=title,
        traces=traces,
        layout=layout(x=load_axis(loads), y=axis("", tickformat=".0%"), **marked(scenario)),
        numbers=Grid(("policy", *map(users, loads)), tuple(lines)),
        note="Hollow points lie within the noise." if what == "gain" else "",
        height=360,
        size="half",
    )


def load_axis(loads: Sequence[int]) -> dict[str, Any]:
    """Users, doubling from tick to tick."""
    return axis("users", type="log", tickvals=list(loads), ticktext=[str(load) for load in loads], showgrid=False)


def marked(scenario: Scenario) -> dict[str, Any]:
    """The sign over what is made up."""
    return watermark() if scenario.synthetic else {}
