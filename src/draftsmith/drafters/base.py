"""What every drafter is: a module that learns from cached samples and proposes blocks in decoding.

Letters: R requests, N flat tokens, L captured layers, D hidden, K block size, V vocabulary, r rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.nn.block import BlockBatch
from draftsmith.nn.kv import FlatBatch, KeyValueRows
from draftsmith.nn.layers import LayerGeometry
from draftsmith.nn.losses import draft_loss
from draftsmith.params import LAST_HIDDEN_KINDS, LossWeights
from draftsmith.targets.base import SharedWeights


@dataclass(frozen=True)
class DrafterConfig:
    """Everything that fixes a drafter's shape, from its row and its target's config, or from its own config.json.

    `family` is that of the draft layers (a Llama target's drafter with head norms has Qwen3's); `block_size` is K, the
    draft tokens of a round; `mask_token_id` is None where no block of masks is run; `num_target_layers` the target's
    layers, whose ids `capture_layers` are; `windows` [num_layers] how far each draft layer sees back (None: all the
    way); `text` the fields of a text config that `geometry` and the rotary positions come from; `sequential` kind and
    rank of the sequential head; `step_decay` weighs EAGLE-3's further steps.
    """

    kind: str
    family: str
    block_size: int
    num_layers: int
    geometry: LayerGeometry
    vocab_size: int
    mask_token_id: int | None
    capture_layers: tuple[int, ...]
    num_target_layers: int
    windows: tuple[int | None, ...]
    text: dict[str, Any]
    sequential: tuple[str, int] | None = None
    confidence: bool = False
    confidence_with_markov: bool = True
    sample_from_anchor: bool = True
    step_decay: float = 1.0

    @property
    def block_width(self) -> int:
        """Slots that a block of masks runs: K, or K + 1 where the anchor's own slot drafts nothing."""
        return self.block_size if self.sample_from_anchor else self.block_size + 1


@dataclass(frozen=True)
class LossSums:
    """Weighted sums of one micro-batch: `total` is differentiable, the rest is for people.

    `weight` is what the sums of all micro-batches are divided by; `acceptance` [n] and `correct` [n] per counted slot,
    `confidence` [n] predicted survival or None; `slot_number` [n] (0-based).
    """

    total: Tensor
    ce: Tensor
    tv: Tensor
    bce: Tensor | None
    weight: Tensor
    acceptance: Tensor
    correct: Tensor
    confidence: Tensor | None
    slot_number: Tensor


@dataclass(frozen=True)
class Observation:
    """What the target showed of newly committed tokens: their ids [N], captured states [N, L, D], flat batch."""

    token_ids: Tensor
    captured: Tensor
    last_hidden: Tensor
    batch: FlatBatch


@dataclass(frozen=True)
class Proposal:
    """A drafted block per request: tokens [R, k]; draft probabilities [R, k, V] really sampled from (float32), or
    None where every request is greedy; raw confidence logits [R, k] or None. k <= K slots were asked for."""

    tokens: Tensor
    probabilities: Tensor | None
    confidence_logits: Tensor | None

    def among(self, num_requests: int, *, members: Sequence[int]) -> Proposal:
        """The proposal of `num_requests` requests of which these are the blocks of `members`; zeros for the others."""
        index = torch.tensor(members, device=self.tokens.device)

        def spread(rows: Tensor | None) -> Tensor | None:
            return None if rows is None else rows.new_zeros(num_requests, *rows.shape[1:]).index_copy_(0, index, rows)

        tokens = spread(self.tokens)
        assert tokens is not None
        return Proposal(tokens, spread(self.probabilities), spread(self.confidence_logits))


Sampler = Callable[[Tensor, int], tuple[Tensor, Tensor | None]]
"""(logits [R, V] float32, slot number 0-based) -> (tokens [R], probabilities [R, V] or None when all are greedy)."""


class Drafter(nn.Module, ABC):
    """Base of all drafters; `shared` (embedding and LM head of the target) is frozen and not a parameter."""

    def __init__(self, config: DrafterConfig, *, shared: SharedWeights) -> None:
        super().__init__()
        self.config = config
        self.shared = shared

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def reads_last_hidden(self) -> bool:
        """Whether the drafter reads the target's last hidden state of every token: the cache must keep all of them."""
        return self.config.kind in LAST_HIDDEN_KINDS

    def batch_weight(self, batch: BlockBatch) -> Tensor:
        """What the loss sums are normalised by, summed over all micro-batches and ranks: the weights of the slots."""
        return batch.weights.sum()

    @abstractmethod
    def losses(self, batch: BlockBatch, *, weights: LossWeights) -> LossSums:
        """Weighted loss sums of one micro-batch (not yet normalised)."""

    def hard_losses(self, hidden: Tensor, *, batch: BlockBatch, weights: LossWeights) -> LossSums:
        """Losses of states hidden [n, D] of the counted slots through the shared head alone: no bias, no confidence."""
        loss = draft_loss(
            hidden,
            feature=None,
            output_weight=None,
            head=self.shared.head,
            target_hidden=batch.target_hidden,
            labels=batch.labels,
            weights=batch.weights,
            ce_weight=weights.ce,
            tv_weight=weights.tv,
            softcap=self.shared.logit_softcap,
        )
        return LossSums(
            total=loss.total,
            ce=loss.ce,
            tv=loss.tv,
            bce=None,
            weight=self.batch_weight(batch),
            acceptance=loss.acceptance,
            correct=loss.correct,
            confidence=None,
            slot_number=batch.slot_number,
        )

    @abstractmethod
    def new_rows(self) -> KeyValueRows:
        """Empty rows of what the drafter keeps of each request in decoding."""

    @abstractmethod
    def observe(self, observation: Observation, *, rows: Any) -> None:
        """Append context rows for committed tokens at their absolute positions."""

    @abstractmethod
    def propose(
        self,
        anchors: Tensor,
        *,
        positions: list[int],
        rows: Any,
        sample: Sampler,
        slots: Sequence[int] | None = None,
        num_tokens: int | None = None,
    ) -> Proposal:
        """Draft a block per request from anchor tokens [R] at `positions`; context rows cover all earlier positions.

        `slots` [R] are those of the requests in `rows`, by default 0..R-1. Only the first `num_tokens` of each block
        are drafted, by default all K: they are what they are in a whole block.
        """

    @abstractmethod
    def reset(self, *, seed: int) -> None:
        """Random start, the same for the same seed."""


def stack_proposal(drawn: list[tuple[Tensor, Tensor | None]], confidence: Tensor | None) -> Proposal:
    """Per-slot (tokens [R], probabilities [R, V] or None) -> one Proposal."""
    tokens = torch.stack([tokens for tokens, _ in drawn], dim=1)
    probabilities = [part for _, part in drawn if part is not None]
    return Proposal(tokens, torch.stack(probabilities, dim=1) if probabilities else None, confidence)
