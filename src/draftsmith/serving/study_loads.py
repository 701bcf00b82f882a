"""Simulations of a study: a policy under one load, and what is read off it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from draftsmith.serving.contenders import PLAIN, Contender, Machine
from draftsmith.serving.cost_table import CostTable
from draftsmith.serving.figures import Figures, Spread, measure
from draftsmith.serving.outcome import Outcome
from draftsmith.serving.pareto import LoadPoint
from draftsmith.serving.requests import Floats, Requests
from draftsmith.serving.simulator import simulate
from draftsmith.serving.workload import RequestMix, closed_loop

NUM_BATCHES = 10
"""Stretches of equal time whose rates tell how noisy their mean is."""
PER_USER = 6
WARM_UP, COOL_DOWN = 0.15, 0.1
"""Shares of the arrivals of an open load that are served and not measured."""
OVERLOADED = 0.9
"""Finished requests an arrived one below which a load was too much, if some still wait at the end."""


def serve(machine: Machine, contender: Contender, requests: Requests, *, table: CostTable | None = None) -> Outcome:
    """`requests` under a policy; those who compare policies give all of them the same requests."""
    plain = contender.name == PLAIN
    raw = plain or contender.kind == "threshold"  # which is defined on raw confidences
    return simulate(
        requests,
        rounds=machine.plain if plain else machine.rounds,
        policy=contender.policy(machine, table=table),
        costs=machine.plain_costs if plain else machine.costs,
        limits=machine.limits,
        temperatures=None if raw else machine.temperatures,
        drafting=None if plain else contender.drafting(machine),
        seed=machine.seed,
    )


@dataclass(frozen=True)
class ClosedPoint:
    """A policy with so many users who always have a request in flight. `error` is relative: two standard errors.

    `seconds` [n] of the requests from arrival to end, the first and the last of every user left out: the same n
    requests under every policy.
    """

    policy: str
    concurrency: int
    error: float
    figures: Figures
    drafting_share: float  # of the rounds
    seconds: Floats

    @property
    def tokens_per_s(self) -> float:
        return self.figures.tokens_per_s

    @property
    def user(self) -> Spread:
        spread = self.figures.latencies.tokens_per_s_per_user
        if spread is None:  # every request had a single token
            return Spread(0.0, 0.0, 0.0, 0.0, 0.0)
        return spread

    @property
    def load_point(self) -> LoadPoint:
        return LoadPoint(self.concurrency, self.tokens_per_s, self.user.p50)

    def as_good_as(self, best: ClosedPoint) -> bool:
        """Whether these requests do not tell that `best` is faster: its gain is less than two standard errors.

        In a closed loop throughput is the inverse of the mean time of a request, so that the ratio of two policies is
        that of sums over the same requests, whose error is known from how it varies between them.
        """
        ratio = float(self.seconds.sum() / best.seconds.sum())
        spread = float((self.seconds - ratio * best.seconds).std(ddof=1)) * np.sqrt(len(self.seconds))
        return ratio - 1 <= 2 * spread / float(best.seconds.sum())

    def body(self, *, plain_tokens_per_s: float, on_frontier: bool) -> dict[str, Any]:
        found = self.figures.verification
        assert found is not None
        return {
            "concurrency": self.concurrency,
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_error": self.error,
            "user_tokens_per_s": {"mean": self.user.mean, "p50": self.user.p50},
            "speedup": self.tokens_per_s / plain_tokens_per_s,
            "accepted_length": found.accepted_length,
            "budget": found.budget,
            "acceptance": found.acceptance,
            "draft_share": self.figures.draft_share,
            "drafting_share": self.drafting_share,
            "mean_concurrency": self.figures.mean_concurrency,
            "num_requests": self.figures.num_requests,
            "num_rounds": found.num_rounds,
            "on_frontier": on_frontier,
        }


def closed_point(
    machine: Machine, contender: Contender, *, mix: RequestMix, concurrency: int, num_requests: int,
    table: CostTable | None = None,
) -> ClosedPoint:  # fmt: skip
    """A closed loop in its steady state: from when half of the first requests are done until the first user has had
    the last answer."""
    per_user = max(PER_USER, -(-num_requests // concurrency))
    requests = closed_loop(mix, num_users=concurrency, requests_per_user=per_user, seed=machine.seed)
    outcome = serve(machine, contender, requests, table=table)
    since = float(np.median(outcome.finish_s[:concurrency]))
    until = float(outcome.finish_s[-concurrency:].min())
    steps = outcome.steps
    chosen = (steps.start_s >= since) & (steps.start_s < until)
    rounds = int(steps.num_requests[chosen].sum())
    return ClosedPoint(
        contender.name,
        concurrency,
        _error(outcome, since=since, until=until),
        measure(outcome, since_s=since, until_s=until),
        int(steps.num_drafting[chosen].sum()) / rounds if contender.name != PLAIN else 0.0,
        (outcome.finish_s - outcome.arrival_s)[concurrency:-concurrency],
    )


def open_row(
    machine: Machine, contender: Contender, *, requests: Requests, workload: str, load: float | None
) -> dict[str, Any]:
    """Latencies, goodput and the like of requests that come when they come."""
    outcome = serve(machine, contender, requests)
    arrivals = np.sort(outcome.arrival_s)
    num = len(arrivals)
    since = float(arrivals[int(WARM_UP * num)])
    until = float(arrivals[max(int((1 - COOL_DOWN) * num) - 1, 0)])
    since, until = (since, until) if until > since else (float(arrivals[0]), float(outcome.finish_s.max()))
    figures = measure(outcome, since_s=since, until_s=until)
    latencies, found = figures.latencies, figures.verification
    last = int(np.searchsorted(outcome.steps.start_s, until)) - 1
    waiting = bool(outcome.steps.num_waiting[max(last, 0)] > 0)
    finished = figures.requests_per_s * figures.seconds
    busy = (outcome.steps.start_s >= since) & (outcome.steps.start_s < until)
    seconds = float(outcome.steps.seconds[busy].sum())
    return {
        "workload": workload,
        "load": load,
        "requests_per_s": figures.num_requests / figures.seconds,
        "policy": contender.name,
        "num_requests": figures.num_requests,
        "tokens_per_s": figures.tokens_per_s,
        "goodput_requests_per_s": figures.goodput_requests_per_s,
        "goodput_tokens_per_s": figures.goodput_tokens_per_s,
        "share_in_time": figures.share_in_time,
        "mean_concurrency": figures.mean_concurrency,
        "overloaded": waiting and finished < OVERLOADED * figures.num_requests,
        "ttft_s": asdict(latencies.ttft_s),
        "tpot_s": None if latencies.tpot_s is None else asdict(latencies.tpot_s),
        "end_to_end_s": asdict(latencies.end_to_end_s),
        "user_tokens_per_s": (
            None if latencies.tokens_per_s_per_user is None else asdict(latencies.tokens_per_s_per_user)
        ),
        "accepted_length": None if found is None else found.accepted_length,
        "budget": None if found is None else found.budget,
        "tokens_per_busy_s": int(outcome.steps.committed[busy].sum()) / seconds if seconds else None,
    }


def _error(outcome: Outcome, *, since: float, until: float) -> float:
    """Two standard errors of the tokens a second, over their mean, from stretches of equal time."""
    places = np.floor((outcome.steps.start_s - since) / (until - since) * NUM_BATCHES)
    inside = (places >= 0) & (places < NUM_BATCHES)
    tokens = np.bincount(places[inside].astype(np.int64), outcome.steps.committed[inside], minlength=NUM_BATCHES)
    return float(2 * tokens.std(ddof=1) / np.sqrt(NUM_BATCHES) / tokens.mean())
