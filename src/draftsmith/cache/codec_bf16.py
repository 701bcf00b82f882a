"""The lossless codec of the cache: bfloat16 numbers parted into exponents and the rest.

Mantissas and signs are noise, one byte a number, and are stored as they are. The exponents of a channel lie close to
their mean, so what is coded is how far each is from the mean of its channel, in 4 bits; the few that are further away
are outliers, kept beside. Two numbers make a byte, and the bytes are entropy coded: zstd is set to look for next to no
matches, which there are none of, so that its Huffman coder is what remains.

All of it is done on 16-bit words, one number of the upper half of the rows and one of the lower half in each, so that
words are never taken apart into bytes; the loops are those of `planes`.

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

from draftsmith.cache import planes
from draftsmith.cache.scratch import Scratch

CODEC_NAME = "draftsmith.bf16_planes"
FILL = 0x7FC0  # rows of it at the end are not coded
MEAN_PAIRS = 256  # of rows, that a mean is taken of
BELOW = 9  # exponents from mean - 9 to mean - 10 + SPAN are coded
MOST_OUTLIERS = 1 / 10  # of all numbers; with more, at 5 bytes each, next to nothing is gained

# Channels, rows, rows that are coded, outliers, bytes of the zstd frame (0: the numbers lie there as they are).
_HEADER = struct.Struct("<IIIII")
_HUFFMAN = zstandard.ZstdCompressionParameters.from_level(
    1, strategy=zstandard.STRATEGY_FAST, min_match=7, target_length=0, hash_log=6
)

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
    pairs = (len(rows) + 1) // 2
    upper, lower = _halves(rows)
    means = _means(upper, lower)
    rest_at = _HEADER.size + channels
    end = rest_at + 2 * pairs * channels
    differences = _SCRATCH.take("differences", 2 * pairs * channels)
    planes.part(upper, lower, shift=means - np.uint8(BELOW), differences=differences, rest=out[rest_at:end])
    outliers = planes.take_outliers(differences, most=int(MOST_OUTLIERS * differences.size), filler=BELOW)
    tail = [b""]
    if outliers is not None:
        packed = _SCRATCH.take("packed", pairs * channels)
        planes.pack(differences, packed=packed)
        frame = zstandard.ZstdCompressor(compression_params=_HUFFMAN).compress(packed.data)
        places, far = outliers
        tail = [places.astype("<u4").tobytes(), far.tobytes(), frame]
    if not tail[-1] or end + sum(map(len, tail)) >= _HEADER.size + rows.nbytes:
        _HEADER.pack_into(out.data, 0, channels, num_rows, len(rows), 0, 0)
        out[_HEADER.size : _HEADER.size + rows.nbytes] = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
        return _HEADER.size + rows.nbytes
    _HEADER.pack_into(out.data, 0, channels, num_rows, len(rows), len(tail[1]), len(tail[-1]))
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
    differences = _SCRATCH.take("differences", 2 * pairs)
    planes.unpack(np.frombuffer(frame, dtype=np.uint8), differences=differences)
    differences[places] = far
    whole = out[:size] if size == 2 * pairs else np.empty(2 * pairs, dtype=np.uint16)
    upper, lower = whole.reshape(2, -1, channels)
    planes.join(differences, rest, shift=means - np.uint8(BELOW), upper=upper, lower=lower)
    if size != 2 * pairs:
        out[:size] = whole[:size]


def _num_coded(rows: NDArray[np.uint16]) -> int:
    """Rows [any, C] without those of fill at their end."""
    others = np.flatnonzero(rows[:, 0] != FILL)
    num = int(others[-1]) + 1 if others.size else 0
    kept = np.flatnonzero((rows[num:] != FILL).any(axis=1))
    return num + (int(kept[-1]) + 1 if kept.size else 0)


def _halves(rows: NDArray[np.uint16]) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    """Rows [R, C] -> upper and lower half [P, C]; the last row stands in for one that is missing."""
    if len(rows) % 2:
        rows = np.concatenate((rows, rows[-1:]))
    upper, lower = np.ascontiguousarray(rows).reshape(2, -1, rows.shape[1])
    return upper, lower


def _means(upper: NDArray[np.uint16], lower: NDArray[np.uint16]) -> NDArray[np.uint8]:
    """The mean exponent of each channel [C], rounded down, from up to MEAN_PAIRS pairs of rows of [P, C]."""
    step = max(1, -(-len(upper) // MEAN_PAIRS))
    sums = np.zeros(upper.shape[1], dtype=np.uint32)
    for half in (upper, lower):
        planes.add_exponents(half, step=step, sums=sums)
    return (sums // max(1, 2 * len(upper[::step]))).astype(np.uint8)


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
