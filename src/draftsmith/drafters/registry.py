"""From rows to drafters: configs, construction, random or target start, save and load by safetensors."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from draftsmith.drafters.base import Drafter, DrafterConfig
from draftsmith.drafters.dflash import DFlash
from draftsmith.drafters.dspark import DSpark
from draftsmith.drafters.eagle3 import Eagle3
from draftsmith.drafters.mtp1 import Mtp1
from draftsmith.errors import ContractError, ParamsError
from draftsmith.manifest import write_bytes, write_json
from draftsmith.nn.layers import LayerGeometry
from draftsmith.nn.rope import Rope
from draftsmith.params import Drafter as DrafterRow
from draftsmith.params import Target as TargetRow
from draftsmith.targets.base import SharedWeights, load_shared, read_config, read_tensors
from draftsmith.targets.families import FAMILIES

KINDS: dict[str, type[DFlash] | type[Eagle3] | type[Mtp1]] = {
    "dflash": DFlash,
    "dspark": DSpark,
    "eagle3": Eagle3,
    "mtp1": Mtp1,
}
WEIGHTS_NAME = "model.safetensors"
CONFIG_NAME = "config.json"


def drafter_config(row: DrafterRow, *, target: TargetRow, target_folder: Path) -> DrafterConfig:
    """The config of a drafter row on a target. Raises ParamsError where the two do not fit."""
    family = FAMILIES[target.family]
    geometry = family.geometry(family.text_config(read_config(target_folder)))
    if geometry.head_norms and not row.head_norms:
        raise ParamsError(
            f"drafters.*.head_norms must be true on {family.name} targets, whose layers have head norms",
            got=row.head_norms,
            where="params.yaml: drafters",
        )
    if row.kind == "mtp1" and target.last_hidden != "all":
        raise ParamsError(
            "an mtp1 drafter reads the last hidden state of every token",
            got=f"last_hidden {target.last_hidden}",
            expected="all",
            where="params.yaml: targets.*.last_hidden",
        )
    if row.layers > target.num_layers:
        raise ParamsError("drafters.*.layers", got=row.layers, expected=f"<= {target.num_layers} layers of the target")
    return DrafterConfig(
        kind=row.kind,
        family=family.name,
        block_size=row.block_size,
        num_layers=row.layers,
        geometry=LayerGeometry(**{**asdict(geometry), "head_norms": row.head_norms}),
        vocab_size=target.vocab_size,
        mask_token_id=target.mask_token_id,
        capture_layers=target.capture_layers,
        windows=(row.sliding_window,) * row.layers,
        sequential=None if row.sequential is None else (row.sequential.kind, row.sequential.rank),
        confidence=row.confidence,
        confidence_with_markov=row.confidence_with_markov,
        sample_from_anchor=row.sample_from_anchor,
        step_decay=row.step_decay if row.kind == "eagle3" else 1.0,
    )


def build_drafter(config: DrafterConfig, *, target_folder: Path, shared: SharedWeights | None = None) -> Drafter:
    """An uninitialised drafter that shares the target's embedding and LM head (read from its weights if not given)."""
    family = FAMILIES[config.family]
    frequencies, scale = family.rope(family.text_config(read_config(target_folder)))
    shared = shared or load_shared(target_folder, family=family)
    return KINDS[config.kind](config, shared=shared, rope=Rope(frequencies, scale=scale))


def start_from_target(drafter: Drafter, *, target_folder: Path) -> list[str]:
    """Start the draft layers as the target's own last layers of their shape; returns the names that were set.

    The projection in front (`fc`, `input_proj`) passes the last state that it reads through; the context's norm is the
    input norm of the first copied layer (so that context keys and values begin as the target's own where that layer
    follows the captured one), `norm` the target's final norm. A projection that reads more than the target's does
    starts with the target's weights on its last columns and zero on the others. Head norms that the target lacks stay
    at one; where the target has fewer layers of the draft layers' shape than there are draft layers, the first draft
    layers keep their random start.
    """
    config = drafter.config
    family = FAMILIES[config.family]
    whole = read_config(target_folder)
    prefix = family.weight_prefix(whole)
    copied = family.start_layers(family.text_config(whole))[-config.num_layers :]
    first = config.num_layers - len(copied)
    state = drafter.state_dict(keep_vars=True)
    sources = {"norm.weight": f"{prefix}norm.weight"}
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


def config_body(config: DrafterConfig) -> dict[str, object]:
    """The drafter's config.json: our own fields, whole."""
    return {"draftsmith_version": 1, **asdict(config)}


def save_drafter(drafter: Drafter, *, folder: Path, dtype: torch.dtype) -> None:
    """Write config.json and model.safetensors (the drafter's own weights; the shared ones are the target's)."""
    tensors: dict[str, Tensor] = {
        name: value.to(dtype).contiguous().cpu() for name, value in drafter.state_dict().items()
    }
    write_json(folder / CONFIG_NAME, config_body(drafter.config))
    write_bytes(folder / WEIGHTS_NAME, save(tensors))


def read_drafter_config(folder: Path) -> DrafterConfig:
    """Read config.json of a drafter folder; raises ContractError if it is missing or not ours."""
    try:
        body = json.loads((folder / CONFIG_NAME).read_text())
        if body.pop("draftsmith_version") != 1:
            raise ContractError("drafter config of another version", where=str(folder / CONFIG_NAME))
        body["geometry"] = LayerGeometry(**body["geometry"])
        for name in ("capture_layers", "windows", "sequential"):
            body[name] = None if body[name] is None else tuple(body[name])
        return DrafterConfig(**body)
    except FileNotFoundError:
        raise ContractError(
            "drafter folder has no config.json", got=folder, expected=f"`draftsmith train --key {folder.name}` first"
        ) from None
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ContractError(f"drafter config cannot be read: {error}", where=str(folder / CONFIG_NAME)) from None


def load_drafter(folder: Path, *, target_folder: Path, shared: SharedWeights, dtype: torch.dtype) -> Drafter:
    """Load a drafter by its folder; raises ContractError that lists missing, extra and misshapen weights."""
    config = read_drafter_config(folder)
    drafter = build_drafter(config, target_folder=target_folder, shared=shared)
    try:
        tensors = load_file(folder / WEIGHTS_NAME)
    except (OSError, SafetensorError) as error:
        raise ContractError(f"drafter weights cannot be read: {error}", where=str(folder / WEIGHTS_NAME)) from None
    parameters = drafter.state_dict(keep_vars=True)
    problems = [f"missing {name}" for name in sorted(parameters.keys() - tensors.keys())]
    problems += [f"extra {name}" for name in sorted(tensors.keys() - parameters.keys())]
    problems += [
        f"{name} is {list(tensors[name].shape)}, expected {list(parameters[name].shape)}"
        for name in sorted(parameters.keys() & tensors.keys())
        if tensors[name].shape != parameters[name].shape
    ]
    if problems:
        raise ContractError("drafter weights do not fit their config: " + "; ".join(problems), where=str(folder))
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
    return drafter.to(shared.head.device, dtype).eval().requires_grad_(False)
