"""What every drafter kind must do on every target family; a new kind or family adds a line to `CASES`."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from draftsmith.decoding.engine import Engine, Request
from draftsmith.decoding.policies import DraftedBlocks, LengthPolicy, verify_all
from draftsmith.nn.block import BlockBatch
from draftsmith.params import Sampling
from draftsmith.targets.families import FAMILIES
from tests.contract.drafter_case import Case, StepByStep, check_losses, drafted_step_by_step, expected_losses
from tests.tiny_models import (
    END_TOKEN,
    KINDS,
    VOCAB,
    hugging_face_greedy,
    random_ids,
    reference,
    tiny_drafter,
    tiny_folders,
    tiny_target,
)

__all__ = ["tiny_folders"]

CASES = [(kind, family) for kind in KINDS for family in FAMILIES]


@pytest.fixture(params=CASES, ids=lambda case: "-".join(case))
def case(request: pytest.FixtureRequest, tiny_folders: dict[str, Path]) -> Case:
    kind, family = request.param
    folder = tiny_folders[family]
    return Case(kind, folder, reference(folder), tiny_drafter(kind, folder, seed=7))


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
    with torch.no_grad():
        found = case.losses(case.batch(*samples))
    check_losses(found, expected_losses(case, drafted_step_by_step(case, samples)))
    # What the sums are divided by: the slots' weights, or rows times padded length.
    slots = sum(math.exp(-slot / 4.0) for slot in found.slot_number.tolist())
    assert float(found.weight) == pytest.approx(3 * 22 if case.kind.startswith("eagle3") else slots, rel=1e-6)


def test_an_anchor_at_position_zero_has_no_context(case: Case) -> None:
    if not case.is_block:
        pytest.skip("a drafter of pairs has no row before position 0; an engine never asks it there")
    sample = case.sample(9, seed=5, supervised="111111111")
    steps = StepByStep(case.drafter, [sample])
    drafted = [(sample, 0, steps.propose([0])[0])]
    for anchor in range(1, 8):
        steps.show([anchor], pieces=1)
        drafted.append((sample, anchor, steps.propose([anchor])[0]))
    with torch.no_grad():
        check_losses(case.losses(case.batch(sample)), expected_losses(case, iter(drafted)))


def test_a_sequence_shorter_than_a_block(case: Case) -> None:
    sample = case.sample(3, seed=6, supervised="011")
    steps = StepByStep(case.drafter, [sample])
    steps.show([1], pieces=1)
    batch = case.batch(sample)
    assert (batch.num_slots, batch.num_anchors) == (1, 1)
    with torch.no_grad():
        check_losses(case.losses(batch), expected_losses(case, iter([(sample, 1, steps.propose([1])[0])])))


# What a block may see


def states(case: Case, batch: BlockBatch) -> Tensor:
    """States of all slots [A, K, D] of a batch of one row."""
    with torch.no_grad():
        return case.drafter.slot_states(batch)


def perturbed(case: Case, batch: BlockBatch, position: int) -> BlockBatch:
    """What the drafter reads of one token changed: its captured states, or its last hidden state."""
    name = "hidden" if case.drafter.reads_last_hidden else "context"
    values = getattr(batch, name).clone()
    values[0, position] += 1.0
    return BlockBatch(**{**vars(batch), name: values})


def test_a_block_sees_the_context_before_its_anchor_and_nothing_after(case: Case) -> None:
    """Perturb one context position at a time: exactly the blocks anchored behind it, in reach of their window, move."""
    batch = case.batch(case.sample(14, seed=8))
    anchors = batch.anchors[0].tolist()
    before = states(case, batch)
    for position in range(14):
        after = states(case, perturbed(case, batch, position))
        for block, anchor in enumerate(anchors):
            moved = float((after[block] - before[block]).abs().max())
            seen = anchor - case.reaches - case.window < position < anchor
            assert moved > 1e-4 if seen else moved == 0.0, (position, anchor, moved)


def test_a_token_moves_the_blocks_that_read_it(case: Case) -> None:
    """Change one token's id, not its states: nothing that is drafted before it is read may move."""
    sample = case.sample(14, seed=9)
    batch = case.batch(sample)
    before = states(case, batch)
    for position in range(14):
        ids = batch.token_ids.clone()
        ids[0, position] = (ids[0, position] + 5) % VOCAB
        moved = (states(case, BlockBatch(**{**vars(batch), "token_ids": ids})) - before).abs().amax(-1)
        for block, anchor in enumerate(batch.anchors[0].tolist()):
            for slot in range(case.size):
                if position > anchor + slot:
                    assert float(moved[block, slot]) == 0.0, (position, anchor, slot)
            assert position != anchor or float(moved[block].max()) > 1e-4


