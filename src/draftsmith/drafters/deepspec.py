"""DeepSpec's flat `config.json`, both ways: the file alone says what a drafter is.

The file is the target's own text config with the draft's number of layers, and the drafter's fields beside it, so that
sizes and rotary positions come from it as they come from a target. Beyond DeepSpec's classes there are ours: a Llama
layer (without head norms) and MTP-1; and three fields, `sample_from_anchor` and, where a layer has a window,
`sliding_window` with `layer_types`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import fields
from itertools import pairwise
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import Gemma4TextConfig, LlamaConfig, PreTrainedConfig, Qwen3Config

from draftsmith.drafters.base import DrafterConfig
from draftsmith.drafters.fields import Fields
from draftsmith.errors import ContractError, TargetError
from draftsmith.targets.families import FAMILIES

# Family of the draft layers -> its word in the name of an architecture, Hugging Face's config, and the model types
# under which a draft may keep it.
LAYERS: dict[str, tuple[str, type[PreTrainedConfig], tuple[str, ...]]] = {
    "qwen3": ("Qwen3", Qwen3Config, ("qwen3",)),
    "gemma4": ("Gemma4", Gemma4TextConfig, ("gemma4_text", "gemma4_unified_text")),
    "llama": ("Llama", LlamaConfig, ("llama",)),
}
FORMS = {"dspark": "DSparkModel", "dflash": "DSparkModel", "eagle3": "Eagle3Model", "mtp1": "MTPModel"}
ARCHITECTURES = {
    word + form: (form, family) for family, (word, _, _) in LAYERS.items() for form in dict.fromkeys(FORMS.values())
}
PUBLIC_LAYERS, PUBLIC_KINDS = ("qwen3", "gemma4"), ("dspark", "dflash", "eagle3")  # that others have classes for
HEADS = {"vanilla": "markov", "gated": "gated", "rnn": "rnn"}
PUBLIC_HEADS = {own: public for public, own in HEADS.items()}
FULL, SLIDING = "full_attention", "sliding_attention"
EAGLE3_LAYERS = 5
NUM_ANCHORS = 512

# What Hugging Face's config would fill in by a default of its own, so that a file without it means another model.
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "max_position_embeddings")  # fmt: skip
NEEDED = {
    "qwen3": ("head_dim", "hidden_act"),
    "llama": ("hidden_act",),
    "gemma4": ("head_dim", "hidden_activation", "global_head_dim", "attention_k_eq_v", "rope_parameters"),
}
# Fields of the text that are no part of the class: old names of the rotary ones, and what Gemma4 keeps of its target.
ALSO = {
    "qwen3": ("rope_theta", "rope_scaling", "partial_rotary_factor"),
    "llama": ("rope_theta", "rope_scaling", "partial_rotary_factor"),
    "gemma4": ("global_head_dim", "num_global_key_value_heads", "target_model_type", "target_text_model_type"),
}
OLD_ROPE = ("rope_theta", "rope_scaling", "partial_rotary_factor")
COMMON = frozenset(item.name for item in fields(PreTrainedConfig))


def architecture(config: DrafterConfig) -> str:
    """The name of the drafter's class, `Qwen3DSparkModel` for one."""
    return LAYERS[config.family][0] + FORMS[config.kind]


def text_config(family: str, text: Mapping[str, Any]) -> Any:
    """Hugging Face's config object of a draft's text, for the family's own functions.

    Every layer is of full attention in it, as draft layers are but for their window.
    """
    plain = {name: value for name, value in text.items() if name not in ("layer_types", "model_type")}
    if family != "gemma4":
        plain.pop("sliding_window", None)
    else:
        plain["layer_types"] = [FULL] * plain["num_hidden_layers"]
    return LAYERS[family][1](**copy.deepcopy(plain))


def draft_text(family: str, body: Mapping[str, Any], *, windows: tuple[int | None, ...]) -> dict[str, Any]:
    """The text fields of a draft in one form, from a drafter's config or a target's with `num_hidden_layers` set.

    Raises what Hugging Face's config raises for values that it refuses.
    """
    kind = LAYERS[family][1]
    own = [item.name for item in fields(kind) if item.name not in COMMON]
    given = {name: body[name] for name in (*own, *ALSO[family]) if name in body}
    rope = given.get("rope_parameters")
    if family == "gemma4":
        given |= {"enable_moe_block": given.get("enable_moe_block", False), "num_kv_shared_layers": 0}
        if isinstance(rope, dict):
            given["rope_parameters"] = {name: rope[name] for name in (FULL, SLIDING) if rope.get(name)}
    config = text_config(family, {**given, "tie_word_embeddings": False})
    ambiguous = config.per_layer_attributes or ()
    text = {name: given[name] if name in ambiguous else getattr(config, name) for name in own}
    text |= {name: given.get(name) for name in ALSO[family] if name not in OLD_ROPE}
    text["layer_types"] = [FULL if window is None else SLIDING for window in windows]
    seen = [window for window in windows if window is not None]
    if "use_sliding_window" in own:
        text |= {"use_sliding_window": bool(seen), "sliding_window": None}
    if seen:
        text["sliding_window"] = seen[0]
    return copy.deepcopy(text) | {"model_type": kind.model_type}


