"""Sequential temperature scaling: one temperature a position, left to right (DSpark section 3.2.1)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftsmith.calibration.ece import chunk_sizes, equal_width_bins, grouped_ece
from draftsmith.errors import CalibrationError

Floats = NDArray[np.float64]

PRODUCT_FLOOR = 1e-8
"""Survivals are kept inside [1e-8, 1 - 1e-8]."""
TIE_TOLERANCE = 1e-12
"""Two calibration errors closer than float64 rounding of their sums are a tie."""


def temperature_grid(low: float, *, high: float, num_points: int) -> Floats:
    """`num_points` log-spaced temperatures from `low` to `high`, and exactly 1.0 with them. Ascending.

    Raises CalibrationError unless 0 < low <= 1 <= high and num_points >= 2.
    """
    if not 0 < low <= 1 <= high or low == high:
        raise CalibrationError(
            "the temperature grid must enclose 1",
            got=f"{low} to {high}",
            expected="0 < grid_low <= 1 <= grid_high",
            where="params.yaml: calibrate.grid_low, calibrate.grid_high",
        )
    if num_points < 2:
        raise CalibrationError(
            "too few points in the temperature grid",
            got=num_points,
            expected=">= 2",
            where="params.yaml: calibrate.grid_points",
        )
    points = np.geomspace(low, high, num_points)
    return np.unique(np.append(points[~np.isclose(points, 1.0, rtol=1e-12, atol=0)], 1.0))


def confidence(logits: ArrayLike, *, temperatures: ArrayLike) -> Floats:
    """c = sigmoid(logit / T) in float64; shapes broadcast. T > 0."""
    scaled = np.clip(np.asarray(logits, np.float64) / np.asarray(temperatures, np.float64), -700.0, 700.0)
    return 1.0 / (1.0 + np.exp(-scaled))


def survival(logits: ArrayLike, temperatures: ArrayLike) -> Floats:
    """a_k = prod_{i<=k} c_i, the probability that the prefix of length k is accepted. [N, K] -> [N, K].

    Products in float64, then clamped to [1e-8, 1 - 1e-8]. `temperatures` [K], or 1.0 for the raw confidence head.
    """
    return np.clip(np.cumprod(confidence(logits, temperatures=temperatures), axis=-1), PRODUCT_FLOOR, 1 - PRODUCT_FLOOR)


def fit_temperatures(
    logits: ArrayLike, *, accepted: ArrayLike, counted: ArrayLike, grid: ArrayLike, num_bins: int
) -> Floats:
    """Temperatures [K] by sequential temperature scaling (DSpark section 3.2.1).

    For k = 1..K with T_1..T_{k-1} kept, T_k is the point of `grid` that minimises the ECE (equal-width bins weighted by
    count) of the survival a_k against "the prefix of length k was accepted", over every round whose slot k counts
    (not only those whose prefix k - 1 was accepted). Ties go to the T nearest 1, then to the smaller.

    `logits` [N, K] raw confidence logits; `accepted` [N] accepted draft tokens; `counted` [N] slots that count.
    Raises CalibrationError if a logit is not finite or no round counts at some slot.
    """
    logits, accepted, counted = np.asarray(logits, np.float64), np.asarray(accepted), np.asarray(counted)
    grid = np.asarray(grid, np.float64)
    if not np.isfinite(logits).all():
        raise CalibrationError(
            "confidence logits must be finite", got=f"{int((~np.isfinite(logits)).sum())} that are not"
        )
    temperatures = np.ones(logits.shape[1])
    product = np.ones(logits.shape[0])
    for slot in range(logits.shape[1]):
        rows = counted > slot
        if not rows.any():
            raise CalibrationError("no round to fit on", got=f"none that counts at slot {slot + 1}", expected=">= 1")
        errors = _grid_errors(
            logits[rows, slot], before=product[rows], outcome=accepted[rows] > slot, grid=grid, num_bins=num_bins
        )
        ties = grid[errors <= errors.min() + TIE_TOLERANCE]
        temperatures[slot] = ties[np.argmin(np.abs(ties - 1.0))]
        product *= confidence(logits[:, slot], temperatures=temperatures[slot])
    return temperatures


def _grid_errors(logits: Floats, *, before: Floats, outcome: NDArray[np.bool_], grid: Floats, num_bins: int) -> Floats:
    """ECE [G] at each temperature of `grid` [G]; `logits`, `before` (product of the earlier slots), `outcome`: [n]."""
    errors, start = [], 0
    for size in chunk_sizes(len(grid), row_elements=len(logits)):
        chunk = grid[start : start + size, None]
        start += size
        products = np.clip(before * confidence(logits, temperatures=chunk), PRODUCT_FLOOR, 1 - PRODUCT_FLOOR)
        bins = equal_width_bins(products, num_bins=num_bins)
        errors.append(grouped_ece(products - outcome, bins, num_bins=num_bins))
    return np.concatenate(errors)
