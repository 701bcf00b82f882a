"""Sampling that depends on (seed, round, slot, purpose) alone, never on who shares the batch.

Letters: n rows, R requests, S slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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


def uniforms(
    seeds: Sequence[int], *, rounds: Sequence[int], slots: Sequence[int], purpose: Purpose
) -> NDArray[np.float64]:
    """Numbers in (0, 1), [R, S]: one for each (64-bit seed, round of its request) and slot below 64, of one purpose.

    Counter-based and stateless. Every round draws fresh numbers, even for positions that an earlier round drafted
    and lost: a schedule that reads old confidences stays independent of the tokens that it schedules.
    """
    seed = np.asarray(seeds, dtype=np.uint64)[:, None]
    place = np.asarray(slots, dtype=np.uint64) * np.uint64(4) + np.uint64(purpose)
    counter = np.asarray(rounds, dtype=np.uint64)[:, None] * np.uint64(256) + place
    with np.errstate(over="ignore"):
        state = _mix(_mix(seed + _GOLDEN) + (counter + np.uint64(1)) * _GOLDEN)
    return ((state >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def is_greedy(sampling: Sampling) -> bool:
    """Temperatures below 1e-5 mean the one-hot argmax."""
    return sampling.temperature < GREEDY_BELOW


@dataclass(frozen=True)
class SamplingGroups:
    """Rows of a batch by how they are sampled: `of[g]` is the sampling of the rows `rows[g]`, ascending."""

    num_rows: int
    of: tuple[Sampling, ...]
    rows: tuple[tuple[int, ...], ...]

    @classmethod
    def make(cls, samplings: Sequence[Sampling]) -> SamplingGroups:
        found: dict[Sampling, list[int]] = {}
        for row, sampling in enumerate(samplings):
            found.setdefault(sampling, []).append(row)
        return cls(len(samplings), tuple(found), tuple(tuple(rows) for rows in found.values()))

    @property
    def all_greedy(self) -> bool:
        return all(is_greedy(sampling) for sampling in self.of)

    def chosen(self, rows: Sequence[int]) -> SamplingGroups:
        """The groups of some of the rows, numbered anew in the order given."""
        place = {row: group for group, members in enumerate(self.rows) for row in members}
        return SamplingGroups.make([self.of[place[row]] for row in rows])


def probabilities(logits: Tensor, *, groups: SamplingGroups) -> Tensor:
    """The distribution that each row is really sampled from: logits [n, V] -> float32 [n, V].

    Order: temperature, top_k, top_p, min_p (as Hugging Face's `generate` applies them); greedy rows are one-hot.
    """
    if len(groups.of) == 1:
        return _transform(logits, groups.of[0])
    out = torch.empty_like(logits, dtype=torch.float32)
    for sampling, members in zip(groups.of, groups.rows, strict=True):
        rows = torch.tensor(members, device=logits.device)
        out[rows] = _transform(logits[rows], sampling)
    return out


def _transform(logits: Tensor, sampling: Sampling) -> Tensor:
    if is_greedy(sampling):
        return torch.zeros_like(logits, dtype=torch.float32).scatter_(1, logits.argmax(1, keepdim=True), 1.0)
    logits = logits.float()
    if sampling.temperature != 1:
        logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[1]:
        least = logits.topk(sampling.top_k, dim=1).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    result = torch.softmax(logits, dim=1)
    if sampling.top_p < 1:
        result = _nucleus(result, sampling.top_p)
    return _likely(result, sampling.min_p) if sampling.min_p > 0 else result


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


def _likely(distribution: Tensor, min_p: float) -> Tensor:
    """Keep the tokens at least `min_p` times as likely as the likeliest, renormalised (Nguyen et al. 2024)."""
    kept = distribution * (distribution >= min_p * distribution.amax(dim=1, keepdim=True))
    return kept / kept.sum(dim=1, keepdim=True)


def draw(distribution: Tensor, *, numbers: NDArray[np.float64]) -> Tensor:
    """Inverse-CDF sample of each row of `distribution` [n, V] (need not be normalised) with numbers [n] -> ids [n]."""
    cumulative = distribution.cumsum(dim=1, dtype=torch.float64)
    goal = torch.from_numpy(numbers).to(distribution.device) * cumulative[:, -1]
    ids = torch.searchsorted(cumulative, goal.unsqueeze(1), right=True).squeeze(1)
    return ids.clamp_(max=distribution.shape[1] - 1)
