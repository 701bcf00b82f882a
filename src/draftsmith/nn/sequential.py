"""Sequential heads: a bias on the draft logits of slot k that depends on the tokens before it (DSpark Eq. 4-6).

Every head reads W1[x_{k-1}], the token feature, and ends in W2: B_k = W2 g_k with g_k [r], so that LM head and bias
are one matrix product. The heads differ in how g_k is made. Letters: V vocabulary, r rank, D hidden, K block size,
n blocks.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

INIT_STD = 0.02


class SequentialHead(nn.Module):
    """W1, W2 [V, r] and a rule for g_k. W2 starts at zero: the head starts as no bias, and because W1 has unit scale
    W2 learns at once."""

    def __init__(self, vocab_size: int, *, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)

    def reset(self, generator: torch.Generator) -> None:
        """W1 standard normal, W2 zero, linear layers of the rule normal with INIT_STD."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name == "markov_w2.weight" or name.endswith("bias"):
                    parameter.zero_()
                else:
                    std = 1.0 if name == "markov_w1.weight" else INIT_STD
                    parameter.normal_(0.0, std, generator=generator)

    def feature(self, previous: Tensor) -> Tensor:
        """W1[x_{k-1}]: previous token ids [...] -> [..., r]; the confidence head reads the same feature, ungated."""
        return self.markov_w1(previous)

    def bias(self, inner: Tensor) -> Tensor:
        """g [..., r] -> bias on the logits [..., V]."""
        return self.markov_w2(inner)

    @abstractmethod
    def start(self, num_blocks: int) -> Tensor:
        """The state before the first slot of `num_blocks` blocks."""

    @abstractmethod
    def step(self, state: Tensor, *, feature: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """One slot of every block: feature [n, r], hidden h_k [n, D] -> (g_k [n, r], the next state)."""

    def walk(self, feature: Tensor, *, hidden: Tensor) -> Tensor:
        """All slots with their true previous tokens: feature [n, K, r], hidden [n, K, D] -> g [n, K, r]."""
        state, inner = self.start(feature.shape[0]), []
        for slot in range(feature.shape[1]):
            made, state = self.step(state, feature=feature[:, slot], hidden=hidden[:, slot])
            inner.append(made)
        return torch.stack(inner, dim=1)


class MarkovHead(SequentialHead):
    """g_k = W1[x_{k-1}] (Eq. 5): the bias is a table of token pairs of rank r."""

    def start(self, num_blocks: int) -> Tensor:
        return self.markov_w1.weight.new_empty(num_blocks, 0)

    def step(self, state: Tensor, *, feature: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        del hidden
        return feature, state

    def walk(self, feature: Tensor, *, hidden: Tensor) -> Tensor:
        del hidden
        return feature


class GatedHead(SequentialHead):
    """g_k = sigmoid(G [h_k ; W1[x_{k-1}]] + b) * W1[x_{k-1}]: the backbone decides how much of the pair counts."""

    def __init__(self, vocab_size: int, *, rank: int, hidden_size: int) -> None:
        super().__init__(vocab_size, rank=rank)
        self.gate_proj = nn.Linear(hidden_size + rank, rank)

    def start(self, num_blocks: int) -> Tensor:
        return self.markov_w1.weight.new_empty(num_blocks, 0)

    def step(self, state: Tensor, *, feature: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.walk(feature, hidden=hidden), state

    def walk(self, feature: Tensor, *, hidden: Tensor) -> Tensor:
        return self.gate_proj(torch.cat((hidden, feature), dim=-1)).sigmoid() * feature


class RnnHead(SequentialHead):
    """A recurrence over the block (Eq. 6): J [s_{k-1} ; W1[x_{k-1}] ; h_k] + b = gate, candidate, output (r each);
    s_k = sig(gate) s_{k-1} + (1 - sig(gate)) tanh(candidate); g_k = tanh(output); s_0 = 0."""

    def __init__(self, vocab_size: int, *, rank: int, hidden_size: int) -> None:
        super().__init__(vocab_size, rank=rank)
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def start(self, num_blocks: int) -> Tensor:
        return self.markov_w1.weight.new_zeros(num_blocks, self.rank)

    def step(self, state: Tensor, *, feature: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        gate, candidate, output = self.joint_proj(torch.cat((state, feature, hidden), dim=-1)).chunk(3, dim=-1)
        kept = gate.sigmoid()
        return output.tanh(), kept * state + (1 - kept) * candidate.tanh()


def make_head(kind: str, *, vocab_size: int, rank: int, hidden_size: int) -> SequentialHead:
    """The head of `kind`: markov, gated or rnn."""
    if kind == "markov":
        return MarkovHead(vocab_size, rank=rank)
    return {"gated": GatedHead, "rnn": RnnHead}[kind](vocab_size, rank=rank, hidden_size=hidden_size)
