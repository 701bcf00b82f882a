"""Lengths and budgets by hand, against plain Python in exact fractions, and against all assignments."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from draftsmith.errors import DraftsmithError
from draftsmith.serving.cost_table import CostTable
from draftsmith.serving.scheduler import admit, draft_budget, schedule_prefix, survival_of, threshold_lengths
from tests.unit.serving import plain

ROUNDING = 1e-12
"""Two Thetas closer than the rounding of their sums are equal."""


def table_of(rates: dict[int, float]) -> CostTable:
    return CostTable(list(rates), steps_per_s=list(rates.values()))


@st.composite
def survivals(draw: st.DrawFn, *, max_requests: int = 4, max_slots: int = 3) -> list[list[float]]:
    """[R, K] of few and exact values, so that ties, zeros and ones are many and sums are exact."""
    num, size = draw(st.integers(1, max_requests)), draw(st.integers(1, max_slots))
    eighth = st.integers(0, 8).map(lambda number: number / 8)
    return [sorted(draw(st.lists(eighth, min_size=size, max_size=size)), reverse=True) for _ in range(num)]


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[list[float]], dict[int, float]]:
    """Survivals and a jagged curve: small whole rates for every N that can occur."""
    rows = draw(survivals())
    num, size = len(rows), len(rows[0])
    rates = draw(st.lists(st.integers(1, 12).map(float), min_size=num * size + 1, max_size=num * size + 1))
    return rows, dict(zip(range(num, num + num * size + 1), rates, strict=True))


@st.composite
def smooth_steps(draw: st.DrawFn) -> tuple[list[list[float]], dict[int, float]]:
    """Survivals and a curve whose time a step is convex in N, as 1/(a + bN + ...)."""
    rows = draw(survivals())
    num, size = len(rows), len(rows[0])
    increments = sorted(draw(st.lists(st.integers(0, 20), min_size=num * size, max_size=num * size)))
    times = np.cumsum([draw(st.integers(1, 100)), *increments])
    return rows, dict(zip(range(num, num + num * size + 1), (1 / times).tolist(), strict=True))


def one_peak(thetas: list[Fraction]) -> bool:
    """Strictly up to a peak, never up after it."""
    peak = thetas.index(max(thetas))
    before, after = thetas[: peak + 1], thetas[peak:]
    return all(a < b for a, b in itertools.pairwise(before)) and all(a >= b for a, b in itertools.pairwise(after))


# --- survival


def test_survival_is_the_running_product() -> None:
    found = survival_of([[0.5, 0.5, 1.0], [1.0, 0.0, 0.9], [0.25, 1.0, 0.5]])
    assert found.tolist() == [[0.5, 0.25, 0.25], [1.0, 0.0, 0.0], [0.25, 0.25, 0.125]]


def test_survival_is_not_clamped_and_leaves_its_input_alone() -> None:
    rows = [[1e-9, 1e-9, 1.0], [1.0, 1.0, 1.0]]
    for confidence in (np.array(rows), np.asfortranarray(rows)):
        assert survival_of(confidence).tolist() == [[1e-9, 1e-9 * 1e-9, 1e-9 * 1e-9], [1.0, 1.0, 1.0]]
        assert confidence.tolist() == rows


@pytest.mark.parametrize("bad", [math.nan, -0.01, 1.001, math.inf])
def test_confidences_that_are_no_probabilities_are_refused(bad: float) -> None:
    for reads in (survival_of, lambda c: threshold_lengths(c, threshold=0.5)):
        with pytest.raises(
            DraftsmithError, match=r"confidences must be probabilities.*expected 0 to 1.*request 2, slot 3"
        ):
            reads([[0.5, 0.5, 0.5], [0.5, 0.5, bad]])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[0.5, 0.25], [0.5, math.nan]], r"must not rise.*got nan.*\(request 2, slot 2\)"),
        ([[math.nan, 0.5]], "must not rise along a block.*slot 2"),
        ([[0.5], [math.nan]], r"survivals must be probabilities.*got nan.*\(request 2, slot 1\)"),
        ([[0.5, 0.25], [0.25, 0.3]], r"must not rise along a block: got 0.3.*\(request 2, slot 2\)"),
        ([[1.5, 0.5]], r"survivals must be probabilities: got 1.5, expected 0 to 1 \(request 1, slot 1\)"),
        ([[0.5, 0.25], [0.25, -0.5]], r"survivals must be probabilities: got -0.5.*\(request 2, slot 2\)"),
        ([0.5, 0.25], r"got shape \(2,\), expected \[R, K\]"),
    ],
)
def test_survivals_that_cannot_be_are_refused(rows: list, message: str) -> None:
    table = table_of({1: 1.0})
    for reads in (
        lambda: schedule_prefix(rows, table=table),
        lambda: draft_budget(rows, num_requests=2, table=table),
        lambda: admit(rows, budget=1),
    ):
        with pytest.raises(DraftsmithError, match=message):
            reads()


# --- Algorithm 1


def test_algorithm_1_by_hand() -> None:
    # Order: .9 (2,1), .8 (1,1), .72 (2,2), .4 (1,2). N = 2, 3, 4, 5, 6.
    rows = [[0.8, 0.4], [0.9, 0.72]]
    # Theta: 2 * 10 = 20, 2.9 * 8 = 23.2, 3.7 * 7 = 25.9, 4.42 * 5.8 = 25.636: stop with two.
    assert schedule_prefix(rows, table=table_of({2: 10.0, 3: 8.0, 4: 7.0, 5: 5.8, 6: 5.7})).tolist() == [1, 1]
    # 4.42 * 6 = 26.52 and 4.82 * 5.6 = 26.992: all.
    assert schedule_prefix(rows, table=table_of({2: 10.0, 3: 8.0, 4: 7.0, 5: 6.0, 6: 5.6})).tolist() == [2, 2]
    # 2.9 * 6.9 = 20.01, 3.7 * 5.4 = 19.98: one, the better of the first slots.
    assert schedule_prefix(rows, table=table_of({2: 10.0, 3: 6.9, 4: 5.4, 5: 5.0, 6: 5.0})).tolist() == [0, 1]


def test_an_equal_theta_does_not_go_on() -> None:
    # 2 * 3 = 6 = 3 * 2 with certain tokens.
    assert schedule_prefix([[1.0], [1.0]], table=table_of({2: 3.0, 3: 2.0, 4: 100.0})).tolist() == [0, 0]


def test_algorithm_1_stops_for_good() -> None:
    """Theta falls at the first token (1.9 * 5 < 10); the asynchronous scheduler finds 2.8 * 10 behind it."""
    rates = {1: 10.0, 2: 5.0, 3: 10.0}
    assert schedule_prefix([[0.9, 0.9]], table=table_of(rates)).tolist() == [0]
    assert draft_budget([[0.9, 0.9]], num_requests=1, table=table_of(rates)) == 2


def test_one_step_of_a_sparse_table_stops_algorithm_1() -> None:
    """Sixteen requests, certain tokens: a point every 8 tokens that is 10 % slower than the last ends at that point.

    16 + 7 tokens at the first rate are 230 a second, 16 + 31 at the last but one 342.6.
    """
    table = CostTable([16, 24, 32, 40, 48], steps_per_s=[10.0, 9.0, 8.1, 7.29, 6.561])
    rows = np.ones((16, 2))
    assert schedule_prefix(rows, table=table).sum() == 7
    assert draft_budget(rows, num_requests=16, table=table) == 31


def test_hopeless_candidates_are_dropped_even_where_the_engine_is_faster_with_more() -> None:
    rates = {2: 1.0, 3: 2.0, 4: 3.0, 5: 4.0, 6: 5.0}
    assert schedule_prefix([[0.5, 0.0], [0.0, 0.0]], table=table_of(rates)).tolist() == [1, 0]


def test_ties_go_to_the_smaller_slot_then_to_the_smaller_request() -> None:
    rows = [[0.5, 0.5], [0.5, 0.5], [0.5, 0.25]]
    # Order: slot 1 of requests 1, 2, 3, then slot 2 of requests 1 and 2, then (3, 2).
    expected = [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1], [2, 1, 1], [2, 2, 1], [2, 2, 2]]
    for count, lengths in enumerate(expected):
        rates = {3 + m: 1.0 if m <= count else 0.01 for m in range(7)}
        assert schedule_prefix(rows, table=table_of(rates)).tolist() == lengths
        assert admit(rows, budget=count).tolist() == lengths


@settings(deadline=None)
@given(steps())
@example(([[1.0, 1.0]], {1: 3.0, 2: 2.0, 3: 1.0}))
def test_algorithm_1_is_the_plain_one(step: tuple[list[list[float]], dict[int, float]]) -> None:
    rows, rates = step
    assert schedule_prefix(rows, table=table_of(rates)).tolist() == plain.algorithm_1(rows, rates)


@settings(deadline=None)
@given(smooth_steps())
def test_algorithm_1_is_the_best_of_all_lengths_where_theta_has_one_peak(
    step: tuple[list[list[float]], dict[int, float]],
) -> None:
    rows, rates = step
    assume(one_peak([value for value, _ in plain.along_the_order(rows, rates)]))
    found = plain.theta(rows, schedule_prefix(rows, table=table_of(rates)).tolist(), rates)
    assert float(found) == pytest.approx(float(plain.best_theta(rows, rates)), rel=ROUNDING)


@settings(deadline=None)
@given(smooth_steps())
def test_theta_has_one_peak_where_the_time_of_a_step_is_convex(
    step: tuple[list[list[float]], dict[int, float]],
) -> None:
    """So that the test before this one is not empty. Times are whole numbers here, and 1/time is rounded."""
    rows, rates = step
    exact = {number: 1 / Fraction(round(1 / rate)) for number, rate in rates.items()}
    values = [value for value, _ in plain.along_the_order(rows, exact)]
    hopeful = sum(a > 0 for row in rows for a in row)
    assert one_peak(values[: hopeful + 1])


# --- the asynchronous budget


def test_budget_by_hand() -> None:
    # a in order: .9, .8, .72, .4; tau 2, 2.9, 3.7, 4.42, 4.82 at N = 2..6.
    rows = [[0.8, 0.4], [0.9, 0.72]]
    assert draft_budget(rows, num_requests=2, table=table_of({2: 10.0, 3: 6.0, 4: 6.0, 5: 5.1, 6: 4.0})) == 3
    assert draft_budget(rows, num_requests=2, table=table_of({2: 12.0, 3: 6.0, 4: 6.0, 5: 5.1, 6: 4.0})) == 0
    assert draft_budget(rows, num_requests=2, table=table_of({2: 12.0, 3: 6.0, 4: 6.0, 5: 5.1, 6: 5.0})) == 4


def test_the_smallest_of_equal_budgets() -> None:
    assert draft_budget([[1.0, 1.0]], num_requests=1, table=table_of({1: 6.0, 2: 3.0, 3: 2.0})) == 0
    assert draft_budget([[1.0, 1.0]], num_requests=1, table=table_of({1: 1.0, 2: 3.0, 3: 2.0})) == 1


def test_a_faster_step_is_worth_hopeless_tokens() -> None:
    assert draft_budget([[0.5, 0.0]], num_requests=1, table=table_of({1: 1.0, 2: 1.0, 3: 1.5})) == 2


def test_requests_without_history_are_in_the_budget_with_all_their_tokens() -> None:
    # R = 3, K = 2, one known: m from 4 to 6 at N = 7..9, tau = 3 + 4, + .5, + .25.
    rows = [[0.5, 0.25]]
    assert draft_budget(rows, num_requests=3, table=table_of({3: 1e6, 7: 10.0, 8: 9.0, 9: 8.0})) == 4
    assert draft_budget(rows, num_requests=3, table=table_of({3: 1e6, 7: 10.0, 8: 9.4, 9: 8.0})) == 5
    assert draft_budget(rows, num_requests=3, table=table_of({3: 1e6, 7: 10.0, 8: 9.4, 9: 9.2})) == 6


def test_without_any_history_the_budget_is_full() -> None:
    table = table_of({1: 1e9, 5: 1e-9})
    assert draft_budget(np.empty((0, 7)), num_requests=5, table=table) == 35
    assert draft_budget(np.empty((0, 7)), num_requests=0, table=table) == 0


def test_more_survivals_than_requests_are_refused() -> None:
    with pytest.raises(DraftsmithError, match="survivals of too many requests: got 2, expected <= 1"):
        draft_budget([[0.5], [0.5]], num_requests=1, table=table_of({1: 1.0}))


@settings(deadline=None)
@given(steps())
def test_the_budget_admitted_is_the_best_of_all_lengths_on_a_jagged_curve(
    step: tuple[list[list[float]], dict[int, float]],
) -> None:
    """And so never worse than Algorithm 1. All numbers are exact in float64 here."""
    rows, rates = step
    table = table_of(rates)
    lengths = admit(rows, budget=draft_budget(rows, num_requests=len(rows), table=table)).tolist()
    found = plain.theta(rows, lengths, rates)
    assert found == plain.best_theta(rows, rates)
    assert found >= plain.theta(rows, schedule_prefix(rows, table=table).tolist(), rates)


# --- admission


@settings(deadline=None)
@given(survivals(), st.data())
def test_admission_is_the_first_of_the_order(rows: list[list[float]], data: st.DataObject) -> None:
    budget = data.draw(st.integers(0, len(rows) * len(rows[0]) + 3))
    first = plain.candidates(rows)[:budget]
    expected = [sum(r == request for _, _, r in first) for request in range(len(rows))]
    lengths = admit(rows, budget=budget).tolist()
    assert lengths == expected
    for request, length in enumerate(lengths):
        assert sorted(j for _, j, r in first if r == request) == list(range(length))


@pytest.mark.parametrize("spread", [(5.0, 1.5), (200.0, 1.0), (0.3, 0.3), (0.02, 2.0)])
def test_a_batch_of_full_size_against_plain_python(spread: tuple[float, float]) -> None:
    """Sixteen-bit keys and float32 cannot tell all of these apart; the order must."""
    rng = np.random.default_rng(3)
    rows = survival_of(rng.beta(*spread, (700, 7)))
    rows[::50] = rows[7]
    flat = sorted(rows.ravel().tolist(), reverse=True)
    rates = 1 / (0.02 + 1e-7 * np.arange(700, 8 * 700 + 1))
    table = CostTable(np.arange(700, 8 * 700 + 1), steps_per_s=rates)
    tau, best, count = 700.0, 700.0 * rates[0], 0
    for a in flat:
        tau += a
        if a == 0 or tau * rates[count + 1] <= best:
            break
        best, count = tau * rates[count + 1], count + 1
    assert count > 30
    order = plain.candidates(rows.tolist())
    for found, budget in ((schedule_prefix(rows, table=table), count), (admit(rows, budget=1234), 1234)):
        expected = np.bincount([r for _, _, r in order[:budget]], minlength=700)
        assert found.tolist() == expected.tolist()


def test_values_that_one_float32_cannot_tell_apart() -> None:
    """Neighbours in float64, in an order that a coarse sort would leave as it is."""
    near = np.nextafter(0.5, 1.0)
    rows = [[0.5, 0.25], [near, 0.5], [0.5, near - 2**-52]]
    assert admit(rows, budget=1).tolist() == [0, 1, 0]
    assert schedule_prefix(rows, table=table_of({3: 10.0, 4: 9.0, 5: 1.0})).tolist() == [0, 1, 0]


def test_the_order_of_admission_is_that_of_float64_in_the_sum_too() -> None:
    """Theta rises at .5 + 2^-40 and not at .5: a scheduler that met .5 first would stop at once."""
    more = 0.5 + 2.0**-40
    rates = {2: 1.0, 3: 0.8, 4: 0.79}
    # 2.5 * .8 = 2 exactly, no rise; (2.5 + 2^-40) * .8 > 2; then 3.0 * .79 > 2.
    assert schedule_prefix([[0.5], [more]], table=table_of(rates)).tolist() == [1, 1]
    assert schedule_prefix([[0.5], [0.5]], table=table_of(rates)).tolist() == [0, 0]


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(DraftsmithError, match="below zero: got -1"):
        admit([[0.5]], budget=-1)


@pytest.mark.parametrize(("num_requests", "block_size"), [(0, 0), (0, 3), (4, 0)])
def test_empty_batches_and_blocks(num_requests: int, block_size: int) -> None:
    rows = np.empty((num_requests, block_size))
    table = table_of({1: 1.0})
    assert schedule_prefix(rows, table=table).tolist() == [0] * num_requests
    assert admit(rows, budget=5).tolist() == [0] * num_requests
    assert admit(rows, budget=0).tolist() == [0] * num_requests
    assert draft_budget(rows, num_requests=num_requests, table=table) == 0
    assert threshold_lengths(rows, threshold=0.5).tolist() == [0] * num_requests
    assert survival_of(rows).shape == (num_requests, block_size)


@settings(deadline=None)
@given(steps(), st.booleans())
def test_the_layout_of_the_array_does_not_matter(
    step: tuple[list[list[float]], dict[int, float]], transposed: bool
) -> None:
    rows, rates = step
    array = np.asfortranarray(rows) if transposed else np.array(rows)
    kept = array.copy()
    assert schedule_prefix(array, table=table_of(rates)).tolist() == plain.algorithm_1(rows, rates)
    admit(array, budget=1)
    draft_budget(array, num_requests=len(rows), table=table_of(rates))
    assert (array == kept).all()


# --- the threshold


def test_threshold_by_hand() -> None:
    rows = [[0.9, 0.5, 0.9], [0.4, 0.9, 0.9], [0.9, 0.9, 0.9], [0.5, 0.6, 0.1], [0.0, 0.0, 0.0]]
    assert threshold_lengths(rows, threshold=0.5).tolist() == [3, 0, 3, 2, 0]
    assert threshold_lengths(rows, threshold=0.0).tolist() == [3, 3, 3, 3, 3]
    assert threshold_lengths(rows, threshold=1.0).tolist() == [0, 0, 0, 0, 0]
    assert threshold_lengths([[1.0, 1.0, 0.5]], threshold=1.0).tolist() == [2]


@pytest.mark.parametrize("threshold", [-0.1, 1.1, math.nan])
def test_thresholds_that_are_no_probability_are_refused(threshold: float) -> None:
    with pytest.raises(DraftsmithError, match="threshold of confidence must be a probability"):
        threshold_lengths([[0.5]], threshold=threshold)
