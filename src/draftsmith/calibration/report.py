"""What calibration found: the body of calibrate.json, its series and figure, and SGLang's temperature sidecar."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import NormalDist
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from draftsmith.calibration.collect import RoundArrays, RoundSplit
from draftsmith.calibration.ece import (
    NullEce,
    brier_score,
    expected_calibration_error,
    null_ece_draws,
    reliability_bins,
    roc_auc,
)
from draftsmith.calibration.intervals import calibration_intervals
from draftsmith.calibration.sts import survival
from draftsmith.errors import CalibrationError
from draftsmith.figures import new_figure

SCHEMA_VERSION = 1
NULL_DRAWS = 1000
NORMAL_975 = NormalDist().inv_cdf(0.975)

MEASURES = (
    "ece_before",
    "ece_after",
    "ece_equal_mass_before",
    "ece_equal_mass_after",
    "null_ece_before",
    "null_ece_after",
    "null_ece_quantile_95_before",
    "null_ece_quantile_95_after",
    "brier_before",
    "brier_after",
    "auc",
    "auc_survival_before",
    "auc_survival_after",
    "reliability_before",
    "reliability_after",
)
"""Fields of the body that hold one entry a position."""

EXTRAS = ("intervals", "by_domain", "online")
"""Fields of the body that hold more than one entry a position: see `intervals`, `domains` and `online`."""

MEANS = (
    "mean_ece_before",
    "mean_ece_after",
    "null_mean_ece_before",
    "null_mean_ece_after",
    "null_mean_ece_quantile_95_before",
    "null_mean_ece_quantile_95_after",
)
"""Fields of the body that hold the mean ECE over positions, and what perfect calibration would show of it."""


def calibration_body(
    split: RoundSplit, *, temperatures: Sequence[float] | NDArray[np.float64], num_bins: int, seed: int
) -> dict[str, Any]:
    """The body of calibrate.json. All measures are of the held-out rounds, one entry a position 1..K.

    `before` is at temperature 1, `after` at `temperatures`. ECE, Brier score, reliability and `auc_survival` judge the
    survival a_k (cumulative product) against "the prefix of length k was accepted", over rounds whose slot k counts.
    `auc` judges the position's own confidence c_k against acceptance given that the prefix k - 1 was accepted, which no
    temperature changes. `null_ece` is what perfect calibration would show by chance (mean and 95 % quantile), and
    `null_mean_ece` the same of the mean over positions.
    `intervals` are 95 % over prompts, of the measures by name; `by_domain` and `online` are the stage's to fill in.
    A position without data, or an AUC of one class only, is None.
    """
    temperatures = np.asarray(temperatures, np.float64)
    before = _survival_measures(split.holdout, temperatures=np.ones_like(temperatures), num_bins=num_bins, seed=seed)
    after = _survival_measures(split.holdout, temperatures=temperatures, num_bins=num_bins, seed=seed)
    measures = {f"{name}_before": values for name, values in before.items()}
    measures |= {f"{name}_after": values for name, values in after.items()}
    measures["auc"] = [_own_auc(split.holdout, slot=slot) for slot in range(split.holdout.num_slots)]
    return {
        "schema_version": SCHEMA_VERSION,
        "applicable": True,
        "reason": None,
        "block_size": split.holdout.num_slots,
        "num_bins": num_bins,
        "num_rounds": split.holdout.num_rounds,
        "num_prompts": split.holdout.num_prompts,
        "num_counted": list(split.holdout.num_counted),
        "num_fit_rounds": split.fit.num_rounds,
        "num_fit_prompts": split.fit.num_prompts,
        "temperatures": temperatures.tolist(),
        **{name: measures[name] for name in (*MEANS, *MEASURES)},
        "intervals": calibration_intervals(
            split.holdout,
            temperatures={"before": np.ones_like(temperatures), "after": temperatures},
            num_bins=num_bins,
            seed=seed,
        ),
        "by_domain": None,
        "online": None,
    }


def not_applicable_body(block_size: int, *, reason: str) -> dict[str, Any]:
    """The body of calibrate.json for a drafter without a confidence head: the same fields, null all through."""
    counts = ("num_bins", "num_rounds", "num_prompts", "num_counted", "num_fit_rounds", "num_fit_prompts")
    return {
        "schema_version": SCHEMA_VERSION,
        "applicable": False,
        "reason": reason,
        "block_size": block_size,
        **dict.fromkeys(counts),
        "temperatures": None,
        **dict.fromkeys((*MEANS, *MEASURES)),
        **dict.fromkeys(EXTRAS),
    }


def sts_sidecar(body: Mapping[str, Any], *, dataset: str) -> dict[str, Any]:
    """SGLang's temperature file: temperatures, dataset, num_samples (rounds fitted on), ece_before and ece_after [K].

    Raises CalibrationError if there is nothing to write, or a temperature that SGLang would refuse.
    """
    if not body["applicable"]:
        raise CalibrationError(
            "no temperatures to export", got=body["reason"], expected="a drafter with a confidence head"
        )
    temperatures = body["temperatures"]
    if not all(np.isfinite(value) and value > 0 for value in temperatures):
        raise CalibrationError("temperatures must be positive and finite", got=temperatures)
    return {
        "temperatures": list(temperatures),
        "dataset": dataset,
        "num_samples": body["num_fit_rounds"],
        "ece_before": list(body["ece_before"]),
        "ece_after": list(body["ece_after"]),
    }


def reliability_csv(body: Mapping[str, Any]) -> str:
    """Reliability bins as CSV for `dvc plots`: one row a non-empty bin, position and side; the header alone if none."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["position", "side", "low", "high", "count", "mean_confidence", "share_accepted"])
    if body["applicable"]:
        for position in range(1, body["block_size"] + 1):
            for side in ("before", "after"):
                for item in body[f"reliability_{side}"][position - 1] or ():
                    if item["count"]:
                        values = (item[name] for name in ("low", "high", "count", "mean_confidence", "share_accepted"))
                        writer.writerow([position, side, *values])
    return stream.getvalue()


