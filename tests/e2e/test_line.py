"""The whole line as a user runs it: built for two drafters of a tiny target, then watched, broken and mended."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors import safe_open

from tests.line_fixtures import DFLASH, DSPARK, TARGET, Line, built_line, files_below, prepared_line, tiny_target

__all__ = ["built_line", "prepared_line", "tiny_target"]

STAGES = {
    "prompts",
    *(f"{stage}@{TARGET}" for stage in ("answers", "cache", "verify")),
    *(f"{stage}@{key}" for stage in ("train", "calibrate", "evaluate", "profile", "serve") for key in (DSPARK, DFLASH)),
}
TRACKED_STAGES = ("prompts", "answers", "cache", "train", "calibrate", "evaluate", "profile", "serve")


def stages_run(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The stages that a `dvc repro` ran, in order."""
    return re.findall(r"^Running stage '([^']+)'", done.stdout, flags=re.MULTILINE)


def outs(line: Line) -> dict[str, int]:
    """mtimes of everything that stages leave: manifests, drafters, reports; and of the store's objects.

    Not of the record that a working copy uses a cache: every verification makes it younger.
    """
    found = {f"reports/{name}": mtime for name, mtime in files_below(line.root / "reports", "*").items()}
    for folder in ("answers", "cache", "drafters", "store"):
        found |= {f"{folder}/{name}": mtime for name, mtime in files_below(line.root / "data" / folder, "*").items()}
    return {name: mtime for name, mtime in found.items() if "/references/" not in name}


@pytest.fixture
def line(built_line: Line, tmp_path: Path) -> Line:
    """A copy of the built line, free to be changed."""
    return built_line.copied(tmp_path / "line")


def test_every_stage_is_built(built_line: Line) -> None:
    lock = yaml.safe_load((built_line.root / "dvc.lock").read_text())
    assert lock["stages"].keys() == STAGES
    for key in (DSPARK, DFLASH):
        folder = built_line.workspace.drafter_dir(key)
        assert {path.name for path in folder.iterdir()} == {"config.json", "contract.json", "model.safetensors"}
    for stage in TRACKED_STAGES:
        runs = built_line.tracked_runs(stage)
        names = {"prompts": ["prompts"], "answers": [TARGET], "cache": [TARGET]}.get(stage, [DSPARK, DFLASH])
        assert [(name, status) for _, name, status in runs] == [(name, "FINISHED") for name in names]
        for run_id, name, _ in runs:
            receipt = json.loads(built_line.workspace.receipt(stage, name).read_text())
            assert receipt["run_id"] == run_id
            assert receipt["url"].endswith(run_id)
    # Nothing but what belongs into git is left untracked, and no file that git keeps was touched.
    changed = built_line.git("status", "--porcelain", "--untracked-files=all").stdout.split("\n")
    paths = {entry[3:] for entry in changed if entry}
    assert {path for path in paths if not path.startswith("reports/")} == {"dvc.lock"}
    assert not (built_line.root / "data" / "scratch" / "train" / DSPARK / "checkpoints" / "step-000010").exists()


def test_the_prompts_are_as_many_as_asked_for(built_line: Line) -> None:
    facts = built_line.manifest("prompts").facts
    assert facts["num_prompts"] == {"train": 24, "validation": 6, "calibration": 12}
    assert facts["kept_clear_of"] == ["humaneval", "gsm8k", "mt_bench"]


@pytest.mark.parametrize("key", [DSPARK, DFLASH])
def test_reports(built_line: Line, key: str) -> None:
    train, calibrate = built_line.report(key, "train"), built_line.report(key, "calibrate")
    check_train_report(train, built_line, key)
    check_evaluate_report(built_line.report(key, "evaluate"), key)
    assert calibrate["schema_version"] == 1
    assert calibrate["block_size"] == 3
    if key == DFLASH:
        assert calibrate["applicable"] is False
        assert "no confidence head" in calibrate["reason"]
        assert calibrate["temperatures"] is None
        assert calibrate["auc"] is None
        return
    assert calibrate["applicable"] is True
    assert calibrate["reason"] is None
    assert calibrate["num_prompts"] + calibrate["num_fit_prompts"] == 12
    for field in ("temperatures", "ece_before", "ece_after", "auc", "brier_before", "num_counted"):
        assert len(calibrate[field]) == 3, field
    assert all(0.2 <= value <= 5.0 for value in calibrate["temperatures"])
    assert all(0 <= value <= 1 for value in calibrate["ece_before"] + calibrate["ece_after"])
    sidecar = json.loads((built_line.workspace.report_dir(key) / "sts.json").read_text())
    assert sidecar["temperatures"] == calibrate["temperatures"]
    assert sidecar["num_samples"] == calibrate["num_fit_rounds"]


