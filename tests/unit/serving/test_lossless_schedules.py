"""What makes a schedule lossless: it does not look at tokens that it may leave unverified. Enumerated exactly.

Confidence k reads the tokens before k (`World`), so whether slot (r, k) is admitted may depend on confidences 1..k of r
and on anything of other requests, whose tokens are drawn independently; not on confidences k+1.. of r. That makes the
text of r the target's own whatever the others drew. For all texts together (requests as independent as the target has
them) more is needed, and holds: lengths l depend on nothing but confidences 1..l_r + 1 of every r, all at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.serving.cost_table import CostTable
from draftsmith.serving.scheduler import admit, draft_budget, schedule_prefix, survival_of, threshold_lengths
from tests.unit.serving import plain

Grid = list[list[float]]


def synchronous(rates: plain.Rates) -> plain.Schedule:
    table = CostTable(list(rates), steps_per_s=list(rates.values()))
    return lambda confidence: schedule_prefix(survival_of(confidence), table=table).tolist()


def asynchronous(rates: plain.Rates, then: Sequence[Sequence[float]], num_requests: int) -> plain.Schedule:
    """Ranks by the confidences of the step; its budget comes from earlier survivals `then`."""
    table = CostTable(list(rates), steps_per_s=list(rates.values()))
    budget = draft_budget(then, num_requests=num_requests, table=table)
    return lambda confidence: admit(survival_of(confidence), budget=budget).tolist()


def retrospective(rates: plain.Rates) -> plain.Schedule:
    return lambda confidence: plain.retrospective(plain.products(confidence.tolist()), rates)


# --- the counterexample of appendix A

A, B = 0, 1
APPENDIX = plain.World(
    target=dict.fromkeys([(), (A,), (B,)], Fraction(7, 10)),
    drafter=dict.fromkeys([(), (A,), (B,)], Fraction(1, 2)),
    confidence={(): 0.8, (A,): 0.9, (B,): 0.0},
    block_size=2,
)
APPENDIX_RATES = {1: 1.0, 2: 0.5, 3: 0.45}


def first_token(schedule: plain.Schedule) -> tuple[Fraction, Fraction]:
    told = plain.emitted([APPENDIX], schedule=schedule, horizon=1)
    return told[((A,),)], told[((B,),)]


def test_appendix_a_the_retrospective_search_changes_what_is_emitted() -> None:
    lengths = {c: retrospective(APPENDIX_RATES)(np.array([[0.8, c]])) for c in (0.9, 0.0)}
    assert lengths == {0.9: [2], 0.0: [0]}
    # .5 * accepted A + .5 * the target's own = .5 + .5 * .7
    assert first_token(retrospective(APPENDIX_RATES)) == (Fraction(85, 100), Fraction(15, 100))


def test_appendix_a_algorithm_1_verifies_nothing_and_emits_the_targets_own() -> None:
    schedule = synchronous(APPENDIX_RATES)
    assert schedule(np.array([[0.8, 0.9]])) == [0]
    assert schedule(np.array([[0.8, 0.0]])) == [0]
    assert first_token(schedule) == (Fraction(7, 10), Fraction(3, 10))


@pytest.mark.parametrize("then", [[[0.8, 0.72]], [[0.8, 0.0]], []])
def test_appendix_a_a_budget_from_an_earlier_step_emits_the_targets_own(then: Grid) -> None:
    history = np.array(then).reshape(-1, 2)
    schedule = asynchronous(APPENDIX_RATES, history, 1)
    assert schedule(np.array([[0.8, 0.9]])) == schedule(np.array([[0.8, 0.0]]))
    assert first_token(schedule) == (Fraction(7, 10), Fraction(3, 10))


# --- any requests that share a step

SIZE, HORIZON = 2, 3
RATES = st.lists(st.integers(1, 12).map(float), min_size=7, max_size=7)


@st.composite
def worlds(draw: st.DrawFn) -> plain.World:
    texts = [text for length in range(HORIZON) for text in itertools.product((0, 1), repeat=length)]
    sixteenth = st.integers(1, 15).map(lambda number: Fraction(number, 16))
    quarter = st.integers(0, 4).map(lambda number: number / 4)
    return plain.World(
        target={text: draw(sixteenth) for text in texts},
        drafter={text: draw(sixteenth) for text in texts if len(text) < SIZE},
        confidence={text: draw(quarter) for text in texts if len(text) < SIZE},
        block_size=SIZE,
    )


@settings(max_examples=60, deadline=None)
@given(worlds(), worlds(), RATES, st.lists(st.integers(0, 4), min_size=4, max_size=4))
def test_two_requests_together_emit_the_targets_own(
    one: plain.World, two: plain.World, rates: list[float], then: list[int]
) -> None:
    """Their joint distribution, to the last fraction: each its own target's, and independent of the other."""
    both = [one, two]
    curve = dict(enumerate(rates, start=2))
    history = np.sort(np.array(then).reshape(2, 2) / 4)[:, ::-1]
    expected = plain.truths(both, horizon=HORIZON)
    for schedule in (
        synchronous(curve),
        asynchronous(curve, history, 2),
        lambda confidence: threshold_lengths(confidence, threshold=0.5).tolist(),
    ):
        assert plain.emitted(both, schedule=schedule, horizon=HORIZON) == expected


