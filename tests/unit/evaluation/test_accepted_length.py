"""Accepted length and acceptance by position against records counted by hand, brute force and SciPy's bootstrap."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import bootstrap

from draftsmith.decoding.rounds import Generation
from draftsmith.errors import DraftsmithError
from draftsmith.evaluation.accepted_length import (
    AcceptedLength,
    compare_accepted_length,
    measure_accepted_length,
    share_identical,
)
from tests.unit.evaluation.evaluations import make_generation, make_round

# K = 3. Counted by hand in the tests below.
GENERATIONS = [
    make_generation("a/t0", [make_round(2), make_round(0)]),  # commits 3 + 1
    make_generation("a/t1", [make_round(2, ended=True)]),  # commits 2: an accepted end-of-text, no bonus
    make_generation("b/t0", [make_round(3), make_round(3, committed=2, cut=True)]),  # commits 4 + 2 of 4
    make_generation("c/t0", []),  # the prefill token was the whole answer
    make_generation("d/t0", [make_round(0, verified=1)]),  # commits 1
]


@pytest.fixture(scope="module")
def measured() -> AcceptedLength:
    return measure_accepted_length(GENERATIONS, block_size=3, seed=0)


def test_counts(measured: AcceptedLength) -> None:
    assert (measured.num_prompts, measured.num_requests, measured.num_prompts_without_rounds) == (4, 5, 1)
    assert (measured.num_rounds, measured.num_cut_rounds, measured.share_cut) == (6, 1, 1 / 6)
    assert (measured.num_ended_rounds, measured.share_ended) == (1, 1 / 6)
    assert measured.num_committed == 3 + 1 + 2 + 4 + 2 + 1
    assert measured.num_tokens == measured.num_committed + 5  # and one token of each prefill


def test_accepted_length_with_and_without_bonus(measured: AcceptedLength) -> None:
    assert measured.accepted_length == pytest.approx(13 / 6)
    assert measured.accepted_length_without_bonus == pytest.approx((2 + 0 + 2 + 3 + 2 + 0) / 6)


def test_macro_is_the_mean_over_prompts_with_rounds(measured: AcceptedLength) -> None:
    assert measured.accepted_length_macro == pytest.approx((6 / 3 + 6 / 2 + 1 / 1) / 3)
    assert measured.accepted_length_without_bonus_macro == pytest.approx((4 / 3 + 5 / 2 + 0 / 1) / 3)
    # Of 3 prompts the interval is their range: the hardest one or the easiest drawn three times.
    assert measured.accepted_length_macro_interval == (1.0, 3.0)
    assert measured.accepted_length_without_bonus_macro_interval == (0.0, 2.5)


def test_conditional_acceptance(measured: AcceptedLength) -> None:
    # Slot 1: 4 of 6. Slot 2: a/t0's first round, a/t1 and both of b, 4 of 4. Slot 3: the end-of-text of a/t1
    # was slot 2, so only a/t0's first round and both of b: 2 of 3, the cut one counted in full.
    assert measured.num_conditional == (6, 4, 3)
    assert measured.conditional_acceptance == pytest.approx((4 / 6, 1.0, 2 / 3))
    # By prompt: 2/3, 2/2, 0/1 at slot 1; 2/2 and 2/2 at slot 2, without spread; 0/1 and 2/2 at slot 3.
    intervals = measured.conditional_acceptance_interval
    assert intervals[0] == (0.0, 1.0)
    assert intervals[1] == pytest.approx((0.025**0.5, 1.0))
    assert intervals[2] == (0.0, 1.0)


def test_prefix_survival(measured: AcceptedLength) -> None:
    assert measured.num_counted == (6, 5, 4)
    assert measured.prefix_survival == pytest.approx((4 / 6, 4 / 5, 2 / 4))


def test_positions_without_evidence_are_none() -> None:
    measured = measure_accepted_length([make_generation("a", [make_round(0)])], block_size=3, seed=0)
    assert measured.conditional_acceptance == (0.0, None, None)
    assert measured.prefix_survival == (0.0, 0.0, 0.0)
    assert measured.conditional_acceptance_interval == (None, None, None)


def test_one_prompt_has_no_interval() -> None:
    generations = [make_generation("a/t0", [make_round(2)]), make_generation("a/t1", [make_round(0)])]
    measured = measure_accepted_length(generations, block_size=3, seed=0)
    assert measured.accepted_length == 2.0
    assert measured.accepted_length_interval is None


def test_no_round_at_all_is_refused() -> None:
    with pytest.raises(DraftsmithError, match=r"no decoding round to measure.*evaluate.max_new_tokens"):
        measure_accepted_length([make_generation("a", [])], block_size=3, seed=0)


@st.composite
def records(draw: st.DrawFn) -> list[Generation]:
    generations = []
    for index in range(draw(st.integers(1, 5))):
        rounds = []
        for _ in range(draw(st.integers(1, 6))):
            verified = draw(st.integers(0, 4))
            accepted = draw(st.integers(0, verified))
            ended = accepted > 0 and draw(st.booleans())
            usual = accepted if ended else accepted + 1
            committed = draw(st.integers(1, usual))
            rounds.append(
                make_round(accepted, verified=verified, committed=committed, ended=ended, cut=committed < usual)
            )
        generations.append(make_generation(f"{index // 2}/t{index % 2}", rounds))
    return generations


@settings(deadline=None)
@given(records())
def test_measures_equal_their_definitions(generations: list[Generation]) -> None:
    measured = measure_accepted_length(generations, block_size=4, seed=0, num_resamples=10)
    rounds = [item for generation in generations for item in generation.rounds]
    assert measured.accepted_length == pytest.approx(sum(item.committed for item in rounds) / len(rounds))
    marks = sum(sum(generation.drafted) for generation in generations)
    assert measured.accepted_length_without_bonus == pytest.approx(marks / len(rounds))
    for k in range(1, 5):
        reached = [r for r in rounds if r.accepted >= k - 1 and r.verified >= k and not (r.ended and k > r.accepted)]
        seen = [r for r in rounds if r.verified >= k and not (r.ended and k > r.accepted)]
        for found, population in (
            (measured.conditional_acceptance[k - 1], reached),
            (measured.prefix_survival[k - 1], seen),
        ):
            if population:
                assert found == pytest.approx(sum(r.accepted >= k for r in population) / len(population))
            else:
                assert found is None


def test_with_full_verification_the_accepted_length_is_one_plus_the_survivals() -> None:
    lengths = np.random.default_rng(0).integers(0, 8, size=200)
    generations = [make_generation(f"p{i}", [make_round(int(n), verified=7)]) for i, n in enumerate(lengths)]
    measured = measure_accepted_length(generations, block_size=7, seed=0)
    assert measured.accepted_length == pytest.approx(1 + sum(measured.prefix_survival), abs=1e-12)
    assert np.cumprod(measured.conditional_acceptance) == pytest.approx(measured.prefix_survival, abs=1e-12)


def random_generations(rng: np.random.Generator, num_prompts: int) -> list[Generation]:
    """Prompts of differing difficulty and length; K = 7."""
    generations = []
    for index in range(num_prompts):
        ease = rng.uniform(0.3, 0.9)
        lengths = np.minimum(rng.geometric(1 - ease, size=rng.integers(5, 30)) - 1, 7)
        generations.append(make_generation(f"p{index}", [make_round(int(n), verified=7) for n in lengths]))
    return generations


def test_interval_agrees_with_scipys_bootstrap() -> None:
    """Of 60 prompts the expanded percentiles lie hardly further out than SciPy's plain ones."""
    generations = random_generations(np.random.default_rng(1), 60)
    measured = measure_accepted_length(generations, block_size=7, seed=2, num_resamples=20_000)
    committed = np.array([sum(item.committed for item in generation.rounds) for generation in generations])
    rounds = np.array([len(generation.rounds) for generation in generations])
    reference = bootstrap(
        (committed, rounds),
        lambda top, bottom, axis: top.sum(axis=axis) / bottom.sum(axis=axis),
        paired=True,
        n_resamples=20_000,
        method="percentile",
        rng=np.random.default_rng(3),
    ).confidence_interval
    assert measured.accepted_length_interval == pytest.approx((reference.low, reference.high), abs=0.02)
    low, high = measured.accepted_length_without_bonus_interval or (0.0, 0.0)
    assert (low + 1, high + 1) == pytest.approx(measured.accepted_length_interval, abs=1e-12)
    macro = bootstrap(
        (committed / rounds,), np.mean, n_resamples=20_000, method="percentile", rng=np.random.default_rng(3)
    ).confidence_interval
    assert measured.accepted_length_macro_interval == pytest.approx((macro.low, macro.high), abs=0.02)
    assert abs(macro.high - reference.high) > 0.03, "micro and macro differ"