def check_form(config: DrafterConfig, *, where: str) -> None:
    """Raises ContractError for a drafter that DeepSpec's form cannot say, or that no target can feed."""
    ids = list(config.capture_layers)
    if any(later <= before for before, later in pairwise(ids)):
        raise ContractError("target_layer_ids must strictly increase", got=ids, where=where)
    if not ids or ids[0] < -1 or ids[-1] > config.num_target_layers - 2:
        raise ContractError(
            "target_layer_ids",
            got=ids,
            expected=f"ids in -1..{config.num_target_layers - 2} (the last layer cannot be captured)",
            where=where,
        )
    if config.kind == "eagle3" and (len(ids) != EAGLE3_LAYERS or ids[0] < 0):
        raise ContractError(
            "target_layer_ids of an EAGLE-3 drafter",
            got=ids,
            expected=f"exactly {EAGLE3_LAYERS} layers, without the embedding (-1)",
            where=where,
        )
    if config.mask_token_id is not None and config.mask_token_id >= config.vocab_size:
        raise ContractError(
            "mask_token_id", got=config.mask_token_id, expected=f"< vocab_size {config.vocab_size}", where=where
        )
    if len({window for window in config.windows if window is not None}) > 1:
        raise ContractError(
            "draft layers of different windows", got=list(config.windows), expected="one sliding_window", where=where
        )
    heads, groups = config.geometry.num_heads, config.geometry.num_kv_heads
    if heads % groups or config.geometry.head_size % 2:
        raise ContractError(
            "attention heads",
            got=f"{heads} of {config.geometry.head_size} numbers over {groups} key heads",
            expected="a multiple of the key heads, of an even size",
            where=where,
        )
    if config.geometry != FAMILIES[config.family].geometry(text_config(config.family, config.text)):
        raise ContractError(
            f"draft layers that a config of {config.family} cannot say", got=config.geometry, where=where
        )


def write_body(config: DrafterConfig, *, dtype: torch.dtype, num_anchors: int = NUM_ANCHORS) -> dict[str, Any]:
    """The config.json of a drafter. `num_anchors` is what it was trained with, for DeepSpec's own training to go on."""
    check_form(config, where="the drafter to be saved")
    body: dict[str, Any] = {
        **draft_text(config.family, config.text, windows=config.windows),
        "architectures": [architecture(config)],
        "dtype": str(dtype).removeprefix("torch."),
        "transformers_version": transformers.__version__,
        "num_target_layers": config.num_target_layers,
        "target_layer_ids": list(config.capture_layers),
    }
    if config.kind == "eagle3":
        body |= {
            "ttt_length": config.block_size,
            "step_loss_decay": config.step_decay,
            "draft_num_hidden_layers": config.num_layers,
        }
    elif config.kind != "mtp1":
        body |= {
            "block_size": config.block_size,
            "mask_token_id": config.mask_token_id,
            "num_anchors": num_anchors,
            "sample_from_anchor": config.sample_from_anchor,
            "enable_confidence_head": config.confidence,
            "markov_rank": 0,
        }
        if config.sequential is not None:
            kind, rank = config.sequential
            body |= {"markov_rank": rank, "markov_head_type": PUBLIC_HEADS[kind]}
        if config.confidence:
            body["confidence_head_with_markov"] = config.confidence_with_markov
    return dict(sorted(body.items()))


