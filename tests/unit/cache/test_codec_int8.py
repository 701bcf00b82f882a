"""The lossy codec: its error is within the bound that its definition gives, rows of fill come back, Zarr opens it."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from numcodecs.zstd import Zstd

from draftsmith.cache.codec_int8 import ChannelScales, Int8Rows, decode_rows, encode_rows, most_bytes
from tests.unit.cache.toy import bf16_bits

LAYERS, HIDDEN = 2, 24


def floats(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def encoded(bits: np.ndarray, scales: ChannelScales) -> bytes:
    out = np.full(most_bytes(bits.size, scales=scales), 0xEE, np.uint8)
    return out[: encode_rows(bits.reshape(-1), scales=scales, out=out)].tobytes()


def there_and_back(bits: np.ndarray, scales: ChannelScales) -> tuple[int, np.ndarray]:
    """bits [R, L * D] -> encoded size, decoded bits."""
    data = encoded(bits, scales)
    out = np.empty(bits.size, np.uint16)
    decode_rows(memoryview(data), scales=scales, out=out)
    return len(data), out.reshape(bits.shape)


def states(rows: int, *, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states with loud channels and a first token that is a hundred times louder; and the channels' RMS."""
    draw = np.random.default_rng(seed)
    loud = 2.0 ** draw.integers(-6, 7, LAYERS * HIDDEN)
    values = draw.standard_normal((rows, LAYERS * HIDDEN)) * loud
    values[:1] *= 100
    return bf16_bits(values), loud.astype(np.float32)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 150), st.integers(0, 5))
def test_the_error_is_half_a_step_and_a_rounding(rows: int, seed: int) -> None:
    bits, rms = states(rows, seed=seed)
    _, back = there_and_back(bits, ChannelScales(rms, HIDDEN))
    exact, got = floats(bits), floats(back)
    largest = np.abs((exact / rms).reshape(rows, LAYERS, HIDDEN)).max(axis=-1, keepdims=True)
    step = np.broadcast_to(largest / 127 * (1 + 2**-7), (rows, LAYERS, HIDDEN)).reshape(
        rows, -1
    )  # rounded up to 8 bits
    assert (np.abs(got - exact) <= step * rms / 2 * 1.001 + np.abs(got) * 2**-8).all()


def test_a_row_by_hand() -> None:
    """Channels of size 1 and 8; row 0 has s = 127 / 127 = 1, row 2 has s = (508 / 8) / 127 = 0.5."""
    scales = ChannelScales(np.array([1.0, 8.0], np.float32), 2)
    _, back = there_and_back(bf16_bits(np.array([[127.0, 10.0], [0.0, 0.0], [-0.7, 508.0]])), scales)
    assert floats(back).tolist() == [[127.0, 8.0], [0.0, 0.0], [-0.5, 508.0]]


def test_layout_by_hand() -> None:
    """Length of the frame, s of each token and layer, zstd of the bytes. 1 / 127 = 0.00787402 lies between the
    bfloat16 0x3c01 = 0.00787354 and 0x3c02 = 0.00793457; in steps of that 1 is 126.03."""
    scales = ChannelScales(np.array([1.0, 8.0], np.float32), 1)
    data = encoded(bf16_bits(np.array([[1.0, 0.0], [-0.5, -4.0], [0.0, 8 * 127.0]])), scales)
    assert int.from_bytes(data[:4], "little") == len(data) - 16
    assert np.frombuffer(data[4:16], "<u2").tolist() == [0x3C02, 0, 0x3B82, 0x3B82, 0, 0x3F80]
    assert np.frombuffer(Zstd().decode(data[16:]), np.int8).tolist() == [126, 0, -126, -126, 0, 127]


def test_relative_error_and_size_on_normal_states() -> None:
    draw = np.random.default_rng(1)
    loud = 2.0 ** draw.integers(-6, 7, LAYERS * 256)
    bits = bf16_bits(draw.standard_normal((500, LAYERS * 256)) * loud)
    size, back = there_and_back(bits, ChannelScales(loud.astype(np.float32), 256))
    exact, got = (floats(part) / loud for part in (bits, back))
    error = np.linalg.norm(got - exact, axis=1) / np.linalg.norm(exact, axis=1)
    assert 0.004 < error.mean() < 0.01  # a step is about 3.1 / 127; its RMS error 3.1 / 127 / sqrt(12) = 0.007
    assert bits.nbytes / size > 2.1


def test_fill_comes_back_as_fill() -> None:
    bits, rms = states(9, seed=0)
    bits[6:] = 0x7FC0
    _, back = there_and_back(bits, ChannelScales(rms, HIDDEN))
    assert (back[6:] == 0x7FC0).all()
    assert np.isfinite(floats(back[:6])).all()


@pytest.mark.parametrize("broken", [0x7FC0, 0x7F80, 0xFF80])
def test_a_layer_that_is_not_finite_is_fill(broken: int) -> None:
    """One NaN or infinity: that token's layer comes back as fill, the others as they were."""
    bits, rms = states(9, seed=0)
    _, whole = there_and_back(bits, ChannelScales(rms, HIDDEN))
    bits[4, HIDDEN + 7] = broken
    _, back = there_and_back(bits, ChannelScales(rms, HIDDEN))
    assert (back[4, HIDDEN:] == 0x7FC0).all()
    back[4, HIDDEN:] = whole[4, HIDDEN:]
    assert np.array_equal(back, whole)


def test_zeros_stay_zeros() -> None:
    zeros = np.zeros((3, LAYERS * HIDDEN), np.uint16)
    _, back = there_and_back(zeros, ChannelScales(np.ones(LAYERS * HIDDEN, np.float32), HIDDEN))
    assert not back.any()


@pytest.mark.parametrize(
    ("rms", "group", "told"),
    [
        ([1.0, 0.0], 2, "finite and > 0"),
        ([1.0, np.nan], 2, "finite and > 0"),
        ([1.0, 1.0, 1.0], 2, "do not make groups of 2"),
        ([], 1, "do not make groups"),
    ],
)
def test_scales_that_cannot_be(rms: list[float], group: int, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Int8Rows.of(np.array(rms, np.float32), group=group)


@pytest.mark.parametrize("cut", [0, 3, 4, 30, -1])
def test_cut_bytes_are_refused(cut: int) -> None:
    bits, rms = states(5, seed=0)
    scales = ChannelScales(rms, HIDDEN)
    data = encoded(bits, scales)[:cut]
    with pytest.raises(ValueError, match="int8_rows"):
        decode_rows(memoryview(data), scales=scales, out=np.empty(bits.size, np.uint16))


def test_a_plain_zarr_reader_opens_it(tmp_path: Path) -> None:
    bits, rms = states(40, seed=3)
    shaped = bits.reshape(-1, LAYERS, HIDDEN)
    array = zarr.create_array(
        tmp_path / "a", shape=shaped.shape, chunks=(16, LAYERS, HIDDEN), dtype="uint16",
        compressors=[Int8Rows.of(rms, group=HIDDEN)],
    )  # fmt: skip
    array[:] = shaped
    _, expected = there_and_back(bits, ChannelScales(rms, HIDDEN))
    np.save(tmp_path / "expected.npy", expected.reshape(shaped.shape))
    code = textwrap.dedent("""
        import sys, warnings
        warnings.simplefilter("error")
        import numpy, zarr
        got = zarr.open_array(sys.argv[1] + "/a", mode="r")
        assert numpy.array_equal(got[:], numpy.load(sys.argv[1] + "/expected.npy"))
        assert "torch" not in sys.modules
    """)
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
