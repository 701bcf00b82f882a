"""Which benchmark prompts a stream of training prompts gives away: planted ones, neighbours, and agreement with the
filter of the prompts stage."""

from __future__ import annotations

import itertools
import random
import re
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.text.contamination import BenchmarkIndex, contaminated

FORM = "\nPlease reason step by step, and put your final answer within \\boxed{}."
QUESTIONS = [
    "Nora packs 12 crates of plums each morning and sells 7 of them at the harbour before noon. How many remain?",
    "A ferry carries 40 cars and returns with 25 of them every single evening of the week. How many stay behind?",
    "What is the area of a regular hexagon whose sides are all exactly 6 centimetres long in total?",
    "How many primes below one hundred end in the digit seven, and what do they add up to together?",
    "In a class of thirty children, eleven play the violin and nine sing in the choir on Fridays. How many do neither?",
]


@dataclass(frozen=True)
class Item:
    id: str
    turns: tuple[str, ...]


MATH = [Item(f"math/{index}", (question + FORM,)) for index, question in enumerate(QUESTIONS)]
CHAT = [
    Item("chat/0", ("Write a poem.", "Now rewrite it in French, and let every second line end on the word sea.")),
    Item("chat/1", ("Tell me about the harbour of the old town where my uncle mended nets all winter.",)),
]
BENCH = [*MATH, *CHAT]
BENIGN = [
    ("What is 17 times 3?" + FORM,),
    ("Nora packs a suitcase each morning. What should she take to the harbour?",),
    ("Write a poem about rain.", "Now rewrite it in German."),
    ("How many primes are there below one hundred?",),
    ("Please reason step by step, and put your final answer within \\boxed{}.",),
    ("Tell me about the harbour of a new town.",),
]


def test_benign_neighbours_contaminate_nothing() -> None:
    assert contaminated(BENCH, training=BENIGN) == {}
    assert contaminated(BENCH, training=[]) == {}
    assert contaminated([], training=BENIGN) == {}


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ((QUESTIONS[0] + FORM,), {"math/0": "equal to a training prompt"}),
        ((("  " + QUESTIONS[0] + FORM).upper().replace(" ", "  "),), {"math/0": "equal to a training prompt"}),
        ((QUESTIONS[1],), {"math/1": "near a training prompt"}),
        (("\uff37\uff32\uff29\uff34\uff25 a poem",), {"chat/0": "equal to a training prompt"}),  # wide letters
        ((QUESTIONS[3].replace(" ", "\u2003").replace("ff", "\ufb00").replace("fi", "\ufb01"),),
         {"math/3": "near a training prompt"}),
        ((QUESTIONS[0].replace("12", "9").replace("7", "3"),), {"math/0": "near a training prompt"}),
        (("Hello!", "Solve: " + QUESTIONS[2] + " Explain every step of it to a friend who hates maths."),
         {"math/2": "near a training prompt"}),
        (("write a poem",), {"chat/0": "equal to a training prompt"}),
        (("Good day.", "Now rewrite it in French, and let every second line end on the word sea!"),
         {"chat/0": "equal to a training prompt"}),
        (("Sing. Now rewrite it in French, and let every second line end on the word sun.",),
         {"chat/0": "near a training prompt"}),
        ((QUESTIONS[3], QUESTIONS[4]), {"math/3": "near a training prompt", "math/4": "near a training prompt"}),
    ],
)  # fmt: skip
def test_planted_prompts_are_found(turns: tuple[str, ...], expected: dict[str, str]) -> None:
    assert contaminated(BENCH, training=[*BENIGN, turns, *BENIGN]) == expected


def test_equal_goes_before_near_in_every_order_and_ids_keep_the_order_of_the_prompts() -> None:
    training = [(QUESTIONS[1],), (QUESTIONS[0],), (QUESTIONS[0] + FORM,)]
    for order in itertools.permutations(training):
        assert list(contaminated(BENCH, training=order).items()) == [
            ("math/0", "equal to a training prompt"),
            ("math/1", "near a training prompt"),
        ]


def test_every_id_of_equal_benchmark_prompts_is_told() -> None:
    twice = [*BENCH, Item("math/again", MATH[2].turns)]
    assert set(contaminated(twice, training=[(QUESTIONS[2] + FORM,)])) == {"math/2", "math/again"}


def test_others_tell_what_is_only_form() -> None:
    """Two questions alone cannot show that their last sentence is no content; the whole benchmark can."""
    neighbour = [("What is 17 times 3?" + FORM,)]
    assert contaminated(MATH[:2], training=neighbour) != {}
    others = [item.turns for item in BENCH]
    assert contaminated(MATH[:2], training=neighbour, others=others) == {}
    assert set(contaminated(MATH[:2], training=[(QUESTIONS[1],)], others=others)) == {"math/1"}
    assert contaminated(MATH[:2], training=[(QUESTIONS[4],)], others=others) == {}


# --- the definition, written down again without an index


def words_of(turn: str) -> list[str]:
    return re.findall(r"\w+", re.sub(r"\d+", "0", turn.lower()))


def runs(turns: Sequence[str]) -> set[tuple[str, ...]]:
    return {tuple(words[i : i + 5]) for words in map(words_of, turns) for i in range(len(words) - 4)}


def plain(turn: str) -> str:
    return re.sub(r"[\s.!?]*$", "", turn.lower())


