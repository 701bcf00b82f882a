"""What is written of a profile beside its JSON: the points as CSV, a figure, a few lines of text."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from draftsmith.figures import new_figure
from draftsmith.serving.cost_table import CostTable
from draftsmith.serving.profile import Profile
from draftsmith.serving.profile_points import Point, Spread

PARTS = ("draft_s", "verify_s", "upkeep_s")
QUANTILES = ("median", "p10", "p90")
SHOWN_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
RISE = 0.1
"""Of a rate over that of fewer tokens: what SGLang's profiler warns of."""


def profile_csv(profile: Profile) -> str:
    """A line a point, times in seconds."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    shape = ("sweep", "num_requests", "batch_tokens", "context_tokens", "num_steps")
    writer.writerow([*shape, *(f"{part}_{quantile}" for part in PARTS for quantile in QUANTILES)])
    for point in profile.points:
        spreads: list[Spread | None] = [getattr(point, part) for part in PARTS]
        cells = [getattr(spread, name) if spread else None for spread in spreads for name in QUANTILES]
        writer.writerow([
            point.sweep, point.num_requests, point.batch_tokens, f"{point.context_tokens:.1f}", point.num_steps,
            *("" if cell is None else f"{cell:.6f}" for cell in cells),
        ])  # fmt: skip
    return stream.getvalue()


def profile_figure(profile: Profile) -> Figure:
    """Verification by batch tokens, as measured and monotone, and drafting and upkeep by requests; deciles as bars."""
    marked = " (synthetic: nothing was measured)" if profile.origin.synthetic else ""
    figure = new_figure(9.6, height=3.8, title=f"Cost of a step of {profile.origin.key or 'an engine'}{marked}")
    tokens, requests = figure.subplots(1, 2, width_ratios=(2, 1))
    _draw_tokens(tokens, profile)
    _draw_requests(requests, profile)
    return figure


def profile_lines(profile: Profile) -> Iterator[str]:
    """What a person wants to know of a profile, a line each."""
    origin = profile.origin
    told = ", ".join(f"{name} {value}" for name, value in origin.machine.items())
    yield f"profile of {origin.key or 'an engine'}{' (synthetic)' if origin.synthetic else ''}: {told or 'no machine'}"
    if origin.note:
        yield origin.note
    if profile.points:
        steps = sum(point.num_steps for point in profile.points if point.sweep != "requests")
        yield f"measured: {steps} steps, {len(profile.points)} points, {len(profile.prefill)} sizes of prefill"
    yield from table_lines(profile.jagged, monotone=profile.table)
    for name, cost in (("drafting", profile.drafting), ("upkeep", profile.upkeep)):
        if cost is not None:
            pairs = zip(cost.num_requests, cost.seconds, strict=True)
            yield f"{name}, ms by requests: " + ", ".join(f"{number}: {1e3 * value:.2f}" for number, value in pairs)
    if profile.drafting is not None and profile.drafting.fixed_share < 1:
        yield f"drafting, share that shorter blocks do not spare: {100 * profile.drafting.fixed_share:.0f} %"
    if profile.prefill_cost is not None:
        prefill = profile.prefill_cost
        yield f"prefill: {prefill.tokens_per_s:.0f} tokens/s and {1e3 * prefill.seconds_per_pass:.1f} ms a pass"
    if profile.context_cost is not None:
        context = profile.context_cost
        yield (
            f"context: {1e6 * context.seconds_per_token:.3g} us more for each token beyond {context.profiled_tokens}"
            " a request"
        )


def table_lines(table: CostTable, *, monotone: CostTable) -> Iterator[str]:
    """A table of verification, and what its monotone form changes."""
    most = int(table.batch_tokens[-1])
    yield f"verification: {len(table.batch_tokens)} points up to {most} tokens, meant for {table.max_batch_tokens}"
    shown = sorted({*(number for number in SHOWN_TOKENS if number <= most), most})
    pairs = zip(shown, 1e3 / monotone.look_up(shown), strict=True)
    yield "verification, ms by batch tokens: " + ", ".join(f"{number}: {value:.2f}" for number, value in pairs)
    moved = monotone.look_up(table.batch_tokens) / table.steps_per_s - 1
    at = int(np.abs(moved).argmax())
    yield (
        f"monotone against measured: at most {100 * abs(moved[at]):.1f} % apart (at {table.batch_tokens[at]} tokens), "
        f"{num_rises(table)} rises of more than {100 * RISE:.0f} %"
    )


def num_rises(table: CostTable) -> int:
    """Points whose rate is more than a tenth above that of the point before, which more tokens cannot be."""
    return int((table.steps_per_s[1:] > (1 + RISE) * table.steps_per_s[:-1]).sum())


def _draw_tokens(panel: Axes, profile: Profile) -> None:
    numbers = profile.jagged.batch_tokens
    panel.plot(numbers, 1e3 / profile.jagged.steps_per_s, color="C0", linewidth=1, alpha=0.6, label="as measured")
    panel.plot(numbers, 1e3 / profile.table.look_up(numbers), color="C1", linewidth=1.5, label="monotone")
    found = [point for point in profile.points if point.sweep == "tokens"]
    for index, requests in enumerate(sorted({point.num_requests for point in found})):
        chosen = [point for point in found if point.num_requests == requests]
        places = [float(point.batch_tokens or 0) for point in chosen]
        _bars(panel, places, [point.verify_s for point in chosen], colour=f"C{2 + index}", label=f"{requests} requests")
    panel.set(xlabel="batch tokens of a step", ylabel="verification, ms", xlim=(0, None), ylim=(0, None))
    panel.legend(fontsize=7)


def _draw_requests(panel: Axes, profile: Profile) -> None:
    found: list[Point] = [point for point in profile.points if point.sweep == "requests"]
    for name, cost, colour in (("drafting", profile.drafting, "C0"), ("upkeep", profile.upkeep, "C1")):
        if cost is None:
            continue
        panel.plot(cost.num_requests, [1e3 * value for value in cost.seconds], color=colour, linewidth=1)
        spreads = [point.draft_s if name == "drafting" else point.upkeep_s for point in found]
        _bars(panel, [point.num_requests for point in found], spreads, colour=colour, label=name)
        if not found:
            panel.plot([], [], color=colour, label=name)
    panel.set(xlabel="requests of a step", ylabel="ms", xlim=(0, None), ylim=(0, None))
    if panel.get_legend_handles_labels()[0]:
        panel.legend(fontsize=7)


def _bars(panel: Axes, places: Sequence[float], spreads: Sequence[Spread | None], *, colour: str, label: str) -> None:
    known = [(place, spread) for place, spread in zip(places, spreads, strict=True) if spread is not None]
    if not known:
        return
    panel.errorbar(
        [place for place, _ in known],
        [1e3 * spread.median for _, spread in known],
        yerr=[
            [1e3 * (spread.median - spread.p10) for _, spread in known],
            [1e3 * (spread.p90 - spread.median) for _, spread in known],
        ],
        fmt="o", ms=2.5, elinewidth=0.7, color=colour, label=label,
    )  # fmt: skip
