"""MTP-1: one more layer of the target that predicts the token after next (DSpark's production baseline).

Row t reads [norm(embedding of token t + 1) ; norm(last hidden state of t)], projected to D, through one causal
decoder layer of the family at rotary position t; with its own final norm and the shared LM head it drafts t + 2.
The last hidden state is the target's after its final norm, of every token: the cache must keep them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from draftsmith.drafters.base import Drafter, DrafterConfig, LossSums, Observation, Proposal, Sampler, stack_proposal
from draftsmith.nn.block import BlockBatch
from draftsmith.nn.init import reset_linear
from draftsmith.nn.kv import FlatBatch
from draftsmith.nn.layers import STYLES, DraftLayer
from draftsmith.nn.pairs import PairRows, following_ids
from draftsmith.nn.rope import Rope
from draftsmith.params import LossWeights
from draftsmith.targets.base import SharedWeights


class Mtp1(Drafter):
    """`token_layernorm`, `hidden_layernorm` and `input_proj` make the rows, `layers.0` and `norm` the states."""

    def __init__(self, config: DrafterConfig, *, shared: SharedWeights, rope: Rope) -> None:
        super().__init__(config, shared=shared)
        hidden, eps = config.geometry.hidden_size, config.geometry.norm_eps
        style = STYLES[config.geometry.style]
        self.token_layernorm = style.norm(hidden, eps=eps)
        self.hidden_layernorm = style.norm(hidden, eps=eps)
        self.input_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([style.layer(config.geometry, window=config.windows[0])])
        self.norm = style.norm(hidden, eps=eps)
        self.rope = rope

    @property
    def layer(self) -> DraftLayer:
        return cast(DraftLayer, self.layers[0])

    def reset(self, *, seed: int) -> None:
        reset_linear(self, generator=torch.Generator().manual_seed(seed))

    def rows_of(self, ids: Tensor, *, states: Tensor) -> Tensor:
        """ids [...] of the next tokens, last hidden states [..., D] -> what the layer reads, [..., D]."""
        states = states.to(self.dtype)
        embedded = self.token_layernorm(self.shared.embed(ids).to(states.dtype))
        return self.input_proj(torch.cat((embedded, self.hidden_layernorm(states)), dim=-1))

    def slot_states(self, batch: BlockBatch) -> Tensor:
        """States of the rows before the anchors, [B * A, 1, D]; a block at position 0 has no row and gets zeros in."""
        assert batch.hidden is not None
        attention = self.layer.self_attn
        x = self.rows_of(following_ids(batch.token_ids), states=batch.hidden)
        cos, sin = self.rope(batch.positions)
        keys, values = attention.keys_values(self.layer.input_layernorm(x), cos=cos, sin=sin)
        starts = batch.block_positions(1) - 1
        own = x.gather(1, (batch.anchors - 1).clamp(min=0).unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        own = own * (starts >= 0).unsqueeze(-1)
        cos, sin = self.rope(starts)
        seen = batch.visibility.attention(starts, num_own=0, window=self.config.windows[0])
        attended = seen.attend(
            attention.queries(self.layer.input_layernorm(own), cos=cos, sin=sin),
            keys=keys,
            values=values,
            scale=self.config.geometry.attention_scale,
        )
        return self.norm(self.layer.finish(own, attention.o_proj(attended.flatten(-2)))).flatten(0, 1).unsqueeze(1)

    def losses(self, batch: BlockBatch, *, weights: LossWeights) -> LossSums:
        return self.hard_losses(self.slot_states(batch).flatten(0, 1)[batch.slot_index], batch=batch, weights=weights)

    def new_rows(self) -> PairRows:
        hidden_size = self.config.geometry.hidden_size
        return PairRows(1, hidden_size=hidden_size, dtype=self.dtype, device=self.device)

    @torch.inference_mode()
    def observe(self, observation: Observation, *, rows: PairRows) -> None:
        states = observation.last_hidden.to(self.dtype)
        pairs = rows.complete(states, ids=observation.token_ids, batch=observation.batch)
        if pairs is not None:
            cos, sin = self.rope(pairs.batch.positions)
            x = self.layer.input_layernorm(self.rows_of(pairs.ids, states=pairs.states))
            keys, values = self.layer.self_attn.keys_values(x, cos=cos, sin=sin)
            rows.write(0, keys=keys, values=values, batch=pairs.batch)

    @torch.inference_mode()
    def propose(
        self,
        anchors: Tensor,
        *,
        positions: list[int],
        rows: PairRows,
        sample: Sampler,
        slots: Sequence[int] | None = None,
        num_tokens: int | None = None,
    ) -> Proposal:
        del num_tokens  # there is one
        places = list(range(len(positions)) if slots is None else slots)
        batch = FlatBatch.make(
            [position - 1 for position in positions], counts=[1] * len(places), slots=places, device=anchors.device
        )
        x = self.rows_of(anchors, states=rows.newest[places])
        x = self.layer.decode(x, layer=0, rows=rows, batch=batch, rope=self.rope(batch.positions))
        return stack_proposal([sample(self.shared.logits(self.norm(x)), 0)], None)
