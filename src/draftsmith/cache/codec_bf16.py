"""The lossless codec of the cache: bfloat16 numbers parted into exponents and the rest.

Mantissas and signs are noise, one byte a number, and are stored as they are. The exponents of a channel lie close to
their mean, so what is coded is how far each is from the mean of its channel, in 4 bits; the few that are further away
are outliers, kept beside. Two numbers make a byte, and the bytes are entropy coded: zstd is set to look for next to no
matches, which there are none of, so that its Huffman coder is what remains.

All of it is done on 16-bit words, one number of the upper half of the rows and one of the lower half in each: numpy
does that many times faster than it turns words into bytes.

Registered with Zarr under `draftsmith.bf16_planes` through an entry point, so any Zarr reader opens a cache where
draftsmith is installed. Letters: R rows that are coded, C channels of a row, P = ceil(R / 2) pairs of rows p, P + p.
"""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Self

import numpy as np
import zstandard
from numpy.typing import NDArray
from zarr.abc.codec import BytesBytesCodec
from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import Buffer
from zarr.core.common import JSON, parse_named_configuration

from draftsmith.cache.scratch import Scratch

CODEC_NAME = "draftsmith.bf16_planes"
FILL = 0x7FC0  # rows of it at the end are not coded
BLOCK_PAIRS = 1 << 17  # worked on at a time, to stay in the processor's cache
MEAN_PAIRS = 256  # of rows, that a mean is taken of: as many bytes can be added in 16 bits
BELOW = 9  # exponents from mean - 9 to mean + 6 are coded
SPAN = 16
MOST_OUTLIERS = 1 / 10  # of all numbers; with more, at 5 bytes each, next to nothing is gained

# Channels, rows, rows that are coded, outliers, bytes of the zstd frame (0: the numbers lie there as they are).
_HEADER = struct.Struct("<IIIII")
_HUFFMAN = zstandard.ZstdCompressionParameters.from_level(
    1, strategy=zstandard.STRATEGY_FAST, min_match=7, target_length=0, hash_log=6
)
_REST = 0x807F  # sign and mantissa

_SCRATCH = Scratch()


def most_bytes(num_numbers: int, *, channels: int) -> int:
    """The most bytes that `encode_planes` writes."""
    return _HEADER.size + 2 * (num_numbers + channels) + channels


