"""Checkpoints in the store: files first, a marker with their digests last; the newest whole one is resumed."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from draftsmith.errors import TrainingError
from draftsmith.manifest import ObjectRecord, sha256_hex
from draftsmith.storage import Store

MARKER = "_complete.json"


def tag_of(step: int) -> str:
    """Folder name of the checkpoint after `step` updates."""
    return f"step-{step:06d}"


@dataclass(frozen=True)
class CheckpointStore:
    """Checkpoints of one training run below `prefix` of a store."""

    store: Store
    prefix: str

    def publish(self, folder: Path, *, step: int, keep: int) -> None:
        """Upload every file of `folder`/tag, then the marker, then remove all but the newest `keep` checkpoints."""
        tag = tag_of(step)
        records = []
        for file in sorted(path for path in (folder / tag).rglob("*") if path.is_file()):
            data = file.read_bytes()
            name = f"{tag}/{file.relative_to(folder / tag).as_posix()}"
            self.store.put(f"{self.prefix}/{name}", data)
            records.append(ObjectRecord(name, len(data), sha256_hex(data)))
        marker = json.dumps({"step": step, "objects": [asdict(item) for item in records]}, indent=1)
        self.store.put(f"{self.prefix}/{tag}/{MARKER}", marker.encode())
        for old in self.steps()[:-keep]:
            self.remove(old)
        shutil.rmtree(folder / tag)

    def steps(self) -> list[int]:
        """Steps with a marker, ascending."""
        found = []
        for item in self.store.list(f"{self.prefix}/"):
            match = re.search(rf"/step-(\d+)/{MARKER}$", item.path)
            if match:
                found.append(int(match[1]))
        return sorted(found)

    def remove(self, step: int) -> None:
        """Remove one checkpoint, its marker first."""
        prefix = f"{self.prefix}/{tag_of(step)}/"
        self.store.delete(prefix + MARKER)
        for item in list(self.store.list(prefix)):
            self.store.delete(item.path)

    def fetch(self, step: int, *, folder: Path) -> None:
        """Download a checkpoint into `folder`/tag, checked by digest. Raises TrainingError naming a broken file."""
        body = json.loads(self.store.get(f"{self.prefix}/{tag_of(step)}/{MARKER}"))
        for item in body["objects"]:
            data = self.store.get(f"{self.prefix}/{item['path']}")
            if sha256_hex(data) != item["sha256"]:
                raise TrainingError(
                    f"checkpoint file {item['path']} is broken", got=sha256_hex(data)[:12], expected=item["sha256"][:12]
                )
            path = folder / item["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
