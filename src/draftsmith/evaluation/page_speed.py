"""Figures of distributions and of time: histograms of rounds, answers and steps; speed over the batch size."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from draftsmith.evaluation.grid import MISSING, Grid, number, percent
from draftsmith.evaluation.page_html import plot_text
from draftsmith.evaluation.page_model import Body, Page, Shown
from draftsmith.evaluation.page_plot import (
    FULL,
    HOLLOW,
    Figure,
    Points,
    Trace,
    axis,
    bar,
    by_drafter,
    colour,
    layout,
    line,
)

NUM_BINS = 24
STEP_QUANTILE = 0.99
"""Steps slower than this quantile share the last bin, or a single pause would squeeze all others into one."""
STAGES = (
    ("draft", "draft_ms", "/"),
    ("verify", "verify_ms", ""),
    ("sampling", "sample_ms", "x"),
)
ROOM = 1.25
"""How far an axis goes past the longest bar, for the percentage behind it."""
PLAIN_STAGES = (("verify", "plain_verify_ms"), ("sampling", "plain_sample_ms"))


def accepted_histogram(page: Page, temperature: float) -> Figure:
    """Share of rounds that accepted 0..K draft tokens."""
    traces, lines = [], []
    for item in page.evaluated(temperature):
        for entry in item.at("accepted_histogram", temperature):
            counts: list[int] = entry["counts"]
            total = sum(counts)
            places = [str(accepted) for accepted in range(len(counts))]
            hover = [
                f"{item.label}: {count:,} of {total:,} rounds ({percent(count / total)}) accepted {place}"
                for place, count in zip(places, counts, strict=True)
            ]
            traces.append(bar(item, Points(places, [count / total for count in counts], hover=hover)))
            lines += [
                (place, item.label, f"{count:,}", percent(count / total))
                for place, count in zip(places, counts, strict=True)
            ]
    return Figure(
        name=f"accepted-histogram-{temperature:g}",
        title=f"Accepted draft tokens a round, temperature {temperature:g}",
        traces=traces,
        layout=layout(
            x=axis("accepted draft tokens (bonus not counted)", type="category", showgrid=False),
            y=axis("share of rounds", tickformat=".0%", rangemode="tozero"),
            barmode="group",
        ),
        numbers=Grid(("accepted", "drafter", "rounds", "share"), tuple(lines)),
        size="half",
    )


def length_histogram(page: Page, temperature: float) -> Figure:
    """Share of answers by their length in tokens."""
    drafters = page.evaluated(temperature)
    longest = max(item.evaluate["max_new_tokens"] for item in drafters)
    width = -(-longest // NUM_BINS)
    edges = np.arange(0, longest + width, width) + 0.5  # whole numbers never lie on an edge
    labels = [f"{int(low + 0.5)}–{int(high - 0.5)} tokens" for low, high in pairwise(edges)]
    traces, lines = [], []
    for item in drafters:
        for entry in item.at("answer_lengths", temperature):
            trace, rows = _steps(item, entry["lengths"], edges=edges, labels=labels, what="answers")
            traces.append(trace)
            lines += rows
    return Figure(
        name=f"answer-lengths-{temperature:g}",
        title=f"Length of answers, temperature {temperature:g}",
        traces=traces,
        layout=layout(
            x=axis("tokens of an answer", range=[0, float(edges[-1])]),
            y=axis("share of answers", tickformat=".0%", rangemode="tozero"),
        ),
        numbers=Grid(("length", "drafter", "answers", "share"), tuple(lines)),
        size="half",
    )


def step_histogram(page: Page, temperature: float, batch_size: int) -> Figure:
    """Share of full-batch steps by their time."""
    found = _measured(page, temperature, batch_size)
    times = np.concatenate([np.asarray(point["step_ms"], np.float64) for _, point in found])
    low, high = float(times.min()), float(np.quantile(times, STEP_QUANTILE))
    edges = np.linspace(low, high if high > low else low + 1.0, NUM_BINS + 1)
    labels = [f"{start:.3g}–{end:.3g} ms" for start, end in pairwise(edges)]
    labels[-1] = f"{edges[-2]:.3g} ms and more"
    traces, lines = [], []
    for item, point in found:
        clipped = np.minimum(np.asarray(point["step_ms"], np.float64), edges[-1])
        trace, rows = _steps(item, clipped, edges=edges, labels=labels, what="steps")
        traces.append(trace)
        lines += rows
    return Figure(
        name=f"step-times-{batch_size}-{temperature:g}",
        title=f"Time of a step, batch size {batch_size}, temperature {temperature:g}",
        traces=traces,
        layout=layout(
            x=axis("milliseconds a step", range=[float(edges[0]), float(edges[-1])]),
            y=axis("share of steps", tickformat=".0%", rangemode="tozero"),
        ),
        numbers=Grid(("time", "drafter", "steps", "share"), tuple(lines)),
        height=300,
        size="panel",
    )


def throughput_figure(page: Page, temperature: float) -> Figure:
    """Tokens a second over the batch size, speculative and plain."""
    traces: list[Trace] = []
    lines = []
    sizes = batch_sizes(page, temperature)
    for item in page.drafters:
        points = item.speed(temperature)
        if not points:
            continue
        places = [str(size) for size in points]
        for name, column, style in (
            (item.label, "tokens_per_s", FULL),
            (f"plain decoding (run of {item.label})", "plain_tokens_per_s", HOLLOW),
        ):
            values = [point[column] for point in points.values()]
            hover = [
                f"{name}, batch size {place}: {number(value, digits=1)} tokens/s"
                + (f", {point['speedup']:.2f} times plain" if column == "tokens_per_s" else "")
                for place, value, point in zip(places, values, points.values(), strict=True)
            ]
            traces.append(line(item, Points(places, values, hover=hover), name=name, style=style))
        lines += [
            (
                place,
                item.label,
                number(point["tokens_per_s"], digits=1),
                number(point["plain_tokens_per_s"], digits=1),
                f"{point['speedup']:.2f}",
                percent(point["overhead_share"]),
                *(number(point[column], digits=2) for _, column, _ in STAGES),
                *(number(point[column], digits=2) for _, column in PLAIN_STAGES),
                f"{point['num_steps']:,}",
                f"{point['num_rounds']:,}",
            )
            for place, point in zip(places, points.values(), strict=True)
        ]
    grid = Grid(
        ("batch size", "drafter", "tokens/s", "plain tokens/s", "times plain", "overhead", "draft ms", "verify ms",
         "sampling ms", "plain: verify ms", "plain: sampling ms", "steps", "rounds"),
        tuple(lines),
    )  # fmt: skip
    return Figure(
        name=f"throughput-{temperature:g}",
        title=f"Tokens a second by batch size, temperature {temperature:g}",
        traces=traces,
        layout=layout(
            x=axis("batch size (requests in flight)", type="category", categoryorder="array",
                   categoryarray=[str(size) for size in sizes]),
            y=axis("tokens a second, all requests", rangemode="tozero"),
        ),
        numbers=grid,
        height=380,
    )  # fmt: skip


def step_time_figure(page: Page, temperature: float, batch_size: int) -> Figure:
    """Where the time of a step goes: draft, verify and sampling stacked, speculative above plain."""
    found = _measured(page, temperature, batch_size)
    values: dict[str, list[tuple[str, float, str]]] = {name: [] for name, _, _ in STAGES}
    notes, lines, ends = [], [], []
    for item, point in found:
        whole = sum(point[column] for _, column, _ in STAGES)
        plain = sum(point[column] for _, column in PLAIN_STAGES)
        bars = (
            (item.label, whole, [(name, point[column]) for name, column, _ in STAGES]),
            (f"{item.label}: plain", plain, [(name, point[column]) for name, column in PLAIN_STAGES]),
        )
        ends += [(place, total) for place, total, _ in bars]
        for place, total, parts in bars:
            for name, value in parts:
                hover = f"{place}: {name} {value:.3g} ms of {total:.3g} ms ({percent(value / total)})"
                values[name].append((place, value, hover))
                lines.append((place, name, number(value, digits=3), percent(value / total)))
        notes.append((item.label, whole, percent(point["overhead_share"])))
    traces: list[Trace] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": [plot_text(place) for place, _, _ in values[name]],
            "x": [value for _, value, _ in values[name]],
            "marker": {
                "color": f"var(--stage-{index})",
                "pattern": {
                    "shape": pattern,
                    "fillmode": "overlay",
                    "fgcolor": "var(--card)",
                    "size": 7,
                    "solidity": 0.15,
                },
                "line": {"width": 0},
            },
            "customdata": [plot_text(hover) for _, _, hover in values[name]],
            "hovertemplate": "%{customdata}<extra></extra>",
        }
        for index, (name, _, pattern) in enumerate(STAGES)
    ]
    return Figure(
        name=f"step-parts-{batch_size}-{temperature:g}",
        title=f"A step at batch size {batch_size}, temperature {temperature:g}",
        traces=traces,
        layout=layout(
            x=axis("milliseconds a step (medians)", range=[0, ROOM * max(total for *_, total in ends)]),
            y=axis("", type="category", categoryorder="array",
                   categoryarray=[plot_text(place) for place, _ in reversed(ends)]),
            barmode="stack",
            annotations=[
                {"x": whole, "y": plot_text(place), "xanchor": "left", "xshift": 3, "showarrow": False, "text": text,
                 "font": {"size": 12, "color": "var(--ink)"}}
                for place, whole, text in notes
            ],
        ),
        numbers=Grid(("decoding", "part", "ms", "share of the step"), tuple(lines)),
        height=140 + 56 * len(found),
        size="panel",
    )  # fmt: skip


def batch_sizes(page: Page, temperature: float) -> list[int]:
    """The batch sizes at which any drafter's speed was measured, ascending."""
    return sorted({size for item in page.drafters for size in item.speed(temperature)})


