"""Tiny random targets of each family, drafters on them, and samples cut from them; and the real target, loaded once.

Every weight is random, norms included, and large enough that no two parts of a layer can be exchanged unseen.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma4TextConfig, LlamaConfig, Qwen3Config

from draftsmith.cache.reader import CachedSample
from draftsmith.drafters.registry import build_drafter, drafter_config
from draftsmith.params import Drafter as DrafterRow
from draftsmith.params import LossWeights, Sequential
from draftsmith.params import Target as TargetRow
from draftsmith.targets.base import Target, load_target
from draftsmith.targets.families import FAMILIES
from draftsmith.training.batches import BatchShape

VOCAB, HIDDEN, LAYERS, MASK_TOKEN, END_TOKEN = 61, 32, 5, 60, 59
CAPTURED = (0, 2, 3)
DSPARK_LOSS = LossWeights(ce=0.1, tv=0.9, confidence=1.0)
# What the tests call a kind -> the row's own fields.
KINDS: dict[str, dict[str, Any]] = {
    "dspark": {"kind": "dspark", "sequential": Sequential(rank=6), "confidence": True, "loss": DSPARK_LOSS},
    "dspark_gated": {
        "kind": "dspark",
        "sequential": Sequential(kind="gated", rank=6),
        "confidence": True,
        "confidence_with_markov": False,
        "loss": DSPARK_LOSS,
    },
    "dspark_rnn": {
        "kind": "dspark",
        "sequential": Sequential(kind="rnn", rank=6),
        "sliding_window": 5,
        "loss": LossWeights(ce=0.1, tv=0.9),
    },
    "dflash": {"kind": "dflash", "loss": LossWeights(ce=1.0)},
    "dflash_masks": {"kind": "dflash", "sample_from_anchor": False, "loss": LossWeights(ce=0.5, tv=0.5)},
    "eagle3": {"kind": "eagle3", "layers": 1, "loss": LossWeights(soft_ce=1.0)},
    "eagle3_window": {"kind": "eagle3", "layers": 1, "sliding_window": 5, "loss": LossWeights(soft_ce=1.0)},
    "mtp1": {"kind": "mtp1", "block_size": 1, "layers": 1, "loss": LossWeights(ce=1.0, tv=0.5)},
}
WEIGHTS = {name: row["loss"] for name, row in KINDS.items()}
GEMMA4: dict[str, Any] = {
    "layer_types": [*["sliding_attention"] * 2, "full_attention", "sliding_attention", "full_attention"],
    "sliding_window": 6,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 8.0,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 128}
GEMMA4_ROPE = {
    "sliding_attention": {"rope_type": "linear", "rope_theta": 50.0, "factor": 2.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": 300.0, "partial_rotary_factor": 0.5, "factor": 2.0},
}
# What the tests call a make of target that the families' plain ones leave out -> its family and config.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, untied, biases": (
        "llama",
        {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3},
    ),
    "llama, one key head, head size by division": (
        "llama",
        {"num_key_value_heads": 1, "head_dim": None, "hidden_act": "gelu_pytorch_tanh"},
    ),
    "qwen3, tied, biases, yarn": (
        "qwen3",
        {"tie_word_embeddings": True, "attention_bias": True, "rope_parameters": YARN, "num_key_value_heads": 4},
    ),
    "qwen3, sliding window": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2},
    ),
    "gemma4, tied, biases, own values": (
        "gemma4",
        {"tie_word_embeddings": True, "attention_bias": True, "attention_k_eq_v": False,
         "final_logit_softcapping": None, "rope_parameters": GEMMA4_ROPE},
    ),
}  # fmt: skip


def tiny_config(family: str, **changes: Any) -> Any:
    """A config of `family` with grouped heads and a head size that is not hidden / heads."""
    common: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": family == "llama",
        "bos_token_id": 1,
        "eos_token_id": END_TOKEN,
        "pad_token_id": 0,
        **deepcopy(changes),
    }
    if family == "gemma4":
        common = {**GEMMA4, **common}
    return {"llama": LlamaConfig, "qwen3": Qwen3Config, "gemma4": Gemma4TextConfig}[family](**common)


def randomize(module: torch.nn.Module, *, seed: int, std: float = 0.25) -> None:
    """Fill every weight: matrices normal with `std`, vectors (norms, biases, layer scalars) normal around 1 or 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            centre = 1.0 if "norm" in name else 0.0
            parameter.normal_(centre, std, generator=generator)
        for name, buffer in module.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.normal_(1.0, std, generator=generator)


def random_model(config: Any, *, seed: int, std: float = 0.25) -> Any:
    """A Hugging Face model of `config` with random weights, float32."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    randomize(model, seed=seed, std=std)
    return model


def save_tiny(folder: Path, *, family: str, seed: int, std: float = 0.25, **changes: Any) -> Path:
    """Write a tiny random target to `folder`/`family`."""
    random_model(tiny_config(family, **changes), seed=seed, std=std).save_pretrained(folder / family)
    return folder / family


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Family -> folder of a tiny random target."""
    folder = tmp_path_factory.mktemp("tiny")
    return {family: save_tiny(folder, family=family, seed=seed) for seed, family in enumerate(FAMILIES)}