def test_blocks_do_not_see_each_other_but_see_their_own_slots(case: Case) -> None:
    if not case.is_block:
        pytest.skip("only blocks of masks are bidirectional inside")
    width = case.drafter.config.block_width
    batch = case.batch(case.sample(14, seed=9))
    ids = batch.block_ids(width, mask_token_id=case.drafter.config.mask_token_id)
    before = states(case, batch)
    for changed in (0, 3, before.shape[0] - 1):
        for slot in (0, width - 1):
            other = ids.clone()
            other[0, changed * width + slot] = (other[0, changed * width + slot] + 5) % VOCAB
            with patch.object(BlockBatch, "block_ids", lambda *_, other=other, **__: other):
                moved = (states(case, batch) - before).abs().amax(-1)
            assert float(moved[changed].min()) > 1e-5
            assert float(torch.cat((moved[:changed], moved[changed + 1 :])).max()) == 0.0


def test_samples_packed_in_one_row_do_not_see_each_other(case: Case) -> None:
    """The same sums, slot by slot, as in rows of their own; and no state of one sample reaches another's blocks."""
    samples = [case.sample(8, seed=10), case.sample(15, seed=11), case.sample(12, seed=12)]
    packed = case.batch(*samples, row_tokens=40)
    assert packed.token_ids.shape == (1, 35)
    with torch.no_grad():
        alone, together = case.losses(case.batch(*samples)), case.losses(packed)
    for name in ("total", "ce", "tv"):
        assert float(getattr(together, name)) == pytest.approx(float(getattr(alone, name)), rel=1e-5)
    torch.testing.assert_close(together.acceptance, alone.acceptance, rtol=0, atol=1e-5)
    assert together.slot_number.tolist() == alone.slot_number.tolist()
    before = states(case, packed)
    for position in (7, 8, 22, 23):
        moved = (states(case, perturbed(case, packed, position)) - before).abs().amax((1, 2))
        document = packed.documents[0, position]
        others = packed.documents[0, packed.anchors[0]] != document
        assert float(moved[others].max()) == 0.0, position


def test_padding_changes_nothing(case: Case) -> None:
    """Samples of different lengths and numbers of anchors in one batch: the same sums, slot by slot, as alone."""
    samples = [case.sample(8, seed=10), case.sample(25, seed=11), case.sample(12, seed=12, supervised="000000001111")]
    with torch.no_grad():
        alone = [case.losses(case.batch(sample)) for sample in samples]
        padded = case.losses(case.batch(*samples))
    for name in ("total", "ce", "tv"):
        assert float(getattr(padded, name)) == pytest.approx(sum(float(getattr(one, name)) for one in alone), rel=1e-5)
    torch.testing.assert_close(padded.acceptance, torch.cat([one.acceptance for one in alone]), rtol=0, atol=1e-5)
    assert padded.correct.tolist() == [flag for one in alone for flag in one.correct.tolist()]
    assert padded.slot_number.tolist() == [slot for one in alone for slot in one.slot_number.tolist()]


# Learning


def test_only_the_drafters_own_parameters_learn(case: Case) -> None:
    case.losses(case.batch(case.sample(20, seed=13))).total.backward()
    for name, parameter in case.drafter.named_parameters():
        assert parameter.grad is not None, name
        assert float(parameter.grad.abs().max()) > 0, name
        assert not name.startswith(("embed", "lm_head")), name
    for tensor in (case.drafter.shared.embedding, case.drafter.shared.head):
        assert tensor.grad is None
        assert not tensor.requires_grad


def least_loss(case: Case, batch: BlockBatch) -> float:
    """What the loss cannot fall below: a soft cross-entropy keeps the entropy of the target's distributions."""
    if not case.kind.startswith("eagle3"):
        return 0.0
    logits = case.drafter.shared.logits(batch.target_hidden).double()
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    return float((entropy * 0.8**batch.slot_number).sum()) / batch.token_ids.numel()


def test_loss_falls_on_a_few_samples(case: Case) -> None:
    case.drafter.reset(seed=1)
    batch = case.batch(case.sample(24, seed=14), case.sample(18, seed=15))
    optimizer = torch.optim.AdamW(case.drafter.parameters(), lr=3e-3, weight_decay=0.0)
    floor, losses = least_loss(case, batch), []
    for _ in range(40):
        optimizer.zero_grad()
        sums = case.losses(batch)
        (sums.total / sums.weight).backward()
        optimizer.step()
        losses.append(float((sums.total / sums.weight).detach()) - floor)
    assert losses[-1] < 0.7 * losses[0]
    assert all(math.isfinite(loss) for loss in losses)


def test_a_batch_without_a_valid_anchor_gives_zero_and_no_gradient(case: Case) -> None:
    batch = case.batch(case.sample(9, seed=16, supervised="000010100"), case.sample(5, seed=17, supervised="00000"))
    assert (batch.num_slots, batch.num_anchors) == (0, 0)
    sums = case.losses(batch)
    assert float(sums.total.detach()) == 0.0
    assert float(sums.weight) == (18.0 if case.kind.startswith("eagle3") else 0.0)
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


# Decoding


def ragged(blocks: DraftedBlocks) -> list[int]:
    """0, 1, .., K, 0, .. by place in the batch."""
    return [row % (blocks.block_size + 1) for row in range(blocks.num_requests)]


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
