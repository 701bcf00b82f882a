"""DFlash: a parallel backbone that reads the target's captured states and drafts a whole block in one pass.

Source: DFlash section 3 (arXiv 2602.06036), block convention of DSpark (the anchor's own slot is the first draft).
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from draftsmith.drafters.base import Drafter, DrafterConfig, LossSums, Observation, Proposal, Sampler
from draftsmith.nn.block import BlockBatch
from draftsmith.nn.kv import FlatBatch, KeyValueRows
from draftsmith.nn.layers import STYLES, DraftLayer
from draftsmith.nn.losses import draft_loss
from draftsmith.nn.rope import Rope
from draftsmith.targets.base import SharedWeights

INIT_STD = 0.02


class DFlash(Drafter):
    """Backbone only: `fc` and `hidden_norm` make the context, `layers` the block states, `norm` ends them."""

    def __init__(self, config: DrafterConfig, *, shared: SharedWeights, rope: Rope) -> None:
        super().__init__(config, shared=shared)
        hidden, eps = config.geometry.hidden_size, config.geometry.norm_eps
        self.fc = nn.Linear(len(config.capture_layers) * hidden, hidden, bias=False)
        style = STYLES[config.geometry.style]
        self.hidden_norm = style.norm(hidden, eps=eps)
        self.layers = nn.ModuleList(style.layer(config.geometry) for _ in range(config.num_layers))
        self.norm = style.norm(hidden, eps=eps)
        self.rope = rope

    def reset(self, *, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for module in self.modules():
                if isinstance(module, nn.Linear):
                    module.weight.normal_(0.0, INIT_STD, generator=generator)
                    if module.bias is not None:
                        module.bias.zero_()

    @property
    def draft_layers(self) -> list[DraftLayer]:
        return cast(list[DraftLayer], list(self.layers))

    def backbone(self, batch: BlockBatch) -> Tensor:
        """Block states after the final norm: [B, A * K, D]."""
        context = self.hidden_norm(self.fc(batch.context.flatten(-2)))
        positions = torch.arange(context.shape[1], device=context.device).expand(context.shape[0], -1)
        block_rope, context_rope = self.rope(batch.block_positions), self.rope(positions)
        x = self.shared.embed(batch.block_ids).to(context.dtype)
        for layer in self.draft_layers:
            x = layer(x, context=context, mask=batch.mask, block_rope=block_rope, context_rope=context_rope)
        return self.norm(x)

    def losses(self, batch: BlockBatch, *, ce_weight: float, tv_weight: float, confidence_weight: float) -> LossSums:
        del confidence_weight
        hidden = self.backbone(batch).flatten(0, 1)[batch.slot_index]
        loss = draft_loss(
            hidden,
            feature=None,
            output_weight=None,
            head=self.shared.head,
            target_hidden=batch.target_hidden,
            labels=batch.labels,
            weights=batch.weights,
            ce_weight=ce_weight,
            tv_weight=tv_weight,
            softcap=self.shared.logit_softcap,
        )
        return LossSums(
            total=loss.total,
            ce=loss.ce,
            tv=loss.tv,
            bce=None,
            weight=batch.weights.sum(),
            acceptance=loss.acceptance,
            correct=loss.correct,
            confidence=None,
            slot_number=batch.slot_number,
        )

    def new_rows(self) -> KeyValueRows:
        weight = self.fc.weight
        return KeyValueRows(self.config.num_layers, dtype=weight.dtype, device=weight.device)

    @torch.inference_mode()
    def observe(self, observation: Observation, *, rows: KeyValueRows) -> None:
        context = self.hidden_norm(self.fc(observation.captured.flatten(-2).to(self.fc.weight.dtype)))
        cos, sin = self.rope(observation.batch.positions)
        for index, layer in enumerate(self.draft_layers):
            keys, values = layer.self_attn.keys_values(context, cos=cos, sin=sin)
            rows.write(index, keys=keys, values=values, batch=observation.batch)

    def block_states(self, anchors: Tensor, *, positions: list[int], rows: KeyValueRows) -> Tensor:
        """Run the blocks of R requests -> states after the final norm [R, K, D].

        The block's own rows are written at its positions and covered again by the context rows of later rounds.
        """
        size = self.config.block_size
        batch = FlatBatch.make(
            positions,
            counts=[size] * len(positions),
            slots=range(len(positions)),
            device=anchors.device,
            visibility="block",
        )
        ids = torch.full((len(positions), size), self.config.mask_token_id, device=anchors.device)
        ids[:, 0] = anchors
        x = self.shared.embed(ids.flatten()).to(self.fc.weight.dtype)
        rope = self.rope(batch.positions)
        for index, layer in enumerate(self.draft_layers):
            x = layer.decode(x, layer=index, rows=rows, batch=batch, rope=rope)
        return self.norm(x).view(len(positions), size, -1)

    @torch.inference_mode()
    def propose(self, anchors: Tensor, *, positions: list[int], rows: KeyValueRows, sample: Sampler) -> Proposal:
        states = self.block_states(anchors, positions=positions, rows=rows)
        logits = self.shared.logits(states.flatten(0, 1)).view(*states.shape[:2], -1)
        drawn = [sample(logits[:, slot], slot) for slot in range(self.config.block_size)]
        return stack_proposal(drawn, None)


def stack_proposal(drawn: list[tuple[Tensor, Tensor | None]], confidence: Tensor | None) -> Proposal:
    """Per-slot (tokens [R], probabilities [R, V] or None) -> one Proposal."""
    tokens = torch.stack([tokens for tokens, _ in drawn], dim=1)
    probabilities = [part for _, part in drawn if part is not None]
    return Proposal(tokens, torch.stack(probabilities, dim=1) if probabilities else None, confidence)
