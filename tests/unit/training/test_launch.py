"""Where ranks start, what a failed one says, and that no shared memory is left behind."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from draftsmith.errors import MachineError, TrainingError
from draftsmith.training import launch
from draftsmith.training.launch import launch_ranks, num_local_ranks, remove_shared_memory


@pytest.mark.parametrize(("choice", "expected"), [("local:1", 1), ("local:3", 3)])
def test_the_environment_says_how_many_ranks(choice: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_LAUNCH", choice)
    assert num_local_ranks() == expected


@pytest.mark.parametrize(("num_gpus", "expected"), [(0, 1), (4, 4)])
def test_by_default_one_rank_a_gpu(num_gpus: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DRAFTSMITH_LAUNCH", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    assert num_local_ranks() == expected


@pytest.mark.parametrize("choice", ["", "slurm:4", "local:0", "local:two", "local:-1"])
def test_a_choice_that_cannot_be_read_is_named(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_LAUNCH", choice)
    with pytest.raises(
        MachineError, match=f"DRAFTSMITH_LAUNCH cannot be read: got {choice}, expected local or local:N"
    ):
        num_local_ranks()


def test_a_rank_that_fails_ends_the_launch(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "failing_rank.py").write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(TrainingError, match="training ended with status 1"):
        launch_ranks("failing_rank", arguments=[], num_ranks=1, cwd=tmp_path)
    assert "exitcode  : 3" in capfd.readouterr().err


def test_buffers_of_dead_processes_are_removed_and_those_in_use_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "SHM", tmp_path)
    used, dead, other = (
        tmp_path / name for name in ("deepspeed_allreduce_buffer_1", "deepspeed_allreduce_buffer_2", "sem.x")
    )
    for file in (used, dead, other):
        file.write_bytes(b"\0" * mmap.PAGESIZE)
    with used.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        remove_shared_memory(own=False)
        assert sorted(tmp_path.iterdir()) == [used, other]
        remove_shared_memory(own=True)
        assert sorted(tmp_path.iterdir()) == [other]


def test_a_machine_without_shared_memory_has_nothing_to_remove(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "SHM", tmp_path / "none")
    remove_shared_memory(own=True)