def check_train_report(body: dict[str, Any], line: Line, key: str) -> None:
    assert body["schema_version"] == 1
    assert (body["key"], body["steps"], body["num_ranks"]) == (key, 10, 1)
    assert len(body["acceptance"]) == 3
    assert all(0 < value < 1 for value in body["acceptance"])
    # One token is always the target's own; a block of three adds at most three.
    assert 1 < body["expected_accepted_length"] < 4
    assert (body["confidence_bias"] is None) == (key == DFLASH)
    assert [item["step"] for item in body["validations"]] == [5, 10]
    assert body["validations"][-1]["expected_accepted_length"] == body["expected_accepted_length"]
    assert body["tokens_per_s"] > 0
    assert 0 <= body["data_wait_share"] < 1
    with (line.workspace.report_dir(key) / "train_curve.csv").open() as stream:
        curve = list(csv.DictReader(stream))
    assert [int(row["step"]) for row in curve] == list(range(1, 11))
    assert float(curve[-1]["loss"]) == pytest.approx(body["loss"], rel=1e-5)
    # ce: 1.0, tv: 0.0 is cross-entropy alone; the DSpark row's loss is 0.1 ce + 0.9 tv + 1.0 bce.
    for row in curve:
        parts = {name: float(row[name]) for name in ("loss", "ce", "tv", "bce")}
        mixed = parts["ce"] if key == DFLASH else 0.1 * parts["ce"] + 0.9 * parts["tv"] + parts["bce"]
        assert parts["loss"] == pytest.approx(mixed, rel=1e-4)
    run_id = line.tracked_runs("train")[[DSPARK, DFLASH].index(key)][0]
    assert line.tracked_steps(run_id, "loss") == list(range(1, 11))


def check_evaluate_report(body: dict[str, Any], key: str) -> None:
    assert (body["schema_version"], body["key"], body["block_size"], body["max_new_tokens"]) == (2, key, 3, 12)
    prompts = {"humaneval": 2, "gsm8k": 3, "mt_bench": 2}
    assert [(row["benchmark"], row["temperature"]) for row in body["rows"]] == [
        (name, temperature) for temperature in (0.0, 1.0) for name in prompts
    ]
    for row in body["rows"]:
        assert row["num_prompts"] == prompts[row["benchmark"]]
        assert row["num_requests"] == row["num_prompts"] * (2 if row["benchmark"] == "mt_bench" else 1)
        assert 1 <= row["accepted_length"] <= 4
        # The two definitions differ by the bonus token, which a round that ends the answer lacks.
        assert row["accepted_length"] - 1 <= row["accepted_length_without_bonus"] <= row["accepted_length"]
        low, high = row["accepted_length_interval"]
        assert low <= row["accepted_length"] <= high
        assert len(row["conditional_acceptance"]) == len(row["num_counted"]) == 3
        assert row["tokens_per_s"] > 0
        assert row["speedup"] == pytest.approx(row["tokens_per_s"] / row["plain_tokens_per_s"])
        # Greedy decoding is lossless to the token; at temperature 1 only the distribution is the same.
        assert row["identical_to_plain"] == (1.0 if row["temperature"] == 0 else None)
    assert [(point["temperature"], point["batch_size"]) for point in body["speed"]] == [
        (temperature, batch_size) for temperature in (0.0, 1.0) for batch_size in (1, 2)
    ]
    averages = {item["temperature"]: item for item in body["averages"]}
    rows = [row for row in body["rows"] if row["temperature"] == 1.0]
    assert averages[1.0]["accepted_length"] == pytest.approx(sum(row["accepted_length"] for row in rows) / 3)


