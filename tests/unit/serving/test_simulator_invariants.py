"""The simulator against the plain one, on anything that hypothesis thinks of; and what must hold whatever happens."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.decoding.policies import DraftedBlocks, LengthPolicy, verify_all
from draftsmith.serving.cost_table import CostTable
from draftsmith.serving.outcome import Outcome
from draftsmith.serving.policies import AsynchronousPolicy, FixedLength, StaticThreshold, SynchronousPolicy
from draftsmith.serving.requests import Requests, make_requests
from draftsmith.serving.simulator import Limits, simulate
from draftsmith.serving.step_costs import ContextCost, DraftingCost, PrefillCost, StepCosts
from draftsmith.serving.workload import RequestMix, TokenLaw, closed_loop, poisson
from tests.unit.serving.plain_simulator import Machine, serve
from tests.unit.serving.recordings import drawn_rounds

BLOCK_SIZE = 4
TABLE = CostTable(np.arange(1, 61), steps_per_s=1 / (0.02 + 0.001 * np.arange(1, 61)))
COSTS = StepCosts(
    TABLE, DraftingCost((1, 5, 12), (0.002, 0.003, 0.007)), PrefillCost(400.0, 0.01), ContextCost(1e-5, 20)
)
POLICIES = {
    "all": lambda: verify_all,
    "fixed": lambda: FixedLength(2),
    "threshold": lambda: StaticThreshold(0.6),
    "synchronous": lambda: SynchronousPolicy(TABLE),
    "asynchronous": lambda: AsynchronousPolicy(TABLE),
}


@st.composite
def workloads(draw: st.DrawFn) -> Requests:
    num = draw(st.integers(1, 14))
    arrivals = draw(st.lists(st.sampled_from([0.0, 0.01, 0.05, 0.3, 2.0]), min_size=num, max_size=num))
    prompts = draw(st.lists(st.integers(1, 40), min_size=num, max_size=num))
    return make_requests(
        arrivals,
        prompt_tokens=prompts,
        output_tokens=draw(st.lists(st.integers(1, 30), min_size=num, max_size=num)),
        domain=draw(st.lists(st.sampled_from(["chat", "math"]), min_size=num, max_size=num)),
        cached_tokens=[draw(st.integers(0, prompt - 1)) for prompt in prompts],
        follows=[i - 1 if i and draw(st.booleans()) else -1 for i in range(num)],
    )


@settings(max_examples=150, deadline=None)
@given(
    requests=workloads(),
    max_requests=st.integers(1, 6),
    kv_tokens=st.one_of(st.none(), st.integers(80, 200)),
    prefill_tokens=st.one_of(st.none(), st.integers(1, 80)),
    seed=st.integers(0, 5),
    threshold=st.floats(0.2, 0.95),
)
def test_as_the_plain_simulator(
    requests: Requests,
    max_requests: int,
    kv_tokens: int | None,
    prefill_tokens: int | None,
    seed: int,
    threshold: float,
) -> None:
    rounds, temperatures = drawn_rounds(seed=seed), [0.5, 1.0, 1.5, 2.0]
    batches = list[list[int]]()

    def policy(blocks: DraftedBlocks) -> list[int]:
        batches.append([int(name) for name in blocks.request_ids])
        return list(StaticThreshold(threshold)(blocks))

    found = simulate(
        requests, rounds=rounds, policy=policy, costs=COSTS, limits=Limits(max_requests, kv_tokens, prefill_tokens),
        temperatures=temperatures, seed=seed,
    )  # fmt: skip

    def lengths(_: list[int], confidences: list[list[float]]) -> list[int]:
        return [next((k for k, c in enumerate(row) if c < threshold), len(row)) for row in confidences]

    told = serve(
        requests,
        pool=rounds,
        answers=rounds.draw_answers(requests.domains, domain=requests.domain, seed=seed).tolist(),
        machine=Machine(
            step_s=lambda tokens: 0.02 + 0.001 * tokens,
            draft_s=lambda num: 0.002 + 0.001 * (num - 1) / 4 if num < 5 else 0.003 + 0.004 * (num - 5) / 7,
            prefill_s=lambda tokens: 0.01 + tokens / 400.0,
            context_s=lambda context, num: 1e-5 * max(0, context - 20 * num),
            max_requests=max_requests,
            kv_tokens=kv_tokens or np.inf,
            prefill_tokens=prefill_tokens or np.inf,
        ),
        lengths=lengths,
        temperatures=temperatures,
    )
    assert batches == told.batches
    for name in ("arrival_s", "admitted_s", "first_token_s", "finish_s"):
        expected = [getattr(told, name)[i] for i in range(len(requests))]
        assert getattr(found, name) == pytest.approx(expected, rel=1e-12, abs=1e-12), name
    assert found.num_rounds.tolist() == [told.rounds[i] for i in range(len(requests))]
    steps = found.steps
    columns = (steps.num_requests, steps.batch_tokens, steps.accepted, steps.committed, steps.kv_tokens)
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == [step[2:] for step in told.steps]
    assert steps.start_s.tolist() == pytest.approx([step[0] for step in told.steps], rel=1e-12)
    assert steps.seconds.tolist() == pytest.approx([step[1] for step in told.steps], rel=1e-12)


def outcome_of(name: str, *, kv_tokens: int | None = 400, seed: int = 1) -> Outcome:
    mix = RequestMix(TokenLaw(30, 0.5, 1, 90), TokenLaw(25, 0.7, 1, 80), {"chat": 2.0, "math": 1.0})
    requests = poisson(mix, requests_per_s=6.0, num_requests=120, seed=4)
    return simulate(
        requests, rounds=drawn_rounds(), policy=POLICIES[name](), costs=COSTS, limits=Limits(12, kv_tokens), seed=seed
    )


@pytest.mark.parametrize("name", POLICIES)
def test_nothing_is_lost_and_nothing_is_done_twice(name: str) -> None:
    found = outcome_of(name)
    requests, steps, prefills = found.requests, found.steps, found.prefills
    assert prefills.num_requests.sum() == len(requests)
    assert prefills.num_tokens.sum() == requests.prompt_tokens.sum()
    assert len(requests) + steps.committed.sum() == requests.output_tokens.sum()
    assert np.isfinite(found.finish_s).all()
    assert (found.arrival_s <= found.admitted_s).all()
    assert (found.admitted_s < found.first_token_s).all()
    assert (found.first_token_s <= found.finish_s).all()
    assert ((found.first_token_s == found.finish_s) == (requests.output_tokens == 1)).all()
    assert found.num_rounds.sum() == steps.num_requests.sum()
    assert found.verified.sum() == steps.verified.sum()
    assert found.accepted.sum() == steps.accepted.sum()
    assert found.drafted.sum() == steps.drafted.sum() == BLOCK_SIZE * found.num_rounds.sum()
    assert (found.accepted <= found.verified).all()
    assert (steps.committed <= steps.accepted + steps.num_requests).all()
    # A round writes 1..K + 1 tokens.
    assert (requests.output_tokens - 1 <= found.num_rounds * (BLOCK_SIZE + 1)).all()
    assert (requests.output_tokens - 1 >= found.num_rounds).all()


@pytest.mark.parametrize("name", POLICIES)
def test_limits_hold_and_are_reached(name: str) -> None:
    found = outcome_of(name)
    assert found.steps.num_requests.max() <= 12
    assert (found.steps.kv_tokens <= found.steps.kv_reserved).all()
    assert found.steps.kv_reserved.max() <= 400
    assert found.steps.kv_reserved.max() > 380
    assert found.steps.num_waiting.max() > 5
    assert outcome_of(name, kv_tokens=None).steps.num_requests.max() == 12


@pytest.mark.parametrize("name", POLICIES)
def test_the_clock_is_work_and_idleness(name: str) -> None:
    """No two passes or steps overlap, and the engine idles only while nobody is there."""
    found = outcome_of(name)
    spans = sorted(
        [
            *zip(found.steps.start_s, found.steps.end_s, strict=True),
            *zip(found.prefills.start_s, found.prefills.start_s + found.prefills.seconds, strict=True),
        ]
    )
    idle = [(end, start) for (_, end), (start, _) in itertools.pairwise(spans) if start - end > 1e-9]
    assert all(start - end > -1e-9 for (_, end), (start, _) in itertools.pairwise(spans))
    for end, start in idle:
        there = (found.arrival_s < start - 1e-9) & (found.finish_s > end + 1e-9)
        assert not there.any()
    assert spans[-1][1] == found.finish_s.max()


@pytest.mark.parametrize("name", POLICIES)
def test_requests_in_flight_are_those_between_first_token_and_end(name: str) -> None:
    found = outcome_of(name)
    for start, end, num in zip(found.steps.start_s, found.steps.end_s, found.steps.num_requests, strict=True):
        assert ((found.first_token_s <= start) & (found.finish_s >= end)).sum() == num


@pytest.mark.parametrize("name", POLICIES)
def test_equal_inputs_give_equal_outputs_to_the_bit(name: str) -> None:
    def arrays(found: Outcome) -> dict[str, bytes]:
        own = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
        parts = (own.pop("steps"), own.pop("prefills"))
        own.pop("requests")
        for part in parts:
            own |= {f"{type(part).__name__}.{one.name}": getattr(part, one.name) for one in dataclasses.fields(part)}
        return {key: value.tobytes() for key, value in own.items()}

    first = arrays(outcome_of(name))
    assert first == arrays(outcome_of(name))
    assert first["finish_s"] != arrays(outcome_of(name, seed=2))["finish_s"]


def replayed(policy: LengthPolicy, *, max_requests: int) -> dict[str, list[tuple[float, ...]]]:
    """The confidences of each request's rounds, in their order."""
    seen = defaultdict[str, list[tuple[float, ...]]](list)

    def spy(blocks: DraftedBlocks) -> list[int]:
        assert blocks.confidence is not None
        for name, row in zip(blocks.request_ids, blocks.confidence, strict=True):
            seen[name].append(tuple(row))
        return list(policy(blocks))

    requests = make_requests(
        np.arange(10) * 0.1, prompt_tokens=[8] * 10, output_tokens=[20] * 10, domain=["chat", "math"] * 5
    )
    simulate(requests, rounds=drawn_rounds(), policy=spy, costs=COSTS, limits=Limits(max_requests), seed=2)
    return seen


