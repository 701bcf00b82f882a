"""What the slots of drafted blocks see in training, and attention under it: boolean masks, or flex_attention on GPUs.

Queries belong to blocks, one block an anchor. A query sees the context rows of its own document before its anchor
and the keys of its own block, neither further back than the window, if there is one; no block sees another. A block's
own keys lie at successive positions that end at its last query's.
Letters: B rows, T context tokens, A anchors, Q queries and O own keys of a block, H query heads, G key heads, E head
size. Source: DFlash section 3; EAGLE-3's steps are blocks of one query whose own keys are the steps before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention


class BlockAttention(Protocol):
    """Attention of block queries over [context ; own keys]."""

    def attend(self, queries: Tensor, *, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """queries [B, A * Q, H, E], keys and values [B, T + A * O, G, E] -> [B, A * Q, H, E]."""
        ...


@dataclass(frozen=True)
class Visibility:
    """The context of blocks: `anchors` [B, A] indices into a row (-1: no block), `documents` [B, T] (which sample a
    token belongs to, -1: padding), `positions` [B, T] within the document."""

    anchors: Tensor
    documents: Tensor
    positions: Tensor

    def mask(self, query_positions: Tensor, *, num_own: int, window: int | None) -> Tensor:
        """query_positions [B, A * Q] (in the document), O = `num_own` -> bool [B, A * Q, T + A * O], True = visible.

        Queries of absent anchors see their own keys alone.
        """
        num_anchors = self.anchors.shape[1]
        block = torch.arange(num_anchors, device=self.anchors.device)
        owner = block.repeat_interleave(query_positions.shape[1] // max(1, num_anchors))
        anchor = self.anchors[:, owner].unsqueeze(-1)
        document = self.documents.gather(1, anchor.squeeze(-1).clamp(min=0)).unsqueeze(-1)
        token = torch.arange(self.documents.shape[1], device=self.anchors.device)
        context = (token < anchor) & (self.documents.unsqueeze(1) == document)
        if window is not None:
            context &= self.positions.unsqueeze(1) > query_positions.unsqueeze(-1) - window
        own = (owner.unsqueeze(1) == block.repeat_interleave(num_own)).expand(len(context), -1, -1)
        if window is not None and num_own:
            last = query_positions.unflatten(1, (num_anchors, -1))[..., -1:]
            own_positions = (last + torch.arange(1 - num_own, 1, device=last.device)).flatten(1)
            own = own & (own_positions.unsqueeze(1) > query_positions.unsqueeze(-1) - window)
        return torch.cat((context, own), dim=-1)

    def flex_mask(self, query_positions: Tensor, *, num_own: int, window: int | None) -> BlockMask:
        """The same as `mask` for flex_attention, which skips the parts of the square that nobody sees."""
        num_rows, num_anchors = self.anchors.shape
        num_tokens, num_queries = self.documents.shape[1], query_positions.shape[1]
        per_block = num_queries // max(1, num_anchors)

        def visible(row: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
            anchor = self.anchors[row, query // per_block]
            token = key.clamp(max=num_tokens - 1)
            context = (key < num_tokens) & (key < anchor)
            context &= self.documents[row, token] == self.documents[row, anchor.clamp(min=0)]
            if window is not None:
                context &= self.positions[row, token] > query_positions[row, query] - window
            if num_own == 0:
                return context
            block = query // per_block
            own = (key >= num_tokens) & ((key - num_tokens) // num_own == block)
            if window is not None:
                last = query_positions[row, (block + 1) * per_block - 1]
                behind = num_own - 1 - (key - num_tokens) % num_own
                own = own & (last - behind > query_positions[row, query] - window)
            return context | own

        return create_block_mask(
            visible, num_rows, None, num_queries, num_tokens + num_anchors * num_own, device=self.anchors.device
        )

    def attention(self, query_positions: Tensor, *, num_own: int, window: int | None) -> BlockAttention:
        """Flex attention on a GPU, scaled_dot_product_attention with a boolean mask elsewhere.

        On the CPU flex_attention has no backward.
        """
        if self.anchors.device.type == "cuda":
            return FlexAttention(self.flex_mask(query_positions, num_own=num_own, window=window))
        return MaskedAttention(self.mask(query_positions, num_own=num_own, window=window))


@dataclass(frozen=True)
class MaskedAttention:
    """Attention under a boolean mask [B, A * Q, T + A * O]; a query that sees nothing gets zeros."""

    mask: Tensor

    def attend(self, queries: Tensor, *, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Shapes as in `BlockAttention.attend`."""
        group = queries.shape[2] // keys.shape[2]
        out = functional.scaled_dot_product_attention(
            queries.transpose(1, 2),
            keys.repeat_interleave(group, dim=2).transpose(1, 2),
            values.repeat_interleave(group, dim=2).transpose(1, 2),
            attn_mask=self.mask.unsqueeze(1),
            scale=scale,
        )
        return out.transpose(1, 2)


@dataclass(frozen=True)
class FlexAttention:
    """The same under a flex_attention block mask."""

    mask: BlockMask

    def attend(self, queries: Tensor, *, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Shapes as in `BlockAttention.attend`."""
        out = _flex(queries.device.type)(
            queries.transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            block_mask=self.mask,
            scale=scale,
            enable_gqa=True,
        )
        return out.transpose(1, 2)


@cache
def _flex(device_type: str) -> Callable[..., Any]:
    """Compiled where it is meant to be: uncompiled it makes the whole square of scores."""
    return cast(
        Callable[..., Any], torch.compile(flex_attention, dynamic=True) if device_type == "cuda" else flex_attention
    )
