"""The sequential head's start: the target's mean prediction after each token, rare ones leaning on their embedding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from draftsmith.drafters import start
from draftsmith.drafters.dspark import DSpark
from draftsmith.drafters.registry import build_drafter, drafter_config
from draftsmith.drafters.start import BACKBONE_SCALE, RIDGE_TOKENS, SHRINKAGE, start_markov_head
from draftsmith.params import Sequential
from tests.tiny_models import HIDDEN, VOCAB, drafter_row, target_row, tiny_folders

__all__ = ["tiny_folders"]

SEEN = 40
"""Tokens below are seen, the others not."""


def drafter_of_rank(rank: int, folder: Path) -> DSpark:
    row = drafter_row("dspark").model_copy(update={"sequential": Sequential(rank=rank)})
    config = drafter_config(row, target=target_row(folder), target_folder=folder)
    drafter = build_drafter(config, target_folder=folder)
    assert isinstance(drafter, DSpark)
    drafter.reset(seed=5)
    return drafter


def label_rows(seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Three samples' tokens and states, some tokens often and some once."""
    draw = np.random.default_rng(seed)
    ids = [np.arange(SEEN), draw.geometric(0.2, 60) % SEEN, draw.integers(0, 7, 30)]
    return [
        (torch.from_numpy(part), torch.from_numpy(draw.standard_normal((len(part), HIDDEN))).float()) for part in ids
    ]


def means(rows: list[tuple[Tensor, Tensor]]) -> tuple[np.ndarray, np.ndarray]:
    """Mean state [SEEN, D] and count [SEEN] of every token, one by one."""
    ids = np.concatenate([part[0].numpy() for part in rows])
    states = np.concatenate([part[1].double().numpy() for part in rows])
    return np.stack([states[ids == token].mean(0) for token in range(SEEN)]), np.bincount(ids, minlength=SEEN)


def told_means(drafter: DSpark, rows: list[tuple[Tensor, Tensor]]) -> np.ndarray:
    """Mean state [V, D] after every token in float64: the ridge as extra rows of least squares, then the shrinkage."""
    own, counts = means(rows)
    embedding = drafter.shared.embedding.double().numpy()
    weights = (counts[:SEEN] / (counts[:SEEN] + SHRINKAGE))[:, None]
    centre, mean = (np.average(part, axis=0, weights=weights[:, 0]) for part in (embedding[:SEEN], own))
    offsets = embedding - centre
    penalty = RIDGE_TOKENS * np.average((offsets[:SEEN] ** 2).mean(axis=1), weights=weights[:, 0])
    system = np.concatenate([np.sqrt(weights) * offsets[:SEEN], np.sqrt(penalty) * np.eye(HIDDEN)])
    wanted = np.concatenate([np.sqrt(weights) * (own - mean), np.zeros((HIDDEN, HIDDEN))])
    told = mean + offsets @ np.linalg.lstsq(system, wanted)[0]
    told[:SEEN] = (counts[:SEEN, None] * own + SHRINKAGE * told[:SEEN]) / (counts[:SEEN, None] + SHRINKAGE)
    return told


def bias(drafter: DSpark) -> np.ndarray:
    """The head's bias after every token [V, V]."""
    head = drafter.markov_head
    return (head.markov_w1.weight.double() @ head.markov_w2.weight.double().T).detach().numpy()


@pytest.mark.parametrize("rank", [HIDDEN, HIDDEN + 9])
def test_at_full_rank_the_bias_is_the_mean_prediction(rank: int, tiny_folders: dict[str, Path]) -> None:
    drafter, rows = drafter_of_rank(rank, tiny_folders["llama"]), label_rows()
    found = start_markov_head(drafter, rows=rows)
    assert (found.num_rows, found.num_tokens) == (SEEN + 90, SEEN)
    assert found.kept_share == pytest.approx(1.0, abs=1e-5)
    expected = told_means(drafter, rows) @ drafter.shared.head.double().numpy().T
    np.testing.assert_allclose(bias(drafter), expected, atol=1e-4)
    assert np.abs(bias(drafter)[SEEN:]).max() > 0.01, "tokens that were not seen have a prediction too"


def test_at_a_lower_rank_it_keeps_what_an_svd_keeps(tiny_folders: dict[str, Path]) -> None:
    """The means weighted by how often a token is seen: their best approximation of rank 6 (Eckart and Young)."""
    drafter, rows = drafter_of_rank(6, tiny_folders["llama"]), label_rows()
    found = start_markov_head(drafter, rows=rows)
    states, counts = told_means(drafter, rows), means(rows)[1]
    _, sizes, right = np.linalg.svd(states[:SEEN] * np.sqrt(counts)[:, None], full_matrices=False)
    best = states @ right[:6].T @ right[:6]
    np.testing.assert_allclose(bias(drafter), best @ drafter.shared.head.double().numpy().T, atol=1e-4)
    assert found.kept_share == pytest.approx((sizes[:6] ** 2).sum() / (sizes**2).sum(), rel=1e-5)


def test_the_features_of_seen_tokens_have_unit_mean_square(tiny_folders: dict[str, Path]) -> None:
    drafter = drafter_of_rank(6, tiny_folders["llama"])
    start_markov_head(drafter, rows=label_rows())
    features = drafter.markov_head.markov_w1.weight.detach().double().numpy()
    assert (features[:SEEN] ** 2).mean() == pytest.approx(1.0, rel=1e-5)
    assert 0 < np.sqrt((features[SEEN:VOCAB] ** 2).mean()) < 1, "an unseen token's mean is less sure, so nearer to all"


def test_tokens_alike_in_their_embedding_start_alike(tiny_folders: dict[str, Path]) -> None:
    """States that are linear in the embedding: what was never seen is told by it, as far as the ridge lets it be."""
    drafter = drafter_of_rank(HIDDEN, tiny_folders["llama"])
    line = torch.from_numpy(np.random.default_rng(3).standard_normal((HIDDEN, HIDDEN))).float()
    ids = torch.arange(VOCAB - 20).repeat(3000)
    start_markov_head(drafter, rows=[(ids, drafter.shared.embedding[ids] @ line)])
    expected = (drafter.shared.embedding[-20:] @ line).double() @ drafter.shared.head.double().T
    found = torch.from_numpy(bias(drafter)[-20:])
    assert torch.corrcoef(torch.stack([found.flatten(), expected.flatten()]))[0, 1] > 0.7


def test_the_backbone_starts_quiet_and_nothing_else_moves(tiny_folders: dict[str, Path]) -> None:
    drafter, before = drafter_of_rank(6, tiny_folders["llama"]), drafter_of_rank(6, tiny_folders["llama"]).state_dict()
    start_markov_head(drafter, rows=label_rows())
    for name, value in drafter.state_dict().items():
        if name == "norm.weight":
            torch.testing.assert_close(value, before[name] * BACKBONE_SCALE)
        elif not name.startswith("markov_head"):
            assert torch.equal(value, before[name]), name


def test_reading_stops_at_a_bound(tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "MOST_ROWS", SEEN + 1)
    rows = label_rows()
    found = start_markov_head(drafter_of_rank(6, tiny_folders["llama"]), rows=rows)
    assert found.num_rows == len(rows[0][0]) + len(rows[1][0])
