"""Decoding on a GPU: the CPU's greedy ids, all logits of a step in one pass, and times that wait for the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.decoding.engine import Engine, Request
from draftsmith.decoding.policies import DraftedBlocks
from draftsmith.drafters.registry import build_drafter, drafter_config
from draftsmith.params import Sampling
from draftsmith.targets.base import Target, load_target
from draftsmith.targets.families import FAMILIES
from tests.tiny_models import (
    CAPTURED,
    END_TOKEN,
    KINDS,
    drafter_row,
    hugging_face_greedy,
    random_ids,
    randomize,
    reference,
    target_row,
    tiny_folders,
)

__all__ = ["tiny_folders"]

pytestmark = pytest.mark.gpu
PROMPTS = [tuple(random_ids(3 + 5 * seed, seed=seed)) for seed in range(5)]
GREEDY, NUM_NEW = Sampling(temperature=0.0), 24


def on_gpu(kind: str, folder: Path) -> tuple[Target, Any]:
    """A tiny target and a random drafter of it, float32."""
    target = load_target(folder, family=FAMILIES[folder.name], capture_layers=CAPTURED, dtype="float32", device="cuda")
    row = drafter_row(kind, block_size=1 if kind == "mtp1" else 7, head_norms=folder.name != "llama")
    config = drafter_config(row, target=target_row(folder), target_folder=folder)
    drafter = build_drafter(config, target_folder=folder, shared=target.shared)
    randomize(drafter, seed=7)
    return target, drafter.to("cuda").eval().requires_grad_(False)


def ragged(blocks: DraftedBlocks) -> list[int]:
    return [row % (blocks.block_size + 1) for row in range(blocks.num_requests)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_decoding_is_hugging_faces(kind: str, family: str, tiny_folders: dict[str, Path]) -> None:
    target, drafter = on_gpu(kind, tiny_folders[family])
    engine = Engine(target, drafter=drafter, end_ids=[END_TOKEN], batch_size=4, policy=ragged)
    found = engine.generate([Request(str(place), ids, NUM_NEW, GREEDY, 0) for place, ids in enumerate(PROMPTS)])
    model = reference(tiny_folders[family])
    expected = [hugging_face_greedy(model, list(ids), num=NUM_NEW) for ids in PROMPTS]
    assert [list(one.token_ids) for one in found] == expected


def test_logits_of_a_step_are_made_at_once_and_its_parts_wait(
    tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampled, greedy and cancelled requests: one call of the LM head a step, for every token of the pass."""
    target, drafter = on_gpu("dspark", tiny_folders["llama"])
    engine = Engine(target, drafter=drafter, end_ids=[END_TOKEN], batch_size=4)
    rows, waited = list[int](), list[int]()
    logits, synchronize = target.logits, torch.cuda.synchronize
    monkeypatch.setattr(target, "logits", lambda hidden: (rows.append(len(hidden)), logits(hidden))[1])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: (waited.append(1), synchronize())[1])
    session = engine.session()
    for place, ids in enumerate(PROMPTS[:3]):
        session.submit(Request(str(place), ids, NUM_NEW, GREEDY if place else Sampling(top_p=0.9), place))
    session.step()
    session.cancel("1")
    session.step()
    assert rows == [3, 3 * 8, 2 * 8]
    assert len(waited) >= 2 * 5
    assert all(min(step.draft_s, step.verify_s, step.sample_s) > 0 for step in engine.times.steps)


def test_an_answer_does_not_depend_on_its_batch(tiny_folders: dict[str, Path]) -> None:
    target, drafter = on_gpu("dspark", tiny_folders["qwen3"])
    samplings = (GREEDY, Sampling(), Sampling(temperature=0.7, top_k=20, min_p=0.01))
    requests = [Request(str(n), ids, NUM_NEW, samplings[n % 3], seed=n) for n, ids in enumerate(PROMPTS)]

    def answers(chosen: list[Request], batch_size: int) -> dict[str, tuple[int, ...]]:
        engine = Engine(target, drafter=drafter, end_ids=[END_TOKEN], batch_size=batch_size)
        return {one.request_id: one.token_ids for one in engine.generate(chosen)}

    together, pairs = answers(requests, 5), answers(requests[::-1], 2)
    for request in requests:
        assert together[request.request_id] == pairs[request.request_id] == answers([request], 1)[request.request_id]
