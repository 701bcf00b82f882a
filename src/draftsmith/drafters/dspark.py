"""DSpark: the DFlash backbone plus a sequential head on the logits and a confidence head (arXiv 2607.05147)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from draftsmith.drafters.base import DrafterConfig, LossSums, Proposal, Sampler, stack_proposal
from draftsmith.drafters.dflash import DFlash
from draftsmith.nn.block import BlockBatch
from draftsmith.nn.confidence import ConfidenceHead
from draftsmith.nn.kv import KeyValueRows
from draftsmith.nn.losses import draft_loss
from draftsmith.nn.rope import Rope
from draftsmith.nn.sequential import make_head
from draftsmith.params import LossWeights
from draftsmith.targets.base import SharedWeights


class DSpark(DFlash):
    """Differs from DFlash: p_k = softmax(U_k + B(x_{k-1})) sampled left to right (Eq. 4), and c_k (Eq. 7).

    The sequential head is `markov`, `gated` or `rnn`; the confidence head reads h_k, with W1[x_{k-1}] or without.
    """

    def __init__(self, config: DrafterConfig, *, shared: SharedWeights, rope: Rope) -> None:
        super().__init__(config, shared=shared, rope=rope)
        assert config.sequential is not None
        kind, rank = config.sequential
        hidden = config.geometry.hidden_size
        self.markov_head = make_head(kind, vocab_size=config.vocab_size, rank=rank, hidden_size=hidden)
        if config.confidence:
            self.confidence_head = ConfidenceHead(hidden + (rank if config.confidence_with_markov else 0))

    def reset(self, *, seed: int) -> None:
        super().reset(seed=seed)
        self.markov_head.reset(torch.Generator().manual_seed(seed + 1))
        if self.config.confidence:
            self.confidence_head.reset()

    def losses(self, batch: BlockBatch, *, weights: LossWeights) -> LossSums:
        states = self.slot_states(batch)
        features = self.markov_head.feature(batch.spread(batch.previous, block_size=self.config.block_size))
        inner = self.markov_head.walk(features, hidden=states)
        hidden, feature, inner = (part.flatten(0, 1)[batch.slot_index] for part in (states, features, inner))
        loss = draft_loss(
            hidden,
            feature=inner,
            output_weight=self.markov_head.markov_w2.weight,
            head=self.shared.head,
            target_hidden=batch.target_hidden,
            labels=batch.labels,
            weights=batch.weights,
            ce_weight=weights.ce,
            tv_weight=weights.tv,
            softcap=self.shared.logit_softcap,
        )
        total, bce, confidence = loss.total, None, None
        if self.config.confidence:
            logits = self._confidence(hidden, feature)
            rows = functional.binary_cross_entropy_with_logits(logits, loss.acceptance, reduction="none")
            bce = (rows * batch.weights).sum()
            total = total + weights.confidence * bce
            bce, confidence = bce.detach(), logits.detach().sigmoid()
        return LossSums(
            total=total,
            ce=loss.ce,
            tv=loss.tv,
            bce=bce,
            weight=self.batch_weight(batch),
            acceptance=loss.acceptance,
            correct=loss.correct,
            confidence=confidence,
            slot_number=batch.slot_number,
        )

    @torch.inference_mode()
    def propose(
        self,
        anchors: Tensor,
        *,
        positions: list[int],
        rows: KeyValueRows,
        sample: Sampler,
        slots: Sequence[int] | None = None,
        num_tokens: int | None = None,
    ) -> Proposal:
        states = self.block_states(anchors, positions=positions, rows=rows, slots=slots)[:, :num_tokens]
        logits = self.shared.logits(states.flatten(0, 1)).view(*states.shape[:2], -1)
        previous, drawn, features = anchors, [], []
        state = self.markov_head.start(len(anchors))
        for slot in range(states.shape[1]):
            features.append(self.markov_head.feature(previous))
            inner, state = self.markov_head.step(state, feature=features[-1], hidden=states[:, slot])
            drawn.append(sample(logits[:, slot] + self.markov_head.bias(inner).float(), slot))
            previous = drawn[-1][0]
        confidence = None
        if self.config.confidence:
            confidence = self._confidence(states, torch.stack(features, dim=1))
        return stack_proposal(drawn, confidence)

    def _confidence(self, hidden: Tensor, feature: Tensor) -> Tensor:
        """hidden [..., D], feature [..., r] -> logits [...]; without the feature where the head reads none."""
        parts = (hidden, feature) if self.config.confidence_with_markov else (hidden,)
        return self.confidence_head(torch.cat(parts, dim=-1))
