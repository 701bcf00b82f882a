"""Requests: what they may be, and their load."""

from __future__ import annotations

import numpy as np
import pytest

from draftsmith.errors import DraftsmithError
from draftsmith.serving.requests import Requests, make_requests


def requests(**changes: object) -> Requests:
    fields = {"arrival_s": [1.0, 3.0, 2.0], "prompt_tokens": [5, 6, 7], "output_tokens": [2, 4, 9],
              "domain": ["chat", "math", "chat"]} | changes  # fmt: skip
    return make_requests(fields.pop("arrival_s"), **fields)  # type: ignore[arg-type]


def test_what_is_not_said() -> None:
    found = requests()
    assert len(found) == 3
    assert (found.domains, found.domain.tolist()) == (("chat", "math"), [0, 1, 0])
    assert found.deadline_s.tolist() == [np.inf] * 3
    assert found.cached_tokens.tolist() == [0, 0, 0]
    assert found.follows.tolist() == [-1, -1, -1]
    assert found.independent.all()


def test_the_load_is_that_between_first_and_last_arrival() -> None:
    found = requests()
    assert found.offered_requests_per_s == 1.0  # two more within two seconds
    assert found.offered_tokens_per_s == 5.0


@pytest.mark.parametrize(
    "without", [{"arrival_s": [2.0, 2.0, 2.0]}, {"follows": [-1, 0, -1]}]
)  # fmt: skip
def test_requests_without_a_load_of_their_own(without: dict[str, object]) -> None:
    found = requests(**without)
    assert found.offered_requests_per_s is None
    assert found.offered_tokens_per_s is None
    with pytest.raises(DraftsmithError, match="no load to scale"):
        found.at_load(1.0)


def test_a_single_request_is_no_load() -> None:
    assert make_requests([4.0], prompt_tokens=[1], output_tokens=[1], domain=["a"]).offered_requests_per_s is None


def test_another_load_draws_arrivals_together() -> None:
    found = requests().at_load(4.0)
    assert found.arrival_s.tolist() == [1.0, 1.5, 1.25]
    assert found.offered_requests_per_s == 4.0
    assert found.output_tokens.tolist() == [2, 4, 9]
    with pytest.raises(DraftsmithError, match="the load of a workload: got 0"):
        requests().at_load(0.0)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (
            {"arrival_s": [1.0, -1.0, 2.0]},
            r"arrival_s of a request: got -1.0, expected finite .* \(request 2\)",
        ),
        ({"arrival_s": [1.0, 2.0, float("inf")]}, r"arrival_s of a request: got inf, .* \(request 3\)"),
        ({"arrival_s": [1.0, 2.0]}, r"arrival_s of a workload: got float64 of shape \(2,\), expected 3 numbers"),
        ({"prompt_tokens": [5, 0, 7]}, r"prompt_tokens of a request: got 0, expected >= 1 \(request 2\)"),
        ({"prompt_tokens": [5, 6.5, 7]}, r"prompt_tokens of a request: got 6.5, expected a whole number"),
        ({"prompt_tokens": ["5", "6", "7"]}, "prompt_tokens of a workload: got <U1"),
        ({"output_tokens": [0, 4, 9]}, r"output_tokens of a request: got 0, expected >= 1 \(request 1\)"),
        ({"deadline_s": [1.0, 0.0, 1.0]}, r"deadline_s of a request: got 0.0, expected seconds > 0 \(request 2\)"),
        ({"cached_tokens": [0, 6, 0]}, r"cached_tokens of a request: got 6, .* \(request 2\)"),
        ({"cached_tokens": [-1, 0, 0]}, r"cached_tokens of a request: got -1, .* \(request 1\)"),
        ({"follows": [-1, 1, -1]}, r"follows of a request: got 1, expected an earlier request or -1 \(request 2\)"),
        ({"follows": [-2, -1, -1]}, r"follows of a request: got -2"),
        ({"follows": [-1, 0, 0]}, r"requests that follow it of a request: got 2, expected at most one \(request 1\)"),
    ],
)
def test_what_cannot_be_is_refused(wrong: dict[str, object], text: str) -> None:
    with pytest.raises(DraftsmithError, match=text):
        requests(**wrong)


def test_no_requests_are_no_workload() -> None:
    with pytest.raises(DraftsmithError, match="a workload without requests"):
        make_requests([], prompt_tokens=[], output_tokens=[], domain=[])
