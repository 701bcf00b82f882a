"""The body of evaluate.json and its series, from answers made by hand."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from typing import Any

import pytest

from draftsmith.errors import DraftsmithError
from draftsmith.evaluation.report import DrafterFacts, evaluation_body
from draftsmith.evaluation.series import (
    accepted_length_csv,
    conditional_acceptance_csv,
    evaluation_series,
    speed_csv,
    thresholds_csv,
)
from tests.unit.evaluation.evaluations import (
    body_of,
    body_of_lengths,
    make_decoded,
    make_facts,
    make_generation,
    make_point,
    make_round,
)

LENGTHS = {"gsm8k": [[2, 1], [1, 0]], "humaneval": [[2, 2], [2, 2]]}


@pytest.fixture(scope="module")
def body() -> dict[str, Any]:
    decoded = [make_decoded(name, prompts, temperature=t) for t in (0.0, 1.0) for name, prompts in LENGTHS.items()]
    facts = [make_facts("gsm8k", cap=7, reference_count=None, contaminated=["gsm8k/1"]), make_facts("humaneval")]
    return body_of("dspark-tiny", decoded, facts=facts, speed=[make_point(1), make_point(4, tokens_per_s=30.0)])


def test_head(body: dict[str, Any]) -> None:
    assert {name: body[name] for name in body if not isinstance(body[name], list)} == {
        "schema_version": 2,
        "key": "dspark-tiny",
        "drafter": {"name": "dspark", "kind": "dspark", "block_size": 2, "confidence": False},
        "target": "tiny",
        "dtype": "float32",
        "block_size": 2,
        "max_new_tokens": 96,
        "seed": 6,
        "machine": "2 x CPU",
        "provenance": {"git_commit": "0123456789abcdef"},
    }
    assert [item["name"] for item in body["benchmarks"]] == ["gsm8k", "humaneval"]
    assert body["benchmarks"][0]["contaminated"] == ["gsm8k/1"]


def test_a_row_by_hand(body: dict[str, Any]) -> None:
    row = body["rows"][0]
    expected = {
        "benchmark": "gsm8k", "domain": "math", "temperature": 0.0, "batch_size": 16, "num_prompts": 2,
        "num_requests": 2, "num_prompts_without_rounds": 0, "cap": 7, "reference_count": None, "num_rounds": 4,
        "num_tokens": 10, "num_committed": 8, "num_cut_rounds": 0, "share_cut": 0.0, "num_ended_rounds": 0,
        "share_ended": 0.0, "accepted_length": 2.0, "accepted_length_interval": [1.5, 2.5],
        "accepted_length_without_bonus": 1.0, "accepted_length_without_bonus_interval": [0.5, 1.5],
        "accepted_length_macro": 2.0, "accepted_length_macro_interval": [1.5, 2.5],
        "accepted_length_without_bonus_macro": 1.0, "accepted_length_without_bonus_macro_interval": [0.5, 1.5],
        "conditional_acceptance": [pytest.approx(3 / 4), pytest.approx(1 / 3)],
        "conditional_acceptance_interval": [[0.5, 1.0], [0.0, 0.5]], "num_conditional": [4, 3],
        "prefix_survival": [0.75, 0.25], "num_counted": [4, 4], "tokens_per_s": 10.0, "plain_tokens_per_s": 5.0,
        "speedup": 2.0, "identical_to_plain": 1.0,
        "prompts": {
            "ids": ["gsm8k/0", "gsm8k/1"], "rounds": [2, 2], "committed": [5, 3], "committed_draft": [3, 1],
        },
    }  # fmt: skip
    turns = row["turns"]
    assert {name: row[name] for name in row if name != "turns"} == expected
    assert [(turn["turn"], turn["num_requests"], turn["accepted_length"]) for turn in turns] == [(0, 2, 2.0)]


def test_only_greedy_answers_are_compared_with_plain_decoding() -> None:
    greedy = make_decoded("gsm8k", [[1], [1]])
    other = replace(greedy.plain[0], token_ids=(9, 9, *greedy.plain[0].token_ids[1:]))
    greedy = replace(greedy, plain=(other, greedy.plain[1]))
    body = body_of("k", [greedy, replace(greedy, temperature=1.0)])
    assert [row["identical_to_plain"] for row in body["rows"]] == [0.5, None]
    # Lengths are those of the answers; each side's speed counts its own tokens: 6 in 1 s, 7 in 2 s.
    assert body["answer_lengths"][0]["lengths"] == [3, 3]
    assert [body["rows"][0][name] for name in ("tokens_per_s", "plain_tokens_per_s")] == [6.0, 3.5]


def test_wall_times_that_cannot_be_compared_are_null() -> None:
    [row] = body_of("k", [make_decoded("gsm8k", [[1], [1]], wall_s=None, plain_wall_s=None)])["rows"]
    assert (row["tokens_per_s"], row["plain_tokens_per_s"], row["speedup"]) == (None, None, None)


def test_cut_and_ended_rounds_are_counted() -> None:
    rounds = [
        make_round(0),
        make_round(2, verified=2, committed=1, cut=True),
        *(make_round(2, verified=2, ended=True) for _ in range(2)),
    ]
    answers = (make_generation("gsm8k/0/t0", rounds), make_generation("gsm8k/1/t0", []))
    item = replace(make_decoded("gsm8k", []), generations=answers, plain=answers)
    [row] = body_of("k", [item])["rows"]
    assert (row["num_cut_rounds"], row["num_ended_rounds"]) == (1, 2)
    assert (row["share_cut"], row["share_ended"]) == (1 / 4, 2 / 4)
    assert (row["num_prompts"], row["num_prompts_without_rounds"], row["num_tokens"]) == (2, 1, 1 + 1 + 2 + 2 + 2)
    assert row["accepted_length"] == pytest.approx((1 + 1 + 2 + 2) / 4)


def test_groups(body: dict[str, Any]) -> None:
    assert [(row["domain"], row["temperature"]) for row in body["domains"]] == [
        ("math", 0.0), ("code", 0.0), ("math", 1.0), ("code", 1.0),
    ]  # fmt: skip
    assert [row["accepted_length"] for row in body["averages"]] == [pytest.approx(2.5), pytest.approx(2.5)]
    assert [(row["temperature"], row["first"], row["num_rounds"]) for row in body["output_positions"]] == [
        (0.0, 0, 8),
        (1.0, 0, 8),
    ]
    assert body["thresholds"] == []
    assert body["accepted_histogram"] == [{"temperature": t, "counts": [1, 2, 5]} for t in (0.0, 1.0)]
    assert body["answer_lengths"] == [{"temperature": t, "lengths": [6, 4, 7, 7]} for t in (0.0, 1.0)]


def test_thresholds_pool_the_rounds_of_a_temperature() -> None:
    def decoded(name: str, temperature: float) -> Any:
        rounds = [make_round(1, verified=2, logits=(2.0, -2.0)), make_round(0, verified=2, logits=(-2.0, 2.0))]
        answers = (make_generation(f"{name}/0/t0", rounds),)
        return replace(make_decoded(name, [], temperature=temperature), generations=answers, plain=answers)

    settings = [(name, t) for t in (0.0, 1.0) for name in ("gsm8k", "humaneval")]
    sweep = body_of("k", [decoded(*setting) for setting in settings], confidence=True)["thresholds"]
    assert [row["temperature"] for row in sweep] == [0.0] * 20 + [1.0] * 20
    [half] = [row for row in sweep if (row["temperature"], row["threshold"]) == (1.0, 0.5)]
    # In each benchmark one round verifies its first slot, which was accepted, and one none.
    assert {name: half[name] for name in ("num_rounds", "verified", "accepted", "rejected", "accepted_length")} == {
        "num_rounds": 4, "verified": 2, "accepted": 2, "rejected": 0, "accepted_length": 1.5,
    }  # fmt: skip
    # A drafter without a head has none, whatever its rounds carry.
    assert body_of("k", [decoded(*setting) for setting in settings])["thresholds"] == []


def test_speed_is_copied_with_its_ratios(body: dict[str, Any]) -> None:
    first, second = body["speed"]
    assert (first["batch_size"], first["speedup"], second["speedup"]) == (1, 1.5, 0.75)
    assert first["overhead_share"] == pytest.approx(15 / 50)
    assert first["step_ms"] == [49.0, 51.0]
    assert (first["draft_ms"], first["plain_sample_ms"], first["num_steps"]) == (10.0, 5.0, 40)


@pytest.mark.parametrize(
    ("decoded", "message"),
    [
        ([], r"nothing was decoded: expected a benchmark \(params.yaml: evaluate.benchmarks\)"),
        ([make_decoded("math500", [[1]])], "a benchmark without facts: got math500, expected gsm8k"),
        ([make_decoded("gsm8k", [[1]])] * 2, "decoded twice: got gsm8k at temperature 0"),
        (
            [make_decoded("gsm8k", [[], []])],
            r"no decoding round to measure: gsm8k at temperature 0: got 2 answers of one token.*max_new_tokens",
        ),
    ],
)
def test_what_cannot_be_reported_is_refused(decoded: list[Any], message: str) -> None:
    with pytest.raises(DraftsmithError, match=message):
        evaluation_body(
            key="k", drafter=DrafterFacts("d", "dflash", 2, False), target="t", dtype="float32",
            benchmarks=[make_facts("gsm8k")], decoded=decoded, speed=[], max_new_tokens=4, seed=0, machine="m",
            provenance={},
        )  # fmt: skip


def test_equal_answers_make_equal_files() -> None:
    first, second = (json.dumps(body_of_lengths("k", LENGTHS)) for _ in range(2))
    assert first == second


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_series_of_positions(body: dict[str, Any]) -> None:
    rows = rows_of(conditional_acceptance_csv(body))
    assert [(row["benchmark"], row["temperature"], row["position"]) for row in rows] == [
        (name, temperature, position)
        for temperature in ("0.0", "1.0")
        for name in ("gsm8k", "humaneval")
        for position in ("1", "2")
    ]
    assert float(rows[1]["conditional_acceptance"]) == pytest.approx(1 / 3)
    assert (rows[1]["low"], rows[1]["high"], rows[1]["num_conditional"], rows[1]["prefix_survival"]) == (
        "0.0", "0.5", "3", "0.25",
    )  # fmt: skip


def test_series_of_lengths(body: dict[str, Any]) -> None:
    rows = rows_of(accepted_length_csv(body))
    assert [(row["benchmark"], row["domain"], row["temperature"], float(row["accepted_length"])) for row in rows] == [
        ("gsm8k", "math", "0.0", 2.0), ("humaneval", "code", "0.0", 3.0), ("gsm8k", "math", "1.0", 2.0),
        ("humaneval", "code", "1.0", 3.0), ("average", "all", "0.0", 2.5), ("average", "all", "1.0", 2.5),
    ]  # fmt: skip
    assert (rows[0]["low"], rows[0]["high"], rows[0]["accepted_length_without_bonus"]) == ("1.5", "2.5", "1.0")


def test_series_of_thresholds_and_speed(body: dict[str, Any]) -> None:
    assert thresholds_csv(body) == (
        "temperature,threshold,num_rounds,verified,accepted,rejected,acceptance_rate,accepted_length\n"
    )
    sweep = [{"temperature": 0.0, "threshold": 0.95, "num_rounds": 4, "verified": 0, "accepted": 0, "rejected": 0,
              "acceptance_rate": None, "accepted_length": 1.0}]  # fmt: skip
    assert thresholds_csv({**body, "thresholds": sweep}).splitlines()[1] == "0.0,0.95,4,0,0,0,,1.0"
    speed = rows_of(speed_csv(body))
    assert [(row["batch_size"], row["tokens_per_s"], row["speedup"]) for row in speed] == [
        ("1", "60.0", "1.5"), ("4", "30.0", "0.75"),
    ]  # fmt: skip
    assert evaluation_series(body).keys() == {
        "conditional_acceptance.csv", "accepted_length.csv", "thresholds.csv", "speed.csv",
    }  # fmt: skip
