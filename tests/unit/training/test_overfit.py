"""A drafter trained on one answer of its target drafts that answer whole, in the decoder and not only in training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from draftsmith.decoding.engine import Engine, Request
from draftsmith.drafters.registry import start_from_target
from draftsmith.params import Sampling
from draftsmith.training.batches import make_block_batch
from tests.tiny_models import (
    WEIGHTS,
    batch_shape,
    hugging_face_greedy,
    make_sample,
    random_ids,
    reference,
    tiny_drafter,
    tiny_folders,
    tiny_target,
)

__all__ = ["tiny_folders"]

SIZE, NUM_NEW = 4, 40


@pytest.mark.parametrize(("kind", "family"), [("dspark", "llama"), ("dspark", "qwen3"), ("dflash", "qwen3")])
def test_one_answer_is_drafted_whole(kind: str, family: str, tiny_folders: dict[str, Path]) -> None:
    folder = tiny_folders[family]
    model, prompt = reference(folder), random_ids(12, seed=31)
    answer = hugging_face_greedy(model, prompt, num=NUM_NEW)
    assert len(answer) == NUM_NEW
    assert len(set(answer)) > 12  # not one word for ever
    sample = make_sample(model, [*prompt, *answer], supervised=[0] * len(prompt) + [1] * len(answer))

    drafter, row = tiny_drafter(kind, folder, seed=1, block_size=SIZE), WEIGHTS[kind]
    drafter.reset(seed=1)
    start_from_target(drafter, target_folder=folder)
    batch = make_block_batch([(sample, 0)], shape=batch_shape(block_size=SIZE), seed=1)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=5e-3, weight_decay=0.0)
    for _ in range(150):
        optimizer.zero_grad()
        sums = drafter.losses(batch, ce_weight=1.0, tv_weight=row.tv, confidence_weight=row.confidence)
        (sums.total / sums.weight).backward()
        optimizer.step()
    assert float(sums.correct.float().mean()) > 0.98

    drafter.eval().requires_grad_(False)
    engine = Engine(tiny_target(folder), drafter=drafter, end_ids=[], batch_size=1)
    found = engine.generate([Request("r", tuple(prompt), NUM_NEW, Sampling(temperature=0.0), seed=1)])[0]
    assert list(found.token_ids) == answer
    whole = [made.committed for made in found.rounds if not made.cut]
    assert np.mean(whole) > SIZE + 0.5
    assert len(whole) >= 7
