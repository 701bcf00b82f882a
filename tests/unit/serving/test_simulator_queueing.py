"""The simulator against queueing theory: plain decoding, one server or several.

Waiting times of one run hang together, so that means are judged by batch means: the run is cut into batches much longer
than a busy period, and Student's t interval is that of their means.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from draftsmith.decoding.policies import verify_all
from draftsmith.serving.cost_table import CostTable
from draftsmith.serving.figures import measure
from draftsmith.serving.outcome import Outcome
from draftsmith.serving.recorded import plain_rounds
from draftsmith.serving.requests import make_requests
from draftsmith.serving.simulator import Limits, simulate
from draftsmith.serving.step_costs import StepCosts

STEP_S = 0.125
NUM_BATCHES = 20
LEVEL = 0.999
"""Of the interval: runs are seeded, so that it either covers or not for good."""


def serve(*, arrival_s: NDArray[np.float64], num_rounds: NDArray[np.int64], servers: int) -> Outcome:
    """One step of STEP_S seconds a token, whatever the batch, and a prefill that takes no time."""
    requests = make_requests(
        arrival_s, prompt_tokens=[1] * len(arrival_s), output_tokens=num_rounds + 1, domain=["chat"] * len(arrival_s)
    )
    return simulate(
        requests, rounds=plain_rounds(["chat"]), policy=verify_all, limits=Limits(servers),
        costs=StepCosts(CostTable([1], steps_per_s=[1 / STEP_S])),
    )  # fmt: skip


def arrivals(num: int, *, rate: float, seed: int) -> NDArray[np.float64]:
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, num))


def assert_mean(values: NDArray[np.float64], expected: float, *, skip: int) -> None:
    means = np.array([part.mean() for part in np.array_split(values[skip:], NUM_BATCHES)])
    low, high = stats.t.interval(LEVEL, NUM_BATCHES - 1, means.mean(), stats.sem(means))
    assert low <= expected <= high
    assert high - low < 0.6 * expected, "the interval says nothing"


@pytest.mark.parametrize("load", [0.3, 0.6])
def test_one_server_with_equal_work(load: float) -> None:
    """M/D/1: mean wait = load D / (2 (1 - load))."""
    found = serve(arrival_s=arrivals(12_000, rate=load / STEP_S, seed=1), num_rounds=np.full(12_000, 1), servers=1)
    assert_mean(found.admitted_s - found.arrival_s, load * STEP_S / (2 * (1 - load)), skip=1_000)


def test_one_server_with_geometric_work() -> None:
    """M/G/1 by Pollaczek and Khinchine: mean wait = rate E[S^2] / (2 (1 - load))."""
    mean_rounds, load = 4.0, 0.6
    work = np.random.default_rng(2).geometric(1 / mean_rounds, 8_000)
    rate = load / (mean_rounds * STEP_S)
    found = serve(arrival_s=arrivals(8_000, rate=rate, seed=3), num_rounds=work, servers=1)
    second = (2 - 1 / mean_rounds) * mean_rounds**2 * STEP_S**2
    assert_mean(found.admitted_s - found.arrival_s, rate * second / (2 * (1 - load)), skip=800)


def test_one_server_by_lindleys_recursion() -> None:
    """Not in the mean but one by one: who comes waits for what the one before him still had to wait and to do."""
    work = np.random.default_rng(5).geometric(0.4, 500)
    times = arrivals(500, rate=0.9 / (2.5 * STEP_S), seed=6)
    found = serve(arrival_s=times, num_rounds=work, servers=1)
    waits = [0.0]
    for before in range(499):
        waits.append(max(0.0, waits[-1] + work[before] * STEP_S - (times[before + 1] - times[before])))
    assert found.admitted_s - found.arrival_s == pytest.approx(waits, abs=1e-9)
    assert max(waits) > 10 * STEP_S


def test_several_servers() -> None:
    """M/M/c by Erlang's C. Steps are short against the work, so that geometric is nearly exponential; who comes waits
    half a step more, for the step in progress."""
    servers, mean_rounds, load = 3, 25.0, 0.7
    work = np.random.default_rng(7).geometric(1 / mean_rounds, 6_000)
    service = mean_rounds * STEP_S
    rate = load * servers / service
    found = serve(arrival_s=arrivals(6_000, rate=rate, seed=8), num_rounds=work, servers=servers)
    offered = load * servers
    last = offered**servers / math.factorial(servers) / (1 - load)
    erlang_c = last / (sum(offered**k / math.factorial(k) for k in range(servers)) + last)
    busy = 1 - 1 / (sum(offered**k / math.factorial(k) for k in range(servers)) + last)
    expected = erlang_c * service / (servers * (1 - load)) + (busy - erlang_c) * STEP_S / 2
    assert_mean(found.admitted_s - found.arrival_s, expected, skip=600)


def test_littles_law() -> None:
    """Requests in flight, in the mean over time, are the rate of arrival times how long one is in flight."""
    work = np.random.default_rng(9).geometric(0.1, 2_000)
    found = serve(arrival_s=arrivals(2_000, rate=2.0, seed=10), num_rounds=work, servers=4)
    figures = measure(found)
    busy = float(found.steps.seconds.sum())
    assert figures.mean_concurrency is not None
    in_flight = float((found.finish_s - found.first_token_s).mean())
    assert figures.mean_concurrency * busy == pytest.approx(len(work) * in_flight, rel=1e-9)


def test_overload_writes_at_the_engines_rate() -> None:
    """Four servers, all there from the beginning: four tokens a step."""
    found = serve(arrival_s=np.zeros(400), num_rounds=np.full(400, 50), servers=4)
    figures = measure(found)
    assert figures.requests_per_s == pytest.approx(4 / (50 * STEP_S))
    assert figures.tokens_per_s == pytest.approx(51 * 4 / (50 * STEP_S))
