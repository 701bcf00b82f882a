"""The byte-plane codec: lossless, smaller on hidden states, and open to a plain Zarr reader."""

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
from hypothesis.extra import numpy as hnp
from numcodecs.zstd import Zstd

from draftsmith.cache import codec_bf16
from draftsmith.cache.codec_bf16 import Bf16Planes, decode_planes, encode_planes
from tests.unit.cache.toy import bf16_bits


def encoded(values: np.ndarray, *, channels: int) -> bytes:
    return b"".join(encode_planes(values.reshape(-1), channels=channels))


def decoded(data: bytes, *, size: int) -> np.ndarray:
    out = np.empty(size, np.uint16)
    decode_planes(memoryview(data), out=out)
    return out


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 9).flatmap(lambda channels: st.tuples(
    st.just(channels),
    hnp.arrays(np.uint16, st.integers(0, 200).map(lambda rows: rows * channels), elements=st.integers(0, 65535)),
)))  # fmt: skip
def test_every_bit_pattern_comes_back(case: tuple[int, np.ndarray]) -> None:
    channels, values = case
    assert np.array_equal(decoded(encoded(values, channels=channels), size=values.size), values)


def test_rows_beyond_the_blocks_that_are_worked_on(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).integers(0, 65536, 7 * 1000, dtype=np.uint16)
    whole = encoded(values, channels=7)
    monkeypatch.setattr(codec_bf16, "BLOCK_NUMBERS", 64)
    assert encoded(values, channels=7) == whole
    assert np.array_equal(decoded(whole, size=values.size), values)


def test_layout_by_hand() -> None:
    """Channels and length, the mean exponent of each channel, the zstd frame of exponents less the means, then
    mantissas and signs: of 1.5 (0x3fc0) and -4 (0xc080) in one channel, 2 (0x4000) and 2 in the other."""
    data = encoded(np.array([0x3FC0, 0x4000, 0xC080, 0x4000], dtype="<u2"), channels=2)
    assert int.from_bytes(data[:4], "little") == 2
    length = int.from_bytes(data[4:8], "little")
    assert list(data[8:10]) == [128, 128]  # exponents 127 and 129; 128 and 128
    assert bytes(Zstd().decode(data[10 : 10 + length])) == bytes([255, 0, 1, 0])
    # Mantissa bits 1000000 and sign 0; nothing; 0000000 and sign 1; nothing.
    assert list(data[10 + length :]) == [0b10000000, 0, 1, 0]


def test_ratio_is_that_of_each_channel_alone() -> None:
    """Channels of very different sizes: near the entropy of a normal number's exponent within its channel."""
    draw = np.random.default_rng(0)
    values = bf16_bits(draw.standard_normal((2000, 96)) * 2.0 ** draw.integers(-12, 12, 96))
    exponents = (values << 1 >> 8).astype(np.int64)

    def entropy(cells: np.ndarray) -> float:
        share = np.bincount(cells) / cells.size
        return float(-(share[share > 0] * np.log2(share[share > 0])).sum())

    alone = np.mean([entropy(exponents[:, channel]) for channel in range(96)])
    together = entropy(exponents.reshape(-1))
    ratio = values.nbytes / len(encoded(values, channels=96))
    assert ratio > 16 / (8 + together) * 1.15  # far better than any coder that does not know the channels
    assert 0.96 * 16 / (8 + alone) < ratio <= 16 / (8 + alone) * 1.01


def test_fill_does_not_spoil_the_means() -> None:
    """A chunk half of fill costs about half of a whole one."""
    values = bf16_bits(np.random.default_rng(0).standard_normal((1000, 50)))
    half = values.copy()
    half[500:] = 0x7FC0
    assert len(encoded(half, channels=50)) - half.size < 0.6 * (len(encoded(values, channels=50)) - values.size)


def test_rows_that_are_not_whole_are_refused() -> None:
    with pytest.raises(ValueError, match="rows of 2 numbers, got 3 numbers"):
        encode_planes(np.zeros(3, np.uint16), channels=2)


@pytest.mark.parametrize("cut", [0, 3, 7, 8, 20, -1])
def test_cut_bytes_are_refused(cut: int) -> None:
    data = encoded(np.arange(64, dtype=np.uint16), channels=4)
    with pytest.raises(ValueError, match="bf16_planes"):
        decoded(data[:cut], size=64)


@pytest.mark.parametrize("size", [0, 60, 63, 68])
def test_another_number_of_values_is_refused(size: int) -> None:
    data = encoded(np.arange(64, dtype=np.uint16), channels=4)
    with pytest.raises(ValueError, match="bf16_planes"):
        decoded(data, size=size)


def test_other_widths_are_refused() -> None:
    with pytest.raises(ValueError, match="16-bit numbers, got int32"):
        zarr.create_array(zarr.storage.MemoryStore(), shape=(4,), dtype="int32", compressors=[Bf16Planes(channels=1)])


@pytest.mark.parametrize("configuration", [{}, {"channels": 0}, {"channels": "1"}, {"channels": 1, "more": 2}])
def test_unknown_settings_are_refused(configuration: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="takes one setting"):
        Bf16Planes.from_dict({"name": "draftsmith.bf16_planes", "configuration": configuration})  # type: ignore[dict-item]


def test_a_plain_zarr_reader_opens_it(tmp_path: Path) -> None:
    """Another process that imports zarr and nothing of ours finds the codec by its entry point, and needs no torch."""
    values = bf16_bits(np.random.default_rng(0).standard_normal((100, 3)))
    array = zarr.create_array(
        tmp_path / "a", shape=(100, 3), chunks=(32, 3), dtype="uint16", compressors=[Bf16Planes(channels=3)]
    )
    array[:] = values
    np.save(tmp_path / "expected.npy", values)
    code = textwrap.dedent("""
        import sys, warnings
        warnings.simplefilter("error")
        import numpy, zarr
        got = zarr.open_array(sys.argv[1] + "/a", mode="r")
        assert numpy.array_equal(got[:], numpy.load(sys.argv[1] + "/expected.npy"))
        assert got.compressors[0].to_dict() == {"name": "draftsmith.bf16_planes", "configuration": {"channels": 3}}
        assert "torch" not in sys.modules
    """)
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