def test_only_what_changed_is_built_again(line: Line) -> None:
    """First nothing changed; then one drafter's loss did, which is the other drafter's business in no way."""
    before, lock = outs(line), (line.root / "dvc.lock").read_bytes()
    assert stages_run(line.dvc("repro")) == [f"verify@{TARGET}"]
    assert outs(line) == before
    assert (line.root / "dvc.lock").read_bytes() == lock
    line.git("add", "-A")
    line.git("commit", "-q", "-m", "built")

    line.edit_params(lambda body: body["drafters"]["dspark_tiny"]["loss"].update(ce=0.5, tv=0.5))
    difference = json.loads(line.dvc("params", "diff", "--json").stdout)
    assert difference["params.yaml"].keys() == {"drafters.dspark_tiny.loss.ce", "drafters.dspark_tiny.loss.tv"}
    done = line.run("run")
    assert stages_run(done) == [f"{stage}@{DSPARK}" for stage in ("train", "calibrate", "evaluate")] or stages_run(
        done
    ) == [f"verify@{TARGET}", *(f"{stage}@{DSPARK}" for stage in ("train", "calibrate", "evaluate"))]
    after = outs(line)
    changed = {name for name in before if after.get(name) != before[name]}
    assert changed
    assert not [name for name in changed if DFLASH in name or name.startswith(("answers/", "cache/", "store/"))]
    # Another recipe trains from its own start: the old run's checkpoints are another prefix.
    prefixes = {path.name for path in (line.store / "train").iterdir() if path.name.startswith(DSPARK)}
    assert len(prefixes) == 2
    check_closing_page(done, line)
    assert "Figures of this machine replaced tracked ones" in done.stdout
    assert f"reports/{DSPARK}/train.json" in done.stdout
    assert f"reports/{DFLASH}" not in done.stdout.partition("replaced tracked ones")[2]


def check_closing_page(done: subprocess.CompletedProcess[str], line: Line) -> None:
    """What `draftsmith run` says first and last."""
    assert "minutes" in done.stdout.splitlines()[0]
    for key in (DSPARK, DFLASH):
        body = line.report(key, "evaluate")
        assert key in done.stdout
        for row in body["rows"]:
            assert f"{row['accepted_length']:.2f}" in done.stdout
    page = (line.root / "reports" / "comparison.md").read_text()
    assert DSPARK in page
    assert DFLASH in page


def test_dvc_shows_what_there_is(built_line: Line, tmp_path: Path) -> None:
    line = built_line
    shown = json.loads(line.dvc("metrics", "show", "--json").stdout)
    metrics = next(iter(shown.values()))["data"]
    expected = {
        f"reports/{key}/{stage}.json" for key in (DSPARK, DFLASH) for stage in ("train", "calibrate", "evaluate")
    }
    assert metrics.keys() == expected
    assert metrics[f"reports/{DSPARK}/train.json"]["data"]["loss"] == line.report(DSPARK, "train")["loss"]
    line.dvc("plots", "show", "--out", str(tmp_path / "plots"))
    page = (tmp_path / "plots" / "index.html").read_text()
    for key in (DSPARK, DFLASH):
        for name in ("train_curve.csv", "reliability.csv", "conditional_acceptance.csv"):
            assert f"reports_{key}_{name.replace('.', '_')}" in page
    graph = set(re.findall(r'"([^"]+)" -> "([^"]+)"', line.dvc("dag", "--dot").stdout))
    assert (f"cache@{TARGET}", f"verify@{TARGET}") in graph
    assert {later for earlier, later in graph if earlier == f"train@{DSPARK}"} == {
        f"calibrate@{DSPARK}",
        f"evaluate@{DSPARK}",
        f"profile@{DSPARK}",
    }
    assert {earlier for earlier, later in graph if later == f"serve@{DSPARK}"} == {
        f"{stage}@{DSPARK}" for stage in ("calibrate", "evaluate", "profile")
    }


