"""Drafter directories as they are published, written by hand: their config.json at tiny sizes, and weights under the
published names, with none of our own code for writing.

Fields and names are those of DeepSpec's released Qwen3-4B and Gemma4-12B drafters (K = 7) and of SpecForge's configs;
sizes are those of the tiny targets.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

V, D, H, G, E, FF, RANK = 61, 32, 4, 2, 12, 48, 6

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3DSparkModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "block_size": 7,
    "bos_token_id": 1,
    "confidence_head_with_markov": True,
    "dtype": "bfloat16",
    "enable_confidence_head": True,
    "eos_token_id": 59,
    "head_dim": E,
    "hidden_act": "silu",
    "hidden_size": D,
    "initializer_range": 0.02,
    "intermediate_size": FF,
    "layer_types": ["full_attention", "full_attention"],
    "markov_head_type": "vanilla",
    "markov_rank": RANK,
    "mask_token_id": 60,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_anchors": 512,
    "num_attention_heads": H,
    "num_hidden_layers": 2,
    "num_key_value_heads": G,
    "num_target_layers": 5,
    "pad_token_id": None,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "sliding_window": None,
    "target_layer_ids": [0, 2, 3],
    "tie_word_embeddings": False,
    "transformers_version": "5.10.2",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": V,
}
BLOCK_FIELDS = ("block_size", "mask_token_id", "num_anchors", "markov_rank", "markov_head_type",
                "enable_confidence_head", "confidence_head_with_markov")  # fmt: skip
DFLASH: dict[str, Any] = {
    **{name: value for name, value in QWEN3.items() if name not in BLOCK_FIELDS[4:]},
    "markov_rank": 0,
    "enable_confidence_head": False,
}
EAGLE3: dict[str, Any] = {
    **{name: value for name, value in QWEN3.items() if name not in BLOCK_FIELDS},
    "architectures": ["Qwen3Eagle3Model"],
    "draft_num_hidden_layers": 1,
    "layer_types": ["full_attention"],
    "num_hidden_layers": 1,
    "num_target_layers": 7,
    "step_loss_decay": 0.8,
    "target_layer_ids": [0, 1, 2, 4, 5],
    "ttt_length": 7,
}
GEMMA4: dict[str, Any] = {
    "architectures": ["Gemma4DSparkModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_k_eq_v": True,
    "block_size": 7,
    "bos_token_id": 2,
    "confidence_head_with_markov": True,
    "dtype": "bfloat16",
    "enable_confidence_head": True,
    "enable_moe_block": False,
    "eos_token_id": 1,
    "final_logit_softcapping": 8.0,
    "global_head_dim": 16,
    "head_dim": E,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": D,
    "hidden_size_per_layer_input": 0,
    "initializer_range": 0.02,
    "intermediate_size": FF,
    "layer_types": ["full_attention", "full_attention"],
    "markov_head_type": "vanilla",
    "markov_rank": RANK,
    "mask_token_id": 4,
    "max_position_embeddings": 262144,
    "model_type": "gemma4_text",
    "moe_intermediate_size": None,
    "num_anchors": 512,
    "num_attention_heads": H,
    "num_experts": None,
    "num_global_key_value_heads": 1,
    "num_hidden_layers": 2,
    "num_key_value_heads": G,
    "num_kv_shared_layers": 0,
    "num_target_layers": 5,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "rope_theta": None,
        "rope_type": "default",
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 1024,
    "target_layer_ids": [0, 2, 3],
    "target_model_type": "gemma4_unified",
    "target_text_model_type": "gemma4_unified_text",
    "tie_word_embeddings": False,
    "top_k_experts": None,
    "transformers_version": "5.10.2",
    "use_bidirectional_attention": "vision",
    "use_cache": True,
    "use_double_wide_mlp": False,
    "vocab_size": V,
    "vocab_size_per_layer_input": 262144,
}
# SpecForge's configs/qwen3-4b-dspark.json and configs/qwen3-4b-dflash.json.
SPECFORGE_DFLASH: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 16,
    "bos_token_id": 1,
    "dflash_config": {"mask_token_id": 60, "target_layer_ids": [0, 2, 3]},
    "dtype": "bfloat16",
    "eos_token_id": 59,
    "head_dim": E,
    "hidden_act": "silu",
    "hidden_size": D,
    "initializer_range": 0.02,
    "intermediate_size": FF,
    "layer_types": ["full_attention", "full_attention"],
    "max_position_embeddings": 40960,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": H,
    "num_hidden_layers": 2,
    "num_key_value_heads": G,
    "num_target_layers": 5,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": V,
}
SPECFORGE_DSPARK: dict[str, Any] = {
    **SPECFORGE_DFLASH,
    "block_size": 7,
    "dflash_config": {
        "mask_token_id": 60,
        "target_layer_ids": [0, 2, 3],
        "projector_type": "dspark",
        "markov_rank": RANK,
        "markov_head_type": "vanilla",
        "confidence_head_alpha": 1.0,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    },
}

NORMS = ("input_layernorm", "post_attention_layernorm")
GEMMA4_NORMS = (*NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")


def layer_shapes(layer: int, *, size: int = E, groups: int = G, read: int = D) -> dict[str, tuple[int, ...]]:
    """Names and shapes of one Qwen3 draft layer that reads states of `read` numbers."""
    attention, mlp = f"layers.{layer}.self_attn", f"layers.{layer}.mlp"
    return {
        f"{attention}.q_proj.weight": (H * size, read),
        f"{attention}.k_proj.weight": (groups * size, read),
        f"{attention}.v_proj.weight": (groups * size, read),
        f"{attention}.o_proj.weight": (D, H * size),
        f"{attention}.q_norm.weight": (size,),
        f"{attention}.k_norm.weight": (size,),
        f"{mlp}.gate_proj.weight": (FF, D),
        f"{mlp}.up_proj.weight": (FF, D),
        f"{mlp}.down_proj.weight": (D, FF),
        **{f"layers.{layer}.{norm}.weight": (D,) for norm in NORMS},
    }


def gemma4_layer_shapes(layer: int) -> dict[str, tuple[int, ...]]:
    """The same of one Gemma4 draft layer: values are the keys', so it has no v_proj."""
    found = layer_shapes(layer, size=16, groups=1)
    del found[f"layers.{layer}.self_attn.v_proj.weight"]
    found |= {f"layers.{layer}.{norm}.weight": (D,) for norm in GEMMA4_NORMS}
    return found | {f"layers.{layer}.layer_scalar": (1,)}


