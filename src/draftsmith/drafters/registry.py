"""From rows and folders to drafters: configs, construction, random or target start, save and load by safetensors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from draftsmith.drafters import deepspec, specforge
from draftsmith.drafters.base import Drafter, DrafterConfig
from draftsmith.drafters.dflash import DFlash
from draftsmith.drafters.dspark import DSpark
from draftsmith.drafters.eagle3 import Eagle3
from draftsmith.drafters.mtp1 import Mtp1
from draftsmith.drafters.weights import WEIGHTS_NAME, check_same, check_weights, read_weights
from draftsmith.errors import ContractError, ParamsError, TargetError
from draftsmith.manifest import write_bytes, write_json
from draftsmith.nn.layers import LayerGeometry
from draftsmith.nn.packed import pack_linears
from draftsmith.nn.rope import Rope
from draftsmith.params import Drafter as DrafterRow
from draftsmith.params import Target as TargetRow
from draftsmith.targets.base import Family, SharedWeights, load_shared, read_config, read_tensors
from draftsmith.targets.families import FAMILIES

KINDS: dict[str, Callable[..., Drafter]] = {
    "dflash": DFlash,
    "dspark": DSpark,
    "eagle3": Eagle3,
    "mtp1": Mtp1,
}
CONFIG_NAME = "config.json"
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


def drafter_config(row: DrafterRow, *, target: TargetRow, target_folder: Path) -> DrafterConfig:
    """The config of a drafter row on a target. Raises ParamsError where the two do not fit."""
    family, whole = FAMILIES[target.family], read_config(target_folder)
    own = family.text_config(whole)
    geometry = family.geometry(own)
    if geometry.head_norms and not row.head_norms:
        raise ParamsError(
            f"drafters.*.head_norms must be true on {family.name} targets, whose layers have head norms",
            got=row.head_norms,
            where="params.yaml: drafters",
        )
    if row.reads_last_hidden and target.last_hidden != "all":
        raise ParamsError(
            f"a drafter of kind {row.kind} reads the last hidden state of every token",
            got=f"last_hidden {target.last_hidden}",
            expected="all",
            where="params.yaml: targets.*.last_hidden",
        )
    if row.layers > target.num_layers:
        raise ParamsError("drafters.*.layers", got=row.layers, expected=f"<= {target.num_layers} layers of the target")
    # With head norms a Llama layer is Qwen3's, and by that name engines know it.
    layers = family.name if row.head_norms == geometry.head_norms else "qwen3"
    windows = (row.sliding_window,) * row.layers
    text = deepspec.draft_text(layers, _target_text(whole, own, geometry, num_layers=row.layers), windows=windows)
    return DrafterConfig(
        kind=row.kind,
        family=layers,
        block_size=row.block_size,
        num_layers=row.layers,
        geometry=LayerGeometry(**{**asdict(geometry), "head_norms": row.head_norms}),
        vocab_size=target.vocab_size,
        mask_token_id=target.mask_token_id if row.kind in ("dspark", "dflash") else None,
        capture_layers=target.capture_layers,
        num_target_layers=target.num_layers,
        windows=windows,
        text=text,
        sequential=None if row.sequential is None else (row.sequential.kind, row.sequential.rank),
        confidence=row.confidence,
        confidence_with_markov=row.confidence_with_markov or not row.confidence,
        sample_from_anchor=row.sample_from_anchor,
        step_decay=row.step_decay if row.kind == "eagle3" else 1.0,
    )


def _target_text(whole: Any, own: Any, geometry: LayerGeometry, *, num_layers: int) -> dict[str, Any]:
    """A target's text config as the draft's: with so many layers, and what Gemma4 keeps per layer said once."""
    body: dict[str, Any] = {**own.to_dict(), "num_hidden_layers": num_layers}
    if geometry.style == "gemma4":
        body |= {
            "global_head_dim": geometry.head_size,
            "num_global_key_value_heads": geometry.num_kv_heads if geometry.values == "keys" else None,
            "hidden_size_per_layer_input": 0,
            "target_model_type": whole.model_type,
            "target_text_model_type": own.model_type,
        }
    return body


def build_drafter(config: DrafterConfig, *, target_folder: Path, shared: SharedWeights | None = None) -> Drafter:
    """An uninitialised drafter that shares the target's embedding and LM head (read from its weights if not given)."""
    frequencies, scale = FAMILIES[config.family].rope(deepspec.text_config(config.family, config.text))
    shared = shared or load_shared(target_folder, family=_family(read_config(target_folder)))
    return KINDS[config.kind](config, shared=shared, rope=Rope(frequencies, scale=scale))


