"""Length policies of serving: the prefix scheduler, synchronous and asynchronous, and what it is compared with."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftsmith.decoding.policies import DraftedBlocks
from draftsmith.errors import ContractError, DraftsmithError
from draftsmith.serving.cost_table import CostTable
from draftsmith.serving.scheduler import (
    admit,
    check_threshold,
    draft_budget,
    schedule_prefix,
    survival_of,
    threshold_lengths,
)

Floats = NDArray[np.float64]


class StepTables:
    """SPS(N) of whole steps: a profiled table, and what drafting and upkeep take for so many requests.

    Theta counts tokens a second, so that the time of a step is all of it, whatever verification cannot change; where a
    table is of verification alone, leaving out the rest makes every further token look dearer than it is.
    """

    def __init__(self, table: CostTable, *, fixed_s: ArrayLike | None = None) -> None:
        """`fixed_s` [R + 1]: seconds for 0..R requests (`StepCosts.fixed_s`), its last for more; none adds nothing.

        Raises DraftsmithError unless it is a list of finite seconds >= 0.
        """
        self._table, self._made = table, dict[int, CostTable]()
        self._fixed_s = None if fixed_s is None else np.asarray(fixed_s, np.float64)
        if self._fixed_s is not None and (
            self._fixed_s.ndim != 1
            or not len(self._fixed_s)
            or not (np.isfinite(self._fixed_s) & (self._fixed_s >= 0)).all()
        ):
            raise DraftsmithError("fixed_s of a policy", got=fixed_s, expected="a list of finite seconds >= 0")

    def of(self, num_requests: int) -> CostTable:
        """SPS(N) of steps of `num_requests` requests."""
        if self._fixed_s is None:
            return self._table
        place = min(num_requests, len(self._fixed_s) - 1)
        if place not in self._made:
            self._made[place] = self._table.with_fixed(float(self._fixed_s[place]))
        return self._made[place]


class SynchronousPolicy:
    """Algorithm 1 on the confidences of the step itself (DSpark section 3.2.2)."""

    def __init__(self, table: CostTable, *, fixed_s: ArrayLike | None = None) -> None:
        """`fixed_s`: as `StepTables`."""
        self.tables = StepTables(table, fixed_s=fixed_s)

    def __call__(self, blocks: DraftedBlocks) -> list[int]:
        survival = survival_of(_confidence(blocks, "the prefix scheduler"))
        return schedule_prefix(survival, table=self.tables.of(blocks.num_requests)).tolist()


@dataclass
class _Step:
    """What is remembered of a step."""

    survival: Floats  # [R', K], R' the requests of that step
    rows: NDArray[np.int64]  # [R], the row of each request of the last batch; -1 if it has not been there ever since


class AsynchronousPolicy:
    """Budget from the confidences of an earlier step, admission by those of this one (DSpark section 5.2).

    One policy serves one session of an engine: make a new one for the next. A request has a history if it was in every
    step from `staleness` steps before to this one; one that comes back must do so under another id and seed, since
    under the old ones its random numbers begin again and its old confidences speak of the tokens to be decided. In the
    first `staleness` steps nothing has a history.
    """

    def __init__(self, table: CostTable, *, fixed_s: ArrayLike | None = None, staleness: int = 2) -> None:
        """`staleness`: steps between the confidences that set a budget and the step it is for; `fixed_s`: as
        `StepTables`.

        Raises DraftsmithError below 1: a budget from the step's own confidences knows the tokens that it decides on.
        """
        if staleness < 1:
            raise DraftsmithError("the budget must come from an earlier step", got=staleness, expected="staleness >= 1")
        self.tables, self.staleness = StepTables(table, fixed_s=fixed_s), staleness
        self._request_ids: tuple[str, ...] = ()
        self._memory: deque[_Step] = deque()

    def __call__(self, blocks: DraftedBlocks) -> list[int]:
        now = survival_of(_confidence(blocks, "the prefix scheduler"))
        self._follow(blocks.request_ids)
        then = np.empty((0, blocks.block_size))
        if len(self._memory) == self.staleness:
            step = self._memory.popleft()
            then = step.survival[step.rows[step.rows >= 0]]
        if then.shape[1] != blocks.block_size:
            raise ContractError("the block size changed between steps", got=blocks.block_size, expected=then.shape[1])
        self._memory.append(_Step(now, np.arange(blocks.num_requests)))
        budget = draft_budget(then, num_requests=blocks.num_requests, table=self.tables.of(blocks.num_requests))
        return admit(now, budget=budget).tolist()

    def _follow(self, request_ids: tuple[str, ...]) -> None:
        """Bring what is remembered into the order of a new batch."""
        if request_ids == self._request_ids:
            return
        before = dict(zip(self._request_ids, range(len(self._request_ids)), strict=True))
        rows = np.fromiter(map(before.get, request_ids, itertools.repeat(-1)), np.int64, len(request_ids))
        for step in self._memory:
            step.rows = np.append(step.rows, -1)[rows]  # row -1 is what is appended
        self._request_ids = request_ids


@dataclass(frozen=True)
class FixedLength:
    """`length` tokens of every request. Raises DraftsmithError below 0, ContractError beyond a drafter's block."""

    length: int

    def __post_init__(self) -> None:
        if self.length < 0:
            raise DraftsmithError("a verification length below zero", got=self.length, expected=">= 0")

    def __call__(self, blocks: DraftedBlocks) -> list[int]:
        if self.length > blocks.block_size:
            raise ContractError(
                "the fixed verification length is longer than the drafter's block",
                got=self.length,
                expected=f"<= {blocks.block_size}",
            )
        return [self.length] * blocks.num_requests


@dataclass(frozen=True)
class StaticThreshold:
    """Up to the first confidence below `threshold`, not included; 0 verifies all. Raises DraftsmithError outside 0..1.

    It is defined on raw confidences; those of the blocks are raw where the engine has no temperatures.
    """

    threshold: float

    def __post_init__(self) -> None:
        check_threshold(self.threshold)

    def __call__(self, blocks: DraftedBlocks) -> list[int]:
        confidence = _confidence(blocks, "a threshold of confidence")
        return threshold_lengths(confidence, threshold=self.threshold).tolist()


class NoSpeculation:
    """No draft token is verified: plain decoding, at the price of drafting."""

    def __call__(self, blocks: DraftedBlocks) -> list[int]:
        return [0] * blocks.num_requests


def _confidence(blocks: DraftedBlocks, policy: str) -> Floats:
    if blocks.confidence is None:
        raise ContractError(
            f"{policy} reads confidences", got="a drafter without a confidence head", expected="a drafter with one"
        )
    if blocks.confidence.shape != (blocks.num_requests, blocks.block_size):
        raise ContractError(
            "confidences of another shape than the blocks",
            got=blocks.confidence.shape,
            expected=(blocks.num_requests, blocks.block_size),
        )
    return blocks.confidence
