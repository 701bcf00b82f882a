"""Throughput against speed: which points nothing else beats on both, and what a policy reaches at a promised speed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from draftsmith.errors import DraftsmithError


@dataclass(frozen=True)
class LoadPoint:
    """A policy at one load: so many users at once, the tokens a second of all together, and those of one user."""

    concurrency: float
    tokens_per_s: float
    user_tokens_per_s: float


@dataclass(frozen=True)
class Reached:
    """The most at an anchor; `at_limit` if no higher load was measured that could have told more."""

    value: float
    concurrency: float
    at_limit: bool


def pareto_front(points: Sequence[LoadPoint]) -> list[int]:
    """Places of the points that no other equals in both figures and beats in one, by ascending speed of a user.

    Of equal points all are kept.
    """
    order = sorted(range(len(points)), key=lambda at: (-points[at].user_tokens_per_s, -points[at].tokens_per_s))
    front: list[int] = []
    most = float("-inf")
    for at in order:
        point = points[at]
        same = bool(front) and (point.tokens_per_s, point.user_tokens_per_s) == (
            points[front[-1]].tokens_per_s, points[front[-1]].user_tokens_per_s,
        )  # fmt: skip
        if point.tokens_per_s > most or same:
            front.append(at)
            most = point.tokens_per_s
    return front[::-1]


def throughput_at(points: Sequence[LoadPoint], *, user_tokens_per_s: float) -> Reached | None:
    """The most tokens a second at which a user still has `user_tokens_per_s`; None if no measured load is that fast.

    `points` are one policy's. Between neighbouring loads both figures lie on the line between what was measured.
    Raises DraftsmithError unless loads strictly increase.
    """
    path = [(item.concurrency, item.user_tokens_per_s, item.tokens_per_s) for item in _by_load(points)]
    return _most(path, least=user_tokens_per_s)


def speed_at(points: Sequence[LoadPoint], *, tokens_per_s: float) -> Reached | None:
    """The most tokens a second for one user while all together have `tokens_per_s`; as `throughput_at`."""
    path = [(item.concurrency, item.tokens_per_s, item.user_tokens_per_s) for item in _by_load(points)]
    return _most(path, least=tokens_per_s, more_load=False)


def _by_load(points: Sequence[LoadPoint]) -> Sequence[LoadPoint]:
    loads = [item.concurrency for item in points]
    if not loads or any(later <= earlier for earlier, later in itertools.pairwise(loads)):
        raise DraftsmithError("loads of a policy", got=loads, expected="at least one, strictly increasing")
    return points


def _most(path: Sequence[tuple[float, float, float]], *, least: float, more_load: bool = True) -> Reached | None:
    """The largest third of (load, promised, wanted) along a path of straight lines where the second is >= `least`."""
    found = [(wanted, load) for load, promised, wanted in path if promised >= least]
    for (load, promised, wanted), (load_2, promised_2, wanted_2) in itertools.pairwise(path):
        if (promised - least) * (promised_2 - least) < 0:
            share = (promised - least) / (promised - promised_2)
            found.append((wanted + share * (wanted_2 - wanted), load + share * (load_2 - load)))
    if not found:
        return None
    value, load = max(found)
    return Reached(value, load, load == (path[-1][0] if more_load else path[0][0]))