def _family(whole: Any) -> Family:
    """The family of a target by its whole config. Raises TargetError if it is of none."""
    for family in FAMILIES.values():
        if whole.model_type in family.model_types:
            return family
    known = ", ".join(name for family in FAMILIES.values() for name in family.model_types)
    raise TargetError("target of an unknown family", got=whole.model_type, expected=f"one of {known}")


def start_from_target(drafter: Drafter, *, target_folder: Path) -> list[str]:
    """Start the draft layers as the target's own last layers of their shape; returns the names that were set.

    The projection in front (`fc`, `input_proj`) passes the last state that it reads through; the context's norm is the
    input norm of the first copied layer (so that context keys and values begin as the target's own where that layer
    follows the captured one), `norm` the target's final norm. A projection that reads more than the target's does
    starts with the target's weights on its last columns and zero on the others. Head norms that the target lacks stay
    at one; where the target has fewer layers of the draft layers' shape than there are draft layers, the first draft
    layers keep their random start.
    """
    config, whole = drafter.config, read_config(target_folder)
    family = _family(whole)
    prefix = family.weight_prefix(whole)
    copied = family.start_layers(family.text_config(whole))[-config.num_layers :]
    first = config.num_layers - len(copied)
    state = drafter.state_dict(keep_vars=True)
    sources = {"norm.weight": f"{prefix}norm.weight"} if "norm.weight" in state else {}
    for name in ("hidden_norm.weight", "layers.0.hidden_norm.weight"):
        if name in state:
            sources[name] = f"{prefix}layers.{copied[0]}.input_layernorm.weight"
    for name in state:
        match = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
        if match and int(match[1]) >= first and name not in sources:
            sources[name] = f"{prefix}layers.{copied[int(match[1]) - first]}.{match[2]}"
    tensors = read_tensors(target_folder, list(sources.values()))
    done = []
    with torch.no_grad():
        for name, source in sources.items():
            if source in tensors:
                _copy_last_columns(tensors[source], state[name])
                done.append(name)
        for name in ("fc.weight", "input_proj.weight"):
            if name in state:
                _copy_last_columns(torch.eye(config.geometry.hidden_size), state[name])
                done.append(name)
    return done


def _copy_last_columns(source: Tensor, destination: Tensor) -> None:
    """destination[..., -columns of source:] = source, zero before."""
    destination.zero_()
    destination[..., destination.shape[-1] - source.shape[-1] :].copy_(source)


def save_drafter(
    drafter: Drafter, *, folder: Path, dtype: torch.dtype, num_anchors: int = deepspec.NUM_ANCHORS
) -> None:
    """Write config.json and model.safetensors: the drafter's own weights, for the shared ones are the target's.

    `num_anchors` is what it was trained with. Raises ContractError, before anything is written, for a drafter that
    the config's form cannot say.
    """
    body = deepspec.write_body(drafter.config, dtype=dtype, num_anchors=num_anchors)
    write_weights(folder, body, own_weights(drafter, dtype=dtype))


