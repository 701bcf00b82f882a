"""Memory for arrays of one size that is used again when nobody holds an array in it any more.

Memory that was never used before has to be cleared by the system page by page, which costs about as much as decoding
a shard into it.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray


class RecycledMemory:
    """Blocks of `block_bytes`, of which at most `most_idle` are kept while unused; safe to share among threads."""

    def __init__(self, *, block_bytes: int, most_idle: int) -> None:
        self._block_bytes, self._most_idle = block_bytes, most_idle
        self._idle: list[memoryview] = []

    def empty(self, shape: tuple[int, ...], *, dtype: DTypeLike) -> NDArray[Any]:
        """An array of any contents in a block of its own, which is free again when it and all its parts are gone."""
        try:
            block = self._idle.pop()
        except IndexError:
            # numpy asks the system for large pages, which bytearray does not.
            block = np.empty(self._block_bytes, dtype=np.uint8).data
        count = int(np.prod(shape))
        # Parts of an array, parts of parts and tensors over them hold this array, which holds the block: no part holds
        # more than the last array in the chain, so the block has to be something else than an array.
        whole: NDArray[Any] = np.frombuffer(block, dtype=dtype, count=count)
        weakref.finalize(whole, self._give_back, block).atexit = False
        return whole.reshape(shape)

    def _give_back(self, block: memoryview) -> None:
        if len(self._idle) < self._most_idle:
            self._idle.append(block)
