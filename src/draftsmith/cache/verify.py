"""Whether a store still holds exactly the cache that a manifest names."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from draftsmith.cache.reader import missing_cache, remake_command
from draftsmith.cache.schema import GROUP_OBJECT
from draftsmith.errors import ObjectMissingError
from draftsmith.manifest import Manifest, ObjectRecord, sha256_hex
from draftsmith.storage import Store

SAMPLE_OBJECTS = 4
SAMPLE_BYTES = 512 * 1024**2
SHOWN_PROBLEMS = 20


@dataclass(frozen=True)
class Problem:
    """One object that is not as the manifest says. `path` is below the cache's prefix."""

    kind: Literal["missing", "size", "sha256", "extra"]
    path: str
    detail: str


@dataclass(frozen=True)
class VerifyReport:
    """What is wrong, in path order. The sizes of all objects were compared, `num_hashed` of them read."""

    prefix: str
    store: str
    num_objects: int
    num_bytes: int
    num_hashed: int
    problems: tuple[Problem, ...]
    remedy: str

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def text(self) -> str:
        """One line if all is well, else one line a problem and how to mend them."""
        head = f"{self.prefix}: {self.num_objects} objects, {self.num_bytes} bytes, {self.num_hashed} read"
        if self.ok:
            return f"{head}, all as the manifest says"
        lines = [f"{item.kind}: {self.prefix}/{item.path} ({item.detail})" for item in self.problems]
        if len(lines) > SHOWN_PROBLEMS:
            lines[SHOWN_PROBLEMS:] = [f"and {len(lines) - SHOWN_PROBLEMS} more"]
        return "\n".join([f"{head}, {len(self.problems)} problems in store {self.store}", *lines, self.remedy])


def verify_cache(store: Store, manifest: Manifest, *, deep: bool) -> VerifyReport:
    """Compare the store with the manifest: sizes of all objects, extra objects, and sha256 of all (`deep`) or a few.

    The few are all metadata objects and up to SAMPLE_OBJECTS others (SAMPLE_BYTES in all), drawn anew each time.
    Raises StoreError if the store cannot be read, ObjectMissingError if it has nothing of the cache.
    """
    skip = len(manifest.prefix) + 1
    sizes = {item.path[skip:]: item.size for item in store.list(manifest.prefix)}
    if not sizes:
        raise missing_cache(store, manifest, GROUP_OBJECT)
    records = {item.path: item for item in manifest.objects}
    problems = [
        Problem("extra", path, f"{sizes[path]} bytes that the manifest does not name")
        for path in sizes.keys() - records
    ]
    whole = []
    for record in manifest.objects:
        size = sizes.get(record.path)
        if size is None:
            problems.append(Problem("missing", record.path, f"{record.size} bytes expected"))
        elif size != record.size:
            problems.append(Problem("size", record.path, f"got {size} bytes, expected {record.size}"))
        else:
            whole.append(record)
    hashed = whole if deep else _sample(whole)
    problems += [problem for record in hashed if (problem := _compare(store, manifest, record)) is not None]
    return VerifyReport(
        manifest.prefix,
        store.uri,
        len(records),
        sum(item.size for item in manifest.objects),
        len(hashed),
        tuple(sorted(problems, key=lambda item: (item.path, item.kind))),
        f"delete the objects named above, then run `{remake_command(manifest)}`: it makes only their shards again",
    )


def _sample(records: list[ObjectRecord]) -> list[ObjectRecord]:
    metadata = [record for record in records if record.path.endswith("zarr.json")]
    data = [record for record in records if not record.path.endswith("zarr.json")]
    drawn = random.SystemRandom().sample(data, min(SAMPLE_OBJECTS, len(data)))
    while len(drawn) > 1 and sum(record.size for record in drawn) > SAMPLE_BYTES:
        drawn.pop()
    return metadata + drawn


def _compare(store: Store, manifest: Manifest, record: ObjectRecord) -> Problem | None:
    try:
        digest = sha256_hex(store.get(f"{manifest.prefix}/{record.path}"))
    except ObjectMissingError:
        return Problem("missing", record.path, f"{record.size} bytes expected")
    if digest == record.sha256:
        return None
    return Problem("sha256", record.path, f"got {digest}, expected {record.sha256}")