def speed_basis(page: Page, temperature: float) -> str:
    """What is behind the times at a temperature: a run of its own, with so many steps."""
    found = [(item, item.speed(temperature)) for item in page.drafters]
    measured = [(item, points) for item, points in found if points]
    steps = "; ".join(
        f"{item.label} " + ", ".join(f"{point['num_steps']:,} (batch size {size})" for size, point in points.items())
        for item, points in measured
    )
    drafters = [item for item, _ in measured]
    machine = by_drafter(drafters, [str(item.evaluate["machine"]) for item in drafters])
    return f"Times of steps: a run of their own at temperature {temperature:g}; steps: {steps}. Machine: {machine}."


def speed_grid(page: Page, temperature: float) -> Grid:
    """Speed by benchmark at the evaluation's own batch size, and whether the answers are those of plain decoding."""
    lines = []
    for benchmark in page.benchmarks:
        for item in page.evaluated(temperature):
            row = item.rows(temperature).get(benchmark.name)
            if row is None:
                continue
            same = row["identical_to_plain"]
            lines.append(
                (
                    benchmark.name,
                    item.label,
                    str(row["batch_size"]),
                    f"{row['num_tokens']:,}",
                    number(row["tokens_per_s"], digits=1),
                    number(row["plain_tokens_per_s"], digits=1),
                    number(row["speedup"], digits=2),
                    MISSING if same is None else percent(same),
                )
            )
    return Grid(
        ("benchmark", "drafter", "batch size", "tokens", "tokens/s", "plain tokens/s", "times plain",
         "answers identical to plain"),
        tuple(lines),
    )  # fmt: skip


