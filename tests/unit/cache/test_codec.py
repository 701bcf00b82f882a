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

from draftsmith.cache.codec import Bf16Planes, decode_planes, encode_planes
from tests.unit.cache.toy import bf16_bits


@settings(max_examples=100, deadline=None)
@given(hnp.arrays(np.uint16, st.integers(0, 2000), elements=st.integers(0, 65535)), st.integers(1, 22))
def test_every_bit_pattern_comes_back(values: np.ndarray, level: int) -> None:
    encoded = encode_planes(values.view(np.uint8), level=level)
    assert np.array_equal(decode_planes(encoded).view(np.uint16), values)


def test_layout_by_hand() -> None:
    """Four bytes of length, the zstd frame of the high bytes, the low bytes as they are."""
    encoded = encode_planes(np.array([0x1234, 0x56AB], dtype="<u2").view(np.uint8), level=1).tobytes()
    length = int.from_bytes(encoded[:4], "little")
    assert bytes(Zstd().decode(encoded[4 : 4 + length])) == b"\x12\x56"
    assert encoded[4 + length :] == b"\x34\xab"


def test_ratio_on_normal_numbers() -> None:
    """Near the entropy of a bfloat16 normal variable's high byte (2.7 bits): 16 / (8 + 2.7) = 1.49 at best."""
    values = bf16_bits(np.random.default_rng(0).standard_normal(300_000))
    high = np.bincount(values >> 8, minlength=256) / values.size
    entropy = -(high[high > 0] * np.log2(high[high > 0])).sum()
    ratio = values.nbytes / encode_planes(values.view(np.uint8), level=1).size
    assert 0.95 * 16 / (8 + entropy) < ratio <= 16 / (8 + entropy) * 1.001


def test_odd_number_of_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="16-bit numbers, got 3 bytes"):
        encode_planes(np.zeros(3, np.uint8), level=1)


@pytest.mark.parametrize("cut", [0, 3, 4, 10, -1])
def test_cut_bytes_are_refused(cut: int) -> None:
    encoded = encode_planes(np.arange(64, dtype=np.uint16).view(np.uint8), level=1)
    with pytest.raises(ValueError, match="bf16_planes"):
        decode_planes(encoded[:cut])


def test_other_widths_are_refused() -> None:
    with pytest.raises(ValueError, match="16-bit numbers, got int32"):
        zarr.create_array(zarr.storage.MemoryStore(), shape=(4,), dtype="int32", compressors=[Bf16Planes()])


@pytest.mark.parametrize("configuration", [{"level": 0}, {"level": "1"}, {"level": 1, "more": 2}])
def test_unknown_settings_are_refused(configuration: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="takes one setting"):
        Bf16Planes.from_dict({"name": "draftsmith.bf16_planes", "configuration": configuration})  # type: ignore[dict-item]


def test_a_plain_zarr_reader_opens_it(tmp_path: Path) -> None:
    """Another process that imports zarr and nothing of ours finds the codec by its entry point, and needs no torch."""
    values = bf16_bits(np.random.default_rng(0).standard_normal((100, 3)))
    array = zarr.create_array(
        tmp_path / "a", shape=(100, 3), chunks=(32, 3), dtype="uint16", compressors=[Bf16Planes(level=3)]
    )
    array[:] = values
    np.save(tmp_path / "expected.npy", values)
    code = textwrap.dedent("""
        import sys, warnings
        warnings.simplefilter("error")
        import numpy, zarr
        got = zarr.open_array(sys.argv[1] + "/a", mode="r")
        assert numpy.array_equal(got[:], numpy.load(sys.argv[1] + "/expected.npy"))
        assert got.compressors[0].to_dict() == {"name": "draftsmith.bf16_planes", "configuration": {"level": 3}}
        assert "torch" not in sys.modules
    """)
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
