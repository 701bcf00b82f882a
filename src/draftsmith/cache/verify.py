"""Whether a store still holds exactly the cache that a manifest names."""

from __future__ import annotations

import hashlib
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from draftsmith.cache.reader import missing_cache, remake_command
from draftsmith.cache.schema import COLUMN_ARRAYS, GROUP_OBJECT
from draftsmith.errors import ObjectMissingError
from draftsmith.manifest import Manifest, ObjectRecord
from draftsmith.storage import Store

# Up to so many bytes every object is hashed, above it a random sample of as many.
BUDGET_BYTES = 2 * 1024**3
# Objects are read in parts, so that memory is the number of threads times this, however large the shards are.
PART_BYTES = 8 * 1024**2
THREADS = 8
SHOWN_PROBLEMS = 20


@dataclass(frozen=True)
class Problem:
    """One object that is not as the manifest says. `path` is below the cache's prefix."""

    kind: Literal["missing", "size", "sha256", "swapped", "extra"]
    path: str
    detail: str


@dataclass(frozen=True)
class VerifyReport:
    """What is wrong, in path order. The sizes of all objects were compared, `num_hashed` of them read and hashed.

    `num_bytes` are those of all objects, `hashed_bytes` those that were read; it took `seconds`. `is_stream`: the
    manifest is a plan only, and the store is to hold nothing of it.
    """

    prefix: str
    store: str
    num_objects: int
    num_bytes: int
    num_hashed: int
    hashed_bytes: int
    seconds: float
    problems: tuple[Problem, ...]
    remedy: str
    is_stream: bool = False

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def text(self) -> str:
        """One line if all is well, else one line a problem and how to mend them."""
        if self.is_stream:
            return f"{self.prefix}: planned only, its shards are made while training reads them: nothing to verify"
        share = "all" if self.num_hashed == self.num_objects else f"{self.num_hashed}, drawn anew each time,"
        head = (
            f"{self.prefix}: {self.num_objects} objects, {self.num_bytes} bytes; all sizes compared, {share} read and "
            f"hashed ({self.hashed_bytes} bytes) in {self.seconds:.1f} s"
        )
        if self.ok:
            return f"{head}: all as the manifest says"
        lines = [f"{item.kind}: {self.prefix}/{item.path} ({item.detail})" for item in self.problems]
        if len(lines) > SHOWN_PROBLEMS:
            lines[SHOWN_PROBLEMS:] = [f"and {len(lines) - SHOWN_PROBLEMS} more"]
        return "\n".join([f"{head}: {len(self.problems)} problems in store {self.store}", *lines, self.remedy])


def verify_cache(store: Store, manifest: Manifest, *, deep: bool, sample_bytes: int | None = None) -> VerifyReport:
    """Compare the store with the manifest: sizes of all objects, extra objects, and sha256 of all or a sample.

    All are hashed if they have `sample_bytes` (default BUDGET_BYTES) at most in all, or with `deep`. A sample is all
    metadata objects and others up to so many bytes, one at least, drawn anew each time. Raises StoreError if the store
    cannot be read, ObjectMissingError if it has nothing of the cache.
    """
    started = time.monotonic()
    if manifest.is_stream:
        return VerifyReport(manifest.prefix, store.uri, 0, 0, 0, 0, 0.0, (), "", is_stream=True)
    skip = len(manifest.prefix) + 1
    sizes = {item.path[skip:]: item.size for item in store.list(manifest.prefix)}
    if not sizes:
        raise missing_cache(store, manifest, GROUP_OBJECT)
    problems: list[Problem] = []
    whole: list[ObjectRecord] = []
    cut: list[ObjectRecord] = []
    unknown = set(sizes)
    for record in manifest.objects:
        unknown.discard(record.path)
        size = sizes.get(record.path)
        if size is None:
            problems.append(_missing(record))
        else:
            (whole if size == record.size else cut).append(record)
    problems += [Problem("extra", path, f"{sizes[path]} bytes that the manifest does not name") for path in unknown]
    hashed = whole if deep else _sample(whole, budget=BUDGET_BYTES if sample_bytes is None else sample_bytes)
    digests = _Digests(store, manifest.prefix, sizes)
    digests.add(hashed)
    problems += [_missing(record) for record in hashed if digests.found[record.path] is None]
    wrong = [record for record in hashed if digests.found[record.path] not in (record.sha256, None)]
    problems += _name_damage([*wrong, *cut], [*whole, *cut], digests)
    return VerifyReport(
        prefix=manifest.prefix,
        store=store.uri,
        num_objects=len(manifest.objects),
        num_bytes=manifest.num_bytes,
        num_hashed=digests.num_hashed,
        hashed_bytes=digests.num_bytes,
        seconds=time.monotonic() - started,
        problems=tuple(sorted(problems, key=lambda item: (item.path, item.kind))),
        remedy=f"delete the objects named above, then run `{remake_command(manifest)}`: it makes their shards only",
    )


