"""What counts as a benchmark's prompt."""

from __future__ import annotations

import pytest

from draftsmith.text.contamination import BenchmarkIndex, normalised

FORM = "\nPlease reason step by step, and put your final answer within \\boxed{}."
QUESTIONS = [
    "Nora packs 12 crates of plums each morning and sells 7 of them at the harbour before noon. How many remain?",
    "A ferry carries 40 cars and returns with 25 of them every single evening of the week. How many stay behind?",
    "What is the area of a regular hexagon whose sides are all exactly 6 centimetres long in total?",
    "How many primes below one hundred end in the digit seven, and what do they add up to together?",
    "In a class of thirty children, eleven play the violin and nine sing in the choir on Fridays. How many do neither?",
]
INDEX = BenchmarkIndex([[question + FORM] for question in QUESTIONS] + [["Write a poem.", "Now rewrite it in French."]])


@pytest.mark.parametrize(
    "turns",
    [
        [QUESTIONS[0] + FORM],
        [(QUESTIONS[0] + FORM).upper()],
        ["  " + (QUESTIONS[0] + FORM).replace(" ", "  \n") + " "],
        ["Write a poem!", "Now rewrite it in French"],
        ["Hello", "Write a poem."],
    ],
)
def test_equal(turns: list[str]) -> None:
    assert INDEX.problem(turns) == "equal to a benchmark prompt"


@pytest.mark.parametrize(
    "turns",
    [
        [QUESTIONS[0]],
        [QUESTIONS[0].replace("12", "15").replace("7", "4")],
        ["Solve this: " + QUESTIONS[1] + " Explain it to a friend who has never heard of ferries, in many words." * 3],
        ["First some talk.", QUESTIONS[2]],
    ],
)
def test_near(turns: list[str]) -> None:
    assert INDEX.problem(turns) == "near a benchmark prompt"


@pytest.mark.parametrize(
    "turns",
    [
        ["What is 17 times 3?" + FORM],
        ["Nora packs a suitcase each morning. What should she take to the harbour?"],
        ["Write a poem about rain."],
        ["How many primes are there?"],
        [""],
    ],
)
def test_clear(turns: list[str]) -> None:
    assert INDEX.problem(turns) is None


def test_operators_tell_prompts_apart() -> None:
    assert normalised(["What is 5 + 3?"]) != normalised(["What is 5 - 3?"])
    assert normalised(["ﬁve  Cats?"]) == normalised(["five cats"])


def test_no_benchmarks_no_problem() -> None:
    assert BenchmarkIndex([]).problem(["anything at all that is long enough to count"]) is None
