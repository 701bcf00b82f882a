"""How far confidences are from frequencies: ECE, reliability bins, Brier score, ROC-AUC, and the ECE of pure chance.

Throughout, `confidence` [N] holds probabilities and `outcome` [N] what happened (0 or 1). Pure functions of arrays.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Binning = Literal["equal_width", "equal_mass"]

CHUNK_ELEMENTS = 1 << 21
"""Elements of one intermediate array: bounds the memory of the vectorised loops (16 MiB in float64)."""


@dataclass(frozen=True)
class ReliabilityBin:
    """One bin [low, high) of a reliability diagram (the last one closed); an empty bin has neither mean nor share."""

    low: float
    high: float
    count: int
    mean_confidence: float | None
    share_accepted: float | None


@dataclass(frozen=True)
class NullEce:
    """The ECE that a perfectly calibrated predictor would show by chance: its mean and its 95 % quantile."""

    mean: float
    quantile_95: float

    @classmethod
    def of(cls, draws: Floats) -> NullEce:
        """Summary of simulated errors [num_draws]."""
        return cls(mean=float(draws.mean()), quantile_95=float(np.quantile(draws, 0.95)))


def equal_width_bins(confidence: ArrayLike, *, num_bins: int) -> Ints:
    """Bin 0..num_bins-1 of each confidence, any shape: floor(confidence * num_bins), 1.0 in the last bin."""
    scaled = (np.asarray(confidence, np.float64) * num_bins).astype(np.int64)
    return np.minimum(scaled, num_bins - 1)


def equal_mass_bins(confidence: ArrayLike, *, num_bins: int) -> Ints:
    """Bin [N] by rank, so that bins hold about N / num_bins each; equal confidences always share a bin."""
    ranks = average_ranks(confidence)
    return np.minimum(((ranks - 0.5) / len(ranks) * num_bins).astype(np.int64), num_bins - 1)


def expected_calibration_error(
    confidence: ArrayLike, *, outcome: ArrayLike, num_bins: int, binning: Binning = "equal_width"
) -> float:
    """Sum over bins of (count / N) * |mean confidence - share accepted| (DSpark section 3.2.1). N >= 1."""
    confidence, outcome = _pair(confidence, outcome)
    place = equal_width_bins if binning == "equal_width" else equal_mass_bins
    gaps = np.bincount(place(confidence, num_bins=num_bins), weights=confidence - outcome, minlength=num_bins)
    return float(np.abs(gaps).sum() / len(confidence))


def reliability_bins(confidence: ArrayLike, *, outcome: ArrayLike, num_bins: int) -> tuple[ReliabilityBin, ...]:
    """The `num_bins` equal-width bins of a reliability diagram, empty ones included."""
    confidence, outcome = _pair(confidence, outcome)
    bins = equal_width_bins(confidence, num_bins=num_bins)
    counts = np.bincount(bins, minlength=num_bins)
    confidence_sums = np.bincount(bins, weights=confidence, minlength=num_bins)
    outcome_sums = np.bincount(bins, weights=outcome, minlength=num_bins)
    return tuple(
        ReliabilityBin(
            low=index / num_bins,
            high=(index + 1) / num_bins,
            count=int(count),
            mean_confidence=float(confidence_sums[index] / count) if count else None,
            share_accepted=float(outcome_sums[index] / count) if count else None,
        )
        for index, count in enumerate(counts)
    )


def brier_score(confidence: ArrayLike, *, outcome: ArrayLike) -> float:
    """Mean squared difference of confidence and outcome. N >= 1."""
    confidence, outcome = _pair(confidence, outcome)
    return float(np.mean((confidence - outcome) ** 2))


def average_ranks(values: ArrayLike) -> Floats:
    """Ranks 1..N of `values` [N], ascending; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(np.asarray(values, np.float64), return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]


def roc_auc(score: ArrayLike, *, outcome: ArrayLike) -> float | None:
    """Probability that an accepted case scores above a rejected one, ties counted half (Mann-Whitney).

    `score` [N] may be any real number. None if all outcomes are alike, where the area is undefined.
    """
    score, outcome = _pair(score, outcome)
    num_accepted = int(outcome.sum())
    num_rejected = len(outcome) - num_accepted
    if num_accepted == 0 or num_rejected == 0:
        return None
    rank_sum = average_ranks(score)[outcome == 1].sum()
    return float((rank_sum - num_accepted * (num_accepted + 1) / 2) / (num_accepted * num_rejected))


def null_ece(confidence: ArrayLike, *, num_bins: int, seed: int, num_draws: int = 1000) -> NullEce:
    """The ECE of a perfectly calibrated predictor with these very confidences, bins and number of rounds.

    Outcomes are drawn `num_draws` times as independent Bernoulli(confidence); a measured ECE below `quantile_95` is no
    evidence of miscalibration. A finite sample never shows ECE 0, so ECE alone cannot be judged.
    """
    everything = np.ones(np.shape(confidence), np.bool_)
    return NullEce.of(null_ece_draws(confidence, rows=everything, num_bins=num_bins, seed=seed, num_draws=num_draws))


def null_ece_draws(
    confidence: ArrayLike, *, rows: NDArray[np.bool_], num_bins: int, seed: int, num_draws: int
) -> Floats:
    """ECE [num_draws] of simulated outcomes over the `rows` [N] of `confidence` [N] that count (at least one).

    A round is accepted where its uniform number lies below its confidence. The numbers depend on `seed`, N and
    `num_draws` alone: calls for the survivals of several positions of the same rounds share them, and since survivals
    fall with the position, that is the joint distribution of nested prefixes.
    """
    confidence = np.asarray(confidence, np.float64)
    chosen = confidence[rows]
    bins = equal_width_bins(chosen, num_bins=num_bins)
    rng = np.random.default_rng(seed)
    errors = []
    for size in chunk_sizes(num_draws, row_elements=len(confidence)):
        accepted = rng.random((size, len(confidence)))[:, rows] < chosen
        errors.append(grouped_ece(chosen - accepted, bins, num_bins=num_bins))
    return np.concatenate(errors)


def grouped_ece(differences: Floats, bins: Ints, *, num_bins: int) -> Floats:
    """ECE [G] of G predictions at once, from confidence - outcome [G, N] and the bins [N] or [G, N]."""
    num_groups, num_rounds = differences.shape
    cells = bins + num_bins * np.arange(num_groups)[:, None]
    sums = np.bincount(cells.ravel(), weights=differences.ravel(), minlength=num_groups * num_bins)
    return np.abs(sums.reshape(num_groups, num_bins)).sum(axis=1) / num_rounds


def chunk_sizes(num_rows: int, *, row_elements: int) -> Iterator[int]:
    """Cut `num_rows` rows of `row_elements` elements into chunks of at most CHUNK_ELEMENTS (at least one row each)."""
    step = max(1, CHUNK_ELEMENTS // max(1, row_elements))
    for start in range(0, num_rows, step):
        yield min(step, num_rows - start)


def _pair(confidence: ArrayLike, outcome: ArrayLike) -> tuple[Floats, Floats]:
    first, second = np.asarray(confidence, np.float64), np.asarray(outcome, np.float64)
    assert first.ndim == 1
    assert first.shape == second.shape
    assert len(first) > 0
    return first, second
