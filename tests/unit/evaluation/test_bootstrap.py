"""Intervals against SciPy's distributions and tests, hand-made draws, and simulated studies of known truth."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from draftsmith.errors import DraftsmithError
from draftsmith.evaluation import bootstrap
from draftsmith.evaluation.bootstrap import (
    Ratio,
    estimate,
    estimate_share,
    student_quantile,
    student_two_sided,
)

Floats = NDArray[np.float64]


def ratio(top: object, bottom: object) -> Ratio:
    return Ratio(np.array(top, np.float64), np.array(bottom, np.float64))


@pytest.mark.parametrize("degrees", [1.0, 1.7, 2.0, 4.0, 11.0, 37.3, 500.0, 30_000.0])
def test_student_agrees_with_scipy(degrees: float) -> None:
    for level in (0.9, 0.975, 0.999):
        assert student_quantile(level, degrees=degrees) == pytest.approx(stats.t.ppf(level, degrees), rel=1e-7)
    for t in (0.0, -0.3, 1.0, 2.5, 6.0):
        assert student_two_sided(t, degrees=degrees) == pytest.approx(2 * stats.t.sf(abs(t), degrees), rel=1e-7)


def test_two_prompts_have_their_range() -> None:
    # 4 tokens in 2 rounds, 3 in 1: drawn twice the one or the other, or both.
    found = estimate([[ratio([4, 3], [2, 1])]], seed=0)
    assert found.value == pytest.approx(7 / 3)
    assert found.interval == (2.0, 3.0)


def test_draws_are_those_of_every_resample() -> None:
    """Three prompts have 27 equally likely resamples; their quantiles are known without drawing."""
    top, bottom = np.array([4.0, 3.0, 9.0]), np.array([2.0, 1.0, 4.0])
    all_ratios = np.array(
        [sum(top[list(drawn)]) / sum(bottom[list(drawn)]) for drawn in itertools.product(range(3), repeat=3)]
    )
    found = bootstrap._draw(np.random.default_rng(0), [Ratio(top, bottom)], num_resamples=270_000)
    values, counts = np.unique(found.round(12), return_counts=True)
    expected, expected_counts = np.unique(all_ratios.round(12), return_counts=True)
    assert values == pytest.approx(expected)
    # One standard error of the rarest (1 in 27) is 98.
    assert counts == pytest.approx(expected_counts * 10_000, abs=500)


def test_draws_in_blocks_are_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    sides = [ratio(range(1, 21), [2.0] * 20)]
    whole = bootstrap._draw(np.random.default_rng(0), sides, num_resamples=9000)
    monkeypatch.setattr(bootstrap, "_DRAWN_CELLS", 60)  # three resamples at once
    parts = bootstrap._draw(np.random.default_rng(0), sides, num_resamples=9001)
    assert parts.shape == (9001,)
    assert parts.mean() == pytest.approx(whole.mean(), abs=0.06)
    assert parts.std() == pytest.approx(whole.std(), rel=0.05)


def test_one_stratum_of_equal_rounds_is_the_t_test() -> None:
    """Equal rounds make the ratio a mean of 12 nearly normal numbers: Student's interval, and the t-test's p."""
    tokens = np.random.default_rng(0).normal(0.25, 0.4, size=12)
    found = estimate([[Ratio(tokens, np.ones(12))]], seed=1, num_resamples=40_000)
    expected = stats.ttest_1samp(tokens, 0.0)
    assert found.p_value == pytest.approx(expected.pvalue, rel=0.05)
    ends = expected.confidence_interval(0.95)
    assert found.interval is not None
    assert found.interval[1] - found.interval[0] == pytest.approx(ends.high - ends.low, rel=0.05)
    # A plain percentile interval would be a ninth narrower or more.
    plain = np.quantile(np.random.default_rng(2).choice(tokens, size=(40_000, 12)).mean(axis=1), [0.025, 0.975])
    assert found.interval[1] - found.interval[0] > 1.1 * (plain[1] - plain[0])


def test_the_p_value_of_a_difference_is_that_of_the_paired_t_test() -> None:
    rng = np.random.default_rng(3)
    first, second = rng.normal(3.0, 1.0, size=15), rng.normal(2.8, 0.2, size=15)
    found = estimate([[Ratio(first, np.ones(15)), Ratio(second, np.ones(15))]], seed=0, num_resamples=40_000)
    assert found.value == pytest.approx((first - second).mean())
    assert found.p_value == pytest.approx(stats.ttest_rel(first, second).pvalue, rel=0.05)


def test_strata_have_welchs_interval_and_p_value() -> None:
    """The mean of two benchmarks' means is half the sum: Welch's test of the first against the negated second."""
    rng = np.random.default_rng(1)
    first, second = rng.normal(0.4, 0.2, size=12), rng.normal(0.1, 0.6, size=6)
    found = estimate([[Ratio(values, np.ones(len(values)))] for values in (first, second)], seed=1)
    welch = stats.ttest_ind(first, -second, equal_var=False)
    assert found.value == pytest.approx((first.mean() + second.mean()) / 2)
    assert found.p_value == pytest.approx(welch.pvalue, rel=0.08)
    ends = welch.confidence_interval(0.95)
    assert found.interval is not None
    assert found.interval[1] - found.interval[0] == pytest.approx((ends.high - ends.low) / 2, rel=0.06)


def test_no_spread_is_no_doubt() -> None:
    same = estimate([[ratio([2, 4], [1, 2]), ratio([2, 4], [1, 2])]], seed=0)
    assert (same.value, same.interval, same.p_value, same.excludes_zero) == (0.0, (0.0, 0.0), 1.0, False)
    apart = estimate([[ratio([3, 6], [1, 2]), ratio([2, 4], [1, 2])]], seed=0)
    assert (apart.value, apart.interval, apart.p_value, apart.excludes_zero) == (1.0, (1.0, 1.0), 0.0, True)


def test_few_prompts() -> None:
    lonely = estimate([[ratio([3], [2])], [ratio([4, 5], [2, 2])]], seed=0)
    assert (lonely.interval, lonely.p_value, lonely.num_prompts) == (None, None, 3)
    assert lonely.value == pytest.approx((1.5 + 9 / 4) / 2)
    for nothing in ([], [[ratio([], [])]]):
        with pytest.raises(DraftsmithError, match="no prompt with decoding rounds"):
            estimate(nothing, seed=0)


def test_shares_leave_out_prompts_without_evidence() -> None:
    top, bottom = np.array([1.0, 0.0, 3.0, 0.0]), np.array([2.0, 0.0, 4.0, 0.0])
    value, interval = estimate_share(top, bottom=bottom, seed=0)
    assert value == pytest.approx(4 / 6)
    assert interval == (0.5, 0.75)  # the two prompts that there are
    assert estimate_share(top[:2], bottom=bottom[:2], seed=0) == (0.5, None)
    assert estimate_share(top[3:], bottom=bottom[3:], seed=0) == (None, None)


@pytest.mark.parametrize("number", [2, 12, 60])
def test_shares_without_spread_have_clopper_and_pearsons_interval(number: int) -> None:
    rounds = np.full(number, 7.0)
    for accepted in (0, number):
        exact = stats.binomtest(accepted, number).proportion_ci(method="exact")
        value, interval = estimate_share(rounds * (accepted > 0), bottom=rounds, seed=0)
        assert value == (accepted > 0)
        assert interval == pytest.approx((exact.low, exact.high))


def overdispersed(rng: np.random.Generator, num_prompts: int) -> tuple[Floats, Floats]:
    """Accepted tokens and rounds of prompts that differ in difficulty and length; harder prompts take more rounds."""
    ease = rng.beta(2, 3, size=num_prompts)
    rounds = rng.poisson(60 * (1.2 - ease)) + 5
    return rng.binomial(7 * rounds, ease).astype(np.float64) + rounds, rounds.astype(np.float64)


def test_95_percent_cover_95_percent() -> None:
    """400 simulated studies of 12 prompts; one standard error of the coverage is 1.1 %."""
    rng = np.random.default_rng(5)
    top, bottom = overdispersed(rng, 400_000)
    truth = top.sum() / bottom.sum()
    hits = plain_hits = 0
    for seed in range(400):
        top, bottom = overdispersed(rng, 12)
        found = estimate([[Ratio(top, bottom)]], seed=seed, num_resamples=1000)
        assert found.interval is not None
        hits += found.interval[0] <= truth <= found.interval[1]
        drawn = rng.integers(12, size=(1000, 12))
        low, high = np.quantile(top[drawn].sum(axis=1) / bottom[drawn].sum(axis=1), [0.025, 0.975])
        plain_hits += low <= truth <= high
    assert 0.91 <= hits / 400 <= 0.985
    assert plain_hits / 400 < 0.91
    assert hits - plain_hits >= 8


def test_p_values_of_no_difference_are_uniform() -> None:
    """Two drafters of one ease on the same 12 prompts: p below 0.05 in one study of 20, below 0.5 in every other."""
    rng = np.random.default_rng(6)
    found = []
    for seed in range(400):
        ease, rounds = rng.beta(2, 3, size=12), rng.integers(10, 40, size=12).astype(np.float64)
        sides = [Ratio(rng.binomial(7, ease, size=(1, 12))[0] * rounds, rounds) for _ in range(2)]
        p_value = estimate([sides], seed=seed, num_resamples=1000).p_value
        assert p_value is not None
        found.append(p_value)
    assert np.mean(np.array(found) < 0.05) == pytest.approx(0.05, abs=0.03)
    assert np.mean(np.array(found) < 0.5) == pytest.approx(0.5, abs=0.08)


def test_seeds_make_draws() -> None:
    sides = [[ratio(range(1, 11), [1.0] * 10)]]
    first, again, other = (estimate(sides, seed=seed, num_resamples=200) for seed in (1, 1, 2))
    assert first == again
    assert first.interval != other.interval
