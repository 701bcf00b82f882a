"""Anchors, slots and weights on examples worked out by hand, and against counting one by one."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from draftsmith.nn.block import candidate_anchors, draw_anchors, num_valid_slots, position_weights

MASKS = arrays(np.uint8, st.integers(2, 40), elements=st.integers(0, 1))


def mask_of(text: str) -> np.ndarray:
    return np.array([int(letter) for letter in text], dtype=np.uint8)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0001111", [3, 4, 5]),  # the last token is supervised but has no next one
        ("0110111", [1, 4, 5]),  # the end of a run is no anchor
        ("0101010", []),
        ("11", [0]),
        ("1", []),
        ("0000", []),
    ],
)
def test_anchors_have_a_supervised_token_before_a_supervised_one(text: str, expected: list[int]) -> None:
    assert candidate_anchors(mask_of(text)).tolist() == expected


@pytest.mark.parametrize(
    ("text", "anchor", "expected"),
    [
        ("00111111111", 2, 4),  # a whole block of four
        ("00111111111", 5, 4),
        ("00111111111", 7, 3),  # the end of the sequence: labels 8, 9, 10
        ("00111111111", 9, 1),
        ("0011110011", 2, 3),  # the run ends: labels 3, 4, 5
        ("0011110011", 4, 1),
        ("0011110011", 8, 1),  # the second run does not lend its labels to the first
        ("111", 0, 2),  # a sequence shorter than a block
    ],
)
def test_slots_count_while_labels_form_one_supervised_run(text: str, anchor: int, expected: int) -> None:
    assert num_valid_slots(mask_of(text), np.array([anchor]), block_size=4).tolist() == [expected]


@given(MASKS, st.integers(2, 9))
def test_slots_counted_one_by_one(supervised: np.ndarray, block_size: int) -> None:
    anchors = candidate_anchors(supervised)
    expected = []
    for anchor in anchors.tolist():
        count = 0
        while count < block_size and anchor + count + 1 < len(supervised) and supervised[anchor + count + 1]:
            count += 1
        expected.append(count)
    assert num_valid_slots(supervised, anchors, block_size=block_size).tolist() == expected
    assert all(count >= 1 for count in expected)


def test_a_draw_depends_on_seed_epoch_and_sample_alone() -> None:
    supervised = np.ones(200, dtype=np.uint8)

    def drawn(seed: int = 1, epoch: int = 0, name: str = "a/t0", num: int = 12) -> list[int]:
        return draw_anchors(supervised, num=num, seed=seed, epoch=epoch, sample_id=name).tolist()

    first = drawn()
    np.random.seed(0)
    torch.manual_seed(0)
    assert drawn() == first
    others = [drawn(seed=2), drawn(epoch=1), drawn(epoch=-1), drawn(name="a/t1")]
    assert all(other != first for other in others)
    assert all(sorted(set(picked)) == picked and len(picked) == 12 for picked in (first, *others))


def test_few_candidates_are_all_taken() -> None:
    supervised = mask_of("0011110")
    for num in (3, 4, 100):
        assert draw_anchors(supervised, num=num, seed=3, epoch=1, sample_id="x").tolist() == [2, 3, 4]


def test_draws_are_uniform_over_the_candidates() -> None:
    """Each of 19 candidates lies in a draw of 5 with probability 5/19: six standard deviations of 4000 draws."""
    supervised = np.ones(20, dtype=np.uint8)
    counts = np.zeros(20)
    for number in range(4000):
        counts[draw_anchors(supervised, num=5, seed=0, epoch=0, sample_id=f"s{number}")] += 1
    share = 5 / 19
    assert counts[19] == 0
    assert np.abs(counts[:19] / 4000 - share).max() < 6 * math.sqrt(share * (1 - share) / 4000)


def test_weights_fall_by_a_factor_e_every_gamma_slots() -> None:
    weights = position_weights(9, gamma_w=4.0)
    assert weights.dtype == np.float32
    np.testing.assert_allclose(weights[[0, 4, 8]], [1.0, 0.36787944, 0.13533528], rtol=1e-6)
    np.testing.assert_allclose(weights[1], 0.77880078, rtol=1e-6)
