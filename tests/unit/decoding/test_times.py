"""Times of decoding on a clock that only the work itself moves: each part is charged with its own, to the second."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.decoding import session as session_module
from draftsmith.decoding import times as times_module
from draftsmith.decoding import verification
from draftsmith.decoding.engine import Engine, Request
from draftsmith.decoding.policies import DraftedBlocks
from draftsmith.decoding.times import EngineTimes, Laps, StepTime
from draftsmith.params import Sampling
from tests.unit.decoding.toys import ScriptedDrafter, TableTarget, as_target, one_hot_logits, table_draft

GREEDY = Sampling(temperature=0.0)
COUNT = 20
STATES, HEAD, DRAFT, CONTEXT, POLICY, TELLING, ACCEPTING = 1.0, 10.0, 100.0, 1000.0, 10**4, 10**5, 10**6
"""Seconds that a call takes: the target's layers, its LM head, a proposal, its context's upkeep, the policy, the
caller's own `on_commit`, and the acceptance of one wave."""


class Clock:
    """Moves only where it is told to."""

    def __init__(self) -> None:
        self.now = 5.0

    def costs(self, seconds: float, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.now += seconds
            return call(*args, **kwargs)

        return timed

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (session_module, times_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=clock))
    monkeypatch.setattr(verification, "verify_greedy", clock.costs(ACCEPTING, verification.verify_greedy))
    return clock


def counting_engine(clock: Clock, *, drafter: bool, block_size: int = 7) -> Engine:
    """After p comes p + 1, and the drafter knows it; the policy has 5 tokens of each block verified."""
    target: Any = TableTarget(one_hot_logits([(token + 1) % COUNT for token in range(COUNT)], vocab=COUNT))
    scripted: Any = None
    if drafter:
        scripted = ScriptedDrafter(table_draft(target.table), target=target, block_size=block_size)
        scripted.propose = clock.costs(DRAFT, scripted.propose)
        scripted.observe = clock.costs(CONTEXT, scripted.observe)

    def policy(blocks: DraftedBlocks) -> list[int]:
        return [5] * blocks.num_requests

    target.forward, target.logits = clock.costs(STATES, target.forward), clock.costs(HEAD, target.logits)
    return Engine(as_target(target), drafter=scripted, end_ids=[], batch_size=2, policy=clock.costs(POLICY, policy))


def test_each_part_of_a_step_is_charged_with_its_own_work(clock: Clock) -> None:
    """Two answers of 13 and 7 tokens after tokens 0 and 3: 1 with the prompt, then 6 a step.

    Five tokens of seven are verified: the LM head runs over 2 slots and then the 4 others.
    """
    engine = counting_engine(clock, drafter=True)
    requests = [Request("a", (0,), 13, GREEDY, 0), Request("b", (3,), 7, GREEDY, 0)]
    told = clock.costs(TELLING, lambda name, tokens, drafted: None)
    engine.generate(requests, on_commit=told)
    times = engine.times
    verify, draft, accept = STATES + 2 * HEAD, DRAFT + CONTEXT, 2 * ACCEPTING
    assert times.steps == [
        StepTime(2, 12, 12, draft_s=draft, verify_s=verify, sample_s=POLICY + accept + 2 * TELLING),
        StepTime(1, 6, 6, draft_s=draft, verify_s=verify, sample_s=POLICY + accept + TELLING),
    ]
    assert times.prefill_s == STATES + HEAD + CONTEXT + 2 * TELLING
    assert (times.num_steps, times.num_tokens) == (2, 20)
    assert (times.draft_s, times.verify_s) == (2 * draft, 2 * verify)
    assert times.sample_s == 2 * (POLICY + accept) + 3 * TELLING
    assert times.total_s == clock.now - 5.0
    assert times.total_s == times.prefill_s + sum(step.total_s for step in times.steps)


