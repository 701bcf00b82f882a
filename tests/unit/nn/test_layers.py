"""Parts of a draft layer against Hugging Face's own layers of the family, and both of its forms against each other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from draftsmith.nn.attention import MaskedAttention
from draftsmith.nn.kv import FlatBatch, KeyValueRows
from draftsmith.nn.layers import DraftLayer, LayerGeometry, Mlp, RMSNorm
from draftsmith.nn.rope import Rope
from draftsmith.targets.families import FAMILIES
from tests.tiny_models import HIDDEN, randomize, tiny_config

LAYERS = {"llama": LlamaDecoderLayer, "qwen3": Qwen3DecoderLayer}
NUM = 9
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
CASES = [
    pytest.param("llama", "llama", {}, id="llama"),
    pytest.param("llama", "llama", {"attention_bias": True, "mlp_bias": True}, id="llama-biases"),
    pytest.param("llama", "llama", {"rope_parameters": YARN}, id="llama-yarn"),
    pytest.param("llama", "qwen3", {}, id="llama-target-with-head-norms"),
    pytest.param("qwen3", "qwen3", {}, id="qwen3"),
    pytest.param("qwen3", "qwen3", {"attention_bias": True, "rope_parameters": YARN}, id="qwen3-biases-yarn"),
]


def pair(family: str, layer_family: str, changes: dict[str, Any]) -> tuple[DraftLayer, Any, Rope, Any]:
    """Our layer and Hugging Face's with the same random weights, the rotary table, and the config.

    A Llama target with head norms in its drafter is Hugging Face's Qwen3 layer.
    """
    config = tiny_config(layer_family, attn_implementation="eager", **changes)
    theirs = LAYERS[layer_family](config, 0).eval().requires_grad_(False)
    randomize(theirs, seed=1)
    geometry = replace(FAMILIES[family].geometry(tiny_config(family, **changes)), head_norms=layer_family == "qwen3")
    ours = DraftLayer(geometry).requires_grad_(False)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    frequencies, scale = FAMILIES[family].rope(tiny_config(family, **changes))
    return ours, theirs, Rope(frequencies, scale=scale), config


def inputs(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("family", "layer_family", "changes"), CASES)
def test_with_a_causal_mask_and_no_context_it_is_hugging_faces_layer(
    family: str, layer_family: str, changes: dict[str, Any]
) -> None:
    ours, theirs, rope, _ = pair(family, layer_family, changes)
    x, positions = inputs(2, 2, NUM), torch.arange(40, 40 + NUM).expand(2, -1)
    hidden_after = torch.full((NUM, NUM), float("-inf")).triu(1)
    cos, sin = rope(positions)
    expected = theirs(x, attention_mask=hidden_after.expand(2, 1, NUM, NUM), position_embeddings=(cos, sin))
    expected = expected[0] if isinstance(expected, tuple) else expected
    got = ours(
        x,
        context=x[:, :0],
        attention=MaskedAttention(torch.ones(NUM, NUM, dtype=torch.bool).tril().expand(2, -1, -1)),
        block_rope=(cos, sin),
        context_rope=rope(positions[:, :0]),
    )
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)

    batch = FlatBatch.make([0, 0], counts=[NUM, NUM], slots=[0, 1], device=x.device)
    rows = KeyValueRows(1, dtype=x.dtype, device=x.device)
    flat = ours.decode(x.flatten(0, 1), layer=0, rows=rows, batch=batch, rope=rope(positions.flatten()))
    torch.testing.assert_close(flat.view_as(expected), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("family", "layer_family", "changes"), CASES)
def test_context_enters_keys_and_values_without_the_input_norm(
    family: str, layer_family: str, changes: dict[str, Any]
) -> None:
    """Undo the norm: context rows equal to input_layernorm(x) are what Hugging Face's layer sees of a prefix x."""
    ours, theirs, rope, _ = pair(family, layer_family, changes)
    x, prefix = inputs(3, 1, NUM), 4
    positions = torch.arange(NUM).unsqueeze(0)
    cos, sin = rope(positions)
    mask = torch.zeros(NUM, NUM)
    mask[:prefix, prefix:] = float("-inf")  # the last rows see everything, as a block sees its context and itself
    expected = theirs(x, attention_mask=mask.expand(1, 1, NUM, NUM), position_embeddings=(cos, sin))
    expected = expected[0] if isinstance(expected, tuple) else expected
    got = ours(
        x[:, prefix:],
        context=theirs.input_layernorm(x[:, :prefix]),
        attention=MaskedAttention(torch.ones(1, NUM - prefix, NUM, dtype=torch.bool)),
        block_rope=rope(positions[:, prefix:]),
        context_rope=rope(positions[:, :prefix]),
    )
    torch.testing.assert_close(got, expected[:, prefix:], rtol=1e-5, atol=1e-5)


def test_norm_is_hugging_faces_in_both_precisions() -> None:
    ours, theirs = RMSNorm(HIDDEN, eps=1e-5), LlamaRMSNorm(HIDDEN, eps=1e-5)
    randomize(ours, seed=3)
    theirs.load_state_dict({"weight": ours.weight.detach()})
    x = inputs(4, 6) * 30
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-6, atol=1e-6)
    assert torch.equal(ours.bfloat16()(x.bfloat16()), theirs.bfloat16()(x.bfloat16()))


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_mlp_is_hugging_faces(activation: str) -> None:
    config = tiny_config("llama", hidden_act=activation, mlp_bias=True)
    geometry: LayerGeometry = FAMILIES["llama"].geometry(config)
    assert geometry.activation == activation
    ours, theirs = Mlp(geometry), LlamaMLP(config)
    randomize(ours, seed=5)
    theirs.load_state_dict(ours.state_dict(), strict=False)
    torch.testing.assert_close(ours(inputs(6, 7)), theirs(inputs(6, 7)), rtol=1e-6, atol=1e-6)
