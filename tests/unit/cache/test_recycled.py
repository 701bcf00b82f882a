"""Memory is used again, and never while somebody can still see what is in it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from draftsmith.cache.recycled import RecycledMemory


def address(values: np.ndarray) -> int:
    return int(values.__array_interface__["data"][0])


def test_a_block_is_used_again_by_any_shape_that_fits() -> None:
    memory = RecycledMemory(block_bytes=96, most_idle=1)
    first = memory.empty((6, 2, 4), dtype="uint16")
    assert (first.shape, first.dtype, first.flags.c_contiguous) == ((6, 2, 4), np.uint16, True)
    place = address(first)
    del first
    second = memory.empty((3, 2), dtype="int32")
    assert address(second) == place
    assert second.shape == (3, 2)


@pytest.mark.parametrize(
    "part",
    [
        lambda values: values[2:4],
        lambda values: values[2:4][1:, 0].view(np.int16),
        lambda values: values.reshape(-1)[5:],
        lambda values: torch.from_numpy(values.view(np.int16))[3:],
        lambda values: memoryview(values[1:]),
    ],
    ids=["slice", "part of a part", "reshaped", "tensor", "memoryview"],
)
def test_a_part_keeps_its_block(part: object) -> None:
    memory = RecycledMemory(block_bytes=96, most_idle=2)
    values = memory.empty((6, 8), dtype="uint16")
    values[:] = 7
    place, kept = address(values), part(values)  # type: ignore[operator]
    del values
    others = [memory.empty((6, 8), dtype="uint16") for _ in range(3)]
    for other in others:
        other[:] = 9
        assert address(other) != place
    assert set(np.asarray(kept).reshape(-1).tolist()) == {7}
    del kept
    assert address(memory.empty((6, 8), dtype="uint16")) == place


def test_so_many_blocks_are_kept_and_no_more() -> None:
    memory = RecycledMemory(block_bytes=8, most_idle=2)
    arrays = [memory.empty((1,), dtype="uint8") for _ in range(5)]
    assert len({address(values) for values in arrays}) == 5
    arrays.clear()
    assert len(memory._idle) == 2


def test_threads_never_get_one_block_twice() -> None:
    memory = RecycledMemory(block_bytes=8000, most_idle=4)

    def use(number: int) -> bool:
        for _ in range(200):
            values = memory.empty((1000,), dtype="int64")
            values[:] = number
            if not (values == number).all():
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(use, range(4)))
