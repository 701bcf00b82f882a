"""Fronts against every pair compared; what is reached at an anchor against a fine walk along the lines."""

from __future__ import annotations

import numpy as np
import pytest

from draftsmith.errors import DraftsmithError
from draftsmith.serving.pareto import LoadPoint, pareto_front, speed_at, throughput_at

LINE = (LoadPoint(1, 10.0, 10.0), LoadPoint(2, 16.0, 8.0), LoadPoint(4, 24.0, 6.0))


@pytest.mark.parametrize("seed", range(20))
def test_the_front_is_what_nothing_beats(seed: int) -> None:
    rng = np.random.default_rng(seed)
    points = [LoadPoint(1, *map(float, row)) for row in rng.integers(0, 6, (int(rng.integers(1, 25)), 2))]

    def beaten(one: LoadPoint) -> bool:
        return any(
            other.tokens_per_s >= one.tokens_per_s
            and other.user_tokens_per_s >= one.user_tokens_per_s
            and (other.tokens_per_s, other.user_tokens_per_s) != (one.tokens_per_s, one.user_tokens_per_s)
            for other in points
        )

    front = pareto_front(points)
    assert sorted(front) == [place for place, point in enumerate(points) if not beaten(point)]
    speeds = [points[place].user_tokens_per_s for place in front]
    assert speeds == sorted(speeds)


def test_between_two_loads_lies_a_line() -> None:
    found = throughput_at(LINE, user_tokens_per_s=7.0)
    assert found is not None
    assert (found.value, found.concurrency, found.at_limit) == (20.0, 3.0, False)
    matched = speed_at(LINE, tokens_per_s=13.0)
    assert matched is not None
    assert (matched.value, matched.concurrency, matched.at_limit) == (9.0, 1.5, False)


def test_nothing_is_promised_beyond_what_was_measured() -> None:
    assert throughput_at(LINE, user_tokens_per_s=10.1) is None
    assert speed_at(LINE, tokens_per_s=24.1) is None
    slow = throughput_at(LINE, user_tokens_per_s=5.0)
    assert slow is not None
    assert (slow.value, slow.at_limit) == (24.0, True)
    easy = speed_at(LINE, tokens_per_s=9.0)
    assert easy is not None
    assert (easy.value, easy.at_limit) == (10.0, True)


@pytest.mark.parametrize("seed", range(10))
def test_a_winding_curve_is_walked_to_its_best_place(seed: int) -> None:
    rng = np.random.default_rng(seed)
    speeds, totals = rng.uniform(1, 10, 6), rng.uniform(1, 10, 6)
    points = [LoadPoint(1 << at, totals[at], speeds[at]) for at in range(6)]
    promised = float(rng.uniform(1, 10))
    places = np.linspace(0, 5, 200_001)
    fast = np.interp(places, range(6), speeds) >= promised
    found = throughput_at(points, user_tokens_per_s=promised)
    if not fast.any():
        assert found is None
    else:
        assert found is not None
        assert found.value == pytest.approx(np.interp(places, range(6), totals)[fast].max(), abs=1e-3)


def test_loads_in_another_order_are_refused() -> None:
    with pytest.raises(DraftsmithError, match="strictly increasing"):
        throughput_at(LINE[::-1], user_tokens_per_s=1.0)
    with pytest.raises(DraftsmithError, match="at least one"):
        speed_at((), tokens_per_s=1.0)
