"""Blocks verified in waves: the outcome of a walk slot by slot, and no more logits than the waves need."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftsmith.decoding.sampling import SamplingGroups
from draftsmith.decoding.verification import Outcome, RoundNumbers, verify_blocks, waves
from draftsmith.drafters.base import Proposal
from draftsmith.params import Sampling
from tests.unit.decoding.laws import Floats, transformed

VOCAB = 5
GREEDY = Sampling(temperature=0.0)
SAMPLINGS = (GREEDY, Sampling(), Sampling(temperature=1.7, top_k=3), Sampling(temperature=0.3, top_p=0.9, min_p=0.05))


@dataclass(frozen=True)
class Step:
    """One verification step of R requests: flat logits [N, V], a drafted block each, and its numbers."""

    logits: Floats
    tokens: np.ndarray  # [R, K]
    draft: Floats  # [R, K, V]
    lengths: list[int]
    samplings: list[Sampling]
    accept: Floats  # [R, K]
    target: Floats  # [R]

    @classmethod
    def random(cls, seed: int, *, size: int, lengths: list[int], samplings: list[Sampling], right: float) -> Step:
        """A drafted token is, with probability `right`, the target's likeliest, which is accepted almost always."""
        draw = np.random.default_rng(seed)
        num, total = len(lengths), sum(lengths) + len(lengths)
        logits = 3 * draw.standard_normal((total, VOCAB))
        tokens = draw.integers(VOCAB, size=(num, size))
        first = 0
        for row, length in enumerate(lengths):
            best = logits[first : first + length].argmax(axis=1)
            tokens[row, :length] = np.where(draw.random(length) < right, best, tokens[row, :length])
            first += length + 1
        draft = draw.dirichlet(np.ones(VOCAB), size=(num, size)).astype(np.float32).astype(np.float64)
        return cls(logits, tokens, draft, lengths, samplings, draw.random((num, size)), draw.random(num))

    def verify(self, *, num_waves: int | None) -> tuple[Outcome, list[list[int]]]:
        """The outcome, and the flat rows whose logits were asked for, call by call."""
        asked = list[list[int]]()

        def logits_of(hidden: Tensor) -> Tensor:
            asked.append(hidden[:, 0].long().tolist())
            return torch.from_numpy(self.logits)[hidden[:, 0].long()].float()

        greedy = all(sampling == GREEDY for sampling in self.samplings)
        outcome = verify_blocks(
            torch.arange(len(self.logits)).unsqueeze(1).float(),
            logits_of=logits_of,
            proposal=Proposal(
                torch.from_numpy(self.tokens), None if greedy else torch.from_numpy(self.draft).float(), None
            ),
            lengths=self.lengths,
            groups=SamplingGroups.make(self.samplings),
            numbers=None if greedy else RoundNumbers(self.accept, self.target),
            num_waves=num_waves,
        )
        return outcome, asked

    def walk(self) -> Outcome:
        """Slot by slot, request by request."""
        accepted, following, first = list[int](), list[int](), 0
        for row, (length, sampling) in enumerate(zip(self.lengths, self.samplings, strict=True)):
            slot = 0
            while True:
                law = transformed(self.logits[first + slot].astype(np.float32).astype(np.float64), sampling)
                if slot == length:
                    break
                token, own = self.tokens[row, slot], self.draft[row, slot]
                bound = law[token] if sampling == GREEDY else law[token] / own[token]
                if not (0 if sampling == GREEDY else self.accept[row, slot]) < bound:
                    law = law if sampling == GREEDY else np.maximum(law - own, 0)
                    break
                slot += 1
            edges = np.cumsum(law) / law.sum()
            number = 0.5 if sampling == GREEDY else self.target[row]
            accepted.append(slot)
            following.append(int((edges <= number).sum()))
            first += length + 1
        return Outcome(accepted, following)

    def needed(self) -> list[int]:
        """Flat rows of the waves that each request is alive in: those that end beyond its accepted tokens, and the
        ones before."""
        rows, first, size = list[int](), 0, self.tokens.shape[1]
        for length, accepted in zip(self.lengths, self.walk().accepted, strict=True):
            end = next(end for end in ends_of_waves(size) if end > accepted)
            rows += range(first, first + min(end, length + 1))
            first += length + 1
        return rows


def ends_of_waves(size: int) -> list[int]:
    """2, 6, 14, .. and K + 1, without an end that would leave one slot or none to the next wave."""
    return [end for end in (2, 6, 14) if end < size] + [size + 1]


