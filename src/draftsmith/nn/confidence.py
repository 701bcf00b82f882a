"""The confidence head: the probability that a draft token survives verification (DSpark Eq. 7)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

START_RATE = 0.3


class ConfidenceHead(nn.Module):
    """logit_k = w . [h_k ; W1[x_{k-1}]] + b; c_k = sigmoid(logit_k)."""

    def __init__(self, feature_size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(feature_size, 1)

    def reset(self) -> None:
        """Start at c = START_RATE everywhere: AdamW moves the bias by no more than the learning rate a step, so a
        short training that began at 0.5 would end far from the rate of a young drafter."""
        with torch.no_grad():
            self.proj.weight.zero_()
            self.proj.bias.fill_(math.log(START_RATE / (1 - START_RATE)))

    def forward(self, features: Tensor) -> Tensor:
        """features [..., D + r] -> raw logits [...] in float32."""
        return self.proj(features).squeeze(-1).float()
