"""Uniform numbers by the usual tests, transforms against Hugging Face's, inverse-CDF draws against numpy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy import stats
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from draftsmith.decoding import sampling
from draftsmith.decoding.sampling import Purpose, SamplingGroups, draw, is_greedy, probabilities, uniforms
from draftsmith.params import Sampling

VOCAB = 40


def random_logits(rows: int, *, seed: int, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


# Uniform numbers


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


# Transforms


def warped(logits: torch.Tensor, choice: Sampling) -> torch.Tensor:
    """Hugging Face's warpers in their own order: temperature, top-k, top-p."""
    nothing = torch.zeros(len(logits), 1, dtype=torch.int64)
    logits = TemperatureLogitsWarper(choice.temperature)(nothing, logits)
    if choice.top_k:
        logits = TopKLogitsWarper(choice.top_k)(nothing, logits)
    if choice.top_p < 1:
        logits = TopPLogitsWarper(choice.top_p)(nothing, logits)
    return logits.double().softmax(-1)


CHOICES = [
    Sampling(),
    Sampling(temperature=0.7),
    Sampling(temperature=1.5, top_k=5),
    Sampling(top_k=VOCAB),
    Sampling(top_k=VOCAB + 10),
    Sampling(top_k=1),
    Sampling(top_p=0.8),
    Sampling(top_p=1e-6),
    Sampling(temperature=0.6, top_p=0.95, top_k=20),
]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_transforms_are_hugging_faces(choice: Sampling) -> None:
    logits = random_logits(50, seed=1)
    got = probabilities(logits, groups=SamplingGroups.make([choice] * 50))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), warped(logits, choice), rtol=1e-5, atol=1e-7)


def test_a_nucleus_beyond_the_first_candidates_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(30, seed=2)
    monkeypatch.setattr(sampling, "NUCLEUS_CANDIDATES", 4)
    for top_p in (0.3, 0.9, 0.999):
        choice = Sampling(top_p=top_p)
        got = probabilities(logits, groups=SamplingGroups.make([choice] * 30)).double()
        torch.testing.assert_close(got, warped(logits, choice), rtol=1e-5, atol=1e-7)


def test_a_nucleus_by_hand() -> None:
    """0.5, 0.3, 0.15, 0.05: mass 0.8 is reached by two tokens, 0.81 needs the third."""
    logits = torch.tensor([[0.05, 0.5, 0.15, 0.3]]).log()
    for top_p, expected in (
        (0.79, [0, 0.625, 0, 0.375]),
        (0.81, [0, 0.526316, 0.157895, 0.315789]),
        (0.4, [0, 1, 0, 0]),
    ):
        got = probabilities(logits, groups=SamplingGroups.make([Sampling(top_p=top_p)]))
        np.testing.assert_allclose(got[0].numpy(), expected, atol=1e-5)


def test_rows_keep_their_own_sampling() -> None:
    logits = random_logits(6, seed=3)
    choices = [CHOICES[8], Sampling(temperature=0.0), CHOICES[1], CHOICES[8], Sampling(temperature=9e-6), CHOICES[6]]
    got = probabilities(logits, groups=SamplingGroups.make(choices))
    for row, choice in enumerate(choices):
        if is_greedy(choice):
            expected = torch.nn.functional.one_hot(logits[row].argmax(), VOCAB).double()
        else:
            expected = warped(logits[row : row + 1], choice)[0]
        torch.testing.assert_close(got[row].double(), expected, rtol=1e-5, atol=1e-7)


def test_greedy_begins_below_a_hundred_thousandth() -> None:
    assert is_greedy(Sampling(temperature=0.0))
    assert is_greedy(Sampling(temperature=9.9e-6))
    assert not is_greedy(Sampling(temperature=1e-5))


# Draws


def test_draws_are_numpys_inverse_cdf() -> None:
    """Also of rows that are not normalised, and of rows with impossible tokens at both ends."""
    generator = np.random.default_rng(4)
    rows = generator.random((500, 17)) * generator.integers(0, 2, (500, 17)) * generator.uniform(0.01, 9, (500, 1))
    rows[:, 5] += 1e-3
    rows = rows.astype(np.float32)
    numbers = generator.random(500)
    got = draw(torch.from_numpy(rows), numbers=numbers).tolist()
    for row, number, token in zip(rows.astype(np.float64), numbers, got, strict=True):
        edges = np.concatenate(([0.0], np.cumsum(row)))
        assert edges[token] <= number * edges[-1] < edges[token + 1]
        assert row[token] > 0


def test_draws_have_the_frequencies_of_the_distribution() -> None:
    law = torch.tensor([0.1, 0.0, 0.2, 0.65, 0.05])
    numbers = uniforms(range(20000), rounds=[0] * 20000, slots=(0,), purpose=Purpose.TARGET)[:, 0]
    counts = np.bincount(draw(law.expand(20000, -1), numbers=numbers).numpy(), minlength=5)
    assert counts[1] == 0
    assert stats.chisquare(counts[[0, 2, 3, 4]], np.array([0.1, 0.2, 0.65, 0.05]) * 20000).pvalue > 1e-3
