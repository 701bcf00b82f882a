"""The sequential and the confidence head against Equations 5 and 7 written out with loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from draftsmith.nn.confidence import START_RATE, ConfidenceHead
from draftsmith.nn.sequential import MarkovHead
from tests.tiny_models import randomize

VOCAB, RANK = 11, 3


def test_markov_bias_is_a_low_rank_table_of_token_pairs() -> None:
    head = MarkovHead(VOCAB, rank=RANK)
    randomize(head, seed=0, std=1.0)
    first, second = (weight.detach().double().numpy() for weight in (head.markov_w1.weight, head.markov_w2.weight))
    previous = torch.tensor([4, 0, 10])
    got = head.bias(head.feature(previous)).detach().numpy()
    for row, token in enumerate(previous.tolist()):
        for following in range(VOCAB):
            expected = sum(first[token, rank] * second[following, rank] for rank in range(RANK))
            assert got[row, following] == pytest.approx(expected, abs=1e-5)


def test_markov_head_starts_as_no_bias_and_the_same_for_a_seed() -> None:
    heads = []
    for seed in (1, 1, 2):
        head = MarkovHead(400, rank=16)
        head.reset(torch.Generator().manual_seed(seed))
        assert head.bias(head.feature(torch.arange(400))).abs().max() == 0
        heads.append(head.markov_w1.weight.detach().clone())
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    assert float(heads[0].std()) == pytest.approx(1.0, rel=0.05)


def test_confidence_is_a_float32_logit_of_a_linear_form() -> None:
    head = ConfidenceHead(5)
    randomize(head, seed=1, std=1.0)
    features = np.random.default_rng(0).standard_normal((2, 3, 5))
    weight, bias = head.proj.weight.detach().double().numpy()[0], float(head.proj.bias.detach())
    got = head(torch.from_numpy(features).float())
    np.testing.assert_allclose(got.detach().numpy(), features @ weight + bias, atol=1e-5)
    assert head.bfloat16()(torch.zeros(4, 5, dtype=torch.bfloat16)).dtype == torch.float32


def test_confidence_starts_at_the_rate_of_a_young_drafter_whatever_it_reads() -> None:
    head = ConfidenceHead(5)
    head.reset()
    assert head(torch.randn(7, 5)).sigmoid().tolist() == pytest.approx([START_RATE] * 7)
