"""What every drafter kind must do on every target family; a new kind or family adds a line to `CASES`."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.decoding.engine import Engine, LengthPolicy, Request, verify_all
from draftsmith.drafters.dflash import DFlash
from draftsmith.drafters.registry import load_drafter, save_drafter
from draftsmith.errors import ContractError
from draftsmith.nn.block import BlockBatch, candidate_anchors
from draftsmith.params import Sampling
from draftsmith.targets.base import load_shared
from draftsmith.targets.families import FAMILIES
from tests.contract.drafter_case import SIZE, Case, Drafted, StepByStep, batch_of, check_losses, expected_losses
from tests.tiny_models import (
    END_TOKEN,
    VOCAB,
    hugging_face_greedy,
    random_ids,
    reference,
    tiny_drafter,
    tiny_folders,
    tiny_target,
)

__all__ = ["tiny_folders"]

CASES = [(kind, family) for kind in ("dspark", "dflash") for family in FAMILIES]


@pytest.fixture(params=CASES, ids=lambda case: "-".join(case))
def case(request: pytest.FixtureRequest, tiny_folders: dict[str, Path]) -> Case:
    kind, family = request.param
    folder = tiny_folders[family]
    return Case(kind, folder, reference(folder), tiny_drafter(kind, folder, seed=7, block_size=SIZE))


# Training form and decoding form


def test_the_training_form_is_the_decoding_form(case: Case) -> None:
    """Every anchor of three samples, drafted one after the other on rows that are never rebuilt.

    The samples sit side by side in the rows at different lengths; a run in the first one ends early.
    """
    samples = [
        case.sample(22, seed=1, supervised="0001111111100111111111"),
        case.sample(13, seed=2),
        case.sample(17, seed=3),
    ]
    anchors = [candidate_anchors(sample.supervised).tolist() for sample in samples]
    steps = StepByStep(case.drafter, samples)
    blocks: dict[tuple[int, int], Drafted] = {}
    for number in range(max(len(row) for row in anchors)):
        current = [row[min(number, len(row) - 1)] for row in anchors]
        steps.show(current, pieces=3)
        for row, drafted in enumerate(steps.propose(current)):
            blocks[row, current[row]] = drafted
    ordered = ((samples[row], anchor, blocks[row, anchor]) for row in range(3) for anchor in anchors[row])
    with torch.no_grad():
        check_losses(case.losses(batch_of(*samples)), expected_losses(case, ordered))


def test_an_anchor_at_position_zero_has_no_context(case: Case) -> None:
    sample = case.sample(9, seed=5, supervised="111111111")
    steps = StepByStep(case.drafter, [sample])
    drafted = [(sample, 0, steps.propose([0])[0])]
    for anchor in range(1, 8):
        steps.show([anchor], pieces=1)
        drafted.append((sample, anchor, steps.propose([anchor])[0]))
    with torch.no_grad():
        check_losses(case.losses(batch_of(sample)), expected_losses(case, iter(drafted)))


def test_a_sequence_shorter_than_a_block(case: Case) -> None:
    sample = case.sample(3, seed=6, supervised="011")
    steps = StepByStep(case.drafter, [sample])
    steps.show([1], pieces=1)
    batch = batch_of(sample)
    assert (batch.num_slots, batch.num_anchors) == (1, 1)
    with torch.no_grad():
        check_losses(case.losses(batch), expected_losses(case, iter([(sample, 1, steps.propose([1])[0])])))


# What a block may see


def states(case: Case, batch: BlockBatch) -> Tensor:
    """Block states [A, K, D] of a batch of one sample."""
    with torch.no_grad():
        return case.drafter.backbone(batch).view(-1, SIZE, case.drafter.config.geometry.hidden_size)


def test_a_block_sees_the_context_before_its_anchor_and_nothing_after(case: Case) -> None:
    """Perturb one context position at a time: exactly the blocks anchored behind it move."""
    batch = batch_of(case.sample(14, seed=8))
    anchors = batch.block_positions(SIZE)[0, ::SIZE].tolist()
    before = states(case, batch)
    for position in range(14):
        context = batch.context.clone()
        context[0, position] += 1.0
        after = states(case, BlockBatch(**{**vars(batch), "context": context}))
        for block, anchor in enumerate(anchors):
            moved = float((after[block] - before[block]).abs().max())
            assert moved > 1e-3 if position < anchor else moved == 0.0, (position, anchor)


def test_blocks_do_not_see_each_other_but_see_their_own_slots(case: Case) -> None:
    batch = batch_of(case.sample(14, seed=9))
    ids = batch.block_ids(SIZE, mask_token_id=case.drafter.config.mask_token_id)
    before = states(case, batch)
    for changed in (0, 3, before.shape[0] - 1):
        for slot in (0, SIZE - 1):
            other = ids.clone()
            other[0, changed * SIZE + slot] = (other[0, changed * SIZE + slot] + 5) % VOCAB
            with patch.object(BlockBatch, "block_ids", lambda *_, other=other, **__: other):
                moved = (states(case, batch) - before).abs().amax(-1)
            assert float(moved[changed].min()) > 1e-5  # bidirectional inside a block
            assert float(torch.cat((moved[:changed], moved[changed + 1 :])).max()) == 0.0


def test_padding_changes_nothing(case: Case) -> None:
    """Samples of different lengths and numbers of anchors in one batch: the same sums, slot by slot, as alone."""
    samples = [case.sample(8, seed=10), case.sample(25, seed=11), case.sample(12, seed=12, supervised="000000001111")]
    with torch.no_grad():
        alone = [case.losses(batch_of(sample)) for sample in samples]
        padded = case.losses(batch_of(*samples))
    for name in ("total", "ce", "tv", "weight"):
        assert float(getattr(padded, name)) == pytest.approx(sum(float(getattr(one, name)) for one in alone), rel=1e-5)
    torch.testing.assert_close(padded.acceptance, torch.cat([one.acceptance for one in alone]), rtol=0, atol=1e-5)
    assert padded.correct.tolist() == [flag for one in alone for flag in one.correct.tolist()]
    assert padded.slot_number.tolist() == [slot for one in alone for slot in one.slot_number.tolist()]


# Learning


def test_only_the_drafters_own_parameters_learn(case: Case) -> None:
    case.losses(batch_of(case.sample(20, seed=13))).total.backward()
    for name, parameter in case.drafter.named_parameters():
        assert parameter.grad is not None, name
        assert float(parameter.grad.abs().max()) > 0, name
        assert not name.startswith(("embed", "lm_head")), name
    for tensor in (case.drafter.shared.embedding, case.drafter.shared.head):
        assert tensor.grad is None
        assert not tensor.requires_grad


def test_loss_falls_on_a_few_samples(case: Case) -> None:
    case.drafter.reset(seed=1)
    batch = batch_of(case.sample(24, seed=14), case.sample(18, seed=15))
    optimizer = torch.optim.AdamW(case.drafter.parameters(), lr=3e-3, weight_decay=0.0)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        sums = case.losses(batch)
        (sums.total / sums.weight).backward()
        optimizer.step()
        losses.append(float((sums.total / sums.weight).detach()))
    assert losses[-1] < 0.7 * losses[0]
    assert all(math.isfinite(loss) for loss in losses)


def test_a_batch_without_a_valid_anchor_gives_zero_and_no_gradient(case: Case) -> None:
    batch = batch_of(case.sample(9, seed=16, supervised="000010100"), case.sample(5, seed=17, supervised="00000"))
    assert (batch.num_slots, batch.num_anchors) == (0, 0)
    sums = case.losses(batch)
    assert (float(sums.total.detach()), float(sums.weight)) == (0.0, 0.0)
    sums.total.backward()
    for name, parameter in case.drafter.named_parameters():
        assert parameter.grad is None or float(parameter.grad.abs().max()) == 0.0, name


def test_a_seed_fixes_the_random_start(case: Case) -> None:
    starts = []
    for seed in (3, 3, 4):
        case.drafter.reset(seed=seed)
        starts.append({name: value.detach().clone() for name, value in case.drafter.named_parameters()})
    assert all(torch.equal(starts[0][name], starts[1][name]) for name in starts[0])
    assert not all(torch.equal(starts[0][name], starts[2][name]) for name in starts[0])


# Folders


def loaded(case: Case, folder: Path) -> DFlash:
    shared = load_shared(case.folder, family=FAMILIES[case.folder.name])
    drafter = load_drafter(folder, target_folder=case.folder, shared=shared, dtype=torch.float32)
    assert isinstance(drafter, DFlash)
    return drafter


def test_a_saved_drafter_is_loaded_bit_by_bit(case: Case, tmp_path: Path) -> None:
    save_drafter(case.drafter, folder=tmp_path, dtype=torch.float32)
    again = loaded(case, tmp_path)
    assert again.config == case.drafter.config
    own, other = case.drafter.state_dict(), again.state_dict()
    assert own.keys() == other.keys() == load_file(tmp_path / "model.safetensors").keys()
    assert all(torch.equal(own[name], other[name]) for name in own)
    assert not any(parameter.requires_grad for parameter in again.parameters())
    batch = batch_of(case.sample(15, seed=18))
    with torch.no_grad():
        assert torch.equal(states(case, batch), states(Case(case.kind, case.folder, case.model, again), batch))


def test_weights_that_do_not_fit_are_all_listed(case: Case, tmp_path: Path) -> None:
    save_drafter(case.drafter, folder=tmp_path, dtype=torch.float32)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["norm.weight"], tensors["layers.1.mlp.up_proj.weight"]
    tensors["fc.bias"] = torch.zeros(3)
    tensors["fc.weight"] = tensors["fc.weight"][:, :-1].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ContractError) as caught:
        loaded(case, tmp_path)
    for part in (
        "missing norm.weight",
        "missing layers.1.mlp.up_proj.weight",
        "extra fc.bias",
        "fc.weight is [32, 95], expected [32, 96]",
        str(tmp_path),
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize("damage", ["no weights", "cut weights", "no config", "half a config", "another version"])
def test_a_folder_that_cannot_be_read_is_named(case: Case, tmp_path: Path, damage: str) -> None:
    save_drafter(case.drafter, folder=tmp_path, dtype=torch.float32)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    body = json.loads(config.read_text())
    if damage == "no weights":
        weights.unlink()
    elif damage == "cut weights":
        weights.write_bytes(weights.read_bytes()[:100])
    elif damage == "no config":
        config.unlink()
    elif damage == "half a config":
        config.write_text(json.dumps({"draftsmith_version": 1, "kind": body["kind"]}))
    else:
        config.write_text(json.dumps({**body, "draftsmith_version": 2}))
    with pytest.raises(ContractError, match=str(tmp_path)):
        loaded(case, tmp_path)


# Decoding


def ragged(_confidence: Tensor | None, num_requests: int, block_size: int) -> list[int]:
    """0, 1, .., K, 0, .. by place in the batch."""
    return [row % (block_size + 1) for row in range(num_requests)]


PROMPTS = [random_ids(7, seed=0), *[random_ids(3 + 5 * seed, seed=seed) for seed in range(1, 4)]]


@cache
def expected_answers(folder: Path) -> list[list[int]]:
    """Hugging Face's greedy answers to `PROMPTS`, once a family."""
    model = reference(folder)
    return [hugging_face_greedy(model, prompt, num=24) for prompt in PROMPTS]


