"""Synthetic rounds have the accepted lengths that they were asked for, and confidences that mean what they say."""

from __future__ import annotations

import numpy as np
import pytest

from draftsmith.calibration.ece import expected_calibration_error, roc_auc
from draftsmith.calibration.sts import confidence
from draftsmith.errors import DraftsmithError
from draftsmith.serving.recorded import RecordedRounds
from draftsmith.serving.synthetic_rounds import PUBLISHED, published_lengths, synthetic_rounds


def rounds_of(rounds: RecordedRounds, domain: str) -> np.ndarray:
    chosen = np.flatnonzero(rounds.domain == rounds.domains.index(domain))
    return np.concatenate([np.arange(rounds.first[at], rounds.last[at] + 1) for at in chosen])


@pytest.mark.parametrize("kind", ["dspark", "dflash", "eagle3"])
def test_accepted_lengths_are_the_given_ones(kind: str) -> None:
    lengths = published_lengths(kind, block_size=7)
    assert lengths == PUBLISHED[kind]
    rounds = synthetic_rounds(lengths, block_size=7, confident=True, seed=3)
    for name, length in lengths.items():
        found = rounds.accepted[rounds_of(rounds, name)] + 1
        assert found.mean() == pytest.approx(length, abs=4 * found.std() / np.sqrt(len(found)))
    assert rounds.accepted.max() == 7
    assert rounds.accepted.min() == 0


def test_confidences_are_calibrated_and_tell_about_as_much_as_published_ones() -> None:
    rounds = synthetic_rounds(published_lengths("dspark", block_size=7), block_size=7, confident=True, seed=0)
    assert rounds.logits is not None
    chances = confidence(rounds.logits, temperatures=1.0)
    for slot in range(7):
        rows = rounds.accepted >= slot
        outcome = rounds.accepted[rows] > slot
        assert expected_calibration_error(chances[rows, slot], outcome=outcome, num_bins=20) < 0.015
        auc = roc_auc(rounds.logits[rows, slot], outcome=outcome)
        assert auc is not None
        assert 0.81 <= auc <= 0.907


def test_equal_seeds_give_equal_rounds_and_a_drafter_without_a_head_the_same_ones() -> None:
    lengths = {"chat": 2.0, "math": 3.0}
    one = synthetic_rounds(lengths, block_size=4, confident=True, seed=5, num_answers=9)
    two = synthetic_rounds(lengths, block_size=4, confident=False, seed=5, num_answers=9)
    other = synthetic_rounds(lengths, block_size=4, confident=True, seed=6, num_answers=9)
    assert np.array_equal(one.accepted, two.accepted)
    assert two.logits is None
    assert not np.array_equal(one.accepted, other.accepted)
    assert (one.num_answers, one.num_rounds) == (18, 18 * 24)


def test_a_block_of_one_has_lengths_that_it_can_reach() -> None:
    lengths = published_lengths("mtp1", block_size=1)
    assert set(lengths) == {"chat", "math", "code"}
    rounds = synthetic_rounds(lengths, block_size=1, confident=False, seed=0)
    assert rounds.accepted_length == pytest.approx(np.mean(list(lengths.values())), abs=0.02)
    assert max(published_lengths("dspark", block_size=3).values()) == pytest.approx(3.7)


@pytest.mark.parametrize("length", [1.0, 5.0, 0.2])
def test_a_length_that_no_block_has_is_refused(length: float) -> None:
    with pytest.raises(DraftsmithError, match="an accepted length for chat"):
        synthetic_rounds({"chat": length}, block_size=4, confident=True, seed=0)
