"""The figure of a study: conditional acceptance of every drafter, by benchmark and temperature."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from draftsmith.figures import new_figure

MIN_ROUNDS = 10


def study_figure(body: Mapping[str, Any]) -> Figure:
    """Conditional acceptance over position from the body of study.json: a panel a benchmark (columns) and temperature
    (rows), a line a drafter with its 95 % intervals.

    A position is drawn where at least MIN_ROUNDS rounds got that far.
    """
    drafters = [row["drafter"] for row in body["training"]]
    benchmarks = list(dict.fromkeys(row["benchmark"] for row in body["rows"]))
    temperatures = list(dict.fromkeys(row["temperature"] for row in body["rows"]))
    figure = new_figure(
        3.4 * len(benchmarks),
        height=0.9 + 2.7 * len(temperatures),
        title=f"Conditional acceptance by position, target {body['data']['target']}",
    )
    panels = figure.subplots(len(temperatures), len(benchmarks), squeeze=False, sharex=True, sharey=True)
    for row in body["rows"]:
        index = drafters.index(row["drafter"])
        panel = panels[temperatures.index(row["temperature"])][benchmarks.index(row["benchmark"])]
        slots = [slot for slot, count in enumerate(row["num_conditional"]) if count >= MIN_ROUNDS]
        # Side by side, so that six intervals at one position can be told apart.
        places = [slot + 1 + 0.08 * (index - (len(drafters) - 1) / 2) for slot in slots]
        shares = [row["conditional_acceptance"][slot] for slot in slots]
        panel.plot(places, shares, "o-", ms=3, linewidth=1, color=f"C{index}", label=row["drafter"])
        for place, slot in zip(places, slots, strict=True):
            interval = row["conditional_acceptance_interval"][slot]
            if interval is not None:
                panel.plot([place, place], interval, color=f"C{index}", linewidth=1, alpha=0.5)
        panel.set(ylim=(0, 1))
        panel.set_title(f"{row['benchmark']}, temperature {row['temperature']:g}", fontsize=9)
    for panel in panels[-1]:
        panel.set_xlabel("position")
    for line in panels:
        line[0].set_ylabel("share accepted")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=7, loc="outside lower center", ncols=3)
    return figure
