"""Rounds that nobody decoded, for a drafter that was not trained here: made so that their accepted lengths are given
ones and their confidences are calibrated by construction. What is computed from them says so.

The acceptance of slot k, given that those before it were accepted, is c = sigmoid(b + answer + round + slot): b hangs
on the domain, the other three are normal draws, so that some answers, some rounds and some tokens are harder. The token
is accepted with probability c, and the confidence is c itself: no temperature makes it better. A wider spread of c
tells better what will be accepted; `DIFFICULTY` is about as telling as the paper's heads.
Letters: N rounds, A answers, K block size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftsmith.errors import DraftsmithError
from draftsmith.serving.recorded import RecordedRounds

Floats = NDArray[np.float64]

PUBLISHED: Mapping[str, Mapping[str, float]] = {
    "dspark": {"chat": 3.49, "math": 5.57, "code": 5.12},
    "dflash": {"chat": 2.95, "math": 4.80, "code": 4.44},
    "eagle3": {"chat": 2.40, "math": 4.56, "code": 3.87},
}
"""Accepted lengths of Qwen3-4B, K = 7, bonus included: the DSpark paper's, means over the benchmarks of a domain."""
NO_FIGURE = {"chat": 1.80, "math": 1.90, "code": 1.90}
"""Of a drafter of one token there is none in that paper: as if 80 to 90 % were accepted."""


@dataclass(frozen=True)
class Difficulty:
    """Standard deviations of the logit of c: from answer to answer, from round to round of one, from slot to slot."""

    answers: float
    rounds: float
    slots: float

    def __post_init__(self) -> None:
        if not all(0 <= value < float("inf") for value in (self.answers, self.rounds, self.slots)):
            raise DraftsmithError("a spread of difficulty", got=self, expected="finite, >= 0")


DIFFICULTY = Difficulty(answers=0.7, rounds=1.0, slots=1.6)


def published_lengths(kind: str, *, block_size: int) -> dict[str, float]:
    """Accepted lengths by domain for a kind of drafter, no more than nine tenths of what its block allows."""
    most = 1 + 0.9 * block_size
    return {name: min(length, most) for name, length in PUBLISHED.get(kind, NO_FIGURE).items()}


def synthetic_rounds(
    accepted_lengths: Mapping[str, float],
    *,
    block_size: int,
    confident: bool,
    num_answers: int = 400,
    rounds_per_answer: int = 24,
    difficulty: Difficulty = DIFFICULTY,
    seed: int,
) -> RecordedRounds:
    """`num_answers` answers of each domain whose mean accepted length, bonus included, is about the given one.

    Expected acceptance is set exactly over the answers that are drawn; what is then accepted is drawn, too.
    `confident`: with the logits of a confidence head. No answer ends.
    Raises DraftsmithError for a length that is not between 1 and K + 1, and without domains.
    """
    if not accepted_lengths or num_answers < 1 or rounds_per_answer < 1:
        raise DraftsmithError("synthetic rounds of nothing", expected="a domain, an answer and a round at least")
    accepted, logits = [], []
    for place, (name, length) in enumerate(accepted_lengths.items()):
        if not 1 < length < block_size + 1:
            raise DraftsmithError(
                f"an accepted length for {name}", got=length, expected=f"between 1 and K + 1 = {block_size + 1}"
            )
        rng = np.random.default_rng((seed, place))
        shape = (num_answers, rounds_per_answer, block_size)
        spread = (
            difficulty.answers * rng.standard_normal((num_answers, 1, 1))
            + difficulty.rounds * rng.standard_normal((num_answers, rounds_per_answer, 1))
            + difficulty.slots * rng.standard_normal(shape)
        ).reshape(-1, block_size)
        found = spread + _base(spread, accepted=length - 1)
        accepted.append(np.logical_and.accumulate(rng.random(found.shape) < _sigmoid(found), axis=1).sum(axis=1))
        logits.append(found)
    num = num_answers * len(accepted_lengths)
    first = np.arange(num) * rounds_per_answer
    return RecordedRounds(
        block_size=block_size,
        accepted=np.concatenate(accepted),
        ended=np.zeros(num * rounds_per_answer, np.bool_),
        logits=np.concatenate(logits) if confident else None,
        first=first,
        last=first + rounds_per_answer - 1,
        domains=tuple(accepted_lengths),
        domain=np.repeat(np.arange(len(accepted_lengths)), num_answers),
        num_without_rounds=0,
    )


def _base(spread: Floats, *, accepted: float) -> float:
    """The b at which so many draft tokens a round are expected to be accepted: halved down between -30 and 30."""
    low, high = -30.0, 30.0
    for _ in range(50):
        middle = (low + high) / 2
        if np.cumprod(_sigmoid(spread + middle), axis=1).sum(axis=1).mean() < accepted:
            low = middle
        else:
            high = middle
    return high


def _sigmoid(logits: Floats) -> Floats:
    chances: Floats = 1 / (1 + np.exp(-logits))
    return chances
