"""From round records to arrays: what counts, the split by prompt, and what is refused."""

from __future__ import annotations

import random

import pytest

from draftsmith.calibration.collect import collect_rounds, split_rounds
from draftsmith.decoding.rounds import Generation, Round
from draftsmith.errors import CalibrationError


def make_round(
    accepted: int, *, verified: int = 3, ended: bool = False, logits: tuple[float, ...] = (1.0, 2.0, 3.0)
) -> Round:
    return Round(
        anchor_position=9,
        verified=verified,
        accepted=accepted,
        committed=accepted if ended else accepted + 1,
        ended=ended,
        cut=False,
        confidence_logits=logits,
    )


def make_generation(request_id: str, rounds: list[Round]) -> Generation:
    size = 1 + sum(item.committed for item in rounds)
    return Generation(request_id, (5,) * size, (False,) * size, "length", tuple(rounds))


def test_arrays_by_hand() -> None:
    generations = [
        make_generation("a/t0", [make_round(1), make_round(3, logits=(-1.0, 0.0, 4.5))]),
        make_generation("a/t1", [make_round(2, ended=True)]),
        make_generation("b", [make_round(0, verified=2)]),
        make_generation("c", []),
    ]
    arrays = collect_rounds(generations, block_size=3)
    assert arrays.logits.tolist() == [[1, 2, 3], [-1, 0, 4.5], [1, 2, 3], [1, 2, 3]]
    assert arrays.accepted.tolist() == [1, 3, 2, 0]
    assert arrays.counted.tolist() == [3, 3, 2, 2]  # verified, but an accepted end-of-text at slot 2 ends the third
    assert (arrays.num_rounds, arrays.num_slots, arrays.num_prompts) == (4, 3, 3)
    assert arrays.num_counted == (4, 4, 2)


def test_no_rounds_give_empty_arrays_of_the_right_shape() -> None:
    arrays = collect_rounds([make_generation("a", [])], block_size=3)
    assert arrays.logits.shape == (0, 3)
    assert arrays.num_counted == (0, 0, 0)


def test_rounds_without_their_logits_are_refused_by_name() -> None:
    generations = [make_generation("q7/t0", [make_round(1), make_round(1, logits=())])]
    with pytest.raises(
        CalibrationError, match=r"one confidence logit a slot: got 0, expected 3 \(request q7/t0, round 1\)"
    ):
        collect_rounds(generations, block_size=3)


@pytest.mark.parametrize("broken", [make_round(3, verified=2), make_round(2, verified=4), make_round(-1)])
def test_rounds_that_contradict_themselves_are_refused(broken: Round) -> None:
    with pytest.raises(CalibrationError, match="contradicts itself"):
        collect_rounds([make_generation("q", [broken])], block_size=3)


def tagged_generations(num_prompts: int, *, rounds_each: int = 4) -> list[Generation]:
    """Two turns a prompt; the first logit of each round is the prompt's number."""
    return [
        make_generation(f"p{number:03d}/t{turn}", [make_round(1, logits=(float(number), 0.0, 0.0))] * rounds_each)
        for number in range(num_prompts)
        for turn in (0, 1)
    ]


def test_no_prompt_is_in_both_parts_and_none_is_lost() -> None:
    split = split_rounds(tagged_generations(21), block_size=3, holdout_share=1 / 3, min_rounds=1, seed=0)
    fit, holdout = set(split.fit.logits[:, 0]), set(split.holdout.logits[:, 0])
    assert fit.isdisjoint(holdout)
    assert fit | holdout == set(range(21))
    assert (len(fit), len(holdout)) == (split.fit.num_prompts, split.holdout.num_prompts) == (14, 7)
    assert (split.fit.num_rounds, split.holdout.num_rounds) == (14 * 8, 7 * 8)


def test_split_depends_on_the_seed_and_not_on_the_order() -> None:
    generations = tagged_generations(30)
    shuffled = random.Random(1).sample(generations, len(generations))
    arguments = {"block_size": 3, "holdout_share": 0.5, "min_rounds": 1}
    first = split_rounds(generations, seed=0, **arguments)
    assert set(split_rounds(shuffled, seed=0, **arguments).fit.logits[:, 0]) == set(first.fit.logits[:, 0])
    assert set(split_rounds(generations, seed=1, **arguments).fit.logits[:, 0]) != set(first.fit.logits[:, 0])


@pytest.mark.parametrize(("share", "num_holdout"), [(0.01, 1), (0.99, 2)])
def test_both_parts_hold_at_least_one_prompt(share: float, num_holdout: int) -> None:
    split = split_rounds(tagged_generations(3), block_size=3, holdout_share=share, min_rounds=1, seed=0)
    assert split.holdout.num_prompts == num_holdout


def test_too_few_rounds_name_the_number_needed_and_the_knobs() -> None:
    # 10 prompts in either half, 8 rounds each: 80. 200 are 2.5 times as many, so 50 prompts.
    with pytest.raises(CalibrationError) as caught:
        split_rounds(tagged_generations(20), block_size=3, holdout_share=0.5, min_rounds=200, seed=0)
    text = str(caught.value)
    assert "too few fitting rounds to calibrate: got 80 that count at slot 1, from 10 prompts" in text
    assert "expected at least 200, about 50 calibration prompts in all" in text
    assert "prompts.num_calibration" in text


def test_the_slot_with_the_fewest_rounds_decides() -> None:
    generations = [make_generation(f"p{i}", [make_round(1), make_round(2, ended=True)]) for i in range(20)]
    split_rounds(generations, block_size=3, holdout_share=0.5, min_rounds=10, seed=0)
    with pytest.raises(CalibrationError, match=r"got 10 that count at slot 3, .* expected at least 11, about 22"):
        split_rounds(generations, block_size=3, holdout_share=0.5, min_rounds=11, seed=0)


def test_slots_never_verified_are_too_few_without_an_estimate() -> None:
    generations = [make_generation(f"p{i}", [make_round(1, verified=2)]) for i in range(4)]
    with pytest.raises(CalibrationError, match=r"got 0 that count at slot 3, from 2 prompts, expected at least 1 \("):
        split_rounds(generations, block_size=3, holdout_share=0.5, min_rounds=1, seed=0)


def test_one_prompt_cannot_be_split() -> None:
    with pytest.raises(CalibrationError, match="too few prompts to hold some out: got 1, expected at least 2"):
        split_rounds(tagged_generations(1), block_size=3, holdout_share=0.5, min_rounds=1, seed=0)
