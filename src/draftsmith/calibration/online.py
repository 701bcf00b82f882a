"""Temperatures that follow the traffic: sequential temperature scaling on rounds that count less the older they are.

A fit is of the text that it was made on; traffic drifts. The running estimate keeps, for every position and every
temperature of the grid, the decayed sums from which ECE is made, and takes the temperature where it is least, position
by position as the offline fit does. It is lossless to use: temperatures come from rounds that are over.
A slot counts where it was verified. A policy that verifies prefixes by confidence shows the unlikely slots less often;
that is no bias at a given confidence, but positions that are never verified keep the temperature that they had.
Letters: N rounds, K block size, G temperatures of the grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftsmith.calibration.collect import RoundArrays
from draftsmith.calibration.ece import equal_width_bins, expected_calibration_error
from draftsmith.calibration.sts import PRODUCT_FLOOR, confidence, survival
from draftsmith.errors import CalibrationError

Floats = NDArray[np.float64]

BATCH_ROUNDS = 32
"""Rounds between two updates in `online_report`: about one step of a busy engine."""


class OnlineTemperatures:
    """A running fit of the temperatures [K]; `update` with rounds as they end."""

    def __init__(
        self, block_size: int, *, grid: ArrayLike, num_bins: int, half_life: float, start: ArrayLike | None = None,
        least_rounds: float = 200.0,
    ) -> None:  # fmt: skip
        """`half_life`: rounds after which a round counts half. A position keeps its `start` (by default 1, the raw
        confidence) until it has seen `least_rounds` rounds.

        Raises CalibrationError for a half-life that is not above zero, or a start of another size.
        """
        if not 0 < half_life < float("inf"):
            raise CalibrationError("the half-life of a running calibration", got=half_life, expected="rounds > 0")
        self.temperatures = np.ones(block_size) if start is None else np.array(start, np.float64)
        if self.temperatures.shape != (block_size,):
            raise CalibrationError(
                "temperatures to start from", got=self.temperatures.shape, expected=f"{block_size} of them"
            )
        self._grid, self._num_bins = np.asarray(grid, np.float64), num_bins
        self._half_life, self._least = half_life, least_rounds
        self._gaps = np.zeros((block_size, len(self._grid), num_bins))
        self._mass = np.zeros(block_size)
        self._seen = np.zeros(block_size)

    def update(self, logits: ArrayLike, *, accepted: ArrayLike, counted: ArrayLike) -> None:
        """Take in rounds: raw confidence logits [N, K], accepted draft tokens [N], slots that count [N]."""
        logits = np.asarray(logits, np.float64)
        accepted, counted = np.asarray(accepted), np.asarray(counted)
        before, num_grid = np.ones(len(logits)), len(self._grid)
        for slot in range(len(self.temperatures)):
            rows = counted > slot
            number = int(rows.sum())
            if number == 0:
                break
            products = before[rows, None] * confidence(logits[rows, slot, None], temperatures=self._grid)
            products = np.clip(products, PRODUCT_FLOOR, 1 - PRODUCT_FLOOR)
            gaps = products - (accepted[rows] > slot)[:, None]
            places = equal_width_bins(products, num_bins=self._num_bins) + np.arange(num_grid) * self._num_bins
            sums = np.bincount(places.ravel(), weights=gaps.ravel(), minlength=num_grid * self._num_bins)
            kept = 0.5 ** (number / self._half_life)
            self._gaps[slot] = kept * self._gaps[slot] + sums.reshape(num_grid, self._num_bins)
            self._mass[slot] = kept * self._mass[slot] + number
            self._seen[slot] += number
            if self._seen[slot] >= self._least:
                errors = np.abs(self._gaps[slot]).sum(axis=1) / self._mass[slot]
                ties = self._grid[errors <= errors.min() + 1e-12]
                self.temperatures[slot] = ties[np.argmin(np.abs(ties - 1.0))]
            before = before * confidence(logits[:, slot], temperatures=self.temperatures[slot])


def mean_ece(rounds: RoundArrays, *, survivals: Floats, num_bins: int) -> float:
    """Mean over positions of the ECE of `survivals` [N, K]; positions without a round are left out."""
    errors = [
        expected_calibration_error(
            survivals[rounds.counted > slot, slot], outcome=rounds.accepted[rounds.counted > slot] > slot,
            num_bins=num_bins,
        )
        for slot in range(rounds.num_slots) if (rounds.counted > slot).any()
    ]  # fmt: skip
    return float(np.mean(errors))


def online_report(
    fit: RoundArrays, *, holdout: RoundArrays, offline: ArrayLike, grid: ArrayLike, num_bins: int, half_life: float,
    domains: Sequence[str], seed: int,
) -> dict[str, Any]:  # fmt: skip
    """How far the running estimate is from the offline fit; `domains` [prompts of `holdout`] are theirs, by place.

    `stationary`: it sees the fitting rounds in random order, then both are judged on the held-out ones. `drift`: held-
    out rounds come domain by domain, each predicted with the temperatures known before it (prequential), from the
    offline ones on; beside it the offline fit as it stays, and the raw confidences.
    """
    made = OnlineTemperatures(fit.num_slots, grid=grid, num_bins=num_bins, half_life=half_life)
    order = np.random.default_rng(seed).permutation(fit.num_rounds)
    _follow(made, fit, order=order)
    of_domain = np.array(domains)[holdout.prompt]
    drifting = np.argsort(of_domain, kind="stable")
    running = OnlineTemperatures(
        fit.num_slots, grid=grid, num_bins=num_bins, half_life=half_life, start=offline, least_rounds=half_life / 2
    )
    told = _follow(running, holdout, order=drifting)

    def judged(temperatures: ArrayLike) -> float:
        return mean_ece(holdout, survivals=survival(holdout.logits, temperatures), num_bins=num_bins)

    raw, kept = judged(np.ones(fit.num_slots)), judged(offline)
    return {
        "half_life_rounds": half_life,
        "stationary": {
            "temperatures": made.temperatures.tolist(),
            "mean_ece_raw": raw,
            "mean_ece_offline": kept,
            "mean_ece_online": judged(made.temperatures),
        },
        "drift": {
            "order": list(dict.fromkeys(of_domain[drifting].tolist())),
            "mean_ece_raw": raw,
            "mean_ece_offline": kept,
            "mean_ece_online": mean_ece(holdout, survivals=told, num_bins=num_bins),
        },
    }


def _follow(running: OnlineTemperatures, rounds: RoundArrays, *, order: NDArray[np.int64]) -> Floats:
    """Let the estimate see rounds in `order`; returns each one's survivals [N, K] as they were before it was seen."""
    told = np.empty_like(rounds.logits)
    for start in range(0, len(order), BATCH_ROUNDS):
        part = order[start : start + BATCH_ROUNDS]
        told[part] = survival(rounds.logits[part], running.temperatures)
        running.update(rounds.logits[part], accepted=rounds.accepted[part], counted=rounds.counted[part])
    return told
