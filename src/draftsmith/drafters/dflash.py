"""DFlash: a parallel backbone that reads the target's captured states and drafts a whole block in one pass.

Source: DFlash section 3 (arXiv 2602.06036). A block is the anchor's token and mask tokens. With `sample_from_anchor`
(DSpark's convention) slot anchor + k - 1 drafts token anchor + k, the anchor's own slot the first one; without it (the
original DFlash) a block has one more slot, and the mask at anchor + k drafts the token in its own place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from draftsmith.drafters.base import Drafter, DrafterConfig, LossSums, Observation, Proposal, Sampler, stack_proposal
from draftsmith.nn.block import BlockBatch
from draftsmith.nn.init import reset_linear
from draftsmith.nn.kv import FlatBatch, KeyValueRows
from draftsmith.nn.layers import STYLES, DraftLayer
from draftsmith.nn.rope import Rope
from draftsmith.params import LossWeights
from draftsmith.targets.base import SharedWeights


class DFlash(Drafter):
    """Backbone only: `fc` and `hidden_norm` make the context, `layers` the block states, `norm` ends them."""

    def __init__(self, config: DrafterConfig, *, shared: SharedWeights, rope: Rope) -> None:
        super().__init__(config, shared=shared)
        assert config.mask_token_id is not None
        self.mask_token_id = config.mask_token_id
        hidden, eps = config.geometry.hidden_size, config.geometry.norm_eps
        self.fc = nn.Linear(len(config.capture_layers) * hidden, hidden, bias=False)
        style = STYLES[config.geometry.style]
        self.hidden_norm = style.norm(hidden, eps=eps)
        self.layers = nn.ModuleList(style.layer(config.geometry, window=window) for window in config.windows)
        self.norm = style.norm(hidden, eps=eps)
        self.rope = rope

    def reset(self, *, seed: int) -> None:
        reset_linear(self, generator=torch.Generator().manual_seed(seed))

    @property
    def draft_layers(self) -> list[DraftLayer]:
        return cast(list[DraftLayer], list(self.layers))

    def backbone(self, batch: BlockBatch) -> Tensor:
        """States of all slots of all blocks after the final norm: [B, A * width, D]."""
        width = self.config.block_width
        context = self.hidden_norm(self.fc(batch.context.flatten(-2)))
        positions = batch.block_positions(width)
        block_rope, context_rope = self.rope(positions), self.rope(batch.positions)
        attentions = {
            window: batch.visibility.attention(positions, num_own=width, window=window)
            for window in set(self.config.windows)
        }
        ids = batch.block_ids(width, mask_token_id=self.mask_token_id)
        x = self.shared.embed(ids).to(context.dtype)
        for layer, window in zip(self.draft_layers, self.config.windows, strict=True):
            x = layer(
                x, context=context, attention=attentions[window], block_rope=block_rope, context_rope=context_rope
            )
        return self.norm(x)

    def slot_states(self, batch: BlockBatch) -> Tensor:
        """h_k of every block: [B * A, K, D]."""
        return self.drafting(self.backbone(batch).unflatten(1, (-1, self.config.block_width)).flatten(0, 1))

    def drafting(self, states: Tensor) -> Tensor:
        """The K slots that draft, of blocks [n, width, D]: all, or all but the anchor's."""
        return states[:, self.config.block_width - self.config.block_size :]

    def losses(self, batch: BlockBatch, *, weights: LossWeights) -> LossSums:
        return self.hard_losses(self.slot_states(batch).flatten(0, 1)[batch.slot_index], batch=batch, weights=weights)

    def new_rows(self) -> KeyValueRows:
        return KeyValueRows(self.config.num_layers, dtype=self.dtype, device=self.device)

    @torch.inference_mode()
    def observe(self, observation: Observation, *, rows: KeyValueRows) -> None:
        context = self.hidden_norm(self.fc(observation.captured.flatten(-2).to(self.dtype)))
        cos, sin = self.rope(observation.batch.positions)
        for index, layer in enumerate(self.draft_layers):
            keys, values = layer.self_attn.keys_values(context, cos=cos, sin=sin)
            rows.write(index, keys=keys, values=values, batch=observation.batch)

    def block_states(
        self, anchors: Tensor, *, positions: list[int], rows: KeyValueRows, slots: Sequence[int] | None = None
    ) -> Tensor:
        """Run the blocks of R requests -> h_k after the final norm [R, K, D].

        The block's own rows are written at its positions and covered again by the context rows of later rounds.
        """
        size = self.config.block_width
        batch = FlatBatch.make(
            positions,
            counts=[size] * len(positions),
            slots=range(len(positions)) if slots is None else slots,
            device=anchors.device,
            visibility="block",
        )
        ids = torch.full((len(positions), size), self.mask_token_id, device=anchors.device)
        ids[:, 0] = anchors
        x = self.shared.embed(ids.flatten()).to(self.dtype)
        rope = self.rope(batch.positions)
        for index, layer in enumerate(self.draft_layers):
            x = layer.decode(x, layer=index, rows=rows, batch=batch, rope=rope)
        return self.drafting(self.norm(x).view(len(positions), size, -1))

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
        drawn = [sample(logits[:, slot], slot) for slot in range(states.shape[1])]
        return stack_proposal(drawn, None)