def test_a_requests_rounds_do_not_depend_on_the_policy_or_the_batch() -> None:
    alone = replayed(FixedLength(0), max_requests=1)
    assert {len(rows) for rows in alone.values()} == {19}
    for name, policy in POLICIES.items():
        together = replayed(policy(), max_requests=7)
        for request, rows in together.items():
            assert rows == alone[request][: len(rows)], name
    assert len({rows[0] for rows in alone.values()}) > 2


def test_replayed_rounds_are_consecutive_rounds_of_one_recorded_answer() -> None:
    rounds = drawn_rounds()
    assert rounds.logits is not None
    confidences = 1 / (1 + np.exp(-rounds.logits))
    laps = [confidences[first : last + 1] for first, last in zip(rounds.first, rounds.last, strict=True)]
    for request, rows in replayed(FixedLength(0), max_requests=3).items():
        of_domain = [lap for lap, domain in zip(laps, rounds.domain, strict=True) if domain == int(request) % 2]
        matching = [lap for lap in of_domain if np.allclose(np.resize(lap, (len(rows), BLOCK_SIZE)), rows)]
        assert len(matching) == 1


@pytest.mark.parametrize("think_s", [0.0, 0.5])
def test_a_closed_loop_keeps_its_users(think_s: float) -> None:
    """None comes before its user's last was answered; without thought all are in flight until the first is through."""
    mix = RequestMix(TokenLaw(20, 0.3, 1, 60), TokenLaw(30, 0.5, 2, 80), {"chat": 1.0})
    requests = closed_loop(mix, num_users=7, requests_per_user=6, think_s=think_s, seed=0)
    found = simulate(requests, rounds=drawn_rounds(), policy=verify_all, costs=COSTS, limits=Limits(7))
    assert (found.arrival_s[:7] == 0).all()
    pauses = found.arrival_s[7:] - found.finish_s[:-7]
    assert (pauses == 0).all() if think_s == 0 else pauses.mean() == pytest.approx(0.5, rel=0.4)
    until = min(found.finish_s[35:])  # the first user is through
    full = found.steps.num_requests[found.steps.start_s < until]
    assert (full == 7).all() if think_s == 0 else full.min() < 7
    assert len(full) > 20


def test_an_open_loop_comes_whether_it_is_served_or_not() -> None:
    found = outcome_of("all")
    assert (found.arrival_s == found.requests.arrival_s).all()
