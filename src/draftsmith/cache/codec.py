"""The lossless codec of the cache: bfloat16 numbers parted into a plane of high bytes and a plane of low bytes.

The high byte (sign and most of the exponent) of hidden states takes few values and compresses well; the low byte
(the exponent's last bit and the mantissa) is noise and is stored as it is. Registered with Zarr under
`draftsmith.bf16_planes` through an entry point, so any Zarr reader opens a cache where draftsmith is installed.
"""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numcodecs.zstd import Zstd
from zarr.abc.codec import BytesBytesCodec
from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import Buffer
from zarr.core.common import JSON, parse_named_configuration

CODEC_NAME = "draftsmith.bf16_planes"
DEFAULT_LEVEL = 1

_HEADER = struct.Struct("<I")


def encode_planes(data: np.ndarray, *, level: int) -> np.ndarray:
    """uint8 [2N], little-endian 16-bit numbers -> uint8: length of the next part (u32), zstd(high bytes), low bytes.

    Raises ValueError if the number of bytes is odd.
    """
    if data.size % 2:
        raise ValueError(f"{CODEC_NAME} stores 16-bit numbers, got {data.size} bytes")
    values = data.view("<u2")
    high = Zstd(level=level).encode((values >> 8).astype(np.uint8)) if data.size else b""
    encoded = np.empty(_HEADER.size + len(high) + values.size, dtype=np.uint8)
    encoded[: _HEADER.size] = np.frombuffer(_HEADER.pack(len(high)), dtype=np.uint8)
    encoded[_HEADER.size : _HEADER.size + len(high)] = np.frombuffer(high, dtype=np.uint8)
    encoded[_HEADER.size + len(high) :] = values.astype(np.uint8)
    return encoded


def decode_planes(encoded: np.ndarray) -> np.ndarray:
    """The inverse of `encode_planes`: uint8 [2N]. Raises ValueError if the bytes are not of this codec."""
    if encoded.size < _HEADER.size:
        raise ValueError(f"{CODEC_NAME}: {encoded.size} bytes are too few")
    start = _HEADER.size + _HEADER.unpack(encoded[: _HEADER.size].tobytes())[0]
    frame, low = np.ascontiguousarray(encoded[_HEADER.size : start]), encoded[start:]
    try:
        high = np.frombuffer(Zstd().decode(frame) if start > _HEADER.size else b"", dtype=np.uint8)
    except RuntimeError as error:
        raise ValueError(f"{CODEC_NAME}: {error}") from None
    if high.size != low.size:
        raise ValueError(f"{CODEC_NAME}: {high.size} high bytes, {low.size} low bytes")
    values = high.astype("<u2")
    values <<= 8
    values |= low
    return values.view(np.uint8)


@dataclass(frozen=True)
class Bf16Planes(BytesBytesCodec):
    """Zarr's view of the codec. `level` is zstd's."""

    is_fixed_size = False

    level: int = DEFAULT_LEVEL

    @classmethod
    def from_dict(cls, data: dict[str, JSON]) -> Self:
        _, configuration = parse_named_configuration(data, CODEC_NAME)
        level = configuration.get("level", DEFAULT_LEVEL)
        if set(configuration) - {"level"} or not isinstance(level, int) or not 1 <= level <= 22:
            raise ValueError(f"{CODEC_NAME} takes one setting, level in 1..22, got {configuration}")
        return cls(level=level)

    def to_dict(self) -> dict[str, JSON]:
        return {"name": CODEC_NAME, "configuration": {"level": self.level}}

    def validate(self, *, shape: tuple[int, ...], dtype: Any, chunk_grid: Any) -> None:
        """Raises ValueError unless the array's numbers have 16 bits."""
        if dtype.to_native_dtype().itemsize != 2:
            raise ValueError(f"{CODEC_NAME} stores 16-bit numbers, got {dtype.to_native_dtype()}")

    async def _encode_single(self, chunk_data: Buffer, chunk_spec: ArraySpec) -> Buffer:
        encoded = await asyncio.to_thread(encode_planes, chunk_data.as_numpy_array(), level=self.level)
        return chunk_spec.prototype.buffer.from_array_like(encoded.view("B"))

    async def _decode_single(self, chunk_data: Buffer, chunk_spec: ArraySpec) -> Buffer:
        decoded = await asyncio.to_thread(decode_planes, chunk_data.as_numpy_array())
        return chunk_spec.prototype.buffer.from_array_like(decoded.view("B"))

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: ArraySpec) -> int:
        raise NotImplementedError(f"{CODEC_NAME} has no fixed size")
