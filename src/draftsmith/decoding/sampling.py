"""Sampling that depends on (seed, round, slot, purpose) alone, never on who shares the batch.

Letters: n rows, R requests, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftsmith.params import Sampling

GREEDY_BELOW = 1e-5
NUCLEUS_CANDIDATES = 512
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


class Purpose(IntEnum):
    """What a uniform number is for; one slot may need one of each."""

    DRAFT = 0
    ACCEPT = 1
    TARGET = 2


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014): a bijection of 64 bits that scatters neighbours."""
    with np.errstate(over="ignore"):
        state = (state ^ (state >> np.uint64(30))) * _MIX_1
        state = (state ^ (state >> np.uint64(27))) * _MIX_2
    return state ^ (state >> np.uint64(31))


def uniforms(seeds: Sequence[int], *, rounds: Sequence[int], slot: int, purpose: Purpose) -> NDArray[np.float64]:
    """One number in (0, 1) for each (64-bit seed, round of its request), for a slot below 64 and a purpose.

    Counter-based and stateless. Every round draws fresh numbers, even for positions that an earlier round drafted
    and lost: a schedule that reads old confidences stays independent of the tokens that it schedules.
    """
    seed = np.asarray(seeds, dtype=np.uint64)
    counter = np.asarray(rounds, dtype=np.uint64) * np.uint64(256) + np.uint64(slot * 4 + int(purpose))
    with np.errstate(over="ignore"):
        state = _mix(_mix(seed + _GOLDEN) + (counter + np.uint64(1)) * _GOLDEN)
    return ((state >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def is_greedy(sampling: Sampling) -> bool:
    """Temperatures below 1e-5 mean the one-hot argmax."""
    return sampling.temperature < GREEDY_BELOW


def probabilities(logits: Tensor, *, samplings: Sequence[Sampling]) -> Tensor:
    """The distribution that each row is really sampled from, float32 [n, V].

    Order: temperature, top_k, top_p (as served); greedy rows are one-hot. Rows may differ in their sampling.
    """
    if all(sampling == samplings[0] for sampling in samplings):
        return _transform(logits, samplings[0])
    out = torch.empty_like(logits, dtype=torch.float32)
    for sampling in set(samplings):
        rows = torch.tensor([index for index, item in enumerate(samplings) if item == sampling], device=logits.device)
        out[rows] = _transform(logits[rows], sampling)
    return out


def _transform(logits: Tensor, sampling: Sampling) -> Tensor:
    if is_greedy(sampling):
        return torch.zeros_like(logits, dtype=torch.float32).scatter_(1, logits.argmax(1, keepdim=True), 1.0)
    logits = logits.float() / sampling.temperature
    if 0 < sampling.top_k < logits.shape[1]:
        least = logits.topk(sampling.top_k, dim=1).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    result = torch.softmax(logits, dim=1)
    return _nucleus(result, sampling.top_p) if sampling.top_p < 1 else result


def _nucleus(distribution: Tensor, top_p: float) -> Tensor:
    """Keep the most likely tokens up to and including the one that reaches mass top_p, renormalised.

    Looks at the first few candidates alone where they reach the mass in every row: same result, no full sort.
    """
    size = distribution.shape[1]
    for candidates in (min(NUCLEUS_CANDIDATES, size), size):
        ordered, order = distribution.topk(candidates, dim=1)
        cumulative = ordered.cumsum(dim=1, dtype=torch.float64)
        if candidates == size or bool((cumulative[:, -1] >= top_p).all()):
            break
    kept = ordered * (cumulative - ordered < top_p)
    return torch.zeros_like(distribution).scatter_(1, order, kept / kept.sum(dim=1, keepdim=True))


def draw(distribution: Tensor, *, numbers: NDArray[np.float64]) -> Tensor:
    """Inverse-CDF sample of each row of `distribution` [n, V] (need not be normalised) with numbers [n] -> ids [n]."""
    cumulative = distribution.cumsum(dim=1, dtype=torch.float64)
    goal = torch.from_numpy(numbers).to(distribution.device) * cumulative[:, -1]
    ids = torch.searchsorted(cumulative, goal.unsqueeze(1), right=True).squeeze(1)
    return ids.clamp_(max=distribution.shape[1] - 1)
