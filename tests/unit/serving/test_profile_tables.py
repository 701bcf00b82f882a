"""Tables and costs from profiled points, against regressions done by hand and by brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from draftsmith.errors import DraftsmithError
from draftsmith.serving.cost_table import CostTable
from draftsmith.serving.profile_points import Point, PrefillPoint, Spread, Sweep
from draftsmith.serving.profile_tables import (
    context_cost,
    every_number,
    isotonic_pools,
    monotone_table,
    prefill_cost,
    requests_costs,
    smoothed_table,
    verification_by_requests,
    verification_tables,
    whole_step_table,
)


def point(
    verify: float | None,
    *,
    tokens: int | None,
    requests: int = 1,
    sweep: Sweep = "tokens",
    context: float = 100.0,
    steps: int = 1,
    draft: float = 0.0,
    upkeep: float = 0.0,
) -> Point:
    spread = None if verify is None else Spread(verify, verify, verify)
    return Point(sweep, requests, tokens, context, steps, Spread(draft, draft, draft), spread, Spread(upkeep, 0, 9))


def prefill(tokens: int, seconds: float) -> PrefillPoint:
    return PrefillPoint(1, tokens, Spread(seconds, seconds, seconds), 1)


def seconds(table: CostTable) -> list[float]:
    return (1 / table.steps_per_s).tolist()


def test_pools_by_hand() -> None:
    """3 and 1 fall: a pool of weight 4 at (1 * 2 + 3 * 3) / 4, value (1 * 3 + 3 * 1) / 4, which is no more than 5."""
    pools = isotonic_pools([1, 2, 3, 5], values=[1.0, 3.0, 1.0, 5.0], weights=[1, 1, 3, 1])
    assert [(one.place, one.value, one.first, one.last) for one in pools] == [
        (1.0, 1.0, 1.0, 1.0),
        (2.75, 1.5, 2.0, 3.0),
        (5.0, 5.0, 5.0, 5.0),
    ]


def test_a_pool_that_falls_below_the_one_before_takes_it_in() -> None:
    pools = isotonic_pools([1, 2, 3], values=[3.0, 5.0, 1.0], weights=[2, 1, 2])
    assert [(one.place, one.value, one.first, one.last) for one in pools] == [(2.0, 13 / 5, 1.0, 3.0)]


@pytest.mark.parametrize("seed", range(20))
def test_pools_are_the_least_squares_of_all_partitions(seed: int) -> None:
    """Of all cuts of 6 points into runs with means that do not fall, the pools have the least squared error."""
    rng = np.random.default_rng(seed)
    values, weights = rng.normal(size=6), rng.integers(1, 4, 6).astype(float)
    best = np.inf
    for cuts in itertools.product((False, True), repeat=5):
        edges = [0, *[place + 1 for place, cut in enumerate(cuts) if cut], 6]
        parts = [slice(low, high) for low, high in itertools.pairwise(edges)]
        means = [np.average(values[part], weights=weights[part]) for part in parts]
        if all(low <= high for low, high in itertools.pairwise(means)):
            errors = [
                (weights[part] * (values[part] - mean) ** 2).sum() for part, mean in zip(parts, means, strict=True)
            ]
            best = min(best, sum(errors))
    pools = isotonic_pools(np.arange(6), values=values, weights=weights)
    fitted = np.concatenate([[one.value] * round(one.last - one.first + 1) for one in pools])
    assert (weights * (values - fitted) ** 2).sum() == pytest.approx(best)
    assert (np.diff(fitted) >= 0).all()


def test_every_number_is_on_lines_of_seconds() -> None:
    """Seconds 1 at 2, 2 at 4, 5 at 5: flat below 2, a line between."""
    table = every_number(CostTable([2, 4, 5], steps_per_s=[1.0, 0.5, 0.2]))
    assert table.batch_tokens.tolist() == [1, 2, 3, 4, 5]
    assert seconds(table) == pytest.approx([1, 1, 1.5, 2, 5])


def test_a_table_that_falls_is_flat_in_its_pool_and_jumps_behind() -> None:
    """Seconds 1, 3, 2, 4 at 1, 2, 4, 5: one pool from 2 to 4 of 2.5, and lines to its neighbours."""
    table = monotone_table(CostTable([1, 2, 4, 5], steps_per_s=[1, 1 / 3, 0.5, 0.25]))
    assert seconds(table) == pytest.approx([1, 2.5, 2.5, 2.5, 4])


def test_measured_pools_are_joined_at_their_middles() -> None:
    """The same points: the pool stands at 3, and lines from 1 and to 5 leave no jump."""
    table = smoothed_table(CostTable([1, 2, 4, 5], steps_per_s=[1, 1 / 3, 0.5, 0.25]), weights=[1, 1, 1, 1])
    assert seconds(table) == pytest.approx([1, 1.75, 2.5, 3.25, 4])


def test_stairs_without_noise_stay_stairs() -> None:
    measured = CostTable([1, 2, 3, 4, 5, 6], steps_per_s=[1, 1, 1, 0.5, 0.5, 0.5])
    assert smoothed_table(measured, weights=np.ones(6)).steps_per_s.tolist() == [1, 1, 1, 0.5, 0.5, 0.5]
    assert monotone_table(measured).steps_per_s.tolist() == [1, 1, 1, 0.5, 0.5, 0.5]


def test_verification_takes_the_median_over_requests_and_weighs_by_steps() -> None:
    """N = 2: 2, 3 and 7 of three R -> 3. N = 3: 1 of 9 steps; pooled (3 * 3 + 9 * 1) / 12 = 1.5 at 2.75."""
    points = [
        point(1.0, tokens=1),
        *(point(value, tokens=2, requests=requests) for requests, value in ((1, 2.0), (2, 7.0), (3, 3.0))),
        point(1.0, tokens=3, steps=9),
        point(5.0, tokens=4),
        point(99.0, tokens=2, sweep="context"),
        point(None, tokens=None, sweep="requests"),
    ]
    jagged, table = verification_tables(points)
    assert seconds(jagged) == pytest.approx([1, 3, 1, 5])
    on_lines = [1, 1 + 0.5 / 1.75, 1.5 + 3.5 * 0.25 / 1.25, 5]
    assert seconds(table) == pytest.approx(on_lines)


def test_whole_steps_have_drafting_and_upkeep() -> None:
    points = [
        point(1.0, tokens=1, draft=0.5, upkeep=0.25),
        point(2.0, tokens=3, draft=0.5, upkeep=0.5),
        point(9.0, tokens=1, sweep="context"),
    ]
    assert seconds(whole_step_table(points)) == pytest.approx([1.75, 2.375, 3.0])


def test_without_points_there_is_no_table() -> None:
    with pytest.raises(DraftsmithError, match="sweep over tokens"):
        verification_tables([point(1.0, tokens=2, sweep="context")])


def test_drafting_and_upkeep_by_requests() -> None:
    points = [
        point(None, tokens=None, requests=number, sweep="requests", draft=0.1 * number, upkeep=0.01 * number)
        for number in (1, 4)
    ]
    drafting, upkeep = requests_costs([point(1.0, tokens=1, draft=9.0), *points], block_size=7)
    assert (drafting.num_requests, drafting.seconds, drafting.fixed_share) == ((1, 4), (0.1, 0.4), 1.0)
    assert (upkeep.num_requests, upkeep.seconds) == ((1, 4), (0.01, 0.04))


@pytest.mark.parametrize(("shares", "expected"), [((0.75,), 0.75), ((0.5, 0.75, 0.9), 0.75), ((1.5,), 1.0)])
def test_share_of_drafting_that_does_not_shrink(shares: tuple[float, ...], expected: float) -> None:
    """Blocks of k of K = 8 that take share + (1 - share) k / 8 of R seconds, one share for each R."""
    points = []
    for requests, share in enumerate(shares, start=1):
        points.append(point(None, tokens=None, requests=requests, sweep="requests", draft=requests))
        for length in (1, 4):
            draft = requests * (share + (1 - share) * length / 8)
            points.append(point(1.0, tokens=requests * (1 + length), requests=requests, sweep="blocks", draft=draft))
    drafting, _ = requests_costs(points, block_size=8)
    assert drafting.fixed_share == pytest.approx(expected)


def test_prefill_on_a_line_is_found() -> None:
    found = prefill_cost([prefill(number, 0.25 + number / 500) for number in (10, 100, 1000)])
    assert found is not None
    assert (found.tokens_per_s, found.seconds_per_pass) == pytest.approx((500, 0.25))


@pytest.mark.parametrize(
    "points",
    [
        [prefill(100, 0.5)],  # one size
        [prefill(100, 0.5), prefill(100, 0.5)],
        [prefill(100, 0.3), prefill(200, 1.0)],  # a line that starts below 0
        [prefill(100, 1.0), prefill(200, 0.5)],  # a line that falls
    ],
)
def test_prefill_without_a_line_is_proportional(points: list[PrefillPoint]) -> None:
    """The slope that minimises sum of (slope * n / s - 1)^2, found on a grid."""
    found = prefill_cost(points)
    assert found is not None
    assert found.seconds_per_pass == 0
    slopes = np.linspace(1e-4, 2e-2, 200_000)
    errors = sum((slopes * one.num_tokens / one.seconds.median - 1) ** 2 for one in points)
    assert 1 / found.tokens_per_s == pytest.approx(slopes[np.argmin(errors)], rel=1e-4)


def test_no_prefill_costs_are_made_of_nothing() -> None:
    assert prefill_cost([]) is None


def test_context_slope_compares_shapes_with_themselves() -> None:
    """2 requests, 0.001 s a token of context; the second shape is a second slower, which is not the context's."""
    points = [
        point(base + 0.001 * 2 * context, tokens=tokens, requests=2, sweep="context", context=context)
        for base, tokens, contexts in ((1.0, 2, (100.0, 300.0)), (2.0, 8, (110.0, 290.0)))
        for context in contexts
    ]
    measured = [point(1.0, tokens=1, context=100.0, steps=3), point(1.0, tokens=2, context=104.0)]
    found = context_cost([*points, *measured])
    assert found.seconds_per_token == pytest.approx(0.001)
    assert found.profiled_tokens == 101


