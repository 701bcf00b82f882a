"""`draftsmith export`: a trained drafter as a directory that stands alone, in the form that others read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from draftsmith.drafters import deepspec
from draftsmith.drafters.base import DrafterConfig
from draftsmith.drafters.contract import CONTRACT_NAME
from draftsmith.drafters.fields import Fields
from draftsmith.drafters.registry import CONFIG_NAME, load_drafter, own_weights, shared_weights, write_weights
from draftsmith.drafters.weights import WEIGHTS_NAME
from draftsmith.errors import ContractError
from draftsmith.jobs.parts import check_drafter, target_folder
from draftsmith.manifest import write_bytes
from draftsmith.params import Params
from draftsmith.paths import Workspace
from draftsmith.targets.base import Family, load_shared
from draftsmith.targets.families import FAMILIES
from draftsmith.targets.fetch import load_chat_format

FILES = (CONTRACT_NAME, CONFIG_NAME, WEIGHTS_NAME)
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Exported:
    """A written directory: its architecture, the size of its weights in bytes, and what public readers do not know."""

    folder: Path
    architecture: str
    num_bytes: int
    notes: tuple[str, ...]

    @property
    def text(self) -> str:
        told = [f"{self.folder}: {self.architecture}, {self.num_bytes} bytes of weights"]
        return "\n".join([*told, *(f"note: {note}" for note in self.notes)])


def run(workspace: Workspace, params: Params, key: str, *, out: Path) -> Exported:
    """Export the trained drafter of `key` in DeepSpec's form, with its target's embedding and LM head.

    Raises ContractError that names the first field in which the drafter was made for another target, text or block.
    """
    place = target_folder(workspace, params, params.run(key).target)
    folder = workspace.drafter_dir(key)
    check_drafter(workspace, params, key, place=place, chat=load_chat_format(place.folder))
    return export_deepspec(folder, out=out, target=place.folder, family=FAMILIES[place.row.family])


def export_deepspec(folder: Path, *, out: Path, target: Path, family: Family) -> Exported:
    """Write the drafter of `folder` to `out`, whole: config, weights with the target's own two, and its contract.

    Weights are in the dtype that the drafter's config names. Raises ContractError for a drafter that does not
    load for the target, and for a folder `out` that holds anything else.
    """
    _check_out(out, source=folder)
    shared = load_shared(target, family=family)
    drafter = load_drafter(folder, target_folder=target, shared=shared, dtype=torch.float32)
    config, path = drafter.config, folder / CONFIG_NAME
    own = Fields(json.loads(path.read_text()), where=str(path))
    dtype: torch.dtype = getattr(torch, own.choice("dtype", DTYPES))
    num_anchors = own.integer("num_anchors", least=1, default=deepspec.NUM_ANCHORS)
    written = deepspec.write_body(config, dtype=dtype, num_anchors=num_anchors)
    if (folder / CONTRACT_NAME).is_file():
        write_bytes(out / CONTRACT_NAME, (folder / CONTRACT_NAME).read_bytes())
    write_weights(out, written, own_weights(drafter, dtype=dtype) | shared_weights(shared, dtype=dtype))
    size = (out / WEIGHTS_NAME).stat().st_size
    return Exported(out, deepspec.architecture(config), size, tuple(notes(config)))


def notes(config: DrafterConfig) -> list[str]:
    """What of a drafter is draftsmith's own, so that readers of DeepSpec's form refuse it or take it for another."""
    found = []
    if config.family not in deepspec.PUBLIC_LAYERS or config.kind not in deepspec.PUBLIC_KINDS:
        found.append(f"{deepspec.architecture(config)} is draftsmith's own class; no public engine loads it")
    if not config.sample_from_anchor:
        found.append("sample_from_anchor false is draftsmith's own field; DeepSpec drafts from the anchor's slot")
    if any(window is not None for window in config.windows):
        found.append("sliding layers are bidirectional inside a block; DeepSpec's own drafters have none")
    return found


def _check_out(out: Path, *, source: Path) -> None:
    if out.resolve() == source.resolve():
        raise ContractError("an export would overwrite the drafter it is made from", got=out)
    others = sorted(path.name for path in out.iterdir() if path.name not in FILES) if out.is_dir() else []
    if others:
        told = ", ".join(others[:5])
        raise ContractError("the folder of an export holds other files", got=told, expected="none", where=str(out))
