"""The lossy codec of the cache: bfloat16 numbers as bytes, each token of each layer with a scale of its own.

Channels of hidden states differ by orders of magnitude, so a number is first divided by the root mean square of its
channel (fitted beforehand, without the first tokens of samples, whose norms are tens of times larger):
y = x / rms; s = max |y| / 127 over the D channels of a token and layer, kept as a bfloat16 that is rounded up;
q = round(y / s) in -127..127, entropy coded. Decoded x' = round_to_bfloat16(q s rms), so
|x' - x| <= s rms / 2 and the rounding to bfloat16.

Registered with Zarr under `draftsmith.int8_rows`. Letters: R rows, L layers of a row, D channels of a layer.
"""

from __future__ import annotations

import asyncio
import base64
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

from draftsmith.cache.scratch import Scratch

CODEC_NAME = "draftsmith.int8_rows"
MOST = 127
NO_SCALE = 0x7FC0  # the scale of a row of fill: bfloat16's NaN, which such a row decodes to
BLOCK_ROWS = 64
ZSTD_LEVEL = 1

_HEADER = struct.Struct("<I")
_SCRATCH = Scratch()


@dataclass(frozen=True)
class ChannelScales:
    """The root mean squares of the channels, float32 [L * D], and D: how many of them share a token's scale."""

    rms: NDArray[np.float32]
    group: int

    def __post_init__(self) -> None:
        if self.rms.ndim != 1 or not self.rms.size or self.group < 1 or self.rms.size % self.group:
            raise ValueError(f"{CODEC_NAME}: {self.rms.shape} scales do not make groups of {self.group}")
        if not np.isfinite(self.rms).all() or (self.rms <= 0).any():
            raise ValueError(f"{CODEC_NAME}: scales must be finite and > 0")


