"""Relative errors by layer, against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from draftsmith.cache.fidelity import bf16_values, measure_states


def bits(values: list[list[list[float]]]) -> np.ndarray:
    return (np.array(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


# T = 2 tokens, L = 2 layers, D = 2; norms 5 and 10 in layer 0, 2 and 0 in layer 1.
STATES = bits([[[3.0, 4.0], [2.0, 0.0]], [[6.0, 8.0], [0.0, 0.0]]])


def test_bits_are_the_numbers_they_stand_for() -> None:
    assert bf16_values(np.array([0x3F80, 0xC000, 0x0000], np.uint16)).tolist() == [1.0, -2.0, 0.0]


def test_equal_states_have_no_error() -> None:
    found = measure_states(STATES, STATES.copy(), first_rows=np.array([0]), stored_bytes=8)
    assert found.identical
    assert found.ratio == 2.0  # 8 numbers of 2 bytes in 8 bytes
    assert found.relative_error == (0.0, 0.0)


def test_errors_by_layer_by_hand() -> None:
    decoded = bits([[[3.0, 4.5], [2.0, 1.0]], [[6.0, 8.0], [0.5, 0.0]]])
    found = measure_states(STATES, decoded, first_rows=np.array([1]), stored_bytes=16)
    assert not found.identical
    # Layer 0: 0.5 / 5 and 0; layer 1: 1 / 2, and 0.5 over a norm of 0, which counts as 1.
    assert found.relative_error == pytest.approx((0.05, 0.5))
    assert found.relative_error_first == pytest.approx((0.0, 0.5))
    assert found.largest == pytest.approx((0.1, 0.5))
