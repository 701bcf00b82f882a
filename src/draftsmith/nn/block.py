"""Anchors, blocks, their masks and their weights (DFlash section 3, DSpark section 3.3).

Letters: B samples, T tokens of the longest, A anchors, K block size. Slot k (1-based) of the block at anchor p has
position p + k - 1, label token p + k, and is conditioned on token p + k - 1.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftsmith.nn.attention import Visibility


def candidate_anchors(supervised: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Positions whose own token and next token are supervised; supervised [T] -> [number of candidates]."""
    return np.flatnonzero((supervised[:-1] != 0) & (supervised[1:] != 0)).astype(np.int64)


def draw_anchors(
    supervised: NDArray[np.uint8], *, num: int, seed: int, epoch: int, sample_id: str
) -> NDArray[np.int64]:
    """Up to `num` anchors, uniform without replacement, sorted; depends on (seed, epoch, sample_id) alone."""
    candidates = candidate_anchors(supervised)
    if len(candidates) <= num:
        return candidates
    digest = hashlib.sha256(f"{seed}/{epoch}/{sample_id}".encode()).digest()
    generator = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))
    return np.sort(generator.choice(candidates, size=num, replace=False))


def num_valid_slots(supervised: NDArray[np.uint8], anchors: NDArray[np.int64], *, block_size: int) -> NDArray[np.int64]:
    """How many slots of each block count: the labels form one supervised run inside the sequence. [A] in 1..K."""
    stops = np.flatnonzero(np.append(supervised, 0) == 0)
    first_stop = stops[np.searchsorted(stops, anchors)]
    return np.minimum(first_stop - anchors - 1, block_size)


def position_weights(block_size: int, *, gamma_w: float) -> NDArray[np.float32]:
    """w_k = exp(-(k - 1) / gamma_w) for k = 1..K (DSpark section 3.3)."""
    return np.exp(-np.arange(block_size) / gamma_w).astype(np.float32)


@dataclass(frozen=True)
class BlockBatch:
    """One micro-batch: B rows of T tokens, each row one or more samples end to end, and A anchors a row.

    token_ids, positions (within the sample), documents (which sample of the row; -1: padding) [B, T]; context
    [B, T, L, D]; hidden [B, T, D], the target's last hidden state of every token, None unless the drafter reads it;
    anchors [B, A], indices into the row (-1: none). For the n slots that count: slot_index [n] into B * A * K,
    previous [n], labels [n], target_hidden [n, D] (the state that predicts the label), weights [n], slot_number [n]
    (0-based k - 1), thinning [n] (candidate anchors of the sample for each one that was drawn).
    """

    token_ids: Tensor
    positions: Tensor
    documents: Tensor
    context: Tensor
    hidden: Tensor | None
    anchors: Tensor
    slot_index: Tensor
    previous: Tensor
    labels: Tensor
    target_hidden: Tensor
    weights: Tensor
    slot_number: Tensor
    thinning: Tensor
    num_tokens: int
    num_anchors: int

    @property
    def num_slots(self) -> int:
        return self.labels.shape[0]

    @property
    def visibility(self) -> Visibility:
        return Visibility(self.anchors, self.documents, self.positions)

    def block_positions(self, width: int) -> Tensor:
        """Positions anchor..anchor + width - 1 of every block, [B, A * width]; absent anchors count from 0."""
        starts = self.positions.gather(1, self.anchors.clamp(min=0)).masked_fill(self.anchors < 0, 0)
        return (starts.unsqueeze(-1) + torch.arange(width, device=starts.device)).flatten(1)

    def block_ids(self, width: int, *, mask_token_id: int) -> Tensor:
        """The anchor's token, then mask tokens, [B, A * width]; absent anchors are mask tokens alone."""
        ids = torch.full((*self.anchors.shape, width), mask_token_id, device=self.anchors.device)
        first = self.token_ids.gather(1, self.anchors.clamp(min=0))
        ids[..., 0] = torch.where(self.anchors < 0, mask_token_id, first)
        return ids.flatten(1)

    def spread(self, values: Tensor, *, block_size: int) -> Tensor:
        """Values [n, ...] of the counted slots -> [B * A, K, ...], zero elsewhere; K = `block_size`."""
        grid = values.new_zeros(self.anchors.numel() * block_size, *values.shape[1:])
        return grid.index_copy(0, self.slot_index, values).unflatten(0, (-1, block_size))