def encode_planes(values: NDArray[np.uint16], *, channels: int, out: NDArray[np.uint8]) -> int:
    """bfloat16 bits uint16 [any * C] -> bytes in `out`, which has room for `most_bytes`; how many.

    They are: header, mean exponents uint8 [C], mantissas and signs [2 P * C], places of outliers uint32, their
    differences uint8, zstd of two differences a byte [P * C]. Difference i of [P, C, 2] is that of row p at even i, of
    row P + p at odd i; a byte of the frame holds that of i in its lower four bits and that of i + P C in its upper
    ones. Raises ValueError if the values are not whole rows of C channels.
    """
    if channels < 1 or values.size % channels:
        raise ValueError(f"{CODEC_NAME} stores rows of {channels} numbers, got {values.size} numbers")
    num_rows, rows = values.size // channels, values.reshape(-1, channels)
    rows = rows[: _num_coded(rows)]
    rest_at = _HEADER.size + channels
    end = rest_at + 2 * ((len(rows) + 1) // 2) * channels
    exponents = _part(rows, rest=out[rest_at:end].view(np.uint16)).view(np.uint8)
    by_pair = exponents.reshape(-1, 2 * channels)
    means = _means(by_pair, channels=channels)
    np.subtract(by_pair, np.repeat(means - np.uint8(BELOW), 2), out=by_pair)
    is_outlier = np.greater_equal(exponents, SPAN, out=_SCRATCH.take("mask", exponents.size).view(np.bool_))
    places = _places(is_outlier)
    tail = [b""]
    if places.size <= MOST_OUTLIERS * exponents.size:
        far = exponents[places].tobytes()
        exponents[places] = BELOW
        half = exponents.size // 2
        packed = np.multiply(exponents[half:], SPAN, out=_SCRATCH.take("packed", half))
        packed |= exponents[:half]
        frame = zstandard.ZstdCompressor(compression_params=_HUFFMAN).compress(packed.data)
        tail = [places.astype("<u4").tobytes(), far, frame]
    if not tail[-1] or end + sum(map(len, tail)) >= _HEADER.size + rows.nbytes:
        _HEADER.pack_into(out.data, 0, channels, num_rows, len(rows), 0, 0)
        out[_HEADER.size : _HEADER.size + rows.nbytes] = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
        return _HEADER.size + rows.nbytes
    _HEADER.pack_into(out.data, 0, channels, num_rows, len(rows), places.size, len(tail[-1]))
    out[_HEADER.size : rest_at] = means
    for part in tail:
        out[end : end + len(part)] = np.frombuffer(part, dtype=np.uint8)
        end += len(part)
    return end


def decode_planes(data: memoryview, *, out: NDArray[np.uint16]) -> None:
    """The inverse of `encode_planes`, into `out` uint16 [any * C]. Raises ValueError for bytes of another form."""
    if len(data) < _HEADER.size:
        raise ValueError(f"{CODEC_NAME}: {len(data)} bytes are too few")
    channels, num_rows, num_coded, num_outliers, length = _HEADER.unpack(data[: _HEADER.size])
    size, pairs = num_coded * channels, (num_coded + 1) // 2 * channels
    if channels < 1 or out.size != num_rows * channels or num_coded > num_rows:
        raise ValueError(f"{CODEC_NAME}: {num_rows} rows of {channels} numbers, {out.size} numbers expected")
    bounds = list(accumulate([_HEADER.size, channels, 2 * pairs, 4 * num_outliers, num_outliers, length]))
    coded = length > 0
    expected = bounds[-1] if coded else _HEADER.size + 2 * size
    if len(data) != expected:
        raise ValueError(f"{CODEC_NAME}: {len(data)} bytes, {expected} expected")
    out[size:] = FILL
    if not coded:
        out[:size].view(np.uint8)[:] = np.frombuffer(data[_HEADER.size :], dtype=np.uint8)
        return
    means, rest, places, far = (
        np.frombuffer(data[start:end], dtype=dtype)
        for (start, end), dtype in zip(pairwise(bounds[:-1]), ("u1", "u1", "<u4", "u1"), strict=True)
    )
    try:
        frame = zstandard.ZstdDecompressor().decompress(data[bounds[-2] :], max_output_size=pairs)
    except zstandard.ZstdError as error:
        raise ValueError(f"{CODEC_NAME}: {error}") from None
    if len(frame) != pairs:
        raise ValueError(f"{CODEC_NAME}: {len(frame)} bytes of exponents, {pairs} expected")
    if (places >= 2 * pairs).any():
        raise ValueError(f"{CODEC_NAME}: outliers beyond the {2 * pairs} numbers")
    packed = np.frombuffer(frame, dtype=np.uint8)
    exponents = _SCRATCH.take("exponents", 2 * pairs)
    np.bitwise_and(packed, SPAN - 1, out=exponents[:pairs])
    np.right_shift(packed, 4, out=exponents[pairs:])
    exponents[places] = far
    by_pair = exponents.reshape(-1, 2 * channels)
    np.add(by_pair, np.repeat(means - np.uint8(BELOW), 2), out=by_pair)
    _join(exponents.view(np.uint16), rest, out=out[:size])


def _num_coded(rows: NDArray[np.uint16]) -> int:
    """Rows [any, C] without those of fill at their end."""
    others = np.flatnonzero(rows[:, 0] != FILL)
    num = int(others[-1]) + 1 if others.size else 0
    kept = np.flatnonzero((rows[num:] != FILL).any(axis=1))
    return num + (int(kept[-1]) + 1 if kept.size else 0)


def _means(by_pair: NDArray[np.uint8], *, channels: int) -> NDArray[np.uint8]:
    """Exponents [P, C * 2] -> the mean of each channel, rounded down, from up to MEAN_PAIRS pairs of rows."""
    few = by_pair[:: max(1, -(-len(by_pair) // MEAN_PAIRS))]
    sums = np.add.reduce(few, axis=0, dtype=np.uint16).reshape(channels, 2).sum(axis=1, dtype=np.uint32)
    return (sums // max(1, 2 * len(few))).astype(np.uint8)


def _places(is_outlier: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Where the few True are: eight of them looked at at a time, as most eights have none."""
    whole = is_outlier.size // 8 * 8
    eights = np.flatnonzero(is_outlier[:whole].view(np.uint64) != 0)
    found = (eights[:, None] * 8 + np.arange(8)).reshape(-1)
    return np.concatenate((found[is_outlier[found]], whole + np.flatnonzero(is_outlier[whole:])))


def _part(rows: NDArray[np.uint16], *, rest: NDArray[np.uint16]) -> NDArray[np.uint16]:
    """Rows [R, C] -> exponents and, in `rest`, all else; each uint16 [P * C] of two bytes, for rows p and P + p.

    Exponents: of row p in the lower byte, of P + p in the upper one. Rest: mantissa of p and sign of P + p in the
    lower byte, mantissa of P + p and sign of p in the upper one. The last row stands in for one that is missing.
    """
    if len(rows) % 2:
        rows = np.concatenate((rows, rows[-1:]))
    upper, lower = np.ascontiguousarray(rows).reshape(2, -1)
    exponents = _SCRATCH.take("exponents", 2 * upper.size).view(np.uint16)
    spare = np.empty(min(BLOCK_PAIRS, upper.size), dtype=np.uint16)
    for start in range(0, upper.size, BLOCK_PAIRS):
        block = slice(start, start + BLOCK_PAIRS)
        a, b, e, r = upper[block], lower[block], exponents[block], rest[block]
        t = spare[: a.size]
        np.right_shift(a, 7, out=e)
        e &= 0x00FF
        np.left_shift(b, 1, out=t)
        t &= 0xFF00
        e |= t
        np.bitwise_and(b, _REST, out=r)
        np.right_shift(r, 8, out=t)
        r <<= 8
        r |= t
        np.bitwise_and(a, _REST, out=t)
        r |= t
    return exponents


def _join(exponents: NDArray[np.uint16], rest: NDArray[np.uint8], *, out: NDArray[np.uint16]) -> None:
    """The inverse of `_part`, into `out` uint16 [R * C]; `rest` as bytes, which may lie at an odd address."""
    size = exponents.size
    is_even = out.size == 2 * size
    whole = out if is_even else np.empty(2 * size, dtype=np.uint16)
    upper, lower = whole.reshape(2, -1)
    spare = np.empty((2, min(BLOCK_PAIRS, size)), dtype=np.uint16)
    for start in range(0, size, BLOCK_PAIRS):
        block = slice(start, start + BLOCK_PAIRS)
        a, b, e = upper[block], lower[block], exponents[block]
        r, t = spare[:, : e.size]
        np.copyto(r.view(np.uint8), rest[2 * start : 2 * (start + e.size)])
        np.bitwise_and(e, 0x00FF, out=a)
        a <<= 7
        np.bitwise_and(r, _REST, out=t)
        a |= t
        np.right_shift(r, 8, out=b)
        r <<= 8
        b |= r
        b &= _REST
        e >>= 1
        e &= 0x7F80
        b |= e
    if not is_even:
        out[:] = whole[: out.size]


@dataclass(frozen=True)
class Bf16Planes(BytesBytesCodec):
    """Zarr's view of the codec. `channels`: numbers of a row."""

    is_fixed_size = False

    channels: int

    @classmethod
    def from_dict(cls, data: dict[str, JSON]) -> Self:
        _, configuration = parse_named_configuration(data, CODEC_NAME)
        channels = configuration.get("channels")
        if set(configuration) != {"channels"} or not isinstance(channels, int) or channels < 1:
            raise ValueError(f"{CODEC_NAME} takes one setting, channels >= 1, got {configuration}")
        return cls(channels=channels)

    def to_dict(self) -> dict[str, JSON]:
        return {"name": CODEC_NAME, "configuration": {"channels": self.channels}}

    def validate(self, *, shape: tuple[int, ...], dtype: Any, chunk_grid: Any) -> None:
        """Raises ValueError unless the array's numbers have 16 bits."""
        if dtype.to_native_dtype().itemsize != 2:
            raise ValueError(f"{CODEC_NAME} stores 16-bit numbers, got {dtype.to_native_dtype()}")

    async def _encode_single(self, chunk_data: Buffer, chunk_spec: ArraySpec) -> Buffer:
        values = chunk_data.as_numpy_array().view("<u2")
        out = np.empty(most_bytes(values.size, channels=self.channels), dtype=np.uint8)
        num_bytes = await asyncio.to_thread(encode_planes, values, channels=self.channels, out=out)
        return chunk_spec.prototype.buffer.from_bytes(out[:num_bytes].tobytes())

    async def _decode_single(self, chunk_data: Buffer, chunk_spec: ArraySpec) -> Buffer:
        out = np.empty(int(np.prod(chunk_spec.shape)), dtype="<u2")
        data = memoryview(chunk_data.to_bytes())
        await asyncio.to_thread(decode_planes, data, out=out)
        return chunk_spec.prototype.buffer.from_array_like(out.view("B"))

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: ArraySpec) -> int:
        raise NotImplementedError(f"{CODEC_NAME} has no fixed size")
