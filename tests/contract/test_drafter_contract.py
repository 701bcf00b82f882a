"""What every drafter kind must do on every target family; a new kind or family adds a line to `CASES`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.cache.reader import CachedSample
from draftsmith.decoding.engine import Engine, LengthPolicy, Request, verify_all
from draftsmith.drafters.base import LossSums, Observation, Proposal
from draftsmith.drafters.dflash import DFlash
from draftsmith.drafters.registry import load_drafter, save_drafter
from draftsmith.errors import ContractError
from draftsmith.nn.block import BlockBatch, candidate_anchors
from draftsmith.nn.kv import FlatBatch, KeyValueRows
from draftsmith.params import Sampling
from draftsmith.targets.base import load_shared
from draftsmith.targets.families import FAMILIES
from draftsmith.training.loader import make_block_batch
from tests.tiny_models import (
    END_TOKEN,
    VOCAB,
    WEIGHTS,
    batch_shape,
    hugging_face_greedy,
    make_sample,
    random_ids,
    reference,
    tiny_drafter,
    tiny_folders,
    tiny_target,
    widened,
)

__all__ = ["tiny_folders"]

CASES = [(kind, family) for kind in ("dspark", "dflash") for family in FAMILIES]
SIZE = 4
CPU = torch.device("cpu")


@dataclass
class Case:
    """A drafter kind on a family's tiny target: its folder, Hugging Face's model of it, and a random drafter."""

    kind: str
    folder: Path
    model: Any
    drafter: DFlash

    def losses(self, batch: BlockBatch) -> LossSums:
        row = WEIGHTS[self.kind]
        return self.drafter.losses(
            batch, ce_weight=row.ce, tv_weight=row.tv, confidence_weight=row.confidence
        )

    def sample(self, length: int, *, seed: int, supervised: str | None = None) -> CachedSample:
        """A random text of `length` tokens; by default all but the first three are supervised."""
        mask = [int(letter) for letter in supervised or "0" * 3 + "1" * (length - 3)]
        return make_sample(self.model, random_ids(length, seed=seed), supervised=mask, name=f"s{seed}/t0")


@pytest.fixture(params=CASES, ids=lambda case: "-".join(case))
def case(request: pytest.FixtureRequest, tiny_folders: dict[str, Path]) -> Case:
    kind, family = request.param
    folder = tiny_folders[family]
    return Case(kind, folder, reference(folder), tiny_drafter(kind, folder, seed=7, block_size=SIZE))


def batch_of(*samples: CachedSample, seed: int = 0, num_anchors: int = 64) -> BlockBatch:
    return make_block_batch([(sample, 0) for sample in samples], shape=batch_shape(block_size=SIZE, num_anchors=num_anchors), seed=seed)  # fmt: skip


# Training form and decoding form


@dataclass
class Drafted:
    """Decoding of one block with true tokens put in for sampled ones: logits [K, V], confidence logits [K] or None."""

    logits: Tensor
    confidence: Tensor | None


class StepByStep:
    """The decoding form of a drafter over one or more samples, fed in uneven pieces, with teacher forcing."""

    def __init__(self, drafter: DFlash, samples: list[CachedSample]) -> None:
        self.drafter, self.samples = drafter, samples
        self.rows: KeyValueRows = drafter.new_rows()
        self.shown = [0] * len(samples)

    def show(self, stops: list[int], *, pieces: int) -> None:
        """Observe each sample up to its stop, in up to `pieces` pieces of different sizes."""
        for piece in range(1, pieces + 1):
            live = []
            for slot, stop in enumerate(stops):
                end = stop if piece == pieces else min(stop, self.shown[slot] + 1 + (3 * piece + 2 * slot) % 5)
                if end > self.shown[slot]:
                    live.append((slot, self.shown[slot], end))
            if live:
                self._observe(live)

    def _observe(self, live: list[tuple[int, int, int]]) -> None:
        batch = FlatBatch.make(
            [start for _, start, _ in live],
            counts=[end - start for _, start, end in live],
            slots=[slot for slot, _, _ in live],
            device=CPU,
        )
        ids = [torch.from_numpy(self.samples[slot].input_ids[start:end]).long() for slot, start, end in live]
        captured = [widened(self.samples[slot].context[start:end]) for slot, start, end in live]
        hidden = torch.zeros(batch.num_tokens, captured[0].shape[-1])  # no block drafter reads the last hidden state
        self.drafter.observe(Observation(torch.cat(ids), torch.cat(captured), hidden, batch), rows=self.rows)
        for slot, _, end in live:
            self.shown[slot] = end

    def propose(self, anchors: list[int]) -> list[Drafted]:
        """Draft at one anchor per sample, each slot's token replaced by the true one."""
        seen: list[Tensor] = []

        def sample_true(logits: Tensor, slot: int) -> tuple[Tensor, None]:
            seen.append(logits)
            assert slot == len(seen) - 1
            return torch.tensor([self._true(r, anchor + slot + 1) for r, anchor in enumerate(anchors)]), None

        firsts = torch.tensor([int(sample.input_ids[a]) for sample, a in zip(self.samples, anchors, strict=True)])
        proposal: Proposal = self.drafter.propose(firsts, positions=anchors, rows=self.rows, sample=sample_true)
        assert proposal.probabilities is None
        logits = torch.stack(seen, dim=1)
        assert logits.dtype == torch.float32
        confidence = proposal.confidence_logits
        return [Drafted(logits[r], None if confidence is None else confidence[r]) for r in range(len(anchors))]

    def _true(self, row: int, position: int) -> int:
        ids = self.samples[row].input_ids
        return int(ids[position]) if position < len(ids) else 0


