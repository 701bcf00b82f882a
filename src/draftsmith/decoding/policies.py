"""How many of its drafted tokens each request has verified: what a policy may know, and the simplest ones.

Lossless decoding asks one thing of a policy: whether token k is verified must not depend on token k itself or on those
behind it (DSpark section 3.2.2). Confidence k reads the tokens before k alone, so a policy that reads confidences 1..k
to decide on token k, and stops there, keeps to it; one that looks at all K and then chooses does not.
Letters: R requests, K block size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class DraftedBlocks:
    """One step's blocks before verification, requests in the order of the batch.

    `confidence` [R, K] is the probability that token k is accepted, given that those before it were: the drafter's own
    estimate, with the calibration's temperatures applied where the engine has them; None without a confidence head.
    """

    request_ids: tuple[str, ...]  # [R]
    block_size: int
    confidence: NDArray[np.float64] | None

    @property
    def num_requests(self) -> int:
        return len(self.request_ids)


class LengthPolicy(Protocol):
    """Called once a step, in the order of the steps; may keep a memory by request id."""

    def __call__(self, blocks: DraftedBlocks) -> Sequence[int]:
        """Verification length of each request [R], each 0..K."""
        ...


def verify_all(blocks: DraftedBlocks) -> list[int]:
    """Full-length verification."""
    return [blocks.block_size] * blocks.num_requests
