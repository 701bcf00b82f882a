"""Workloads against the laws that they are drawn from."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from scipy import integrate, stats

from draftsmith.errors import DraftsmithError
from draftsmith.serving.requests import Requests
from draftsmith.serving.workload import (
    AgentMix,
    Deadline,
    RequestMix,
    TokenLaw,
    agentic,
    bursty,
    closed_loop,
    diurnal,
    poisson,
)

PROMPTS, OUTPUTS = TokenLaw(400, 0.8, 8, 4_000), TokenLaw(120, 0.6, 2, 900)
MIX = RequestMix(PROMPTS, OUTPUTS, {"chat": 3.0, "math": 1.0}, Deadline(2.0, 0.05))
AGENT = AgentMix(
    context_tokens=TokenLaw(8_000, 0.3, 2_000, 20_000), result_tokens=TokenLaw(300, 0.5, 10, 2_000),
    output_tokens=TokenLaw(40, 0.4, 4, 200), domains={"code": 1.0, "chat": 1.0}, mean_turns=6.0, tool_s=1.5,
    deadline=Deadline(0.5, 0.02),
)  # fmt: skip
ALMOST_SURE = 1e-3


def columns(found: Requests) -> dict[str, list[object]]:
    return {field.name: list(getattr(found, field.name)) for field in dataclasses.fields(found)}


BURSTS = {"burst_factor": 6.0, "burst_share": 0.2, "burst_s": 5.0}
DAY = {"depth": 0.8, "period_s": 100.0}
MAKERS = {
    "poisson": lambda seed: poisson(MIX, requests_per_s=2.0, num_requests=200, seed=seed),
    "bursty": lambda seed: bursty(MIX, requests_per_s=2.0, num_requests=200, seed=seed, **BURSTS),
    "diurnal": lambda seed: diurnal(MIX, requests_per_s=2.0, num_requests=200, seed=seed, **DAY),
    "closed_loop": lambda seed: closed_loop(MIX, num_users=10, requests_per_user=20, think_s=1.0, seed=seed),
    "agentic": lambda seed: agentic(AGENT, sessions_per_s=0.5, num_sessions=40, seed=seed),
}


@pytest.mark.parametrize("name", MAKERS)
def test_the_seed_decides(name: str) -> None:
    assert columns(MAKERS[name](3)) == columns(MAKERS[name](3))
    other = MAKERS[name](4)
    assert columns(MAKERS[name](3))["output_tokens"] != columns(other)["output_tokens"]


def test_half_of_the_lengths_are_up_to_the_median() -> None:
    found = poisson(MIX, requests_per_s=1.0, num_requests=20_000, seed=0)
    logs = np.log(found.prompt_tokens / 400)
    assert abs(np.median(logs)) < 0.03
    inside = (found.prompt_tokens > 8) & (found.prompt_tokens < 4_000)
    assert inside.mean() > 0.99
    assert logs[inside].std() == pytest.approx(0.8, rel=0.05)
    assert found.prompt_tokens.min() >= 8
    assert found.prompt_tokens.max() == 4_000
    assert found.deadline_s == pytest.approx(2.0 + 0.05 * found.output_tokens)
    share = float((found.domain == found.domains.index("chat")).mean())
    assert stats.binomtest(round(share * 20_000), 20_000, 0.75).pvalue > ALMOST_SURE


def test_a_law_without_spread_is_one_number() -> None:
    assert set(TokenLaw(7, 0.0, 1, 9).draw(np.random.default_rng(0), 50).tolist()) == {7}


def test_poisson_gaps_are_exponential() -> None:
    found = poisson(MIX, requests_per_s=5.0, num_requests=4_000, seed=1)
    gaps = np.diff(found.arrival_s, prepend=0.0)
    assert stats.kstest(gaps, stats.expon(scale=0.2).cdf).pvalue > ALMOST_SURE
    assert found.offered_requests_per_s == pytest.approx(5.0, rel=4 / math.sqrt(4_000))
    assert found.offered_tokens_per_s == pytest.approx(found.offered_requests_per_s * found.output_tokens.mean())


def test_what_is_drawn_is_drawn_apart() -> None:
    """No column says anything of another: ranks of each pair are uncorrelated."""
    found = poisson(dataclasses.replace(MIX, deadline=None), requests_per_s=1.0, num_requests=3_000, seed=8)
    drawn = [np.diff(found.arrival_s, prepend=0.0), found.prompt_tokens, found.output_tokens, found.domain]
    for first, second in itertools.combinations(drawn, 2):
        assert stats.spearmanr(first, second).pvalue > ALMOST_SURE


def test_another_load_brings_the_same_requests_closer_together() -> None:
    slow = poisson(MIX, requests_per_s=1.0, num_requests=50, seed=2)
    fast = poisson(MIX, requests_per_s=4.0, num_requests=50, seed=2)
    assert fast.arrival_s == pytest.approx(slow.arrival_s / 4)
    assert {**columns(fast), "arrival_s": 0} == {**columns(slow), "arrival_s": 0}


def test_another_law_of_lengths_leaves_the_rest_alone() -> None:
    other = poisson(
        dataclasses.replace(MIX, output_tokens=TokenLaw(9, 0.1, 1, 20)), requests_per_s=1.0, num_requests=50, seed=2
    )
    found = poisson(MIX, requests_per_s=1.0, num_requests=50, seed=2)
    for name in ("arrival_s", "prompt_tokens", "domain"):
        assert columns(other)[name] == columns(found)[name]


def test_bursts_without_a_difference_are_poisson() -> None:
    found = bursty(MIX, requests_per_s=2.0, burst_factor=1.0, burst_share=0.3, burst_s=4.0, num_requests=300, seed=5)
    assert found.arrival_s == pytest.approx(poisson(MIX, requests_per_s=2.0, num_requests=300, seed=5).arrival_s)


def test_bursts_cluster_as_the_law_says() -> None:
    """Rate and the limit of variance over mean of the counts in a long window, of a Markov-modulated Poisson process
    of two phases (Fischer and Meier-Hellstern 1993): 1 + 2 a b (x - y)^2 / ((a + b)^2 (x b + y a)), with rates x, y
    and a, b those of leaving them."""
    rate, factor, share, burst_s = 3.0, 6.0, 0.2, 2.0
    found = bursty(
        MIX, requests_per_s=rate, burst_factor=factor, burst_share=share, burst_s=burst_s, num_requests=300_000, seed=6
    )
    assert found.offered_requests_per_s == pytest.approx(rate, rel=0.02)
    calm = rate / (share * factor + 1 - share)
    x, y, a, b = factor * calm, calm, 1 / burst_s, share / (burst_s * (1 - share))
    limit = 1 + 2 * a * b * (x - y) ** 2 / ((a + b) ** 2 * (x * b + y * a))
    window = 200.0
    counts = np.bincount((found.arrival_s / window).astype(int))[:-1]
    assert len(counts) > 400
    assert counts.var() / counts.mean() == pytest.approx(limit, rel=0.25)
    assert limit > 5  # that of a Poisson process is 1


def test_bursts_begin_as_they_go_on() -> None:
    """The first phase is a burst as often as any."""
    firsts = [
        bursty(MIX, requests_per_s=1.0, burst_factor=1e6, burst_share=0.4, burst_s=100.0, num_requests=1, seed=seed)
        for seed in range(300)
    ]
    early = sum(float(found.arrival_s[0]) < 10.0 for found in firsts)
    assert stats.binomtest(early, 300, 0.4).pvalue > ALMOST_SURE


def test_a_day_without_a_night_is_poisson() -> None:
    found = diurnal(MIX, requests_per_s=2.0, depth=0.0, period_s=60.0, num_requests=300, seed=5)
    assert found.arrival_s == pytest.approx(poisson(MIX, requests_per_s=2.0, num_requests=300, seed=5).arrival_s)


def test_a_day_rescales_time() -> None:
    """As many arrivals are expected by each arrival as came in the process of rate 1 (by quadrature)."""
    found = diurnal(MIX, requests_per_s=2.0, depth=0.9, period_s=40.0, num_requests=200, seed=5)
    unit = poisson(MIX, requests_per_s=1.0, num_requests=200, seed=5).arrival_s
    for index in (0, 3, 50, 120, 199):
        end = float(found.arrival_s[index])
        points = np.arange(0.0, end, 20.0).tolist()
        expected, _ = integrate.quad(lambda t: 2.0 * (1 - 0.9 * math.cos(2 * math.pi * t / 40.0)), 0.0, end,
                                     points=points or None, limit=500)  # fmt: skip
        assert unit[index] == pytest.approx(expected, rel=1e-7)


def test_the_night_comes_first() -> None:
    found = diurnal(MIX, requests_per_s=20.0, depth=1.0, period_s=100.0, num_requests=20_000, seed=7)
    phase = found.arrival_s % 100.0
    quarters = np.histogram(phase, bins=4, range=(0, 100))[0]
    # Integrals of 1 - cos over quarters of a turn: pi/2 - 1, pi/2 + 1, pi/2 + 1, pi/2 - 1.
    shares = np.array([math.pi / 2 - 1, math.pi / 2 + 1, math.pi / 2 + 1, math.pi / 2 - 1]) / (2 * math.pi)
    whole = found.arrival_s < 100.0 * (found.arrival_s[-1] // 100.0)
    quarters = np.histogram(phase[whole], bins=4, range=(0, 100))[0]
    assert stats.chisquare(quarters, shares * quarters.sum()).pvalue > ALMOST_SURE


def test_users_of_a_closed_loop() -> None:
    found = closed_loop(MIX, num_users=3, requests_per_user=4, think_s=2.0, seed=1)
    assert found.follows.tolist() == [-1, -1, -1, 0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert found.arrival_s[:3].tolist() == [0.0, 0.0, 0.0]
    assert (found.arrival_s[3:] > 0).all()
    assert found.offered_requests_per_s is None
    long = closed_loop(MIX, num_users=2, requests_per_user=2_000, think_s=2.0, seed=1)
    assert stats.kstest(long.arrival_s[2:], stats.expon(scale=2.0).cdf).pvalue > ALMOST_SURE
    assert (closed_loop(MIX, num_users=3, requests_per_user=4, seed=1).arrival_s == 0).all()


def test_sessions_of_an_agent() -> None:
    """Contexts grow by answers and results: turn by turn, by hand."""
    found = agentic(AGENT, sessions_per_s=0.5, num_sessions=300, seed=1)
    num_sessions, turns = 0, 0
    for index, follows in enumerate(found.follows.tolist()):
        turns += 1
        prompt, cached = int(found.prompt_tokens[index]), int(found.cached_tokens[index])
        if follows < 0:
            num_sessions += 1
            assert cached == 0
            assert 2_000 <= prompt <= 20_000
        else:
            assert follows == index - 1
            assert cached == found.prompt_tokens[index - 1] + found.output_tokens[index - 1]
            assert 10 <= prompt - cached <= 2_000
            assert found.domain[index] == found.domain[index - 1]
    assert num_sessions == 300
    assert turns / num_sessions == pytest.approx(6.0, rel=4 * math.sqrt(30 / 36 / 300))
    first = found.follows < 0
    assert (np.diff(found.arrival_s[first]) > 0).all()
    gaps = np.diff(found.arrival_s[first], prepend=0.0)
    assert stats.kstest(gaps, stats.expon(scale=2.0).cdf).pvalue > ALMOST_SURE
    assert stats.kstest(found.arrival_s[~first], stats.expon(scale=1.5).cdf).pvalue > ALMOST_SURE
    assert found.deadline_s == pytest.approx(0.5 + 0.02 * found.output_tokens)
    assert len(set(found.domain[first].tolist())) == 2


def one_burst(**changes: float) -> Requests:
    return bursty(MIX, requests_per_s=1.0, num_requests=1, seed=0, **(BURSTS | changes))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: TokenLaw(5, 0.1, 6, 9), "a law of numbers of tokens"),
        (lambda: TokenLaw(5, -0.1, 1, 9), "a law of numbers of tokens"),
        (lambda: TokenLaw(0.5, 0.1, 0, 9), "a law of numbers of tokens"),
        (lambda: Deadline(0.0, 0.0), "a deadline"),
        (lambda: Deadline(-1.0, 2.0), "a deadline"),
        (lambda: dataclasses.replace(MIX, domains={"chat": -1.0, "math": 2.0}), "shares of domains"),
        (lambda: dataclasses.replace(MIX, domains={"chat": 0.0}), "shares of domains"),
        (lambda: dataclasses.replace(MIX, domains={}), "shares of domains"),
        (lambda: dataclasses.replace(AGENT, domains={}), "shares of domains"),
        (lambda: dataclasses.replace(AGENT, mean_turns=0.5), "mean_turns of an agent's session: got 0.5"),
        (lambda: dataclasses.replace(AGENT, tool_s=-1.0), "tool_s of an agent's session"),
        (lambda: poisson(MIX, requests_per_s=0.0, num_requests=1, seed=0), "the rate of a workload: got 0.0"),
        (lambda: poisson(MIX, requests_per_s=1.0, num_requests=0, seed=0), "of a workload: got 0, expected >= 1"),
        (lambda: one_burst(burst_factor=0.5), "bursts: got burst_factor 0.5"),
        (lambda: one_burst(burst_share=1.0), "bursts: got .* burst_share 1.0"),
        (lambda: one_burst(burst_s=0.0), "bursts: got .* burst_s 0.0"),
        (lambda: diurnal(MIX, requests_per_s=1.0, depth=1.1, period_s=1.0, num_requests=1, seed=0), "a day: .* 1.1"),
        (lambda: closed_loop(MIX, num_users=0, requests_per_user=1, seed=0), "num_users of a workload"),
        (lambda: closed_loop(MIX, num_users=1, requests_per_user=1, think_s=-1.0, seed=0), "think_s: got -1.0"),
        (lambda: agentic(AGENT, sessions_per_s=-1.0, num_sessions=1, seed=0), "the rate of a workload"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(make, text: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(DraftsmithError, match=text):
        make()
