"""Streaming mode, the trainer's side: which GPU each of its workers sees."""

from __future__ import annotations

from draftsmith.jobs.train_stream import worker_environment


def test_workers_share_the_gpus_by_turns() -> None:
    def seen(environment: dict[str, str], num_gpus: int) -> list[str | None]:
        found = [worker_environment(environment, number, num_gpus=num_gpus) for number in range(4)]
        assert all(item["HOME"] == "/h" for item in found)
        return [item.get("CUDA_VISIBLE_DEVICES") for item in found]

    assert seen({"HOME": "/h"}, 0) == [None] * 4
    assert seen({"HOME": "/h"}, 3) == ["0", "1", "2", "0"]
    assert seen({"HOME": "/h", "CUDA_VISIBLE_DEVICES": "5,GPU-a"}, 2) == ["5", "GPU-a", "5", "GPU-a"]
    assert seen({"HOME": "/h", "CUDA_VISIBLE_DEVICES": ""}, 0) == [""] * 4
