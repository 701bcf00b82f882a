"""What several jobs open: the store, a target with its text, a trained drafter."""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from draftsmith.drafters.base import Drafter
from draftsmith.drafters.contract import (
    CAPTURE_CONVENTION,
    Contract,
    config_facts,
    open_contract,
    target_facts,
    text_facts,
)
from draftsmith.drafters.registry import drafter_config, load_drafter
from draftsmith.params import Params
from draftsmith.params import Target as TargetRow
from draftsmith.paths import Workspace
from draftsmith.targets.base import Target, check_family, load_target, read_config
from draftsmith.targets.families import FAMILIES
from draftsmith.targets.fetch import check_dimensions, fetch_target, load_chat_format
from draftsmith.text.chat import ChatFormat


def device_name() -> str:
    """The first GPU if there is one, else the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def processor() -> str:
    """The kind of processor that computes here, as commit records name it."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu {platform.machine()}"


@dataclass(frozen=True)
class TargetFolder:
    """A target's folder on this machine, checked against its row, and the digest of its config and weights."""

    name: str
    row: TargetRow
    folder: Path
    digest: str


@dataclass(frozen=True)
class OpenTarget:
    """A loaded target with its text."""

    place: TargetFolder
    target: Target
    chat: ChatFormat


def target_folder(workspace: Workspace, params: Params, name: str) -> TargetFolder:
    """Fetch the target if need be and check it against its row. Raises TargetError."""
    row = params.target(name)
    folder = fetch_target(name, row, folder=workspace.target_dir(name))
    family = FAMILIES[row.family]
    config = read_config(folder)
    check_family(config, family, folder)
    check_dimensions(row, family.text_config(config), name=name)
    return TargetFolder(name, row, folder, weights_digest(folder))


def weights_digest(folder: Path) -> str:
    """sha256 over config.json and all safetensors of a folder."""
    digest = hashlib.sha256()
    for path in [folder / "config.json", *sorted(folder.glob("*.safetensors"))]:
        digest.update(path.name.encode())
        with path.open("rb") as stream:
            while block := stream.read(1 << 24):
                digest.update(block)
    return digest.hexdigest()


def open_target(workspace: Workspace, params: Params, name: str) -> OpenTarget:
    """Load a target in its row's dtype on this machine's device."""
    place = target_folder(workspace, params, name)
    return OpenTarget(place, load_placed(place), load_chat_format(place.folder))


def load_placed(place: TargetFolder) -> Target:
    """The target of a folder, in its row's dtype on this machine's device."""
    return load_target(
        place.folder,
        family=FAMILIES[place.row.family],
        capture_layers=place.row.capture_layers,
        dtype=place.row.dtype,
        device=device_name(),
    )


def contract_facts(place: TargetFolder, chat: ChatFormat) -> dict[str, Any]:
    """What the contract of a drafter that is made for this target says of it."""
    row = place.row
    return {
        "target": row.hf_id or row.package or place.name,
        "revision": metadata.version(row.package) if row.package is not None else row.revision,
        **target_facts(read_config(place.folder), family=FAMILIES[row.family]),
        "target_digest": place.digest,
        **text_facts(chat),
        "system_prompt": row.system_prompt,
        "capture_convention": CAPTURE_CONVENTION,
        "capture_layers": row.capture_layers,
    }


def trained_with(params: Params, key: str) -> dict[str, Any]:
    """What the contract says of how a drafter was trained: its row, and the recipe without what only watches it."""
    watching = {"checkpoint_every", "keep_checkpoints", "validate_every"}
    return {
        "drafter": params.drafters[params.run(key).drafter].model_dump(mode="json"),
        "train": params.train_of(key).model_dump(mode="json", exclude=watching),
    }


def open_drafter(workspace: Workspace, params: Params, key: str, *, opened: OpenTarget) -> Drafter:
    """Load the trained drafter of `key` for a loaded target.

    Raises ContractError that names the first field in which it was made for another target, text or block.
    """
    check_drafter(workspace, params, key, place=opened.place, chat=opened.chat)
    return load_drafter(
        workspace.drafter_dir(key),
        target_folder=opened.place.folder,
        shared=opened.target.shared,
        dtype=opened.target.dtype,
    )


def check_drafter(workspace: Workspace, params: Params, key: str, *, place: TargetFolder, chat: ChatFormat) -> Contract:
    """The contract of the trained drafter of `key`, which fits the target and the rows of params.yaml.

    Raises ContractError that names the first field in which it does not. What the drafter does not say is told on
    stderr.
    """
    folder, name = workspace.drafter_dir(key), params.run(key).drafter
    contract = open_contract(folder, expected=f"`draftsmith train --key {key}` first")
    tell_unknown(folder, contract.unknown)
    contract.check(contract_facts(place, chat), meets=f"target {place.name}")
    config = drafter_config(params.drafters[name], target=place.row, target_folder=place.folder)
    contract.check(config_facts(config), meets=f"drafters.{name} of params.yaml")
    return contract


def tell_unknown(folder: Path, unknown: Iterable[str]) -> None:
    """Say on stderr what a drafter without a contract of its own does not tell, so that nobody could check it."""
    names = ", ".join(unknown)
    if names:
        sys.stderr.write(f"draftsmith: the drafter in {folder} does not say, so it is not checked: {names}\n")
