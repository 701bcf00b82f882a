"""Points from timed steps."""

from __future__ import annotations

import json
from typing import Any

import pytest

from draftsmith.serving.profile_points import PassSample, Point, PrefillPoint, Spread, prefill_points, step_points
from draftsmith.serving.profile_points import StepSample as Step


def step(verify: float, **changes: Any) -> Step:
    fields: dict[str, Any] = {
        "sweep": "tokens", "num_requests": 2, "batch_tokens": 4, "nominal_context": 10, "context_tokens": 10.0,
        "draft_s": 1.0, "verify_s": verify, "upkeep_s": 0.5,
    }  # fmt: skip
    return Step(**{**fields, **changes})


def test_spread_by_hand() -> None:
    """Of 0, 10, .., 100: deciles on the values themselves. Of two values: a tenth of the way."""
    assert Spread.of([100.0, *range(0, 100, 10)]) == Spread(50.0, 10.0, 90.0)
    found = Spread.of([1.0, 2.0])
    assert (found.median, found.p10, found.p90) == pytest.approx((1.5, 1.1, 1.9))


def test_shapes_are_points_and_requests_are_points_of_all_their_shapes() -> None:
    found = step_points([
        step(3.0, context_tokens=14.0, draft_s=3.0),
        step(1.0),
        step(9.0, batch_tokens=2, draft_s=2.0),
        step(5.0, sweep="context", nominal_context=50, context_tokens=51.0),
        step(4.0, sweep="context"),
        step(6.0, sweep="context", draft_s=99.0),
    ])  # fmt: skip
    assert [(one.sweep, one.num_requests, one.batch_tokens, one.context_tokens, one.num_steps) for one in found] == [
        ("tokens", 2, 2, 10.0, 1),
        ("tokens", 2, 4, 12.0, 2),
        ("requests", 2, None, pytest.approx(34 / 3), 3),
        ("context", 2, 4, 10.0, 2),
        ("context", 2, 4, 51.0, 1),
    ]
    assert [one.verify_s and one.verify_s.median for one in found] == [9.0, 2.0, None, 5.0, 5.0]
    assert found[2].draft_s.median == 2.0  # of 3, 1 and 2
    assert [one.step_s for one in found] == [9 + 2 + 0.5, 2 + 2 + 0.5, None, 5 + 50 + 0.5, 5 + 1 + 0.5]


def test_prefill_points_by_size() -> None:
    found = prefill_points([PassSample(2, 20, 3.0), PassSample(1, 10, 2.0), PassSample(2, 20, 1.0)])
    assert [(one.num_requests, one.num_tokens, one.seconds.median, one.num_passes) for one in found] == [
        (1, 10, 2.0, 1),
        (2, 20, 2.0, 2),
    ]


def test_points_survive_json() -> None:
    points = step_points([step(3.0), step(1.0, sweep="context")])
    assert [Point.from_body(json.loads(json.dumps(one.to_body()))) for one in points] == list(points)
    passes = prefill_points([PassSample(2, 20, 3.0)])
    assert [PrefillPoint.from_body(json.loads(json.dumps(one.to_body()))) for one in passes] == list(passes)
