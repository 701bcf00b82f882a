"""Rotary position embedding with the frequencies of the target family. Letters: N tokens, H heads, D head size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.errors import TargetError

FIXED_TYPES = ("default", "linear", "llama3", "yarn", "proportional")


def check_rope(parameters: Mapping[str, Any]) -> None:
    """Raise TargetError unless the `rope_parameters` of a config give each position the same angles at all times.

    Those of dynamic NTK and LongRoPE depend on the longest position of the batch, so that keys which are kept would
    no longer fit, and hidden states would depend on their neighbours.
    """
    kind, part = parameters["rope_type"], parameters.get("partial_rotary_factor")
    if kind not in FIXED_TYPES:
        raise TargetError(
            "rotary positions whose frequencies depend on the length of the text",
            got=f"rope_type {kind}",
            expected=" or ".join(FIXED_TYPES),
            where="config.json: rope_parameters",
        )
    if kind in ("linear", "llama3", "yarn") and part not in (None, 1.0):
        raise TargetError(
            "partial_rotary_factor",
            got=f"{part} in a rope_type {kind}",
            expected="1.0, or rope_type proportional",
            where="config.json: rope_parameters",
        )


class Rope(nn.Module):
    """Cosines and sines for absolute positions.

    `inverse_frequencies` [D/2] and `scale` come from the target's own rotary module, so that every RoPE variant that
    Hugging Face knows for the family holds here too. They stay float32 when the drafter is cast to bfloat16: at a
    position in the thousands a rounded frequency is off by radians.
    """

    inverse_frequencies: Tensor

    def __init__(self, inverse_frequencies: Tensor, *, scale: float) -> None:
        super().__init__()
        self.register_buffer("inverse_frequencies", inverse_frequencies.float(), persistent=False)
        self.scale = scale

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rope:
        exact = self.inverse_frequencies
        super()._apply(fn, recurse)
        self.inverse_frequencies = exact.to(self.inverse_frequencies.device)
        return self

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [...] -> cos, sin [..., D] in float32."""
        angles = positions.to(torch.float32).unsqueeze(-1) * self.inverse_frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * self.scale, angles.sin() * self.scale


def rotate(x: Tensor, *, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads: x [..., H, D], cos and sin [..., D] of the same leading shape -> [..., H, D] in x's dtype."""
    cos = cos.unsqueeze(-2).to(x.dtype)
    sin = sin.unsqueeze(-2).to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
