"""The exact law of what one round of a session commits: all drafts and all acceptances, weighted by their probability.

For that one round the uniform numbers and the draws are replaced. A branch is a request that fixes the tokens it
drafts, weighted by the law that the drafter's sampler was asked to draw from, and slot by slot on which side of its
bound min(1, p_t / p_d) the number u_k lies, a hair below or above it, weighted by that side's share; p_t is known
without the engine. The token behind is not drawn: the law it would be drawn from is noted. As acceptance is a threshold
on u_k, the sum over all branches is the law itself, to within that hair, whatever rounds came before.

Letters: W worlds, B branches of all worlds, K block size, V vocabulary, d tokens since the round began.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftsmith.decoding import session as session_module
from draftsmith.decoding import verification
from draftsmith.decoding.engine import Engine, Request
from draftsmith.decoding.policies import DraftedBlocks, LengthPolicy, verify_all
from draftsmith.decoding.sampling import Purpose, draw, uniforms
from draftsmith.drafters.base import Drafter
from draftsmith.params import Sampling
from draftsmith.targets.base import Target
from tests.unit.decoding.laws import PLAIN, Floats, transformed_rows
from tests.unit.decoding.toys import TableTarget, Text

HAIR = 1e-5
CLOSE = 2 * HAIR
"""Total variation that two laws may differ by: the hair, and float32 against float64."""
LogitsAfter = Callable[[Text, int], list[Floats]]
"""(text, K) -> for d = 0..K the target's logits [V ** d, V] after the text and every d further tokens, in order."""


@dataclass(frozen=True)
class World:
    """How the branches of one world are sampled, and which rounds come before the one that is enumerated.

    `policy` makes the policy of each branch, which sees its request and, if any, `companions` [C, K]: the confidences
    of other requests, the same in every step.
    """

    name: str
    sampling: Sampling = PLAIN
    seed: int = 0
    policy: Callable[[], LengthPolicy] = lambda: verify_all
    companions: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True)
class RoundLaw:
    """The law of the next K + 1 tokens [V ** (K + 1)], found and wanted, and how many tokens were `accepted`."""

    found: Floats
    expected: Floats
    accepted: frozenset[int]
    verified: frozenset[int]

    @property
    def distance(self) -> float:
        """Total variation between the two."""
        return float(np.abs(self.found - self.expected).sum() / 2)


def round_laws(
    target: Target | TableTarget,
    *,
    drafter: Drafter,
    worlds: Sequence[World],
    prompt: Text,
    rounds_before: int,
    logits_after: LogitsAfter,
) -> dict[str, RoundLaw]:
    """What round `rounds_before` + 1 commits, world by world; all worlds share one batch."""
    with pytest.MonkeyPatch.context() as patch:
        branches = _Branches(worlds, drafter=drafter, number=rounds_before + 1, logits_after=logits_after)
        patch.setattr(session_module, "uniforms", branches.uniforms)
        patch.setattr(session_module, "draw", branches.draw_draft)
        patch.setattr(verification, "draw", branches.note_following)
        count = branches.count
        engine = Engine(target, drafter=drafter, end_ids=[], batch_size=count, policy=branches.policy)  # type: ignore[arg-type]
        session = engine.session(on_commit=branches.commit)
        for place in range(count):
            sampling = worlds[branches.world[place]].sampling
            session.submit(Request(str(place), prompt, 10**6, sampling, place))
        branches.texts = [list(prompt) for _ in range(count)]
        for _ in range(branches.number):
            assert session.step() == []
        return {world.name: branches.law(place) for place, world in enumerate(worlds)}