@st.composite
def steps(draw: st.DrawFn) -> Step:
    size, num = draw(st.integers(1, 9)), draw(st.integers(1, 6))
    return Step.random(
        draw(st.integers(0, 10**6)),
        size=size,
        lengths=draw(st.lists(st.integers(0, size), min_size=num, max_size=num)),
        samplings=draw(st.lists(st.sampled_from(SAMPLINGS), min_size=num, max_size=num)),
        right=draw(st.sampled_from([0.3, 0.9, 1.0])),
    )


@settings(deadline=None, max_examples=120, derandomize=True)
@given(step=steps())
def test_waves_are_the_walk_and_ask_for_what_they_need(step: Step) -> None:
    at_once, all_rows = step.verify(num_waves=1)
    in_waves, rows = step.verify(num_waves=None)
    assert at_once == in_waves == step.walk()
    assert all_rows == [list(range(len(step.logits)))]
    assert sorted(row for call in rows for row in call) == step.needed()
    assert all(rows)


def test_the_waves_of_a_block() -> None:
    """Slots of a block and the one behind it, which is in no wave alone; (first, number)."""
    expected = {
        2: [(0, 2)], 3: [(0, 3)], 4: [(0, 2), (2, 2)], 6: [(0, 2), (2, 4)], 7: [(0, 2), (2, 5)],
        8: [(0, 2), (2, 4), (6, 2)], 10: [(0, 2), (2, 4), (6, 4)], 17: [(0, 2), (2, 4), (6, 8), (14, 3)],
    }  # fmt: skip
    for num_slots, found in expected.items():
        assert list(waves(num_slots, num_waves=None)) == found
        assert list(waves(num_slots, num_waves=1)) == [(0, num_slots)]


def greedy_step(lengths: list[int], right: list[int]) -> Step:
    """Blocks of 7 of which the first `right` tokens are the target's."""
    rows = sum(length + 1 for length in lengths)
    logits = np.eye(VOCAB)[np.arange(rows) % VOCAB]
    tokens, first = np.zeros((len(lengths), 7), np.int64), 0
    for row, (length, good) in enumerate(zip(lengths, right, strict=True)):
        for slot in range(length):
            tokens[row, slot] = (first + slot + (slot >= good)) % VOCAB
        first += length + 1
    empty = np.zeros((len(lengths), 7))
    return Step(
        logits, tokens, np.zeros((len(lengths), 7, VOCAB)), lengths, [GREEDY] * len(lengths), empty, empty[:, 0]
    )


def test_rows_of_logits_by_hand() -> None:
    """Blocks of 7, waves of 2, 4 and 2 slots; five requests with flat rows 0-7, 8-15, 16-18, 19, 20-26.

    0 right of 7; 7 right of 7; 2 right of 2; nothing to verify; 5 right of 6, the last of them in the second wave.
    """
    step = greedy_step([7, 7, 2, 0, 6], right=[0, 7, 2, 0, 5])
    outcome, rows = step.verify(num_waves=None)
    assert outcome == Outcome([0, 7, 2, 0, 5], [0, 0, 3, 4, 0])
    assert rows == [
        [0, 1, 8, 9, 16, 17, 19, 20, 21],
        [10, 11, 12, 13, 18, 22, 23, 24, 25],
        [14, 15],
    ]


def test_where_all_fail_in_the_first_wave_there_is_no_second() -> None:
    _, rows = greedy_step([7, 7], right=[0, 1]).verify(num_waves=None)
    assert rows == [[0, 1, 8, 9]]


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.3), Sampling(temperature=1.7, top_k=3), GREEDY]
)
@pytest.mark.parametrize("peak", [1e4, 3e38])
def test_extreme_logits_of_the_target(sampling: Sampling, peak: float) -> None:
    """Token 1 is sure, 3 impossible, in all slots: a block of 1, 1, 3 is accepted up to the 3, which becomes a 1."""
    logits = np.tile([-peak, peak, -peak, -math.inf, 0.0], (4, 1))
    if sampling.temperature < 1 and peak > 1e38:
        logits /= 10  # the quotient is still a float32
    tokens, draft, accept = np.array([[1, 1, 3]]), np.full((1, 3, VOCAB), 0.2), np.full((1, 3), 0.99)
    step = Step(logits, tokens, draft, [3], [sampling], accept, target=np.array([0.99]))
    outcome, _ = step.verify(num_waves=None)
    assert outcome == Outcome([2], [1])