def most_bytes(num_numbers: int, *, scales: ChannelScales) -> int:
    """The most bytes that `encode_rows` writes."""
    frame = num_numbers + num_numbers // 256 + 1024  # zstd's own bound is a little lower
    return _HEADER.size + 2 * (num_numbers // scales.group) + frame


def encode_rows(values: NDArray[np.uint16], *, scales: ChannelScales, out: NDArray[np.uint8]) -> int:
    """bfloat16 bits uint16 [R * L * D] -> bytes in `out`, which has room for `most_bytes`; how many.

    They are: header (length of the third part), token scales as bfloat16 bits [R, L], zstd of the bytes [R, L, D].

    The D numbers of a layer are fill, NaN, if any of them is not finite. Raises ValueError if the values are not whole
    rows.
    """
    layers = scales.rms.size // scales.group
    if values.size % scales.rms.size:
        raise ValueError(f"{CODEC_NAME} stores rows of {scales.rms.size} numbers, got {values.size} numbers")
    bits = values.reshape(-1, layers, scales.group)
    inverse = (1 / scales.rms.astype(np.float64)).astype(np.float32).reshape(layers, scales.group)
    steps = np.empty(bits.shape[:2], dtype=np.uint16)
    quantized = _SCRATCH.take("quantized", values.size).view(np.int8).reshape(bits.shape)
    for start in range(0, len(bits), BLOCK_ROWS):
        part = slice(start, start + BLOCK_ROWS)
        y = bf16_to_float(bits[part])
        y *= inverse
        largest = np.abs(np.maximum(y.max(axis=-1), -y.min(axis=-1)))  # not -0
        is_fill = ~np.isfinite(largest)
        if is_fill.any():
            y[is_fill] = 0
            largest[is_fill] = 0
        step = _round_up(largest / MOST)
        steps[part] = np.where(is_fill, NO_SCALE, step)
        size = bf16_to_float(step)
        y *= np.where(size > 0, 1 / np.where(size > 0, size, 1), 0).astype(np.float32)[..., None]
        np.rint(y, out=y)
        np.clip(y, -MOST, MOST, out=y)
        np.copyto(quantized[part], y, casting="unsafe")
    frame = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(quantized.data) if values.size else b""
    end = 0
    for data in (_HEADER.pack(len(frame)), steps.astype("<u2").tobytes(), frame):
        out[end : end + len(data)] = np.frombuffer(data, dtype=np.uint8)
        end += len(data)
    return end


def decode_rows(data: memoryview, *, scales: ChannelScales, out: NDArray[np.uint16]) -> None:
    """The inverse of `encode_rows` up to its error, into `out` uint16 [R * L * D]. Raises ValueError if the bytes are
    not of this codec."""
    layers = scales.rms.size // scales.group
    if out.size % scales.rms.size or len(data) < _HEADER.size:
        raise ValueError(f"{CODEC_NAME}: {len(data)} bytes do not hold {out.size} numbers")
    (length,) = _HEADER.unpack(data[: _HEADER.size])
    num_rows = out.size // scales.rms.size
    start = _HEADER.size + 2 * num_rows * layers
    if len(data) != start + length:
        raise ValueError(f"{CODEC_NAME}: {len(data)} bytes, {start + length} expected")
    if not out.size:
        return
    try:
        frame = zstandard.ZstdDecompressor().decompress(data[start:], max_output_size=out.size)
    except zstandard.ZstdError as error:
        raise ValueError(f"{CODEC_NAME}: {error}") from None
    if len(frame) != out.size:
        raise ValueError(f"{CODEC_NAME}: {len(frame)} values, {out.size} expected")
    quantized = np.frombuffer(frame, dtype=np.int8).reshape(num_rows, layers, scales.group)
    steps = np.frombuffer(data[_HEADER.size : start], dtype="<u2").reshape(num_rows, layers)
    rms = scales.rms.reshape(layers, scales.group)
    target = out.reshape(quantized.shape)
    for first in range(0, num_rows, BLOCK_ROWS):
        part = slice(first, first + BLOCK_ROWS)
        x = quantized[part].astype(np.float32)
        x *= bf16_to_float(steps[part])[..., None]
        x *= rms
        wide = x.view(np.uint32)
        wide += 0x7FFF + ((wide >> 16) & 1)
        np.right_shift(wide, 16, out=wide)
        np.copyto(target[part], wide, casting="unsafe")
        target[part][steps[part] == NO_SCALE] = NO_SCALE


def bf16_to_float(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """bfloat16 bits -> float32, in memory of its own."""
    wide = bits.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def _round_up(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Numbers >= 0 -> the bits of the smallest bfloat16 that is not below."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0xFFFF) >> 16).astype(np.uint16)


@dataclass(frozen=True)
class Int8Rows(BytesBytesCodec):
    """Zarr's view of the codec. `scales`: base64 of little-endian float32 [L * D]; `group`: D."""

    is_fixed_size = False

    scales: str
    group: int

    @classmethod
    def of(cls, rms: NDArray[np.float32], *, group: int) -> Self:
        """From the channels' root mean squares. Raises ValueError as `ChannelScales`."""
        ChannelScales(rms, group)
        return cls(scales=base64.b64encode(rms.astype("<f4").tobytes()).decode(), group=group)

    @classmethod
    def from_dict(cls, data: dict[str, JSON]) -> Self:
        _, configuration = parse_named_configuration(data, CODEC_NAME)
        scales, group = configuration.get("scales"), configuration.get("group")
        if set(configuration) != {"scales", "group"} or not isinstance(scales, str) or not isinstance(group, int):
            raise ValueError(f"{CODEC_NAME} takes scales and group, got {sorted(configuration)}")
        codec = cls(scales=scales, group=group)
        codec.channel_scales()
        return codec

    def to_dict(self) -> dict[str, JSON]:
        return {"name": CODEC_NAME, "configuration": {"scales": self.scales, "group": self.group}}

    def channel_scales(self) -> ChannelScales:
        """The scales as numbers. Raises ValueError if they are none."""
        data = base64.b64decode(self.scales, validate=True)
        return ChannelScales(np.frombuffer(data, dtype="<f4").astype(np.float32), self.group)

    def validate(self, *, shape: tuple[int, ...], dtype: Any, chunk_grid: Any) -> None:
        """Raises ValueError unless the array's numbers have 16 bits."""
        if dtype.to_native_dtype().itemsize != 2:
            raise ValueError(f"{CODEC_NAME} stores 16-bit numbers, got {dtype.to_native_dtype()}")

    async def _encode_single(self, chunk_data: Buffer, chunk_spec: ArraySpec) -> Buffer:
        values = chunk_data.as_numpy_array().view("<u2")
        scales = self.channel_scales()
        out = np.empty(most_bytes(values.size, scales=scales), dtype=np.uint8)
        num_bytes = await asyncio.to_thread(encode_rows, values, scales=scales, out=out)
        return chunk_spec.prototype.buffer.from_bytes(out[:num_bytes].tobytes())

    async def _decode_single(self, chunk_data: Buffer, chunk_spec: ArraySpec) -> Buffer:
        out = np.empty(int(np.prod(chunk_spec.shape)), dtype="<u2")
        data = memoryview(chunk_data.to_bytes())
        await asyncio.to_thread(decode_rows, data, scales=self.channel_scales(), out=out)
        return chunk_spec.prototype.buffer.from_array_like(out.view("B"))

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: ArraySpec) -> int:
        raise NotImplementedError(f"{CODEC_NAME} has no fixed size")
