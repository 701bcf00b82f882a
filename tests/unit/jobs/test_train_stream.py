"""Streaming mode, the trainer's side: how many workers, and which GPU each of them sees."""

from __future__ import annotations

import pytest

from draftsmith.errors import MachineError
from draftsmith.jobs.train_stream import WORKERS_VARIABLE, _num_workers, worker_environment


def test_workers_share_the_gpus_by_turns() -> None:
    def seen(environment: dict[str, str], num_gpus: int) -> list[str | None]:
        found = [worker_environment(environment, number, num_gpus=num_gpus) for number in range(4)]
        assert all(item["HOME"] == "/h" for item in found)
        return [item.get("CUDA_VISIBLE_DEVICES") for item in found]

    assert seen({"HOME": "/h"}, 0) == [None] * 4
    assert seen({"HOME": "/h"}, 3) == ["0", "1", "2", "0"]
    assert seen({"HOME": "/h", "CUDA_VISIBLE_DEVICES": "5,GPU-a"}, 2) == ["5", "GPU-a", "5", "GPU-a"]
    assert seen({"HOME": "/h", "CUDA_VISIBLE_DEVICES": ""}, 0) == [""] * 4


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "many", "\u00b2", "00", "99999"])
def test_a_number_of_workers_that_cannot_be_read(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKERS_VARIABLE, text)
    with pytest.raises(MachineError, match=f"{WORKERS_VARIABLE} cannot be read: got {text}, expected a number"):
        _num_workers()


def test_numbers_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that is empty is one that is not set."""
    for text, expected in {"": 1, "1": 1, "12": 12}.items():
        monkeypatch.setenv(WORKERS_VARIABLE, text)
        assert _num_workers() == expected