FRONT: dict[str, tuple[int, ...]] = {"fc.weight": (D, 3 * D), "hidden_norm.weight": (D,), "norm.weight": (D,)}
MARKOV: dict[str, tuple[int, ...]] = {
    "markov_head.markov_w1.weight": (V, RANK),
    "markov_head.markov_w2.weight": (V, RANK),
}
CONFIDENCE: dict[str, tuple[int, ...]] = {
    "confidence_head.proj.weight": (1, D + RANK),
    "confidence_head.proj.bias": (1,),
}
QWEN3_SHAPES = {**FRONT, **layer_shapes(0), **layer_shapes(1), **MARKOV, **CONFIDENCE}
DFLASH_SHAPES = {**FRONT, **layer_shapes(0), **layer_shapes(1)}
GEMMA4_SHAPES = {**FRONT, **gemma4_layer_shapes(0), **gemma4_layer_shapes(1), **MARKOV, **CONFIDENCE}
EAGLE3_SHAPES = {
    "fc.weight": (D, 5 * D),
    "norm.weight": (D,),
    **layer_shapes(0, read=2 * D),
    "layers.0.hidden_norm.weight": (D,),
}


def random_weights(shapes: dict[str, tuple[int, ...]], *, seed: int) -> dict[str, Tensor]:
    """bfloat16 weights, norms and layer scalars around 1."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (float("norm" in name or "scalar" in name) + 0.25 * torch.randn(shape, generator=generator)).bfloat16()
        for name, shape in shapes.items()
    }


def target_weights(folder: Path) -> dict[str, Tensor]:
    """Embedding and LM head of a target by their names in a drafter's file, read from its safetensors."""
    with safe_open(folder / "model.safetensors", framework="pt") as tensors:
        names = list(tensors.keys())
        embedding = tensors.get_tensor("model.embed_tokens.weight")
        head = tensors.get_tensor("lm_head.weight") if "lm_head.weight" in names else embedding.clone()
    return {"embed_tokens.weight": embedding.bfloat16(), "lm_head.weight": head.bfloat16()}


def write(folder: Path, body: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """Write a directory as Hugging Face's save_pretrained leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(body, indent=2))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