def test_context_never_takes_time_off() -> None:
    falling = [point(value, tokens=2, sweep="context", context=context) for value, context in ((2.0, 1.0), (1.0, 9.0))]
    assert context_cost(falling).seconds_per_token == 0
    assert context_cost(falling[:1]).seconds_per_token == 0


def test_what_requests_add_at_equal_tokens_is_set_apart() -> None:
    """Seconds theta(N) + alpha(R) to the digit, theta = N, alpha = 0, 2, 5; then the tables are theta alone."""
    added = {1: 0.0, 2: 2.0, 4: 5.0}
    points = [
        point(tokens + seconds_of, tokens=tokens, requests=requests)
        for requests, seconds_of in added.items()
        for tokens in range(requests, 5 * requests + 1, requests)
    ]
    found = verification_by_requests(points)
    assert found == pytest.approx(added, abs=1e-3)
    for table in verification_tables(points, by_requests=found):
        assert [seconds(table)[place] for place in (0, 1, 3, 7, 11)] == pytest.approx([1, 2, 4, 8, 12], abs=2e-3)
    costs = requests_costs([*points, point(None, tokens=None, requests=4, sweep="requests", upkeep=0.5)],
                           block_size=4, by_requests=found)  # fmt: skip
    assert costs[1].seconds == pytest.approx((5.5,), abs=1e-3)


def test_more_requests_that_seem_faster_add_nothing() -> None:
    points = [point(3.0, tokens=2, requests=1), point(2.0, tokens=2, requests=2)]
    assert verification_by_requests(points) == {1: 0.0, 2: 0.0}
    assert verification_by_requests([point(1.0, tokens=2, sweep="context")]) == {}
