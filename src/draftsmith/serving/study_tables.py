"""Tables of a study that compare policies, from their points in the closed loop and their cells under open loads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from draftsmith.serving.contenders import PLAIN, Contender
from draftsmith.serving.pareto import Reached, pareto_front, speed_at, throughput_at
from draftsmith.serving.study_loads import ClosedPoint

Closed = Mapping[str, Sequence[ClosedPoint]]
"""Points of each policy at the same concurrencies, ascending."""

MATCHED_SHARES = (0.25, 0.5, 0.75)
"""Of the throughput that plain decoding reaches at most: where speeds of a user are compared."""


def closed_figures(closed: Closed) -> dict[str, Any]:
    """Points of all policies, the front of all of them, the best at each concurrency."""
    points = [point for item in closed.values() for point in item]
    front = pareto_front([point.load_point for point in points])
    on_front = {id(points[at]) for at in front}
    best = []
    for at, plain in enumerate(closed[PLAIN]):
        here = [item[at] for item in closed.values()]
        most = max(here, key=lambda point: point.tokens_per_s)
        best.append({
            "concurrency": plain.concurrency,
            "policy": most.policy,
            "tokens_per_s": most.tokens_per_s,
            "speedup": most.tokens_per_s / plain.tokens_per_s,
            "as_good": [point.policy for point in here if point is not most and point.as_good_as(most)],
        })  # fmt: skip
    return {
        "pareto": [
            {
                "policy": name,
                "points": [
                    point.body(plain_tokens_per_s=plain.tokens_per_s, on_frontier=id(point) in on_front)
                    for point, plain in zip(item, closed[PLAIN], strict=True)
                ],
            }
            for name, item in closed.items()
        ],
        "frontier": [
            {
                "policy": points[at].policy,
                "concurrency": points[at].concurrency,
                "tokens_per_s": points[at].tokens_per_s,
                "user_tokens_per_s": points[at].user.p50,
            }
            for at in front
        ],
        "best_by_concurrency": best,
        "overall": _overall(closed),
    }


def _overall(closed: Closed) -> list[dict[str, Any]]:
    """Policies by what they have at their worst concurrency, as a share of the best there."""
    most = [max(point.tokens_per_s for point in here) for here in zip(*closed.values(), strict=True)]
    rows = []
    for name, points in closed.items():
        shares = [point.tokens_per_s / best for point, best in zip(points, most, strict=True)]
        worst = min(range(len(shares)), key=shares.__getitem__)
        rows.append({"policy": name, "worst_share": shares[worst], "concurrency": points[worst].concurrency})
    return sorted(rows, key=lambda row: -row["worst_share"])


def matched(closed: Closed) -> list[dict[str, Any]]:
    """Speeds of a user at equal throughput."""
    peak = max(point.tokens_per_s for point in closed[PLAIN])
    found = []
    for share in MATCHED_SHARES:
        reached = {
            name: speed_at([point.load_point for point in points], tokens_per_s=share * peak)
            for name, points in closed.items()
        }
        found.append({"share": share, "tokens_per_s": share * peak, **_ranked(reached, value="user_tokens_per_s")})
    return found


def _ranked(reached: Mapping[str, Reached | None], *, value: str) -> dict[str, Any]:
    plain = reached[PLAIN]
    rows = [
        {
            "policy": name,
            value: None if item is None else item.value,
            "concurrency": None if item is None else item.concurrency,
            "gain": None if item is None or plain is None else change(item.value, plain.value),
            "at_limit": item is not None and item.at_limit,
        }
        for name, item in reached.items()
    ]
    best = max((name for name, item in reached.items() if item is not None), key=lambda name: _value(reached[name]),
               default=None)  # fmt: skip
    return {"rows": rows, "best": best}


def _value(item: Reached | None) -> float:
    return -math.inf if item is None else item.value


def early_exit_rows(found: Sequence[Contender], closed: Closed) -> list[dict[str, Any]]:
    """Every early exit beside the same policy that always drafts; `clear` where more than noise lies between them."""
    rows = []
    for contender in found:
        if contender.early_exit is None:
            continue
        base = closed[replace(contender, early_exit=None).name]
        for point, always, plain in zip(closed[contender.name], base, closed[PLAIN], strict=True):
            rows.append({
                "policy": always.policy,
                "early_exit": contender.early_exit,
                "concurrency": point.concurrency,
                "tokens_per_s": point.tokens_per_s,
                "gain": change(point.tokens_per_s, always.tokens_per_s),
                "clear": not (always.as_good_as(point) and point.as_good_as(always)),
                "gain_over_none": change(point.tokens_per_s, plain.tokens_per_s),
                "user_tokens_per_s": point.user.p50,
                "drafting_share": point.drafting_share,
                "base_tokens_per_s": always.tokens_per_s,
            })  # fmt: skip
    return rows


def anchors_of(closed: Closed, *, speeds: Sequence[tuple[float | None, float]]) -> list[dict[str, Any]]:
    """Throughput at promised speeds of a user: (share of plain decoding's for one user, tokens a second)."""
    found = []
    for share, speed in speeds:
        reached = {
            name: throughput_at([point.load_point for point in points], user_tokens_per_s=speed)
            for name, points in closed.items()
        }
        found.append({"share": share, "user_tokens_per_s": speed, **_ranked(reached, value="tokens_per_s")})
    return found


def compare_cells(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Cells of staleness and bursts beside the synchronous one and the freshest asynchronous one of the same bursts."""
    found = []
    for cell in cells:
        alike = sorted(
            (item for item in cells if item["burst_factor"] == cell["burst_factor"]), key=lambda item: item["staleness"]
        )
        compared = dict(cell)
        for stem, base in (("", alike[0]), ("fresh_", alike[1])):
            compared[f"{stem}change"] = change(cell["user_tokens_per_s"], base["user_tokens_per_s"])
            compared[f"{stem}p95_change"] = change(cell["end_to_end_p95_s"], base["end_to_end_p95_s"])
        found.append(compared)
    return found


def change(value: float, base: float) -> float:
    """Of `value` over `base`, less 1."""
    return value / base - 1
