"""Verification by exact enumeration: the law of the emitted tokens is the target's, whatever the drafter proposes."""

from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np
import pytest
import torch

from draftsmith.decoding.accept import verify_greedy, verify_sampled

VOCAB, SIZE = 3, 2


def random_law(seed: int, *, prefix_length: int, zeros: bool) -> dict[tuple[int, ...], np.ndarray]:
    """A distribution over V tokens for every prefix of at most `prefix_length`; with `zeros`, one is impossible."""
    draw = np.random.default_rng(seed)
    law = {}
    for length in range(prefix_length + 1):
        for prefix in itertools.product(range(VOCAB), repeat=length):
            weights = draw.dirichlet(np.ones(VOCAB))
            if zeros:
                weights[draw.integers(VOCAB)] = 0.0
            law[prefix] = weights / weights.sum()
    return law


def emitted_law(
    target: dict[tuple[int, ...], np.ndarray], draft: dict[tuple[int, ...], np.ndarray], *, length: int
) -> dict[tuple[int, ...], float]:
    """Exact law of three tokens of which `verify_sampled` emits the first ones and the target writes the rest.

    Per drafted block, u_j is cut at the acceptance probability min(1, p_t / p_d) computed here; within a piece the
    verdict is constant, so that one call at its midpoint, weighted by its size, integrates over u exactly.
    """
    law: dict[tuple[int, ...], float] = defaultdict(float)
    for block in itertools.product(range(VOCAB), repeat=SIZE):
        drawn = [draft[block[:slot]] for slot in range(SIZE)]
        weight = np.prod([drawn[slot][token] for slot, token in enumerate(block)])
        if weight == 0:
            continue
        wanted = [target[block[:slot]] for slot in range(SIZE + 1)]
        bounds = [min(1.0, wanted[slot][token] / drawn[slot][token]) for slot, token in enumerate(block)]
        for signs in itertools.product((True, False), repeat=SIZE):
            pieces = [bound if sign else 1 - bound for sign, bound in zip(signs, bounds, strict=True)]
            if min(pieces) <= 0:
                continue
            middles = [bound / 2 if sign else (1 + bound) / 2 for sign, bound in zip(signs, bounds, strict=True)]
            verdict = verify_sampled(
                torch.tensor([block]),
                draft=torch.from_numpy(np.stack(drawn))[None],
                target=torch.from_numpy(np.stack(wanted))[None],
                lengths=torch.tensor([length]),
                numbers=torch.tensor([middles], dtype=torch.float64),
            )
            accepted = int(verdict.accepted)
            following = verdict.next_distribution[0].numpy()
            for token, share in enumerate(following / following.sum()):
                start = (*block[:accepted], token)
                for rest in itertools.product(range(VOCAB), repeat=3 - len(start)):
                    whole = (*start, *rest)
                    chain = [target[whole[:place]][whole[place]] for place in range(len(start), 3)]
                    law[whole] += weight * np.prod(pieces) * share * np.prod(chain)
    return law


@pytest.mark.parametrize("length", [0, 1, 2])
@pytest.mark.parametrize("zeros", [False, True], ids=["dense", "impossible-tokens"])
@pytest.mark.parametrize("seed", range(4))
def test_the_law_of_the_emitted_tokens_is_the_targets(seed: int, zeros: bool, length: int) -> None:
    target = random_law(seed, prefix_length=2, zeros=zeros)
    draft = random_law(100 + seed, prefix_length=1, zeros=zeros)
    found = emitted_law(target, draft, length=length)
    for whole in itertools.product(range(VOCAB), repeat=3):
        expected = np.prod([target[whole[:place]][whole[place]] for place in range(3)])
        assert found[whole] == pytest.approx(expected, abs=1e-12)


def test_a_token_is_accepted_below_the_ratio_and_not_at_it() -> None:
    """p_t / p_d = 0.5: u = 0.499 accepts, 0.5 does not; the correction comes from (0, 0.5, 0.25) - (.., ..) by hand."""
    draft, target = torch.tensor([[[0.5, 0.25, 0.25]]]), torch.tensor([[[0.25, 0.5, 0.25], [0.1, 0.2, 0.7]]])

    def verify(number: float) -> tuple[int, list[float]]:
        verdict = verify_sampled(
            torch.tensor([[0]]), draft=draft, target=target, lengths=torch.tensor([1]), numbers=torch.tensor([[number]])
        )
        return int(verdict.accepted), verdict.next_distribution[0].tolist()

    assert verify(0.499) == (1, pytest.approx([0.1, 0.2, 0.7]))
    assert verify(0.5) == (0, pytest.approx([0.0, 0.25, 0.0]))


def test_an_impossible_token_is_never_accepted_and_a_sure_one_always() -> None:
    draft, target = torch.tensor([[[1.0, 0.0]]] * 2), torch.tensor([[[0.0, 1.0], [0.5, 0.5]], [[1.0, 0.0], [0.5, 0.5]]])
    numbers = torch.tensor([[1e-17], [1 - 2.0**-53]], dtype=torch.float64)
    verdict = verify_sampled(
        torch.tensor([[0], [0]]), draft=draft, target=target, lengths=torch.tensor([1, 1]), numbers=numbers
    )
    assert verdict.accepted.tolist() == [0, 1]
    assert verdict.next_distribution.tolist() == [[0.0, 1.0], [0.5, 0.5]]


def test_without_residual_mass_the_target_itself_is_sampled() -> None:
    """p_t = p_d up to rounding, and still a rejection (u = 1): nothing is left of p_t - p_d."""
    law = torch.tensor([[[0.25, 0.75]]])
    verdict = verify_sampled(
        torch.tensor([[1]]), draft=law, target=law.expand(1, 2, 2), lengths=torch.tensor([1]), numbers=torch.ones(1, 1)
    )
    assert int(verdict.accepted) == 0
    assert verdict.next_distribution[0].tolist() == [0.25, 0.75]


def test_an_unverified_slot_is_neither_accepted_nor_a_rejection() -> None:
    """Length 1 of 2, both tokens would pass: one accepted, and the next comes from p_t behind it, not a residual."""
    draft = torch.full((1, 2, 2), 0.5)
    target = torch.tensor([[[0.5, 0.5], [0.6, 0.4], [0.9, 0.1]]])
    verdict = verify_sampled(
        torch.tensor([[0, 0]]), draft=draft, target=target, lengths=torch.tensor([1]), numbers=torch.full((1, 2), 0.01)
    )
    assert int(verdict.accepted) == 1
    assert verdict.next_distribution[0].tolist() == pytest.approx([0.6, 0.4])


def test_greedy_verification_by_hand() -> None:
    tokens = torch.tensor([[5, 6, 7]] * 5)
    target_ids = torch.tensor([[5, 6, 7, 8], [5, 6, 0, 8], [0, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8]])
    accepted, following = verify_greedy(tokens, target_ids=target_ids, lengths=torch.tensor([3, 3, 3, 1, 0]))
    assert accepted.tolist() == [3, 2, 0, 1, 0]
    assert following.tolist() == [8, 0, 0, 6, 5]
