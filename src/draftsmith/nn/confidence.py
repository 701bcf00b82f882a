"""The confidence head: the probability that a draft token survives verification (DSpark Eq. 7)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ConfidenceHead(nn.Module):
    """logit_k = w . [h_k ; W1[x_{k-1}]] + b; c_k = sigmoid(logit_k)."""

    def __init__(self, feature_size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(feature_size, 1)

    def reset(self) -> None:
        """Start at c = 0.5 everywhere."""
        with torch.no_grad():
            self.proj.weight.zero_()
            self.proj.bias.zero_()

    def forward(self, features: Tensor) -> Tensor:
        """features [..., D + r] -> raw logits [...] in float32."""
        return self.proj(features).squeeze(-1).float()
