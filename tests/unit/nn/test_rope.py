"""Rotary positions of every family against Hugging Face's modules, what is refused, and their precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.gemma4.modeling_gemma4 import apply_rotary_pos_emb as rotate_gemma4
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotate_llama
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb as rotate_qwen3

from draftsmith.errors import TargetError
from draftsmith.nn.rope import Rope, rotate
from draftsmith.targets.base import load_shared
from draftsmith.targets.families import FAMILIES
from tests.hugging_face_layers import rotary
from tests.tiny_models import random_model, tiny_config, tiny_drafter

SHORT, LONG = [1.0, 1.5, 2.0, 2.5, 3.0, 3.5], [2.0, 3.0, 5.0, 7.0, 11.0, 13.0]
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 100000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn, own scale": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0,
                        "original_max_position_embeddings": 128, "attention_factor": 0.7, "truncate": False},
    "proportional": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5, "factor": 2.0},
}  # fmt: skip
GROWING: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "longrope": {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "short_factor": SHORT,
                 "long_factor": LONG, "original_max_position_embeddings": 128},
}  # fmt: skip


def config_of(family: str, variant: dict[str, Any], *, sliding: dict[str, Any] | None = None) -> Any:
    """A tiny config with this variant; in Gemma4 that of its full-attention layers, its sliding ones have another.

    It is put in afterwards: Hugging Face itself does not make a Gemma4 config with LongRoPE.
    """
    config = tiny_config(family)
    config.rope_parameters = dict(variant)
    if family == "gemma4":
        other = sliding or {"rope_type": "default", "rope_theta": 77.0}
        config.rope_parameters = {"sliding_attention": dict(other), "full_attention": dict(variant)}
    return config


def family_rope(family: str, config: Any) -> Rope:
    frequencies, scale = FAMILIES[family].rope(FAMILIES[family].text_config(config))
    return Rope(frequencies, scale=scale)


def hugging_face_rotation(family: str, heads: Tensor, *, cos: Tensor, sin: Tensor) -> Tensor:
    """heads [1, n, H, E] as the family's own attention turns queries and keys."""
    cos, sin = cos.to(heads.dtype), sin.to(heads.dtype)
    if family == "gemma4":
        turned: Tensor = rotate_gemma4(heads, cos, sin, unsqueeze_dim=2)
        return turned
    turn = {"llama": rotate_llama, "qwen3": rotate_qwen3}[family]
    queries, keys = turn(heads.transpose(1, 2), heads.transpose(1, 2), cos, sin)
    assert torch.equal(queries, keys)
    return queries.transpose(1, 2)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_rotation_is_hugging_faces_for_every_variant(family: str, variant: str) -> None:
    """At positions near and far, in float32 and, to the bit, in bfloat16."""
    config = config_of(family, VARIANTS[variant])
    positions = torch.tensor([[0, 1, 5, 100, 511, 40_000]])
    heads = torch.randn(1, 6, 3, 16 if family == "gemma4" else 12, generator=torch.Generator().manual_seed(0))
    cos, sin = family_rope(family, config)(positions)
    theirs = rotary(family, config, positions)
    expected = hugging_face_rotation(family, heads, cos=theirs[0], sin=theirs[1])
    torch.testing.assert_close(rotate(heads, cos=cos, sin=sin), expected, rtol=0, atol=1e-6)
    expected = hugging_face_rotation(family, heads.bfloat16(), cos=theirs[0], sin=theirs[1])
    assert torch.equal(rotate(heads.bfloat16(), cos=cos, sin=sin), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_yarn_scales_the_rotation(family: str) -> None:
    scale = family_rope(family, config_of(family, VARIANTS["yarn"])).scale
    assert scale == pytest.approx(0.1 * np.log(4) + 1)
    assert family_rope(family, config_of(family, VARIANTS["yarn, own scale"])).scale == 0.7


@pytest.mark.parametrize("kind", GROWING)
@pytest.mark.parametrize("family", FAMILIES)
def test_frequencies_that_depend_on_the_length_are_refused_by_name(family: str, kind: str) -> None:
    """Of a target, and of a drafter that brings a config of its own."""
    config = config_of(family, GROWING[kind])
    for reading in (FAMILIES[family].text_config, FAMILIES[family].rope):
        with pytest.raises(
            TargetError, match=rf"got rope_type {kind}, expected .*yarn.*\(config.json: rope_parameters\)"
        ):
            reading(config)


@pytest.mark.parametrize("kind", GROWING)
def test_they_are_refused_in_gemma4s_sliding_layers_too(kind: str) -> None:
    """No draft layer has them, but the target's own hidden states would depend on the batch."""
    config = config_of("gemma4", VARIANTS["default"], sliding=GROWING[kind])
    with pytest.raises(TargetError, match=f"got rope_type {kind}"):
        FAMILIES["gemma4"].text_config(config)


@pytest.mark.parametrize("kind", GROWING)
def test_what_is_refused_would_turn_a_kept_key_otherwise_later(kind: str) -> None:
    """Hugging Face turns position 5 by other angles once the longest position of the batch is far away."""
    module = LlamaRotaryEmbedding(config_of("llama", GROWING[kind]))
    alone, later = module(torch.zeros(1), torch.tensor([[5]])), module(torch.zeros(1), torch.tensor([[5, 2000]]))
    assert float((alone[0][0, 0] - later[0][0, 0]).abs().max()) > 0.01


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_part_of_a_head_turns_in_proportional_ropes_alone(family: str, kind: str) -> None:
    """Hugging Face's own layers cannot run the others."""
    config = config_of(family, {**VARIANTS[kind], "partial_rotary_factor": 0.5})
    with pytest.raises(TargetError, match=rf"partial_rotary_factor.*got 0.5 in a rope_type {kind}"):
        FAMILIES[family].text_config(config)


def test_an_unknown_type_is_refused_by_name() -> None:
    config = tiny_config("llama")
    config.rope_parameters = {**config.rope_parameters, "rope_type": "axial"}
    with pytest.raises(TargetError, match="got rope_type axial"):
        FAMILIES["llama"].text_config(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_whoever_reads_the_folder_refuses_it(family: str, tmp_path: Path) -> None:
    folder = tmp_path / family
    random_model(config_of(family, GROWING["dynamic"]), seed=0).save_pretrained(folder)
    with pytest.raises(TargetError, match="got rope_type dynamic"):
        load_shared(folder, family=FAMILIES[family])
    with pytest.raises(TargetError, match="got rope_type dynamic"):
        tiny_drafter("dflash", folder, seed=0)


def test_frequencies_stay_float32_in_a_bfloat16_drafter() -> None:
    """At position 4000 a frequency rounded to bfloat16 turns a head by radians."""
    rope = family_rope("llama", tiny_config("llama"))
    exact = 10000.0 ** (-np.arange(0, 12, 2) / 12) * 4000
    for cast in (rope.to(torch.bfloat16), rope.bfloat16(), rope.to("cpu", torch.bfloat16)):
        cos, sin = cast(torch.tensor([4000]))
        np.testing.assert_allclose(cos[0, :6].double().numpy(), np.cos(exact), atol=1e-3)
        np.testing.assert_allclose(sin[0, :6].double().numpy(), np.sin(exact), atol=1e-3)


def test_angles_of_positions_by_hand() -> None:
    """Two frequencies, 1 and 0.1: a head (1, 0, 0, 1) at position 3."""
    cos, sin = Rope(torch.tensor([1.0, 0.1]), scale=1.0)(torch.tensor([3]))
    got = rotate(torch.tensor([[[1.0, 0.0, 0.0, 1.0]]]), cos=cos, sin=sin)[0, 0]
    expected = [np.cos(3.0), -np.sin(0.3), np.sin(3.0), np.cos(0.3)]
    np.testing.assert_allclose(got.numpy(), expected, atol=1e-6)
