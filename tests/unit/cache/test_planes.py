"""The loops over bfloat16 bits: those in C are built where a compiler is, and do what those of numpy do."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.cache import planes
from tests.unit.cache.toy import bf16_bits, loops_of


def test_the_library_is_built_where_a_compiler_is() -> None:
    if shutil.which("gcc") is None and shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    assert planes.library() is not None, "`pip install -e .` builds it"


def parted(upper: np.ndarray, lower: np.ndarray, shift: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    differences, rest = np.empty(2 * upper.size, np.uint8), np.empty(2 * upper.size + 1, np.uint8)
    planes.part(upper, lower, shift=shift, differences=differences, rest=rest[1:])  # at an odd address
    return differences, rest[1:]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 40), st.integers(1, 70), st.integers(0, 99))
def test_both_kinds_part_and_join_alike(rows: int, channels: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    upper, lower = draw.integers(0, 65536, (2, rows, channels), dtype=np.uint16)
    shift = draw.integers(0, 256, channels, dtype=np.uint8)
    found = {}
    for kind in ("library", "numpy"):
        with loops_of(kind):
            found[kind] = parted(upper, lower, shift)
            back = np.empty((2, rows, channels), np.uint16)
            planes.join(found[kind][0].copy(), found[kind][1], shift=shift, upper=back[0], lower=back[1])
            assert np.array_equal(back[0], upper)
            assert np.array_equal(back[1], lower)
    for ours, theirs in zip(found["library"], found["numpy"], strict=True):
        assert np.array_equal(ours, theirs)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 300), st.sampled_from([0.0, 0.01, 0.3, 1.0]), st.integers(0, 99))
def test_both_kinds_take_the_same_outliers(size: int, share: float, seed: int) -> None:
    draw = np.random.default_rng(seed)
    given_values = draw.integers(0, planes.SPAN, size, dtype=np.uint8)
    given_values[draw.random(size) < share] = draw.integers(planes.SPAN, 256)
    places = np.flatnonzero(given_values >= planes.SPAN)
    for kind in ("library", "numpy"):
        with loops_of(kind):
            values = given_values.copy()
            found = planes.take_outliers(values, most=max(1, places.size), filler=9)
            assert found is not None
            assert np.array_equal(found[0], places)
            assert np.array_equal(found[1], given_values[places])
            assert np.array_equal(values, np.where(given_values >= planes.SPAN, 9, given_values))
            if places.size > 1:
                assert planes.take_outliers(given_values.copy(), most=places.size - 1, filler=9) is None


@pytest.mark.parametrize("kind", ["library", "numpy"])
def test_packing_and_sums(kind: str) -> None:
    draw = np.random.default_rng(0)
    differences = draw.integers(0, planes.SPAN, 2 * 37, dtype=np.uint8)
    rows = bf16_bits(draw.standard_normal((11, 5)) * 8)
    with loops_of(kind):
        packed, back = np.empty(37, np.uint8), np.empty(74, np.uint8)
        planes.pack(differences, packed=packed)
        assert packed.tolist() == [
            low + 16 * high for low, high in zip(differences[:37], differences[37:], strict=True)
        ]
        planes.unpack(packed, differences=back)
        assert np.array_equal(back, differences)
        sums = np.full(5, 1000, np.uint32)
        planes.add_exponents(rows, step=3, sums=sums)
        assert np.array_equal(sums, 1000 + ((rows[::3] >> 7) & 0xFF).sum(axis=0))


@pytest.mark.parametrize("kind", ["library", "numpy"])
@pytest.mark.parametrize("broken", [0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF])
def test_one_number_that_is_not_finite_is_seen(kind: str, broken: int) -> None:
    numbers = np.array([0x7F7F, 0xFF7F, 0x0000, 0x8000, 0x3F80] * 30, np.uint16).reshape(30, 5)
    with loops_of(kind):
        assert planes.are_finite(numbers)
        assert planes.are_finite(numbers[:, ::2])
        for place in ((0, 0), (17, 3), (29, 4)):
            changed = numbers.copy()
            changed[place] = broken
            assert not planes.are_finite(changed)
            assert planes.are_finite(np.delete(changed, place[0], axis=0))
