"""The head of the page: what was evaluated, and every warning."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from draftsmith.evaluation.page_head import benchmark_grid, key_grid, notices, prompts_line
from draftsmith.evaluation.page_model import Page, page_of
from tests.html_reader import read_html
from tests.page_fixtures import DFLASH, DSPARK, page_input, page_of_made


def texts(page: Page) -> list[str]:
    return [node.text for made in notices(page) for node in read_html(made).all("div", class_="notice")]


def two(**changes: Any) -> tuple[Page, dict[str, Any]]:
    """A page of two drafters, of which the second can be changed through its body."""
    first, second = (page_input(made, samples=False).evaluate for made in (DSPARK, DFLASH))
    body = copy.deepcopy(dict(second)) | changes
    return page_of([(first, None), (body, None)]), body


def test_reports_without_a_fault_have_no_notice() -> None:
    page, _ = two()
    assert texts(page) == []


def test_contaminated_prompts_are_named() -> None:
    page, body = two()
    body["benchmarks"][0]["contaminated"] = ["gsm8k/3", "gsm8k/<4>"]
    [text] = texts(page)
    assert text.startswith("Contaminated benchmark. gsm8k: 2 of 6 prompts are equal or near to a training prompt of ")
    assert text.endswith("of dflash_b7, so its numbers flatter the drafter: gsm8k/3, gsm8k/<4>.")


def test_many_contaminated_prompts_are_counted_and_all_in_the_table() -> None:
    page = page_of_made(DSPARK)
    ids = [f"gsm8k/{row}" for row in range(11)]
    page.drafters[0].evaluate["benchmarks"][0]["contaminated"] = ids
    [text] = texts(page)
    assert text.endswith(f": {', '.join(ids[:8])} and 3 more.")
    assert benchmark_grid(page).rows[0][-1] == ", ".join(ids)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("target", "other", "target (dspark_b7: smollm2_135m, dflash_b7: other)"),
        ("dtype", "bfloat16", "dtype (dspark_b7: float32, dflash_b7: bfloat16)"),
        ("max_new_tokens", 8, "max new tokens (dspark_b7: 96, dflash_b7: 8)"),
    ],
)
def test_other_settings_are_not_comparable(name: str, value: Any, told: str) -> None:
    page, _ = two(**{name: value})
    assert texts(page) == [f"Not comparable. The keys differ in {told}."]


@pytest.mark.parametrize(
    ("name", "told"),
    [("target_digest", "the target's weights"), ("text_digest", "the tokenizer or the chat template")],
)
def test_another_target_of_the_same_name_is_not_comparable(name: str, told: str) -> None:
    page, body = two()
    body["provenance"] = {**body["provenance"], name: "b" * 64}
    assert texts(page) == []  # the other report is older and does not say
    page.drafters[0].evaluate["provenance"][name] = "a" * 64
    assert texts(page) == [f"Not comparable. The keys differ in {told} (dspark_b7: {'a' * 12}, dflash_b7: {'b' * 12})."]
    body["provenance"][name] = "a" * 64
    assert texts(page) == []


def test_speeds_of_two_machines_are_not_comparable() -> None:
    page, _ = two(machine="a GPU")
    [text] = texts(page)
    assert text.startswith("Speeds are not comparable.")


@pytest.mark.parametrize("fault", ["prompts", "form", "benchmark", "replaced"])
def test_other_prompts_are_told(fault: str) -> None:
    page, body = two()
    if fault == "prompts":
        for row in body["rows"]:
            if row["benchmark"] == "gsm8k":
                row["prompts"]["ids"][0] = "gsm8k/99"
    elif fault == "form":
        body["benchmarks"][0]["prompt_form"] = "Think: {question}"
    elif fault == "replaced":
        body["benchmarks"][0]["replaced_by"] = "folder/gsm8k.jsonl"
    else:
        body["rows"] = [row for row in body["rows"] if row["benchmark"] != "gsm8k"]
        del body["benchmarks"][0]
    [text] = texts(page)
    assert text.startswith("Not the same prompts. gsm8k: not every key was asked")


def test_answers_unlike_plain_decoding_are_told() -> None:
    page, body = two()
    assert {row["identical_to_plain"] for row in body["rows"]} == {1.0, None}
    body["rows"][1]["identical_to_plain"] = 0.75
    [text] = texts(page)
    assert text.startswith("Not identical to plain decoding. dflash_b7 at temperature 0 ")
    assert "for which it did: humaneval 75.0 %. Rounding" in text
    assert text.endswith("(here: float32).")


def test_too_few_prompts_for_an_interval_are_told() -> None:
    page = page_of_made(type(DSPARK)(benchmarks=("gsm8k", "mt_bench"), num_prompts=4, temperatures=(1.0,)))
    [text] = texts(page)
    assert text.startswith("Few prompts. gsm8k (4), mt_bench (4): below 5 prompts")
    enough = page_of_made(type(DSPARK)(benchmarks=("gsm8k", "mt_bench"), num_prompts=5, temperatures=(1.0,)))
    assert texts(enough) == []


def test_the_facts_of_a_key() -> None:
    made = type(DSPARK)(git_dirty="yes", temperatures=(1.0,), benchmarks=("gsm8k",))
    grid = key_grid(page_of_made(DFLASH, made))
    assert grid.headers == ("drafter", "dflash_b7", "dspark_b7")
    assert {row[0]: row[2] for row in grid.rows} == {
        "key": "dspark_b7-smollm2_135m",
        "kind": "dspark, with confidence head",
        "K, draft tokens a round": "7",
        "target": "smollm2_135m, float32",
        "max new tokens": "96",
        "seed": "6",
        "machine": "2 x CPU, 8 GiB, no GPU, Linux x86_64",
        "commit": "0123456789ab, changed since",
    }
    assert {row[0]: row[1] for row in grid.rows}["kind"] == "dflash, without confidence head"
    assert {row[0]: row[1] for row in grid.rows}["commit"] == "0123456789ab, as committed"


def test_the_facts_of_a_benchmark() -> None:
    page = page_of_made(DSPARK)
    facts = page.drafters[0].evaluate["benchmarks"][0]
    line = dict(zip(benchmark_grid(page).headers, benchmark_grid(page).rows[0], strict=True))
    assert line == {
        "benchmark": "gsm8k", "domain": "math", "prompts": "6", "in the paper": "500", "cap": "6", "turns": "1",
        "prompt form": "{question}", "source": "hub/gsm8k", "revision": "6e4ed1a2a79a", "split": "test",
        "licence": "MIT", "near a training prompt": "none",
    }  # fmt: skip
    facts |= {"revision": None, "replaced_by": "folder/gsm8k.jsonl"}
    line = dict(zip(benchmark_grid(page).headers, benchmark_grid(page).rows[0], strict=True))
    assert (line["revision"], line["source"]) == ("-", "folder/gsm8k.jsonl")


def test_a_benchmark_described_in_two_ways_has_two_lines() -> None:
    page, body = two()
    body["benchmarks"][1]["cap"] = 9
    assert [row[0] for row in benchmark_grid(page).rows] == [
        "gsm8k", "humaneval (dspark_b7)", "humaneval (dflash_b7)", "mt_bench",
    ]  # fmt: skip


def test_prompts_are_counted_against_the_papers() -> None:
    page = page_of_made(DSPARK)
    page.drafters[0].evaluate["benchmarks"][1]["reference_count"] = None
    assert prompts_line(page).endswith(": gsm8k 6 of 500, humaneval 6, mt_bench 6 of 80.")
