"""A drafter's weights on disk: safetensors only, one file or shards under an index. Nothing is ever unpickled."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.errors import ContractError

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a drafter folder by its name: of `model.safetensors`, or of the shards that its index names.

    Raises ContractError for a folder without them (naming pickled files that lie there in their place), for a file
    that cannot be read, and for an index that does not fit its shards.
    """
    if (folder / WEIGHTS_NAME).is_file():
        return _read_file(folder / WEIGHTS_NAME)
    if (folder / INDEX_NAME).is_file():
        return _read_shards(folder)
    pickled = sorted(path.name for pattern in PICKLED for path in folder.glob(pattern))
    got = f"{', '.join(pickled)}, which are pickles and are not opened" if pickled else "no weights"
    raise ContractError("drafter without safetensors", got=got, expected=WEIGHTS_NAME, where=str(folder))


def check_weights(tensors: Mapping[str, Tensor], *, expected: Mapping[str, Tensor], where: str) -> None:
    """Raises ContractError that lists every weight that is missing, too many, of another shape or not of floats."""
    problems = [f"missing {name}" for name in sorted(expected.keys() - tensors.keys())]
    problems += [f"extra {name}" for name in sorted(tensors.keys() - expected.keys())]
    for name in sorted(expected.keys() & tensors.keys()):
        found, wanted = tensors[name], expected[name]
        if found.shape != wanted.shape:
            problems.append(f"{name} is {list(found.shape)}, expected {list(wanted.shape)}")
        if found.dtype not in FLOATS:
            kinds = " or ".join(_name(dtype) for dtype in FLOATS)
            problems.append(f"{name} is {_name(found.dtype)}, expected {kinds}")
    if problems:
        raise ContractError("drafter weights do not fit their config: " + "; ".join(problems), where=where)


def check_same(found: Tensor, *, target: Tensor, name: str, where: str) -> None:
    """Raises ContractError unless a tensor [V, D] of the drafter's file is the target's, in the file's dtype."""
    if found.shape != target.shape:
        raise ContractError(
            f"{name} of the drafter is of another shape than the target's",
            got=list(found.shape),
            expected=list(target.shape),
            where=where,
        )
    other = (found != target.to(found.device, found.dtype)).any(dim=-1)
    if bool(other.any()):
        raise ContractError(
            f"the drafter brings its own {name}",
            got=f"{int(other.sum())} of {len(found)} rows that differ from the target's",
            expected="the target's, which drafters share here",
            where=where,
        )


def _read_file(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ContractError(f"drafter weights cannot be read: {error}", where=str(path)) from None


def _read_shards(folder: Path) -> dict[str, Tensor]:
    path = folder / INDEX_NAME
    try:
        shard_of = json.loads(path.read_text())["weight_map"]
        shards = _plain_names(shard_of.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ContractError(f"index of drafter weights cannot be read: {error!r}", where=str(path)) from None
    problems, tensors = [], {}
    for shard in shards:
        if not (folder / shard).is_file():
            problems.append(f"shard {shard} is not there")
            continue
        for name, tensor in _read_file(folder / shard).items():
            if shard_of.get(name) != shard:
                problems.append(f"{shard} holds {name}, which the index does not name there")
            tensors[name] = tensor
    if not problems:
        problems = [f"{shard_of[name]} lacks {name}" for name in sorted(shard_of.keys() - tensors.keys())]
    if problems:
        raise ContractError("drafter weights do not fit their index: " + "; ".join(problems), where=str(path))
    return tensors


def _plain_names(names: Iterable[str]) -> list[str]:
    """Different file names of one folder; raises ValueError for one that leads out of it."""
    found = sorted(set(names))
    outside = [name for name in found if Path(name).name != name or not name.endswith(".safetensors")]
    if outside:
        raise ValueError(f"no safetensors file of this folder: {outside[0]}")
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
