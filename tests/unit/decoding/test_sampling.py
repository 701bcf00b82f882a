"""Transforms against Hugging Face's, rows by how they are sampled, inverse-CDF draws against numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftsmith.decoding import sampling
from draftsmith.decoding.sampling import Purpose, SamplingGroups, draw, is_greedy, probabilities, uniforms
from draftsmith.params import Sampling

VOCAB = 40


def random_logits(rows: int, *, seed: int, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


# Transforms


def warped(logits: torch.Tensor, choice: Sampling) -> torch.Tensor:
    """Hugging Face's warpers in their own order: temperature, top-k, top-p, min-p."""
    nothing = torch.zeros(len(logits), 1, dtype=torch.int64)
    logits = TemperatureLogitsWarper(choice.temperature)(nothing, logits)
    if choice.top_k:
        logits = TopKLogitsWarper(choice.top_k)(nothing, logits)
    if choice.top_p < 1:
        logits = TopPLogitsWarper(choice.top_p)(nothing, logits)
    if choice.min_p > 0:
        logits = MinPLogitsWarper(choice.min_p)(nothing, logits)
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
    Sampling(min_p=0.1),
    Sampling(min_p=1.0),
    Sampling(min_p=1e-9),
    Sampling(temperature=2.0, min_p=0.2),
    Sampling(top_p=0.5, min_p=0.02),
    Sampling(top_k=30, min_p=0.02),
    Sampling(temperature=1.5, top_k=12, top_p=0.9, min_p=0.15),
]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_transforms_are_hugging_faces(choice: Sampling) -> None:
    logits = random_logits(50, seed=1)
    got = probabilities(logits, groups=SamplingGroups.make([choice] * 50))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), warped(logits, choice), rtol=1e-5, atol=1e-7)


def test_the_order_is_that_of_hugging_faces_generate() -> None:
    config = LlamaConfig(vocab_size=8, hidden_size=4, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1)
    asked = GenerationConfig(do_sample=True, temperature=0.7, top_k=3, top_p=0.9, min_p=0.1, eos_token_id=1)
    found = LlamaForCausalLM(config)._get_logits_processor(asked, device="cpu")
    warpers = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
    assert [type(one) for one in found if isinstance(one, warpers)] == list(warpers)


def test_filters_in_their_order_by_hand() -> None:
    """0.4, 0.3, 0.2, 0.1. Of the three likeliest (4/9, 3/9, 2/9) two reach a mass of 0.75, of all four it takes three;
    the second of those two is 3/4 as likely as the first."""
    logits = torch.tensor([[0.4, 0.1, 0.3, 0.2]]).log()
    for changes, expected in (
        ({"top_p": 0.75}, [4 / 9, 0, 3 / 9, 2 / 9]),
        ({"top_k": 3, "top_p": 0.75}, [4 / 7, 0, 3 / 7, 0]),
        ({"top_k": 3, "top_p": 0.75, "min_p": 0.5}, [4 / 7, 0, 3 / 7, 0]),
        ({"top_k": 3, "top_p": 0.75, "min_p": 0.8}, [1, 0, 0, 0]),
        ({"min_p": 0.4}, [4 / 9, 0, 3 / 9, 2 / 9]),
        ({"top_p": 0.95, "min_p": 0.2}, [0.4, 0.1, 0.3, 0.2]),
    ):
        got = probabilities(logits, groups=SamplingGroups.make([Sampling(**changes)]))
        np.testing.assert_allclose(got[0].numpy(), expected, atol=1e-6)


def test_extreme_logits_stay_probabilities() -> None:
    """Impossible tokens, logits of thousands, and rows where many are equal."""
    row = [1e4, -1e4, 0.0, -math.inf, 9999.0, 1e4]
    logits = torch.tensor([row, row[::-1], [-math.inf] * 5 + [-1e4], [7.0] * 6])
    for choice in (*CHOICES, Sampling(temperature=1e-5), Sampling(temperature=1e3, top_p=0.5)):
        got = probabilities(logits, groups=SamplingGroups.make([choice] * 4))
        assert bool(torch.isfinite(got).all())
        torch.testing.assert_close(got.sum(dim=1), torch.ones(4))
        assert got[0, 3] == got[1, 2] == 0
        assert got[2].tolist() == [0, 0, 0, 0, 0, 1]


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


# Rows by how they are sampled


def test_groups_by_hand() -> None:
    hot, cold = Sampling(temperature=2.0), Sampling(temperature=0.0)
    groups = SamplingGroups.make([hot, cold, hot, Sampling(temperature=2.0), cold])
    assert groups == SamplingGroups(5, (hot, cold), ((0, 2, 3), (1, 4)))
    assert not groups.all_greedy
    assert groups.chosen([1, 4]) == SamplingGroups(2, (cold,), ((0, 1),))
    assert groups.chosen([1, 4]).all_greedy
    assert groups.chosen([4, 2, 0]) == SamplingGroups(3, (cold, hot), ((0,), (1, 2)))
    assert groups.chosen([]) == SamplingGroups(0, (), ())
    assert SamplingGroups.make([]).all_greedy


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


def test_a_number_at_an_edge_draws_the_token_behind_it() -> None:
    law = torch.tensor([[0.25, 0.25, 0.0, 0.5]])
    numbers = [0.125, 0.25, 0.49, 0.5, 0.99]
    assert [int(draw(law, numbers=np.array([number]))) for number in numbers] == [0, 1, 1, 3, 3]


def test_the_largest_number_draws_no_impossible_token() -> None:
    """Whatever the row sums to: rows that are not normalised, whose last tokens are impossible."""
    generator = np.random.default_rng(6)
    rows = (generator.random((2000, 6)) * 10.0 ** generator.uniform(-8, 2, (2000, 1))).astype(np.float32)
    rows[:, 4:] = 0
    for number, token in ((1 - 2.0**-53, 3), (2.0**-53, 0)):
        assert set(draw(torch.from_numpy(rows), numbers=np.full(2000, number)).tolist()) == {token}


def test_draws_have_the_frequencies_of_the_distribution() -> None:
    law = torch.tensor([0.1, 0.0, 0.2, 0.65, 0.05])
    numbers = uniforms(range(20000), rounds=[0] * 20000, slots=(0,), purpose=Purpose.TARGET)[:, 0]
    counts = np.bincount(draw(law.expand(20000, -1), numbers=numbers).numpy(), minlength=5)
    assert counts[1] == 0
    assert stats.chisquare(counts[[0, 2, 3, 4]], np.array([0.1, 0.2, 0.65, 0.05]) * 20000).pvalue > 1e-3
