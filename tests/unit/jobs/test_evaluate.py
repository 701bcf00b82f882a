"""The evaluation job from cells to reports: the same figures however it is run, and what it leaves."""

from __future__ import annotations

import json
from typing import Any

import pytest
from mlflow import MlflowClient

from draftsmith.jobs import evaluate as job
from draftsmith.jobs import evaluate_cells
from draftsmith.manifest import Manifest, ObjectRecord, sha256_hex
from draftsmith.params import Params
from draftsmith.storage import LocalStore
from draftsmith.text.rows import Prompt, encode_prompts
from draftsmith.tracking import tracking_uri
from tests.evaluate_job import (
    DFLASH,
    DSPARK,
    NUM_CELLS,
    OF_THE_CLOCK,
    Evaluation,
    counts,
    evaluation,
    evaluation_source,
)

__all__ = ["evaluation", "evaluation_source"]

FILES = {
    "evaluate.json", "samples.json", "evaluate.md", "evaluate.html", "conditional_acceptance.csv",
    "accepted_length.csv", "thresholds.csv", "speed.csv", "acceptance_t0.png", "acceptance_t1.png",
}  # fmt: skip


def evaluated(evaluation: Evaluation, params: Params | None = None, *, key: str = DSPARK) -> dict[str, Any]:
    job.run(evaluation.workspace, evaluation.params() if params is None else params, key)
    return evaluation.report(key)


def emptied(evaluation: Evaluation) -> None:
    for path in (evaluation.store / "evaluate").rglob("*.parquet"):
        path.unlink()


def test_figures_are_the_same_for_any_batch_size_and_any_slices(
    evaluation: Evaluation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "write_reports", lambda *_, **__: None)  # pages and figures take most of the time
    whole = evaluated(evaluation)
    assert {row["temperature"] for row in whole["rows"]} == {0.0, 1.0}
    assert {count for row in whole["accepted_histogram"] for count in row["counts"]} > {0}
    for batch_size in (1, 3, 16):
        emptied(evaluation)
        found = evaluated(evaluation, evaluation.params(batch_size=batch_size))
        assert counts(found) == counts(whole)
        assert {row["batch_size"] for row in found["rows"]} == {batch_size}
        assert all(row["speedup"] is not None for row in found["rows"])
    for cell_prompts in (1, 64):
        emptied(evaluation)
        assert counts(evaluated(evaluation, evaluation.params(cell_prompts=cell_prompts))) == counts(whole)
    emptied(evaluation)
    evaluation.workspace.report_dir(DSPARK).joinpath("evaluate.json").unlink()
    for index, batch_size in ((1, 5), (0, 2)):
        job.run(evaluation.workspace, evaluation.params(batch_size=batch_size), DSPARK, part=(index, 2))
        assert not evaluation.workspace.report_dir(DSPARK).joinpath("evaluate.json").exists()
    before = evaluation.cells()
    assert len(before) == 2 * NUM_CELLS
    merged = evaluated(evaluation)
    assert counts(merged) == counts(whole)
    assert evaluation.cells() == before
    # Decoded at other batch sizes than the one that is reported, so there is no rate.
    assert {row[name] for row in merged["rows"] for name in OF_THE_CLOCK} == {4, None}


def test_what_the_figures_are_made_of_is_compared(evaluation: Evaluation) -> None:
    """`counts` leaves clocks out, and nothing that another seed or drafter would not change."""
    whole = evaluated(evaluation)
    assert counts(whole).keys() == whole.keys() - {"machine", "provenance", "speed"}
    other = evaluated(evaluation, evaluation.params(seed=7))
    for part in ("rows", "domains", "averages", "output_positions", "thresholds", "accepted_histogram"):
        assert counts(other)[part] != counts(whole)[part], part


def test_reports_and_where_they_come_from(evaluation: Evaluation) -> None:
    speed = {"benchmark": "gsm8k", "batch_sizes": [1, 2], "num_prompts": 2, "max_new_tokens": 6}
    body = evaluated(evaluation, evaluation.params(speed=speed))
    folder = evaluation.workspace.report_dir(DSPARK)
    assert {path.name for path in folder.iterdir()} == FILES
    assert body["drafter"] == {"name": "dspark", "kind": "dspark", "block_size": 4, "confidence": True}
    assert (body["key"], body["target"], body["dtype"], body["seed"]) == (DSPARK, "tiny", "float32", 6)
    assert [(row["temperature"], row["batch_size"]) for row in body["speed"]] == [
        (0.0, 1), (0.0, 2), (1.0, 1), (1.0, 2),
    ]  # fmt: skip
    planned = evaluate_cells.planned_evaluation(evaluation.workspace, evaluation.params(), DSPARK)
    assert body["provenance"]["cells"] == planned.prefixes
    assert body["provenance"]["training_prompts"] is None
    assert body["provenance"]["git_commit"] == "unknown"
    gsm8k, mt_bench = body["benchmarks"]
    assert (gsm8k["name"], gsm8k["cap"], gsm8k["num_prompts"], gsm8k["replaced_by"]) == (
        "gsm8k", 5, 5, "benchmarks/gsm8k.jsonl",
    )  # fmt: skip
    assert (mt_bench["turns"], mt_bench["num_prompts"], mt_bench["contaminated"]) == (3, 3, [])
    # At temperature 0 lossless decoding gives the target's own answers.
    assert [row["identical_to_plain"] for row in body["rows"]] == [1.0, 1.0, None, None]
    assert "dspark-tiny" in (folder / "evaluate.md").read_text()
    page = (folder / "evaluate.html").read_text()
    assert "Evaluation of dspark-tiny" in page
    lines = (folder / "speed.csv").read_text().splitlines()
    assert len(lines) == 1 + 4


