"""Frozen bfloat16 matrices in the blocked layout of oneDNN: the same products to the bit, faster for few rows on a CPU.

With few rows a product reads the matrix once and does little else, and a plain layout is rearranged on every call. A
packed matrix is rearranged once. Letters: n rows, I input size, O output size.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

TYPICAL_ROWS = 16  # the number of rows that the layout is chosen for; it serves every other


def can_pack(weight: Tensor) -> bool:
    """Whether this machine multiplies such a matrix faster when it is packed: bfloat16, on a CPU that has it."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


class PackedMatrix:
    """A matrix [O, I] that only multiplies."""

    def __init__(self, weight: Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), TYPICAL_ROWS)

    def multiply(self, rows: Tensor, *, bias: Tensor | None = None) -> Tensor:
        """rows [..., I] -> rows @ weight.T + bias, [..., O]."""
        return cast(Tensor, torch.ops.mkldnn._linear_pointwise(rows, self._packed, bias, "none", [], ""))


class PackedLinear(nn.Module):
    """An nn.Linear whose matrix is packed; it has no parameter and cannot be saved or trained."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self._matrix = PackedMatrix(linear.weight)
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, rows: Tensor) -> Tensor:
        return self._matrix.multiply(rows, bias=self._bias)


def pack_linears(module: nn.Module) -> None:
    """Replace every nn.Linear below `module` that can be packed; for a module that is only run from now on."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear) and can_pack(child.weight):
            setattr(module, name, PackedLinear(child))
        else:
            pack_linears(child)
