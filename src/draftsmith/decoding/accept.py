"""Lossless verification of a drafted block; pure functions of tensors.

Speculative sampling (Leviathan et al. 2023, Chen et al. 2023). Letters: R requests, K block size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PROBABILITY_FLOOR = 1e-8


@dataclass(frozen=True)
class Verdict:
    """`accepted` [R]: length of the accepted prefix; `next_distribution` [R, V]: what follows is sampled from it."""

    accepted: Tensor
    next_distribution: Tensor


def _prefix_length(accepted: Tensor, lengths: Tensor) -> Tensor:
    inside = torch.arange(accepted.shape[1], device=accepted.device) < lengths.unsqueeze(1)
    return (accepted & inside).long().cumprod(dim=1).sum(dim=1)


def verify_sampled(tokens: Tensor, *, draft: Tensor, target: Tensor, lengths: Tensor, numbers: Tensor) -> Verdict:
    """Accept token j iff u_j < min(1, p_t / max(p_d, 1e-8)); the first rejection ends the prefix.

    tokens [R, K]; draft [R, K, V] the distributions really sampled from; target [R, K + 1, V]; lengths [R] in 0..K:
    draft tokens verified; numbers [R, K] uniform. After a rejection at j the next token comes from
    norm(max(0, p_t - p_d)) at j (from p_t if that mass is <= 1e-8); with everything accepted from p_t behind it.
    `target` may lack its last row, [R, K, V]: then nothing can follow a block of K accepted tokens, and the next
    distribution of such a request means nothing.
    """
    index = tokens.unsqueeze(-1)
    p_target = target[:, : tokens.shape[1]].gather(2, index).squeeze(-1)
    p_draft = draft.gather(2, index).squeeze(-1)
    ratio = p_target / p_draft.clamp(min=PROBABILITY_FLOOR)
    accepted = _prefix_length(numbers < ratio.clamp(max=1.0), lengths)
    rows = torch.arange(tokens.shape[0], device=tokens.device)
    following = target[rows, accepted.clamp(max=target.shape[1] - 1)]
    rejected = accepted < lengths
    proposed = draft[rows, accepted.clamp(max=tokens.shape[1] - 1)]
    residual = (following - proposed).clamp(min=0.0)
    mass = residual.sum(dim=1, keepdim=True)
    use_residual = rejected.unsqueeze(1) & (mass > PROBABILITY_FLOOR)
    return Verdict(accepted, torch.where(use_residual, residual, following))


def verify_greedy(tokens: Tensor, *, target_ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Greedy form: tokens [R, K], target_ids [R, K + 1] argmax of the target -> accepted [R], next token [R].

    `target_ids` may lack its last column, as in `verify_sampled`.
    """
    accepted = _prefix_length(tokens == target_ids[:, : tokens.shape[1]], lengths)
    return accepted, target_ids.gather(1, accepted.clamp(max=target_ids.shape[1] - 1).unsqueeze(1)).squeeze(1)
