"""Turns, domains, output positions, histograms: against rounds counted by hand and one by one."""

from __future__ import annotations

import numpy as np
import pytest

from draftsmith.decoding.rounds import Generation
from draftsmith.evaluation.breakdown import (
    accepted_histogram,
    averages,
    bin_ends,
    bin_number,
    by_domain,
    by_output_position,
    by_turn,
    length_name,
    turn_number,
)
from tests.unit.evaluation.evaluations import body_of_lengths, make_generation, make_round

# Two conversations of two turns and one of a single turn; K = 3.
TALKS = [
    make_generation("mt/1/t0", [make_round(2), make_round(0)]),  # commits 3 + 1
    make_generation("mt/2/t0", [make_round(1)]),  # 2
    make_generation("mt/3/t0", []),
    make_generation("mt/1/t1", [make_round(3)]),  # 4
    make_generation("mt/2/t1", [make_round(3, ended=True)]),  # 3, no bonus
]


def test_turns_by_hand() -> None:
    first, second = by_turn(TALKS, seed=0)
    assert (first["turn"], first["num_requests"], first["num_rounds"]) == (0, 3, 3)
    assert first["accepted_length"] == pytest.approx(6 / 3)
    assert first["accepted_length_without_bonus"] == pytest.approx(3 / 3)
    assert first["accepted_length_macro"] == pytest.approx((4 / 2 + 2) / 2)
    assert first["accepted_length_without_bonus_macro"] == pytest.approx((2 / 2 + 1) / 2)
    assert (second["turn"], second["num_requests"], second["num_rounds"]) == (1, 2, 2)
    assert second["accepted_length"] == pytest.approx(7 / 2)
    assert second["accepted_length_interval"] == [3.0, 4.0]
    assert second["accepted_length_without_bonus_interval"] == [3.0, 3.0]


def test_a_turn_without_rounds_has_no_length() -> None:
    answers = [make_generation("a/t0", [make_round(1)]), make_generation("a/t1", [])]
    second = by_turn(answers, seed=0)[1]
    assert (second["num_requests"], second["num_rounds"]) == (1, 0)
    assert second["accepted_length"] is None
    assert second["accepted_length_macro_interval"] is None


@pytest.mark.parametrize(("name", "turn"), [("a/t0", 0), ("gsm8k/12/t1", 1), ("a/t13", 13), ("a", 0), ("a/tx", 0)])
def test_turn_numbers(name: str, turn: int) -> None:
    assert turn_number(make_generation(name, [])) == turn


def test_bins_double() -> None:
    ends = [(0, 15), (16, 31), (32, 63), (64, 127), (128, 255)]
    assert [bin_ends(number) for number in range(5)] == ends
    for number, (first, last) in enumerate(ends):
        assert {bin_number(position) for position in range(first, last + 1)} == {number}


def test_output_positions_by_hand() -> None:
    # Rounds begin at 0, 4, 8, 12 | 16, 18 of answer a, and at 0 of b; the one at 18 accepts three and has room for two.
    last = make_round(3, committed=2, cut=True)
    answers = [
        make_generation("a", [*(make_round(3) for _ in range(4)), make_round(1), last]),
        make_generation("b", [make_round(1)]),
    ]
    near, far = by_output_position(answers, seed=0)
    assert (near["first"], near["last"], near["num_rounds"]) == (0, 15, 5)
    assert near["accepted_length"] == pytest.approx((4 * 4 + 2) / 5)
    assert near["accepted_length_macro"] == pytest.approx((4 + 2) / 2)
    assert near["accepted_length_interval"] == [2.0, 4.0]
    assert (far["first"], far["last"], far["num_rounds"]) == (16, 31, 2)
    assert far["accepted_length"] == pytest.approx((2 + 2) / 2)
    assert far["accepted_length_without_bonus"] == pytest.approx((1 + 2) / 2)
    assert far["accepted_length_interval"] is None  # one prompt


