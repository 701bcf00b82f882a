"""Recorded rounds written down by hand or drawn, for tests of what replays them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from draftsmith.decoding.rounds import Generation, Round
from draftsmith.serving.recorded import RecordedRounds, record_rounds

Told = tuple[int, bool]
"""Accepted draft tokens of a round, and whether an end-of-text was the last of them."""


def answer(name: str, told: Sequence[Told], *, block_size: int, logits: Sequence[Sequence[float]] = ()) -> Generation:
    """A recorded answer; the text itself is of no interest."""
    rounds, position = [], 5
    for index, (accepted, ended) in enumerate(told):
        committed = accepted + (not ended)
        said = tuple(logits[index]) if logits else ()
        rounds.append(Round(position, block_size, accepted, committed, ended, False, said))
        position += committed
    length = 1 + sum(item.committed for item in rounds)
    return Generation(name, (7,) * length, (False,) * length, "length", tuple(rounds))


def drawn_answers(
    num: int, *, block_size: int, num_rounds: int, seed: int, ends: float = 0.0, name: str = "a"
) -> list[Generation]:
    """Answers of 1..`num_rounds` rounds whose tokens are accepted as likely as their confidence says; some of the last
    rounds accept an end-of-text."""
    rng = np.random.default_rng(seed)
    answers = []
    for number in range(num):
        told, logits = [], []
        count = int(rng.integers(1, num_rounds + 1))
        for index in range(count):
            confidence = rng.beta(3.0, 1.0, block_size)
            accepted = int((rng.random(block_size) < confidence).cumprod().sum())
            told.append((accepted, accepted > 0 and index == count - 1 and bool(rng.random() < ends)))
            logits.append([math.log(c / (1 - c)) for c in confidence])
        answers.append(answer(f"{name}{number}", told, block_size=block_size, logits=logits))
    return answers


def drawn_rounds(*, block_size: int = 4, seed: int = 0, ends: float = 0.5) -> RecordedRounds:
    """Two domains of different difficulty in length."""
    return record_rounds(
        {
            "chat": drawn_answers(6, block_size=block_size, num_rounds=9, seed=seed, ends=ends, name="c"),
            "math": drawn_answers(3, block_size=block_size, num_rounds=15, seed=seed + 1, ends=ends, name="m"),
        },
        block_size=block_size,
    )
