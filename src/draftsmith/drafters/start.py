"""A start for the sequential head: the target's own mean prediction after each token, in the head's rank.

Averaged over the cache's label rows, the last hidden state h(x) of the positions that hold token x predicts, through
the LM head, a mean of log-probabilities after x: a bigram of the target itself. Its best approximation of rank r
makes W1 and W2 (DSpark Eq. 5). A token that is rare or never seen is told by its embedding: a ridge regression of the
means on the embeddings stands for SHRINKAGE more rows of every token. The backbone then starts with its output scaled
down, so that what it still has to learn does not drown the bigram. Letters: V vocabulary, D hidden, r rank, n label
rows, m tokens seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.drafters.dspark import DSpark

BACKBONE_SCALE = 0.1
MOST_ROWS = 500_000
SHRINKAGE = 1.0
RIDGE_TOKENS = 100.0
"""Frequent tokens that the ridge penalty weighs as much as, in every direction of the embedding."""


@dataclass(frozen=True)
class MarkovStart:
    """What the start was made from: label rows read, different tokens seen, share of the variance that rank r keeps."""

    num_rows: int
    num_tokens: int
    kept_share: float


@dataclass(frozen=True)
class _Regression:
    """Mean states from embeddings: mean + (e - centre) @ slope; centre, mean [1, D], slope [D, D]."""

    centre: Tensor
    mean: Tensor
    slope: Tensor

    @classmethod
    def fit(cls, embeddings: Tensor, *, means: Tensor, counts: Tensor) -> _Regression:
        """Ridge regression of `means` [m, D] on `embeddings` [m, D]; `counts` [m, 1] rows were averaged.

        A token weighs count / (count + SHRINKAGE): what its mean is worth against the spread between tokens.
        """
        weights = counts / (counts + SHRINKAGE)
        total = weights.sum()
        centre = (weights * embeddings).sum(dim=0, keepdim=True) / total
        mean = (weights * means).sum(dim=0, keepdim=True) / total
        offsets = embeddings - centre
        variance = (weights * offsets.square()).sum() / total / offsets.shape[1]
        penalty = RIDGE_TOKENS * variance.clamp(min=torch.finfo(variance.dtype).tiny)
        gram = (weights * offsets).T @ offsets + penalty * torch.eye(offsets.shape[1])
        return cls(centre, mean, torch.linalg.solve(gram, (weights * offsets).T @ (means - mean)))

    def __call__(self, embeddings: Tensor, *, basis: Tensor | None = None) -> Tensor:
        """embeddings [n, D] -> means [n, D], or their coordinates [n, r] in `basis` [D, r]."""
        slope, mean = (self.slope, self.mean) if basis is None else (self.slope @ basis, self.mean @ basis)
        return mean + (embeddings - self.centre) @ slope


def start_markov_head(drafter: DSpark, *, rows: Iterable[tuple[Tensor, Tensor]]) -> MarkovStart:
    """Set W1, W2 and the final norm of `drafter` from pairs (token ids [n], last hidden states [n, D]).

    At most MOST_ROWS rows are read. Dimensions beyond min(r, D) keep their random W1 and zero W2. W1 has unit mean
    square over the tokens seen.
    """
    head = drafter.shared.head.float()
    vocab, hidden = head.shape
    sums, counts = torch.zeros(vocab, hidden), torch.zeros(vocab)
    num_rows = 0
    for ids, states in rows:
        sums.index_add_(0, ids.cpu(), states.float().cpu())
        counts.index_add_(0, ids.cpu(), torch.ones(len(ids)))
        num_rows += len(ids)
        if num_rows >= MOST_ROWS:
            break
    seen = counts > 0
    own, embedding = counts[seen].unsqueeze(1), drafter.shared.embedding.float().cpu()
    told = _Regression.fit(embedding[seen], means=sums[seen] / own, counts=own)
    means = (sums[seen] + SHRINKAGE * told(embedding[seen])) / (own + SHRINKAGE)
    values, vectors = torch.linalg.eigh((means * own).T @ means)
    rank = min(drafter.markov_head.rank, hidden)
    basis = vectors[:, -rank:]
    features = told(embedding, basis=basis)
    features[seen] = means @ basis
    scale = features[seen].square().mean().sqrt()
    with torch.no_grad():
        drafter.markov_head.markov_w1.weight[:, :rank].copy_(features / scale)
        drafter.markov_head.markov_w2.weight[:, :rank].copy_(head @ (basis * scale).to(head.device))
        drafter.norm.weight.mul_(BACKBONE_SCALE)
    kept = values[-rank:].sum() / values.sum()
    return MarkovStart(num_rows, int(seen.sum()), float(kept))
