"""Key-value rows of many requests, and attention over them for a flat (ragged) batch of tokens.

One class serves the target and the drafters: rows grow, roll back and move, nothing is padded outside attention.
Letters: R requests, N flat tokens, Q most tokens of a request, T longest row, H query heads, G key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

GROWTH = 1.5
FIRST_CAPACITY = 128


@dataclass(frozen=True)
class FlatBatch:
    """`counts[r]` new tokens for each of the requests in slots 0..R-1, the first at absolute position `starts[r]`.

    `visibility` says what a query sees: "causal" (positions up to its own) or "block" (everything up to the end of
    its request's new tokens, for blocks that are bidirectional inside).
    """

    starts: tuple[int, ...]
    counts: tuple[int, ...]
    slots: tuple[int, ...]
    visibility: str
    device: torch.device

    @classmethod
    def make(
        cls,
        starts: Sequence[int],
        *,
        counts: Sequence[int],
        slots: Sequence[int],
        device: torch.device,
        visibility: str = "causal",
    ) -> FlatBatch:
        return cls(tuple(starts), tuple(counts), tuple(slots), visibility, device)

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)

    @property
    def end(self) -> int:
        """T: one past the highest position that the batch reaches."""
        return max(start + count for start, count in zip(self.starts, self.counts, strict=True))

    @property
    def is_prefill(self) -> bool:
        """Every request starts at position 0, so that its keys are exactly its own new tokens."""
        return self.visibility == "causal" and all(start == 0 for start in self.starts)

    @property
    def is_uniform(self) -> bool:
        return len(set(self.counts)) == 1

    @property
    def in_order(self) -> bool:
        return self.slots == tuple(range(len(self.slots)))

    @cached_property
    def positions(self) -> Tensor:
        """Absolute position of each flat token, int64 [N]."""
        parts = [torch.arange(start, start + count) for start, count in zip(self.starts, self.counts, strict=True)]
        return torch.cat(parts).to(self.device)

    @cached_property
    def token_slots(self) -> Tensor:
        """Slot of each flat token, int64 [N]."""
        return torch.repeat_interleave(torch.tensor(self.slots), torch.tensor(self.counts)).to(self.device)

    @cached_property
    def padded_index(self) -> Tensor:
        """Index of each flat token in the padded [R, Q] grid, int64 [N]."""
        widest = max(self.counts)
        parts = [torch.arange(count) + request * widest for request, count in enumerate(self.counts)]
        return torch.cat(parts).to(self.device)

    def bias(self, group: int, *, dtype: torch.dtype, window: int | None) -> Tensor:
        """Additive attention bias [R, 1, group * Q, T]: 0 where visible, -inf elsewhere; padded queries see key 0."""
        widest = max(self.counts)
        starts = torch.tensor(self.starts, device=self.device).view(-1, 1, 1)
        counts = torch.tensor(self.counts, device=self.device).view(-1, 1, 1)
        query = torch.arange(widest, device=self.device).view(1, -1, 1)
        key = torch.arange(self.end, device=self.device).view(1, 1, -1)
        own = starts + query
        seen = key <= own if self.visibility == "causal" else (key < starts + counts).expand(-1, widest, -1)
        if window is not None:
            seen = seen & (key > own - window)
        seen = torch.where(query < counts, seen, key == 0)
        bias = torch.zeros(seen.shape, dtype=dtype, device=self.device).masked_fill_(~seen, float("-inf"))
        return bias.unsqueeze(1).repeat(1, 1, group, 1)


class KeyValueRows:
    """Keys and values [slots, capacity, G, D] of every layer, grown on demand."""

    def __init__(self, num_layers: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.keys: list[Tensor | None] = [None] * num_layers
        self.values: list[Tensor | None] = [None] * num_layers
        self.num_slots = 0
        self.capacity = 0
        self.dtype, self.device = dtype, device
        self._biased: FlatBatch | None = None
        self._biases: dict[tuple[int, int | None], Tensor] = {}

    def reserve(self, *, num_slots: int, capacity: int) -> None:
        """Make room for `num_slots` requests of `capacity` positions each; what is there is kept."""
        if num_slots <= self.num_slots and capacity <= self.capacity:
            return
        if capacity > self.capacity:
            capacity = max(FIRST_CAPACITY, capacity, int(self.capacity * GROWTH))
        self.num_slots, self.capacity = max(num_slots, self.num_slots), max(capacity, self.capacity)
        for store in (self.keys, self.values):
            for layer, old in enumerate(store):
                if old is None:
                    continue
                new = old.new_zeros(self.num_slots, self.capacity, *old.shape[2:])
                new[: old.shape[0], : old.shape[1]] = old
                store[layer] = new

    def move(self, source: int, destination: int) -> None:
        """Copy slot `source` over slot `destination`: keeps live requests in slots 0..R-1 when one leaves."""
        for store in (self.keys, self.values):
            for tensor in store:
                if tensor is not None:
                    tensor[destination] = tensor[source]

    def write(self, layer: int, *, keys: Tensor, values: Tensor, batch: FlatBatch) -> None:
        """Store keys and values [N, G, D] of a flat batch at their slots and positions (over what stood there)."""
        self.reserve(num_slots=max(batch.slots) + 1, capacity=batch.end)
        flat = batch.token_slots * self.capacity + batch.positions
        for store, new in ((self.keys, keys), (self.values, values)):
            tensor = store[layer]
            if tensor is None:
                tensor = new.new_zeros(self.num_slots, self.capacity, *new.shape[1:])
                store[layer] = tensor
            tensor.view(-1, *new.shape[1:]).index_copy_(0, flat, new)

    def attend(
        self,
        layer: int,
        *,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        batch: FlatBatch,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        """Write keys and values [N, G, D], then attend with queries [N, H, D] over each request's own row -> [N, H, D].

        A prefill runs request by request on exactly its own tokens, so its rows do not depend on the batch.
        """
        self.write(layer, keys=keys, values=values, batch=batch)
        if batch.is_prefill:
            return self._attend_prefill(queries, keys, values, batch, scale, window)
        _, num_heads, head_size = queries.shape
        num_groups = keys.shape[1]
        group = num_heads // num_groups
        num_requests, widest = len(batch.counts), max(batch.counts)
        if not batch.is_uniform:
            grid = queries.new_zeros(num_requests * widest, num_heads, head_size)
            queries = grid.index_copy_(0, batch.padded_index, queries)
        stacked = queries.view(num_requests, widest, num_groups, group, head_size).permute(0, 2, 3, 1, 4)
        stacked = stacked.reshape(num_requests, num_groups, group * widest, head_size)
        rows = slice(0, num_requests) if batch.in_order else torch.tensor(batch.slots, device=self.device)
        all_keys, all_values = self.keys[layer], self.values[layer]
        assert all_keys is not None
        assert all_values is not None
        out = functional.scaled_dot_product_attention(
            stacked,
            all_keys[rows, : batch.end].transpose(1, 2),
            all_values[rows, : batch.end].transpose(1, 2),
            attn_mask=self._bias_of(batch, group, window, queries.dtype),
            scale=scale,
        )
        out = out.view(num_requests, num_groups, group, widest, head_size).permute(0, 3, 1, 2, 4)
        out = out.reshape(num_requests * widest, num_heads, head_size)
        return out if batch.is_uniform else out[batch.padded_index]

    def _bias_of(self, batch: FlatBatch, group: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """The bias of a batch, made once for all layers of one kind."""
        if self._biased is not batch:
            self._biased, self._biases = batch, {}
        if (group, window) not in self._biases:
            self._biases[group, window] = batch.bias(group, dtype=dtype, window=window)
        return self._biases[group, window]

    @staticmethod
    def _attend_prefill(
        queries: Tensor, keys: Tensor, values: Tensor, batch: FlatBatch, scale: float, window: int | None
    ) -> Tensor:
        parts = []
        group = queries.shape[1] // keys.shape[1]
        for q, k, v in zip(
            queries.split(batch.counts), keys.split(batch.counts), values.split(batch.counts), strict=True
        ):
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
            mask = _window_mask(len(q), window=window, device=q.device)
            part = functional.scaled_dot_product_attention(
                q.transpose(0, 1).unsqueeze(0),
                k.transpose(0, 1).unsqueeze(0),
                v.transpose(0, 1).unsqueeze(0),
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
            )
            parts.append(part[0].transpose(0, 1))
        return torch.cat(parts)


def _window_mask(count: int, *, window: int | None, device: torch.device) -> Tensor | None:
    """What each of `count` first positions sees, bool [count, count]; None where the window hides none of them."""
    if window is None or count <= window:
        return None
    place = torch.arange(count, device=device)
    behind = place.unsqueeze(1) - place
    return (behind >= 0) & (behind < window)
