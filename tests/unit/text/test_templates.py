"""Our own prompt templates: many, different, deterministic, and solvable where they claim to be."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest

from draftsmith.text import chat_templates, code_templates, math_templates
from draftsmith.text.code_snippets import BUGGY, SLOW
from draftsmith.text.templates import filled, slots

MAKERS = [math_templates.math_problems, code_templates.code_tasks, chat_templates.chat_requests]
Maker = Callable[..., Iterator[tuple[str, ...]]]


def problems_with(words: str, *, count: int = 2000) -> list[str]:
    return [turns[0] for turns in math_templates.math_problems(5, count=count) if words in turns[0]]


def integers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


@pytest.mark.parametrize("make", MAKERS)
def test_hundreds_of_different_prompts(make: Maker) -> None:
    prompts = list(make(1, count=600))
    assert len(prompts) == len({turns[0] for turns in prompts}) == 600
    assert all(20 <= len(turns[0]) <= 700 and turns[0] == turns[0].strip() for turns in prompts)
    assert all(mark not in turns[0] for turns in prompts for mark in ("<>", "{{", "}}", "  How", "None."))
    follow_ups = sum(len(turns) == 2 for turns in prompts)
    assert 40 <= follow_ups <= 115  # an eighth of 600 is 75; five standard deviations are 40


@pytest.mark.parametrize("make", MAKERS)
def test_the_seed_alone_decides_and_shorter_requests_are_prefixes(make: Maker) -> None:
    assert list(make(7, count=50)) == list(make(7, count=90))[:50]
    assert list(make(7, count=50)) != list(make(8, count=50))


def test_enough_different_structures() -> None:
    assert len(math_templates.TEMPLATES) >= 20
    assert len(code_templates.FAMILIES) >= 25
    first = [turns[0] for turns in math_templates.math_problems(1, count=len(math_templates.TEMPLATES))]
    assert len({re.sub(r"\W.*", "", text[-60:]) + str(len(text)) for text in first}) > 20


def test_templates_end_when_they_are_exhausted() -> None:
    family = slots("<>-<>", "ab", "xyz")
    texts = [turns[0] for turns in filled([family], endings=[""], follow_ups=["?"], seed=1, count=100)]
    assert sorted(texts) == ["a-x", "a-y", "a-z", "b-x", "b-y", "b-z"]


def test_a_slot_without_choices_is_refused() -> None:
    with pytest.raises(ValueError, match="2 slots for 1"):
        slots("<> and <>", "ab")


def test_animals_have_whole_numbers() -> None:
    legs_of = dict(math_templates.ANIMALS)
    for text in problems_with("farm museum"):
        first, second = re.findall(r"keeps (\w+) and (\w+)", text)[0]
        animals, legs = integers(text)[:2]
        second_count = (legs - animals * legs_of[first]) / (legs_of[second] - legs_of[first])
        assert second_count == int(second_count)
        assert 0 < second_count < animals


def test_ages_prices_digits_and_quadratics_have_solutions() -> None:
    for text in problems_with("sum of their ages"):
        times, years, total = integers(text)[:3]
        assert (total - 2 * years) % (times + 1) == 0
    for text in problems_with("Find the price of one of each"):
        a, b, first, c, d, second = integers(text)[:6]
        assert (first * d - b * second) % (a * d - b * c) == 0
        assert (a * second - first * c) % (a * d - b * c) == 0
    for text in problems_with("two-digit number"):
        total, growth = integers(text)[:2]
        assert any(a + b == total and 10 * b + a - 10 * a - b == growth for a in range(1, 10) for b in range(10))
    for text in problems_with("Solve x^2"):
        match = re.match(r"Solve x\^2(?: ([+-]) (\d*)x)? ([+-]) (\d+) = 0", text)
        assert match is not None
        linear = 0 if match[1] is None else int(match[1] + (match[2] or "1"))
        constant = int(match[3] + match[4])
        assert any(x * x + linear * x + constant == 0 for x in range(-9, 10))


@pytest.mark.parametrize("code", [*SLOW, *BUGGY])
def test_snippets_are_python(code: str) -> None:
    compile(code, "snippet", "exec")