def verdict(bench: Sequence[str], training: Sequence[str], *, common: set[tuple[str, ...]]) -> str | None:
    """How a pair of prompts of plain words and full stops is related."""
    whole = [[plain(turn) for turn in turns] for turns in (bench, training)]
    if whole[0] == whole[1] or set(whole[0]) & set(whole[1]):
        return "equal to"
    one, other = runs(bench) - common, runs(training) - common
    shared = len(one & other)
    return "near" if shared >= 3 and 2 * shared >= min(len(one), len(other)) else None


# Texts of a few phrases, each of words of its own, so that runs of five are held by none, some or most of the prompts.
PHRASES = [" ".join(f"{letter}{number}" for letter in letters) for number, letters in
           enumerate(["abcde", "abcdefg", "abcdefgh", "abcdefghijk", "ab", "abcdefghijklmnop"])]  # fmt: skip
TEXTS = st.lists(st.sampled_from([*PHRASES, "7 8", "9 10 11."]), min_size=1, max_size=5).map(" ".join)
TURNS = st.lists(TEXTS, min_size=1, max_size=2).map(tuple)


@settings(max_examples=300, deadline=None)
@given(st.lists(TURNS, max_size=8), st.lists(TURNS, max_size=5))
def test_it_finds_what_the_definition_and_the_prompts_stage_find(
    bench: list[tuple[str, ...]], training: list[tuple[str, ...]]
) -> None:
    items = [Item(f"b/{index}", turns) for index, turns in enumerate(bench)]
    counts: dict[tuple[str, ...], int] = {}
    for turns in set(bench):
        for run in runs(turns):
            counts[run] = counts.get(run, 0) + 1
    common = {run for run, count in counts.items() if count > 3}
    found = contaminated(items, training=training)
    for item in items:
        ways = {verdict(item.turns, turns, common=common) for turns in training} - {None}
        expected = "equal to" if "equal to" in ways else "near" if ways else None
        assert found.get(item.id) == (None if expected is None else f"{expected} a training prompt")
    index = BenchmarkIndex(bench)
    assert bool(found) == any(index.problem(turns) is not None for turns in training)
    assert ("equal to a training prompt" in found.values()) == any(
        index.problem(turns) == "equal to a benchmark prompt" for turns in training
    )


@pytest.mark.parametrize(("num_holders", "found"), [(3, True), (4, False)])
def test_what_more_than_three_prompts_hold_is_their_form(num_holders: int, found: bool) -> None:
    shared = "one two three four five six seven eight"
    bench = [Item(f"b/{index}", (f"{shared} {'xyzuvw'[index]}",)) for index in range(num_holders)]
    assert bool(contaminated(bench, training=[(f"{shared} q",)])) == found


@pytest.mark.parametrize(
    ("own", "found"),
    # 11 runs are the form's, 4 shared ones are content: they decide, be the rest of one's own 3 runs or 5.
    [("o1 o2 o3", True), ("o1 o2 o3 o4 o5", False)],
)
@pytest.mark.parametrize("planted", ["training", "benchmark"])
def test_form_counts_in_neither_size(own: str, found: bool, planted: str) -> None:
    """Half of the smaller side's runs must be shared: form on either side must not make it look larger."""
    form = " ".join(f"f{letter}" for letter in "abcdefghijklmno")
    content = " ".join(f"c{letter}" for letter in "abcdefgh")  # 4 runs
    others = [(f"{form}",), (f"{form} n1",), (f"{form} n2",), (f"{form} n3",)]
    far = f"{content}. " + " ".join(f"z{letter}" for letter in "abcdefghijklmnopqrstuvwxyz")
    near = (f"{content} {own}", form)  # in two turns, so that no run crosses
    size = len(runs(near) - runs([form]))
    assert size == 4 + len(own.split())
    assert found == (size <= 2 * 4)
    bench, training = (near, (far,)) if planted == "benchmark" else ((far,), near)
    assert bool(contaminated([Item("b", bench)], training=[training], others=others)) == found


def test_both_sides_may_change_places() -> None:
    """Being equal and being near are symmetric, so that either side may be the one that is indexed."""
    pairs = [(item.turns, turns) for item in BENCH for turns in [*BENIGN, (QUESTIONS[0],), ("write a poem",)]]
    for bench, training in pairs:
        forth, back = BenchmarkIndex([bench]).problem(training), BenchmarkIndex([training]).problem(bench)
        assert forth == back


def test_training_prompts_are_read_once_and_not_kept() -> None:
    letters = random.Random(3)

    def stream(count: int) -> Iterator[tuple[str, ...]]:
        for _ in range(count):
            yield (" ".join("".join(letters.choices("abcdefgh", k=4)) for _ in range(100)),)
        yield (QUESTIONS[3],)

    contaminated(BENCH, training=stream(1))  # what is made once is made
    peaks = []
    for count in (50, 2000):
        tracemalloc.start()
        assert set(contaminated(BENCH, training=stream(count))) == {"math/3"}
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 100_000  # 2,000 prompts of 500 characters are a million bytes


def test_work_does_not_grow_with_the_benchmarks() -> None:
    """A training prompt looks only at benchmark prompts that share a run of words with it."""
    letters = random.Random(4)
    bench = [(" ".join("".join(letters.choices("abcdefgh", k=4)) for _ in range(40)),) for _ in range(500)]
    index = BenchmarkIndex(bench)
    assert index.matches(bench[7]) == {7: "equal to"}
    assert index.matches((bench[7][0] + " and then some",)) == {7: "near"}
    assert max(len(holders) for holders in index._holders.values()) <= 3
