"""Requests that come and go at any round, and what each of them gets alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from draftsmith.decoding.engine import Engine, Request
from draftsmith.decoding.rounds import Generation


@dataclass(frozen=True)
class Event:
    """What happens next: a request comes in, one that is here is cancelled (by its place, modulo), or a step."""

    what: Literal["submit", "cancel", "step"]
    number: int = 0


@dataclass
class Played:
    """What came of a schedule, request by request: (the request, its answer), whole ones and those cut short."""

    finished: list[tuple[Request, Generation]] = field(default_factory=list)
    cancelled: list[tuple[Request, Generation]] = field(default_factory=list)
    most_live: int = 0


def play(engine: Engine, events: Sequence[Event], *, request_of: Callable[[int], Request], num_ids: int) -> Played:
    """Run the events, then step until all is done. Ids are taken from a few and used again as soon as they are free;
    where none is free, or nobody is here to be cancelled, there is a step instead. What `on_commit` was told must be
    what comes out.
    """
    played, here, told = Played(), dict[str, Request](), dict[str, list[int]]()
    session = engine.session(on_commit=lambda name, tokens, drafted: told[name].extend(tokens))

    def left(kept: list[tuple[Request, Generation]], one: Generation) -> None:
        assert told.pop(one.request_id) == list(one.token_ids)
        kept.append((here.pop(one.request_id), one))

    def step() -> None:
        for one in session.step():
            left(played.finished, one)
        played.most_live = max(played.most_live, session.num_live)

    for event in events:
        if event.what == "submit" and len(here) < num_ids:
            request = request_of(event.number)
            name = next(str(place) for place in range(num_ids) if str(place) not in here)
            here[name], told[name] = request, []
            session.submit(replace(request, request_id=name))
        elif event.what == "cancel" and here:
            left(played.cancelled, session.cancel(sorted(here)[event.number % len(here)]))
        else:
            step()
    while not session.is_idle:
        step()
    assert not here
    return played


def assert_as_alone(played: Played, alone: Callable[[Request], Generation]) -> None:
    """Tokens and rounds are those of the request alone, up to where it was cancelled."""
    for request, found in (*played.finished, *played.cancelled):
        expected, num, made = alone(request), len(found.token_ids), len(found.rounds)
        assert found.token_ids == expected.token_ids[:num]
        assert found.drafted == expected.drafted[:num]
        for one, other in zip(found.rounds, expected.rounds[:made], strict=True):
            assert (one.anchor_position, one.verified, one.accepted, one.committed, one.ended, one.cut) == (
                other.anchor_position, other.verified, other.accepted, other.committed, other.ended, other.cut
            )  # fmt: skip
    for request, found in played.finished:
        assert (found.finish, found.token_ids) == (alone(request).finish, alone(request).token_ids)
