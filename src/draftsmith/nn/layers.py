"""The parts of a decoder layer that drafters share, chosen by the target family's geometry.

Letters: B batch, S block slots, T context tokens, N flat tokens, D hidden, H query heads, G key heads, E head size.
Sources: DFlash section 3 (context in the keys and values of every draft layer), the families' published layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from draftsmith.nn.attention import BlockAttention
from draftsmith.nn.kv import FlatBatch, KeyValueRows
from draftsmith.nn.rope import rotate


@dataclass(frozen=True)
class LayerGeometry:
    """Sizes and variants of one decoder layer.

    `values` says where they come from: their own projection, or the keys' (as they are before key norm and rotary).
    `style` is a row of `STYLES`.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    norm_eps: float
    activation: Literal["silu", "gelu_pytorch_tanh"]
    attention_bias: bool
    mlp_bias: bool
    attention_scale: float
    head_norms: bool
    values: Literal["projected", "keys"] = "projected"
    style: Literal["llama", "gemma4"] = "llama"


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in float32."""

    def __init__(self, size: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class WideRMSNorm(RMSNorm):
    """RMSNorm that multiplies by its weight in float32 too, and rounds to the input's dtype last."""

    def forward(self, x: Tensor) -> Tensor:
        return (_unit(x, eps=self.eps) * self.weight.float()).to(x.dtype)


