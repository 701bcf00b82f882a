"""What every drafter kind must do on every target family; a new kind or family adds a line to `CASES`."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from draftsmith.decoding.engine import Engine, LengthPolicy, Request, verify_all
from draftsmith.drafters.base import Observation
from draftsmith.drafters.registry import load_drafter, read_drafter_config, save_drafter
from draftsmith.errors import ContractError
from draftsmith.jobs.export import export_deepspec
from draftsmith.nn.block import BlockBatch, candidate_anchors
from draftsmith.nn.kv import FlatBatch
from draftsmith.params import Sampling
from draftsmith.targets.base import load_shared
from draftsmith.targets.families import FAMILIES
from tests.contract.drafter_case import Case, Drafted, StepByStep, check_losses, expected_losses
from tests.tiny_models import (
    END_TOKEN,
    KINDS,
    VOCAB,
    hugging_face_greedy,
    random_ids,
    reference,
    save_tiny,
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
        found = case.losses(case.batch(*samples))
    check_losses(found, expected_losses(case, ordered))
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


# Folders


@pytest.fixture(scope="session")
def deep_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny targets of seven layers, of which five are captured: an EAGLE-3 drafter reads no fewer in its saved form."""
    folder, kinds = tmp_path_factory.mktemp("deep"), [*["sliding_attention"] * 6, "full_attention"]
    return {
        family: save_tiny(
            folder,
            family=family,
            seed=seed,
            num_hidden_layers=7,
            **({"layer_types": kinds} if family == "gemma4" else {}),
        )
        for seed, family in enumerate(FAMILIES)
    }


@dataclass
class Kept:
    """A random drafter that is to be saved, and the folder of its target."""

    drafter: Any
    target: Path

    def load(self, folder: Path) -> Any:
        shared = load_shared(self.target, family=FAMILIES[self.target.name])
        return load_drafter(folder, target_folder=self.target, shared=shared, dtype=torch.float32)

    def save(self, folder: Path) -> dict[str, Tensor]:
        """Save it; returns the tensors of the file."""
        save_drafter(self.drafter, folder=folder, dtype=torch.float32)
        return load_file(folder / "model.safetensors")


@pytest.fixture(params=[*CASES, ("dspark, head norms", "llama")], ids=lambda case: "-".join(case))
def kept(request: pytest.FixtureRequest, deep_folders: dict[str, Path]) -> Kept:
    kind, family = request.param
    head_norms, kind = "head norms" in kind or family != "llama", kind.partition(",")[0]
    target = deep_folders[family]
    drafter = tiny_drafter(kind, target, seed=7, head_norms=head_norms, capture_layers=(0, 1, 2, 4, 5), num_layers=7)
    return Kept(drafter.eval().requires_grad_(False), target)


def drafts(drafter: Any) -> list[Tensor]:
    """What a drafter proposes for two requests, of 9 and 4 tokens: tokens, logits of every slot, confidence."""
    generator, config = torch.Generator().manual_seed(1), drafter.config
    rows, size = drafter.new_rows(), config.geometry.hidden_size
    batch = FlatBatch.make([0, 0], counts=[9, 4], slots=[0, 1], device=torch.device("cpu"))
    captured = torch.randn(13, len(config.capture_layers), size, generator=generator)
    hidden = torch.randn(13, size, generator=generator)
    drafter.observe(Observation(torch.arange(13) + 5, captured, hidden, batch), rows=rows)
    seen: list[Tensor] = []

    def sample(logits: Tensor, _: int) -> tuple[Tensor, None]:
        seen.append(logits)
        return logits.argmax(-1), None

    proposal = drafter.propose(torch.tensor([21, 33]), positions=[9, 4], rows=rows, sample=sample)
    confidence = proposal.confidence_logits
    return [proposal.tokens, *seen, *([] if confidence is None else [confidence])]


