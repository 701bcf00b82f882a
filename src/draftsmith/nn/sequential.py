"""Sequential heads: a bias on the draft logits of slot k that depends on the token before it (DSpark Eq. 4-6).

Letters: V vocabulary, r rank, D hidden, n slots.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class MarkovHead(nn.Module):
    """B(x_{k-1}, .) = W1[x_{k-1}] W2^T with W1, W2 [V, r] (Eq. 5). W2 starts at zero: the head starts as no bias."""

    def __init__(self, vocab_size: int, *, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)

    def reset(self, generator: torch.Generator) -> None:
        """W1 standard normal, W2 zero: no bias at first, and W2 learns at once because its inputs have unit scale."""
        with torch.no_grad():
            self.markov_w1.weight.normal_(0.0, 1.0, generator=generator)
            self.markov_w2.weight.zero_()

    def feature(self, previous: Tensor) -> Tensor:
        """W1[x_{k-1}]: previous token ids [...] -> [..., r]; the confidence head reads the same feature."""
        return self.markov_w1(previous)

    def bias(self, feature: Tensor) -> Tensor:
        """feature [n, r] -> bias on the logits [n, V]."""
        return self.markov_w2(feature)
