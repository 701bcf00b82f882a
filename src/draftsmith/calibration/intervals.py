"""95 % intervals of calibration measures, by bootstrap over prompts: rounds of one answer are no independent draws.

Percentile intervals. ECE is a sum of absolute values, which resampling pushes up: where little miscalibration is left
its interval lies above the truth, and the ECE of pure chance (`ece.null_ece`) is what to judge by.
Letters: N rounds, P prompts, B resamples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftsmith.calibration.collect import RoundArrays
from draftsmith.calibration.ece import equal_mass_bins, equal_width_bins
from draftsmith.calibration.sts import survival

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NUM_RESAMPLES = 1000
MEASURES = ("ece", "ece_equal_mass", "brier", "auc_survival")
"""Measures of survival that have intervals; `auc` is of the position's own confidence."""


def resampled_prompts(num_prompts: int, *, seed: int, num_resamples: int = NUM_RESAMPLES) -> Floats:
    """How often each prompt is drawn [B, P]: rows sum to P."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(num_prompts, np.full(num_prompts, 1 / num_prompts), size=num_resamples).astype(np.float64)


def interval(draws: Floats) -> list[float] | None:
    """[low, high] that holds the middle 95 % of `draws` [B]; None if fewer than half of them are numbers."""
    known = draws[np.isfinite(draws)]
    if len(known) * 2 < len(draws):
        return None
    return [float(value) for value in np.quantile(known, (0.025, 0.975))]


def ece_draws(confidence: ArrayLike, *, outcome: ArrayLike, bins: Ints, prompt: Ints, weights: Floats) -> Floats:
    """ECE of each resample [B]: confidences and outcomes [N] in `bins` [N], of prompts `prompt` [N] < P."""
    gaps = np.asarray(confidence, np.float64) - np.asarray(outcome, np.float64)
    num_prompts, num_bins = weights.shape[1], int(bins.max()) + 1
    sums = np.bincount(prompt * num_bins + bins, weights=gaps, minlength=num_prompts * num_bins)
    counts = np.bincount(prompt, minlength=num_prompts)
    return _ratio(np.abs(weights @ sums.reshape(num_prompts, num_bins)).sum(axis=1), weights @ counts)


def brier_draws(confidence: ArrayLike, *, outcome: ArrayLike, prompt: Ints, weights: Floats) -> Floats:
    """Brier score of each resample [B]."""
    errors = (np.asarray(confidence, np.float64) - np.asarray(outcome, np.float64)) ** 2
    num_prompts = weights.shape[1]
    sums = np.bincount(prompt, weights=errors, minlength=num_prompts)
    return _ratio(weights @ sums, weights @ np.bincount(prompt, minlength=num_prompts))


def auc_draws(score: ArrayLike, *, outcome: ArrayLike, prompt: Ints, weights: Floats) -> Floats:
    """ROC-AUC of each resample [B], ties counted half; nan where a resample has one outcome alone."""
    score, accepted = np.asarray(score, np.float64), np.asarray(outcome, np.bool_)
    order = np.argsort(score, kind="stable")
    _, tie = np.unique(score[order], return_inverse=True)
    mass = weights[:, prompt[order]]
    won, lost = mass * accepted[order], mass * ~accepted[order]
    ends = np.append(np.flatnonzero(np.diff(tie)), len(tie) - 1)
    lost_by = np.diff(np.cumsum(lost, axis=1)[:, ends], axis=1, prepend=0.0)
    won_by = np.diff(np.cumsum(won, axis=1)[:, ends], axis=1, prepend=0.0)
    below = np.cumsum(lost_by, axis=1) - lost_by / 2
    return _ratio((won_by * below).sum(axis=1), won.sum(axis=1) * lost.sum(axis=1))


def calibration_intervals(
    rounds: RoundArrays, *, temperatures: Mapping[str, ArrayLike], num_bins: int, seed: int
) -> dict[str, Any]:
    """Intervals of held-out rounds by measure, a list [K] of [low, high] each; None where there is nothing to say.

    `temperatures`: side ("before", "after") -> [K]. Named `<measure>_<side>`, and `auc`, which no temperature changes.
    """
    weights = resampled_prompts(rounds.num_prompts, seed=seed)
    found: dict[str, list[list[float] | None]] = {}
    for side, values in temperatures.items():
        scores = survival(rounds.logits, values)
        for slot in range(rounds.num_slots):
            rows = rounds.counted > slot
            made = _of_slot(
                scores[rows, slot], rounds.accepted[rows] > slot, rounds.prompt[rows], weights=weights,
                num_bins=num_bins,
            )  # fmt: skip
            for name in MEASURES:
                found.setdefault(f"{name}_{side}", []).append(made.get(name))
    for slot in range(rounds.num_slots):
        rows = (rounds.counted > slot) & (rounds.accepted >= slot)
        draws = None
        if rows.any():
            draws = auc_draws(
                rounds.logits[rows, slot], outcome=rounds.accepted[rows] > slot, prompt=rounds.prompt[rows],
                weights=weights,
            )  # fmt: skip
        found.setdefault("auc", []).append(None if draws is None else interval(draws))
    return found


def _of_slot(
    score: Floats, outcome: NDArray[np.bool_], prompt: Ints, *, weights: Floats, num_bins: int
) -> dict[str, list[float] | None]:
    if not len(score):
        return {}
    draws = {
        name: ece_draws(score, outcome=outcome, bins=place(score, num_bins=num_bins), prompt=prompt, weights=weights)
        for name, place in (("ece", equal_width_bins), ("ece_equal_mass", equal_mass_bins))
    }
    draws["brier"] = brier_draws(score, outcome=outcome, prompt=prompt, weights=weights)
    draws["auc_survival"] = auc_draws(score, outcome=outcome, prompt=prompt, weights=weights)
    return {name: interval(values) for name, values in draws.items()}


def _ratio(top: Floats, bottom: Floats) -> Floats:
    return np.divide(top, bottom, out=np.full(len(top), np.nan), where=bottom > 0)