def test_intervals_are_reproducible() -> None:
    generations = random_generations(np.random.default_rng(5), 10)
    first, second, other = (measure_accepted_length(generations, block_size=7, seed=seed) for seed in (1, 1, 2))
    assert first == second
    assert first.accepted_length_interval != other.accepted_length_interval
    assert first.accepted_length == other.accepted_length


def answer(request_id: str, *token_ids: int) -> Generation:
    return Generation(request_id, token_ids, (False,) * len(token_ids), "length", ())


def test_share_identical_counts_prompts_with_all_turns() -> None:
    plain = [answer("a/t0", 1, 2), answer("a/t1", 3), answer("b/t0", 4), answer("c", 5), answer("d", 6, 7)]
    ours = [answer("d", 6, 7), answer("a/t0", 1, 2), answer("a/t1", 9), answer("b/t0", 4), answer("c", 5, 5)]
    assert share_identical(ours, plain=plain) == 2 / 4
    assert share_identical(plain, plain=plain) == 1.0


def test_share_identical_refuses_other_requests() -> None:
    with pytest.raises(DraftsmithError, match="must answer the same requests"):
        share_identical([answer("a", 1)], plain=[answer("b", 1)])


def test_a_drafter_against_itself_differs_by_nothing() -> None:
    found = compare_accepted_length(GENERATIONS, baseline=GENERATIONS, seed=0)
    # Prompt c has no round.
    assert (found.value, found.interval, found.num_prompts) == (0.0, (0.0, 0.0), 3)


