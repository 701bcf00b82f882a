"""Figures of serving, read off a simulation: rates, latencies, deadlines, and how much of the blocks was verified."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from draftsmith.errors import DraftsmithError
from draftsmith.serving.outcome import Outcome, Steps
from draftsmith.serving.requests import Bools, Floats


@dataclass(frozen=True)
class Spread:
    """Mean and quantiles; a quantile between two values lies on the line between them."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float


@dataclass(frozen=True)
class Latencies:
    """Of requests; seconds, except for tokens per second and user.

    TTFT runs from a request's arrival to its first token, TPOT is the mean time of a token after that. Tokens per
    second and user, by which the paper measures production, is its inverse, request by request. Both are None if no
    request had a second token.
    """

    ttft_s: Spread
    tpot_s: Spread | None
    end_to_end_s: Spread
    tokens_per_s_per_user: Spread | None


@dataclass(frozen=True)
class Verification:
    """How far blocks were verified, and what came of it, over some steps; a round is one request in one step."""

    num_steps: int
    num_rounds: int
    accepted_length: float  # tokens committed a round, bonus token included, the last round cut at a request's length
    mean_length: float  # draft tokens verified a round
    acceptance: float | None  # of the draft tokens that were verified; None if none was

    @property
    def budget(self) -> float:
        """Tokens verified a round, the anchor included (DSpark section 5)."""
        return 1.0 + self.mean_length


@dataclass(frozen=True)
class Figures:
    """Figures of a stretch of the simulated clock.

    Rates count what was finished or written in the stretch; latencies and `share_in_time` are those of the requests
    that arrived in it. A request without a deadline is in time. Concurrency and verification are those of the steps
    that began in it; `mean_concurrency` and `draft_share` are means over their time. What is None had no step.
    """

    seconds: float
    num_requests: int  # that arrived
    requests_per_s: float
    tokens_per_s: float
    goodput_requests_per_s: float  # finished in time
    goodput_tokens_per_s: float  # of those
    share_in_time: float
    latencies: Latencies
    mean_concurrency: float | None
    draft_share: float | None
    verification: Verification | None
    by_concurrency: dict[int, Verification]  # ascending requests in flight


def measure(outcome: Outcome, *, since_s: float = 0.0, until_s: float | None = None) -> Figures:
    """Figures of [`since_s`, `until_s`), by default of all to the last token.

    For a steady state leave out how it began, and the end, when no more requests come.
    Raises DraftsmithError if no request arrived in that time.
    """
    end_s = float(outcome.finish_s.max()) if until_s is None else until_s
    edge = np.inf if until_s is None else until_s

    def within(times: Floats) -> Bools:
        return (times >= since_s) & (times < edge)

    arrived, finished, steps = within(outcome.arrival_s), within(outcome.finish_s), within(outcome.steps.start_s)
    if not arrived.any() or end_s <= since_s:
        raise DraftsmithError("no request arrived in the time to be measured", got=f"{since_s:g} s to {end_s:g} s")
    seconds, in_time = end_s - since_s, outcome.in_time
    written = int(within(outcome.first_token_s).sum()) + int(outcome.steps.committed[steps].sum())
    spent = outcome.steps.seconds[steps]
    busy = float(spent.sum())
    return Figures(
        seconds=seconds,
        num_requests=int(arrived.sum()),
        requests_per_s=int(finished.sum()) / seconds,
        tokens_per_s=written / seconds,
        goodput_requests_per_s=int((finished & in_time).sum()) / seconds,
        goodput_tokens_per_s=int(outcome.requests.output_tokens[finished & in_time].sum()) / seconds,
        share_in_time=float(in_time[arrived].mean()),
        latencies=_latencies(outcome, arrived),
        mean_concurrency=float(outcome.steps.num_requests[steps] @ spent) / busy if busy else None,
        draft_share=float(outcome.steps.draft_s[steps].sum()) / busy if busy else None,
        verification=_verification(outcome.steps, steps) if steps.any() else None,
        by_concurrency={
            int(number): _verification(outcome.steps, steps & (outcome.steps.num_requests == number))
            for number in np.unique(outcome.steps.num_requests[steps])
        },
    )


def _latencies(outcome: Outcome, chosen: Bools) -> Latencies:
    later = outcome.requests.output_tokens[chosen] - 1
    decoding = (outcome.finish_s - outcome.first_token_s)[chosen]
    several = later > 0
    later, decoding = later[several], decoding[several]
    return Latencies(
        ttft_s=_spread((outcome.first_token_s - outcome.arrival_s)[chosen]),
        tpot_s=_spread(decoding / later) if several.any() else None,
        end_to_end_s=_spread((outcome.finish_s - outcome.arrival_s)[chosen]),
        tokens_per_s_per_user=_spread(later / decoding) if several.any() else None,
    )


def _verification(steps: Steps, chosen: Bools) -> Verification:
    num_rounds, verified = int(steps.num_requests[chosen].sum()), int(steps.verified[chosen].sum())
    return Verification(
        num_steps=int(chosen.sum()),
        num_rounds=num_rounds,
        accepted_length=int(steps.committed[chosen].sum()) / num_rounds,
        mean_length=verified / num_rounds,
        acceptance=int(steps.accepted[chosen].sum()) / verified if verified else None,
    )


def _spread(values: Floats) -> Spread:
    return Spread(float(values.mean()), *np.quantile(values, (0.5, 0.9, 0.95, 0.99)).tolist())
