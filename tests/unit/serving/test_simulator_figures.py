"""Figures of a simulation, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from draftsmith.decoding.policies import verify_all
from draftsmith.errors import DraftsmithError
from draftsmith.serving.figures import Verification, measure
from draftsmith.serving.outcome import Outcome
from draftsmith.serving.requests import make_requests
from draftsmith.serving.simulator import Limits, simulate
from tests.unit.serving.test_simulator import COSTS, ROUNDS

# See `test_three_requests_by_hand`: first tokens at 1.75, 1.75 and 4.5; ends at 6.375, 3 and 5.75.


def three(deadlines: list[float]) -> Outcome:
    requests = make_requests(
        [0.0, 0.0, 2.5], prompt_tokens=[3, 2, 4], output_tokens=[6, 2, 4], domain=["chat"] * 3, deadline_s=deadlines
    )
    return simulate(requests, rounds=ROUNDS, policy=verify_all, costs=COSTS, limits=Limits(2))


def test_rates_and_goodput() -> None:
    figures = measure(three([6.0, 3.0, np.inf]))  # a is late by .375 s, b finishes just in time
    assert figures.seconds == 6.375
    assert figures.num_requests == 3
    assert figures.requests_per_s == pytest.approx(3 / 6.375)
    assert figures.tokens_per_s == pytest.approx(12 / 6.375)
    assert figures.share_in_time == pytest.approx(2 / 3)
    assert figures.goodput_requests_per_s == pytest.approx(2 / 6.375)
    assert figures.goodput_tokens_per_s == pytest.approx((2 + 4) / 6.375)


def test_latencies() -> None:
    figures = measure(three([np.inf] * 3)).latencies
    assert figures.ttft_s.mean == pytest.approx((1.75 + 1.75 + 2.0) / 3)
    assert figures.ttft_s.p50 == 1.75
    assert figures.ttft_s.p90 == pytest.approx(1.75 + 0.8 * 0.25)
    assert figures.ttft_s.p99 == pytest.approx(1.75 + 0.98 * 0.25)
    assert figures.end_to_end_s.mean == pytest.approx((6.375 + 3.0 + 3.25) / 3)
    assert figures.tpot_s is not None
    assert figures.tpot_s.mean == pytest.approx((4.625 / 5 + 1.25 / 1 + 1.25 / 3) / 3)
    assert figures.tokens_per_s_per_user is not None
    assert figures.tokens_per_s_per_user.mean == pytest.approx((5 / 4.625 + 1 / 1.25 + 3 / 1.25) / 3)
    assert figures.tokens_per_s_per_user.p50 == pytest.approx(5 / 4.625)
    assert figures.tokens_per_s_per_user.p95 == pytest.approx(5 / 4.625 + 0.9 * (3 / 1.25 - 5 / 4.625))


def test_verification_by_concurrency() -> None:
    figures = measure(three([np.inf] * 3))
    assert figures.verification == Verification(3, 5, accepted_length=9 / 5, mean_length=2.0, acceptance=7 / 10)
    assert figures.verification.budget == 3.0
    assert list(figures.by_concurrency) == [1, 2]
    assert figures.by_concurrency[1] == Verification(1, 1, accepted_length=1.0, mean_length=2.0, acceptance=0.5)
    assert figures.by_concurrency[2] == Verification(2, 4, accepted_length=2.0, mean_length=2.0, acceptance=0.75)
    assert figures.mean_concurrency == pytest.approx((2 * 2.5 + 0.625) / 3.125)
    assert figures.draft_share == pytest.approx(0.625 / 3.125)


def test_a_stretch_of_time() -> None:
    """From 2 to 5 s: c arrives; b finishes with 2 tokens; c's first token and the 4 tokens of the step that began."""
    figures = measure(three([np.inf, 3.0, np.inf]), since_s=2.0, until_s=5.0)
    assert figures.seconds == 3.0
    assert figures.num_requests == 1
    assert figures.requests_per_s == pytest.approx(1 / 3)
    assert figures.goodput_tokens_per_s == pytest.approx(2 / 3)
    assert figures.tokens_per_s == pytest.approx((1 + 4) / 3)
    assert figures.latencies.end_to_end_s.mean == 3.25
    assert figures.verification == Verification(1, 2, accepted_length=2.0, mean_length=2.0, acceptance=0.5)
    assert figures.by_concurrency == {2: figures.verification}


def test_a_stretch_holds_its_beginning_and_not_its_end() -> None:
    found = three([np.inf] * 3)
    assert measure(found, since_s=2.5, until_s=3.0).num_requests == 1
    assert measure(found, since_s=2.5, until_s=3.0).requests_per_s == 0
    with pytest.raises(DraftsmithError, match="no request arrived"):
        measure(found, since_s=0.5, until_s=2.5)
    with pytest.raises(DraftsmithError, match="no request arrived in the time to be measured: got 3 s to 2 s"):
        measure(found, since_s=3.0, until_s=2.0)


def test_what_never_was_is_none() -> None:
    requests = make_requests([0.0], prompt_tokens=[3], output_tokens=[1], domain=["chat"])
    figures = measure(simulate(requests, rounds=ROUNDS, policy=verify_all, costs=COSTS, limits=Limits(2)))
    assert figures.latencies.tpot_s is None
    assert figures.latencies.tokens_per_s_per_user is None
    assert (figures.verification, figures.by_concurrency) == (None, {})
    assert (figures.mean_concurrency, figures.draft_share) == (None, None)
    assert figures.tokens_per_s == pytest.approx(1 / 1.25)


def test_nothing_verified_has_no_acceptance() -> None:
    requests = make_requests([0.0], prompt_tokens=[3], output_tokens=[4], domain=["chat"])
    found = simulate(requests, rounds=ROUNDS, policy=lambda _: [0], costs=COSTS, limits=Limits(2))
    assert measure(found).verification == Verification(3, 3, accepted_length=1.0, mean_length=0.0, acceptance=None)