class _Branches:
    """All branches of all worlds: what they draw and draw with, and what came of it. A request's seed is its place."""

    def __init__(self, worlds: Sequence[World], *, drafter: Drafter, number: int, logits_after: LogitsAfter) -> None:
        self.worlds, self.number, self.logits_after = worlds, number, logits_after
        self.size, self.vocab = drafter.config.block_size, drafter.config.vocab_size
        drafts = np.array(list(itertools.product(range(self.vocab), repeat=self.size)))
        below = np.array(list(itertools.product((True, False), repeat=self.size)))
        each = len(drafts) * len(below)
        self.world = np.repeat(np.arange(len(worlds)), each)  # [B]
        self.tokens = np.tile(np.repeat(drafts, len(below), axis=0), (len(worlds), 1))  # [B, K]
        self.below = np.tile(below, (len(worlds) * len(drafts), 1))  # [B, K]
        self.weight = np.ones(len(self.world))  # [B]
        self.following = np.zeros((len(self.world), self.vocab))  # [B, V]
        self.accepted = np.zeros(len(self.world), np.int64)
        self.verified = np.zeros(len(self.world), np.int64)
        self.texts: list[list[int]] = []
        self.laws: list[list[Floats]] = []
        self.last_round = 0
        self._drawn: list[Floats] = []
        self._policies = [world.policy() for world in worlds]

    @property
    def count(self) -> int:
        return len(self.world)

    def policy(self, blocks: DraftedBlocks) -> list[int]:
        """Each branch in its own world, whose policy has seen one past; so it is asked once for equal confidences."""
        asked: dict[tuple[int, bytes], int] = {}
        before = copy.deepcopy(self._policies)
        for row in range(self.count):
            world, own = int(self.world[row]), b"" if blocks.confidence is None else blocks.confidence[row].tobytes()
            if (world, own) not in asked:
                self._policies[world] = copy.deepcopy(before[world])
                asked[world, own] = self._length(world, blocks, row)
            self.verified[row] = asked[world, own]
        return self.verified.tolist()

    def _length(self, world: int, blocks: DraftedBlocks, row: int) -> int:
        others = self.worlds[world].companions
        confidence = None if blocks.confidence is None else np.vstack([blocks.confidence[row], *others])
        ids = ("own", *(f"other {number}" for number in range(len(others))))
        return int(self._policies[world](DraftedBlocks(ids, blocks.block_size, confidence))[0])

    # What stands in for `uniforms` and `draw`: above one a number is a token or a place

    def uniforms(
        self, seeds: Sequence[int], *, rounds: Sequence[int], slots: Sequence[int], purpose: Purpose
    ) -> Floats:
        self.last_round = rounds[0]
        assert set(rounds) == {self.last_round}
        places = np.asarray(seeds)
        if self.last_round != self.number:
            own = [self.worlds[world].seed for world in self.world[places]]
            return uniforms(own, rounds=rounds, slots=slots, purpose=purpose)
        assert list(places) == list(range(self.count))
        if purpose is Purpose.DRAFT:
            self._drawn = []
            return 1.0 + self.tokens[:, list(slots)]
        if purpose is Purpose.ACCEPT:
            return self._beside_the_bounds()[:, list(slots)]
        return 1.0 + places[:, None]

    def draw_draft(self, distribution: Tensor, *, numbers: Floats) -> Tensor:
        if self.last_round != self.number:
            return draw(distribution, numbers=numbers)
        self._drawn.append(distribution.double().numpy().copy())
        return torch.from_numpy((numbers - 1).astype(np.int64))

    def note_following(self, distribution: Tensor, *, numbers: Floats) -> Tensor:
        if self.last_round != self.number:
            return draw(distribution, numbers=numbers)
        law = distribution.double().numpy()
        self.following[(numbers - 1).astype(np.int64)] = law / law.sum(axis=1, keepdims=True)
        return distribution.argmax(dim=1)

    def _beside_the_bounds(self) -> Floats:
        """Acceptance numbers [B, K], and the weights of the branches."""
        self.laws = [self._laws_of(world) for world in range(len(self.worlds))]
        place, rows = np.zeros(self.count, np.int64), np.arange(self.count)
        numbers = np.empty((self.count, self.size))
        for slot in range(self.size):
            token = self.tokens[:, slot]
            tree = np.stack([laws[slot] for laws in self.laws])
            wanted, drawn = tree[self.world, place, token], self._drawn[slot][rows, token]
            bound = np.minimum(1.0, wanted / np.where(drawn > 0, drawn, 1.0))
            below = self.below[:, slot]
            self.weight *= drawn * np.where(below, bound, 1.0 - bound)
            numbers[:, slot] = np.where(
                below, np.maximum(bound - HAIR, bound / 2), np.minimum(bound + HAIR, (1 + bound) / 2)
            )
            place = place * self.vocab + token
        return numbers

    def _laws_of(self, world: int) -> list[Floats]:
        """The target's law after the world's text and d = 0..K tokens more, [V ** d, V] each."""
        texts = {tuple(self.texts[place]) for place in np.flatnonzero(self.world == world)}
        assert len(texts) == 1, "the branches of a world have one past"
        sampling = self.worlds[world].sampling
        return [transformed_rows(logits, sampling) for logits in self.logits_after(*texts, self.size)]

    def commit(self, name: str, tokens: list[int], drafted: list[bool]) -> None:
        place = int(name)
        self.texts[place] += tokens
        if self.last_round == self.number:
            self.accepted[place] = accepted = sum(drafted)
            assert drafted == [True] * accepted + [False]
            assert tokens[:accepted] == self.tokens[place, :accepted].tolist()
            if self.worlds[self.world[place]].sampling.temperature == 0:
                self.following[place] = np.eye(self.vocab)[tokens[-1]]

    def law(self, world: int) -> RoundLaw:
        """Sum over the branches; what the round left of K + 1 tokens follows as the target would write it."""
        laws, vocab = self.laws[world], self.vocab
        tails: list[Floats] = [np.ones((vocab ** (self.size + 1), 1))]  # after K + 1, K, .. 0 tokens
        for law in reversed(laws):
            tails.append((law[:, :, None] * tails[-1].reshape(*law.shape, -1)).reshape(len(law), -1))
        own = self.world == world
        found = np.zeros(vocab ** (self.size + 1))
        for accepted in range(self.size + 1):
            part = np.zeros((vocab**accepted, vocab))
            mine = np.flatnonzero(own & (self.accepted == accepted))
            place = self.tokens[mine, :accepted] @ vocab ** np.arange(accepted - 1, -1, -1)
            np.add.at(part, place, self.weight[mine, None] * self.following[mine])
            found += (part.reshape(-1, 1) * tails[self.size - accepted]).ravel()
        real = self.weight[own] > 0
        return RoundLaw(
            found,
            tails[-1].ravel(),
            frozenset(self.accepted[own][real].tolist()),
            frozenset(self.verified[own][real].tolist()),
        )


def table_logits(table: Tensor) -> LogitsAfter:
    """Of a target whose logits depend on the last token alone; table [V, V]."""
    rows: NDArray[np.float64] = table.double().numpy()

    def after(text: Text, size: int) -> list[Floats]:
        return [rows[[text[-1]]], *[np.tile(rows, (len(rows) ** (d - 1), 1)) for d in range(1, size + 1)]]

    return after