def test_the_enumeration_tells_a_retrospective_search_from_the_target() -> None:
    """Two requests of appendix A at once, on a curve that rises again only where all four tokens are worth it."""
    curve = dict(enumerate([1.0, 0.5, 0.5, 0.5, 0.55], start=2))
    told = plain.emitted([APPENDIX, APPENDIX], schedule=retrospective(curve), horizon=1)
    assert told != plain.truths([APPENDIX, APPENDIX], horizon=1)
    assert sum(told.values()) == 1


# --- what a decision reads


@st.composite
def grids(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, dict[int, float], int]:
    """Two sets of confidences [R, K] of few values, a jagged curve, and a budget."""
    num, size = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    quarters = st.lists(st.integers(0, 4), min_size=num * size, max_size=num * size)
    one, two = (np.array(draw(quarters)).reshape(num, size) / 4 for _ in range(2))
    count = num * size + 1
    rates = draw(st.lists(st.integers(1, 12).map(float), min_size=count, max_size=count))
    return one, two, dict(enumerate(rates, start=num)), draw(st.integers(0, num * size))


SCHEDULES: dict[str, Callable[[plain.Rates, int], plain.Schedule]] = {
    "synchronous": lambda rates, _: synchronous(rates),
    "asynchronous": lambda _, budget: lambda confidence: admit(survival_of(confidence), budget=budget).tolist(),
    "threshold": lambda _, budget: (
        lambda confidence: threshold_lengths(confidence, threshold=min(budget / 4, 1)).tolist()
    ),
}


def check_a_slot_does_not_read_what_follows_it(schedule: plain.Schedule, one: np.ndarray, two: np.ndarray) -> None:
    """Whether (r, k) is admitted is the same whatever confidences k+1.. of r are."""
    before = schedule(one)
    for r, k in np.ndindex(*one.shape):
        other = one.copy()
        other[r, k + 1 :] = two[r, k + 1 :]
        assert (before[r] > k) == (schedule(other)[r] > k), (r, k)


def check_lengths_read_one_slot_ahead(schedule: plain.Schedule, one: np.ndarray, two: np.ndarray) -> None:
    """Lengths are the same whatever the confidences behind the first slot that is left out, of all requests."""
    before = schedule(one)
    ahead = np.arange(one.shape[1]) > np.array(before)[:, None]
    assert schedule(np.where(ahead, two, one)) == before


@pytest.mark.parametrize("name", SCHEDULES)
@settings(deadline=None)
@given(grids())
def test_a_slot_does_not_read_what_follows_it(name: str, grid: tuple[np.ndarray, np.ndarray, dict, int]) -> None:
    one, two, rates, budget = grid
    check_a_slot_does_not_read_what_follows_it(SCHEDULES[name](rates, budget), one, two)


@pytest.mark.parametrize("name", SCHEDULES)
@settings(deadline=None)
@given(grids())
def test_lengths_read_one_slot_ahead(name: str, grid: tuple[np.ndarray, np.ndarray, dict, int]) -> None:
    one, two, rates, budget = grid
    check_lengths_read_one_slot_ahead(SCHEDULES[name](rates, budget), one, two)


@pytest.mark.parametrize("check", [check_a_slot_does_not_read_what_follows_it, check_lengths_read_one_slot_ahead])
def test_a_retrospective_search_reads_what_follows(check: Callable[..., None]) -> None:
    """Both checks can fail."""
    with pytest.raises(AssertionError):
        check(retrospective(APPENDIX_RATES), np.array([[0.8, 0.0]]), np.array([[0.8, 0.9]]))


def test_other_requests_may_be_admitted_by_what_a_token_led_to() -> None:
    """Not asked for: the second request's token comes in or not by the confidence after the first one's token."""
    rates = {2: 10.0, 3: 10.0, 4: 10.0, 5: 0.1, 6: 0.1}
    assert synchronous(rates)(np.array([[0.9, 0.9], [0.5, 0.0]])) == [2, 0]
    assert synchronous(rates)(np.array([[0.9, 0.1], [0.5, 0.0]])) == [1, 1]
