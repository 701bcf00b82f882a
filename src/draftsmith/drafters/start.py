"""A start for the sequential head: the target's own mean prediction after each token, in the head's rank.

Averaged over the cache's label rows, the last hidden state h(x) of the positions that hold token x predicts, through
the LM head, a mean of log-probabilities after x: a bigram of the target itself. Its best approximation of rank r
makes W1 and W2 (DSpark Eq. 5). The backbone then starts with its output scaled down, so that what it still has to
learn does not drown the bigram. Letters: V vocabulary, D hidden, r rank, n label rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.drafters.dspark import DSpark

BACKBONE_SCALE = 0.1
MOST_ROWS = 500_000


@dataclass(frozen=True)
class MarkovStart:
    """What the start was made from: label rows read, different tokens seen, share of the variance that rank r keeps."""

    num_rows: int
    num_tokens: int
    kept_share: float


def start_markov_head(drafter: DSpark, *, rows: Iterable[tuple[Tensor, Tensor]]) -> MarkovStart:
    """Set W1, W2 and the final norm of `drafter` from pairs (token ids [n], last hidden states [n, D]).

    At most MOST_ROWS rows are read. Tokens that are not seen get W1 = 0, so no bias at first; dimensions beyond
    min(r, D) keep their random W1 and zero W2. W1 has unit mean square over the tokens seen.
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
    means = sums[seen] / counts[seen].unsqueeze(1)
    values, vectors = torch.linalg.eigh((means * counts[seen].unsqueeze(1)).T @ means)
    rank = min(drafter.markov_head.rank, hidden)
    basis = vectors[:, -rank:]
    features = torch.zeros(vocab, rank)
    features[seen] = means @ basis
    scale = features[seen].square().mean().sqrt()
    with torch.no_grad():
        drafter.markov_head.markov_w1.weight[:, :rank].copy_(features / scale)
        drafter.markov_head.markov_w2.weight[:, :rank].copy_(head @ (basis * scale).to(head.device))
        drafter.norm.weight.mul_(BACKBONE_SCALE)
    kept = values[-rank:].sum() / values.sum()
    return MarkovStart(num_rows, int(seen.sum()), float(kept))
