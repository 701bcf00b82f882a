"""From the target's hidden states to accepted prefixes, with logits made only where a decision hangs on them.

A request's slot k + 1 matters only if its slots 1..k were accepted, so the LM head runs over the slots in waves: the
first slots of all requests, then the next ones of those that are still whole. The outcome is that of one wave.
Letters: R requests, K block size, N flat tokens, D hidden, V vocabulary, n requests of a wave, W its slots, M its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftsmith.decoding.accept import verify_greedy, verify_sampled
from draftsmith.decoding.sampling import SamplingGroups, draw, is_greedy, probabilities
from draftsmith.drafters.base import Proposal
from draftsmith.params import Sampling

FIRST_WAVE = 2
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Outcome:
    """`accepted` [R] draft tokens of each request, and `following` [R], the target's token behind them."""

    accepted: list[int]
    following: list[int]


@dataclass(frozen=True)
class RoundNumbers:
    """Uniform numbers of one round: `accept` [R, K] for the slots, `target` [R] for the token behind them."""

    accept: NDArray[np.float64]
    target: NDArray[np.float64]


def verify_blocks(
    last_hidden: Tensor,
    *,
    logits_of: Callable[[Tensor], Tensor],
    proposal: Proposal,
    lengths: Sequence[int],
    groups: SamplingGroups,
    numbers: RoundNumbers | None,
    num_waves: int | None = None,
) -> Outcome:
    """Verify the first `lengths[r]` draft tokens of each request against the target.

    last_hidden [N, D] holds, request by request, the states of the anchor and of the draft tokens to verify;
    `logits_of` makes [M, V] of [M, D]; `groups` say how each request is sampled. `numbers` may be None where all are
    greedy. `num_waves` 1 makes all logits at once: one pass, and no waiting for the device in between.
    """
    limits = np.asarray(lengths, np.int64)
    anchors = np.cumsum(limits + 1) - limits - 1
    accepted, following = np.zeros_like(limits), np.zeros_like(limits)
    alive = np.arange(len(limits))
    for first, width in waves(proposal.tokens.shape[1] + 1, num_waves=num_waves):
        wave = _Wave(alive, first, width, limits[alive] - first)
        rows = np.repeat(anchors[alive] + first, wave.counts) + wave.offsets(wave.counts)
        logits = logits_of(last_hidden[_tensor(rows, last_hidden.device)])
        found, following[alive] = _verify_wave(logits, wave=wave, proposal=proposal, groups=groups, numbers=numbers)
        accepted[alive] += found
        alive = alive[found == width]
        if not len(alive):
            break
    return Outcome(accepted.tolist(), following.tolist())


def waves(num_slots: int, *, num_waves: int | None) -> Iterator[tuple[int, int]]:
    """(first slot, number of slots): one wave, or the first two slots and then twice as many each time.

    The last slot, behind which no token is drafted, is no wave of its own.
    """
    first, width = 0, num_slots if num_waves == 1 else FIRST_WAVE
    while first < num_slots:
        if first + width >= num_slots - 1:
            width = num_slots - first
        yield first, width
        first, width = first + width, 2 * width


@dataclass(frozen=True)
class _Wave:
    """Slots first..first + width - 1 of the requests `alive` [n]; `left` [n] of their tokens, from `first` on, are to
    verify."""

    alive: Ints
    first: int
    width: int
    left: Ints

    @property
    def counts(self) -> Ints:
        """Rows of logits of each request [n]: one a token to verify and one behind them, as far as the wave goes."""
        return np.minimum(self.left + 1, self.width)

    @staticmethod
    def offsets(counts: Ints) -> Ints:
        """0, 1, .. of each request, one after the other [M]."""
        return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)

    def rows_of(self, members: Ints) -> Ints:
        """Where the logits of some of the requests (places in `alive`) are, of all M rows."""
        starts = np.cumsum(self.counts) - self.counts
        counts = self.counts[members]
        return np.repeat(starts[members], counts) + self.offsets(counts)

    def grid(self, rows: Tensor, *, members: Ints) -> Tensor:
        """Rows [M, ...] of the members -> [len(members), W, ...], zeros behind what a request has."""
        counts = self.counts[members]
        shape = (len(members), self.width, *rows.shape[1:])
        if (counts == self.width).all():
            return rows.view(shape)
        place = np.repeat(np.arange(len(members)) * self.width, counts) + self.offsets(counts)
        grid = rows.new_zeros(len(members) * self.width, *rows.shape[1:])
        return grid.index_copy_(0, _tensor(place, rows.device), rows).view(shape)


def _verify_wave(
    logits: Tensor, *, wave: _Wave, proposal: Proposal, groups: SamplingGroups, numbers: RoundNumbers | None
) -> tuple[Ints, Ints]:
    """logits [M, V] -> tokens accepted within the wave [n], and the token behind them [n].

    Where the block goes on behind the wave (all of its slots accepted), the token means nothing.
    """
    found, following = np.zeros_like(wave.alive), np.zeros_like(wave.alive)
    own = groups if len(wave.alive) == groups.num_rows else groups.chosen(wave.alive.tolist())
    slots = slice(wave.first, min(wave.first + wave.width, proposal.tokens.shape[1]))
    for sampling, places in zip(own.of, own.rows, strict=True):
        members = np.asarray(places)
        part = logits if len(own.of) == 1 else logits[_tensor(wave.rows_of(members), logits.device)]
        requests = wave.alive[members]
        index = _tensor(requests, logits.device)
        tokens = proposal.tokens[index, slots]
        lengths = _tensor(np.minimum(wave.left[members], wave.width), logits.device)
        if is_greedy(sampling):
            kept, chosen = verify_greedy(
                tokens, target_ids=wave.grid(part.argmax(-1), members=members), lengths=lengths
            )
        else:
            assert numbers is not None
            assert proposal.probabilities is not None
            verdict = verify_sampled(
                tokens,
                draft=proposal.probabilities[index, slots],
                target=wave.grid(probabilities(part, groups=_all_alike(sampling, len(part))), members=members),
                lengths=lengths,
                numbers=torch.from_numpy(numbers.accept[requests, slots]).to(logits.device),
            )
            kept, chosen = verdict.accepted, draw(verdict.next_distribution, numbers=numbers.target[requests])
        found[members], following[members] = kept.cpu().numpy(), chosen.cpu().numpy()
    return found, following


def _all_alike(sampling: Sampling, num_rows: int) -> SamplingGroups:
    return SamplingGroups(num_rows, (sampling,), (tuple(range(num_rows)),))


def _tensor(values: Ints, device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device)