def test_a_step_without_a_drafter_has_no_draft_time(clock: Clock) -> None:
    engine = counting_engine(clock, drafter=False)
    engine.generate([Request("a", (0,), 3, GREEDY, 0)])
    step = StepTime(1, 1, 1, draft_s=0.0, verify_s=STATES + HEAD, sample_s=0.0)
    assert engine.times.steps == [step] * 2
    assert engine.times.prefill_s == STATES + HEAD
    assert engine.times.num_tokens == 3


def test_time_between_steps_is_nobodys(clock: Clock) -> None:
    """A server that waits for requests: the sessions of one engine add to its times, the waiting does not."""
    engine = counting_engine(clock, drafter=False)
    for name in ("a", "b"):
        session = engine.session()
        session.submit(Request(name, (0,), 2, GREEDY, 0))
        clock.now += 7e6
        session.step()
        clock.now += 7e6
        assert session.step() == []
    assert engine.times.total_s == 4 * (STATES + HEAD)
    assert engine.times.num_tokens == 4
    assert engine.times.num_steps == 2


def test_a_cut_answer_counts_what_was_committed(clock: Clock) -> None:
    engine = counting_engine(clock, drafter=True)
    engine.generate([Request("a", (0,), 5, GREEDY, 0)])
    assert [(step.num_tokens, step.num_committed) for step in engine.times.steps] == [(6, 4)]
    assert engine.times.num_tokens == 5


def test_sums_by_hand() -> None:
    steps = [StepTime(1, 4, 2, 0.5, 0.25, 0.125), StepTime(3, 9, 5, 2.0, 4.0, 8.0)]
    times = EngineTimes(prefill_s=1.0, total_s=20.0, num_tokens=9, steps=steps)
    assert [step.total_s for step in steps] == [0.875, 14.0]
    assert (times.num_steps, times.draft_s, times.verify_s, times.sample_s) == (2, 2.5, 4.25, 8.125)
    assert (EngineTimes().num_steps, EngineTimes().draft_s) == (0, 0)


def test_laps_on_a_real_clock_add_up() -> None:
    """Engine times on the machine's own clock: no part is negative, and the parts are within the whole."""
    target: Any = TableTarget(one_hot_logits([(token + 1) % COUNT for token in range(COUNT)], vocab=COUNT))
    drafter = ScriptedDrafter(table_draft(target.table), target=target, block_size=3)
    engine = Engine(target, drafter=drafter, end_ids=[], batch_size=3)
    engine.generate([Request(str(number), (number,), 10, GREEDY, 0) for number in range(5)])
    times = engine.times
    assert min(min(step.draft_s, step.verify_s, step.sample_s) for step in times.steps) > 0
    assert times.total_s >= times.prefill_s + times.draft_s + times.verify_s + times.sample_s > 0


@pytest.mark.parametrize(("device", "waits"), [("cpu", 0), ("cuda", 3)])
def test_laps_wait_for_a_gpu(device: str, waits: int, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device takes a second to finish what a part had begun: it is that part's."""
    seen = list[int]()

    def synchronize() -> None:
        seen.append(1)
        clock.now += 1.0

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    laps = Laps(torch.device(device))
    for part, seconds in (("draft", 3.0), ("verify", 4.0), ("draft", 5.0)):
        clock.now += seconds
        laps.lap(part)
    assert len(seen) == waits
    assert laps.seconds == {"draft": 8.0 + 2 * (waits > 0), "verify": 4.0 + (waits > 0), "sample": 0.0}


def test_states_that_the_head_never_sees_cost_no_head(clock: Clock) -> None:
    """A drafter that is wrong at once: one wave of the LM head instead of two."""
    engine = counting_engine(clock, drafter=True)
    assert engine.drafter is not None
    wrong: Callable[..., Tensor] = table_draft(one_hot_logits([0] * COUNT, vocab=COUNT))
    engine.drafter.draft = wrong  # type: ignore[assignment]
    engine.generate([Request("a", (3,), 2, GREEDY, 0)])
    assert [(step.num_tokens, step.num_committed, step.verify_s) for step in engine.times.steps] == [
        (6, 1, STATES + HEAD)
    ]
