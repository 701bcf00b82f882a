"""Gemma4 targets: sliding and full attention in turn, norms around attention and MLP, scaled embeddings, soft-cap.

Every draft layer has the geometry of the target's full-attention layers, as in DSpark's Gemma4 drafters.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding

from draftsmith.errors import TargetError
from draftsmith.nn.layers import LayerGeometry
from draftsmith.nn.rope import check_rope
from draftsmith.targets.base import Family

MULTIMODAL_TYPES = ("gemma4", "gemma4_unified")
TEXT_TYPES = ("gemma4_text", "gemma4_unified_text")
FULL = "full_attention"


def text_config(config: Any) -> Any:
    """The text decoder's config. Raises TargetError for a decoder that cannot run over rows of keys and values."""
    text = config.text_config if config.model_type in MULTIMODAL_TYPES else config
    shared = text.num_kv_shared_layers
    if shared >= text.num_hidden_layers:
        raise TargetError(
            "num_kv_shared_layers leaves no layer with keys of its own",
            got=shared,
            expected=f"< {text.num_hidden_layers}",
            where="config.json",
        )
    if shared and text.model_type == "gemma4_text" and not text.hidden_size_per_layer_input:
        raise TargetError(
            "Hugging Face's gemma4_text decoder runs num_kv_shared_layers only with per-layer inputs",
            got=f"num_kv_shared_layers {shared}, hidden_size_per_layer_input {text.hidden_size_per_layer_input}",
            where="config.json",
        )
    if text.use_bidirectional_attention == "all":
        raise TargetError(
            "a target that attends to later tokens cannot decode",
            got="use_bidirectional_attention all",
            expected="vision or none",
            where="config.json",
        )
    for kind in sorted(set(text.layer_types)):
        check_rope(text.rope_parameters[kind])
    return text


def geometry(config: Any) -> LayerGeometry:
    """The sizes of a full-attention layer. Raises TargetError for parts that a draft layer does not have."""
    own = config.to_dict()
    for field in ("enable_moe_block", "hidden_size_per_layer_input"):
        if own.get(field):
            raise TargetError(
                f"no drafter for a Gemma4 target with {field}",
                got=own[field],
                expected="a dense decoder without per-layer inputs",
                where="config.json",
            )
    if config.hidden_activation != "gelu_pytorch_tanh":
        raise TargetError(
            "hidden_activation", got=config.hidden_activation, expected="gelu_pytorch_tanh", where="config.json"
        )
    full = config.per_layer_config[FULL]
    return LayerGeometry(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=full.num_key_value_heads,
        head_size=full.head_dim,
        norm_eps=config.rms_norm_eps,
        activation="gelu_pytorch_tanh",
        attention_bias=config.attention_bias,
        mlp_bias=False,
        attention_scale=1.0,
        head_norms=True,
        values="keys" if config.attention_k_eq_v else "projected",
        style="gemma4",
    )


def rope(config: Any) -> tuple[Tensor, float]:
    """Inverse frequencies and scale of Hugging Face's own rotary module for full-attention layers.

    Raises TargetError if they do not stay.
    """
    check_rope(config.rope_parameters[FULL])
    module = Gemma4TextRotaryEmbedding(config)
    return module.get_buffer(f"{FULL}_inv_freq"), cast(float, module.full_attention_attention_scaling)


def start_layers(config: Any) -> list[int]:
    """The full-attention layers that have keys of their own."""
    own_keys = config.num_hidden_layers - config.num_kv_shared_layers
    return [layer for layer, kind in enumerate(config.layer_types[:own_keys]) if kind == FULL]


FAMILY = Family(
    name="gemma4",
    model_types=(*MULTIMODAL_TYPES, *TEXT_TYPES),
    text_config=text_config,
    geometry=geometry,
    rope=rope,
    embedding_scale=lambda config: float(config.hidden_size**0.5),
    logit_softcap=lambda config: config.final_logit_softcapping,
    weight_prefix=lambda config: "model.language_model." if config.model_type in MULTIMODAL_TYPES else "model.",
    start_layers=start_layers,
)
