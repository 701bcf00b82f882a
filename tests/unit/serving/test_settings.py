"""Engine settings from a study: what is chosen at each load, what the engines cannot run, and the commands."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from draftsmith.serving.engines import Drafter, Engine, refusal
from draftsmith.serving.settings import (
    EngineSettings,
    band,
    end_sentence,
    one_server_sentence,
    recommend,
    settings_body,
    settings_grid,
    settings_markdown,
)
from tests.serve_bodies import study

LOADS = (1, 2, 4, 8, 16)


def of(engine: Engine, body: dict[str, Any], **more: Any) -> EngineSettings:
    return next(item for item in recommend(body, **more) if item.engine == engine)


def chosen(item: EngineSettings) -> list[tuple[str, str]]:
    return [(band(row), row.policy) for row in item.rows]


def speculative_config(command: tuple[str, ...]) -> dict[str, Any]:
    return json.loads(command[command.index("--speculative-config") + 1])


def flag(command: tuple[str, ...], name: str) -> str:
    return command[command.index(name) + 1]


FALLING = {
    "none": [10.0, 20.0, 40.0, 80.0, 160.0],
    "fixed_1": [14.0, 28.0, 60.0, 100.0, 140.0],
    "fixed_7": [20.0, 40.0, 50.0, 70.0, 90.0],
}
SCHEDULED = FALLING | {"sync": [9.0] * 5, "async_2": [19.0, 39.0, 65.0, 120.0, 170.0]}


def test_each_load_gets_its_best_and_neighbours_that_agree_form_a_band() -> None:
    for engine in ("vllm", "sglang"):
        item = of(engine, study(rates=FALLING, loads=LOADS))
        assert chosen(item) == [("1 to 3", "fixed_7"), ("4 to 15", "fixed_1"), ("16 and more", "none")]
        assert item.plain_from == 16
        gains = [gain for row in item.rows for gain in row.gains]
        assert gains == pytest.approx([1.0, 1.0, 0.25, 0.5, 0.0, 0.0])
        assert [row.concurrencies for row in item.rows] == [(1, 2), (4, 8), (16,)]
        assert end_sentence(item).endswith("no speculation from 16 requests in flight on.")


def test_a_simpler_setting_that_is_as_good_is_taken() -> None:
    rates = {"none": [100.0, 100.0], "fixed_1": [103.0, 99.0], "fixed_7": [104.0, 98.0], "sync": [105.0, 110.0]}
    body = study(rates=rates, loads=(1, 2), error=0.0)
    # The study's best is `sync`, which no engine runs, so error bars decide among the others.
    assert chosen(of("sglang", body)) == [("1", "fixed_7"), ("2 and more", "none")]
    body = study(rates=rates, loads=(1, 2), error=0.006)
    assert chosen(of("sglang", body)) == [("1", "fixed_1"), ("2 and more", "none")]
    # Where the engine can run the study's best its paired comparison decides, whatever the error bars say.
    paired = {name: values for name, values in rates.items() if name != "sync"}
    body = study(rates=paired, loads=(1, 2), error=0.5, as_good={1: ["fixed_1"], 2: []})
    assert chosen(of("sglang", body)) == [("1", "fixed_1"), ("2 and more", "none")]
    [first, _] = of("sglang", body).rows
    assert "fixed" not in first.why
    assert (
        first.why
        == "7 draft tokens a round, all verified: 1.0 % more at 1 in flight, within the error; this is simpler"
    )


def test_the_scheduler_is_the_asynchronous_one_and_needs_a_confidence_head() -> None:
    vllm, sglang = recommend(study(rates=SCHEDULED, loads=LOADS))
    for item in (vllm, sglang):
        assert chosen(item) == [("1 to 3", "fixed_7"), ("4 and more", "async_2")]
        assert item.plain_from is None
        assert "up to the highest load studied, 16 requests" in end_sentence(item)
        assert item.one_server.worst_share == pytest.approx(0.95)
        assert item.one_server.concurrency == 1
        assert "95.0 % of the tokens/s" in one_server_sentence(item)
    row = vllm.rows[1]
    config = speculative_config(row.launch.command)
    assert config["enable_adaptive_verification"] is True
    assert config["num_speculative_tokens"] == 7
    assert row.launch.sidecars == ()
    launch = sglang.rows[1].launch
    assert launch.environment == {"SGLANG_RAGGED_VERIFY_MODE": "compact"}
    assert launch.sidecars == ("sps.json", "sts.json")
    assert flag(launch.command, "--speculative-dspark-sps-table-path") == "sps.json"
    assert flag(launch.command, "--speculative-dspark-confidence-sts-path") == "sts.json"
    assert launch.shell.startswith("SGLANG_RAGGED_VERIFY_MODE=compact python -m sglang.launch_server ")
    without = recommend(study(rates=SCHEDULED, loads=LOADS, confidence=False))
    assert {row.policy for item in without for row in item.rows} == {"none", "fixed_1", "fixed_7"}


def test_sglang_counts_the_anchor_and_vllm_does_not() -> None:
    vllm, sglang = recommend(study(rates=FALLING, loads=LOADS))
    assert [speculative_config(row.launch.command)["num_speculative_tokens"] for row in vllm.rows[:2]] == [7, 1]
    for row, tokens in zip(sglang.rows[:2], (7, 1), strict=True):
        assert flag(row.launch.command, "--speculative-dspark-block-size") == str(tokens)
        assert flag(row.launch.command, "--speculative-num-draft-tokens") == str(tokens + 1)
        assert flag(row.launch.command, "--speculative-algorithm") == "DSPARK"
    assert flag(sglang.rows[0].launch.command, "--max-running-requests") == "16"
    assert flag(sglang.rows[2].launch.command, "--max-running-requests") == "16"
    assert not any("speculative" in word for word in (*vllm.rows[2].launch.command, *sglang.rows[2].launch.command))


def test_drafts_are_sampled_unless_the_study_was_greedy() -> None:
    for temperature, sampled in ((1.0, True), (None, True), (0.0, False)):
        item = of("vllm", study(rates=FALLING, loads=LOADS, temperature=temperature))
        config = speculative_config(item.rows[0].launch.command)
        assert config.get("draft_sample_method") == ("probabilistic" if sampled else None)
        eagle = of(
            "sglang", study(rates=FALLING, loads=LOADS, temperature=temperature, kind="eagle3", confidence=False)
        )
        assert ("--speculative-use-rejection-sampling" in eagle.rows[0].launch.command) == sampled


def test_one_vllm_server_changes_its_draft_tokens_with_the_load() -> None:
    one = of("vllm", study(rates=FALLING, loads=LOADS)).one_server
    config = speculative_config(one.launch.command)
    assert config["num_speculative_tokens_per_batch_size"] == [[1, 3, 7], [4, 15, 1], [16, 16, 0]]
    assert config["num_speculative_tokens"] == 7
    assert one.worst_share == 1.0


def test_one_sglang_server_does_so_for_eagle3_alone() -> None:
    eagle = of("sglang", study(rates=FALLING, loads=LOADS, kind="eagle3", confidence=False)).one_server
    assert eagle.launch.written == {
        "adaptive.json": {"1": {"candidate_steps": [7]}, "4": {"candidate_steps": [1]}, "16": {"candidate_steps": [0]}}
    }
    assert flag(eagle.launch.command, "--speculative-adaptive-config") == "adaptive.json"
    assert flag(eagle.launch.command, "--speculative-num-steps") == "7"
    assert flag(eagle.launch.command, "--speculative-num-draft-tokens") == "8"
    dspark = of("sglang", study(rates=FALLING, loads=LOADS))
    assert dspark.one_server.label == "1 draft token a round, all verified"
    assert dspark.one_server.worst_share == pytest.approx(0.7)
    assert any("route by load" in note for note in dspark.notes)


def test_where_no_policy_beats_plain_decoding_nothing_is_drafted() -> None:
    rates = {"none": [10.0, 20.0], "fixed_1": [8.0, 12.0], "async_2": [9.0, 13.0]}
    for item in recommend(study(rates=rates, loads=(1, 2))):
        assert chosen(item) == [("1 and more", "none")]
        assert item.plain_from == 1
        assert end_sentence(item).endswith("no speculation at any load studied (1 to 2 requests in flight).")
        assert item.one_server.label == "no speculation"
        assert item.rows[0].why.startswith("53.8 % more tokens/s than ")


def test_what_engines_cannot_draft_with_is_said_and_plain_decoding_set() -> None:
    for kind in ("mtp1", "dflash"):
        assert refusal("sglang", Drafter(kind, 7, False)) is not None
    assert refusal("vllm", Drafter("dflash", 7, False)) is None
    assert refusal("sglang", Drafter("dflash", 7, False, sample_from_anchor=False)) is None
    for item in recommend(study(rates=FALLING, loads=LOADS, kind="mtp1", confidence=False)):
        assert chosen(item) == [("1 and more", "none")]
        assert item.rows[0].why == "nothing else can be run"
        assert "separate MTP-1 head" in item.notes[0]


def test_a_dflash_from_the_anchor_runs_as_dspark_in_vllm() -> None:
    body = study(rates=FALLING, loads=LOADS, kind="dflash", confidence=False)
    assert speculative_config(of("vllm", body).rows[0].launch.command)["method"] == "dspark"
    other = of("vllm", body, sample_from_anchor=False)
    assert speculative_config(other.rows[0].launch.command)["method"] == "dflash"
    sglang = of("sglang", body, sample_from_anchor=False)
    assert flag(sglang.rows[0].launch.command, "--speculative-algorithm") == "DFLASH"
    assert flag(sglang.rows[0].launch.command, "--speculative-num-draft-tokens") == "8"


def test_notes_tell_what_concerns_the_settings() -> None:
    vllm, sglang = recommend(study(rates=FALLING, loads=LOADS))
    for item in (vllm, sglang):
        assert any("make" in note and "draft a shorter block" in note for note in item.notes)
    assert any("data parallelism" in note for note in vllm.notes)
    assert any("Drafts are sampled" in note for note in vllm.notes)
    plain = recommend(study(rates={"none": [10.0], "fixed_7": [9.0]}, loads=(1,), confidence=False))
    assert [len(item.notes) for item in plain] == [1, 1]
    whole = of("vllm", study(rates={"none": [10.0], "fixed_7": [20.0]}, loads=(1,), confidence=False))
    assert not any("shorter block" in note or "data parallelism" in note for note in whole.notes)


def test_the_body_is_json_and_keeps_the_rows() -> None:
    settings = recommend(study(rates=SCHEDULED, loads=LOADS))
    body = settings_body(settings)
    assert json.loads(json.dumps(body, allow_nan=False)) == body
    assert [item["engine"] for item in body] == ["vllm", "sglang"]
    for part, item in zip(body, settings, strict=True):
        assert [row["policy"] for row in part["rows"]] == [row.policy for row in item.rows]
        for row in (*part["rows"], part["one_server"]):
            words = shlex.split(row["launch"]["shell"])
            assert words[-len(row["launch"]["command"]) :] == row["launch"]["command"]
        assert part["sources"]


def test_the_page_has_a_table_and_the_commands_of_each_engine() -> None:
    body = study(rates=SCHEDULED, loads=LOADS, synthetic=True, name="tiles")
    settings = recommend(body)
    text = settings_markdown(body, settings)
    assert text.startswith("# Engine settings for dspark_b7-toy\n\n**Synthetic: nothing below was measured.**\n")
    for item in settings:
        assert [row[0] for row in settings_grid(item).rows] == ["1 to 3", "4 and more"]
        for row in item.rows:
            assert row.launch.shell in text
    assert "+100.0 %" in text
    assert "+6.2 % to +62.5 %" in text
    assert "Synthetic" not in settings_markdown(study(), recommend(study()))