def random_answers(rng: np.random.Generator) -> list[Generation]:
    answers = []
    for prompt in range(5):
        for turn in range(2):
            rounds = [make_round(int(n), verified=7) for n in rng.integers(0, 8, size=rng.integers(0, 40))]
            answers.append(make_generation(f"b/{prompt}/t{turn}", rounds))
    return answers


def test_output_positions_count_every_round_where_it_begins() -> None:
    answers = random_answers(np.random.default_rng(0))
    found = {(row["first"], row["last"]): row for row in by_output_position(answers, seed=0)}
    expected: dict[tuple[int, int], list[int]] = {}
    for answer in answers:
        for number, item in enumerate(answer.rounds):
            begins = sum(1 + earlier.accepted for earlier in answer.rounds[:number])
            place = next(ends for ends in map(bin_ends, range(10)) if ends[0] <= begins <= ends[1])
            expected.setdefault(place, []).append(1 + item.accepted)
    assert len(expected) >= 4
    assert found.keys() == expected.keys()
    for place, lengths in expected.items():
        assert found[place]["num_rounds"] == len(lengths)
        assert found[place]["accepted_length"] == pytest.approx(sum(lengths) / len(lengths))


def test_histogram_counts_rounds() -> None:
    assert accepted_histogram(TALKS, block_size=3) == [1, 1, 1, 2]
    assert accepted_histogram([], block_size=2) == [0, 0, 0]
    answers = random_answers(np.random.default_rng(1))
    counts = accepted_histogram(answers, block_size=7)
    everything = [item.accepted for answer in answers for item in answer.rounds]
    assert counts == [everything.count(number) for number in range(8)]


LENGTHS = {
    "humaneval": [[2, 2], [0, 0]],  # 3 and 1: micro 8 / 4
    "gsm8k": [[1], [0, 0, 0]],  # 2 and 1: micro 5 / 4, macro 3 / 2
    "math500": [[2, 2, 2], [1]],  # 3 and 2: micro 11 / 4, macro 5 / 2
}


def test_domains_and_averages_are_plain_means_over_benchmarks() -> None:
    rows = body_of_lengths("k", LENGTHS, temperatures=(0.0, 1.0))["rows"]
    math, code, *hot = by_domain(rows, domains=("math", "code", "chat"), seed=0)
    assert [(row["domain"], row["temperature"]) for row in hot] == [("math", 1.0), ("code", 1.0)]
    assert (math["domain"], math["benchmarks"], math["num_rounds"]) == ("math", ["gsm8k", "math500"], 8)
    assert math["accepted_length"] == pytest.approx((5 / 4 + 11 / 4) / 2)
    assert math["accepted_length_macro"] == pytest.approx((3 / 2 + 5 / 2) / 2)
    # Two prompts a benchmark, drawn apart: both the worse one twice, or both the better one.
    assert math["accepted_length_interval"] == [(1 + 2) / 2, (2 + 3) / 2]
    assert (code["benchmarks"], code["accepted_length"]) == (["humaneval"], 2.0)
    [average, _] = averages(rows, seed=0)
    assert (average["temperature"], average["num_benchmarks"], average["num_rounds"]) == (0.0, 3, 12)
    assert average["accepted_length"] == pytest.approx((2 + 5 / 4 + 11 / 4) / 3)
    assert average["accepted_length_without_bonus"] == pytest.approx((1 + 1 / 4 + 7 / 4) / 3)
    assert average["speedup"] == pytest.approx(2.0)  # 1 s against 2 s for the same answers


def test_an_average_speedup_needs_all_of_them() -> None:
    rows = body_of_lengths("k", LENGTHS)["rows"]
    rows[1]["speedup"] = None
    assert averages(rows, seed=0)[0]["speedup"] is None


def test_names() -> None:
    assert [length_name(bonus, mean) for mean in ("micro", "macro") for bonus in ("with", "without")] == [
        "accepted_length", "accepted_length_without_bonus", "accepted_length_macro",
        "accepted_length_without_bonus_macro",
    ]  # fmt: skip
