"""The random start that drafters share."""

from __future__ import annotations

import torch
from torch import nn

INIT_STD = 0.02


def reset_linear(module: nn.Module, *, generator: torch.Generator) -> None:
    """Every linear layer below `module`: weights normal with INIT_STD, biases zero, in the order of its modules."""
    with torch.no_grad():
        for part in module.modules():
            if isinstance(part, nn.Linear):
                part.weight.normal_(0.0, INIT_STD, generator=generator)
                if part.bias is not None:
                    part.bias.zero_()
