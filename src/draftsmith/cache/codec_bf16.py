"""The lossless codec of the cache: bfloat16 numbers parted into exponents and the rest.

A bfloat16 number is rotated left by one bit, so that its upper byte is the whole exponent and its lower byte the
mantissa and the sign, which are noise and are stored as they are. The exponents of hidden states take few values,
and most of what remains is that channels differ in size: the mean exponent of each channel is taken off (modulo 256)
before they are entropy coded. zstd is set to look for next to no matches, which there are none of: its Huffman coder
is what is wanted.

Registered with Zarr under `draftsmith.bf16_planes` through an entry point, so any Zarr reader opens a cache where
draftsmith is installed. Letters: R rows, C channels of a row.
"""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import zstandard
from numpy.typing import NDArray
from zarr.abc.codec import BytesBytesCodec
from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import Buffer
from zarr.core.common import JSON, parse_named_configuration

CODEC_NAME = "draftsmith.bf16_planes"
NO_NUMBER = 255  # the exponent of NaN and infinity: rows of fill
BLOCK_NUMBERS = 1 << 16  # worked on at a time, to stay in the processor's cache

_HEADER = struct.Struct("<II")
_HUFFMAN = zstandard.ZstdCompressionParameters.from_level(
    1, strategy=zstandard.STRATEGY_FAST, min_match=7, target_length=0, hash_log=6
)


def encode_planes(values: NDArray[np.uint16], *, channels: int) -> list[bytes | memoryview]:
    """bfloat16 bits uint16 [R * C] -> parts to be joined: header (C, length of the third part), mean exponents [C],
    zstd of exponents less the means [R * C], mantissas and signs [R * C].

    Raises ValueError if the values are not whole rows of C channels.
    """
    if channels < 1 or values.size % channels:
        raise ValueError(f"{CODEC_NAME} stores rows of {channels} numbers, got {values.size} numbers")
    exponents = np.empty((values.size // channels, channels), dtype=np.uint8)
    rest = np.empty(values.size, dtype=np.uint8)
    flat, signs = exponents.reshape(-1), np.empty(BLOCK_NUMBERS, dtype=np.uint8)
    for start in range(0, values.size, BLOCK_NUMBERS):
        block = values[start : start + BLOCK_NUMBERS]
        part = slice(start, start + len(block))
        # Written into bytes, the shifts keep the lower eight bits.
        np.right_shift(block, 7, out=flat[part], casting="unsafe")
        np.left_shift(block, 1, out=rest[part], casting="unsafe")
        rest[part] |= np.right_shift(block, 15, out=signs[: len(block)], casting="unsafe")
    is_used = exponents[:, 0] != NO_NUMBER
    used = exponents if is_used.all() or not is_used.any() else exponents[is_used]
    means = (np.add.reduce(used, axis=0, dtype=np.uint32) // max(1, len(used))).astype(np.uint8)
    exponents -= means
    frame = zstandard.ZstdCompressor(compression_params=_HUFFMAN).compress(exponents.data) if values.size else b""
    return [_HEADER.pack(channels, len(frame)), means.data, frame, rest.data]


def decode_planes(data: memoryview, *, out: NDArray[np.uint16]) -> None:
    """The inverse of `encode_planes`, into `out` uint16 [R * C]. Raises ValueError for bytes of another form."""
    if len(data) < _HEADER.size:
        raise ValueError(f"{CODEC_NAME}: {len(data)} bytes are too few")
    channels, length = _HEADER.unpack(data[: _HEADER.size])
    start = _HEADER.size + channels
    rest = np.frombuffer(data[start + length :], dtype=np.uint8) if start + length <= len(data) else None
    if channels < 1 or rest is None or rest.size != out.size or out.size % channels:
        raise ValueError(f"{CODEC_NAME}: {len(data)} bytes do not hold {out.size} numbers")
    if not out.size:
        return
    try:
        frame = zstandard.ZstdDecompressor().decompress(data[start : start + length], max_output_size=out.size)
    except zstandard.ZstdError as error:
        raise ValueError(f"{CODEC_NAME}: {error}") from None
    if len(frame) != out.size:
        raise ValueError(f"{CODEC_NAME}: {len(frame)} exponents, {out.size} numbers")
    means = np.frombuffer(data[_HEADER.size : start], dtype=np.uint8)
    exponents = np.frombuffer(frame, dtype=np.uint8).reshape(-1, channels)
    rows = max(1, BLOCK_NUMBERS // channels)
    for first in range(0, len(exponents), rows):
        block = out[first * channels : (first + rows) * channels]
        np.copyto(block, (exponents[first : first + rows] + means).reshape(-1))
        block <<= 8
        block |= rest[first * channels : (first + rows) * channels]
        sign = block << 15
        block >>= 1
        block |= sign


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

    def encode_bytes(self, values: NDArray[np.uint16]) -> list[bytes | memoryview]:
        """uint16 [R * C] -> parts to be joined."""
        return encode_planes(values, channels=self.channels)

    def decode_bytes(self, data: memoryview, *, out: NDArray[np.uint16]) -> None:
        """Fill `out` uint16 [R * C]. Raises ValueError for damaged bytes."""
        decode_planes(data, out=out)

    async def _encode_single(self, chunk_data: Buffer, chunk_spec: ArraySpec) -> Buffer:
        values = chunk_data.as_numpy_array().view("<u2")
        parts = await asyncio.to_thread(self.encode_bytes, values)
        return chunk_spec.prototype.buffer.from_bytes(b"".join(parts))

    async def _decode_single(self, chunk_data: Buffer, chunk_spec: ArraySpec) -> Buffer:
        out = np.empty(int(np.prod(chunk_spec.shape)), dtype="<u2")
        data = memoryview(chunk_data.to_bytes())
        await asyncio.to_thread(self.decode_bytes, data, out=out)
        return chunk_spec.prototype.buffer.from_array_like(out.view("B"))

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: ArraySpec) -> int:
        raise NotImplementedError(f"{CODEC_NAME} has no fixed size")
