"""Rotary positions against Hugging Face's modules, and their precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from draftsmith.nn.rope import Rope, rotate
from draftsmith.targets.families import FAMILIES
from tests.tiny_models import tiny_config

VARIANTS = [
    {"rope_type": "default", "rope_theta": 100000.0},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128},
]  # fmt: skip


def family_rope(config: Any) -> Rope:
    frequencies, scale = FAMILIES["llama"].rope(config)
    return Rope(frequencies, scale=scale)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant["rope_type"])
def test_rotation_is_hugging_faces_for_every_variant(variant: dict[str, Any]) -> None:
    config = tiny_config("llama", rope_parameters=variant)
    positions = torch.tensor([[0, 1, 5, 100, 511]])
    heads = torch.randn(1, 5, 3, 12, generator=torch.Generator().manual_seed(0))
    cos, sin = family_rope(config)(positions)
    expected, _ = apply_rotary_pos_emb(
        heads.transpose(1, 2), heads.transpose(1, 2), *LlamaRotaryEmbedding(config)(heads, positions)
    )
    torch.testing.assert_close(rotate(heads, cos=cos, sin=sin), expected.transpose(1, 2), rtol=0, atol=1e-6)


def test_yarn_scales_the_rotation() -> None:
    assert family_rope(tiny_config("llama", rope_parameters=VARIANTS[3])).scale == pytest.approx(0.1 * np.log(4) + 1)


def test_frequencies_stay_float32_in_a_bfloat16_drafter() -> None:
    """At position 4000 a frequency rounded to bfloat16 turns a head by radians."""
    rope = family_rope(tiny_config("llama"))
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
