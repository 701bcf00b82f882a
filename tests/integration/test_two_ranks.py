"""Two ranks on this machine: the same training as one, nothing left behind, however it ends."""

from __future__ import annotations

import contextlib
import csv
import signal
import time
from pathlib import Path

import psutil
import pytest

from draftsmith.training.launch import SHM
from tests.line_fixtures import DSPARK, TARGET, Line, line, prepared_line, tiny_target, trained_line

__all__ = ["line", "prepared_line", "tiny_target", "trained_line"]

# The first update's figures differ by the order of a few thousand float32 sums alone (6e-8 each, and figures are kept
# to six digits). Later ones also by what Adam makes of that: it divides by the root of a second moment, so that a
# gradient near zero may turn a weight the other way. A rank's share weighed wrong would show at 1e-1.
FIRST_TOLERANCE, TOLERANCE = 5e-6, 1e-4


def curve(line: Line) -> list[dict[str, float]]:
    with (line.workspace.report_dir(DSPARK) / "train_curve.csv").open() as stream:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(stream)]


def processes_in(folder: Path) -> list[psutil.Process]:
    """Processes whose current folder is `folder`."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(folder):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def buffers() -> set[str]:
    return {path.name for path in SHM.glob("deepspeed_allreduce_buffer_*")}


def test_two_ranks_train_as_one(line: Line, trained_line: Line) -> None:
    before = buffers()
    line.with_settings(DRAFTSMITH_LAUNCH="local:2").run("train", "--key", DSPARK)
    ours, theirs = curve(line), curve(trained_line)
    assert [row["step"] for row in ours] == list(range(1, 11))
    for row, expected in zip(ours, theirs, strict=True):
        for name in ("loss", "ce", "tv", "bce", "acceptance_1"):
            assert row[name] == pytest.approx(expected[name], rel=TOLERANCE), (row["step"], name)
        assert row["lr"] == expected["lr"]
    for name in ("loss", "ce", "tv", "bce", "acceptance_1", "grad_norm"):
        assert ours[0][name] == pytest.approx(theirs[0][name], rel=FIRST_TOLERANCE), name
    report, expected_report = line.report(DSPARK, "train"), trained_line.report(DSPARK, "train")
    assert (report["num_ranks"], expected_report["num_ranks"]) == (2, 1)
    assert report["num_validation_blocks"] == expected_report["num_validation_blocks"]
    assert report["expected_accepted_length"] == pytest.approx(
        expected_report["expected_accepted_length"], rel=TOLERANCE
    )
    assert buffers() <= before
    assert processes_in(line.root) == []
    # One rank alone tracks the run.
    assert [status for _, _, status in line.tracked_runs("train")] == ["FINISHED"]


def test_stopped_training_leaves_no_rank_behind(line: Line) -> None:
    """SIGTERM to the command that the user (or Prefect) started, while both ranks are at work."""
    line.edit_params(lambda body: body["train"].update(steps=5000, checkpoint_every=5000, validate_every=5000))
    before = buffers()
    process = line.with_settings(DRAFTSMITH_LAUNCH="local:2").start("train", "--key", DSPARK)
    deadline = time.monotonic() + 120
    while not any(line.tracked_steps(run_id, "loss") for run_id, _, _ in line.tracked_runs("train")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    ranks = [item for item in processes_in(line.root) if "draftsmith.jobs.train_rank" in item.cmdline()]
    try:
        assert len(ranks) >= 2
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        left = [item.cmdline() for item in ranks if item.is_running()]
    finally:
        for item in [process, *ranks]:
            with contextlib.suppress(psutil.NoSuchProcess):
                item.kill()
    _, errors = process.communicate()
    assert process.returncode not in (0, 1), errors
    assert left == []
    assert processes_in(line.root) == []
    assert [status for _, _, status in line.tracked_runs("train")] == ["KILLED"]
    assert not line.workspace.drafter_dir(DSPARK).exists()
    # Buffers of ranks that were killed go when the next training starts; a live one is never touched.
    line.edit_params(lambda body: body["targets"][TARGET].update(folder=str(line.root / "nothing")))
    assert line.tried("train", "--key", DSPARK).returncode == 2
    assert buffers() <= before
