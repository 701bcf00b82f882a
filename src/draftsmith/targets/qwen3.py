"""Qwen3 targets: RMS head norms on queries and keys."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from draftsmith.nn.layers import LayerGeometry
from draftsmith.nn.rope import check_rope
from draftsmith.targets.base import Family, draft_activation


def text_config(config: Any) -> Any:
    """The config itself. Raises TargetError for rotary positions that rows of keys and values cannot keep."""
    check_rope(config.rope_parameters)
    return config


def geometry(config: Any) -> LayerGeometry:
    """The layer sizes of a Qwen3Config. Raises TargetError for an activation that draft layers lack."""
    return LayerGeometry(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_size=config.head_dim,
        norm_eps=config.rms_norm_eps,
        activation=draft_activation(config.hidden_act),
        attention_bias=config.attention_bias,
        mlp_bias=False,
        attention_scale=config.head_dim**-0.5,
        head_norms=True,
    )


def rope(config: Any) -> tuple[Tensor, float]:
    """Inverse frequencies and scale of Hugging Face's own rotary module. Raises TargetError if they do not stay."""
    check_rope(config.rope_parameters)
    module = Qwen3RotaryEmbedding(config)
    return module.inv_freq, float(module.attention_scaling)


FAMILY = Family(
    name="qwen3",
    model_types=("qwen3",),
    text_config=text_config,
    geometry=geometry,
    rope=rope,
    embedding_scale=lambda _: 1.0,
    logit_softcap=lambda _: None,
    weight_prefix=lambda _: "model.",
    start_layers=lambda config: range(config.num_hidden_layers),
)
