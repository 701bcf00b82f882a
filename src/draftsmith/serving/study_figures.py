"""Figures of a serving study."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from draftsmith.figures import new_figure
from draftsmith.serving.study_text import labels

Body = Mapping[str, Any]

COLOURS = {"none": "black", "synchronous": "tab:orange", "asynchronous": "tab:red"}
MAPS = {"fixed": "Blues", "threshold": "Greens"}
LINES = {None: "-", "recent": ":", "worth": "--"}


def study_figures(body: Body) -> dict[str, Figure]:
    """By the stem of the file."""
    title = f"{body['key']}: {body['name']}" + (" (synthetic)" if body["synthetic"] else "")
    found = {
        "pareto": _pareto(body, title),
        "budget": _budget(body, title),
        "early_exit": _early_exit(body, title),
    }
    if body["staleness"] is not None:
        found["staleness"] = _staleness(body["staleness"], title)
    return found


def _pareto(body: Body, title: str) -> Figure:
    figure = new_figure(8.0, height=5.0, title=f"Throughput against speed of a user, {title}")
    panel = figure.subplots()
    named, styles = labels(body), _styles(body)
    for item in body["pareto"]:
        points = item["points"]
        panel.plot(
            [point["user_tokens_per_s"]["p50"] for point in points],
            [point["tokens_per_s"] for point in points],
            marker=".", linewidth=1, label=named[item["policy"]], **styles[item["policy"]],
        )  # fmt: skip
    front = body["frontier"]
    panel.scatter(
        [item["user_tokens_per_s"] for item in front], [item["tokens_per_s"] for item in front],
        s=60, facecolors="none", edgecolors="black", label="not beaten on both",
    )  # fmt: skip
    for anchor in body["anchors"]:
        panel.axvline(anchor["user_tokens_per_s"], color="grey", linewidth=0.6)
    panel.set_yscale("log")
    panel.set_xlabel("tokens a second of the median user")
    panel.set_ylabel("tokens a second of all users")
    panel.legend(fontsize=6, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _budget(body: Body, title: str) -> Figure:
    figure = new_figure(10.0, height=4.0, title=f"Verification by users at once, {title}")
    budgets, acceptance = figure.subplots(1, 2)
    named, styles = labels(body), _styles(body)
    for item in body["pareto"]:
        users = [point["concurrency"] for point in item["points"]]
        style = {"marker": ".", "linewidth": 1, "label": named[item["policy"]], **styles[item["policy"]]}
        budgets.plot(users, [point["budget"] for point in item["points"]], **style)
        shares = [np.nan if point["acceptance"] is None else point["acceptance"] for point in item["points"]]
        acceptance.plot(users, shares, **style)
    for panel, name in ((budgets, "tokens verified a round, anchor included"), (acceptance, "of them, accepted")):
        _users_axis(panel)
        panel.set_ylabel(name)
    acceptance.legend(fontsize=6, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _early_exit(body: Body, title: str) -> Figure:
    figure = new_figure(10.0, height=4.0, title=f"Early exit, {title}")
    gains, shares = figure.subplots(1, 2)
    named, styles = labels(body), _styles(body)
    rows = body["early_exit"]["rows"]
    for name in dict.fromkeys(f"{row['policy']}+{row['early_exit']}" for row in rows):
        mine = [row for row in rows if f"{row['policy']}+{row['early_exit']}" == name]
        users = [row["concurrency"] for row in mine]
        style = {"marker": ".", "linewidth": 1, "label": named[name], **styles[name]}
        gains.plot(users, [100 * row["gain"] for row in mine], **style)
        shares.plot(users, [row["drafting_share"] for row in mine], **style)
    gains.axhline(0.0, color="black", linewidth=0.6)
    for panel, what in ((gains, "throughput over drafting always, %"), (shares, "share of rounds that draft")):
        _users_axis(panel)
        panel.set_ylabel(what)
    shares.legend(fontsize=6, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _staleness(found: Body, title: str) -> Figure:
    figure = new_figure(9.5, height=3.6, title=f"Staleness and bursts at {found['load']:.0%} of capacity, {title}")
    shape = (len(found["burst_factors"]), len(found["staleness"]))
    panels = figure.subplots(1, 2)
    for panel, name, what in zip(
        panels,
        ("fresh_change", "fresh_p95_change"),
        ("tokens/s of the median user", "time to the end, 95th percentile"),
        strict=True,
    ):
        values = 100 * np.array([cell[name] for cell in found["cells"]]).reshape(shape)
        most = max(1.0, float(np.abs(values[:, 1:]).max()))  # the synchronous column may be far off
        colours = "RdBu" if name == "fresh_change" else "RdBu_r"
        panel.imshow(values, cmap=colours, vmin=-2 * most, vmax=2 * most, aspect="auto")
        for (row, column), value in np.ndenumerate(values):
            panel.text(column, row, f"{value:+.1f}", ha="center", va="center", fontsize=8)
        panel.set_xticks(range(shape[1]), ["sync" if steps == 0 else str(steps) for steps in found["staleness"]])
        panel.set_yticks(range(shape[0]), [f"{factor:g}" for factor in found["burst_factors"]])
        panel.set_xlabel("staleness, steps")
        panel.set_ylabel("burst factor")
        panel.set_title(f"{what}, % over a staleness of {found['staleness'][1]}", fontsize=9)
    return figure


def _styles(body: Body) -> dict[str, dict[str, Any]]:
    """Colour and line of each policy; of one kind they go from light to dark."""
    found: dict[str, dict[str, Any]] = {}
    for kind, colours in MAPS.items():
        values = sorted({item["parameter"] for item in body["policies"] if item["kind"] == kind})
        for item in body["policies"]:
            if item["kind"] == kind:
                shade = 0.35 + 0.6 * (values.index(item["parameter"]) + 1) / len(values)
                found[item["name"]] = {"color": colormaps[colours](shade), "linestyle": LINES[item["early_exit"]]}
    for item in body["policies"]:
        if item["kind"] in COLOURS:
            found[item["name"]] = {"color": COLOURS[item["kind"]], "linestyle": LINES[item["early_exit"]]}
    return found


def _users_axis(panel: Axes) -> None:
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.set_xlabel("users at once")
