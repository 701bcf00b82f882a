"""EAGLE-3: one decoder layer over token and feature that feeds its own output back (arXiv 2503.01840).

Row t reads [norm(embedding of token t + 1) ; norm(feature of t)] at rotary position t. The feature is made of the
target's captured states; from the second draft token on it is the layer's own output before the final norm. In
training the same happens with true tokens (training-time test): slot k of the block at anchor p is the k-th step of
row p - 1. Chain drafting, no tree.
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
from draftsmith.nn.soft_loss import soft_loss
from draftsmith.params import LossWeights
from draftsmith.targets.base import SharedWeights


class Eagle3(Drafter):
    """`fc` makes the features, `layers.0` is the one layer (with `hidden_norm` inside), `norm` ends it."""

    def __init__(self, config: DrafterConfig, *, shared: SharedWeights, rope: Rope) -> None:
        super().__init__(config, shared=shared)
        hidden, eps = config.geometry.hidden_size, config.geometry.norm_eps
        style = STYLES[config.geometry.style]
        self.fc = nn.Linear(len(config.capture_layers) * hidden, hidden, bias=False)
        layer = style.layer(config.geometry, window=config.windows[0], input_size=2 * hidden)
        layer.hidden_norm = style.norm(hidden, eps=eps)
        self.layers = nn.ModuleList([layer])
        self.norm = style.norm(hidden, eps=eps)
        self.rope = rope

    @property
    def layer(self) -> DraftLayer:
        return cast(DraftLayer, self.layers[0])

    def reset(self, *, seed: int) -> None:
        reset_linear(self, generator=torch.Generator().manual_seed(seed))

    def inputs(self, ids: Tensor, *, features: Tensor) -> Tensor:
        """ids [...] of the next tokens, features [..., D] -> what attention reads, [..., 2 D]."""
        embedded = self.layer.input_layernorm(self.shared.embed(ids).to(features.dtype))
        return torch.cat((embedded, cast(nn.Module, self.layer.hidden_norm)(features)), dim=-1)

    def slot_states(self, batch: BlockBatch) -> Tensor:
        """Outputs of the K steps of every block after the final norm: [B * A, K, D].

        A block at position 0 has no row before it: its first feature is zero.
        """
        attention = self.layer.self_attn
        features = self.fc(batch.context.flatten(-2))
        cos, sin = self.rope(batch.positions)
        keys, values = attention.keys_values(
            self.inputs(following_ids(batch.token_ids), features=features), cos=cos, sin=sin
        )
        starts = batch.block_positions(1) - 1
        row = (batch.anchors - 1).clamp(min=0)
        feature = features.gather(1, row.unsqueeze(-1).expand(-1, -1, features.shape[-1]))
        feature = feature * (starts >= 0).unsqueeze(-1)
        own_keys: list[Tensor] = []
        own_values: list[Tensor] = []
        states = []
        for step in range(self.config.block_size):
            token = (batch.anchors + step).clamp(min=0, max=batch.token_ids.shape[1] - 1)
            read = self.inputs(batch.token_ids.gather(1, token), features=feature)
            cos, sin = self.rope(starts + step)
            if step > 0:
                own = attention.keys_values(read, cos=cos, sin=sin)
                own_keys.append(own[0])
                own_values.append(own[1])
            seen = batch.visibility.attention(starts + step, num_own=step, window=self.config.windows[0])
            attended = seen.attend(
                attention.queries(read, cos=cos, sin=sin),
                keys=_joined(keys, own_keys),
                values=_joined(values, own_values),
                scale=self.config.geometry.attention_scale,
            )
            feature = self.layer.finish(feature, attention.o_proj(attended.flatten(-2)))
            states.append(self.norm(feature))
        return torch.stack(states, dim=2).flatten(0, 1)

    def batch_weight(self, batch: BlockBatch) -> Tensor:
        """Rows times padded length: rows without a loss stay in the divisor, as in the reference's training."""
        size = batch.token_ids.numel() if batch.num_tokens else 0
        return torch.tensor(float(size), device=batch.token_ids.device)

    def losses(self, batch: BlockBatch, *, weights: LossWeights) -> LossSums:
        """Soft cross-entropy to the target's distribution, step j weighing step_decay ** j.

        Where a sample has more candidate anchors than were drawn, each stands for several. A slot counts where its
        label is supervised, as for every drafter; the reference's mask is one token earlier.
        """
        hidden = self.slot_states(batch).flatten(0, 1)[batch.slot_index]
        slot_weights = batch.thinning * self.config.step_decay**batch.slot_number
        loss = soft_loss(
            hidden.unsqueeze(0),
            head=self.shared.head,
            target_hidden=batch.target_hidden,
            weights=slot_weights.unsqueeze(0),
            softcap=self.shared.logit_softcap,
        )
        acceptance = loss.acceptance.squeeze(0)
        return LossSums(
            total=weights.soft_ce * loss.total,
            ce=loss.total.detach(),
            tv=(2 * (1 - acceptance) * slot_weights).sum(),
            bce=None,
            weight=self.batch_weight(batch),
            acceptance=acceptance,
            correct=loss.correct.squeeze(0),
            confidence=None,
            slot_number=batch.slot_number,
        )

    def new_rows(self) -> PairRows:
        hidden_size = self.config.geometry.hidden_size
        return PairRows(1, hidden_size=hidden_size, dtype=self.dtype, device=self.device)

    @torch.inference_mode()
    def observe(self, observation: Observation, *, rows: PairRows) -> None:
        features = self.fc(observation.captured.flatten(-2).to(self.dtype))
        pairs = rows.complete(features, ids=observation.token_ids, batch=observation.batch)
        if pairs is not None:
            cos, sin = self.rope(pairs.batch.positions)
            read = self.inputs(pairs.ids, features=pairs.states)
            keys, values = self.layer.self_attn.keys_values(read, cos=cos, sin=sin)
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
        num = len(positions)
        places = list(range(num) if slots is None else slots)
        drawn, token, feature = [], anchors, rows.newest[places]
        for step in range(self.config.block_size if num_tokens is None else num_tokens):
            batch = FlatBatch.make(
                [position - 1 + step for position in positions],
                counts=[1] * num,
                slots=places,
                device=anchors.device,
            )
            read = self.inputs(token, features=feature)
            attended = self.layer.self_attn.attend_rows(
                read, layer=0, rows=rows, batch=batch, rope=self.rope(batch.positions)
            )
            feature = self.layer.finish(feature, attended)
            drawn.append(sample(self.shared.logits(self.norm(feature)), step))
            token = drawn[-1][0]
        return stack_proposal(drawn, None)


def _joined(context: Tensor, own: list[Tensor]) -> Tensor:
    """context [B, T, G, E] and the steps' own parts [B, A, G, E] each -> [B, T + A * O, G, E], block by block."""
    if not own:
        return context
    return torch.cat((context, torch.stack(own, dim=2).flatten(1, 2)), dim=1)
