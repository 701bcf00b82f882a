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
    """One micro-batch of samples with their anchors, padded to T tokens and A anchors (padding: valid = False).

    context [B, T, L, D]; lengths [B]; block_ids [B, A * K]: anchor token, then mask tokens; block_positions
    [B, A * K]; mask bool [B, A * K, T + A * K]; and for the n slots that count: slot_index [n] into B * A * K,
    previous [n], labels [n], target_hidden [n, D], weights [n], slot_number [n] (0-based k - 1).
    """

    context: Tensor
    block_ids: Tensor
    block_positions: Tensor
    mask: Tensor
    slot_index: Tensor
    previous: Tensor
    labels: Tensor
    target_hidden: Tensor
    weights: Tensor
    slot_number: Tensor
    num_tokens: int
    num_anchors: int

    @property
    def num_slots(self) -> int:
        return self.labels.shape[0]


def block_mask(anchors: Tensor, *, lengths: Tensor, num_tokens: int, block_size: int) -> Tensor:
    """What each block slot sees: context before its anchor, and its own block. anchors [B, A] (-1: none), lengths [B].

    Returns bool [B, A * K, T + A * K]; rows of absent anchors see only their own block.
    """
    num_anchors = anchors.shape[1]
    slot_anchor = anchors.repeat_interleave(block_size, dim=1)
    token = torch.arange(num_tokens, device=anchors.device)
    context = (token < slot_anchor.unsqueeze(-1)) & (token < lengths.view(-1, 1, 1))
    block_of = torch.arange(num_anchors, device=anchors.device).repeat_interleave(block_size)
    own = (block_of.unsqueeze(1) == block_of.unsqueeze(0)).expand(anchors.shape[0], -1, -1)
    return torch.cat((context, own), dim=-1)
