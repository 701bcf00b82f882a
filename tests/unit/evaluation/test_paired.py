"""Means over benchmarks and paired differences against hand counts, SciPy and synthetic prompts of known difference."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scipy import stats

from draftsmith.errors import DraftsmithError
from draftsmith.evaluation.paired import (
    Estimate,
    PromptCounts,
    mean_difference,
    mean_length,
    student_quantile,
)


def counts(*prompts: tuple[int, int], names: str = "abcdefghijkl") -> PromptCounts:
    """Prompts a, b, ... of (rounds, committed tokens); every round but its bonus token was drafted."""
    rounds, committed = [item[0] for item in prompts], [item[1] for item in prompts]
    return PromptCounts(
        tuple(names[: len(prompts)]), tuple(rounds), tuple(committed),
        tuple(tokens - number for number, tokens in prompts),
    )  # fmt: skip


def test_the_mean_is_over_benchmarks_of_tokens_over_rounds() -> None:
    code, math = counts((2, 4), (8, 8)), counts((1, 3), (1, 3), (0, 0))
    found = mean_length([code, math], seed=0)
    # 12 tokens in 10 rounds and 6 in 2: the plain mean of 1.2 and 3, whatever the numbers of rounds.
    assert found.value == pytest.approx((1.2 + 3.0) / 2)
    assert found.num_prompts == 4  # one prompt has no round
    assert mean_length([code, math], seed=0, bonus="without").value == pytest.approx((0.2 + 2.0) / 2)


def test_a_difference_is_paired_by_the_prompts_names() -> None:
    """Each drafter has its prompts in another order; on each prompt the first commits half a token a round more."""
    ours = PromptCounts(("x", "y", "z"), (2, 4, 6), (3, 10, 21), (1, 6, 15))
    base = PromptCounts(("z", "x", "y"), (6, 2, 4), (18, 2, 8), (12, 0, 4))
    found = mean_difference([ours], baseline=[base], seed=0)
    assert found.value == pytest.approx((34 - 28) / 12)
    assert found.interval == pytest.approx((0.5, 0.5))
    assert found.excludes_zero
    turned = mean_difference([base], baseline=[ours], seed=0)
    assert turned.value == pytest.approx(-found.value)
    assert turned.excludes_zero


def test_a_drafter_does_not_differ_from_itself() -> None:
    some = counts((2, 4), (8, 8), (3, 9))
    found = mean_difference([some, some], baseline=[some, some], seed=0)
    assert (found.value, found.interval, found.excludes_zero) == (0.0, (0.0, 0.0), False)


def test_rounding_is_no_difference() -> None:
    assert not Estimate(1e-17, (1e-17, 1e-17), 3).excludes_zero
    assert Estimate(1e-3, (1e-4, 2e-3), 3).excludes_zero
    assert not Estimate(1e-3, (-1e-4, 2e-3), 3).excludes_zero


def test_prompts_without_rounds_in_either_are_left_out() -> None:
    ours, base = counts((2, 4), (0, 0), (1, 3)), counts((2, 2), (5, 5), (1, 1))
    found = mean_difference([ours], baseline=[base], seed=0)
    assert found.value == pytest.approx(7 / 3 - 1.0)
    assert found.num_prompts == 2


def test_one_prompt_has_no_interval() -> None:
    found = mean_length([counts((2, 4), (3, 3)), counts((2, 4))], seed=0)
    assert found.value == pytest.approx((7 / 5 + 2) / 2)
    assert found.interval is None
    assert not found.excludes_zero


def test_what_cannot_be_compared_is_refused() -> None:
    some = counts((2, 4), (3, 3))
    with pytest.raises(DraftsmithError, match="the same prompts"):
        mean_difference([some], baseline=[counts((2, 4))], seed=0)
    with pytest.raises(DraftsmithError, match="the same benchmarks: got 1 and 2 benchmarks"):
        mean_difference([some], baseline=[some, some], seed=0)
    with pytest.raises(DraftsmithError, match="no prompt with decoding rounds"):
        mean_length([counts((0, 0))], seed=0)
    with pytest.raises(DraftsmithError, match="no prompt with decoding rounds"):
        mean_difference([counts((0, 0), (1, 1))], baseline=[counts((1, 1), (0, 0))], seed=0)
    with pytest.raises(DraftsmithError, match="do not fit together"):
        PromptCounts(("a",), (1, 2), (1,), (0,))
    with pytest.raises(DraftsmithError, match="do not fit together"):
        PromptCounts(("a", "a"), (1, 2), (1, 2), (0, 0))


def test_counts_survive_json() -> None:
    some = counts((2, 4), (8, 8))
    assert PromptCounts.from_json(json.loads(json.dumps(some.to_json()))) == some


def test_students_quantile() -> None:
    for degrees, tolerance in ((2, 1e-2), (3, 2e-3), (4, 1e-3), (5.5, 5e-4), (11, 1e-4), (60, 1e-6)):
        assert student_quantile(0.975, degrees=degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=tolerance)


def test_one_benchmark_has_the_interval_of_the_t_test() -> None:
    """Equal rounds make the ratio a mean of 12 nearly normal numbers, whose interval is Student's."""
    rng = np.random.default_rng(0)
    tokens = np.clip(rng.normal(300, 40, size=12).round(), 100, None).astype(int)
    found = mean_length([counts(*((100, int(number)) for number in tokens))], seed=1, num_resamples=40_000)
    expected = stats.t.interval(0.95, 11, loc=tokens.mean() / 100, scale=stats.sem(tokens) / 100)
    assert found.interval is not None
    width = found.interval[1] - found.interval[0]
    assert width == pytest.approx(expected[1] - expected[0], rel=0.05)
    # A plain percentile interval would be a ninth narrower or more.
    plain = np.quantile(rng.choice(tokens / 100, size=(40_000, 12)).mean(axis=1), [0.025, 0.975])
    assert width > 1.1 * (plain[1] - plain[0])


