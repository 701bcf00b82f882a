"""Every drafter kind on every target family, saved, loaded and exported: the same drafter bit by bit, or an error."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from draftsmith.drafters.base import Observation
from draftsmith.drafters.registry import load_drafter, read_drafter_config, save_drafter
from draftsmith.errors import ContractError
from draftsmith.jobs.export import export_deepspec
from draftsmith.nn.kv import FlatBatch
from draftsmith.targets.base import load_shared
from draftsmith.targets.families import FAMILIES
from tests.tiny_models import (
    KINDS,
    reference,
    save_tiny,
    tiny_drafter,
    tiny_folders,
)

__all__ = ["tiny_folders"]

CASES = [(kind, family) for kind in KINDS for family in FAMILIES]


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
