"""How many drafted tokens of each request one step verifies: DSpark's prefix scheduler and what it is compared with.

Letters: R requests, K block size, N batch tokens of a step, a [R, K] survival (the probability that the prefix of
length k is accepted). A candidate is a slot (r, j). All candidates have one order: descending a, ties by smaller j,
then by smaller r. As survival never rises along a block, the first m of them are a prefix of every request's block,
and no other choice of m draft tokens is expected to yield more: tau = R + the sum of the m largest a. A step with m
draft tokens has N = R + m, and Theta = tau * SPS(N) tokens are expected a second.

Why this is lossless (DSpark section 3.2.2): walk along the order. The next candidate is the largest of the slots that
each request's admitted prefix leaves open (also among equal ones, by the rule of ties), and its survival depends on
admitted tokens alone. If whether to go on is decided from what was passed so far, a token that is not admitted was
never looked at. `schedule_prefix` stops that way, and `admit` after a number that was fixed beforehand.
All here is arrays in, arrays out.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftsmith.errors import DraftsmithError
from draftsmith.serving.cost_table import CostTable

Floats = NDArray[np.float64]
Lengths = NDArray[np.int64]
"""Verification length of each request, 0..K: [R]."""


def survival_of(confidence: ArrayLike) -> Floats:
    """a_k = c_1 * ... * c_k of each request: [R, K] -> [R, K].

    Not clamped as where calibration is judged: a confidence of 0 must leave nothing to admit.

    Raises DraftsmithError unless confidences are numbers from 0 to 1.
    """
    slots = _confidence_slots(confidence)
    for slot in range(1, len(slots)):
        np.multiply(slots[slot - 1], slots[slot], out=slots[slot])
    return slots.T


def schedule_prefix(survival: ArrayLike, *, table: CostTable) -> Lengths:
    """Algorithm 1: admit candidates in order while Theta strictly rises, and stop for good where it does not.

    `survival` [R, K]; candidates with a = 0 are never admitted. Where Theta rises to one peak and does not rise again,
    the result is the best of all lengths; on a jagged table it may stop before it.
    Raises DraftsmithError unless survivals are numbers from 0 to 1 that never rise along a block.
    """
    slots = _survival_slots(survival)
    num_requests = slots.shape[1]
    order = _descending(slots)
    candidates = order[: np.count_nonzero(order)]
    theta = _theta(num_requests, candidates=candidates, first_tokens=num_requests, table=table)
    rises = theta[1:] > theta[:-1]
    count = len(rises) if rises.all() else int(rises.argmin())
    return _first(slots, count=count, least=candidates[count - 1] if count else 0.0)


def draft_budget(survival_then: ArrayLike, *, num_requests: int, table: CostTable) -> int:
    """Draft tokens M that the asynchronous scheduler lets a step verify (DSpark section 5.2): Theta's argmax over m.

    All of a jagged table is searched, on survivals `survival_then` [R', K] of an earlier step, R' <= R. Each of the
    `num_requests` R requests of the step that has none counts as certain in all its K tokens, and all of these are in
    the budget: m runs from (R - R') * K to R * K. The smallest of equal m.
    Raises DraftsmithError for survivals of more requests than there are, or unfit ones (see `schedule_prefix`).
    """
    slots = _survival_slots(survival_then)
    block_size, num_known = slots.shape
    if num_known > num_requests:
        raise DraftsmithError("survivals of too many requests", got=num_known, expected=f"<= {num_requests}")
    unknown = (num_requests - num_known) * block_size
    theta = _theta(
        num_requests + unknown, candidates=_descending(slots), first_tokens=num_requests + unknown, table=table
    )
    return unknown + int(theta.argmax())


def admit(survival: ArrayLike, *, budget: int) -> Lengths:
    """The first `budget` candidates of a step, all of them if there are fewer. `survival` [R, K].

    To be lossless the budget must not depend on the tokens of this step.
    Raises DraftsmithError for a negative budget or unfit survivals (see `schedule_prefix`).
    """
    slots = _survival_slots(survival)
    if budget < 0:
        raise DraftsmithError("a budget of draft tokens below zero", got=budget, expected=">= 0")
    if budget >= slots.size:
        return np.full(slots.shape[1], slots.shape[0])
    if budget == 0:
        return np.zeros(slots.shape[1], np.int64)
    rank = slots.size - budget
    return _first(slots, count=budget, least=np.partition(slots, rank, axis=None)[rank])


def threshold_lengths(confidence: ArrayLike, *, threshold: float) -> Lengths:
    """Verify up to the first confidence below `threshold`, not included; 0 verifies all. `confidence` [R, K].

    Raises DraftsmithError unless threshold and confidences are numbers from 0 to 1.
    """
    check_threshold(threshold)
    passes = _confidence_slots(confidence) >= threshold
    return np.logical_and.accumulate(passes, axis=0).sum(axis=0)


def check_threshold(threshold: float) -> None:
    """Raises DraftsmithError unless it is a number from 0 to 1."""
    if not 0 <= threshold <= 1:
        raise DraftsmithError("the threshold of confidence must be a probability", got=threshold, expected="0 to 1")


def _theta(start: float, *, candidates: Floats, first_tokens: int, table: CostTable) -> Floats:
    """Theta after each candidate is admitted [m + 1], from tau = `start` at N = `first_tokens` on."""
    tau = np.empty(len(candidates) + 1)
    tau[0], tau[1:] = start, candidates
    np.cumsum(tau, out=tau)
    tau *= table.look_up_run(first_tokens, count=len(tau))
    return tau


def _descending(slots: Floats) -> Floats:
    """Values from 0 to 1 in descending order: [K, R] -> [K * R].

    numpy sorts 16-bit integers by radix, in linear time; so by the two halves of a float32 first. What that leaves
    undone, values that are one float32, is for the last sort, which takes one pass where all is in order.
    """
    flat = slots.ravel()
    keys = flat.astype(np.float32).view(np.uint32)
    order = keys.astype(np.uint16).argsort(kind="stable")
    order = order[(keys >> np.uint32(16)).astype(np.uint16)[order].argsort(kind="stable")]
    ascending = flat[order]
    ascending.sort(kind="stable")
    return ascending[::-1]


def _first(slots: Floats, *, count: int, least: float) -> Lengths:
    """Lengths of the first `count` candidates of `slots` [K, R], if `least` is the survival of the last of them."""
    if count == 0:
        return np.zeros(slots.shape[1], np.int64)
    lengths: Lengths = (slots >= least).sum(axis=0)
    surplus = int(lengths.sum()) - count
    if surplus:
        ties = np.flatnonzero(slots == least)  # by smaller j, then by smaller r
        lengths -= np.bincount(ties[-surplus:] % len(lengths), minlength=len(lengths))
    return lengths


def _confidence_slots(confidence: ArrayLike) -> Floats:
    """A copy [K, R] of `confidence` [R, K]."""
    slots = np.array(_matrix(confidence).T, order="C")
    if slots.size and not (slots.min() >= 0 and slots.max() <= 1):
        raise _unfit(
            slots, "confidences must be probabilities", wrong=~((slots >= 0) & (slots <= 1)), expected="0 to 1"
        )
    return slots


def _survival_slots(survival: ArrayLike) -> Floats:
    """`survival` [R, K] as [K, R], contiguous; no copy of what `survival_of` returned."""
    slots = np.ascontiguousarray(_matrix(survival).T)
    if slots.size == 0:
        return slots
    if not (slots[1:] <= slots[:-1]).all():
        wrong = np.zeros(slots.shape, np.bool_)
        wrong[1:] = ~(slots[1:] <= slots[:-1])
        raise _unfit(slots, "survival must not rise along a block", wrong=wrong, expected="at most the slot before it")
    if not (slots[0].max() <= 1 and slots[-1].min() >= 0):
        raise _improper(slots, "survivals")
    return slots


def _matrix(values: ArrayLike) -> Floats:
    matrix = np.asarray(values, np.float64)
    if matrix.ndim != 2:
        raise DraftsmithError("one row a request, one column a slot", got=f"shape {matrix.shape}", expected="[R, K]")
    return matrix


def _improper(slots: Floats, what: str) -> DraftsmithError:
    wrong = ~((slots >= 0) & (slots <= 1))
    return _unfit(slots, f"{what} must be probabilities", wrong=wrong, expected="0 to 1")


def _unfit(slots: Floats, what: str, *, wrong: NDArray[np.bool_], expected: str) -> DraftsmithError:
    slot, request = np.unravel_index(int(wrong.argmax()), wrong.shape)
    return DraftsmithError(
        what, got=f"{slots[slot, request]:g}", expected=expected, where=f"request {request + 1}, slot {slot + 1}"
    )
