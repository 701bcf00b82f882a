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
    save_tiny,
    tiny_drafter,
    tiny_folders,
    tiny_target,
)

__all__ = ["tiny_folders"]

NUM_NEW = 40


CASES = [
    ("dspark", "llama"), ("dspark", "qwen3"), ("dspark_gated", "gemma4"), ("dspark_rnn", "qwen3"), ("dflash", "qwen3"),
    ("dflash_masks", "llama"), ("eagle3", "llama"), ("eagle3", "gemma4"), ("mtp1", "qwen3"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "family"), CASES)
def test_one_answer_is_drafted_whole(kind: str, family: str, tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tiny_folders[family]
    if kind == "eagle3":
        # It learns the target's whole distributions: of a target that is less sure, the first place is learned last.
        folder = save_tiny(tmp_path, family=family, seed=3, std=0.6)
    model, prompt = reference(folder), random_ids(12, seed=31)
    answer = hugging_face_greedy(model, prompt, num=NUM_NEW)
    assert len(answer) == NUM_NEW
    assert len(set(answer)) > 12  # not one word for ever
    drafter = tiny_drafter(kind, folder, seed=1)
    size, every = drafter.config.block_size, drafter.reads_last_hidden
    mask = [0] * len(prompt) + [1] * len(answer)
    sample = make_sample(model, [*prompt, *answer], supervised=mask, every=every)

    row = WEIGHTS[kind]
    weights = row if row.soft_ce else row.model_copy(update={"ce": 1.0})
    drafter.reset(seed=1)
    start_from_target(drafter, target_folder=folder)
    batch = make_block_batch([(sample, 0)], shape=batch_shape(block_size=size, last_hidden=every), seed=1)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=5e-3, weight_decay=0.0)
    steps = 600 if kind == "eagle3" else 150
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        sums = drafter.losses(batch, weights=weights)
        (sums.total / sums.weight).backward()
        optimizer.step()
        schedule.step()
    # Soft labels ask for whole distributions: where two tokens are nearly as likely, the first place stays open.
    assert float(sums.correct.float().mean()) > (0.9 if kind == "eagle3" else 0.98)

    drafter.eval().requires_grad_(False)
    engine = Engine(tiny_target(folder), drafter=drafter, end_ids=[], batch_size=1)
    found = engine.generate([Request("r", tuple(prompt), NUM_NEW, Sampling(temperature=0.0), seed=1)])[0]
    assert list(found.token_ids) == answer
    whole = [made.committed for made in found.rounds if not made.cut]
    assert np.mean(whole) > (size if kind == "eagle3" else size + 0.5)
    assert len(whole) >= 7
