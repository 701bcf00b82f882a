"""Seconds that a simulated engine spends: drafting, verification, prefill, and what long contexts add.

Letters: P profiled points, R requests of a step, N batch tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftsmith.errors import DraftsmithError
from draftsmith.serving.cost_table import CostTable

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class RequestsCost:
    """Seconds by requests of a step, as measured; straight lines between the points, flat beyond them."""

    num_requests: tuple[int, ...]  # [P], >= 1, strictly increasing
    seconds: tuple[float, ...]  # [P], >= 0

    def __post_init__(self) -> None:
        counts, seconds, what = np.array(self.num_requests), np.array(self.seconds), self._what()
        if len(counts) == 0 or len(counts) != len(seconds):
            raise DraftsmithError(
                f"{what} needs seconds for each number of requests",
                got=f"{len(counts)} numbers, {len(seconds)} seconds",
                expected="as many of each, at least one",
            )
        if counts[0] < 1 or not (np.diff(counts) > 0).all():
            raise DraftsmithError(
                f"numbers of requests of {what}", got=self.num_requests, expected=">= 1, strictly increasing"
            )
        if not (np.isfinite(seconds) & (seconds >= 0)).all():
            raise DraftsmithError(f"seconds of {what}", got=self.seconds, expected="finite, >= 0")

    def up_to(self, max_requests: int) -> Floats:
        """Seconds for 0, 1, .., `max_requests` requests [R + 1]; none cost nothing."""
        seconds = np.interp(np.arange(max_requests + 1), self.num_requests, self.seconds)
        seconds[0] = 0.0
        return seconds

    @classmethod
    def _what(cls) -> str:
        return "a cost by requests"


@dataclass(frozen=True)
class DraftingCost(RequestsCost):
    """Seconds to draft whole blocks for so many requests.

    Where the longest block that a step drafts has k of K slots, it takes `fixed_share` + (1 - `fixed_share`) k / K of
    that: a parallel drafter runs all of its slots at once, and only the LM head and the sequential loop are spared.
    """

    fixed_share: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.fixed_share <= 1:
            raise DraftsmithError("fixed_share of a drafting cost", got=self.fixed_share, expected="0 to 1")

    def share(self, longest: int, *, block_size: int) -> float:
        """Of the seconds for whole blocks, if the longest one has `longest` slots of K."""
        return self.fixed_share + (1 - self.fixed_share) * longest / block_size

    @classmethod
    def _what(cls) -> str:
        return "a drafting cost"


@dataclass(frozen=True)
class UpkeepCost(RequestsCost):
    """Seconds of a step outside drafter and target: acceptance, sampling, bookkeeping."""

    @classmethod
    def _what(cls) -> str:
        return "an upkeep cost"


@dataclass(frozen=True)
class PrefillCost:
    """A prefill pass takes `seconds_per_pass` and `1 / tokens_per_s` for each of its prompt tokens."""

    tokens_per_s: float
    seconds_per_pass: float = 0.0

    def __post_init__(self) -> None:
        if not self.tokens_per_s > 0:
            raise DraftsmithError("the rate of prefill", got=self.tokens_per_s, expected="> 0 tokens a second")
        _check_seconds("seconds_per_pass of prefill", self.seconds_per_pass)

    def seconds(self, num_tokens: int) -> float:
        return self.seconds_per_pass + num_tokens / self.tokens_per_s


@dataclass(frozen=True)
class ContextCost:
    """What long contexts add to a verification pass: its attention reads all of them, in time that is linear in them.

    `seconds_per_token` for each token in the contexts of the batch beyond R times `profiled_tokens`, the context at
    which the SPS table was measured. Shorter contexts than that take nothing off.
    """

    seconds_per_token: float
    profiled_tokens: int = 0

    def __post_init__(self) -> None:
        _check_seconds("seconds_per_token of a context", self.seconds_per_token)
        if self.profiled_tokens < 0:
            raise DraftsmithError("profiled_tokens of a context cost", got=self.profiled_tokens, expected=">= 0")

    def seconds(self, num_tokens: int, *, num_requests: int) -> float:
        """`num_tokens` of the contexts of `num_requests` together."""
        return self.seconds_per_token * max(0, num_tokens - num_requests * self.profiled_tokens)


@dataclass(frozen=True)
class StepCosts:
    """What a step costs; a part that is None costs nothing.

    A step takes drafting(requests that draft, longest block) + 1 / SPS(N) + context(tokens in the contexts of the
    batch) + upkeep(R) seconds. The table is the simulated machine's own; a policy may believe in another.
    """

    verification: CostTable
    drafting: DraftingCost | None = None
    prefill: PrefillCost | None = None
    context: ContextCost | None = None
    upkeep: UpkeepCost | None = None

    def fixed_s(self, max_requests: int) -> Floats:
        """Seconds of a step that verification does not change, for 0..`max_requests` requests that all draft [R + 1].

        What a policy needs to weigh tokens against the time of whole steps (`serving.policies`).
        """
        seconds = np.zeros(max_requests + 1)
        for cost in (self.drafting, self.upkeep):
            if cost is not None:
                seconds += cost.up_to(max_requests)
        return seconds


def _check_seconds(name: str, seconds: float) -> None:
    if not 0 <= seconds < float("inf"):
        raise DraftsmithError(name, got=seconds, expected="finite seconds >= 0")