def read_body(body: Mapping[str, Any], *, where: str) -> DrafterConfig:
    """The drafter that a flat config.json describes. Raises ContractError that names the first field that is wrong."""
    own = Fields(body, where=where)
    name = own.only("architectures")
    if name not in ARCHITECTURES:
        raise ContractError(
            "drafter of an unknown architecture", got=name, expected=f"one of {', '.join(ARCHITECTURES)}", where=where
        )
    form, family = ARCHITECTURES[name]
    _check_text(own, family)
    num_layers, vocab_size = own.integer("num_hidden_layers", least=1), own.integer("vocab_size", least=2)
    windows = _windows(own, num_layers)
    try:
        text = draft_text(family, body, windows=windows)
        geometry = FAMILIES[family].geometry(FAMILIES[family].text_config(text_config(family, text)))
    except (StrictDataclassError, TargetError, ValueError, TypeError, KeyError, AttributeError) as error:
        told = " ".join(str(error).split())[:300]
        raise ContractError(f"text config of a drafter cannot be read: {told}", where=where) from None
    config = DrafterConfig(
        family=family,
        num_layers=num_layers,
        geometry=geometry,
        vocab_size=vocab_size,
        capture_layers=own.integers("target_layer_ids"),
        windows=windows,
        num_target_layers=own.integer("num_target_layers", least=1),
        text=text,
        **_drafter_fields(own, form, num_layers=num_layers),
    )
    check_form(config, where=where)
    return config


def _drafter_fields(own: Fields, form: str, *, num_layers: int) -> dict[str, Any]:
    """What the forms say of themselves: kind, block, heads."""
    if form != FORMS["dspark"] and num_layers != 1:
        raise ContractError(
            f"num_hidden_layers of a drafter of the form {form}", got=num_layers, expected=1, where=own.where
        )
    if form == FORMS["mtp1"]:
        return {"kind": "mtp1", "block_size": 1, "mask_token_id": None}
    if form == FORMS["eagle3"]:
        if own.integer("draft_num_hidden_layers", least=1, default=num_layers) != num_layers:
            raise ContractError(
                "draft_num_hidden_layers",
                got=own.body["draft_num_hidden_layers"],
                expected=f"num_hidden_layers {num_layers}",
                where=own.where,
            )
        return {
            "kind": "eagle3",
            "block_size": own.integer("ttt_length", least=1),
            "mask_token_id": None,
            "step_decay": own.number("step_loss_decay", above=0),
        }
    rank, confidence = own.integer("markov_rank", least=0), own.flag("enable_confidence_head")
    found: dict[str, Any] = {
        "kind": "dspark" if rank else "dflash",
        "block_size": own.integer("block_size", least=2),
        "mask_token_id": own.integer("mask_token_id", least=0),
        "sample_from_anchor": own.flag("sample_from_anchor", default=True),
        "confidence": confidence,
    }
    if not rank:
        if confidence:
            raise ContractError(
                "enable_confidence_head without a sequential head (markov_rank 0)",
                got=True,
                expected=False,
                where=own.where,
            )
        return found
    found["sequential"] = (HEADS[own.choice("markov_head_type", tuple(HEADS))], rank)
    if confidence:
        found["confidence_with_markov"] = own.flag("confidence_head_with_markov")
    return found


def _check_text(own: Fields, family: str) -> None:
    """Raises ContractError for a text config without what makes its layers, or with layers that are no draft's."""
    body, where = own.body, own.where
    own.choice("model_type", LAYERS[family][2])
    for size in SIZES:
        own.integer(size, least=1)
    own.number("rms_norm_eps", above=0)
    for name in NEEDED[family]:
        own.given(name)
    if family == "gemma4" and own.flag("attention_k_eq_v"):
        own.integer("num_global_key_value_heads", least=1)
    if family != "gemma4" and not isinstance(body.get("rope_parameters"), dict):
        own.number("rope_theta", above=0)
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if body.get(name):
            raise ContractError(f"a drafter with experts: {name}", got=body[name], expected="dense layers", where=where)
    drafted = body.get("draft_vocab_size")
    if drafted is not None and drafted != body["vocab_size"]:
        raise ContractError(
            "draft_vocab_size", got=drafted, expected=f"the whole vocab_size {body['vocab_size']}", where=where
        )


def _windows(own: Fields, num_layers: int) -> tuple[int | None, ...]:
    """How far each layer sees, from `layer_types` and `sliding_window`; without types every layer sees all."""
    types = own.body.get("layer_types")
    if types is None:
        if own.body.get("use_sliding_window"):
            own.given("layer_types")
        return (None,) * num_layers
    if not isinstance(types, list) or len(types) != num_layers or not set(types) <= {FULL, SLIDING}:
        raise ContractError("layer_types", got=types, expected=f"{num_layers} of {FULL} or {SLIDING}", where=own.where)
    if SLIDING not in types:
        return (None,) * num_layers
    if not own.flag("use_sliding_window", default=True):
        raise ContractError("layer_types with sliding layers", got="use_sliding_window false", where=own.where)
    window = own.integer("sliding_window", least=1)
    return tuple(window if kind == SLIDING else None for kind in types)
