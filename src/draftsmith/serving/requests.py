"""Requests that a simulation is offered: when they come, how long they are, what they are about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftsmith.errors import DraftsmithError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Requests:
    """n requests, as arrays; request i is row i of each. Made by `make_requests`, which checks them.

    A request that follows no other arrives at second `arrival_s`; one that follows another arrives `arrival_s` seconds
    after the other was finished (the turns of an agent, the users of a closed loop). `output_tokens` are all that it
    will be answered with, the token of the prefill included. Of its `prompt_tokens`, `cached_tokens` need no prefill.
    `deadline_s` counts from its arrival to its last token, infinite where there is none.
    """

    arrival_s: Floats  # [n]
    prompt_tokens: Ints  # [n]
    output_tokens: Ints  # [n]
    domains: tuple[str, ...]  # distinct names
    domain: Ints  # [n], index into `domains`
    deadline_s: Floats  # [n]
    cached_tokens: Ints  # [n], fewer than prompt_tokens
    follows: Ints  # [n], an earlier request or -1

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def independent(self) -> Bools:
        """[n]: follows no other."""
        return self.follows < 0

    @property
    def offered_requests_per_s(self) -> float | None:
        """Arrivals a second from the first to the last.

        None where requests wait for others, so that the load depends on how fast they are served, or all come at once.
        """
        if not self.independent.all() or len(self) < 2:
            return None
        span = float(np.ptp(self.arrival_s))
        return (len(self) - 1) / span if span > 0 else None

    @property
    def offered_tokens_per_s(self) -> float | None:
        """Output tokens a second that serving all requests as fast as they come takes; None as the load in requests."""
        rate = self.offered_requests_per_s
        return None if rate is None else rate * float(self.output_tokens.mean())

    def at_load(self, requests_per_s: float) -> Requests:
        """The same requests in the same order, their arrivals drawn together or apart to another load.

        Raises DraftsmithError where the requests have no load of their own, or for a load that is not above zero.
        """
        rate = self.offered_requests_per_s
        if rate is None:
            raise DraftsmithError(
                "these requests have no load to scale", expected="arrivals that do not wait for others"
            )
        if not 0 < requests_per_s < float("inf"):
            raise DraftsmithError("the load of a workload", got=requests_per_s, expected="> 0 requests a second")
        first = self.arrival_s.min()
        return replace(self, arrival_s=first + (self.arrival_s - first) * (rate / requests_per_s))


def make_requests(
    arrival_s: ArrayLike,
    *,
    prompt_tokens: ArrayLike,
    output_tokens: ArrayLike,
    domain: Sequence[str],
    deadline_s: ArrayLike | None = None,
    cached_tokens: ArrayLike | None = None,
    follows: ArrayLike | None = None,
) -> Requests:
    """Requests from one value a request [n]; without `deadline_s` there is none, without the others nothing is cached
    and no request follows another.

    Raises DraftsmithError naming the request (the first is 1) and the value that cannot be.
    """
    num = len(domain)
    names = tuple(dict.fromkeys(domain))
    index = {name: place for place, name in enumerate(names)}
    requests = Requests(
        arrival_s=_seconds(arrival_s, "arrival_s", num),
        prompt_tokens=_whole(prompt_tokens, "prompt_tokens", num),
        output_tokens=_whole(output_tokens, "output_tokens", num),
        domains=names,
        domain=np.array([index[name] for name in domain], np.int64),
        deadline_s=np.full(num, np.inf) if deadline_s is None else _seconds(deadline_s, "deadline_s", num),
        cached_tokens=np.zeros(num, np.int64) if cached_tokens is None else _whole(cached_tokens, "cached_tokens", num),
        follows=np.full(num, -1) if follows is None else _whole(follows, "follows", num),
    )
    _check(requests)
    return requests


def _check(requests: Requests) -> None:
    if len(requests) == 0:
        raise DraftsmithError("a workload without requests", expected="at least one")
    arrival, prompt, cached, follows = (
        requests.arrival_s, requests.prompt_tokens, requests.cached_tokens, requests.follows,
    )  # fmt: skip
    _check_each(arrival, (arrival >= 0) & np.isfinite(arrival), "arrival_s", "finite seconds >= 0")
    _check_each(prompt, prompt >= 1, "prompt_tokens", ">= 1")
    _check_each(requests.output_tokens, requests.output_tokens >= 1, "output_tokens", ">= 1")
    _check_each(requests.deadline_s, requests.deadline_s > 0, "deadline_s", "seconds > 0")
    _check_each(cached, (cached >= 0) & (cached < prompt), "cached_tokens", ">= 0 and fewer than prompt_tokens")
    _check_each(follows, (follows >= -1) & (follows < np.arange(len(follows))), "follows", "an earlier request or -1")
    followed = follows[follows >= 0]
    counts = np.bincount(followed, minlength=len(follows))
    _check_each(counts, counts <= 1, "requests that follow it", "at most one")


def _column(values: ArrayLike, name: str, num: int) -> NDArray[np.generic]:
    array = np.asarray(values)
    if array.shape != (num,) or array.dtype.kind not in "iuf":
        raise DraftsmithError(
            f"{name} of a workload", got=f"{array.dtype} of shape {array.shape}", expected=f"{num} numbers"
        )
    return array


def _seconds(values: ArrayLike, name: str, num: int) -> Floats:
    return _column(values, name, num).astype(np.float64)


def _whole(values: ArrayLike, name: str, num: int) -> Ints:
    array = _column(values, name, num)
    whole = array.astype(np.int64)
    _check_each(array, whole == array, name, "a whole number")
    return whole


def _check_each(values: NDArray[np.generic], good: Bools, name: str, expected: str) -> None:
    if not good.all():
        at = int(good.argmin())
        raise DraftsmithError(f"{name} of a request", got=values[at], expected=expected, where=f"request {at + 1}")
