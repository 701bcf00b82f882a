"""The confidence head's last fit against a solution by SciPy, and what it must leave alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import expit
from torch import Tensor

from draftsmith.drafters.dspark import DSpark
from draftsmith.nn.block import BlockBatch
from draftsmith.training.batches import make_block_batch
from draftsmith.training.confidence_fit import DEVIATION_FLOOR, MEASURE, PENALTY, ConfidenceFit, fit_confidence
from tests.tiny_models import batch_shape, make_sample, random_ids, reference, tiny_drafter, tiny_folders

__all__ = ["tiny_folders"]

NUM_SAMPLES, LENGTH = 6, 24


class Ranks:
    """An engine of so many ranks that all bring the same."""

    def __init__(self, num_ranks: int = 1) -> None:
        self.num_ranks = num_ranks

    def sum(self, values: Tensor) -> Tensor:
        return values * self.num_ranks


@pytest.fixture(scope="module")
def batches(tiny_folders: dict[str, Path]) -> list[BlockBatch]:
    model = reference(tiny_folders["llama"])
    samples = [
        make_sample(model, random_ids(LENGTH, seed=seed), supervised=[1] * LENGTH, name=f"s{seed}/t0")
        for seed in range(NUM_SAMPLES)
    ]
    return [make_block_batch([(sample, 0)], shape=batch_shape(), seed=1) for sample in samples]


def new_drafter(folder: Path) -> DSpark:
    drafter = tiny_drafter("dspark", folder, seed=5)
    assert isinstance(drafter, DSpark)
    return drafter.train()


def fit(drafter: DSpark, batches: list[BlockBatch], *, num_ranks: int = 1) -> ConfidenceFit:
    engine: Any = Ranks(num_ranks)
    return fit_confidence(drafter, batches=batches, engine=engine)


def said_and_reached(drafter: DSpark, batches: list[BlockBatch]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Confidence, acceptance and weight [n] of all slots."""
    with torch.no_grad():
        losses = [drafter.losses(batch, weights=MEASURE) for batch in batches]
    said = [item.confidence for item in losses if item.confidence is not None]
    reached, weights = [item.acceptance for item in losses], [batch.weights for batch in batches]
    return joined(said), joined(reached), joined(weights)


def joined(parts: list[Tensor]) -> np.ndarray:
    return torch.cat(parts).double().numpy()


def features(drafter: DSpark, batches: list[BlockBatch]) -> np.ndarray:
    """[n, F]: the slot's state after the final norm and W1 of the token before it."""
    found = []
    with torch.no_grad():
        for batch in batches:
            states = drafter.slot_states(batch).flatten(0, 1)[batch.slot_index]
            found.append(torch.cat((states, drafter.markov_head.feature(batch.previous)), dim=-1))
    return torch.cat(found).double().numpy()


def test_the_head_is_the_penalised_optimum(tiny_folders: dict[str, Path], batches: list[BlockBatch]) -> None:
    drafter = new_drafter(tiny_folders["llama"])
    said, reached, weights = said_and_reached(drafter, batches)
    read, trained = features(drafter, batches), np.log(said / (1 - said))
    weights = weights / weights.sum()
    mean = weights @ read
    scaled = (read - mean) / (np.sqrt(weights @ (read - mean) ** 2) + DEVIATION_FLOOR)

    def penalised(change: np.ndarray) -> tuple[float, np.ndarray]:
        logits = trained + scaled @ change[:-1] + change[-1]
        slope = weights * (expit(logits) - reached)
        loss = weights @ (np.logaddexp(0, logits) - reached * logits) + PENALTY / 2 * (change[:-1] ** 2).sum()
        return loss, np.append(scaled.T @ slope + PENALTY * change[:-1], slope.sum())

    best = minimize(penalised, np.zeros(read.shape[1] + 1), jac=True, options={"gtol": 1e-9}).x
    found = fit(drafter, batches)
    after, _, _ = said_and_reached(drafter, batches)
    np.testing.assert_allclose(after, expit(trained + scaled @ best[:-1] + best[-1]), atol=1e-4)
    cross_entropy = -weights @ (reached * np.log(after) + (1 - reached) * np.log(1 - after))
    assert found.bce_after == pytest.approx(cross_entropy, abs=1e-5)
    assert found.bce_after < found.bce_before
    assert found.bce_held_out is not None
    assert found.bce_held_out > found.bce_after
    assert found.num_slots == len(reached)


def test_it_says_on_average_what_is_reached(tiny_folders: dict[str, Path], batches: list[BlockBatch]) -> None:
    drafter = new_drafter(tiny_folders["llama"])
    before, reached, weights = said_and_reached(drafter, batches)
    fit(drafter, batches)
    after, _, _ = said_and_reached(drafter, batches)
    assert abs(np.average(before, weights=weights) - np.average(reached, weights=weights)) > 0.01
    assert np.average(after, weights=weights) == pytest.approx(np.average(reached, weights=weights), abs=1e-5)


def test_only_the_head_moves_and_the_mode_stays(tiny_folders: dict[str, Path], batches: list[BlockBatch]) -> None:
    drafter, before = new_drafter(tiny_folders["llama"]), new_drafter(tiny_folders["llama"]).state_dict()
    fit(drafter, batches)
    moved = {name for name, value in drafter.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {"confidence_head.proj.weight", "confidence_head.proj.bias"}
    assert drafter.training
    assert not drafter.confidence_head._forward_pre_hooks


def test_ranks_that_bring_the_same_find_the_same(tiny_folders: dict[str, Path], batches: list[BlockBatch]) -> None:
    one, three = (new_drafter(tiny_folders["llama"]) for _ in range(2))
    alone, together = fit(one, batches), fit(three, batches, num_ranks=3)
    torch.testing.assert_close(one.confidence_head.proj.weight, three.confidence_head.proj.weight)
    assert together.num_slots == 3 * alone.num_slots
    assert together.bce_held_out == pytest.approx(alone.bce_held_out, abs=1e-9)


def test_one_micro_batch_leaves_nothing_to_judge_by(tiny_folders: dict[str, Path], batches: list[BlockBatch]) -> None:
    empty = make_block_batch([], shape=batch_shape(), seed=1)
    found = fit(new_drafter(tiny_folders["llama"]), [batches[0], empty])
    assert found.bce_held_out is None
    assert found.bce_after < found.bce_before
