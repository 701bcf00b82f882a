"""One shard of one array to and from the bytes of its object, without Zarr's own machinery.

The format is Zarr's `sharding_indexed`: the inner chunks that hold anything, one after the other, each with its
crc32c; then the index, (offset, length) of every chunk as little-endian uint64 (all ones: no chunk), with its own
crc32c. Bytes are equal to those that Zarr writes. Chunks are coded by several threads at once.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from draftsmith.cache import codec_bf16, codec_int8
from draftsmith.cache.layout import CRC_BYTES, INDEX_ENTRY_BYTES, ArrayLayout, CacheSpec
from draftsmith.cache.recycled import RecycledMemory
from draftsmith.errors import CacheError

T = TypeVar("T")
R = TypeVar("R")

ABSENT = 2**64 - 1
SLOT_ALIGNMENT = 64
OBJECTS_KEPT = 2  # of whose memory is used again: one is written while the next one is encoded

_CRC = struct.Struct("<I")


@dataclass(frozen=True)
class ChunkRange:
    """Where an inner chunk lies in its shard's object: bytes start..start + length - 1; its first row in the shard."""

    chunk: int
    first_row: int
    start: int
    length: int


class ShardCodec:
    """Encodes and decodes the shards of one array; safe to share among threads.

    `scales`: the channels' root mean squares of an array under codec int8, None otherwise. `threads`: how many chunks
    are coded at once.
    """

    def __init__(
        self, layout: ArrayLayout, *, spec: CacheSpec, scales: NDArray[np.float32] | None = None, threads: int = 1
    ) -> None:
        """Raises CacheError if codec int8 has no scales, or others have some."""
        self.layout, self.spec, self._threads = layout, spec, threads
        self._rows = spec.chunk_tokens
        self._num_chunks = spec.shard_tokens // spec.chunk_tokens
        self._row_size = layout.row_bytes // np.dtype(layout.dtype).itemsize
        coded = layout.dtype == "uint16"
        size, channels = self._rows * self._row_size, self._row_size
        self._encode: Callable[[NDArray, NDArray[np.uint8]], int] = _copy_in
        self._decode: Callable[[memoryview, NDArray], None] = _copy_out
        most = self._rows * layout.row_bytes
        if coded and spec.codec == "bf16":
            self._encode = lambda values, out: codec_bf16.encode_planes(values, channels=channels, out=out)
            self._decode = lambda data, out: codec_bf16.decode_planes(data, out=out)
            most = codec_bf16.most_bytes(size, channels=channels)
        if (coded and spec.codec == "int8") != (scales is not None):
            got = "no scales" if scales is None else f"scales {scales.shape}"
            raise CacheError(f"{layout.name} under codec {spec.codec}", got=got, expected="scales for codec int8 alone")
        if scales is not None:
            if scales.size != channels:
                raise CacheError(f"scales of {layout.name}", got=scales.size, expected=f"{channels} channels")
            rms = codec_int8.ChannelScales(scales, layout.row_shape[-1])
            self._encode = lambda values, out: codec_int8.encode_rows(values, scales=rms, out=out)
            self._decode = lambda data, out: codec_int8.decode_rows(data, scales=rms, out=out)
            most = codec_int8.most_bytes(size, scales=rms)
        self._slot = (most + CRC_BYTES + SLOT_ALIGNMENT - 1) // SLOT_ALIGNMENT * SLOT_ALIGNMENT
        most_of_shard = self._num_chunks * (self._slot + INDEX_ENTRY_BYTES) + CRC_BYTES
        self._memory = RecycledMemory(block_bytes=most_of_shard, most_idle=OBJECTS_KEPT)

    def encode(self, rows: NDArray) -> memoryview | None:
        """The object that holds `rows` [n, ...], n <= shard_tokens, the rest being fill; None if there are none.

        The bytes depend on nothing but the rows, the spec and the scales (and zstd's version). Raises CacheError for
        rows of another shape or dtype.
        """
        layout = self.layout
        if rows.dtype != layout.dtype or rows.shape[1:] != layout.row_shape or len(rows) > self.spec.shard_tokens:
            expected = f"{layout.dtype} [<= {self.spec.shard_tokens}, {', '.join(map(str, layout.row_shape))}]"
            raise CacheError(f"rows of {layout.name}", got=f"{rows.dtype} {list(rows.shape)}", expected=expected)
        if not len(rows):
            return None
        num_used = -(-len(rows) // self._rows)
        index = np.full((self._num_chunks, 2), ABSENT, dtype="<u8")
        # Not `bytes`, which would be memory that was never used before: that costs half as much as the encoding.
        out = self._memory.empty((num_used * self._slot + index.nbytes + CRC_BYTES,), dtype=np.uint8)

        def chunk(number: int) -> int:
            begin = number * self._rows
            return self._chunk(rows[begin : begin + self._rows], out[number * self._slot : (number + 1) * self._slot])

        end = 0
        for number, length in enumerate(self._map(chunk, range(num_used))):
            if end < number * self._slot:
                out[end : end + length] = out[number * self._slot : number * self._slot + length]
            index[number] = end, length
            end += length
        out[end : end + index.nbytes] = index.reshape(-1).view(np.uint8)
        end += _add_crc(out[end:], index.nbytes)
        return out[:end].data.toreadonly()

    def decode(self, data: bytes | memoryview, *, num_rows: int, where: str, out: NDArray | None = None) -> NDArray:
        """The first `num_rows` rows [num_rows, ...] of a shard's object, in `out` if that is given. Raises CacheError,
        naming `where`, if the bytes are damaged."""
        view = memoryview(data)
        start, _ = self.index_range(len(data), where=where)
        ranges = self.chunk_ranges(data[start:], first_row=0, num_rows=num_rows, where=where)
        rows = np.empty((num_rows, *self.layout.row_shape), dtype=self.layout.dtype) if out is None else out

        def fill(item: ChunkRange) -> None:
            if item.start + item.length > start:
                raise CacheError(f"{where} is damaged: chunk {item.chunk} lies behind its end")
            self._fill(view[item.start : item.start + item.length], item, out=rows, first_row=0, where=where)

        for _ in self._map(fill, ranges):
            pass
        return rows

    def index_range(self, object_size: int, *, where: str) -> tuple[int, int]:
        """Start and length of the index at the end of an object. Raises CacheError if the object is too small."""
        length = self._num_chunks * INDEX_ENTRY_BYTES + CRC_BYTES
        if object_size < length:
            raise CacheError(f"{where} is damaged", got=f"{object_size} bytes", expected=f">= {length}")
        return object_size - length, length

    def chunk_ranges(self, index: bytes | memoryview, *, first_row: int, num_rows: int, where: str) -> list[ChunkRange]:
        """The chunks that hold rows first_row..first_row + num_rows - 1, from the bytes of the index.

        Raises CacheError, naming `where`, if the index is damaged or lacks one of them.
        """
        entries = np.frombuffer(_without_crc(memoryview(index), f"{where}: index"), dtype="<u8").reshape(-1, 2)
        if not num_rows:
            return []
        found = []
        for chunk in range(first_row // self._rows, (first_row + num_rows - 1) // self._rows + 1):
            start, length = (int(value) for value in entries[chunk]) if chunk < len(entries) else (ABSENT, ABSENT)
            if start == ABSENT:
                raise CacheError(f"{where} is damaged: its index names no chunk {chunk}")
            found.append(ChunkRange(chunk, chunk * self._rows, start, length))
        return found

    def decode_rows(
        self, chunks: Sequence[tuple[ChunkRange, bytes | memoryview]], *, first_row: int, num_rows: int, where: str
    ) -> NDArray:
        """Rows first_row..first_row + num_rows - 1 from the bytes of the chunks that `chunk_ranges` named.

        Raises CacheError, naming `where`, if they are damaged.
        """
        out = np.empty((num_rows, *self.layout.row_shape), dtype=self.layout.dtype)
        for item, data in chunks:
            self._fill(memoryview(data), item, out=out, first_row=first_row, where=where)
        return out

    def _chunk(self, rows: NDArray, out: NDArray[np.uint8]) -> int:
        """Write one inner chunk with its checksum; how many bytes. What is missing of the last one is fill."""
        if len(rows) < self._rows:
            whole = np.full((self._rows, *self.layout.row_shape), self.layout.fill_value, dtype=self.layout.dtype)
            whole[: len(rows)] = rows
            rows = whole
        return _add_crc(out, self._encode(np.ascontiguousarray(rows).reshape(-1), out))

    def _fill(self, data: memoryview, item: ChunkRange, *, out: NDArray, first_row: int, where: str) -> None:
        """Decode a chunk into the rows of `out` (which begins at `first_row` of the shard) that it holds."""
        named = f"{where}: chunk {item.chunk}"
        body = _without_crc(data, named)
        begin, end = item.first_row - first_row, item.first_row + self._rows - first_row
        inside = begin >= 0 and end <= len(out)
        whole = out[begin:end] if inside else np.empty((self._rows, *self.layout.row_shape), dtype=self.layout.dtype)
        try:
            self._decode(body, whole.reshape(-1))
        except ValueError as error:
            raise CacheError(f"{named} cannot be decoded: {error}") from None
        if not inside:
            low, high = max(begin, 0), min(end, len(out))
            out[low:high] = whole[low - begin : high - begin]

    def _map(self, function: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
        """The results in order, as they come."""
        if self._threads == 1 or len(items) < 2:
            yield from map(function, items)
        else:
            with ThreadPoolExecutor(min(self._threads, len(items))) as pool:
                yield from pool.map(function, items)


def _copy_in(values: NDArray, out: NDArray[np.uint8]) -> int:
    out[: values.nbytes] = values.view(np.uint8)
    return values.nbytes


def _copy_out(data: memoryview, out: NDArray) -> None:
    if len(data) != out.nbytes:
        raise ValueError(f"{len(data)} bytes, {out.nbytes} expected")
    out.view(np.uint8)[:] = np.frombuffer(data, dtype=np.uint8)


def _add_crc(out: NDArray[np.uint8], length: int) -> int:
    """Write the crc32c of the first `length` bytes behind them; the length with it."""
    _CRC.pack_into(out.data, length, google_crc32c.value(out[:length]))
    return length + CRC_BYTES


def _without_crc(data: memoryview, where: str) -> memoryview:
    """What stands before the crc32c at the end. Raises CacheError if the two do not agree."""
    body = data[:-CRC_BYTES]
    if (
        len(data) < CRC_BYTES
        or google_crc32c.value(np.frombuffer(body, dtype=np.uint8)) != _CRC.unpack(data[-CRC_BYTES:])[0]
    ):
        raise CacheError(f"{where} is damaged: its crc32c does not agree")
    return body
