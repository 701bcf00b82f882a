"""Draft layers against Hugging Face's own layers of the family, and both of their forms against each other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from draftsmith.errors import TargetError
from draftsmith.nn.attention import MaskedAttention
from draftsmith.nn.kv import FlatBatch, KeyValueRows
from draftsmith.nn.layers import STYLES, DraftLayer, LayerGeometry, Mlp, RMSNorm
from draftsmith.nn.rope import Rope
from draftsmith.targets.families import FAMILIES
from tests.hugging_face_layers import causal, family_layer, rotary, run_layer
from tests.tiny_models import GEMMA4_ROPE, HIDDEN, LLAMA3, YARN, randomize, tiny_config

NUM = 9
CASES = [
    pytest.param("llama", "llama", {}, id="llama"),
    pytest.param("llama", "llama", {"attention_bias": True, "mlp_bias": True}, id="llama-biases"),
    pytest.param("llama", "llama", {"rope_parameters": YARN}, id="llama-yarn"),
    pytest.param("llama", "llama", {"head_dim": None, "num_key_value_heads": 1}, id="llama-head-size-by-division"),
    pytest.param("llama", "llama", {"hidden_act": "gelu_pytorch_tanh", "num_key_value_heads": 4}, id="llama-gelu"),
    pytest.param("llama", "qwen3", {}, id="llama-target-with-head-norms"),
    pytest.param(
        "llama",
        "qwen3",
        {"attention_bias": True, "rope_parameters": LLAMA3},
        id="llama-target-with-head-norms-and-biases",
    ),
    pytest.param("qwen3", "qwen3", {}, id="qwen3"),
    pytest.param("qwen3", "qwen3", {"attention_bias": True, "rope_parameters": YARN}, id="qwen3-biases-yarn"),
    pytest.param("gemma4", "gemma4", {}, id="gemma4"),
    pytest.param("gemma4", "gemma4", {"attention_bias": True, "rope_parameters": GEMMA4_ROPE}, id="gemma4-biases"),
    pytest.param("gemma4", "gemma4", {"attention_k_eq_v": False}, id="gemma4-own-values"),
    pytest.param("gemma4", "gemma4", {"num_global_key_value_heads": None}, id="gemma4-key-heads-as-elsewhere"),
]


@dataclass
class Pair:
    """Our layer (without and with a window of 3) and Hugging Face's of the same random weights, copied by name."""

    ours: DraftLayer
    windowed: DraftLayer
    theirs: Any
    rope: Rope
    family: str
    config: Any

    def expected(self, x: Tensor, *, mask: Tensor, positions: Tensor) -> Tensor:
        """x [B, n, D] through Hugging Face's layer, turned by its own rotary module."""
        return run_layer(self.theirs, x, mask=mask, rope=rotary(self.family, self.config, positions))


def pair(family: str, layer_family: str, changes: dict[str, Any]) -> Pair:
    """A Llama target with head norms in its drafter is Hugging Face's Qwen3 layer."""
    config = tiny_config(layer_family, attn_implementation="eager", **changes)
    theirs = family_layer(layer_family, config).requires_grad_(False)
    randomize(theirs, seed=1)
    own = tiny_config(family, **changes)
    geometry = replace(FAMILIES[family].geometry(own), head_norms=layer_family != "llama")
    layers = [STYLES[geometry.style].layer(geometry, window=window).requires_grad_(False) for window in (None, 3)]
    for layer in layers:
        layer.load_state_dict(theirs.state_dict(), strict=True)
    frequencies, scale = FAMILIES[family].rope(own)
    return Pair(layers[0], layers[1], theirs, Rope(frequencies, scale=scale), layer_family, config)


def inputs(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("family", "layer_family", "changes"), CASES)
def test_with_a_causal_mask_and_no_context_it_is_hugging_faces_layer(
    family: str, layer_family: str, changes: dict[str, Any]
) -> None:
    both = pair(family, layer_family, changes)
    x, positions = inputs(2, 2, NUM), torch.arange(40, 40 + NUM).expand(2, -1)
    expected = both.expected(x, mask=causal(NUM), positions=positions)
    got = both.ours(
        x,
        context=x[:, :0],
        attention=MaskedAttention(causal(NUM).expand(2, -1, -1)),
        block_rope=both.rope(positions),
        context_rope=both.rope(positions[:, :0]),
    )
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("family", "layer_family", "changes"), CASES)
def test_its_decoding_form_is_hugging_faces_layer_row_by_row(
    family: str, layer_family: str, changes: dict[str, Any]
) -> None:
    """A prefill, then ragged steps, without a window and with a shorter one than the rows."""
    both = pair(family, layer_family, changes)
    x, positions = inputs(2, 2, NUM), torch.arange(NUM).expand(2, -1)
    for layer, window in ((both.ours, None), (both.windowed, 3)):
        expected = both.expected(x, mask=causal(NUM, window=window), positions=positions)
        rows = KeyValueRows(1, dtype=x.dtype, device=x.device)
        for starts, stops in (((0, 0), (4, 5)), ((4, 5), (5, 8)), ((5, 8), (NUM, NUM))):
            counts = [stop - start for start, stop in zip(starts, stops, strict=True)]
            batch = FlatBatch.make(starts, counts=counts, slots=[0, 1], device=x.device)
            parts = [(row, slice(*ends)) for row, ends in enumerate(zip(starts, stops, strict=True))]
            flat = torch.cat([x[row, part] for row, part in parts])
            got = layer.decode(flat, layer=0, rows=rows, batch=batch, rope=both.rope(batch.positions))
            wanted = torch.cat([expected[row, part] for row, part in parts])
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("family", "layer_family", "changes"), CASES)
def test_context_enters_keys_and_values_without_the_input_norm(
    family: str, layer_family: str, changes: dict[str, Any]
) -> None:
    """Undo the norm: context rows equal to input_layernorm(x) are what Hugging Face's layer sees of a prefix x."""
    both = pair(family, layer_family, changes)
    x, prefix, positions = inputs(3, 1, NUM), 4, torch.arange(NUM).unsqueeze(0)
    mask = torch.ones(NUM, NUM, dtype=torch.bool)  # the last rows see everything, as a block its context and itself
    mask[:prefix, prefix:] = False
    expected = both.expected(x, mask=mask, positions=positions)
    got = both.ours(
        x[:, prefix:],
        context=both.theirs.input_layernorm(x[:, :prefix]),
        attention=MaskedAttention(torch.ones(1, NUM - prefix, NUM, dtype=torch.bool)),
        block_rope=both.rope(positions[:, prefix:]),
        context_rope=both.rope(positions[:, :prefix]),
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


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("activation", ["gelu", "relu", "swish"])
def test_another_activation_is_refused_by_name(family: str, activation: str) -> None:
    with pytest.raises(TargetError, match=rf"hidden_act: got {activation}, expected silu or gelu_pytorch_tanh"):
        FAMILIES[family].geometry(tiny_config(family, hidden_act=activation))