def own_weights(drafter: Drafter, *, dtype: torch.dtype) -> dict[str, Tensor]:
    """The drafter's own weights by their published names, in `dtype` on the CPU."""
    return {name: value.to(dtype).contiguous().cpu() for name, value in drafter.state_dict().items()}


def shared_weights(shared: SharedWeights, *, dtype: torch.dtype) -> dict[str, Tensor]:
    """Embedding and LM head by their published names, each in memory of its own, as a whole directory holds them."""
    found = {EMBEDDING: shared.embedding, HEAD: shared.head}
    return {name: value.detach().to("cpu", dtype, copy=True).contiguous() for name, value in found.items()}


def write_weights(folder: Path, body: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write a config and weights; the weights come last."""
    write_json(folder / CONFIG_NAME, body)
    write_bytes(folder / WEIGHTS_NAME, save(tensors, metadata={"format": "pt"}))


def read_drafter_config(folder: Path) -> DrafterConfig:
    """What the config.json of a drafter folder says of it, in DeepSpec's form or SpecForge's.

    Raises ContractError if there is none, or for the first field that is missing, of a wrong kind or not ours to run.
    """
    path = folder / CONFIG_NAME
    try:
        body = json.loads(path.read_text())
    except FileNotFoundError:
        raise ContractError(
            "drafter folder has no config.json", got=folder, expected=f"`draftsmith train --key {folder.name}` first"
        ) from None
    except (OSError, ValueError) as error:
        raise ContractError(f"drafter config cannot be read: {error}", where=str(path)) from None
    if not isinstance(body, dict):
        raise ContractError("drafter config", got=type(body).__name__, expected="an object", where=str(path))
    if specforge.is_nested(body):
        body = specforge.flatten(body, where=str(path))
    return deepspec.read_body(body, where=str(path))


def load_drafter(folder: Path, *, target_folder: Path, shared: SharedWeights, dtype: torch.dtype) -> Drafter:
    """Load a drafter by its folder, for the target whose embedding and LM head `shared` are.

    The folder's file may hold embedding and LM head too: then they must be the target's. Raises ContractError for a
    drafter of another target, and one that lists missing, extra and misshapen weights.
    """
    config = read_drafter_config(folder)
    check_target(config, target_folder=target_folder, shared=shared, where=str(folder / CONFIG_NAME))
    drafter = build_drafter(config, target_folder=target_folder, shared=shared)
    tensors = read_weights(folder)
    brought = {name: tensors.pop(name) for name in (EMBEDDING, HEAD) if name in tensors}
    parameters = drafter.state_dict(keep_vars=True)
    check_weights(tensors, expected=parameters, where=str(folder))
    if brought:
        stored = load_shared(target_folder, family=_family(read_config(target_folder)))
        for name, target in ((EMBEDDING, stored.embedding), (HEAD, stored.head)):
            if name in brought:
                check_same(brought[name], target=target, name=name, where=str(folder))
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
    drafter.to(shared.head.device, dtype).eval().requires_grad_(False)
    pack_linears(drafter)
    return drafter


def check_target(config: DrafterConfig, *, target_folder: Path, shared: SharedWeights, where: str) -> None:
    """Raises ContractError that names the first size, or scale of embedding or logits, in which a target differs."""
    whole = read_config(target_folder)
    target = _family(whole).text_config(whole)
    layers, text = FAMILIES[config.family], deepspec.text_config(config.family, config.text)
    for name, own, theirs in (
        ("vocab_size", config.vocab_size, shared.head.shape[0]),
        ("hidden_size", config.geometry.hidden_size, shared.head.shape[1]),
        ("num_target_layers", config.num_target_layers, target.num_hidden_layers),
        ("final_logit_softcapping", layers.logit_softcap(text), shared.logit_softcap),
        ("embedding scale", layers.embedding_scale(text), shared.embedding_scale),
    ):
        if own != theirs:
            raise ContractError(
                f"the drafter was made for a target of another {name}", got=str(own), expected=str(theirs), where=where
            )