def check_answers(engine: Engine, folder: Path) -> None:
    """The engine's answers are Hugging Face's, token for token."""
    requests = [Request(str(i), tuple(p), 24, Sampling(temperature=0.0), seed=i) for i, p in enumerate(PROMPTS)]
    found, expected = engine.generate(requests), expected_answers(folder)
    assert [list(one.token_ids) for one in found] == expected
    assert [one.finish == "end_of_text" for one in found] == [answer[-1] == END_TOKEN for answer in expected]


@pytest.mark.parametrize(("batch_size", "policy"), [(1, verify_all), (3, verify_all), (6, ragged)])
def test_greedy_decoding_is_hugging_faces(case: Case, batch_size: int, policy: LengthPolicy) -> None:
    """In float32, over prompts of different lengths."""
    drafter = case.drafter.eval().requires_grad_(False)
    target = tiny_target(case.folder)
    check_answers(
        Engine(target, drafter=drafter, end_ids=[END_TOKEN], batch_size=batch_size, policy=policy), case.folder
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_decoding_is_hugging_faces(family: str, tiny_folders: dict[str, Path]) -> None:
    folder = tiny_folders[family]
    for batch_size in (1, 3):
        check_answers(Engine(tiny_target(folder), drafter=None, end_ids=[END_TOKEN], batch_size=batch_size), folder)
