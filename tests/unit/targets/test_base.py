"""Targets: one forward over flat rows against Hugging Face's own model, whatever the batch; and loading by name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.errors import TargetError
from draftsmith.nn.kv import FlatBatch
from draftsmith.targets.base import SharedWeights, Target, TargetOutput, load_shared, load_target, read_tensors
from draftsmith.targets.families import FAMILIES
from draftsmith.targets.fetch import load_chat_format
from tests.target_fixtures import real_target
from tests.tiny_models import (
    CAPTURED,
    HIDDEN,
    VARIANTS,
    VOCAB,
    loaded_real_target,
    random_ids,
    reference,
    save_tiny,
    tiny_folders,
    tiny_target,
    variant_folders,
)

__all__ = ["real_target", "tiny_folders", "variant_folders"]

PROMPTS = [
    "What is the capital of France?",
    "Hi",
    "Write a function that adds two numbers, and explain it in one line.",
    "2 + 2 =",
    "Name three colours.",
    "Who are you?",
    "Tell me a short story about a fox.",
    "Why is the sky blue?",
]


def prefill(target: Target, prompts: list[list[int]]) -> list[TargetOutput]:
    """One flat pass over all prompts, cut back into one output a prompt."""
    batch = FlatBatch.make(
        [0] * len(prompts), counts=[len(ids) for ids in prompts], slots=range(len(prompts)), device=target.device
    )
    flat = torch.tensor([token for ids in prompts for token in ids])
    output = target.forward(flat, batch=batch, rows=target.new_rows())
    sizes = list(batch.counts)
    return [
        TargetOutput(*both) for both in zip(output.captured.split(sizes), output.last_hidden.split(sizes), strict=True)
    ]


@pytest.fixture
def made(request: pytest.FixtureRequest, tiny_folders: dict[str, Path], variant_folders: dict[str, Path]) -> Path:
    """The folder of a make of target by its name."""
    folder: Path = {**tiny_folders, **variant_folders}[request.param]
    return folder


@pytest.mark.parametrize("made", ["llama", "qwen3", *VARIANTS], indirect=True)
def test_ragged_rounds_with_rollback_equal_one_full_pass(made: Path) -> None:
    """Wrong tokens are written behind the right ones and covered again; every step agrees with a full recompute.

    The texts are longer than the window of the makes that have one.
    """
    target, model = tiny_target(made), reference(made)
    texts = [random_ids(30, seed=seed) for seed in range(3)]
    rows = target.new_rows()
    steps = [
        ([0, 0, 0], [5, 2, 9], 0),
        ([5, 2, 9], [4, 3, 1], 2),
        ([7, 3, 10], [5, 1, 5], 3),
        ([9, 4, 12], [1, 4, 2], 0),
    ]
    for starts, counts, num_wrong in steps:
        ids, right = [], []
        for text, start, count in zip(texts, starts, counts, strict=True):
            wrong = min(num_wrong, count - 1)
            ids += [
                *text[start : start + count - wrong],
                *[(token + 7) % VOCAB for token in text[start + count - wrong : start + count]],
            ]
            right += [True] * (count - wrong) + [False] * wrong
        batch = FlatBatch.make(starts, counts=counts, slots=range(3), device=target.device)
        output = target.forward(torch.tensor(ids), batch=batch, rows=rows)
        expected_hidden, expected_captured = [], []
        for text, start, count in zip(texts, starts, counts, strict=True):
            with torch.inference_mode():
                full = model(torch.tensor([text]), output_hidden_states=True)
            part = slice(start, start + count)
            expected_hidden.append(full.hidden_states[-1][0, part])
            expected_captured.append(torch.stack([full.hidden_states[k + 1][0, part] for k in CAPTURED], dim=1))
        keep = torch.tensor(right)
        for got, expected in ((output.last_hidden, expected_hidden), (output.captured, expected_captured)):
            torch.testing.assert_close(got[keep], torch.cat(expected)[keep], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("made", ["llama", "qwen3", *VARIANTS], indirect=True)
def test_logits_are_hugging_faces(made: Path) -> None:
    target, model = tiny_target(made), reference(made)
    ids = random_ids(17, seed=4)
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    got = target.logits(prefill(target, [ids])[0].last_hidden)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def worst_error(got: Tensor, expected: Tensor) -> float:
    """Largest difference in any row [..., D], in units of the row's bound.

    float32: 1e-5 of the row's root mean square; bfloat16 (8 significant bits): two units in its last place.
    """
    size = expected.double().square().mean(-1).sqrt()
    bound = 1e-5 * size if expected.dtype == torch.float32 else 2 * 2.0 ** (size.log2().floor() - 7)
    return float(((got.double() - expected.double()).abs().amax(-1) / bound).max())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_hidden_states_of_the_real_target_do_not_depend_on_the_batch(real_target: Path, dtype: str) -> None:
    """Alone, eight at once and shuffled."""
    target = loaded_real_target(real_target, dtype)
    chat = load_chat_format(real_target)
    prompts = [chat.prompt_ids([text], [], system_prompt=None) for text in PROMPTS]
    together = prefill(target, prompts)
    order = [5, 2, 7, 0, 3, 6, 1, 4]
    shuffled = dict(zip(order, prefill(target, [prompts[index] for index in order]), strict=True))
    worst = 0.0
    for index in (1, 2, 6):
        alone = prefill(target, [prompts[index]])[0]
        for other in (together[index], shuffled[index]):
            worst = max(worst, worst_error(other.captured, alone.captured))
            worst = max(worst, worst_error(other.last_hidden, alone.last_hidden))
    assert worst <= 1


TIED = {
    "llama": True,
    "qwen3": False,
    "llama, untied, biases": False,
    "qwen3, tied, biases, yarn": True,
    "gemma4, tied, biases, own values": True,
}


@pytest.mark.parametrize(("made", "tied"), TIED.items(), indirect=["made"])
def test_shared_weights_are_read_without_the_model(made: Path, tied: bool) -> None:
    shared, model = load_shared(made, family=FAMILIES[made.name]), reference(made)
    assert torch.equal(shared.embedding, model.get_input_embeddings().weight)
    assert torch.equal(shared.head, model.get_output_embeddings().weight)
    assert (shared.head is shared.embedding) == tied
    moved = shared.to(dtype=torch.bfloat16, device=torch.device("cpu"))
    assert moved.embedding.dtype == torch.bfloat16
    assert (moved.head is moved.embedding) == tied
    loaded = tiny_target(made).shared
    assert torch.equal(loaded.embedding, shared.embedding)
    assert torch.equal(loaded.head, shared.head)


def test_shared_weights_scale_and_cap_where_a_family_does() -> None:
    """By hand: embeddings times 2, and logits capped at 5: 5 tanh(x / 5)."""
    shared = SharedWeights(torch.eye(3), torch.tensor([[1.0, 0, 0], [0, 10.0, 0]]), 2.0, 5.0)
    assert shared.embed(torch.tensor([1])).tolist() == [[0.0, 2.0, 0.0]]
    got = shared.logits(torch.tensor([[1.0, 1.0, 0.0]]))
    torch.testing.assert_close(got, torch.tensor([[0.98687660, 4.82013790]]))


def test_a_target_of_another_family_is_refused_by_name(tiny_folders: dict[str, Path]) -> None:
    with pytest.raises(TargetError, match=r"another family .*got qwen3, expected llama .*targets.<name>.family"):
        load_target(tiny_folders["qwen3"], family=FAMILIES["llama"], capture_layers=[0], dtype="float32", device="cpu")


def test_a_folder_that_is_no_target_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=f"no config.json.*{tmp_path}"):
        load_target(tmp_path, family=FAMILIES["llama"], capture_layers=[0], dtype="float32", device="cpu")


def broken_copy(source: Path, folder: Path, *, without: str | None = None, cut: str | None = None) -> Path:
    """A copy whose weights lack one tensor, or have one of another shape."""
    shutil.copytree(source, folder)
    file = next(folder.glob("*.safetensors"))
    tensors = load_file(file)
    if without is not None:
        del tensors[without]
    if cut is not None:
        tensors[cut] = tensors[cut][:-1].contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def test_missing_weights_are_refused_by_name(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    family, name = FAMILIES["qwen3"], "model.layers.1.mlp.up_proj.weight"
    folder = broken_copy(tiny_folders["qwen3"], tmp_path / "lacking", without=name)
    with pytest.raises(TargetError, match=name):
        load_target(folder, family=family, capture_layers=[0], dtype="float32", device="cpu")
    folder = broken_copy(tiny_folders["qwen3"], tmp_path / "cut", cut=name)
    with pytest.raises(TargetError, match=str(folder)):
        load_target(folder, family=family, capture_layers=[0], dtype="float32", device="cpu")
    next(folder.glob("*.safetensors")).unlink()
    with pytest.raises(TargetError, match=str(folder)):
        load_target(folder, family=family, capture_layers=[0], dtype="float32", device="cpu")
    with pytest.raises(TargetError, match="without weights"):
        read_tensors(folder, [name])


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_shared_weights_that_are_missing_are_refused_by_name(
    name: str, tiny_folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = broken_copy(tiny_folders["qwen3"], tmp_path / "lacking", without=name)
    with pytest.raises(TargetError, match=name):
        load_shared(folder, family=FAMILIES["qwen3"])


def test_truncated_weights_are_refused_by_name(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, family="llama", seed=0)
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(TargetError, match=str(folder)):
        load_target(folder, family=FAMILIES["llama"], capture_layers=[0], dtype="float32", device="cpu")
    with pytest.raises(TargetError, match=str(file)):
        load_shared(folder, family=FAMILIES["llama"])


def test_the_target_is_frozen(tiny_folders: dict[str, Path]) -> None:
    target = tiny_target(tiny_folders["llama"])
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    assert target.shared.embedding.shape == (VOCAB, HIDDEN)
    assert not target.shared.head.requires_grad
