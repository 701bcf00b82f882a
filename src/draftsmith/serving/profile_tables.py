"""From profiled points to the costs of a step: tables of verification, drafting, prefill, context.

Letters: P points, R requests of a step, N batch tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftsmith.errors import DraftsmithError
from draftsmith.serving.cost_table import CostTable
from draftsmith.serving.profile_points import Point, PrefillPoint
from draftsmith.serving.step_costs import ContextCost, DraftingCost, PrefillCost, UpkeepCost

Floats = NDArray[np.float64]


def centred_isotonic(places: ArrayLike, *, values: ArrayLike, weights: ArrayLike) -> tuple[Floats, Floats]:
    """Centred isotonic regression (Oron & Flournoy 2017): (places, values) of pools, both non-decreasing.

    Pool-adjacent-violators: neighbours whose values fall are replaced by their mean, weighted, until none fall. A pool
    stands at the weighted mean of its places, so that straight lines between pools have no stairs where values that
    rise are blurred by noise. Equal neighbours stay as they are: a stair that was measured remains one.
    `places` strictly increase [P], weights are > 0.
    """
    pools: list[tuple[float, float, float]] = []  # weight, place, value
    triples = zip(*(np.asarray(item, np.float64).tolist() for item in (weights, places, values)), strict=True)
    for weight, place, value in triples:
        pool = (weight, place, value)
        while pools and pools[-1][2] > pool[2]:
            other = pools.pop()
            total = other[0] + pool[0]
            pool = (
                total,
                (other[0] * other[1] + pool[0] * pool[1]) / total,
                (other[0] * other[2] + pool[0] * pool[2]) / total,
            )
        pools.append(pool)
    return np.array([pool[1] for pool in pools]), np.array([pool[2] for pool in pools])


def every_number(table: CostTable) -> CostTable:
    """The table at each N from 1 to its last point: straight lines of seconds between its points, flat below them.

    A sparse table, looked up at the nearest point at or below, is a stair that nothing has, and stops Algorithm 1.
    """
    if _has_every_number(table):
        return table
    return _at_every_number(table.batch_tokens, 1 / table.steps_per_s, last=int(table.batch_tokens[-1]))


def monotone_table(table: CostTable, *, weights: ArrayLike | None = None) -> CostTable:
    """The table at each N with seconds that do not fall as N rises, by `centred_isotonic`, flat at both ends.

    More tokens a step do not run faster: where they seem to, it is noise, or one shape's peculiarity, and a scheduler
    would verify too much up to it. `weights` [P], 1 each by default.
    """
    if _has_every_number(table) and (np.diff(table.steps_per_s) <= 0).all():
        return table
    weights = np.ones(len(table.batch_tokens)) if weights is None else weights
    places, seconds = centred_isotonic(table.batch_tokens, values=1 / table.steps_per_s, weights=weights)
    return _at_every_number(places, seconds, last=int(table.batch_tokens[-1]))


def verification_tables(points: Sequence[Point]) -> tuple[CostTable, CostTable]:
    """(as measured, monotone) tables of verification alone, from the sweep over tokens; each has every N.

    Where several R share an N, the median of theirs. The monotone one weighs points by their steps.
    Raises DraftsmithError without such points.
    """
    measured, weights = _by_tokens(points, seconds=lambda point: None if point.verify_s is None
                                   else point.verify_s.median)  # fmt: skip
    return every_number(measured), monotone_table(measured, weights=weights)


def whole_step_table(points: Sequence[Point]) -> CostTable:
    """Steps per second of the whole engine at each N, monotone: drafting and upkeep included.

    This is what SGLang calls SPS: its profiler takes the inter-token latency of a server, its online profiler the time
    between two schedules, "CPU overhead included" (sgl-project/sglang, docs: DSpark SPS cost table). Its table knows
    no R, so that the R measured at an N count alike.
    """
    measured, weights = _by_tokens(points, seconds=lambda point: point.step_s)
    return monotone_table(measured, weights=weights)


def requests_costs(points: Sequence[Point]) -> tuple[DraftingCost, UpkeepCost]:
    """Seconds of drafting and of upkeep by R, from the points of sweep "requests"."""
    found = [point for point in points if point.sweep == "requests"]
    numbers = tuple(point.num_requests for point in found)
    return (
        DraftingCost(numbers, tuple(point.draft_s.median for point in found)),
        UpkeepCost(numbers, tuple(point.upkeep_s.median for point in found)),
    )


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
