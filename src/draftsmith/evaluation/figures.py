"""Figures of evaluation and training: accepted length by benchmark, acceptance by position, loss curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from draftsmith.errors import DraftsmithError
from draftsmith.evaluation.summary import KeyReports
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

    Where a benchmark was run at several batch sizes, the first one is drawn. Raises DraftsmithError if nothing was
    evaluated at `temperature`.
    """
    tables = _tables(reports, temperature=temperature)
    benchmarks = list(dict.fromkeys(name for table in tables.values() for name in table))
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
    benchmarks = list(dict.fromkeys(name for table in tables.values() for name in table))
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
    """Per key with results at `temperature`: benchmark -> its first row."""
    tables: dict[str, dict[str, Mapping[str, Any]]] = {}
    for item in reports:
        for row in item.evaluate["rows"] if item.evaluate is not None else ():
            if row["temperature"] == temperature:
                tables.setdefault(item.key, {}).setdefault(row["benchmark"], row)
    if not tables:
        raise DraftsmithError("nothing was evaluated at this temperature", got=temperature)
    return tables
