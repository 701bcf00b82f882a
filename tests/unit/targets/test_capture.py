"""Which layer is captured: against Hugging Face's own hidden states, and on a target whose layers are marked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from draftsmith.errors import TargetError
from draftsmith.nn.kv import FlatBatch
from draftsmith.targets.base import Target
from draftsmith.targets.families import FAMILIES
from draftsmith.targets.fetch import load_chat_format
from tests.target_fixtures import real_target
from tests.tiny_models import (
    HIDDEN,
    LAYERS,
    loaded_real_target,
    random_ids,
    reference,
    tiny_config,
    tiny_folders,
    tiny_target,
)

__all__ = ["real_target", "tiny_folders"]


def captured(target: Target, ids: list[int]) -> torch.Tensor:
    """Captured states [N, L, D] of one prompt."""
    batch = FlatBatch.make([0], counts=[len(ids)], slots=[0], device=target.device)
    return target.forward(torch.tensor(ids), batch=batch, rows=target.new_rows()).captured


@pytest.mark.parametrize("layer_ids", [list(range(-1, LAYERS - 1)), [-1], [3], [0, 2]], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_layer_k_is_hidden_state_k_plus_one(family: str, layer_ids: list[int], tiny_folders: dict[str, Path]) -> None:
    ids = random_ids(11, seed=1)
    with torch.inference_mode():
        expected = reference(tiny_folders[family])(torch.tensor([ids]), output_hidden_states=True).hidden_states
    got = captured(tiny_target(tiny_folders[family], capture_layers=layer_ids), ids)
    assert got.shape == (11, len(layer_ids), expected[0].shape[-1])
    for place, layer in enumerate(layer_ids):
        torch.testing.assert_close(got[:, place], expected[layer + 1][0], rtol=1e-4, atol=1e-4)


def test_every_layer_of_the_real_target(real_target: Path) -> None:
    target = loaded_real_target(real_target, "float32")
    ids = load_chat_format(real_target).prompt_ids(["Why is the sky blue?"], [], system_prompt=None)
    model = AutoModelForCausalLM.from_pretrained(real_target, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    got = captured(target, ids)
    for place, layer in enumerate(range(-1, 29)):
        error = (got[:, place] - expected[layer + 1][0]).norm(dim=-1) / expected[layer + 1][0].norm(dim=-1)
        assert float(error.max()) < 1e-5, layer


def marked(config: Any, folder: Path) -> Path:
    """A target whose layer k adds a one at dimension k and nothing else, over an embedding of zeros.

    The one is the bias of its attention's output; where a norm follows (Gemma4), that norm gives it its size.
    """
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.zero_()
        for number, layer in enumerate(model.get_decoder().layers):
            layer.self_attn.o_proj.bias[number] = 1.0
            if folder.name == "gemma4":
                layer.post_attention_layernorm.weight.fill_((1 / HIDDEN + config.rms_norm_eps) ** 0.5)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_marked_layers_of_a_toy_catch_an_id_off_by_one(family: str, tmp_path: Path) -> None:
    """The state of id k is ones at 0..k: what layers 0..k have added. It is seen in a prefill and in later rounds."""
    folder = marked(tiny_config(family, attention_bias=True), tmp_path / family)
    for layer_ids in ([-1, 0, 1, 2, 3], [1, 3], [2], [-1, 3]):
        target = tiny_target(folder, capture_layers=layer_ids)
        rows = target.new_rows()
        for start, ids in ((0, [5, 6]), (2, [7]), (3, [8, 9, 5])):
            batch = FlatBatch.make([start], counts=[len(ids)], slots=[0], device=target.device)
            output = target.forward(torch.tensor(ids), batch=batch, rows=rows)
            expected = torch.stack([(torch.arange(HIDDEN) <= layer).float() for layer in layer_ids])
            torch.testing.assert_close(output.captured, expected.expand(len(ids), -1, -1), rtol=1e-5, atol=0)
            assert output.last_hidden[0].nonzero().flatten().tolist() == list(range(LAYERS))


@pytest.mark.parametrize("layer_ids", [[LAYERS - 1], [0, LAYERS - 1], [-2], [0, 7], [2, 1], [1, 1]], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_layer_and_impossible_ids_are_refused(
    family: str, layer_ids: list[int], tiny_folders: dict[str, Path]
) -> None:
    with pytest.raises(TargetError, match=r"capture layers: got .*expected strictly increasing ids in -1..3"):
        tiny_target(tiny_folders[family], capture_layers=layer_ids)


def test_a_capture_is_empty_after_it_was_taken(tiny_folders: dict[str, Path]) -> None:
    target = tiny_target(tiny_folders["llama"])
    first = captured(target, [3, 4, 5])
    with pytest.raises(KeyError):
        target.capture.take()
    assert torch.equal(captured(target, [3, 4, 5]), first)
