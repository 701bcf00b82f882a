"""Histograms and speed: bins counted one by one, times that add up."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from typing import Any

import pytest

from draftsmith.evaluation.page_model import Page, page_of
from draftsmith.evaluation.page_speed import (
    accepted_histogram,
    batch_sizes,
    length_histogram,
    speed_basis,
    speed_grid,
    step_histogram,
    step_time_figure,
    throughput_figure,
)
from tests.page_fixtures import DFLASH, DSPARK, MTP, page_input, page_of_made


def alone() -> tuple[Page, dict[str, Any]]:
    body = copy.deepcopy(dict(page_input(DSPARK).evaluate))
    return page_of([(body, None)]), body


def points_of(page: Page, drafter: int, temperature: float) -> list[dict[str, Any]]:
    return [point for point in page.drafters[drafter].evaluate["speed"] if point["temperature"] == temperature]


def test_shares_of_rounds_by_accepted_tokens() -> None:
    page = page_of_made(DSPARK, MTP)
    figure = accepted_histogram(page, 1.0)
    for item, trace in zip(page.drafters, figure.traces, strict=True):
        [counts] = [entry["counts"] for entry in item.evaluate["accepted_histogram"] if entry["temperature"] == 1.0]
        assert trace["x"] == [str(number) for number in range(item.block_size + 1)]
        assert trace["y"] == pytest.approx([count / sum(counts) for count in counts])
    # The sweep at threshold 0 counts the same tokens.
    whole = next(point for point in page.drafters[0].evaluate["thresholds"] if point["temperature"] == 1.0)
    mean = sum(accepted * share for accepted, share in enumerate(figure.traces[0]["y"]))
    assert mean == pytest.approx(whole["accepted"] / whole["num_rounds"])


def test_every_answer_is_in_the_bin_of_its_length() -> None:
    page, body = alone()
    [entry] = [entry for entry in body["answer_lengths"] if entry["temperature"] == 1.0]
    entry["lengths"] = [1, 4, 5, 8, 9, 95, 96, 96]
    [trace] = length_histogram(page, 1.0).traces
    # 96 tokens in 24 bins: 1-4, 5-8, ..., 93-96; the line steps at the edges and ends with its last value again.
    assert trace["x"] == [4 * number + 0.5 for number in range(25)]
    assert [8 * share for share in trace["y"]] == [2, 2, 1, *[0] * 20, 3, 3]
    assert trace["line"]["shape"] == "hv"
    assert trace["customdata"][0].startswith("dspark_b7, 1–4 tokens: 2 of 8 answers")
    assert [row[:3] for row in length_histogram(page, 1.0).numbers.rows] == [
        ("1–4 tokens", "dspark_b7", "2"), ("5–8 tokens", "dspark_b7", "2"), ("9–12 tokens", "dspark_b7", "1"),
        ("93–96 tokens", "dspark_b7", "3"),
    ]  # fmt: skip


def test_answers_of_another_limit_still_fit_their_bins() -> None:
    page, body = alone()
    body["max_new_tokens"] = 100
    [entry] = [entry for entry in body["answer_lengths"] if entry["temperature"] == 1.0]
    entry["lengths"] = [1, 100]
    [trace] = length_histogram(page, 1.0).traces
    assert sum(trace["y"][:-1]) == 1
    assert trace["x"][-1] >= 100


def test_every_step_is_in_a_bin_and_slow_ones_share_the_last() -> None:
    page, body = alone()
    point = next(point for point in body["speed"] if (point["batch_size"], point["temperature"]) == (4, 1.0))
    point["step_ms"] = [10 + number / 10 for number in range(299)] + [5000.0]
    [trace] = step_histogram(page, 1.0, 4).traces
    edges, shares = trace["x"], trace["y"][:-1]
    assert edges[-1] < 41
    assert sum(shares) == pytest.approx(1)
    inside = [value for value in point["step_ms"] if edges[-2] <= value]
    assert shares[-1] == pytest.approx(len(inside) / 300)
    second = [value for value in point["step_ms"] if edges[1] <= value < edges[2]]
    assert shares[1] == pytest.approx(len(second) / 300)
    assert trace["customdata"][-1].startswith(f"dspark_b7, {edges[-2]:.3g} ms and more: {len(inside)} of 300 steps")


def test_steps_that_all_take_the_same_time() -> None:
    page, body = alone()
    for point in body["speed"]:
        point["step_ms"] = [3.0]
    [trace] = step_histogram(page, 1.0, 1).traces
    assert sum(trace["y"][:-1]) == 1
    assert all(low < high for low, high in itertools.pairwise(trace["x"]))


def test_drafters_share_bins() -> None:
    first, second = step_histogram(page_of_made(DSPARK, MTP), 0.0, 1).traces
    assert first["x"] == second["x"]


def test_tokens_a_second_beside_those_of_the_same_run() -> None:
    page = page_of_made(DSPARK, MTP)
    figure = throughput_figure(page, 1.0)
    assert [trace["name"] for trace in figure.traces] == [
        "dspark_b7", "plain decoding (run of dspark_b7)", "mtp1", "plain decoding (run of mtp1)",
    ]  # fmt: skip
    for index in (0, 1):
        points = points_of(page, index, 1.0)
        own, plain = figure.traces[2 * index : 2 * index + 2]
        assert own["x"] == plain["x"] == ["1", "4"]
        assert own["y"] == [point["tokens_per_s"] for point in points]
        assert plain["y"] == [point["plain_tokens_per_s"] for point in points]
        assert f"{own['y'][1] / plain['y'][1]:.2f} times plain" in own["customdata"][1]
        assert own["line"]["color"] == plain["line"]["color"]
        assert own["line"]["dash"] != plain["line"]["dash"]


def test_batch_sizes_are_in_order_also_where_one_drafter_has_more() -> None:
    page, _ = alone()
    more = page_input(type(DSPARK)(name="more", batch_sizes=(32, 2)))
    page = page_of([(page.drafters[0].evaluate, None), (more.evaluate, None)])
    assert batch_sizes(page, 1.0) == [1, 2, 4, 32]
    assert throughput_figure(page, 1.0).layout["xaxis"]["categoryarray"] == ["1", "2", "4", "32"]
    assert [trace["name"] for trace in step_histogram(page, 1.0, 32).traces] == ["more"]


def test_parts_of_a_step_add_up() -> None:
    page = page_of_made(DSPARK, DFLASH)
    figure = step_time_figure(page, 1.0, 4)
    assert [trace["name"] for trace in figure.traces] == ["draft", "verify", "sampling"]
    for index, label in enumerate(("dspark_b7", "dflash_b7")):
        point = next(point for point in points_of(page, index, 1.0) if point["batch_size"] == 4)
        parts = {trace["name"]: dict(zip(trace["y"], trace["x"], strict=True)) for trace in figure.traces}
        assert [parts[name][label] for name in ("draft", "verify", "sampling")] == [
            point["draft_ms"], point["verify_ms"], point["sample_ms"],
        ]  # fmt: skip
        plain = f"{label}: plain"
        assert plain not in parts["draft"]
        assert (parts["verify"][plain], parts["sampling"][plain]) == (
            point["plain_verify_ms"], point["plain_sample_ms"],
        )  # fmt: skip
        note = next(note for note in figure.layout["annotations"] if note["y"] == label)
        whole = point["draft_ms"] + point["verify_ms"] + point["sample_ms"]
        assert note["x"] == pytest.approx(whole)
        assert note["text"] == f"{100 * point['sample_ms'] / whole:.1f} %"
        assert figure.layout["xaxis"]["range"][1] > whole
    # The axis counts upwards: what comes first is on top, each drafter above its plain decoding.
    assert figure.layout["yaxis"]["categoryarray"] == [
        "dflash_b7: plain", "dflash_b7", "dspark_b7: plain", "dspark_b7",
    ]  # fmt: skip
    patterns = {trace["marker"]["pattern"]["shape"] for trace in figure.traces}
    assert len(patterns) == 3


def test_what_is_behind_the_times() -> None:
    page = page_of_made(DSPARK, replace(DFLASH, batch_sizes=(4,)), replace(MTP, batch_sizes=()))
    page.drafters[0].evaluate["speed"][2]["num_steps"] = 1234
    assert speed_basis(page, 1.0) == (
        "Times of steps: a run of their own at temperature 1; steps: dspark_b7 1,234 (batch size 1), 120 (batch size "
        "4); dflash_b7 120 (batch size 4). Machine: 2 x CPU, 8 GiB, no GPU, Linux x86_64."
    )


def test_without_a_speed_run_there_is_no_batch_size() -> None:
    page, body = alone()
    body["speed"] = []
    assert batch_sizes(page, 1.0) == []


def test_speed_by_benchmark_and_what_is_not_known() -> None:
    page, body = alone()
    row = next(row for row in body["rows"] if (row["benchmark"], row["temperature"]) == ("humaneval", 0.0))
    row |= {"tokens_per_s": None, "plain_tokens_per_s": None, "speedup": None, "identical_to_plain": 0.5}
    first, second, _ = speed_grid(page, 0.0).rows
    own = next(row for row in body["rows"] if (row["benchmark"], row["temperature"]) == ("gsm8k", 0.0))
    assert first == (
        "gsm8k", "dspark_b7", "16", f"{own['num_tokens']:,}", f"{own['tokens_per_s']:.1f}",
        f"{own['plain_tokens_per_s']:.1f}", "1.90", "100.0 %",
    )  # fmt: skip
    assert second[4:] == ("-", "-", "-", "50.0 %")
    assert {row[-1] for row in speed_grid(page, 1.0).rows} == {"-"}
