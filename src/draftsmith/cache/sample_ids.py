"""The ids of a plan's samples in one buffer, so that hundreds of thousands of them are no Python objects."""

from __future__ import annotations

import difflib
import heapq
from array import array
from collections.abc import Iterator
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from draftsmith.errors import CacheError

LINE_FEED = 10
BLOCK = 4096  # ids that are handled at a time
MOST_COMPARED = 20_000  # ids that a mistyped one is compared with


class SampleIds:
    """Ids in an order: UTF-8 in `text`, a line feed after each; `ends` int64 [N] says where each ends."""

    def __init__(self, text: bytes | bytearray, *, ends: NDArray[np.int64]) -> None:
        self.text, self._ends = text, ends

    @classmethod
    def parse(cls, text: bytes) -> SampleIds:
        """Of a whole buffer. Raises CacheError if it does not end with a line feed or has an empty line."""
        if not text.endswith(b"\n") or text.startswith(b"\n") or b"\n\n" in text:
            raise CacheError("broken cache plan: ids of samples", expected="one a line, a line feed after each")
        return cls(text, ends=np.flatnonzero(np.frombuffer(text, dtype=np.uint8) == LINE_FEED))

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> str:
        """The id at `index` >= 0."""
        start = int(self._ends[index - 1]) + 1 if index else 0
        return self.text[start : int(self._ends[index])].decode()

    def __iter__(self) -> Iterator[bytes]:
        """All ids in UTF-8."""
        start = 0
        for end in self._ends[BLOCK - 1 : -1 : BLOCK].tolist() + self._ends[-1:].tolist():
            yield from bytes(self.text[start:end]).split(b"\n")
            start = end + 1

    def column(self) -> NDArray[np.uint8]:
        """The whole buffer, uint8, read-only."""
        column = np.frombuffer(self.text, dtype=np.uint8)
        column.setflags(write=False)
        return column

    def take(self, order: NDArray[np.int64]) -> SampleIds:
        """The same ids in another order: `order` int64 [N] names each once."""
        taken, source = bytearray(), np.frombuffer(self.text, dtype=np.uint8)
        # Block by block, for on the way each byte has an index.
        for block in np.split(order, range(BLOCK, len(order), BLOCK)):
            start = np.where(block == 0, 0, self._ends[block - 1] + 1)
            size = self._ends[block] + 1 - start
            taken += source[np.arange(size.sum()) + np.repeat(start - np.cumsum(size) + size, size)].tobytes()
        return SampleIds(taken, ends=np.cumsum(np.diff(self._ends, prepend=-1)[order]) - 1)

    def find(self, sample_id: str) -> int | None:
        """The index of an id, or None."""
        wanted = sample_id.encode() + b"\n"
        place = 0 if self.text.startswith(wanted) else self.text.find(b"\n" + wanted) + 1
        if "\n" in sample_id or not self.text.startswith(wanted, place):
            return None
        return int(np.searchsorted(self._ends, place))

    def near(self, sample_id: str) -> list[str]:
        """Up to three ids that are most like a mistyped one; of very many ids, those that begin as it does."""
        known = (name.decode() for name in self)
        if len(self) <= MOST_COMPARED:
            return difflib.get_close_matches(sample_id, known, n=3, cutoff=0.0)
        return heapq.nlargest(3, known, key=lambda name: _num_equal(name, sample_id))


class SampleIdsBuilder:
    """Takes ids one by one."""

    def __init__(self) -> None:
        self._text, self._ends = bytearray(), array("q")

    def add(self, name: bytes) -> None:
        """One more id: a line of UTF-8."""
        self._text += name
        self._ends.append(len(self._text))
        self._text.append(LINE_FEED)

    def build(self) -> SampleIds:
        """All of them; the builder is not to be used any more."""
        return SampleIds(self._text, ends=np.frombuffer(self._ends, dtype=np.int64))


def _num_equal(one: str, other: str) -> int:
    """How many characters two texts have in common at their beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