def test_strata_have_the_interval_of_welchs_degrees_of_freedom() -> None:
    rng = np.random.default_rng(1)
    strata = [
        np.clip(rng.normal(300, spread, size=number).round(), 100, None) for number, spread in ((12, 20), (6, 60))
    ]
    found = mean_length(
        [counts(*((100, int(value)) for value in values)) for values in strata], seed=1, num_resamples=40_000
    )
    errors = np.array([stats.sem(values / 100) ** 2 for values in strata])
    degrees = errors.sum() ** 2 / (errors**2 / [11, 5]).sum()
    half = stats.t.ppf(0.975, degrees) * np.sqrt(errors.sum()) / 2  # of the mean of two
    assert found.interval is not None
    assert (found.interval[1] - found.interval[0]) / 2 == pytest.approx(half, rel=0.06)


def synthetic(rng: np.random.Generator, num_prompts: int, *, better: float) -> tuple[PromptCounts, PromptCounts]:
    """Two drafters on prompts of differing difficulty and length; the first one's ease is `better` higher."""
    names = tuple(f"p{number}" for number in range(num_prompts))
    sides: list[list[tuple[int, int]]] = [[], []]
    for _ in names:
        ease, number = rng.uniform(0.1, 0.6), rng.integers(20, 60)
        for side, extra in zip(sides, (better, 0.0), strict=True):
            lengths = np.minimum(rng.geometric(1 - ease - extra, size=number) - 1, 7)
            side.append((int(number), int(number + lengths.sum())))
    ours, theirs = (
        PromptCounts(
            names, tuple(n for n, _ in side), tuple(c for _, c in side), tuple(c - n for n, c in side)
        )
        for side in sides
    )  # fmt: skip
    return ours, theirs


@pytest.mark.parametrize("better", [0.0, 0.1])
def test_intervals_cover_the_true_difference_19_times_in_20(better: float) -> None:
    """Three benchmarks of 12, 12 and 6 prompts, as the default line has them."""
    rng = np.random.default_rng(2)
    ours, theirs = synthetic(rng, 40_000, better=better)
    truth = mean_difference([ours], baseline=[theirs], seed=0, num_resamples=2).value
    runs, hits = 800, 0
    for seed in range(runs):
        pairs = [synthetic(rng, number, better=better) for number in (12, 12, 6)]
        low, high = interval_of(
            mean_difference(
                [pair[0] for pair in pairs], baseline=[pair[1] for pair in pairs], seed=seed, num_resamples=1000
            )
        )
        hits += low <= truth <= high
    # One standard error of 800 draws is 0.8 %; a plain percentile interval covers 90 to 92 %.
    assert 0.93 <= hits / runs <= 0.98


def test_few_prompts_are_covered_better_than_by_plain_percentiles() -> None:
    """One benchmark of 12 prompts, whose mean is skewed: 93 % and a little more, plain percentiles 90 %."""
    rng = np.random.default_rng(3)
    truth = mean_length([synthetic(rng, 40_000, better=0.0)[0]], seed=0, num_resamples=2).value
    runs, hits, plain_hits = 800, 0, 0
    for seed in range(runs):
        prompts, _ = synthetic(rng, 12, better=0.0)
        low, high = interval_of(mean_length([prompts], seed=seed, num_resamples=1000))
        hits += low <= truth <= high
        drawn = rng.integers(0, 12, size=(1000, 12))
        sums = [np.array(column)[drawn].sum(axis=1) for column in (prompts.committed, prompts.rounds)]
        low, high = np.quantile(sums[0] / sums[1], [0.025, 0.975])
        plain_hits += low <= truth <= high
    assert hits / runs >= 0.92
    assert hits - plain_hits >= 0.02 * runs


def interval_of(estimate: Estimate) -> tuple[float, float]:
    assert estimate.interval is not None
    return estimate.interval


def test_pairing_tells_apart_what_two_intervals_cannot() -> None:
    ours, theirs = synthetic(np.random.default_rng(3), 24, better=0.06)
    first, second = mean_length([ours], seed=0).interval, mean_length([theirs], seed=0).interval
    assert first is not None
    assert second is not None
    assert first[0] < second[1], "the two intervals overlap"
    assert mean_difference([ours], baseline=[theirs], seed=0).excludes_zero


def test_estimates_are_reproducible() -> None:
    ours, theirs = synthetic(np.random.default_rng(4), 10, better=0.0)
    first, second, other = (mean_difference([ours], baseline=[theirs], seed=seed) for seed in (1, 1, 2))
    assert first == second
    assert first.value == other.value
    assert first.interval != other.interval
