"""The schedulers in plain Python and exact fractions, and what a schedule makes a decoder emit, enumerated.

Everything is 0-based lists; survivals and rates that are floats are taken for the exact numbers that they are.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

Schedule = Callable[[np.ndarray], Sequence[int]]
"""Confidences [R, K] -> lengths [R]."""
Rates = Mapping[int, float] | Mapping[int, Fraction]
"""SPS of every N that can occur."""
Text = tuple[int, ...]


def products(confidence: Sequence[Sequence[float]]) -> list[list[float]]:
    """Survivals, multiplied from the left."""
    return [list(itertools.accumulate(row, lambda a, b: a * b)) for row in confidence]


def candidates(survival: Sequence[Sequence[float]]) -> list[tuple[float, int, int]]:
    """(a, j, r) of every slot in the order of admission."""
    slots = [(a, j, r) for r, row in enumerate(survival) for j, a in enumerate(row)]
    return sorted(slots, key=lambda slot: (-slot[0], slot[1], slot[2]))


def theta(survival: Sequence[Sequence[float]], lengths: Sequence[int], rates: Rates) -> Fraction:
    tau = sum(1 + sum(Fraction(a) for a in row[:length]) for row, length in zip(survival, lengths, strict=True))
    return tau * Fraction(rates[len(survival) + sum(lengths)])


def along_the_order(survival: Sequence[Sequence[float]], rates: Rates) -> list[tuple[Fraction, list[int]]]:
    """(Theta, lengths) after 0, 1, 2, ... candidates."""
    lengths = [0] * len(survival)
    found = [(theta(survival, lengths, rates), list(lengths))]
    for _, j, r in candidates(survival):
        assert j == lengths[r], "the order leaves a hole in a block"
        lengths[r] += 1
        found.append((theta(survival, lengths, rates), list(lengths)))
    return found


def algorithm_1(survival: Sequence[Sequence[float]], rates: Rates) -> list[int]:
    best, lengths = theta(survival, [0] * len(survival), rates), [0] * len(survival)
    for a, _, r in candidates(survival):
        lengths[r] += 1
        now = theta(survival, lengths, rates)
        if a == 0 or now <= best:
            lengths[r] -= 1
            break
        best = now
    return lengths


def retrospective(survival: Sequence[Sequence[float]], rates: Rates) -> list[int]:
    """The best Theta of all, on the confidences of the step itself: not lossless (DSpark appendix A)."""
    return max(along_the_order(survival, rates), key=lambda found: found[0])[1]


def best_theta(survival: Sequence[Sequence[float]], rates: Rates) -> Fraction:
    """Over all lengths of all requests."""
    return max(
        theta(survival, lengths, rates)
        for lengths in itertools.product(*(range(len(row) + 1) for row in survival))
    )  # fmt: skip


@dataclass(frozen=True)
class World:
    """One request, by the drafted text before a token: the chances that it is 0 and not 1, and its confidence."""

    target: Mapping[Text, Fraction]
    drafter: Mapping[Text, Fraction]
    confidence: Mapping[Text, float]
    block_size: int

    def blocks(self) -> Iterator[tuple[Text, Fraction, list[float]]]:
        """Every block, its probability and the confidences of its slots: of slot k from the tokens before it."""
        for block in itertools.product((0, 1), repeat=self.block_size):
            befores = [block[:k] for k in range(self.block_size)]
            probability = Fraction(1)
            for token, before in zip(block, befores, strict=True):
                probability *= _chance(self.drafter[before], token)
            yield block, probability, [self.confidence[before] for before in befores]

    def truth(self, horizon: int) -> dict[Text, Fraction]:
        """Texts of `horizon` tokens by the target alone."""
        return _continued({(): Fraction(1)}, self.target, horizon)

    def emitted(self, block: Text, length: int, horizon: int) -> dict[Text, Fraction]:
        """Texts that come of verifying `length` tokens of `block`; what follows the round is the target's own."""
        told: dict[Text, Fraction] = defaultdict(Fraction)
        reached = Fraction(1)
        for k in range(length):
            before, target, draft = block[:k], self.target[block[:k]], self.drafter[block[:k]]
            accept = min(Fraction(1), _chance(target, block[k]) / _chance(draft, block[k]))
            residual = [max(Fraction(0), _chance(target, token) - _chance(draft, token)) for token in (0, 1)]
            for token, mass in enumerate(residual):
                if mass:
                    told[(*before, token)] += reached * (1 - accept) * mass / sum(residual)
            reached *= accept
        told[block[:length]] += reached
        return _continued(told, self.target, horizon)


def emitted(worlds: Sequence[World], *, schedule: Schedule, horizon: int) -> dict[tuple[Text, ...], Fraction]:
    """Joint distribution of the first `horizon` tokens of all requests that share one step."""
    told: dict[tuple[Text, ...], Fraction] = defaultdict(Fraction)
    for drafted in itertools.product(*(world.blocks() for world in worlds)):
        lengths = schedule(np.array([confidence for _, _, confidence in drafted]))
        each = [
            world.emitted(block, length, horizon)
            for world, (block, _, _), length in zip(worlds, drafted, lengths, strict=True)
        ]
        for texts in itertools.product(*(one.items() for one in each)):
            probability = Fraction(1)
            for factor in (*(drawn for _, drawn, _ in drafted), *(chance for _, chance in texts)):
                probability *= factor
            told[tuple(text for text, _ in texts)] += probability
    return {texts: chance for texts, chance in told.items() if chance}


def truths(worlds: Sequence[World], *, horizon: int) -> dict[tuple[Text, ...], Fraction]:
    """The same by the target alone: requests are independent."""
    told: dict[tuple[Text, ...], Fraction] = {}
    for texts in itertools.product(*(world.truth(horizon).items() for world in worlds)):
        probability = Fraction(1)
        for _, chance in texts:
            probability *= chance
        if probability:
            told[tuple(text for text, _ in texts)] = probability
    return told


def _chance(of_zero: Fraction, token: int) -> Fraction:
    return 1 - of_zero if token else of_zero


def _continued(told: Mapping[Text, Fraction], target: Mapping[Text, Fraction], horizon: int) -> dict[Text, Fraction]:
    """Texts cut to `horizon` tokens, or drawn out to as many by the target."""
    found: dict[Text, Fraction] = defaultdict(Fraction)
    for text, chance in told.items():
        if len(text) >= horizon:
            found[text[:horizon]] += chance
            continue
        longer = {(*text, token): chance * _chance(target[text], token) for token in (0, 1)}
        for one, probability in _continued(longer, target, horizon).items():
            found[one] += probability
    return found
