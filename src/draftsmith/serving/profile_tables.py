"""From profiled points to the costs of a step: tables of verification, drafting, prefill, context.

Letters: P points, R requests of a step, N batch tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftsmith.errors import DraftsmithError
from draftsmith.serving.cost_table import CostTable
from draftsmith.serving.profile_points import Point, PrefillPoint
from draftsmith.serving.step_costs import ContextCost, DraftingCost, PrefillCost, UpkeepCost

Floats = NDArray[np.float64]
ROUNDS_OF_FIT = 50


@dataclass(frozen=True)
class Pool:
    """Neighbouring points that share one value; `place` is the weighted mean of theirs."""

    weight: float
    place: float
    value: float
    first: float
    last: float

    def joined(self, other: Pool) -> Pool:
        """With its neighbour above."""
        weight = self.weight + other.weight
        return Pool(
            weight,
            (self.weight * self.place + other.weight * other.place) / weight,
            (self.weight * self.value + other.weight * other.value) / weight,
            self.first,
            other.last,
        )


def isotonic_pools(places: ArrayLike, *, values: ArrayLike, weights: ArrayLike) -> list[Pool]:
    """Isotonic regression by pool-adjacent-violators: pools whose values do not fall.

    Neighbours whose values fall are replaced by their mean, weighted, until none do; equal ones stay as they are.
    `places` strictly increase [P], weights are > 0.
    """
    pools: list[Pool] = []
    triples = zip(*(np.asarray(item, np.float64).tolist() for item in (weights, places, values)), strict=True)
    for weight, place, value in triples:
        pool = Pool(weight, place, value, place, place)
        while pools and pools[-1].value > pool.value:
            pool = pools.pop().joined(pool)
        pools.append(pool)
    return pools


def every_number(table: CostTable) -> CostTable:
    """The table at each N from 1 to its last point: straight lines of seconds between its points, flat below them.

    A sparse table, looked up at the nearest point at or below, is a stair that nothing has, and stops Algorithm 1.
    """
    if _has_every_number(table):
        return table
    return _at_every_number(table.batch_tokens, 1 / table.steps_per_s, last=int(table.batch_tokens[-1]))


def monotone_table(table: CostTable) -> CostTable:
    """The table at each N with seconds that do not fall as N rises: isotonic regression, lines between its pools.

    More tokens a step do not run faster: where they seem to, it is noise, or one shape's peculiarity, and a scheduler
    would verify too much up to it. Stairs of the table stay stairs.
    """
    if _has_every_number(table) and (np.diff(table.steps_per_s) <= 0).all():
        return table
    pools = isotonic_pools(table.batch_tokens, values=1 / table.steps_per_s, weights=np.ones(len(table.batch_tokens)))
    ends = sorted({(place, pool.value) for pool in pools for place in (pool.first, pool.last)})
    return _at_every_number(*np.array(ends).T, last=int(table.batch_tokens[-1]))


def smoothed_table(measured: CostTable, *, weights: ArrayLike) -> CostTable:
    """The same of medians, weighted by the steps behind them [P]: lines between the middles of the pools.

    Centred isotonic regression (Oron & Flournoy 2017): where a cost that rises is blurred by noise, pools as stairs
    would have jumps that no machine has, at which Algorithm 1 stops. Points that rise without noise stay where they
    are, and so do the stairs that they make.
    """
    pools = isotonic_pools(measured.batch_tokens, values=1 / measured.steps_per_s, weights=weights)
    places, seconds = [pool.place for pool in pools], [pool.value for pool in pools]
    return _at_every_number(places, seconds, last=int(measured.batch_tokens[-1]))


def verification_by_requests(points: Sequence[Point]) -> dict[int, float]:
    """What R requests make verification take beyond the fewest that were measured, at equal N: seconds by R.

    A pass over N tokens of more requests reads more rows of keys and makes more logits. Fitted with the table as
    seconds = theta(N) + alpha(R), theta not falling, by turns; alpha of the fewest requests is 0, and never below.
    """
    shapes = [
        (point.num_requests, point.batch_tokens, point.verify_s.median, float(point.num_steps))
        for point in points
        if point.sweep == "tokens" and point.batch_tokens is not None and point.verify_s is not None
    ]
    if not shapes:
        return {}
    requests, tokens, seconds, weights = (np.array(column) for column in zip(*shapes, strict=True))
    numbers, row = np.unique(requests, return_inverse=True)
    places, at = np.unique(tokens, return_inverse=True)
    mass = np.bincount(at, weights)
    alpha = np.zeros(len(numbers))
    for _ in range(ROUNDS_OF_FIT):
        means = np.bincount(at, weights * (seconds - alpha[row])) / mass
        pools = isotonic_pools(places, values=means, weights=mass)
        theta = np.interp(places, [pool.place for pool in pools], [pool.value for pool in pools])
        alpha = np.bincount(row, weights * (seconds - theta[at])) / np.bincount(row, weights)
        alpha -= alpha[0]
    return dict(zip(numbers.tolist(), np.maximum(alpha, 0.0).tolist(), strict=True))


def verification_tables(
    points: Sequence[Point], *, by_requests: Mapping[int, float] | None = None
) -> tuple[CostTable, CostTable]:
    """(as measured, monotone) tables of verification alone, from the sweep over tokens; each has every N.

    `by_requests` are seconds that belong to the R of a point (`verification_by_requests`) and are left out. Where
    several R share an N, the median of theirs. The monotone one weighs points by their steps.
    Raises DraftsmithError without such points.
    """

    def alone(point: Point) -> float | None:
        if point.verify_s is None:
            return None
        return point.verify_s.median - (by_requests or {}).get(point.num_requests, 0.0)

    measured, weights = _by_tokens(points, seconds=alone)
    return every_number(measured), smoothed_table(measured, weights=weights)


def whole_step_table(points: Sequence[Point]) -> CostTable:
    """Steps per second of the whole engine at each N, monotone: drafting and upkeep included.

    This is what SGLang calls SPS: its profiler takes the inter-token latency of a server, its online profiler the time
    between two schedules, "CPU overhead included" (sgl-project/sglang, docs: DSpark SPS cost table). Its table knows
    no R, so that the R measured at an N count alike.
    """
    measured, weights = _by_tokens(points, seconds=lambda point: point.step_s)
    return smoothed_table(measured, weights=weights)


def requests_costs(
    points: Sequence[Point], *, block_size: int | None, by_requests: Mapping[int, float] | None = None
) -> tuple[DraftingCost, UpkeepCost]:
    """Seconds of drafting and of upkeep by R, from the points of sweep "requests", and the share of drafting that does
    not shrink with its blocks. Upkeep includes what verification takes `by_requests`."""
    found = [point for point in points if point.sweep == "requests"]
    numbers = tuple(point.num_requests for point in found)
    whole = {point.num_requests: point.draft_s.median for point in found}
    return (
        DraftingCost(
            numbers,
            tuple(whole.values()),
            1.0 if block_size is None else fixed_share(points, whole=whole, block_size=block_size),
        ),
        UpkeepCost(
            numbers,
            tuple(point.upkeep_s.median + (by_requests or {}).get(point.num_requests, 0.0) for point in found),
        ),
    )


def fixed_share(points: Sequence[Point], *, whole: Mapping[int, float], block_size: int) -> float:
    """Of the seconds for whole blocks (`whole`, by R), what a block of no token would take; 1 where none was shorter.

    The median over R of least squares through the whole block, 0 to 1: a block of k tokens takes 1 - (1 - share)
    (K - k) / K of a whole one.
    """
    spared: dict[int, list[tuple[float, float]]] = {}
    for point in points:
        if point.sweep == "blocks" and point.batch_tokens is not None:
            missing = 1 - (point.batch_tokens / point.num_requests - 1) / block_size
            saved = 1 - point.draft_s.median / whole[point.num_requests]
            spared.setdefault(point.num_requests, []).append((missing, saved))
    if not spared:
        return 1.0
    slopes = [
        sum(missing * saved for missing, saved in part) / sum(missing**2 for missing, _ in part)
        for part in spared.values()
    ]
    return float(np.clip(1 - np.median(slopes), 0, 1))


def prefill_cost(points: Sequence[PrefillPoint]) -> PrefillCost | None:
    """Least squares of relative errors over the medians: seconds a pass and a token, neither below 0; None of none.

    Where the line would have a negative part, the passes are proportional to their tokens.
    """
    if not points:
        return None
    tokens = np.array([point.num_tokens for point in points], np.float64)
    seconds = np.array([point.seconds.median for point in points])
    slope, offset = 0.0, 0.0
    if len(np.unique(tokens)) > 1:
        (offset, slope), *_ = np.linalg.lstsq(np.stack([1 / seconds, tokens / seconds], 1), np.ones(len(tokens)))
    if slope <= 0 or offset < 0:
        relative = tokens / seconds
        slope, offset = float(relative.sum() / (relative**2).sum()), 0.0
    return PrefillCost(1 / float(slope), float(offset))


def context_cost(points: Sequence[Point]) -> ContextCost:
    """What a token of context adds to verification, and the context (rounded mean) of the sweep over tokens.

    The slope of the medians over the tokens in the contexts of the batch, shapes of one R and N compared with each
    other alone; 0 if it would be negative, or where only one length was measured.
    """
    lengths = [(point.context_tokens, point.num_steps) for point in points if point.sweep == "tokens"]
    shapes: dict[tuple[int, int | None], list[tuple[float, float]]] = {}
    for point in points:
        if point.sweep == "context" and point.verify_s is not None:
            where = shapes.setdefault((point.num_requests, point.batch_tokens), [])
            where.append((point.num_requests * point.context_tokens, point.verify_s.median))
    around = [np.array(part) - np.mean(part, axis=0) for part in shapes.values()]
    over, up = (sum(float((part[:, 0] * part[:, column]).sum()) for part in around) for column in (0, 1))
    mean = np.average([length for length, _ in lengths], weights=[count for _, count in lengths]) if lengths else 0.0
    return ContextCost(max(0.0, up / over) if over > 0 else 0.0, round(float(mean)))


def _by_tokens(points: Sequence[Point], *, seconds: Callable[[Point], float | None]) -> tuple[CostTable, Floats]:
    """The median over R at each N that was measured, and the steps behind it [P]."""
    found: dict[int, list[tuple[float, int]]] = {}
    for point in points:
        value = seconds(point)
        if point.sweep == "tokens" and point.batch_tokens is not None and value is not None:
            found.setdefault(point.batch_tokens, []).append((value, point.num_steps))
    if not found:
        raise DraftsmithError("a profile without a step of the sweep over tokens", expected="at least one point")
    numbers = sorted(found)
    medians = np.array([np.median([value for value, _ in found[number]]) for number in numbers])
    weights = np.array([sum(count for _, count in found[number]) for number in numbers], np.float64)
    return CostTable(numbers, steps_per_s=1 / medians), weights


def _has_every_number(table: CostTable) -> bool:
    return len(table.batch_tokens) == int(table.batch_tokens[-1])


def _at_every_number(places: ArrayLike, seconds: ArrayLike, *, last: int) -> CostTable:
    numbers = np.arange(1, last + 1)
    return CostTable(numbers, steps_per_s=1 / np.interp(numbers, np.asarray(places), np.asarray(seconds)))
