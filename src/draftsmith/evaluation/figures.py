"""Figures of evaluation and training, drawn from report bodies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from draftsmith.errors import DraftsmithError
from draftsmith.evaluation.summary import KeyReports
from draftsmith.evaluation.tables import benchmark_columns
from draftsmith.figures import new_figure

GROUP_WIDTH = 0.8


@dataclass(frozen=True)
class Curve:
    """One training curve: a value at each step."""

    label: str
    steps: Sequence[int]
    values: Sequence[float]


def accepted_length_figure(reports: Sequence[KeyReports], *, temperature: float) -> Figure:
    """Bars of accepted length (bonus included) by benchmark, one a key, with 95 % intervals; plain decoding is 1.

    Raises DraftsmithError if nothing was evaluated at `temperature`.
    """
    tables = _tables(reports, temperature=temperature)
    benchmarks = list(benchmark_columns(_evaluated(reports, temperature=temperature), temperature=temperature))
    figure = new_figure(
        2.0 + 1.1 * len(benchmarks), height=4.0, title=f"Accepted length, bonus included (temperature {temperature:g})"
    )
    panel = figure.subplots()
    width = GROUP_WIDTH / len(tables)
    for index, (key, table) in enumerate(tables.items()):
        for place, name in enumerate(benchmarks):
            if name not in table:
                continue
            value, interval = table[name]["accepted_length"], table[name]["accepted_length_interval"]
            x = place + (index - (len(tables) - 1) / 2) * width
            label = key if name == next(iter(table)) else None
            panel.bar(x, value, width=0.92 * width, color=f"C{index}", label=label)
            if interval is not None:
                panel.plot([x, x], interval, color="0.2", linewidth=1)
            top = value if interval is None else interval[1]
            panel.text(x, top, f"{value:.2f}", ha="center", va="bottom", fontsize=7)
    panel.axhline(1.0, color="0.4", linewidth=1, linestyle="--", label="plain decoding")
    panel.set_xticks(range(len(benchmarks)), benchmarks)
    panel.set_ylabel("tokens a round")
    figure.legend(fontsize=7, loc="outside lower center")
    return figure


def conditional_acceptance_figure(reports: Sequence[KeyReports], *, temperature: float) -> Figure:
    """Conditional acceptance over position, a panel a benchmark and a line a key, with 95 % intervals."""
    tables = _tables(reports, temperature=temperature)
    benchmarks = list(benchmark_columns(_evaluated(reports, temperature=temperature), temperature=temperature))
    num_columns = min(len(benchmarks), 3)
    num_rows = -(-len(benchmarks) // num_columns)
    figure = new_figure(
        3.4 * num_columns,
        height=2.9 * num_rows,
        title=f"Conditional acceptance by position (temperature {temperature:g})",
    )
    axes = figure.subplots(num_rows, num_columns, squeeze=False, sharey=True).ravel()
    for panel in axes[len(benchmarks) :]:
        panel.set_axis_off()
    for panel, name in zip(axes, benchmarks, strict=False):
        for index, (key, table) in enumerate(tables.items()):
            if name not in table:
                continue
            row = table[name]
            known = [slot for slot, share in enumerate(row["conditional_acceptance"]) if share is not None]
            positions = [slot + 1 for slot in known]
            panel.plot(
                positions,
                [row["conditional_acceptance"][slot] for slot in known],
                "o-",
                ms=3,
                color=f"C{index}",
                label=key,
            )
            intervals = [row["conditional_acceptance_interval"][slot] for slot in known]
            if all(interval is not None for interval in intervals):
                lows, highs = [item[0] for item in intervals], [item[1] for item in intervals]
                panel.fill_between(positions, lows, highs, color=f"C{index}", alpha=0.15, linewidth=0)
        panel.set(ylim=(0, 1), xlabel="position")
        panel.set_title(name, fontsize=9)
        panel.legend(fontsize=7)
    axes[0].set_ylabel("share accepted")
    return figure


def output_position_figure(reports: Sequence[KeyReports], *, temperature: float) -> Figure:
    """Accepted length (bonus included) over the position in the answer at which rounds begin, a line a key.

    Points stand at the middle of their bins on a logarithmic axis, with 95 % intervals over prompts.
    """
    figure = new_figure(6.0, height=3.6, title=f"Accepted length by output position (temperature {temperature:g})")
    panel = figure.subplots()
    bins: dict[tuple[int, int], None] = {}
    for index, item in enumerate(_evaluated(reports, temperature=temperature)):
        rows = [row for row in item["output_positions"] if row["temperature"] == temperature]
        bins |= dict.fromkeys((row["first"], row["last"]) for row in rows)
        # Side by side, so that the intervals of two keys can be told apart.
        places = [((row["first"] + row["last"] + 1) / 2) * 1.04**index for row in rows]
        panel.plot(places, [row["accepted_length"] for row in rows], "o-", ms=3, color=f"C{index}", label=item["key"])
        for place, row in zip(places, rows, strict=True):
            if row["accepted_length_interval"] is not None:
                panel.plot([place, place], row["accepted_length_interval"], color=f"C{index}", linewidth=1, alpha=0.5)
    panel.set_xscale("log", base=2)
    panel.set_xticks([(first + last + 1) / 2 for first, last in bins], [f"{first}-{last}" for first, last in bins])
    panel.minorticks_off()
    panel.set(xlabel="position in the answer at which a round begins", ylabel="tokens a round")
    panel.legend(fontsize=7)
    return figure


def threshold_figure(reports: Sequence[KeyReports], *, temperature: float) -> Figure:
    """What a static confidence threshold would do, a line a key with a confidence head: accepted (left, solid) and
    rejected draft tokens a round (left, dashed), and the share accepted (right)."""
    figure = new_figure(8.4, height=3.6, title=f"Verification by confidence threshold (temperature {temperature:g})")
    counts, rates = figure.subplots(1, 2)
    for index, item in enumerate(_evaluated(reports, temperature=temperature)):
        rows = [row for row in item["thresholds"] if row["temperature"] == temperature]
        if not rows:
            continue
        steps = [row["threshold"] for row in rows]
        for name, style in (("accepted", "-"), ("rejected", "--")):
            values = [row[name] / row["num_rounds"] for row in rows]
            counts.plot(steps, values, style, color=f"C{index}", label=f"{item['key']}: {name}")
        known = [row for row in rows if row["acceptance_rate"] is not None]
        rates.plot(
            [row["threshold"] for row in known],
            [row["acceptance_rate"] for row in known],
            color=f"C{index}",
            label=item["key"],
        )
    counts.set(xlabel="threshold", ylabel="draft tokens a round")
    rates.set(xlabel="threshold", ylabel="share of verified tokens accepted", ylim=(0, 1))
    figure.legend(*counts.get_legend_handles_labels(), fontsize=7, loc="outside lower center", ncols=2)
    return figure


def speed_figure(reports: Sequence[KeyReports]) -> Figure:
    """Tokens per second by batch size, a panel a temperature and a line a key; plain decoding dashed.

    Raises DraftsmithError if no speed was measured.
    """
    bodies = [item.evaluate for item in reports if item.evaluate is not None and item.evaluate["speed"]]
    if not bodies:
        raise DraftsmithError("no speed was measured", where="params.yaml: evaluate.speed")
    found = sorted({row["temperature"] for body in bodies for row in body["speed"]})
    figure = new_figure(4.2 * len(found), height=3.6, title="Speed by batch size")
    panels = figure.subplots(1, len(found), squeeze=False, sharey=True)[0]
    for panel, temperature in zip(panels, found, strict=True):
        for index, body in enumerate(bodies):
            rows = [row for row in body["speed"] if row["temperature"] == temperature]
            rows.sort(key=lambda row: row["batch_size"])
            lines = (("tokens_per_s", "o-", body["key"]), ("plain_tokens_per_s", "o--", "_plain"))
            for name, style, label in lines:
                panel.plot(
                    [row["batch_size"] for row in rows],
                    [row[name] for row in rows],
                    style,
                    ms=3,
                    color=f"C{index}",
                    label=label,
                )
        panel.plot([], [], "--", color="0.4", label="plain decoding, same run")
        sizes = sorted({row["batch_size"] for body in bodies for row in body["speed"]})
        panel.set_xscale("log", base=2)
        panel.set_xticks(sizes, [str(size) for size in sizes])
        panel.minorticks_off()
        panel.set(xlabel="requests in flight", ylim=(0, None))
        panel.set_title(f"temperature {temperature:g}", fontsize=9)
    panels[0].set_ylabel("tokens per second")
    figure.legend(*panels[0].get_legend_handles_labels(), fontsize=7, loc="outside lower center", ncols=2)
    return figure


def loss_figure(curves: Sequence[Curve], *, title: str) -> Figure:
    """Training curves over steps in one panel."""
    figure = new_figure(6.0, height=3.6, title=title)
    panel = figure.subplots()
    for curve in curves:
        panel.plot(curve.steps, curve.values, linewidth=1, label=curve.label)
    panel.set(xlabel="step", ylabel="loss")
    panel.legend(fontsize=7)
    return figure


def _tables(reports: Sequence[KeyReports], *, temperature: float) -> dict[str, dict[str, Mapping[str, Any]]]:
    """Per key with results at `temperature`: benchmark -> its row."""
    return {
        body["key"]: {row["benchmark"]: row for row in body["rows"] if row["temperature"] == temperature}
        for body in _evaluated(reports, temperature=temperature)
    }


def _evaluated(reports: Sequence[KeyReports], *, temperature: float) -> list[Mapping[str, Any]]:
    """The bodies with rows at `temperature`; raises DraftsmithError if there is none."""
    bodies = [item.evaluate for item in reports if item.evaluate is not None]
    found = [body for body in bodies if any(row["temperature"] == temperature for row in body["rows"])]
    if not found:
        raise DraftsmithError("nothing was evaluated at this temperature", got=temperature)
    return found