@pytest.fixture(scope="session")
def variant_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Row of VARIANTS -> folder of a tiny random target of it."""
    folder = tmp_path_factory.mktemp("variants")
    return {
        name: save_tiny(folder / str(seed), family=family, seed=seed, **changes)
        for seed, (name, (family, changes)) in enumerate(VARIANTS.items())
    }


def tiny_target(folder: Path, *, capture_layers: Sequence[int] = CAPTURED) -> Target:
    return load_target(
        folder, family=FAMILIES[folder.name], capture_layers=capture_layers, dtype="float32", device="cpu"
    )


def reference(folder: Path, *, dtype: torch.dtype = torch.float32) -> Any:
    """The same weights as Hugging Face's own model, with its own attention."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()


def hugging_face_greedy(model: Any, prompt: list[int], *, num: int) -> list[int]:
    """The model's own greedy answer of at most `num` tokens, its end token included."""
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num, do_sample=False)
    return out[0, len(prompt) :].tolist()


def target_row(folder: Path, *, capture_layers: Sequence[int] = CAPTURED, **changes: Any) -> TargetRow:
    fields: dict[str, Any] = {
        "family": folder.name,
        "folder": str(folder),
        "hidden_size": HIDDEN,
        "num_layers": LAYERS,
        "vocab_size": VOCAB,
        "mask_token_id": MASK_TOKEN,
        "capture_layers": tuple(capture_layers),
        "last_hidden": "all",
        **changes,
    }
    return TargetRow(**fields)


def drafter_row(kind: str, *, block_size: int = 4, layers: int = 2, head_norms: bool = False) -> DrafterRow:
    return DrafterRow(**{"block_size": block_size, "layers": layers, "head_norms": head_norms, **KINDS[kind]})


def tiny_drafter(
    kind: str,
    folder: Path,
    *,
    seed: int,
    block_size: int = 4,
    head_norms: bool | None = None,
    windows: tuple[int | None, ...] | None = None,
    **changes: Any,
) -> Any:
    """A drafter on a tiny target, every parameter random.

    `head_norms` as the target has them and `windows` of the draft layers as the kind has them, if not given.
    """
    head_norms = folder.name != "llama" if head_norms is None else head_norms
    row = drafter_row(kind, block_size=block_size, head_norms=head_norms)
    config = drafter_config(row, target=target_row(folder, **changes), target_folder=folder)
    drafter = build_drafter(config if windows is None else replace(config, windows=windows), target_folder=folder)
    randomize(drafter, seed=seed)
    return drafter


def bf16_bits(values: torch.Tensor) -> np.ndarray:
    """The bits of bfloat16 values as uint16, as the cache keeps them."""
    return values.to(torch.bfloat16).contiguous().view(torch.int16).numpy().view(np.uint16)


def make_sample(
    model: Any,
    ids: Sequence[int],
    *,
    supervised: Sequence[int],
    name: str = "s/t0",
    captured: Sequence[int] = CAPTURED,
    every: bool = False,
) -> CachedSample:
    """A cached sample of `ids`, its hidden states taken from Hugging Face's model; `every` last hidden state, or those
    of labels."""
    with torch.inference_mode():
        output = model(torch.tensor([list(ids)]), output_hidden_states=True)
    mask = np.asarray(supervised, dtype=np.uint8)
    labels = np.array([p for p in range(len(ids) - 1) if mask[p] and mask[p + 1]], dtype=np.int64)
    labels = np.arange(len(ids)) if every else labels
    context = torch.stack([output.hidden_states[layer + 1][0] for layer in captured], dim=1)
    last = output.hidden_states[-1][0][torch.from_numpy(labels)]
    return CachedSample(name, np.asarray(ids, dtype=np.int32), mask, bf16_bits(context), bf16_bits(last), labels)


def widened(bits: np.ndarray) -> torch.Tensor:
    """bfloat16 bits -> float32, by shifting them into place."""
    return torch.from_numpy((bits.astype(np.uint32) << 16).view(np.float32))


def batch_shape(
    *,
    block_size: int = 4,
    num_anchors: int = 64,
    dtype: torch.dtype = torch.float32,
    row_tokens: int = 0,
    last_hidden: bool = False,
) -> BatchShape:
    return BatchShape(
        block_size=block_size,
        num_anchors=num_anchors,
        gamma_w=4.0,
        dtype=dtype,
        device=torch.device("cpu"),
        context_shape=(len(CAPTURED), HIDDEN),
        row_tokens=row_tokens,
        last_hidden=last_hidden,
    )


def random_ids(count: int, *, seed: int, vocab: int = END_TOKEN) -> list[int]:
    """Token ids without the end and mask tokens."""
    return np.random.default_rng(seed).integers(2, vocab, count).tolist()


@cache
def loaded_real_target(folder: Path, dtype: str) -> Target:
    """The real target with every layer captured that can be, one copy a test run and dtype."""
    family = FAMILIES["llama"]
    return load_target(folder, family=family, capture_layers=range(-1, 29), dtype=dtype, device="cpu")
