"""Difficulty-aware early exit: drafting is spared or shortened where little of it is expected to survive.

What the DSpark paper names as future work. Both policies decide before a step drafts, from rounds that are over, so
that they are lossless: nothing that they know says anything of the tokens to come. Both probe, so that a request whose
text has become easier comes back.
Letters: R requests, K block size, p the probability that a draft token is accepted if those before it were.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from draftsmith.decoding.drafting import Bools, DraftHistory, Floats, Ints
from draftsmith.errors import DraftsmithError
from draftsmith.serving.scheduler import admit
from draftsmith.serving.step_costs import StepCosts

Evidence = Literal["acceptance", "confidence"]
"""What a round says of p: how many of its verified tokens were accepted, or what its confidences expected of all that
were drafted, which a short verification does not cut off."""
Shape = Literal["whole", "shortened"]
"""A request that drafts does so for a whole block, for a length policy to choose from, or only as far as pays."""


@dataclass(frozen=True)
class DraftFirst:
    """The first `length` slots of every block. Raises DraftsmithError below 0."""

    length: int

    def __post_init__(self) -> None:
        if self.length < 0:
            raise DraftsmithError("a draft length below zero", got=self.length, expected=">= 0")

    def draft_lengths(self, request_ids: tuple[str, ...], history: DraftHistory) -> Sequence[int]:
        return [min(self.length, history.block_size)] * len(request_ids)


@dataclass(frozen=True)
class Memory:
    """How p is estimated: a weighted count of recent rounds, drawn towards that of all requests while it is short.

    A round counts for about `rounds` further rounds of its request, and `pool_rounds` of all of them; `prior` is p
    before there was any, worth `prior_tokens` tokens in either count.
    """

    evidence: Evidence = "acceptance"
    rounds: float = 8.0
    pool_rounds: float = 512.0
    prior: float = 0.7
    prior_tokens: float = 2.0

    def __post_init__(self) -> None:
        if not (self.rounds >= 1 and self.pool_rounds >= 1 and 0 < self.prior < 1 and self.prior_tokens > 0):
            raise DraftsmithError(
                "the memory of an early exit", got=self,
                expected="rounds and pool_rounds >= 1, prior between 0 and 1, prior_tokens > 0",
            )  # fmt: skip


class RecentAcceptance:
    """The running estimate of p, request by request. Serves one session: `update` is called once a step."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._request_ids: tuple[str, ...] = ()
        self._counts = np.zeros((2, 0))  # tokens that survived, rounds that broke off; decayed
        self._pool = np.zeros(2)

    def update(self, request_ids: tuple[str, ...], history: DraftHistory) -> Floats:
        """p [R], the last round of each request taken in."""
        self._follow(request_ids)
        told, known = self._told(history)
        memory, keep = self._memory, 1 - 1 / self._memory.rounds
        self._counts[:, known] = keep * self._counts[:, known] + told[:, known]
        self._pool = self._pool * (1 - 1 / memory.pool_rounds) ** int(known.sum()) + told[:, known].sum(axis=1)
        weight = memory.prior_tokens
        pooled = (self._pool[0] + weight * memory.prior) / (self._pool.sum() + weight)
        mine: Floats = (self._counts[0] + weight * pooled) / (self._counts.sum(axis=0) + weight)
        return mine

    def _told(self, history: DraftHistory) -> tuple[Floats, Bools]:
        """([2, R] survivors and breaks of the last rounds, [R] whether they tell anything)."""
        last = history.last
        if self._memory.evidence == "acceptance":
            return np.array((last.accepted, last.accepted < last.verified), np.float64), last.verified > 0
        if history.confidence is None:
            raise DraftsmithError(
                "an early exit by confidence", got="a drafter without a confidence head", expected="by acceptance"
            )
        drafted = ~np.isnan(history.confidence)
        survival = np.cumprod(np.where(drafted, history.confidence, 1.0), axis=1)
        return np.array(((survival * drafted).sum(axis=1), 1 - survival[:, -1])), last.drafted > 0

    def _follow(self, request_ids: tuple[str, ...]) -> None:
        """Bring the counts into the order of a new batch; who is new has none."""
        if request_ids == self._request_ids:
            return
        before = dict(zip(self._request_ids, range(len(self._request_ids)), strict=True))
        places = np.fromiter(map(before.get, request_ids, itertools.repeat(-1)), np.int64, len(request_ids))
        self._counts = np.append(self._counts, np.zeros((2, 1)), axis=1)[:, places]  # place -1 is what is appended
        self._request_ids = request_ids


class _Probes:
    """Says which steps draft whole blocks for all: every n-th, and less often while nobody drafts otherwise."""

    MOST = 16

    def __init__(self, every: int) -> None:
        if every < 2:
            raise DraftsmithError("steps between the probes of an early exit", got=every, expected=">= 2")
        self._every, self._factor, self._since, self._probed = every, 1, 0, False

    def due(self) -> bool:
        """Called once a step, before it is known who drafts."""
        self._since += 1
        if self._since < self._every * self._factor:
            return False
        self._since, self._probed = 0, True
        return True

    def tell(self, lengths: Ints) -> None:
        """What a step that was not due drafts; the first one after a probe shows if that changed anything."""
        if lengths.any():
            self._factor = 1
        elif self._probed:
            self._factor = min(2 * self._factor, self.MOST)
        self._probed = False