def test_a_difference_is_of_ratios_over_the_same_prompts() -> None:
    ours = [make_generation("a", [make_round(2)]), make_generation("b", [make_round(1), make_round(0)])]
    theirs = [make_generation("a", [make_round(0)]), make_generation("b", [make_round(0)])]
    found = compare_accepted_length(ours, baseline=theirs, seed=0)
    # (3 + 2 + 1) / 3 rounds less (1 + 1) / 2 rounds; prompt a alone gives 3 - 1, prompt b alone 3 / 2 - 1.
    assert found.value == 1.0
    assert found.interval == (0.5, 2.0)


def test_pairing_takes_out_what_differs_between_prompts() -> None:
    """Prompts whose lengths differ a lot, each drafter 1 token better on every one of them: no spread is left."""
    better = [make_generation(f"p{n}", [make_round(1 + n % 2)]) for n in range(12)]
    worse = [make_generation(f"p{n}", [make_round(n % 2)]) for n in range(12)]
    found = compare_accepted_length(better, baseline=worse, seed=0)
    assert found.interval == pytest.approx((1.0, 1.0))
    alone = measure_accepted_length(better, block_size=3, seed=0).accepted_length_interval
    assert alone is not None
    assert alone[1] - alone[0] > 0.3  # lengths 2 and 3 in equal parts


def test_other_prompts_cannot_be_paired() -> None:
    with pytest.raises(DraftsmithError, match="same prompts"):
        compare_accepted_length(GENERATIONS, baseline=GENERATIONS[:2], seed=0)
    with pytest.raises(DraftsmithError, match="no prompt with decoding rounds"):
        compare_accepted_length([make_generation("a", [])], baseline=[make_generation("a", [])], seed=0)