def test_an_emptied_store_is_told_and_mended(line: Line) -> None:
    manifests = ("prompts.json", f"answers/{TARGET}.json", f"cache/{TARGET}.json")
    before = {name: (line.root / "data" / name).read_bytes() for name in manifests}
    assert line.run("store", "check").stdout.startswith(f"store {line.store} holds everything")
    shutil.rmtree(line.store)
    told = line.tried("store", "check")
    assert told.returncode == 1
    for stage, kind in (("prompts", "prompts"), (f"answers@{TARGET}", "answers"), (f"cache@{TARGET}", "cache")):
        prefix = line.manifest(kind).prefix
        assert f"{stage}: store {line.store} lacks {prefix}: run `dvc repro -f -s {stage}`\n" in told.stdout
    # DVC cannot see it; the first job that meets it says which prefix, which store and which command.
    failed = line.tried_dvc("repro")
    assert failed.returncode != 0
    assert stages_run(failed) == [f"verify@{TARGET}"]
    for part in (line.manifest("cache").prefix, str(line.store), f"dvc repro -f -s cache@{TARGET}"):
        assert part in failed.stderr
    assert "Traceback" not in failed.stderr

    done = line.run("store", "check", "--mend")
    assert stages_run(done) == ["prompts", f"answers@{TARGET}", f"cache@{TARGET}"]
    assert {name: (line.root / "data" / name).read_bytes() for name in manifests} == before
    assert line.run("store", "check").returncode == 0
    # The same bytes came back, so nothing after the cache is stale.
    assert stages_run(line.dvc("repro")) == [f"verify@{TARGET}"]


def test_a_tampered_cache_is_found_and_mended(line: Line) -> None:
    manifest = line.manifest("cache")
    record = next(item for item in manifest.objects if item.path.startswith("context/c."))
    place = line.store / manifest.prefix / record.path
    good = place.read_bytes()

    # A changed byte leaves the size as it was.
    place.write_bytes(good[:100] + bytes([good[100] ^ 1]) + good[101:])
    deep = line.tried("cache", "verify", "--target", TARGET, "--deep")
    assert deep.returncode == 2
    assert f"sha256: {manifest.prefix}/{record.path}" in deep.stderr

    place.write_bytes(good[:-1])
    line.edit_params(lambda body: body["train"].update(lr=1e-3))
    failed = line.tried_dvc("repro")
    assert failed.returncode != 0
    assert stages_run(failed) == [f"verify@{TARGET}"], "nothing may train on it"
    told = f"truncated: got {len(good) - 1} bytes, expected {len(good)}"
    assert f"size: {manifest.prefix}/{record.path} ({told})" in failed.stderr
    assert "Traceback" not in failed.stderr

    # The remedy in the message works, and makes again what it names and nothing else.
    command = re.search(r"delete the objects named above, then run `dvc ([^`]+)`", failed.stderr)
    assert command is not None
    before = files_below(line.store / manifest.prefix, "*")
    place.unlink()
    line.dvc(*command[1].split())
    assert place.read_bytes() == good
    after = files_below(line.store / manifest.prefix, "*")
    assert after.keys() == before.keys()
    assert [name for name in after if after[name] != before[name]] == [record.path], "equal bytes are left as they are"
    assert line.manifest("cache").digest == manifest.digest


def test_generate_marks_drafted_tokens(built_line: Line) -> None:
    prompt = "Name three rivers."
    done = built_line.run("generate", "--key", DSPARK, "--temperature", "1", "--max-new-tokens", "24", prompt)
    told = re.fullmatch(r"\s*(\d+) tokens in (\d+) rounds, (\d+) tokens drafted, [\d.]+ tokens/s\s*", done.stderr)
    assert told is not None, done.stderr
    tokens, rounds, drafted = (int(part) for part in told.groups())
    assert 0 < drafted < tokens <= 24
    # Every round writes one token of the target's own, and so does the prompt's own pass.
    assert tokens - drafted <= rounds + 1
    assert 1 <= done.stdout.count("[") <= drafted
    again = built_line.run("generate", "--key", DSPARK, "--temperature", "1", "--max-new-tokens", "24", prompt)
    assert again.stdout == done.stdout


def test_the_drafter_shares_the_targets_embedding(built_line: Line) -> None:
    """The out holds what was trained; embedding and head are the target's and stay there."""
    with safe_open(built_line.workspace.drafter_dir(DSPARK) / "model.safetensors", framework="pt") as tensors:
        names = set(tensors.keys())
        assert all(tensors.get_tensor(name).dtype.itemsize == 2 for name in names)
    assert {"fc.weight", "markov_head.markov_w2.weight"} <= names
    assert not [name for name in names if "embed_tokens" in name or "lm_head" in name]