def _measured(page: Page, temperature: float, batch_size: int) -> list[tuple[Shown, Body]]:
    found = [(item, item.speed(temperature).get(batch_size)) for item in page.drafters]
    return [(item, point) for item, point in found if point is not None]


def _steps(
    shown: Shown, values: Sequence[float] | np.ndarray, *, edges: np.ndarray, labels: Sequence[str], what: str
) -> tuple[Trace, list[tuple[str, ...]]]:
    """A histogram as an outline, which can lie over others, and its rows of numbers."""
    counts = np.histogram(values, bins=edges)[0]
    total = int(counts.sum())
    assert total == len(values), "every value lies in a bin"
    shares = [count / total for count in counts.tolist()]
    hover = [
        f"{shown.label}, {label}: {count:,} of {total:,} {what} ({percent(share)})"
        for label, count, share in zip(labels, counts.tolist(), shares, strict=True)
    ]
    # A bin's share holds from its left edge on; the last one is said twice, to reach the right edge.
    outline = Points(edges.tolist(), [*shares, shares[-1]], hover=[*hover, hover[-1]])
    trace = line(shown, outline, mode="lines")
    trace["line"]["shape"] = "hv"
    trace["fill"] = "tozeroy"
    trace["fillcolor"] = colour(shown.slot).replace(")", "-wash)")
    rows: list[tuple[str, ...]] = [
        (label, shown.label, f"{count:,}", percent(share))
        for label, count, share in zip(labels, counts.tolist(), shares, strict=True)
        if count
    ]
    return trace, rows
