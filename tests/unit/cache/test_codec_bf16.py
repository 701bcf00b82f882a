"""The byte-plane codec: lossless, smaller on hidden states, and open to a plain Zarr reader."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numcodecs.zstd import Zstd

from draftsmith.cache import planes
from draftsmith.cache.codec_bf16 import Bf16Planes, decode_planes, encode_planes, most_bytes
from tests.unit.cache.toy import bf16_bits, loops_of


@pytest.fixture(params=["library", "numpy"], autouse=True)
def loops(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything here holds for the loops in C and for those of numpy."""
    with loops_of(request.param):
        yield


def encoded(values: np.ndarray, *, channels: int) -> bytes:
    out = np.full(most_bytes(values.size, channels=channels), 0xEE, np.uint8)
    return out[: encode_planes(values.reshape(-1), channels=channels, out=out)].tobytes()


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


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 9), st.integers(1, 90), st.integers(0, 9), st.sampled_from([0.0, 0.02, 0.09]), st.integers(0, 99))
def test_numbers_of_like_size_come_back(channels: int, rows: int, fill: int, share: float, seed: int) -> None:
    """Hidden states with some arbitrary bits among them, then rows of fill."""
    draw = np.random.default_rng(seed)
    values = bf16_bits(draw.standard_normal((rows, channels)) * 2.0 ** draw.integers(-12, 12, channels))
    odd = draw.random(values.shape) < share
    values[odd] = draw.integers(0, 65536, int(odd.sum()))
    values = np.concatenate((values, np.full((fill, channels), 0x7FC0, np.uint16)))
    back = decoded(encoded(values, channels=channels), size=values.size)
    assert np.array_equal(back.reshape(values.shape), values)


@pytest.mark.parametrize("rows", [999, 1000])
def test_rows_beyond_the_blocks_that_are_worked_on(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    values = bf16_bits(np.random.default_rng(0).standard_normal((rows, 7))).reshape(-1)
    whole = encoded(values, channels=7)
    monkeypatch.setattr(planes, "BLOCK_NUMBERS", 64)
    assert encoded(values, channels=7) == whole
    assert np.array_equal(decoded(whole, size=values.size), values)


def numbers(data: bytes) -> list[int]:
    """Channels, rows, coded rows, outliers, length of the frame."""
    return np.frombuffer(data[:20], "<u4").tolist()


def test_layout_by_hand() -> None:
    """Twenty rows of 1.5 (0x3fc0) and 2 (0x4000), then twenty of -4 (0xc080) and 2: exponents 127, 128 above 129, 128,
    so both means are 128 and the differences, counted from mean - 9, are 8 above 10 and 9 above 9."""
    data = encoded(np.array([[0x3FC0, 0x4000]] * 20 + [[0xC080, 0x4000]] * 20, dtype="<u2"), channels=2)
    assert numbers(data) == [2, 40, 40, 0, len(data) - 102]
    assert list(data[20:22]) == [128, 128]
    # Mantissa of 1.5 with the sign of -4, mantissa of -4 with the sign of 1.5; then nothing.
    assert list(data[22:102]) == [0b11000000, 0, 0, 0] * 20
    # Channel by channel, upper number first: 8, 10, 9, 9 of each pair; pairs 0..9 lie in the lower four bits.
    assert bytes(Zstd().decode(data[102:])) == bytes([0x88, 0xAA, 0x99, 0x99] * 10)


def test_an_outlier_by_hand() -> None:
    """2^-37 as row 37 of sixty, the others 1: exponents 90 and 127, their mean 126, counted from 117."""
    data = encoded(bf16_bits(np.array([1.0] * 37 + [2.0**-37] + [1.0] * 22)), channels=1)
    assert numbers(data) == [1, 60, 60, 1, len(data) - 86]
    assert data[20] == 126
    assert not any(data[21:81])
    # Row 37 is the lower number of pair 7: byte 15. Its difference is 90 - 117, and 9 stands in its place.
    assert (int.from_bytes(data[81:85], "little"), data[85]) == (15, 256 + 90 - 117)
    assert bytes(Zstd().decode(data[86:])) == bytes([0xAA] * 15 + [0xA9] + [0xAA] * 14)


def test_a_row_without_another_makes_no_outliers() -> None:
    data = encoded(bf16_bits(np.ones(61)), channels=1)
    assert numbers(data)[:4] == [1, 61, 61, 0]
    assert np.array_equal(decoded(data, size=61), bf16_bits(np.ones(61)))


def test_numbers_of_all_sizes_are_stored_as_they_are() -> None:
    values = np.random.default_rng(0).integers(0, 65536, 600, dtype=np.uint16)
    data = encoded(values, channels=6)
    assert numbers(data) == [6, 100, 100, 0, 0]
    assert data[20:] == values.astype("<u2").tobytes()


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


@pytest.mark.parametrize("used", [0, 1, 500])
def test_fill_at_the_end_takes_no_room(used: int) -> None:
    values = bf16_bits(np.random.default_rng(0).standard_normal((1000, 50)))
    values[used:] = 0x7FC0
    whole, alone = encoded(values, channels=50), encoded(values[:used], channels=50)
    assert numbers(whole)[1:3] == [1000, used]
    assert whole[8:] == alone[8:]
    assert np.array_equal(decoded(whole, size=values.size), values.reshape(-1))


def test_fill_is_a_whole_row() -> None:
    """NaN in one channel of the last rows, wherever it stands, makes no row of fill."""
    for channel in (0, 2):
        values = np.full((4, 3), 0x3F80, np.uint16)
        values[2:, channel] = 0x7FC0
        assert np.array_equal(decoded(encoded(values, channels=3), size=12), values.reshape(-1))


def test_rows_that_are_not_whole_are_refused() -> None:
    with pytest.raises(ValueError, match="rows of 2 numbers, got 3 numbers"):
        encoded(np.zeros(3, np.uint16), channels=2)


@pytest.mark.parametrize("cut", [0, 3, 19, 20, 40, -1])
@pytest.mark.parametrize("like", [True, False])
def test_cut_bytes_are_refused(cut: int, like: bool) -> None:
    draw = np.random.default_rng(0)
    values = bf16_bits(draw.standard_normal(64)) if like else draw.integers(0, 65536, 64, dtype=np.uint16)
    data = encoded(values, channels=4)
    with pytest.raises(ValueError, match="bf16_planes"):
        decoded(data[:cut], size=64)


@pytest.mark.parametrize("size", [0, 60, 63, 68])
def test_another_number_of_values_is_refused(size: int) -> None:
    data = encoded(bf16_bits(np.random.default_rng(0).standard_normal(64)), channels=4)
    with pytest.raises(ValueError, match=f"16 rows of 4 numbers, {size} numbers expected"):
        decoded(data, size=size)


def test_outliers_beyond_the_end_are_refused() -> None:
    data = bytearray(encoded(bf16_bits(np.array([1.0] * 37 + [2.0**-37] + [1.0] * 22)), channels=1))
    data[81] = 60
    with pytest.raises(ValueError, match="outliers beyond the 60 numbers"):
        decoded(bytes(data), size=60)


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
