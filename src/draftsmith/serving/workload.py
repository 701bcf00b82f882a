"""Workloads made of a few numbers: requests that come one by one, in bursts, by the time of day, from users or agents.

Each is a pure function of its arguments and a seed. Arrivals, lengths, domains and the like are drawn from streams of
their own, and an arrival process is a rescaling of time of one process of rate 1: the same seed at another load gives
the same requests, closer together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, auto

import numpy as np
from numpy.random import Generator

from draftsmith.errors import DraftsmithError
from draftsmith.serving.requests import Floats, Ints, Requests, make_requests


@dataclass(frozen=True)
class TokenLaw:
    """Numbers of tokens, log-normal: half of them up to `median`, the logarithm's standard deviation `spread`.

    Rounded, and those outside `low`..`high` are moved to its ends. A spread of 0 gives `median` always.
    """

    median: float
    spread: float
    low: int
    high: int

    def __post_init__(self) -> None:
        if not (1 <= self.low <= self.median <= self.high and 0 <= self.spread < float("inf")):
            raise DraftsmithError(
                "a law of numbers of tokens", got=self, expected="1 <= low <= median <= high and a spread >= 0"
            )

    def draw(self, rng: Generator, num: int) -> Ints:
        """[num]"""
        drawn = self.median * np.exp(self.spread * rng.standard_normal(num))
        return np.clip(np.rint(drawn), self.low, self.high).astype(np.int64)


@dataclass(frozen=True)
class Deadline:
    """By when a request must be finished: seconds for its first token, and so many more for each of its tokens."""

    first_token_s: float
    per_token_s: float

    def __post_init__(self) -> None:
        if not (self.first_token_s >= 0 and self.per_token_s >= 0 and self.first_token_s + self.per_token_s > 0):
            raise DraftsmithError("a deadline", got=self, expected="seconds >= 0, not both 0")

    def seconds(self, output_tokens: Ints) -> Floats:
        """[n], from arrival on."""
        return self.first_token_s + self.per_token_s * output_tokens.astype(np.float64)


@dataclass(frozen=True)
class RequestMix:
    """What requests are like. `domains` are shares, of whatever sum; without a deadline there is none."""

    prompt_tokens: TokenLaw
    output_tokens: TokenLaw
    domains: Mapping[str, float]
    deadline: Deadline | None = None

    def __post_init__(self) -> None:
        check_domains(self.domains)


@dataclass(frozen=True)
class AgentMix:
    """What the sessions of an agent are like: turns that go back to a context which grows by what was said in each.

    A session begins with a prompt of `context_tokens`; every turn adds its answer and `result_tokens` of what a tool
    said to it, which alone need prefill: all before is cached. The number of turns is geometric with mean
    `mean_turns`, the tool runs for an exponential time of mean `tool_s` seconds.
    """

    context_tokens: TokenLaw
    result_tokens: TokenLaw
    output_tokens: TokenLaw
    domains: Mapping[str, float]
    mean_turns: float
    tool_s: float
    deadline: Deadline | None = None

    def __post_init__(self) -> None:
        check_domains(self.domains)
        if not 1 <= self.mean_turns < float("inf"):
            raise DraftsmithError("mean_turns of an agent's session", got=self.mean_turns, expected=">= 1")
        _check_seconds("tool_s of an agent's session", self.tool_s)


class _Stream(IntEnum):
    ARRIVALS = 0
    PHASES = auto()
    PROMPTS = auto()
    OUTPUTS = auto()
    DOMAINS = auto()
    TURNS = auto()
    PAUSES = auto()
    RESULTS = auto()


def poisson(mix: RequestMix, *, requests_per_s: float, num_requests: int, seed: int) -> Requests:
    """Arrivals that know nothing of each other."""
    _check_rate(requests_per_s)
    return _open_loop(mix, _unit_arrivals(num_requests, seed) / requests_per_s, seed=seed)


def bursty(
    mix: RequestMix,
    *,
    requests_per_s: float,
    burst_factor: float,
    burst_share: float,
    burst_s: float,
    num_requests: int,
    seed: int,
) -> Requests:
    """A Markov-modulated Poisson process of two phases: in a burst the rate is `burst_factor` times that of the calm.

    Bursts are exponential with mean `burst_s` seconds and take `burst_share` of the time; the calm between them is
    exponential, too. `requests_per_s` is the mean over both.
    """
    _check_rate(requests_per_s)
    _check_count("num_requests", num_requests)
    if not (burst_factor >= 1 and 0 < burst_share < 1 and 0 < burst_s < float("inf")):
        raise DraftsmithError(
            "bursts", got=f"burst_factor {burst_factor}, burst_share {burst_share}, burst_s {burst_s}",
            expected="burst_factor >= 1, burst_share between 0 and 1, burst_s > 0",
        )  # fmt: skip
    calm_rate = requests_per_s / (burst_share * burst_factor + 1 - burst_share)
    means = np.array([burst_s, burst_s * (1 - burst_share) / burst_share])
    rates = np.array([burst_factor * calm_rate, calm_rate])
    rng, unit = _rng(seed, _Stream.PHASES), _unit_arrivals(num_requests, seed)
    phase = int(rng.random() >= burst_share)
    times, areas = [0.0], [0.0]  # at the ends of phases: the clock, and the arrivals that are expected by then
    while areas[-1] < unit[-1]:
        seconds = means[phase] * rng.standard_exponential()
        times.append(times[-1] + seconds)
        areas.append(areas[-1] + seconds * rates[phase])
        phase = 1 - phase
    return _open_loop(mix, np.interp(unit, areas, times), seed=seed)


def diurnal(
    mix: RequestMix, *, requests_per_s: float, depth: float, period_s: float, num_requests: int, seed: int
) -> Requests:
    """Poisson arrivals whose rate is `requests_per_s` (1 - `depth` cos(2 pi t / `period_s`)): the night comes first."""
    _check_rate(requests_per_s)
    if not (0 <= depth <= 1 and 0 < period_s < float("inf")):
        raise DraftsmithError(
            "a day", got=f"depth {depth}, period_s {period_s}", expected="depth from 0 to 1, period_s > 0"
        )
    unit, angular = _unit_arrivals(num_requests, seed), 2 * np.pi / period_s
    # Expected arrivals by t lie within depth / angular seconds of those at the mean rate; halve that to the last bit.
    low, high = (np.maximum(unit / requests_per_s + sign * depth / angular, 0.0) for sign in (-1, 1))
    while True:
        middle = (low + high) / 2
        if ((middle <= low) | (middle >= high)).all():
            return _open_loop(mix, middle, seed=seed)
        early = requests_per_s * (middle - depth * np.sin(angular * middle) / angular) < unit
        low, high = np.where(early, middle, low), np.where(early, high, middle)


def closed_loop(
    mix: RequestMix, *, num_users: int, requests_per_user: int, think_s: float = 0.0, seed: int
) -> Requests:
    """`num_users` who each send a request, wait for its end, think for an exponential time of mean `think_s`, and send
    the next.

    All begin at second 0. Without thought so many requests are in flight until the first user has had the last answer.
    """
    _check_count("num_users", num_users)
    _check_count("requests_per_user", requests_per_user)
    _check_seconds("think_s", think_s)
    num = num_users * requests_per_user
    follows = np.maximum(np.arange(num) - num_users, -1)
    pauses = think_s * _rng(seed, _Stream.PAUSES).standard_exponential(num)
    return _requests(mix, np.where(follows < 0, 0.0, pauses), follows=follows, seed=seed)


def agentic(mix: AgentMix, *, sessions_per_s: float, num_sessions: int, seed: int) -> Requests:
    """Sessions of an agent, which begin as a Poisson process; the turns of each follow each other."""
    _check_rate(sessions_per_s)
    begins = _unit_arrivals(num_sessions, seed) / sessions_per_s
    turns = _rng(seed, _Stream.TURNS).geometric(1 / mix.mean_turns, num_sessions)
    num, first = int(turns.sum()), np.cumsum(turns) - turns
    is_first = np.zeros(num, np.bool_)
    is_first[first] = True
    outputs = mix.output_tokens.draw(_rng(seed, _Stream.OUTPUTS), num)
    results = mix.result_tokens.draw(_rng(seed, _Stream.RESULTS), num)  # before each turn; none before a first
    added = np.where(is_first, mix.context_tokens.draw(_rng(seed, _Stream.PROMPTS), num), results)
    before = np.cumsum(added + outputs) - (added + outputs)  # in all sessions
    cached = before - np.repeat(before[first], turns)
    pauses = mix.tool_s * _rng(seed, _Stream.PAUSES).standard_exponential(num)
    pauses[first] = begins
    return make_requests(
        pauses,
        prompt_tokens=cached + added,
        output_tokens=outputs,
        domain=np.repeat(_draw_domains(mix.domains, num_sessions, seed=seed), turns).tolist(),
        deadline_s=None if mix.deadline is None else mix.deadline.seconds(outputs),
        cached_tokens=cached,
        follows=np.where(is_first, -1, np.arange(num) - 1),
    )


def check_domains(domains: Mapping[str, float]) -> None:
    """Raises DraftsmithError unless shares are numbers >= 0, not all 0."""
    shares = list(domains.values())
    if not all(0 <= share < float("inf") for share in shares) or sum(shares) <= 0:
        raise DraftsmithError("shares of domains", got=dict(domains), expected="numbers >= 0, not all 0")


def _open_loop(mix: RequestMix, arrival_s: Floats, *, seed: int) -> Requests:
    return _requests(mix, arrival_s, follows=None, seed=seed)


def _requests(mix: RequestMix, arrival_s: Floats, *, follows: Ints | None, seed: int) -> Requests:
    num = len(arrival_s)
    outputs = mix.output_tokens.draw(_rng(seed, _Stream.OUTPUTS), num)
    return make_requests(
        arrival_s,
        prompt_tokens=mix.prompt_tokens.draw(_rng(seed, _Stream.PROMPTS), num),
        output_tokens=outputs,
        domain=_draw_domains(mix.domains, num, seed=seed),
        deadline_s=None if mix.deadline is None else mix.deadline.seconds(outputs),
        follows=follows,
    )


def _draw_domains(domains: Mapping[str, float], num: int, *, seed: int) -> list[str]:
    shares = np.array(list(domains.values()), np.float64)
    chosen = _rng(seed, _Stream.DOMAINS).choice(len(shares), size=num, p=shares / shares.sum())
    return [list(domains)[index] for index in chosen.tolist()]


def _unit_arrivals(num: int, seed: int) -> Floats:
    """The first `num` arrivals of a Poisson process of rate 1."""
    _check_count("requests or sessions", num)
    return np.cumsum(_rng(seed, _Stream.ARRIVALS).standard_exponential(num))


def _rng(seed: int, stream: _Stream) -> Generator:
    return np.random.default_rng((seed, stream))


def _check_rate(rate: float) -> None:
    if not 0 < rate < float("inf"):
        raise DraftsmithError("the rate of a workload", got=rate, expected="> 0 a second")


def _check_count(name: str, count: int) -> None:
    if count < 1:
        raise DraftsmithError(f"{name} of a workload", got=count, expected=">= 1")


def _check_seconds(name: str, seconds: float) -> None:
    if not 0 <= seconds < float("inf"):
        raise DraftsmithError(name, got=seconds, expected="finite seconds >= 0")
