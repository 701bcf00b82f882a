"""Slices of rows for losses over a vocabulary: how many rows of logits exist at once, and how many are worked on.

Two sizes: a *slice* is what one matrix product makes (large enough for the product's full speed), a *chunk* is what
the softmaxes pass over (small enough for the CPU's caches, where a pass costs a third; on a GPU the whole slice).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import ParamSpec, TypeVar

import torch

SLICE_ROWS = {"cpu": 256, "cuda": 1024}
CHUNK_ELEMENTS_PER_THREAD = 2**18  # of logits that one CPU thread passes over: 1 MiB in float32, its L2 cache

P = ParamSpec("P")
R = TypeVar("R")


def slice_rows_for(device: torch.device) -> int:
    return SLICE_ROWS.get(device.type, SLICE_ROWS["cuda"])


def chunk_rows_for(device: torch.device, *, vocab_size: int, slice_rows: int) -> int:
    """Rows [chunk, V] of one pass: at least one for each CPU thread."""
    if device.type != "cpu":
        return slice_rows
    return torch.get_num_threads() * max(1, CHUNK_ELEMENTS_PER_THREAD // vocab_size)


def ranges(start: int, stop: int, *, size: int) -> Iterator[slice]:
    """start..stop in ranges of `size` rows, the last one shorter."""
    for begin in range(start, stop, size):
        yield slice(begin, min(begin + size, stop))


@cache
def _compiled(function: Callable[P, R]) -> Callable[P, R]:
    return torch.compile(function)


def for_device(function: Callable[P, R], device: torch.device) -> Callable[P, R]:
    """The function itself on the CPU, where chunks stay in cache; on a GPU compiled, so that passes are fused."""
    return _compiled(function) if device.type == "cuda" else function