def expected_losses(case: Case, blocks: Iterator[tuple[CachedSample, int, Drafted]]) -> dict[str, Any]:
    """The loss of section 6 in float64 from step-by-step logits, slot after slot in the batch's order."""
    head = case.model.get_output_embeddings().weight.detach().double()
    softcap = case.model.config.to_dict().get("final_logit_softcapping")
    ce, tv, bce, weight = 0.0, 0.0, 0.0, 0.0
    acceptance, correct, confidence = [], [], []
    for sample, anchor, drafted in blocks:
        rows = dict(zip(sample.label_positions.tolist(), widened(sample.last_hidden).double(), strict=True))
        for slot in range(SIZE):
            label_at = anchor + slot + 1
            if label_at >= len(sample.input_ids) or not sample.supervised[anchor : label_at + 1].all():
                break
            draft = drafted.logits[slot].double().softmax(-1)
            wanted = rows[anchor + slot] @ head.T
            wanted = (wanted if softcap is None else softcap * (wanted / softcap).tanh()).softmax(-1)
            label, w = int(sample.input_ids[label_at]), math.exp(-slot / 4.0)
            accept = float(torch.minimum(draft, wanted).sum())
            ce += -w * math.log(float(draft[label]))
            tv += w * float((draft - wanted).abs().sum())
            weight += w
            acceptance.append(accept)
            correct.append(int(draft.argmax()) == label)
            if drafted.confidence is not None:
                c = 1 / (1 + math.exp(-float(drafted.confidence[slot])))
                bce -= w * (accept * math.log(c) + (1 - accept) * math.log(1 - c))
                confidence.append(c)
    row = WEIGHTS[case.kind]
    return {
        "total": row.ce * ce + row.tv * tv + row.confidence * bce, "ce": ce, "tv": tv, "bce": bce, "weight": weight,
        "acceptance": acceptance, "correct": correct, "confidence": confidence,
    }  # fmt: skip


def check_losses(losses: LossSums, expected: dict[str, Any]) -> None:
    for name in ("total", "ce", "tv", "weight"):
        assert float(getattr(losses, name)) == pytest.approx(expected[name], rel=1e-4), name
    np.testing.assert_allclose(losses.acceptance.numpy(), expected["acceptance"], atol=1e-5)
    assert losses.correct.tolist() == expected["correct"]
    if losses.confidence is None:
        assert losses.bce is None
        assert not expected["confidence"]
    else:
        assert losses.bce is not None
        assert float(losses.bce) == pytest.approx(expected["bce"], rel=1e-4)
        np.testing.assert_allclose(losses.confidence.numpy(), expected["confidence"], atol=1e-5)


def test_the_training_form_is_the_decoding_form(case: Case) -> None:
    """Every anchor of three samples, drafted one after the other on rows that are never rebuilt.

    The samples sit side by side in the rows at different lengths; a run in the first one ends early.
    """
    samples = [case.sample(22, seed=1, supervised="0001111111100111111111"), case.sample(13, seed=2), case.sample(17, seed=3)]  # fmt: skip
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
    anchors = batch.block_positions[0, ::SIZE].tolist()
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
    before = states(case, batch)
    for changed in (0, 3, before.shape[0] - 1):
        for slot in (0, SIZE - 1):
            ids = batch.block_ids.clone()
            ids[0, changed * SIZE + slot] = (ids[0, changed * SIZE + slot] + 5) % VOCAB
            moved = (states(case, BlockBatch(**{**vars(batch), "block_ids": ids})) - before).abs().amax(-1)
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
    for part in ("missing norm.weight", "missing layers.1.mlp.up_proj.weight", "extra fc.bias",
                 "fc.weight is [32, 95], expected [32, 96]", str(tmp_path)):  # fmt: skip
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
    check_answers(Engine(target, drafter=drafter, end_ids=[END_TOKEN], batch_size=batch_size, policy=policy), case.folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_decoding_is_hugging_faces(family: str, tiny_folders: dict[str, Path]) -> None:
    folder = tiny_folders[family]
    for batch_size in (1, 3):
        check_answers(Engine(tiny_target(folder), drafter=None, end_ids=[END_TOKEN], batch_size=batch_size), folder)