class EarlyExit:
    """Draft where p is at least `floor`; shortened, only tokens whose prefix is expected to survive so often.

    Every `probe_every` steps all requests draft whole blocks. Knows nothing of what drafting costs.
    """

    def __init__(
        self, floor: float, *, memory: Memory | None = None, shape: Shape = "whole", probe_every: int = 32
    ) -> None:
        """Raises DraftsmithError unless floor is from 0 to 1 and probe_every >= 2."""
        if not 0 <= floor <= 1:
            raise DraftsmithError("the floor of an early exit", got=floor, expected="a probability")
        self._floor, self._shape, self._probes = floor, shape, _Probes(probe_every)
        self._recent = RecentAcceptance(memory or Memory())

    def draft_lengths(self, request_ids: tuple[str, ...], history: DraftHistory) -> Sequence[int]:
        size = history.block_size
        chances = self._recent.update(request_ids, history)
        if self._probes.due():
            return [size] * len(request_ids)
        if self._shape == "whole":
            lengths = np.where(chances >= self._floor, size, 0)
        else:
            lengths = (_survival(chances, block_size=size) >= self._floor).sum(axis=1)
        self._probes.tell(lengths)
        return lengths.tolist()


class WorthDrafting:
    """Draft for as many requests as make Theta, the tokens expected a second, largest; for none if plain decoding does.

    Theta = (R + the survivals of the tokens that are verified) / (drafting + 1 / SPS(N) + upkeep) by `costs`, at the
    step's own R, whoever is most likely to be accepted first. For drafters that run all slots at once the numbers of
    requests that are tried are 1, 2, 4, .. R; for others it is the numbers of slots that all of them draft.
    Every `probe_every` steps all requests draft whole blocks.
    """

    def __init__(
        self, costs: StepCosts, *, max_requests: int, memory: Memory | None = None, shape: Shape = "whole",
        probe_every: int = 32,
    ) -> None:  # fmt: skip
        """`costs`: what the policy believes, without the context. Raises DraftsmithError for probe_every below 2."""
        self._costs, self._shape, self._probes = costs, shape, _Probes(probe_every)
        self._recent = RecentAcceptance(memory or Memory())
        nothing = np.zeros(max_requests + 1)
        self._draft_s, self._upkeep_s = (
            nothing if cost is None else cost.up_to(max_requests) for cost in (costs.drafting, costs.upkeep)
        )

    def draft_lengths(self, request_ids: tuple[str, ...], history: DraftHistory) -> Sequence[int]:
        num, size = len(request_ids), history.block_size
        chances = self._recent.update(request_ids, history)
        if self._probes.due():
            return [size] * num
        order = np.argsort(-chances, kind="stable")
        survival = _survival(chances[order], block_size=size)
        verify_s = 1 / self._costs.verification.look_up_run(num, count=num * size + 1)
        best, chosen = num / float(verify_s[0] + self._upkeep_s[num]), (0, 0, 0)
        for drafting, slots in self._candidates(num, block_size=size):
            expected = np.sort(survival[:drafting, :slots], axis=None)[::-1]
            seconds = verify_s[1 : len(expected) + 1] + self._upkeep_s[num] + self._seconds(drafting, slots, size)
            theta = (num + np.cumsum(expected)) / seconds
            place = int(theta.argmax())
            if theta[place] > best:
                best, chosen = float(theta[place]), (drafting, slots, place + 1)
        lengths = np.zeros(num, np.int64)
        drafting, slots, count = chosen
        if drafting:
            lengths[order[:drafting]] = (
                size if self._shape == "whole" else admit(survival[:drafting, :slots], budget=count)
            )
        self._probes.tell(lengths)
        return lengths.tolist()

    def _candidates(self, num: int, *, block_size: int) -> list[tuple[int, int]]:
        """(requests that draft, slots that they draft)."""
        cost = self._costs.drafting
        if cost is not None and cost.fixed_share < 1 and self._shape == "shortened":
            return [(num, slots) for slots in range(1, block_size + 1)]
        powers = [1 << exponent for exponent in range((num - 1).bit_length())]
        return [(number, block_size) for number in (*powers, num)]

    def _seconds(self, drafting: int, slots: int, block_size: int) -> float:
        cost = self._costs.drafting
        share = 1.0 if cost is None else cost.share(slots, block_size=block_size)
        return share * float(self._draft_s[drafting])


def _survival(chances: Floats, *, block_size: int) -> Floats:
    """p, p^2, .. of each request: [R] -> [R, K]."""
    survival: Floats = chances[:, None] ** np.arange(1, block_size + 1)
    return survival
