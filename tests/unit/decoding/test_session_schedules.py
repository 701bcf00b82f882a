"""Whenever requests come in and leave, each has the answer that it gets alone: any schedule of toys."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.decoding import session as session_module
from draftsmith.decoding.engine import Engine, Request
from draftsmith.decoding.policies import LengthPolicy
from draftsmith.decoding.rounds import Generation
from draftsmith.params import Sampling
from draftsmith.serving.cost_table import CostTable
from draftsmith.serving.policies import AsynchronousPolicy, StaticThreshold, SynchronousPolicy
from tests.unit.decoding.schedules import Event, assert_as_alone, play
from tests.unit.decoding.toys import ScriptedDrafter, TableTarget, Text, as_target, whole_text_draft

VOCAB, SIZE, END, NUM_IDS, BATCH_SIZE = 7, 4, 6, 5, 3
GREEDY = Sampling(temperature=0.0)
SAMPLINGS = (GREEDY, Sampling(), Sampling(temperature=0.5, top_k=4), Sampling(temperature=1.4, top_p=0.9))
TABLE = torch.from_numpy(np.random.default_rng(3).standard_normal((VOCAB, VOCAB)) * 2)
NEARLY = whole_text_draft(torch.from_numpy(np.random.default_rng(4).standard_normal((31, VOCAB))), around=TABLE)
COSTS = CostTable([1, 2, 4, 6, 8, 11], steps_per_s=[1.0, 0.9, 0.7, 0.65, 0.5, 0.3])


def confidence_of(texts: list[Text]) -> list[float]:
    return [float((3 * text[-1] + 5 * len(text)) % 7 - 2) for text in texts]


def engine_of(policy: LengthPolicy, *, batch_size: int = BATCH_SIZE) -> Engine:
    """With a drafter that reads the whole text, and checks what it is shown: each token once, at its own place."""
    target = TableTarget(TABLE)
    drafter = ScriptedDrafter(NEARLY, target=target, block_size=SIZE, confidence=confidence_of)
    return Engine(as_target(target), drafter=drafter, end_ids=[END], batch_size=batch_size, policy=policy)


def request_of(number: int) -> Request:
    """One of 300 requests: prompts of 1 to 5 tokens, 1 to 12 new ones, with stop ids now and then."""
    draw = np.random.default_rng(number)
    prompt = tuple(draw.integers(END, size=int(draw.integers(1, 6))).tolist())
    stop_ids = frozenset(draw.integers(END, size=int(draw.integers(0, 2))).tolist())
    sampling = SAMPLINGS[int(draw.integers(len(SAMPLINGS)))]
    return Request(str(number), prompt, int(draw.integers(1, 13)), sampling, number, stop_ids)


@cache
def alone(request: Request) -> Generation:
    return engine_of(StaticThreshold(0.6), batch_size=1).generate([request])[0]


def greedy_walk(request: Request) -> tuple[int, ...]:
    """The likeliest token after the last one, and so on."""
    text = list(request.prompt_ids)
    for _ in range(request.max_new_tokens):
        text.append(int(TABLE[text[-1]].argmax()))
        if text[-1] in {END, *request.stop_ids}:
            break
    return tuple(text[len(request.prompt_ids) :])


EVENTS = st.lists(
    st.one_of(
        st.builds(Event, st.just("submit"), st.integers(0, 299)),
        st.builds(Event, st.just("cancel"), st.integers(0, NUM_IDS)),
        st.just(Event("step")),
    ),
    max_size=40,
)


@pytest.fixture(autouse=True)
def _short_prefills(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of more than 6 tokens together come in one after the other."""
    monkeypatch.setattr(session_module, "PREFILL_TOKENS", 6)


@settings(deadline=None, max_examples=120, derandomize=True)
@given(events=EVENTS)
def test_every_schedule_gives_the_answers_of_each_request_alone(events: list[Event]) -> None:
    played = play(engine_of(StaticThreshold(0.6)), events, request_of=request_of, num_ids=NUM_IDS)
    assert played.most_live <= BATCH_SIZE
    assert_as_alone(played, alone)


def busy_schedule(seed: int, *, num_events: int) -> list[Event]:
    """Twice as many requests as cancellations, and room for a few rounds between."""
    draw = np.random.default_rng(seed)
    kinds = draw.choice(["submit", "cancel", "step"], size=num_events, p=[0.35, 0.1, 0.55])
    return [
        Event(kind, int(number))
        for kind, number in zip(kinds.tolist(), draw.integers(300, size=num_events), strict=True)
    ]


def test_a_long_schedule_in_which_all_of_it_happens() -> None:
    """What the schedules above are made of, counted in one of 600 events."""
    played = play(
        engine_of(StaticThreshold(0.6)), busy_schedule(0, num_events=600), request_of=request_of, num_ids=NUM_IDS
    )
    assert_as_alone(played, alone)
    assert played.most_live == BATCH_SIZE
    answers = [one for _, one in played.finished]
    assert len(answers) > 100
    assert {one.finish for one in answers} == {"end_of_text", "length"}
    assert sum(not one.token_ids for _, one in played.cancelled) > 5
    assert sum(len(one.rounds) > 0 for _, one in played.cancelled) > 5
    rounds = [made for one in answers for made in one.rounds]
    assert {made.accepted for made in rounds} == set(range(SIZE + 1))
    assert {made.verified for made in rounds} >= {0, 1, 2, SIZE}
    assert any(made.ended for made in rounds)
    assert any(made.cut for made in rounds)


@pytest.mark.parametrize("policy", [SynchronousPolicy(COSTS), AsynchronousPolicy(COSTS)], ids=["now", "before"])
def test_greedy_answers_under_schedulers_that_weigh_requests_against_each_other(policy: LengthPolicy) -> None:
    """Lengths depend on who is there; the greedy ids do not."""
    played = play(engine_of(policy), busy_schedule(1, num_events=600), request_of=request_of, num_ids=NUM_IDS)
    greedy = [(request, one) for request, one in played.finished if request.sampling == GREEDY]
    assert len(greedy) > 20
    for request, one in greedy:
        assert one.token_ids == greedy_walk(request)
    others = [one.verified for _, found in greedy for one in found.rounds]
    theirs = [one.verified for request, _ in greedy for one in alone(request).rounds]
    assert others != theirs
    assert len(set(others)) > 2