def check_same_drafter(own: Any, other: Any) -> None:
    """The same config and, bit by bit, weights and drafts."""
    assert own.config == other.config
    state, again = own.state_dict(), other.state_dict()
    assert state.keys() == again.keys()
    assert all(torch.equal(state[name], again[name]) for name in state)
    first, second = drafts(own), drafts(other)
    assert len(first) == len(second) > own.config.block_size
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))


def test_a_saved_drafter_is_loaded_bit_by_bit(kept: Kept, tmp_path: Path) -> None:
    stored = kept.save(tmp_path)
    assert stored.keys() == kept.drafter.state_dict().keys()
    again = kept.load(tmp_path)
    check_same_drafter(kept.drafter, again)
    assert not any(parameter.requires_grad for parameter in again.parameters())


def test_its_config_alone_says_what_it_is(kept: Kept, tmp_path: Path) -> None:
    kept.save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    config = read_drafter_config(tmp_path)
    assert config == kept.drafter.config
    # Hugging Face reads the same layers and positions from it, as DeepSpec's classes do.
    theirs, family = AutoConfig.from_pretrained(tmp_path, local_files_only=True), FAMILIES[config.family]
    assert (theirs.num_hidden_layers, theirs.vocab_size) == (config.num_layers, config.vocab_size)
    if not any(config.windows):
        assert family.geometry(theirs) == config.geometry
        frequencies, _ = family.rope(theirs)
        torch.testing.assert_close(frequencies, kept.drafter.rope.inverse_frequencies, rtol=0, atol=0)


def test_an_exported_directory_is_loaded_bit_by_bit(kept: Kept, tmp_path: Path) -> None:
    own, out = kept.save(tmp_path / "own"), tmp_path / "out"
    exported = export_deepspec(tmp_path / "own", out=out, target=kept.target, family=FAMILIES[kept.target.name])
    whole = load_file(out / "model.safetensors")
    assert whole.keys() - own.keys() == {"embed_tokens.weight", "lm_head.weight"}
    model = reference(kept.target)
    assert torch.equal(whole["embed_tokens.weight"], model.get_input_embeddings().weight)
    assert torch.equal(whole["lm_head.weight"], model.get_output_embeddings().weight)
    assert (out / "config.json").read_text() == (tmp_path / "own" / "config.json").read_text()
    assert exported.num_bytes == (out / "model.safetensors").stat().st_size
    check_same_drafter(kept.drafter, kept.load(out))


def test_weights_that_do_not_fit_are_all_listed(kept: Kept, tmp_path: Path) -> None:
    tensors = kept.save(tmp_path)
    del tensors["norm.weight"], tensors["layers.0.mlp.up_proj.weight"]
    tensors["other.bias"] = torch.zeros(3)
    query = tensors["layers.0.self_attn.q_proj.weight"]
    tensors["layers.0.self_attn.q_proj.weight"] = query[:, :-1].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ContractError) as caught:
        kept.load(tmp_path)
    shape = list(query.shape)
    for part in (
        "missing norm.weight",
        "missing layers.0.mlp.up_proj.weight",
        "extra other.bias",
        f"layers.0.self_attn.q_proj.weight is {[shape[0], shape[1] - 1]}, expected {shape}",
        str(tmp_path),
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize("damage", ["no weights", "cut weights", "no config", "half a config", "another class"])
def test_a_folder_that_cannot_be_read_is_named(kept: Kept, tmp_path: Path, damage: str) -> None:
    kept.save(tmp_path)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    body = json.loads(config.read_text())
    if damage == "no weights":
        weights.unlink()
    elif damage == "cut weights":
        weights.write_bytes(weights.read_bytes()[:100])
    elif damage == "no config":
        config.unlink()
    elif damage == "half a config":
        config.write_text(json.dumps({"architectures": body["architectures"], "hidden_size": body["hidden_size"]}))
    else:
        config.write_text(json.dumps({**body, "architectures": ["Qwen3ForCausalLM"]}))
    with pytest.raises(ContractError, match=str(tmp_path)):
        kept.load(tmp_path)


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
