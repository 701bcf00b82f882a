"""Policies on drafted blocks: what they remember, when, and what they refuse."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.decoding.policies import DraftedBlocks, LengthPolicy
from draftsmith.errors import ContractError, DraftsmithError
from draftsmith.serving.cost_table import CostTable
from draftsmith.serving.policies import (
    AsynchronousPolicy,
    FixedLength,
    NoSpeculation,
    StaticThreshold,
    StepTables,
    SynchronousPolicy,
)
from tests.unit.serving import plain

FLAT = CostTable([1], steps_per_s=[1.0])
ONE_TOKEN_PAYS = CostTable([1, 2, 3, 4], steps_per_s=[10.0, 9.0, 8.0, 1.0])
"""With one request (N = 1..): from a = .9 on one token pays, two pay if both are likely, three do not."""


def blocks(ids: str, *rows: list[float]) -> DraftedBlocks:
    return DraftedBlocks(tuple(ids), len(rows[0]), np.array(rows))


def without_head(ids: str, *, block_size: int) -> DraftedBlocks:
    return DraftedBlocks(tuple(ids), block_size, None)


def test_synchronous_multiplies_the_confidences() -> None:
    # a = .9, .45: 1.9 * 9 > 10, 2.35 * 8 = 18.8 > 17.1; a = .9, .225: 2.125 * 8 = 17 < 17.1.
    policy = SynchronousPolicy(ONE_TOKEN_PAYS)
    assert policy(blocks("a", [0.9, 0.5, 0.5])) == [2]
    assert policy(blocks("a", [0.9, 0.25, 1.0])) == [1]


def test_the_first_two_steps_verify_all_and_the_third_is_budgeted_by_the_first() -> None:
    policy = AsynchronousPolicy(ONE_TOKEN_PAYS)
    assert policy(blocks("a", [0.9, 0.25, 0.5])) == [3]  # budgets 1 in two steps
    assert policy(blocks("a", [0.9, 0.5, 0.5])) == [3]  # budgets 2
    assert policy(blocks("a", [0.0, 0.0, 0.0])) == [1]  # budgets 0, and does not cut itself
    assert policy(blocks("a", [1.0, 1.0, 1.0])) == [2]
    assert policy(blocks("a", [1.0, 1.0, 1.0])) == [0]


def test_staleness_is_the_number_of_steps_between() -> None:
    policy = AsynchronousPolicy(ONE_TOKEN_PAYS, staleness=1)
    assert policy(blocks("a", [0.9, 0.25, 0.5])) == [3]
    assert policy(blocks("a", [0.9, 0.5, 0.5])) == [1]
    assert policy(blocks("a", [0.9, 0.5, 0.5])) == [2]


def test_a_budget_is_shared_by_the_survivals_of_the_step() -> None:
    # Then: a = .9, .45 | .9, .81: tau 2, 2.9, 3.8, 4.61, 5.06 at N = 2..6: three tokens.
    table = CostTable([2, 5, 6], steps_per_s=[10.0, 9.0, 1.0])
    policy = AsynchronousPolicy(table)
    policy(blocks("ab", [0.9, 0.5], [0.9, 0.9]))
    policy(blocks("ab", [0.0, 0.0], [0.0, 0.0]))
    assert policy(blocks("ab", [0.9, 0.8], [0.75, 0.5])) == [2, 1]


def test_histories_go_by_request_and_not_by_row() -> None:
    table = CostTable([1, 2, 3], steps_per_s=[10.0, 6.0, 1.0])  # alone: .9 pays (11.4), .5 does not (9)
    policy = AsynchronousPolicy(table)
    policy(blocks("abc", [0.5], [0.9], [0.9]))
    policy(blocks("cab", [1.0], [1.0], [1.0]))
    assert policy(blocks("a", [1.0])) == [0]
    policy = AsynchronousPolicy(table)
    policy(blocks("abc", [0.5], [0.9], [0.9]))
    policy(blocks("cab", [1.0], [1.0], [1.0]))
    assert policy(blocks("b", [1.0])) == [1]


def test_a_new_request_adds_its_whole_block_to_the_budget() -> None:
    # a known with (.5, .5), b new: two tokens of b are certain; tau 4, 4.5, 4.75 at N = 4, 5, 6.
    table = CostTable([2, 3, 4, 5, 6], steps_per_s=[100.0, 100.0, 10.0, 9.0, 2.0])
    policy = AsynchronousPolicy(table)
    policy(blocks("a", [0.5, 0.5]))
    policy(blocks("a", [0.5, 0.5]))
    assert sum(policy(blocks("ab", [0.9, 0.9], [0.8, 0.1]))) == 3
    assert sum(policy(blocks("ab", [0.9, 0.9], [0.8, 0.1]))) == 3  # two steps before, b was not there
    # Now both are known (.9, .81, .8, .08): 2 * 100, 2.9 * 100, then 3.71 * 10.
    assert policy(blocks("ab", [0.9, 0.9], [0.95, 0.1])) == [0, 1]


def test_a_request_that_left_is_forgotten_also_if_it_comes_back() -> None:
    table = CostTable([1, 2, 3], steps_per_s=[10.0, 1.0, 1.0])
    policy = AsynchronousPolicy(table)
    for _ in range(2):
        policy(blocks("a", [0.5, 0.5]))
    assert policy(blocks("a", [0.5, 0.5])) == [0]
    policy(blocks("b", [0.5, 0.5]))
    assert policy(blocks("a", [0.5, 0.5])) == [2]
    assert policy(blocks("a", [0.5, 0.5])) == [2]
    assert policy(blocks("a", [0.5, 0.5])) == [0]


def test_the_budget_does_not_depend_on_the_step_itself() -> None:
    totals = set()
    for now in ([[0.0, 0.0], [0.0, 0.0]], [[1.0, 1.0], [1.0, 1.0]], [[0.9, 0.2], [0.1, 0.8]]):
        policy = AsynchronousPolicy(CostTable([1, 5, 6], steps_per_s=[10.0, 8.0, 1.0]))
        policy(blocks("ab", [0.9, 0.9], [0.8, 0.2]))
        policy(blocks("ab", *now))
        totals.add(sum(policy(blocks("ab", *now))))
    assert totals == {2}  # tau 2, 2.9, 3.71, 4.51, 4.67 at N = 2..6: 3.71 * 10 against 4.51 * 8


@st.composite
def steady(draw: st.DrawFn) -> tuple[np.ndarray, dict[int, float]]:
    num, size = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    half = st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), min_size=num * size, max_size=num * size)
    count = num * size + 1
    rates = draw(st.lists(st.integers(1, 12).map(float), min_size=count, max_size=count))
    return np.array(draw(half)).reshape(num, size), dict(enumerate(rates, start=num))


@settings(deadline=None)
@given(steady())
def test_two_steps_without_change_make_the_asynchronous_policy_the_best_on_any_curve(
    case: tuple[np.ndarray, dict[int, float]],
) -> None:
    confidence, rates = case
    table = CostTable(list(rates), steps_per_s=list(rates.values()))
    step = DraftedBlocks(tuple(map(str, range(len(confidence)))), confidence.shape[1], confidence)
    policy = AsynchronousPolicy(table)
    lengths = [policy(step) for _ in range(3)][-1]
    rows = plain.products(confidence.tolist())
    found = plain.theta(rows, lengths, rates)
    assert found == plain.best_theta(rows, rates)
    assert found >= plain.theta(rows, SynchronousPolicy(table)(step), rates)


@st.composite
def comings_and_goings(draw: st.DrawFn) -> list[DraftedBlocks]:
    """Steps whose requests leave, come back and change places, with two slots of few values each."""
    quarter = st.integers(0, 4).map(lambda number: number / 4)
    steps = []
    for ids in draw(st.lists(st.lists(st.sampled_from("abcd"), min_size=1, unique=True), min_size=3, max_size=7)):
        rows = draw(st.lists(st.lists(quarter, min_size=2, max_size=2), min_size=len(ids), max_size=len(ids)))
        steps.append(blocks("".join(ids), *rows))
    return steps


def expected_lengths(steps: list[DraftedBlocks], rates: dict[int, float], staleness: int) -> list[int]:
    """Of the last step: by its definition, request by request."""
    now, earlier = steps[-1], steps[-1 - staleness : -1]
    stayed = [name for name in now.request_ids if all(name in step.request_ids for step in earlier)]
    known = stayed if len(earlier) == staleness else []
    pool = [1.0] * (2 * (now.num_requests - len(known)))
    unknown = len(pool)
    for name in known:
        assert earlier[0].confidence is not None
        first, second = earlier[0].confidence[earlier[0].request_ids.index(name)].tolist()
        pool += [first, first * second]
    pool[unknown:] = sorted(pool[unknown:], reverse=True)
    num = now.num_requests
    thetas = {m: (num + sum(pool[:m])) * rates[num + m] for m in range(unknown, 2 * num + 1)}
    budget = min(m for m, theta in thetas.items() if theta == max(thetas.values()))
    assert now.confidence is not None
    first = plain.candidates(plain.products(now.confidence.tolist()))[:budget]
    return [sum(r == row for _, _, r in first) for row in range(num)]


@settings(deadline=None)
@given(comings_and_goings(), st.lists(st.integers(1, 12).map(float), min_size=12, max_size=12), st.integers(1, 3))
def test_any_comings_and_goings(steps: list[DraftedBlocks], curve: list[float], staleness: int) -> None:
    rates = dict(enumerate(curve, start=1))
    policy = AsynchronousPolicy(CostTable(list(rates), steps_per_s=curve), staleness=staleness)
    for number, step in enumerate(steps, start=1):
        assert policy(step) == expected_lengths(steps[:number], rates, staleness)


def test_fixed_length() -> None:
    assert FixedLength(2)(without_head("abc", block_size=4)) == [2, 2, 2]
    assert FixedLength(4)(without_head("abc", block_size=4)) == [4, 4, 4]
    assert FixedLength(0)(without_head("a", block_size=0)) == [0]
    with pytest.raises(ContractError, match="longer than the drafter's block: got 5, expected <= 4"):
        FixedLength(5)(without_head("abc", block_size=4))
    with pytest.raises(DraftsmithError, match="below zero: got -1"):
        FixedLength(-1)


def test_static_threshold() -> None:
    step = blocks("abc", [0.9, 0.4, 0.9], [0.9, 0.9, 0.5], [0.1, 0.9, 0.9])
    assert StaticThreshold(0.5)(step) == [1, 3, 0]
    assert StaticThreshold(0.0)(step) == [3, 3, 3]
    with pytest.raises(DraftsmithError, match=r"threshold of confidence must be a probability: got 1\.5"):
        StaticThreshold(1.5)


def test_no_speculation() -> None:
    assert NoSpeculation()(without_head("abc", block_size=4)) == [0, 0, 0]


@pytest.mark.parametrize(
    ("policy", "what"),
    [
        (SynchronousPolicy(FLAT), "the prefix scheduler"),
        (AsynchronousPolicy(FLAT), "the prefix scheduler"),
        (StaticThreshold(0.5), "a threshold of confidence"),
    ],
)
def test_policies_of_confidence_refuse_a_drafter_without_its_head(policy: LengthPolicy, what: str) -> None:
    with pytest.raises(ContractError, match=f"{what} reads confidences: got a drafter without a confidence head"):
        policy(without_head("ab", block_size=3))
    with pytest.raises(ContractError, match=r"another shape than the blocks: got \(1, 2\), expected \(2, 2\)"):
        policy(DraftedBlocks(("a", "b"), 2, np.array([[0.5, 0.5]])))
    with pytest.raises(DraftsmithError, match="confidences must be probabilities: got nan"):
        policy(blocks("a", [0.5, math.nan]))


def test_a_step_that_was_refused_is_not_remembered() -> None:
    policy = AsynchronousPolicy(CostTable([1, 2], steps_per_s=[10.0, 1.0]))
    policy(blocks("a", [0.5]))
    with pytest.raises(DraftsmithError):
        policy(blocks("a", [math.nan]))
    assert policy(blocks("a", [0.5])) == [1]
    assert policy(blocks("a", [0.5])) == [0]


@pytest.mark.parametrize("staleness", [0, -1])
def test_a_budget_from_the_step_itself_is_refused(staleness: int) -> None:
    with pytest.raises(
        DraftsmithError, match=f"must come from an earlier step: got {staleness}, expected staleness >= 1"
    ):
        AsynchronousPolicy(FLAT, staleness=staleness)


def test_another_block_size_is_refused() -> None:
    policy = AsynchronousPolicy(FLAT, staleness=1)
    policy(blocks("a", [0.5, 0.5]))
    with pytest.raises(ContractError, match="block size changed between steps: got 3, expected 2"):
        policy(blocks("a", [0.5, 0.5, 0.5]))


def test_a_batch_that_empties() -> None:
    policy = AsynchronousPolicy(FLAT)
    policy(blocks("a", [0.5, 0.5]))
    assert policy(DraftedBlocks((), 2, np.empty((0, 2)))) == []
    assert policy(blocks("a", [0.5, 0.5])) == [2]


def test_lengths_are_plain_numbers() -> None:
    step = blocks("ab", [0.5, 0.5], [0.5, 0.5])
    for policy in (SynchronousPolicy(FLAT), AsynchronousPolicy(FLAT), StaticThreshold(0.2)):
        assert [type(length) for length in policy(step)] == [int, int]


# The time of whole steps


def test_fixed_seconds_make_further_tokens_cheaper() -> None:
    """Verification alone doubles its time by one token: 1.9 * 5 < 10. With .9 s more it is 1.9 / 1.1 > 1 / 1."""
    table = CostTable([1, 2], steps_per_s=[10.0, 5.0])
    told = blocks("a", [0.9, 0.0])
    assert SynchronousPolicy(table)(told) == [0]
    assert SynchronousPolicy(table, fixed_s=[0.0, 0.9])(told) == [1]
    asynchronous = AsynchronousPolicy(table, fixed_s=[0.0, 0.9], staleness=1)
    assert [asynchronous(told), asynchronous(told)] == [[2], [1]]
    assert AsynchronousPolicy(table, staleness=1)(told) == [2]


def test_fixed_seconds_are_those_of_the_requests_of_the_step() -> None:
    tables = StepTables(FLAT, fixed_s=[0.0, 1.0, 3.0])
    assert [tables.of(number).look_up(1) for number in (1, 2, 7)] == [0.5, 0.25, 0.25]
    assert StepTables(FLAT).of(3) is FLAT


@pytest.mark.parametrize("fixed_s", [[], [[0.1]], [-0.1], [math.nan], [math.inf], 0.1])
def test_fixed_seconds_that_cannot_be(fixed_s: list[float]) -> None:
    with pytest.raises(DraftsmithError, match="fixed_s of a policy"):
        StepTables(FLAT, fixed_s=fixed_s)
