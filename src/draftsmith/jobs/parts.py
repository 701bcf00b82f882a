"""What several jobs open: the store, a target with its text, a trained drafter."""

from __future__ import annotations

import hashlib
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from draftsmith.drafters.base import Drafter
from draftsmith.drafters.contract import CAPTURE_CONVENTION, Contract
from draftsmith.drafters.registry import load_drafter
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


def open_drafter(workspace: Workspace, params: Params, key: str, *, opened: OpenTarget) -> Drafter:
    """Load the trained drafter of `key` for a loaded target; raises ContractError if it was made for another."""
    folder = workspace.drafter_dir(key)
    row = opened.place.row
    Contract.read(folder).check(
        {
            "target": opened.place.name,
            "target_digest": opened.place.digest,
            "tokenizer_digest": opened.chat.digest(),
            "capture_convention": CAPTURE_CONVENTION,
            "capture_layers": row.capture_layers,
            "block_size": params.drafters[params.run(key).drafter].block_size,
            "mask_token_id": row.mask_token_id,
        },
        meets=f"target {opened.place.name}",
    )
    return load_drafter(
        folder, target_folder=opened.place.folder, shared=opened.target.shared, dtype=opened.target.dtype
    )
