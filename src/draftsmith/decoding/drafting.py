"""Whether a request drafts at all in a step, and how far: what such a policy may know, and the simplest ones.

Drafting costs time whether or not its tokens are accepted; to spare it for hard requests is what the DSpark paper
names as future work (difficulty-aware early exit). It is lossless whatever it decides from: the past of a request says
nothing of the tokens that it is about to draft. Letters: R requests, K block size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class DraftCounts:
    """Draft tokens of each request, in the order of the batch; each [R]."""

    drafted: Ints
    verified: Ints
    accepted: Ints


@dataclass(frozen=True, eq=False)
class DraftHistory:
    """What the requests of a step have been through; all counts are 0 before a request's first round.

    `confidence` is that of the last round with the calibration's temperatures applied, nan in slots that were not
    drafted; None without a confidence head.
    """

    block_size: int
    rounds: Ints  # [R] so far
    total: DraftCounts  # of all its rounds
    last: DraftCounts  # of its last round
    confidence: Floats | None  # [R, K]


class DraftPolicy(Protocol):
    """Called once a step, before anything is drafted, in the order of the steps; may keep a memory by request id.

    Slots that are not drafted have confidence 0 in the step's blocks, and are not verified whatever the length policy
    says. What a step's drafting costs hangs on how many requests draft at least one token.
    """

    def draft_lengths(self, request_ids: tuple[str, ...], history: DraftHistory) -> Sequence[int]:
        """Tokens to draft for each request [R], each 0..K."""
        ...


class DraftAll:
    """Whole blocks for every request."""

    def draft_lengths(self, request_ids: tuple[str, ...], history: DraftHistory) -> Sequence[int]:
        return [history.block_size] * len(request_ids)


class DraftNothing:
    """Plain decoding by an engine that has a drafter and leaves it alone."""

    def draft_lengths(self, request_ids: tuple[str, ...], history: DraftHistory) -> Sequence[int]:
        return [0] * len(request_ids)
