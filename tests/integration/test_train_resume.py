"""Training that is killed, or whose checkpoints are broken: the weights come out the same to the bit."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch

from tests.line_fixtures import DSPARK, Line, kill_when, line, prepared_line, tiny_target, trained_line

__all__ = ["line", "prepared_line", "tiny_target", "trained_line"]

TRAIN = ("train", "--key", DSPARK)
KEPT = ["step-000004", "step-000006", "step-000008", "step-000010"]


def checkpoints(line: Line) -> Path:
    """The folder of the run's checkpoints in the store; there is one run."""
    folders = list((line.store / "train").iterdir())
    assert len(folders) == 1
    return folders[0]


def complete(line: Line) -> list[str]:
    """Names of the checkpoints that have a marker, oldest first."""
    return sorted(marker.parent.name for marker in (line.store / "train").glob("*/*/_complete.json"))


def float32_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Parameters of a checkpoint as DeepSpeed wrote them."""
    data = (folder / "mp_rank_00_model_states.pt").read_bytes()
    weights = torch.load(io.BytesIO(data), weights_only=False)["module"]
    assert weights
    assert {value.dtype for value in weights.values()} == {torch.float32}
    return dict(weights)


def assert_same_outcome(line: Line, reference: Line) -> None:
    """Bit for bit: the last checkpoint's float32 weights, the drafter's file, and the curve."""
    ours, theirs = (float32_weights(checkpoints(item) / "step-000010") for item in (line, reference))
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    for path in ("data/drafters/{}/model.safetensors", "data/drafters/{}/contract.json", "reports/{}/train_curve.csv"):
        place = path.format(DSPARK)
        assert (line.root / place).read_bytes() == (reference.root / place).read_bytes(), place
    ours, theirs = (item.report(DSPARK, "train") for item in (line, reference))
    for name in ("loss", "expected_accepted_length", "acceptance", "validations", "num_validation_blocks"):
        assert ours[name] == theirs[name], name


def test_killed_training_goes_on_from_its_checkpoint(line: Line, trained_line: Line) -> None:
    kill_when(line.start(*TRAIN), lambda: bool(complete(line)))
    newest = complete(line)[-1]
    assert newest < "step-000010"
    assert not line.workspace.drafter_dir(DSPARK).exists(), "a killed job must leave nothing that counts as done"
    assert not (line.workspace.report_dir(DSPARK) / "train.json").exists()

    line.run(*TRAIN)
    assert_same_outcome(line, trained_line)
    # The same MLflow run goes on, and no step is in it twice.
    ((run_id, _, status),) = line.tracked_runs("train")
    assert status == "FINISHED"
    assert line.tracked_steps(run_id, "loss") == list(range(1, 11))
    assert complete(line) == KEPT


def test_broken_checkpoints_are_told_and_left_out(trained_line: Line, tmp_path: Path) -> None:
    """The newest has no marker yet, one has a changed byte, one lacks a file: the fourth is taken, loudly."""
    line = trained_line.copied(tmp_path / "line")
    folder = checkpoints(line)
    assert complete(line) == KEPT
    (folder / "step-000010" / "_complete.json").unlink()
    changed = folder / "step-000008" / "mp_rank_00_model_states.pt"
    data = bytearray(changed.read_bytes())
    data[len(data) // 2] ^= 1
    changed.write_bytes(bytes(data))
    missing = next((folder / "step-000006").glob("*optim_states.pt"))
    missing.unlink()

    done = line.run(*TRAIN)
    told = [text for text in done.stderr.splitlines() if "is left out" in text]
    assert len(told) == 2, "a checkpoint without a marker was never one: nothing is said of it"
    for text, parts in zip(told, (("step-000008", changed.name), ("step-000006", missing.name)), strict=True):
        assert all(part in text for part in parts)
    assert_same_outcome(line, trained_line)
    assert complete(line) == KEPT
    # What the broken ones left is gone: the new checkpoints hold the files that their markers name, and no others.
    for name in KEPT[1:]:
        marker = json.loads((folder / name / "_complete.json").read_text())
        files = {f"{name}/{path.name}" for path in (folder / name).iterdir() if path.name != "_complete.json"}
        assert files == {item["path"] for item in marker["objects"]}


@pytest.mark.parametrize("name", ["loss", "ce", "tv", "bce"])
def test_the_reference_learns(trained_line: Line, name: str) -> None:
    """Else equal weights would say little: ten steps at this rate move every part of the loss."""
    rows = (trained_line.workspace.report_dir(DSPARK) / "train_curve.csv").read_text().split()
    column = rows[0].split(",").index(name)
    values = [float(row.split(",")[column]) for row in rows[1:]]
    assert values[-1] != values[0]
