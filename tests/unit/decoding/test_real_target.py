"""The real target in float32: greedy decoding through a drafter is Hugging Face's own, token for token."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftsmith.decoding.engine import Engine, Request
from draftsmith.decoding.policies import DraftedBlocks, LengthPolicy, verify_all
from draftsmith.drafters.dspark import DSpark
from draftsmith.drafters.registry import build_drafter, drafter_config, start_from_target
from draftsmith.params import Sampling, load_params
from draftsmith.targets.base import Target, load_target
from draftsmith.targets.families import FAMILIES
from draftsmith.targets.fetch import generation_end_ids, load_chat_format
from tests.target_fixtures import REPOSITORY, real_target, real_target_row
from tests.tiny_models import hugging_face_greedy, reference

__all__ = ["real_target"]

TEXTS = ["What is 12 + 30?", "Say hello.", "List three fruits."]
NUM_NEW = 12


@pytest.fixture(scope="module")
def target(real_target: Path) -> Target:
    row = real_target_row()
    return load_target(
        real_target, family=FAMILIES["llama"], capture_layers=row.capture_layers, dtype="float32", device="cpu"
    )


@pytest.fixture(scope="module")
def drafter(real_target: Path, target: Target) -> DSpark:
    """A DSpark drafter of params.yaml, started from the target's own last layers, untrained."""
    row = next(
        row
        for row in load_params(REPOSITORY / "params.yaml").drafters.values()
        if row.kind == "dspark" and not row.head_norms
    )
    config = drafter_config(row, target=real_target_row(), target_folder=real_target)
    drafter = build_drafter(config, target_folder=real_target, shared=target.shared)
    assert isinstance(drafter, DSpark)
    drafter.reset(seed=1)
    start_from_target(drafter, target_folder=real_target)
    return drafter.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def prompts(real_target: Path) -> list[list[int]]:
    chat = load_chat_format(real_target)
    return [chat.prompt_ids([text], [], system_prompt=None) for text in TEXTS]


@pytest.fixture(scope="module")
def expected(real_target: Path, prompts: list[list[int]]) -> list[list[int]]:
    model = reference(real_target)
    return [hugging_face_greedy(model, prompt, num=NUM_NEW) for prompt in prompts]


def ragged(blocks: DraftedBlocks) -> list[int]:
    return [(3 * row + 2) % (blocks.block_size + 1) for row in range(blocks.num_requests)]


@pytest.mark.parametrize(
    ("count", "policy", "drafted"), [(2, verify_all, True), (3, ragged, True), (3, verify_all, False)]
)
def test_greedy_answers_are_hugging_faces(
    count: int,
    policy: LengthPolicy,
    drafted: bool,
    target: Target,
    drafter: DSpark,
    prompts: list[list[int]],
    expected: list[list[int]],
    real_target: Path,
) -> None:
    chosen, end_ids = drafter if drafted else None, generation_end_ids(real_target)
    engine = Engine(target, drafter=chosen, end_ids=end_ids, batch_size=count, policy=policy)
    requests = [
        Request(text, tuple(ids), NUM_NEW, Sampling(temperature=0.0), 1)
        for text, ids in zip(TEXTS[:count], prompts, strict=False)
    ]
    found = engine.generate(requests)
    assert [list(one.token_ids) for one in found] == expected[:count]
    assert [one.finish == "end_of_text" for one in found] == [answer[-1] in end_ids for answer in expected[:count]]
    assert all((len(one.rounds) > 0) == drafted for one in found)
