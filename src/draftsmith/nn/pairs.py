"""Rows of drafters that read pairs: a state of position t beside the token at t + 1 (EAGLE-3, MTP).

A pair is complete only when the next token is known, so the newest state of every request waits for it.
Letters: N flat tokens, M complete pairs, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.nn.kv import FlatBatch, KeyValueRows


@dataclass(frozen=True)
class Pairs:
    """Complete pairs, flat: states [M, D] of positions `batch.positions`, and the ids [M] of the tokens after them."""

    states: Tensor
    ids: Tensor
    batch: FlatBatch


class PairRows(KeyValueRows):
    """Key-value rows and, for every slot, the newest state, whose next token is still to come."""

    def __init__(self, num_layers: int, *, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(num_layers, dtype=dtype, device=device)
        self.newest = torch.zeros(0, hidden_size, dtype=dtype, device=device)

    def move(self, source: int, destination: int) -> None:
        super().move(source, destination)
        self.newest[destination] = self.newest[source]

    def complete(self, states: Tensor, *, ids: Tensor, batch: FlatBatch) -> Pairs | None:
        """Take in the states [N, D] and ids [N] of new tokens; returns the pairs that they complete (None: none)."""
        if max(batch.slots) >= len(self.newest):
            more = max(batch.slots) + 1 - len(self.newest)
            self.newest = torch.cat((self.newest, self.newest.new_zeros(more, self.newest.shape[1])))
        made, following, starts, counts, slots = [], [], [], [], []
        for start, slot, own, own_ids in zip(
            batch.starts, batch.slots, states.split(batch.counts), ids.split(batch.counts), strict=True
        ):
            before = self.newest[slot : slot + 1] if start > 0 else own[:0]
            made.append(torch.cat((before, own[:-1])))
            following.append(own_ids if start > 0 else own_ids[1:])
            if len(following[-1]):
                starts.append(max(0, start - 1))
                counts.append(len(following[-1]))
                slots.append(slot)
        self.newest[list(batch.slots)] = states[torch.tensor(batch.counts, device=states.device).cumsum(0) - 1]
        if not counts:
            return None
        pairs = FlatBatch.make(starts, counts=counts, slots=slots, device=batch.device)
        return Pairs(torch.cat(made), torch.cat(following), pairs)


def following_ids(token_ids: Tensor) -> Tensor:
    """token_ids [B, T] -> the id after each token [B, T]; the last column, which has none, repeats its own."""
    return torch.cat((token_ids[:, 1:], token_ids[:, -1:]), dim=1)
