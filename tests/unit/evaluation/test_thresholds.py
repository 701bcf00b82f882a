"""The threshold sweep against a replay slot by slot, and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from draftsmith.decoding.rounds import Round
from draftsmith.evaluation.thresholds import raw_confidence, threshold_sweep
from tests.unit.evaluation.evaluations import make_round


def logits(*confidences: float) -> tuple[float, ...]:
    return tuple(math.log(c / (1 - c)) for c in confidences)


def at(rows: list[dict], threshold: float) -> dict:
    [row] = [row for row in rows if row["threshold"] == threshold]
    return row


def test_by_hand() -> None:
    rounds = [
        make_round(2, logits=logits(0.9, 0.6, 0.3)),  # accepted, accepted, rejected
        make_round(2, logits=logits(0.8, 0.7, 0.6), ended=True),  # its third slot does not count
        make_round(0, logits=logits(0.2, 0.9, 0.9)),  # stops at the first threshold above 0.2
        make_round(3, logits=logits(0.9, 0.9, 0.9), committed=1, cut=True),  # room for one token
        make_round(3, verified=2, logits=logits(0.9, 0.9, 0.9)),  # not of full length
        make_round(1),  # without confidences
    ]
    rows = threshold_sweep(rounds, block_size=3)
    assert [row["threshold"] for row in rows] == [number / 20 for number in range(20)]
    whole = at(rows, 0.0)
    assert (whole["num_rounds"], whole["verified"], whole["accepted"], whole["rejected"]) == (4, 3 + 2 + 3 + 3, 7, 4)
    assert whole["acceptance_rate"] == pytest.approx(7 / 11)
    assert whole["accepted_length"] == pytest.approx((3 + 2 + 1 + 1) / 4)
    middle = at(rows, 0.5)  # lengths 2, 3 of which 2 count, 0, 3
    assert (middle["verified"], middle["accepted"], middle["rejected"]) == (2 + 2 + 0 + 3, 2 + 2 + 0 + 3, 0)
    assert middle["accepted_length"] == pytest.approx((3 + 2 + 1 + 1) / 4)
    high = at(rows, 0.75)  # lengths 1, 1, 0, 3: before its end-of-text a round has a bonus token again
    assert (high["verified"], high["accepted"], high["rejected"]) == (5, 5, 0)
    assert high["accepted_length"] == pytest.approx((2 + 2 + 1 + 1) / 4)
    none = at(rows, 0.95)
    assert (none["verified"], none["accepted"], none["acceptance_rate"]) == (0, 0, None)
    assert none["accepted_length"] == 1.0


def test_a_confidence_at_the_threshold_is_verified() -> None:
    rows = threshold_sweep([make_round(1, verified=1, logits=(0.0,))], block_size=1)  # confidence 0.5
    assert at(rows, 0.5)["verified"] == 1
    assert at(rows, 0.55)["verified"] == 0


def test_without_confidences_there_is_no_sweep() -> None:
    assert threshold_sweep([make_round(1)], block_size=3) == []
    assert threshold_sweep([], block_size=3) == []


def test_raw_confidence_is_the_logistic_function() -> None:
    for value in (-800.0, -3.0, 0.0, 0.5, 40.0, 800.0):
        with np.errstate(over="ignore"):
            expected = float(1 / (1 + np.exp(-np.float64(value))))
        assert raw_confidence(value) == pytest.approx(expected, rel=1e-12, abs=1e-300)


def random_round(rng: np.random.Generator, block_size: int) -> Round:
    accepted = int(rng.integers(0, block_size + 1))
    ended = accepted > 0 and rng.random() < 0.3
    usual = accepted if ended else accepted + 1
    committed = int(rng.integers(1, usual + 1)) if rng.random() < 0.2 else usual
    return make_round(
        accepted, verified=block_size, ended=ended, committed=committed, cut=committed < usual,
        logits=rng.normal(0.5, 2.0, size=block_size),
    )  # fmt: skip


def test_the_sweep_is_a_replay_token_by_token() -> None:
    rng = np.random.default_rng(0)
    rounds = [random_round(rng, 5) for _ in range(300)]
    for row in threshold_sweep(rounds, block_size=5):
        verified = accepted = rejected = tokens = 0
        for item in rounds:
            room, stopped = item.committed, False
            for slot in range(1, 6):
                if 1 / (1 + np.exp(-item.confidence_logits[slot - 1])) < row["threshold"]:
                    break
                if item.ended and slot > item.accepted:
                    break  # past the end-of-text nothing is asked any more
                verified += 1
                if slot <= item.accepted:
                    accepted += 1
                    tokens += room > 0
                    room -= 1
                    stopped = item.ended and slot == item.accepted
                else:
                    rejected += 1
            if not stopped:
                tokens += room > 0  # the target's own token
        assert (row["verified"], row["accepted"], row["rejected"]) == (verified, accepted, rejected)
        assert row["accepted_length"] == pytest.approx(tokens / len(rounds))
    [first, *_] = threshold_sweep(rounds, block_size=5)
    assert first["accepted_length"] == pytest.approx(sum(item.committed for item in rounds) / len(rounds))
