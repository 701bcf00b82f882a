"""Uniform numbers by the usual tests: even, independent of each other, and of nothing but their own place."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy import stats

from draftsmith.decoding import sampling
from draftsmith.decoding.sampling import Purpose, draw, uniforms


@pytest.mark.parametrize("seeds", [range(4000), [7] * 4000], ids=["over-seeds", "over-rounds"])
def test_numbers_are_uniform(seeds: list[int]) -> None:
    rounds = [3] * 4000 if seeds == range(4000) else list(range(4000))
    for purpose, slot in itertools.product(Purpose, (0, 1, 63)):
        numbers = uniforms(seeds, rounds=rounds, slots=(slot,), purpose=purpose)[:, 0]
        assert stats.kstest(numbers, "uniform").pvalue > 1e-3


def test_numbers_of_neighbours_are_independent() -> None:
    """Pairs that one request or one batch puts side by side: a chi-square over 8 x 8 cells, and no repeated number."""
    seeds, rounds = np.repeat(np.arange(70), 60).tolist(), np.tile(np.arange(60), 70).tolist()

    def numbers(slot: int, purpose: Purpose, *, later: int = 0, seed_step: int = 0) -> np.ndarray:
        moved = [s + seed_step for s in seeds]
        return uniforms(moved, rounds=[r + later for r in rounds], slots=(slot,), purpose=purpose)[:, 0]

    first = numbers(0, Purpose.DRAFT)
    others = [
        numbers(1, Purpose.DRAFT),
        numbers(0, Purpose.ACCEPT),
        numbers(0, Purpose.TARGET),
        numbers(6, Purpose.ACCEPT),
        numbers(0, Purpose.DRAFT, later=1),
        numbers(0, Purpose.DRAFT, seed_step=1),
        numbers(0, Purpose.ACCEPT, later=1),
    ]
    for other in others:
        cells = np.histogram2d(first, other, bins=8, range=[[0, 1], [0, 1]])[0].ravel()
        assert stats.chisquare(cells).pvalue > 1e-3
    every = np.concatenate(
        [uniforms(range(50), rounds=[r] * 50, slots=range(8), purpose=p) for r in range(20) for p in Purpose], axis=None
    )
    assert len(np.unique(every)) == len(every)


def test_numbers_depend_on_nothing_else() -> None:
    alone = uniforms([5], rounds=[9], slots=(2,), purpose=Purpose.ACCEPT)[:, 0]
    among = uniforms([1, 5, 2**63], rounds=[0, 9, 4], slots=(2,), purpose=Purpose.ACCEPT)[:, 0]
    assert alone[0] == among[1]


def test_the_scatter_is_splitmix64() -> None:
    """Published first three outputs of SplitMix64 with seed 1234567."""
    golden, mask = 0x9E3779B97F4A7C15, 2**64 - 1
    states = np.array([(1234567 + golden * step) & mask for step in (1, 2, 3)], dtype=np.uint64)
    assert sampling._mix(states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def unmixed(state: int) -> int:
    """The inverse of SplitMix64's finaliser, in Python's integers."""
    mask = 2**64 - 1

    def unshift(value: int, shift: int) -> int:
        result = value
        for _ in range(64 // shift + 1):
            result = value ^ (result >> shift)
        return result

    state = unshift(state, 31) * pow(0x94D049BB133111EB, -1, 2**64) & mask
    state = unshift(state, 27) * pow(0xBF58476D1CE4E5B9, -1, 2**64) & mask
    return unshift(state, 30)


@pytest.mark.parametrize("state", [0, 2**64 - 1])
def test_the_smallest_and_the_largest_number_are_inside_zero_and_one(state: int) -> None:
    """The seed whose number comes from the extreme state: 1.0 would draw a token of probability zero."""
    golden, mask = 0x9E3779B97F4A7C15, 2**64 - 1
    counter = 0 * 256 + 0 * 4 + int(Purpose.TARGET)
    seed = (unmixed((unmixed(state) - (counter + 1) * golden) & mask) - golden) & mask
    number = uniforms([seed], rounds=[0], slots=(0,), purpose=Purpose.TARGET)[:, 0]
    assert abs(number[0] - state / 2**64) < 1e-15
    assert 0.0 < number[0] < 1.0
    assert draw(torch.tensor([[0.5, 0.5, 0.0]]), numbers=number).tolist() == [round(state / 2**64)]


def test_a_grid_of_numbers_is_each_number_alone() -> None:
    """Rows of different seeds and rounds, slots in any order, each against a call for it alone."""
    seeds, rounds, slots = [3, 0, 2**64 - 1, 3], [0, 7, 10**6, 1], (5, 0, 63, 2)
    for purpose in Purpose:
        grid = uniforms(seeds, rounds=rounds, slots=slots, purpose=purpose)
        assert grid.shape == (4, 4)
        assert grid.dtype == np.float64
        for row, column in itertools.product(range(4), range(4)):
            alone = uniforms([seeds[row]], rounds=[rounds[row]], slots=[slots[column]], purpose=purpose)
            assert grid[row, column] == alone[0, 0]


def spelled_out(seed: int, *, number: int, slot: int, purpose: int) -> float:
    """The number in Python's integers: SplitMix64 of the seed, and of that plus the counter's step."""
    mask, golden = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(state: int) -> int:
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & mask
        state = (state ^ state >> 27) * 0x94D049BB133111EB & mask
        return state ^ state >> 31

    counter = 256 * number + 4 * slot + purpose
    return ((mix(mix(seed + golden & mask) + (counter + 1) * golden & mask) >> 12) + 0.5) / 2**52


def test_numbers_in_plain_integers() -> None:
    """So that answers of a seed stay the same from version to version."""
    for seed, number, slot, purpose in itertools.product((0, 1, 41, 2**64 - 1), (0, 1, 500), (0, 6, 63), Purpose):
        found = uniforms([seed], rounds=[number], slots=(slot,), purpose=purpose)
        assert found[0, 0] == spelled_out(seed, number=number, slot=slot, purpose=int(purpose))


def test_the_numbers_of_a_request_are_uncorrelated() -> None:
    """All that one round uses (7 drafts, 7 acceptances, the target's), that round and the next: 30 series over 20,000
    seeds. Of 435 correlations of independent series the largest is beyond 4.9 / sqrt(n) once in 2,000 times."""
    series = [
        uniforms(range(20000), rounds=[number] * 20000, slots=slots, purpose=purpose)
        for number in (1, 2)
        for purpose, slots in ((Purpose.DRAFT, range(7)), (Purpose.ACCEPT, range(7)), (Purpose.TARGET, (0,)))
    ]
    correlation = np.corrcoef(np.concatenate(series, axis=1).T)
    assert correlation.shape == (30, 30)
    assert np.abs(correlation - np.eye(30)).max() < 4.9 / np.sqrt(20000)
    squares = np.corrcoef(((np.concatenate(series, axis=1) - 0.5) ** 2).T)
    assert np.abs(squares - np.eye(30)).max() < 4.9 / np.sqrt(20000)
