"""The first sentences of a serving study: they follow the numbers."""

from __future__ import annotations

from typing import Any

import pytest

from draftsmith.serving.headline import headline
from tests.serve_bodies import study

LOADS = (1, 2, 4)
PLAIN = [10.0, 20.0, 40.0]


def first(fixed: list[float], *, as_good: dict[int, list[str]] | None = None, **more: Any) -> str:
    return headline(study(rates={"none": PLAIN, "fixed_1": fixed}, loads=LOADS, as_good=as_good, **more))[0]


@pytest.mark.parametrize(
    ("fixed", "told"),
    [
        ([9.0, 19.0, 30.0], "On this machine no policy beats plain decoding at any load studied (1 to 4 users)."),
        (
            [15.0, 24.0, 44.0],
            "On this machine speculation beats plain decoding at every load studied (1 to 4 users), the most by "
            '"fixed 1" at 1 user, +50.0 %.',
        ),
        (
            [12.0, 25.0, 39.0],
            "On this machine no policy beats plain decoding above 2 users; up to there speculation does, the most by "
            '"fixed 1" at 2 users, +25.0 %.',
        ),
        (
            [12.0, 15.0, 30.0],
            "On this machine no policy beats plain decoding above 1 user; up to there speculation does, by "
            '"fixed 1", +20.0 %.',
        ),
        (
            [9.0, 24.0, 30.0],
            'On this machine speculation beats plain decoding at some loads only (2 users), by "fixed 1", +20.0 %.',
        ),
    ],
)
def test_whether_speculation_pays_comes_first(fixed: list[float], told: str) -> None:
    assert first(fixed) == told


def test_a_policy_that_plain_decoding_equals_does_not_beat_it() -> None:
    assert "no policy beats plain decoding above 1 user" in first([15.0, 20.1, 30.0], as_good={2: ["none"]})


def test_what_is_made_up_is_no_machine() -> None:
    assert first([9.0, 9.0, 9.0], synthetic=True, name="tiles").startswith("In this made-up setting no policy beats")


def test_another_machine_is_named() -> None:
    assert first([9.0, 9.0, 9.0], name="h200").startswith('On the machine of profile "h200" no policy beats')


def test_anchors_name_the_best_policy_and_its_gain() -> None:
    body = study(rates={"none": PLAIN, "fixed_1": [15.0, 26.0, 44.0]}, loads=LOADS)
    told = headline(body)
    # 0.5 of plain decoding's 10 tokens/s: all loads are fast enough, so the highest one is a lower bound.
    assert told[1] == (
        'Where users must get 5 tokens/s a user, "fixed 1" serves the most: at least 44 tokens/s to 4 users, '
        "+10.0 % over plain decoding."
    )
    assert told[2] == (
        'Where users must get 12 tokens/s a user, "fixed 1" serves the most: 26 tokens/s to 2 users, '
        "and plain decoding cannot give it."
    )
    assert told[-1] == body["answers"]["policy"]
    body = study(rates={"none": PLAIN, "fixed_1": [9.0, 18.0, 30.0]}, loads=LOADS)
    assert headline(body)[1].endswith('"no drafter" serves the most: at least 40 tokens/s to 4 users.')
    assert headline(body)[2] == "No policy gives users 12 tokens/s a user at any load studied."