def test_samples_are_the_first_prompts_in_every_turn_and_temperature(evaluation: Evaluation) -> None:
    evaluated(evaluation, evaluation.params(num_samples=2))
    found = evaluation.report(name="samples")
    assert found["key"] == DSPARK
    # Prompts of the file with five prompts are spread over its seven rows: 0, 1, 2, 4, 5.
    texts = [
        ("gsm8k/0", 0, "what is 1 + 3?"),
        ("gsm8k/1", 0, "what is 2 + 6?"),
        ("mt_bench/0", 0, "name three rivers."),
        ("mt_bench/0", 1, "and one lake?"),
        ("mt_bench/1", 0, "say abc"),
        ("mt_bench/1", 1, "again"),
        ("mt_bench/1", 2, "and once more"),
    ]
    told = [(item["temperature"], item["prompt_id"], item["turn"], item["prompt"]) for item in found["samples"]]
    assert told == [(temperature, *text) for temperature in (0.0, 1.0) for text in texts]
    planned = evaluate_cells.planned_evaluation(evaluation.workspace, evaluation.params(), DSPARK)
    answers = {
        (entry.temperature, item.request_id): item
        for entry in evaluate_cells.load_decoded(evaluation.workspace, evaluation.params(), DSPARK)
        for item in entry.generations
    }
    for item in found["samples"]:
        answer = answers[item["temperature"], f"{item['prompt_id']}/t{item['turn']}"]
        assert "".join(token["text"] for token in item["tokens"]) == planned.chat.decode(answer.token_ids)
    evaluated(evaluation, evaluation.params(num_samples=0))
    assert evaluation.report(name="samples")["samples"] == []


def test_evaluate_json_is_written_last(evaluation: Evaluation, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = evaluation.workspace.report_dir(DSPARK)

    def broken(*_: Any, **__: Any) -> None:
        assert {path.name for path in folder.iterdir()} == FILES - {"evaluate.json"}
        raise RuntimeError("the power went")

    monkeypatch.setattr(job, "log_body", broken)
    with pytest.raises(RuntimeError, match="the power went"):
        job.run(evaluation.workspace, evaluation.params(), DSPARK)
    assert not (folder / "evaluate.json").exists()


def prompts_manifest(evaluation: Evaluation, **splits: list[Prompt]) -> Manifest:
    """A finished prompts stage with these prompts."""
    store, objects = LocalStore(evaluation.store), []
    for split in ("train", "validation", "calibration"):
        data = encode_prompts(splits.get(split, []))
        store.put(f"prompts/0123abcd/{split}.parquet", data)
        objects.append(ObjectRecord(f"{split}.parquet", len(data), sha256_hex(data)))
    manifest = Manifest("prompts", "prompts/0123abcd", tuple(objects))
    manifest.write(evaluation.workspace.prompts_manifest)
    return manifest


def test_prompts_that_were_trained_on_are_told_and_stay(
    evaluation: Evaluation, capsys: pytest.CaptureFixture[str]
) -> None:
    clean = evaluated(evaluation)
    assert "benchmarks are not compared with training prompts" in capsys.readouterr().err
    manifest = prompts_manifest(
        evaluation,
        train=[Prompt("math", "test", ("What is 2 + 6?",)), Prompt("chat", "test", ("something else",))],
        validation=[Prompt("math", "test", ("what is 1 + 3?",))],
        calibration=[Prompt("chat", "test", ("say abc", "something else"))],
    )
    body = evaluated(evaluation)
    assert [item["contaminated"] for item in body["benchmarks"]] == [["gsm8k/1"], ["mt_bench/1"]]
    assert body["provenance"]["training_prompts"] == manifest.digest
    assert counts(body)["rows"] == counts(clean)["rows"]
    told = capsys.readouterr().err
    assert "1 of 5 prompts of gsm8k come near what was trained on; they stay in the figures: gsm8k/1 (equal to" in told
    assert "1 of 3 prompts of mt_bench" in told


def test_slices_are_decoded_without_a_report(evaluation: Evaluation, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor a sweep, of whose benchmark this machine may know nothing."""
    speed = {"benchmark": "alpaca", "num_prompts": 2, "max_new_tokens": 6}
    job.run(evaluation.workspace, evaluation.params(speed=speed), DSPARK, part=(0, 3))
    assert len(evaluation.cells()) == 2 * 4
    assert not evaluation.workspace.report_dir(DSPARK).exists()
    assert "draftsmith:" not in capsys.readouterr().err


def test_the_same_figures_are_in_mlflow(evaluation: Evaluation) -> None:
    body = evaluated(evaluation, key=DFLASH)
    receipt = json.loads(evaluation.workspace.receipt("evaluate", DFLASH).read_text())
    client = MlflowClient(tracking_uri(evaluation.workspace))
    run = client.get_run(receipt["run_id"])
    metrics = run.data.metrics
    row = body["rows"][2]
    assert metrics["gsm8k_t1_accepted_length"] == row["accepted_length"]
    assert metrics["gsm8k_t1_speedup"] == row["speedup"]
    assert metrics["gsm8k_t0_identical_to_plain"] == 1.0
    assert metrics["average_t0_accepted_length"] == body["averages"][0]["accepted_length"]
    assert metrics["math_t0_accepted_length"] == body["rows"][0]["accepted_length"]
    history = client.get_metric_history(receipt["run_id"], "gsm8k_t1_conditional_acceptance")
    found = {point.step: point.value for point in history}
    assert found == {k: value for k, value in enumerate(row["conditional_acceptance"], start=1) if value is not None}
    named = {item.path for item in client.list_artifacts(receipt["run_id"])}
    assert named >= {"evaluate.json", "samples.json", "evaluate.md", "evaluate.html", "acceptance_t0.png"}
    assert run.data.tags["drafter"] == "dflash"