class _Digests:
    """sha256 of objects, read by threads; None for those that are gone. Objects and bytes are counted."""

    def __init__(self, store: Store, prefix: str, sizes: dict[str, int]) -> None:
        self._store, self._prefix, self._sizes = store, prefix, sizes
        self.found: dict[str, str | None] = {}
        self.num_hashed = self.num_bytes = 0

    def add(self, records: Sequence[ObjectRecord]) -> None:
        """Hash those of `records` that were not hashed before."""
        new = [record.path for record in records if record.path not in self.found]
        with ThreadPoolExecutor(THREADS, thread_name_prefix="verify") as pool:
            self.found |= dict(zip(new, pool.map(self._hash, new), strict=True))
        self.num_hashed += len(new)
        self.num_bytes += sum(self._sizes[path] for path in new)

    def size(self, record: ObjectRecord) -> int:
        """What the object has in the store."""
        return self._sizes[record.path]

    def _hash(self, path: str) -> str | None:
        digest, place, size = hashlib.sha256(), f"{self._prefix}/{path}", self._sizes[path]
        try:
            if size <= PART_BYTES:
                return hashlib.sha256(self._store.get(place)).hexdigest()
            for start in range(0, size, PART_BYTES):
                digest.update(self._store.get_range(place, start=start, length=min(PART_BYTES, size - start)))
        except ObjectMissingError:
            return None
        return digest.hexdigest()


def _missing(record: ObjectRecord) -> Problem:
    return Problem("missing", record.path, f"{record.size} bytes expected")


def _sample(records: Sequence[ObjectRecord], *, budget: int) -> Sequence[ObjectRecord]:
    """All records if they fit the budget, else all metadata and as many others as fit, in manifest order."""
    if sum(record.size for record in records) <= budget:
        return records
    metadata = [record for record in records if _is_metadata(record)]
    data = [record for record in records if not _is_metadata(record)]
    random.SystemRandom().shuffle(data)
    left, drawn = budget - sum(record.size for record in metadata), set[str]()
    for record in data:
        if record.size <= left or not drawn:
            drawn.add(record.path)
            left -= record.size
    return [record for record in records if _is_metadata(record) or record.path in drawn]


def _is_metadata(record: ObjectRecord) -> bool:
    return record.path.endswith("zarr.json") or record.path.partition("/")[0] in COLUMN_ARRAYS


def _name_damage(damaged: list[ObjectRecord], there: list[ObjectRecord], digests: _Digests) -> list[Problem]:
    """What is wrong with objects whose size or sha256 differs, above all whether they hold each other's bytes.

    Where a sample met one half of an exchange, the other half is looked at and named as well.
    """
    owners: dict[str, list[ObjectRecord]] = defaultdict(list)
    for record in there:
        owners[record.sha256].append(record)
    sizes = {record.size for record in there}
    holds: dict[str, list[ObjectRecord]] = {}
    records: dict[str, ObjectRecord] = {}
    while damaged:
        # Bytes of a size that no object has belong to none.
        digests.add([record for record in damaged if digests.size(record) in sizes])
        for record in damaged:
            if digests.found.get(record.path) != record.sha256:
                records[record.path] = record
                holds[record.path] = owners.get(digests.found.get(record.path) or "", [])
        met = {item.path: item for found in holds.values() for item in found}
        damaged = [item for path, item in met.items() if path not in records and path not in digests.found]
    return [_describe(record, holds, digests) for record in records.values()]


def _describe(record: ObjectRecord, holds: dict[str, list[ObjectRecord]], digests: _Digests) -> Problem:
    for other in holds[record.path]:
        if record in holds.get(other.path, []):
            return Problem("swapped", record.path, f"has changed places with {other.path}")
    if holds[record.path]:
        return Problem("swapped", record.path, f"holds the bytes of {holds[record.path][0].path}")
    size = digests.size(record)
    if size != record.size:
        what = "truncated" if size < record.size else "too long"
        return Problem("size", record.path, f"{what}: got {size} bytes, expected {record.size}")
    return Problem("sha256", record.path, f"got {digests.found[record.path]}, expected {record.sha256}")
