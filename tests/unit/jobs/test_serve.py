"""Stage serve on tiny recorded rounds and an example's machine: what is written, and what is told when parts lack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from draftsmith.cli_serve import serve
from draftsmith.errors import DraftsmithError
from draftsmith.jobs import serve as job
from draftsmith.jobs.evaluate_cells import load_decoded
from draftsmith.manifest import write_json
from draftsmith.params import Params, parse_params
from draftsmith.serving.profile import example_profile
from tests.evaluate_job import DFLASH, DSPARK, Evaluation, decode, evaluation, evaluation_source

__all__ = ["evaluation", "evaluation_source"]

SERVE: dict[str, Any] = {
    "max_concurrency": 2,
    "closed_requests": 4,
    "open_requests": 20,
    "thresholds": [0.5],
    "loads": [0.5],
    "burst_factors": [4.0],
    "staleness": [2],
    "output_tokens": {"median": 8, "spread": 0.3, "high": 20},
    "seed": 3,
}


def prepare(evaluation: Evaluation, key: str, *, temperatures: list[float] | None) -> None:
    """The reports and decoded answers that the stage reads."""
    report = evaluation.workspace.report_dir(key)
    report.mkdir(parents=True, exist_ok=True)
    write_json(report / "profile.json", example_profile("tiles").to_body() | {"synthetic": False, "note": ""})
    write_json(report / "calibrate.json", {"temperatures": temperatures})
    decode(evaluation, key)


def with_serve(evaluation: Evaluation, **fields: Any) -> Params:
    body = evaluation.params().model_dump(mode="json")
    return parse_params({**body, "serve": {**SERVE, **fields}})


def test_a_study_is_measured_and_a_what_if_marked(evaluation: Evaluation) -> None:
    prepare(evaluation, DSPARK, temperatures=[1.0, 1.1, 1.2, 1.3])
    params = with_serve(evaluation)
    path = job.run(evaluation.workspace, params, DSPARK)
    report = evaluation.workspace.report_dir(DSPARK)
    assert path == report / "serve.json"
    body = json.loads(path.read_text())
    assert (body["schema_version"], body["key"], body["name"], body["synthetic"]) == (1, DSPARK, "measured", False)
    assert body["profile"]["source"] == f"reports/{DSPARK}/profile.json"
    assert body["temperatures"] == [1.0, 1.1, 1.2, 1.3]
    assert body["trace"] is None
    assert "what_if" not in body["settings"]
    rounds = [
        item
        for decoded in load_decoded(evaluation.workspace, params, DSPARK)
        if decoded.temperature == 1.0
        for answer in decoded.generations
        for item in answer.rounds
    ]
    assert body["rounds"]["num_rounds"] == len(rounds)
    assert body["rounds"]["accepted_length"] == pytest.approx(
        sum(item.accepted + (not item.ended) for item in rounds) / len(rounds)
    )
    (what_if,) = body["what_if"]
    assert (what_if["name"], what_if["synthetic"], what_if["rounds"]["source"]) == ("tiles", True, "synthetic")
    assert "Nothing here was measured" in what_if["note"]
    assert what_if["drafter"] == body["drafter"]
    written = {item.name for item in report.glob("serve*")}
    stems = [f"{stem}-{name}.png" for stem in ("serve", "serve-what_if-tiles")
             for name in ("pareto", "budget", "early_exit", "staleness")]  # fmt: skip
    files = ("serve.json", "serve.csv", "serve.md", "serve.html", "serve-settings.md")
    assert written == {*files, *stems}
    before = path.read_bytes()
    job.run(evaluation.workspace, params, DSPARK)
    assert path.read_bytes() == before


def test_another_machine_and_a_trace_leave_the_measured_study_alone(evaluation: Evaluation, tmp_path: Path) -> None:
    prepare(evaluation, DFLASH, temperatures=None)
    report = evaluation.workspace.report_dir(DFLASH)
    (report / "serve.json").write_text("measured")
    params = with_serve(evaluation, trace_domain="math")
    body = json.loads(job.run(evaluation.workspace, params, DFLASH, profile="smooth").read_text())
    assert (body["name"], body["synthetic"], body["what_if"]) == ("smooth", True, [])
    assert "an example" in body["note"]
    assert body["temperatures"] is body["staleness"] is None
    table = tmp_path / "a100.csv"
    table.write_text("batch_tokens,steps_per_s\n1,100\n8,90\n32,50\n")
    trace = tmp_path / "monday.csv"
    lines = [f"{second},9,12" for second in range(12)]
    trace.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *lines]))
    path = job.run(evaluation.workspace, params, DFLASH, profile=str(table), trace=trace)
    body = json.loads(path.read_text())
    assert path.name == "serve-a100-monday.json"
    assert (body["name"], body["synthetic"]) == ("a100", False)
    assert body["trace"] == {"file": "monday.csv", "num_requests": 12, "num_left_out": 0}
    assert {row["load"] for row in body["latencies"] if row["workload"] == "trace"} == {None, 0.6}
    assert "flatters every drafter" in body["note"]
    assert (report / "serve.json").read_text() == "measured"
    elsewhere = tmp_path / "h100.json"
    write_json(elsewhere, example_profile("tiles").to_body() | {"synthetic": False, "note": ""})
    body = json.loads(job.run(evaluation.workspace, params, DFLASH, profile=str(elsewhere)).read_text())
    assert (body["name"], body["synthetic"], body["profile"]["source"]) == ("h100", False, "h100.json")


def test_concurrency_goes_as_far_as_the_table(evaluation: Evaluation, tmp_path: Path) -> None:
    prepare(evaluation, DFLASH, temperatures=None)
    table = tmp_path / "small.csv"
    table.write_text("batch_tokens,steps_per_s\n1,100\n16,90\n")  # three blocks of 1 + 4 tokens
    params = with_serve(evaluation, max_concurrency=None)
    body = json.loads(job.run(evaluation.workspace, params, DFLASH, profile=str(table)).read_text())
    assert [point["concurrency"] for point in body["pareto"][0]["points"]] == [1, 2, 3]


def test_what_is_missing_is_named_with_its_command(evaluation: Evaluation) -> None:
    workspace, params = evaluation.workspace, with_serve(evaluation)
    with pytest.raises(DraftsmithError, match=f"`draftsmith profile --key {DSPARK}` first"):
        job.run(workspace, params, DSPARK)
    with pytest.raises(DraftsmithError, match=f"`draftsmith evaluate --key {DSPARK}`"):
        job.run(workspace, params, DSPARK, profile="tiles")
    prepare(evaluation, DSPARK, temperatures=None)
    with pytest.raises(DraftsmithError, match=f"`draftsmith calibrate --key {DSPARK}` with its confidence head"):
        job.run(workspace, params, DSPARK)
    (workspace.report_dir(DSPARK) / "calibrate.json").unlink()
    with pytest.raises(DraftsmithError, match=f"`draftsmith calibrate --key {DSPARK}` first"):
        job.run(workspace, params, DSPARK)
    with pytest.raises(DraftsmithError, match=r"got 0.7, expected one of \[0.0, 1.0\] .*serve.temperature"):
        job.run(workspace, with_serve(evaluation, temperature=0.7), DSPARK)
    with pytest.raises(DraftsmithError, match="no such profile: got nowhere, expected smooth, tiles, graph_limit, or"):
        job.run(workspace, params, DSPARK, profile="nowhere")
    write_json(workspace.report_dir(DSPARK) / "calibrate.json", {"temperatures": [1.0] * 4})
    strange = with_serve(evaluation, what_if=[{"name": "x", "profile": "y"}])
    with pytest.raises(DraftsmithError, match=r"got y, expected smooth, .*serve.what_if.x.profile"):
        job.run(workspace, strange, DSPARK)
    assert not list(workspace.report_dir(DSPARK).glob("serve*"))


def test_the_command_runs_the_job(evaluation: Evaluation, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(evaluation, DFLASH, temperatures=None)
    evaluation.edit_params(lambda body: body.update(serve={**SERVE, "what_if": []}))
    monkeypatch.chdir(evaluation.root)
    done = CliRunner().invoke(serve, ["--key", DFLASH], catch_exceptions=False)
    path = evaluation.workspace.report_dir(DFLASH) / "serve.json"
    assert (done.exit_code, Path(done.output.strip()).resolve()) == (0, path.resolve())
    assert json.loads(path.read_text())["what_if"] == []


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"loads": [0.5, 0.5]}, "loads must differ"),
        ({"what_if": [{"name": "a", "profile": "tiles"}] * 2}, "different names"),
        ({"prompt_tokens": {"median": 9, "spread": 1, "high": 8}}, "median must lie"),
        ({"staleness": [0, 1]}, "greater than 0"),
    ],
)
def test_unfit_rows_are_refused(evaluation: Evaluation, fields: dict[str, Any], told: str) -> None:
    with pytest.raises(DraftsmithError, match=told):
        with_serve(evaluation, **fields)