def reliability_figure(body: Mapping[str, Any], *, title: str) -> Figure:
    """Reliability diagrams of an applicable body, a panel a position: share accepted over predicted survival.

    A bar is the 95 % interval of its bin (`share_interval`).
    """
    block_size = body["block_size"]
    num_columns = min(block_size, 4)
    num_rows = -(-block_size // num_columns)
    figure = new_figure(3.0 * num_columns, height=2.9 * num_rows, title=title)
    axes = figure.subplots(num_rows, num_columns, squeeze=False, sharex=True, sharey=True).ravel()
    for slot, panel in enumerate(axes):
        if slot < block_size:
            _draw_position(panel, body, slot=slot)
        else:
            panel.set_axis_off()
    axes[0].legend(fontsize=7, loc="upper left")
    figure.supxlabel("predicted survival of the prefix", fontsize=9)
    figure.supylabel("share accepted", fontsize=9)
    return figure


def share_interval(share: float, *, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of `count` independent rounds; rounds of one answer are not quite that."""
    spread = NORMAL_975**2 / count
    centre = (share + spread / 2) / (1 + spread)
    half = NORMAL_975 * math.sqrt(share * (1 - share) / count + spread / (4 * count)) / (1 + spread)
    return max(centre - half, 0.0), min(centre + half, 1.0)


def _draw_position(panel: Axes, body: Mapping[str, Any], *, slot: int) -> None:
    panel.plot([0, 1], [0, 1], color="0.7", linewidth=1, linestyle="--")
    panel.set(xlim=(0, 1), ylim=(0, 1))
    panel.tick_params(labelsize=7)
    captions = []
    for side, colour in (("before", "tab:orange"), ("after", "tab:blue")):
        bins = [item for item in body[f"reliability_{side}"][slot] or () if item["count"]]
        largest = max((item["count"] for item in bins), default=1)
        means, shares = [item["mean_confidence"] for item in bins], [item["share_accepted"] for item in bins]
        panel.plot(means, shares, color=colour, linewidth=1, alpha=0.6, label=side)
        ends = np.array([share_interval(item["share_accepted"], count=item["count"]) for item in bins]).reshape(-1, 2)
        bars = np.abs(ends.T - shares)
        panel.errorbar(means, shares, yerr=bars, fmt="none", ecolor=colour, elinewidth=0.8, alpha=0.5)
        panel.scatter(means, shares, s=[4 + 40 * item["count"] / largest for item in bins], color=colour)
        ece = body[f"ece_{side}"][slot]
        captions.append("none" if ece is None else f"{100 * ece:.1f} %")
    panel.set_title(f"position {slot + 1}: ECE {' to '.join(captions)}", fontsize=8)


def _survival_measures(
    rounds: RoundArrays, *, temperatures: NDArray[np.float64], num_bins: int, seed: int
) -> dict[str, Any]:
    """Measures of the survivals at `temperatures` [K]: lists [K], None where no round counts, and means over [K]."""
    survivals = survival(rounds.logits, temperatures)
    per_slot: list[dict[str, Any]] = []
    null_draws = []
    for slot in range(rounds.num_slots):
        rows = rounds.counted > slot
        if not rows.any():
            per_slot.append({})
            continue
        score, outcome = survivals[rows, slot], rounds.accepted[rows] > slot
        draws = null_ece_draws(survivals[:, slot], rows=rows, num_bins=num_bins, seed=seed, num_draws=NULL_DRAWS)
        null_draws.append(draws)
        null = NullEce.of(draws)
        equal_mass = expected_calibration_error(score, outcome=outcome, num_bins=num_bins, binning="equal_mass")
        per_slot.append(
            {
                "ece": expected_calibration_error(score, outcome=outcome, num_bins=num_bins),
                "ece_equal_mass": equal_mass,
                "null_ece": null.mean,
                "null_ece_quantile_95": null.quantile_95,
                "brier": brier_score(score, outcome=outcome),
                "auc_survival": roc_auc(score, outcome=outcome),
                "reliability": [asdict(item) for item in reliability_bins(score, outcome=outcome, num_bins=num_bins)],
            }
        )
    names = list(dict.fromkeys(name for entry in per_slot for name in entry))
    measures: dict[str, Any] = {name: [entry.get(name) for entry in per_slot] for name in names}
    null_mean = NullEce.of(np.mean(null_draws, axis=0))
    measures["mean_ece"] = float(np.mean([entry["ece"] for entry in per_slot if entry]))
    measures["null_mean_ece"], measures["null_mean_ece_quantile_95"] = null_mean.mean, null_mean.quantile_95
    return measures


def _own_auc(rounds: RoundArrays, *, slot: int) -> float | None:
    """ROC-AUC of the confidence logit at `slot` (0-based), over rounds whose slot counts and whose prefix survived."""
    rows = (rounds.counted > slot) & (rounds.accepted >= slot)
    if not rows.any():
        return None
    return roc_auc(rounds.logits[rows, slot], outcome=rounds.accepted[rows] > slot)
