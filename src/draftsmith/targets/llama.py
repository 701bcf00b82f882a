"""Llama-type targets (SmolLM2 among them): no head norms."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from draftsmith.nn.layers import LayerGeometry
from draftsmith.nn.rope import check_rope
from draftsmith.targets.base import Family, draft_activation


def text_config(config: Any) -> Any:
    """The config itself. Raises TargetError for rotary positions that rows of keys and values cannot keep."""
    check_rope(config.rope_parameters)
    return config


def geometry(config: Any) -> LayerGeometry:
    """The layer sizes of a LlamaConfig. Raises TargetError for an activation that draft layers lack."""
    head_size = config.head_dim or config.hidden_size // config.num_attention_heads
    return LayerGeometry(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_size=head_size,
        norm_eps=config.rms_norm_eps,
        activation=draft_activation(config.hidden_act),
        attention_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
        attention_scale=head_size**-0.5,
        head_norms=False,
    )


def rope(config: Any) -> tuple[Tensor, float]:
    """Inverse frequencies and scale of Hugging Face's own rotary module. Raises TargetError if they do not stay."""
    check_rope(config.rope_parameters)
    module = LlamaRotaryEmbedding(config)
    return module.inv_freq, float(module.attention_scaling)


FAMILY = Family(
    name="llama",
    model_types=("llama",),
    text_config=text_config,
    geometry=geometry,
    rope=rope,
    embedding_scale=lambda _: 1.0,
    logit_softcap=lambda _: None,
    weight_prefix=lambda _: "model.",
    start_layers=lambda config: range(config.num_hidden_layers),
)
