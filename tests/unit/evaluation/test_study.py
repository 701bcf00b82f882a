"""The body and the page of a study, from reports made by hand."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest

from draftsmith.errors import DraftsmithError
from draftsmith.evaluation.study import Missing, StudyRun, study_body, study_page
from draftsmith.evaluation.study_figure import study_figure
from tests.unit.evaluation.evaluations import body_of_lengths

RECIPE = {"steps": 150, "global_batch": 6, "seed": 4}
DATA = {"target": "tiny", "cache": "cache/tiny-12345678"}
PROVENANCE = {
    "git_commit": "0123456789abcdef", "git_dirty": "no", "changed_files": [], "hardware": "2 x CPU",
}  # fmt: skip
# Tokens accepted in each round, prompt by prompt; K is 2, of the last drafter 1.
LENGTHS: dict[str, dict[str, list[list[int]]]] = {
    "first": {"gsm8k": [[2, 1], [0, 1], [1, 1]], "mt_bench": [[2], [1, 1]]},
    "second": {"gsm8k": [[1, 0], [0, 0], [0, 0]], "mt_bench": [[2], [1, 1]]},
    "single": {"gsm8k": [[1, 1], [0, 1], [1, 1]], "mt_bench": [[1], [0, 1]]},
}
BLOCK_SIZES = {"first": 2, "second": 2, "single": 1}


def study_run(drafter: str) -> StudyRun:
    key = f"{drafter}-tiny-study"
    return StudyRun(
        drafter,
        key,
        "dspark",
        train={
            "steps": 150,
            "num_parameters": 3_210_000,
            "num_samples": 300,
            "num_supervised_tokens": 30_000,
            "seconds": 61.4,
            "expected_accepted_length": 1.4567,
        },
        evaluate=body_of_lengths(
            key, LENGTHS[drafter], temperatures=(0.0, 1.0), block_size=BLOCK_SIZES[drafter], max_new_tokens=64
        ),
    )


def body_of(*drafters: str, baseline: str = "first", missing: tuple[Missing, ...] = ()) -> dict[str, Any]:
    return study_body(
        [study_run(name) for name in drafters], baseline=baseline, missing=missing, data=DATA, recipe=RECIPE,
        provenance=PROVENANCE, seed=6,
    )  # fmt: skip


def row_of(body: dict[str, Any], drafter: str, benchmark: str, temperature: float = 0.0) -> dict[str, Any]:
    [row] = [
        row
        for row in body["rows"]
        if (row["drafter"], row["benchmark"], row["temperature"]) == (drafter, benchmark, temperature)
    ]
    return dict(row)


def test_rows_are_those_of_the_reports() -> None:
    body = body_of("first", "second", "single")
    assert body["schema_version"] == 1
    assert [(row["drafter"], row["temperature"], row["benchmark"]) for row in body["rows"]] == [
        (drafter, temperature, benchmark)
        for drafter in ("first", "second", "single")
        for temperature in (0.0, 1.0)
        for benchmark in ("gsm8k", "mt_bench")
    ]
    row = row_of(body, "first", "gsm8k")
    # Six rounds accept 2 + 1 + 0 + 1 + 1 + 1 = 6 tokens.
    assert (row["domain"], row["num_prompts"], row["num_rounds"]) == ("math", 3, 6)
    assert row["accepted_length"] == pytest.approx(2.0)
    assert row["accepted_length_without_bonus"] == pytest.approx(1.0)
    low, high = row["accepted_length_interval"]
    assert low < 2.0 < high
    assert row["conditional_acceptance"] == pytest.approx([5 / 6, 1 / 5])
    json.dumps(body, allow_nan=False)


def test_differences_are_to_the_first_drafter() -> None:
    body = body_of("first", "second", "single")
    row = row_of(body, "second", "gsm8k")
    assert row["difference"] == pytest.approx(7 / 6 - 12 / 6)
    # Prompt by prompt -1, -0.5 and -1 token a round: never 0.
    assert row["difference_interval"] == pytest.approx([-1.0, -0.5])
    assert row["difference_excludes_zero"] is True
    same = row_of(body, "second", "mt_bench")
    assert (same["difference"], same["difference_interval"], same["difference_excludes_zero"]) == (0.0, [0, 0], False)
    own = row_of(body, "first", "gsm8k")
    assert (own["difference"], own["difference_excludes_zero"]) == (0.0, False)


def test_means_are_over_benchmarks() -> None:
    body = body_of("first", "second", "single")
    means = {(row["drafter"], row["temperature"]): row for row in body["means"]}
    assert means.keys() == {(name, temperature) for name in LENGTHS for temperature in (0.0, 1.0)}
    row = means["second", 0.0]
    assert row["accepted_length"] == pytest.approx((7 / 6 + 7 / 3) / 2)
    assert row["difference"] == pytest.approx(-5 / 12)
    assert (row["num_benchmarks"], row["num_prompts"], row["num_rounds"]) == (2, 5, 9)
    # Acceptance is pooled over rounds: 1 of 6 and 3 of 3 at the first position, 0 of 1 and 1 of 3 at the second.
    assert row["conditional_acceptance"] == pytest.approx([4 / 9, 1 / 4])
    assert row["num_conditional"] == [9, 4]


def test_training_says_what_each_drafter_took() -> None:
    [first, *_, single] = body_of("first", "second", "single")["training"]
    assert first["epochs"] == pytest.approx(150 * 6 / 300)
    assert (first["steps"], first["seconds"], first["num_supervised_tokens"]) == (150, 61.4, 30_000)
    assert (first["block_size"], single["block_size"]) == (2, 1)


def cells(page: str, heading: str) -> dict[str, list[str]]:
    """First cell -> the other cells, of the first table below `heading` (of each first cell the first line)."""
    lines = page[page.index(heading) :].split("\n")
    start = next(index for index, line in enumerate(lines) if line.startswith("|"))
    found: dict[str, list[str]] = {}
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        first, *rest = (cell.strip() for cell in line.strip("|").split("|"))
        found.setdefault(first, rest)
    return found


def test_the_page_shows_drafters_side_by_side() -> None:
    body = body_of("first", "second", "single")
    page = study_page(body)
    lengths = cells(page, "## Accepted length at temperature 0")
    assert lengths["drafter"] == ["K", "gsm8k (math, 3)", "mt_bench (chat, 2)", "mean", "mean without bonus"]
    assert [row[0] for row in lengths.values()][2:] == ["2", "2", "1"]
    assert re.fullmatch(r"2\.00 ± 0\.\d\d", lengths["first"][1])
    differences = cells(page, "Less that of first")
    assert "first" not in differences
    assert differences["second"][0] == "-0.83 ± 0.25 *"
    assert differences["second"][1] == "+0.00 ± 0.00"
    positions = cells(page, "## Conditional acceptance by position")
    assert positions["single"] == ["0", "9", "0.778", ""]
    assert cells(page, "## Training")["first"] == ["2", "3.2 M", "150", "3.0", "61", "1.457"]
    assert "2 x CPU, commit 0123456789." in page
    assert "## Accepted length at temperature 1" in page
    assert "Not in these tables" not in page


def test_a_dirty_tree_is_told() -> None:
    body = body_of("first", "second")
    body["provenance"] = {**PROVENANCE, "git_dirty": "yes", "changed_files": ["a", "b"]}
    assert "commit 0123456789, changed since in 2 files." in study_page(body)


def test_what_failed_is_named_and_the_rest_is_shown() -> None:
    body = body_of("first", "single", missing=(Missing("second", "train"),))
    assert body["missing"] == [{"drafter": "second", "stage": "train"}]
    assert "**Not in these tables:** second (train failed)" in study_page(body)


def test_without_the_baseline_there_are_no_differences() -> None:
    body = body_of("second", "single", missing=(Missing("first", "evaluate"),))
    assert {row["difference"] for row in body["rows"] + body["means"]} == {None}
    page = study_page(body)
    assert "Less that of" not in page
    assert cells(page, "## Accepted length at temperature 0").keys() >= {"second", "single"}


def test_unequal_runs_are_refused() -> None:
    runs = [study_run("first"), study_run("second")]
    other = StudyRun("second", "k", "dspark", {**runs[1].train, "num_samples": 299}, runs[1].evaluate)
    with pytest.raises(DraftsmithError, match=r"second and first differ in num_samples.*got 299, expected 300"):
        study_body([runs[0], other], baseline="first", missing=[], data=DATA, recipe=RECIPE, provenance={}, seed=0)
    evaluate = copy.deepcopy(dict(runs[1].evaluate))
    evaluate["rows"].pop()
    other = StudyRun("second", "k", "dspark", runs[1].train, evaluate)
    with pytest.raises(DraftsmithError, match="differ in benchmarks"):
        study_body([runs[0], other], baseline="first", missing=[], data=DATA, recipe=RECIPE, provenance={}, seed=0)
    for field, value in (("target", "large"), ("dtype", "bfloat16"), ("max_new_tokens", 4)):
        other = StudyRun("second", "k", "dspark", runs[1].train, {**runs[1].evaluate, field: value})
        with pytest.raises(DraftsmithError, match=f"second and first differ in {field}.*got {value}"):
            study_body([runs[0], other], baseline="first", missing=[], data=DATA, recipe=RECIPE, provenance={}, seed=0)
    with pytest.raises(DraftsmithError, match="without any finished run"):
        study_body([], baseline="first", missing=[], data=DATA, recipe=RECIPE, provenance={}, seed=0)


def test_the_figure_has_a_panel_a_benchmark_and_temperature() -> None:
    body = body_of("first", "second", "single")
    for row in body["rows"]:
        row["num_conditional"] = [12 for _ in row["num_conditional"]]
    row_of(body, "second", "gsm8k")["num_conditional"][1] = 9  # too few to be drawn
    figure = study_figure(body)
    assert [panel.get_title() for panel in figure.axes] == [
        f"{name}, temperature {temperature}" for temperature in (0, 1) for name in ("gsm8k", "mt_bench")
    ]
    lines = {line.get_label(): line for line in figure.axes[0].get_lines() if not line.get_label().startswith("_")}
    assert lines.keys() == {"first", "second", "single"}
    assert list(lines["first"].get_ydata()) == pytest.approx([5 / 6, 1 / 5])
    assert list(lines["second"].get_ydata()) == pytest.approx([1 / 6])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["first", "second", "single"]
