"""Means over benchmarks and paired differences against hand counts and synthetic prompts of known difference."""

from __future__ import annotations

import json

import numpy as np
import pytest

from draftsmith.errors import DraftsmithError
from draftsmith.evaluation.bootstrap import Estimate
from draftsmith.evaluation.paired import PromptCounts, mean_difference, mean_length


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
    assert Estimate(-1e-3, (-2e-3, -1e-4), 3).excludes_zero
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


def test_macro_is_the_mean_over_prompts_of_their_own_ratios() -> None:
    prompts = [counts((2, 4), (8, 8), (0, 0)), counts((1, 3), (4, 6))]
    found = mean_length(prompts, seed=0, mean="macro")
    assert found.value == pytest.approx(((2 + 1) / 2 + (3 + 1.5) / 2) / 2)
    # Whichever prompt is drawn twice: from (1 + 1.5) / 2 to (2 + 3) / 2.
    assert found.interval == (1.25, 2.5)
    assert mean_length(prompts, seed=0, mean="macro", bonus="without").value == pytest.approx(found.value - 1)


def test_only_some_prompts() -> None:
    some = counts((2, 4), (0, 0), (3, 9))
    assert some.with_rounds == {"a", "c"}
    kept = some.only({"c", "b", "z"})
    assert (kept.ids, kept.rounds, kept.committed, kept.committed_draft) == (("b", "c"), (0, 3), (0, 9), (0, 6))


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