class UnitRMSNorm(nn.Module):
    """RMSNorm without a weight."""

    def __init__(self, *, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return _unit(x, eps=self.eps).to(x.dtype)


def _unit(x: Tensor, *, eps: float) -> Tensor:
    """x [..., D] in float32, divided by its root mean square."""
    wide = x.float()
    return wide * (wide.square().mean(-1, keepdim=True) + eps).pow(-0.5)


class Mlp(nn.Module):
    """Gated MLP: down(act(gate(x)) * up(x))."""

    def __init__(self, geometry: LayerGeometry) -> None:
        super().__init__()
        wide, bias = geometry.intermediate_size, geometry.mlp_bias
        self.gate_proj = nn.Linear(geometry.hidden_size, wide, bias=bias)
        self.up_proj = nn.Linear(geometry.hidden_size, wide, bias=bias)
        self.down_proj = nn.Linear(wide, geometry.hidden_size, bias=bias)
        self.activation = geometry.activation

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        gate = functional.silu(gate) if self.activation == "silu" else functional.gelu(gate, approximate="tanh")
        return self.down_proj(gate * self.up_proj(x))


class DraftAttention(nn.Module):
    """Attention whose queries come from the block and whose keys and values from [context ; block].

    `window`: how many positions back a query sees, its own included (None: all). `input_size`: D, or what is read in
    its place.
    """

    def __init__(self, geometry: LayerGeometry, *, window: int | None = None, input_size: int | None = None) -> None:
        super().__init__()
        self.geometry, self.window = geometry, window
        hidden, size, bias = input_size or geometry.hidden_size, geometry.head_size, geometry.attention_bias
        style = STYLES[geometry.style]
        self.q_proj = nn.Linear(hidden, geometry.num_heads * size, bias=bias)
        self.k_proj = nn.Linear(hidden, geometry.num_kv_heads * size, bias=bias)
        if geometry.values == "projected":
            self.v_proj = nn.Linear(hidden, geometry.num_kv_heads * size, bias=bias)
        self.o_proj = nn.Linear(geometry.num_heads * size, geometry.hidden_size, bias=bias)
        if geometry.head_norms:
            self.q_norm = style.norm(size, eps=geometry.norm_eps)
            self.k_norm = style.norm(size, eps=geometry.norm_eps)
        self.v_norm = style.value_norm(eps=geometry.norm_eps)

    def queries(self, x: Tensor, *, cos: Tensor, sin: Tensor) -> Tensor:
        """x [..., D] -> rotated queries [..., H, E]."""
        heads = self.q_proj(x).unflatten(-1, (self.geometry.num_heads, self.geometry.head_size))
        return rotate(self.q_norm(heads) if self.geometry.head_norms else heads, cos=cos, sin=sin)

    def keys_values(self, x: Tensor, *, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """x [..., D] -> rotated keys and plain values, each [..., G, E]."""
        shape = (self.geometry.num_kv_heads, self.geometry.head_size)
        projected = self.k_proj(x).unflatten(-1, shape)
        keys = rotate(self.k_norm(projected) if self.geometry.head_norms else projected, cos=cos, sin=sin)
        values = projected if self.geometry.values == "keys" else self.v_proj(x).unflatten(-1, shape)
        return keys, self.v_norm(values)

    def forward(
        self,
        x: Tensor,
        *,
        context: Tensor,
        attention: BlockAttention,
        block_rope: tuple[Tensor, Tensor],
        context_rope: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Training form: x [B, S, D], context [B, T, D], attention over T + S keys -> [B, S, D]."""
        block_keys, block_values = self.keys_values(x, cos=block_rope[0], sin=block_rope[1])
        context_keys, context_values = self.keys_values(context, cos=context_rope[0], sin=context_rope[1])
        out = attention.attend(
            self.queries(x, cos=block_rope[0], sin=block_rope[1]),
            keys=torch.cat((context_keys, block_keys), dim=1),
            values=torch.cat((context_values, block_values), dim=1),
            scale=self.geometry.attention_scale,
        )
        return self.o_proj(out.flatten(-2))

    def attend_rows(
        self, x: Tensor, *, layer: int, rows: KeyValueRows, batch: FlatBatch, rope: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Decoding form: flat block states x [N, D] over the context rows kept in `rows` -> [N, D]."""
        keys, values = self.keys_values(x, cos=rope[0], sin=rope[1])
        out = rows.attend(
            layer,
            queries=self.queries(x, cos=rope[0], sin=rope[1]),
            keys=keys,
            values=values,
            batch=batch,
            scale=self.geometry.attention_scale,
            window=self.window,
        )
        return self.o_proj(out.flatten(-2))


class DraftLayer(nn.Module):
    """A decoder layer of the family with `DraftAttention`; the context does not pass through input_layernorm."""

    def __init__(self, geometry: LayerGeometry, *, window: int | None = None, input_size: int | None = None) -> None:
        super().__init__()
        self.self_attn = DraftAttention(geometry, window=window, input_size=input_size)
        self.mlp = Mlp(geometry)
        norm = STYLES[geometry.style].norm
        self.input_layernorm = norm(geometry.hidden_size, eps=geometry.norm_eps)
        self.post_attention_layernorm = norm(geometry.hidden_size, eps=geometry.norm_eps)

    def forward(
        self,
        x: Tensor,
        *,
        context: Tensor,
        attention: BlockAttention,
        block_rope: tuple[Tensor, Tensor],
        context_rope: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Training form; shapes as in `DraftAttention.forward`."""
        attended = self.self_attn(
            self.input_layernorm(x),
            context=context,
            attention=attention,
            block_rope=block_rope,
            context_rope=context_rope,
        )
        return self.finish(x, attended)

    def decode(
        self, x: Tensor, *, layer: int, rows: KeyValueRows, batch: FlatBatch, rope: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Decoding form; shapes as in `DraftAttention.attend_rows`."""
        attended = self.self_attn.attend_rows(self.input_layernorm(x), layer=layer, rows=rows, batch=batch, rope=rope)
        return self.finish(x, attended)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """What follows attention: residuals, norms and MLP; x and attended [..., D]."""
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x))


class Gemma4Layer(DraftLayer):
    """Norms before and after attention and MLP, the latter inside the residuals; the output times `layer_scalar`."""

    layer_scalar: Tensor

    def __init__(self, geometry: LayerGeometry, *, window: int | None = None, input_size: int | None = None) -> None:
        super().__init__(geometry, window=window, input_size=input_size)
        norm = STYLES[geometry.style].norm
        self.pre_feedforward_layernorm = norm(geometry.hidden_size, eps=geometry.norm_eps)
        self.post_feedforward_layernorm = norm(geometry.hidden_size, eps=geometry.norm_eps)
        self.register_buffer("layer_scalar", torch.ones(1))

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.post_attention_layernorm(attended)
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x * self.layer_scalar


@dataclass(frozen=True)
class Style:
    """The parts in which the layers of families differ, sizes and `LayerGeometry`'s own variants aside."""

    norm: type[RMSNorm]
    value_norm: Callable[..., nn.Module]
    layer: type[DraftLayer]


STYLES: dict[str, Style] = {
    "llama": Style(norm=RMSNorm, value_norm=nn.Identity, layer=DraftLayer),
    "gemma4": Style(norm=WideRMSNorm, value_norm=UnitRMSNorm, layer=Gemma4Layer),
}
