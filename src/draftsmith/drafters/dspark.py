"""DSpark: the DFlash backbone plus a sequential head on the logits and a confidence head (arXiv 2607.05147)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from draftsmith.drafters.base import DrafterConfig, LossSums, Proposal, Sampler
from draftsmith.drafters.dflash import DFlash, stack_proposal
from draftsmith.nn.block import BlockBatch
from draftsmith.nn.confidence import ConfidenceHead
from draftsmith.nn.kv import KeyValueRows
from draftsmith.nn.losses import draft_loss
from draftsmith.nn.rope import Rope
from draftsmith.nn.sequential import MarkovHead
from draftsmith.targets.base import SharedWeights


class DSpark(DFlash):
    """Differs from DFlash: p_k = softmax(U_k + B(x_{k-1})) sampled left to right (Eq. 4), and c_k (Eq. 7)."""

    def __init__(self, config: DrafterConfig, *, shared: SharedWeights, rope: Rope) -> None:
        super().__init__(config, shared=shared, rope=rope)
        self.markov_head = MarkovHead(config.vocab_size, rank=config.sequential_rank)
        if config.confidence:
            self.confidence_head = ConfidenceHead(config.geometry.hidden_size + config.sequential_rank)

    def reset(self, *, seed: int) -> None:
        super().reset(seed=seed)
        self.markov_head.reset(torch.Generator().manual_seed(seed + 1))
        if self.config.confidence:
            self.confidence_head.reset()

    def losses(self, batch: BlockBatch, *, ce_weight: float, tv_weight: float, confidence_weight: float) -> LossSums:
        hidden = self.backbone(batch).flatten(0, 1)[batch.slot_index]
        feature = self.markov_head.feature(batch.previous)
        loss = draft_loss(
            hidden,
            feature=feature,
            output_weight=self.markov_head.markov_w2.weight,
            head=self.shared.head,
            target_hidden=batch.target_hidden,
            labels=batch.labels,
            weights=batch.weights,
            ce_weight=ce_weight,
            tv_weight=tv_weight,
            softcap=self.shared.logit_softcap,
        )
        total, bce, confidence = loss.total, None, None
        if self.config.confidence:
            logits = self.confidence_head(torch.cat((hidden, feature), dim=-1))
            rows = functional.binary_cross_entropy_with_logits(logits, loss.acceptance, reduction="none")
            bce = (rows * batch.weights).sum()
            total = total + confidence_weight * bce
            bce, confidence = bce.detach(), logits.detach().sigmoid()
        return LossSums(
            total=total,
            ce=loss.ce,
            tv=loss.tv,
            bce=bce,
            weight=batch.weights.sum(),
            acceptance=loss.acceptance,
            correct=loss.correct,
            confidence=confidence,
            slot_number=batch.slot_number,
        )

    @torch.inference_mode()
    def propose(self, anchors: Tensor, *, positions: list[int], rows: KeyValueRows, sample: Sampler) -> Proposal:
        states = self.block_states(anchors, positions=positions, rows=rows)
        logits = self.shared.logits(states.flatten(0, 1)).view(*states.shape[:2], -1)
        previous, drawn, features = anchors, [], []
        for slot in range(self.config.block_size):
            features.append(self.markov_head.feature(previous))
            drawn.append(sample(logits[:, slot] + self.markov_head.bias(features[-1]).float(), slot))
            previous = drawn[-1][0]
        confidence = None
        if self.config.confidence:
            confidence = self.confidence_head(torch.cat((states, torch.stack(features, dim=1)), dim=-1))
        return stack_proposal(drawn, confidence)
