"""The learning rate on values worked out by hand, and its bounds everywhere."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.training.schedule import learning_rate


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 0.25),  # a warm-up of 4 of 20 updates
        (1, 0.5),
        (3, 1.0),
        (4, 0.5 * (1 + math.cos(math.pi / 16))),
        (11, 0.5),  # half-way down
        (15, 0.14644661),  # three quarters: (1 - 1 / sqrt(2)) / 2
        (19, 0.0),
    ],
)
def test_twenty_updates_by_hand(step: int, expected: float) -> None:
    assert learning_rate(step, steps=20, peak=1.0, warmup_share=0.2) == pytest.approx(expected, abs=1e-8)


def test_the_released_share_rounds_the_warm_up_up() -> None:
    """4 % of 150 updates are 6."""
    rates = [learning_rate(step, steps=150, peak=6e-4, warmup_share=0.04) for step in range(150)]
    assert rates[:7] == pytest.approx([1e-4, 2e-4, 3e-4, 4e-4, 5e-4, 6e-4, 6e-4], rel=1e-3)
    assert rates[5] == max(rates)


@given(st.integers(1, 300), st.floats(0, 0.99), st.floats(1e-6, 10))
def test_it_never_overshoots_rises_then_falls_and_never_reaches_zero_early(
    steps: int, warmup_share: float, peak: float
) -> None:
    rates = [learning_rate(step, steps=steps, peak=peak, warmup_share=warmup_share) for step in range(steps)]
    top = rates.index(max(rates))
    assert max(rates) <= peak
    assert max(rates) == pytest.approx(peak)
    assert all(a < b for a, b in pairwise(rates[: top + 1]))
    assert all(a >= b for a, b in pairwise(rates[top:]))
    assert all(rate > 0 for rate in rates[:-1])
