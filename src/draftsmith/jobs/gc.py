"""`draftsmith cache gc`: deletes caches that nothing names any more. Shows first, looks again, deletes last.

Looked at are the prefixes under `cache/`, and under `stream/`, where a training that was killed leaves what it had not
consumed; never prompts, answers or training results. A prefix is kept if any of these holds, and the text says which:

- a commit of this repository names it, or a working copy of it does (see `jobs.history` for what counts);
- a reference in the store names a working copy on another machine, or one on this machine that still names it;
- a live process holds a claim under it;
- its newest object or record is younger than `--older-than`.

A cache without any manifest was never finished: garbage by the same rules.
"""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath

from draftsmith.cache.claims import live_holder
from draftsmith.cache.estimate import size_text
from draftsmith.cache.references import Reference, read_references
from draftsmith.errors import CacheError, DraftsmithError, ParamsError
from draftsmith.jobs.history import History
from draftsmith.jobs.progress import progress
from draftsmith.jobs.stores import workspace_store
from draftsmith.paths import Workspace
from draftsmith.storage import ObjectInfo, Store, records_prefix

FAMILIES = ("cache", "stream")
UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
THREADS = 8
# So many objects, and so many seconds at most, go by before claims and references are looked at once more.
CHUNK = 500
LOOK_AGAIN_S = 20.0
MAX_VERSIONS = 1000
SHOWN_REASONS = 3


@dataclass(frozen=True)
class GcEntry:
    """One prefix: how much lies there (objects and bytes; records counted apart), its age, and why it is kept.

    `age_s` are the seconds since the newest object or record was written. No `reasons`: nothing keeps it.
    """

    prefix: str
    num_objects: int
    num_bytes: int
    num_records: int
    age_s: float
    reasons: tuple[str, ...]

    @property
    def text(self) -> str:
        what = f"{self.num_objects:,} objects, {size_text(self.num_bytes)}, {age_text(self.age_s)} old"
        if not self.num_objects:
            what = f"only {self.num_records:,} records, {age_text(self.age_s)} old"
        if not self.reasons:
            return f"delete  {self.prefix}: {what}"
        more = len(self.reasons) - SHOWN_REASONS
        reasons = [*self.reasons[:SHOWN_REASONS], *([f"and {more} more"] if more > 0 else [])]
        return "\n".join([f"keep    {self.prefix}: {what}", *(f"          {reason}" for reason in reasons)])


@dataclass(frozen=True)
class GcPlan:
    """What a store holds and what would be deleted. `older_than_s` in seconds."""

    store_uri: str
    older_than_s: float
    entries: tuple[GcEntry, ...]

    @property
    def doomed(self) -> tuple[GcEntry, ...]:
        return tuple(entry for entry in self.entries if not entry.reasons)

    @property
    def text(self) -> str:
        if not self.entries:
            return f"store {self.store_uri} holds no caches"
        lines = [f"store {self.store_uri}", *(entry.text for entry in self.entries)]
        if not self.doomed:
            return "\n".join([*lines, f"nothing to delete, {len(self.entries)} kept"])
        total = _Freed(sum(entry.num_objects for entry in self.doomed), sum(entry.num_bytes for entry in self.doomed))
        lines.append(f"to delete: {len(self.doomed)} of {len(self.entries)}, {total.text}")
        return "\n".join(
            [*lines, "Commits that this clone has not fetched were not read: `git fetch --all` brings them."]
        )


def parse_age(text: str) -> float:
    """`90m`, `12h`, `7d` (also s and w) -> seconds. Raises ParamsError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip())
    if found is None:
        expected = "a number with s, m, h, d or w, such as 90m, 12h or 7d"
        raise ParamsError("--older-than cannot be read", got=repr(text), expected=expected)
    return float(found[1]) * UNITS_S[found[2]]


def find(workspace: Workspace, *, older_than_s: float) -> GcPlan:
    """Look at every cache of the store; deletes nothing.

    Raises CacheError while anything that may name a cache cannot be read: a commit's dvc.lock or manifest, a manifest
    of a working copy, a worktree; or if this is no git repository at all.
    """
    store = workspace_store(workspace)
    lookout = _Lookout(workspace, store, older_than_s=older_than_s)
    objects, records = defaultdict[str, list[ObjectInfo]](list), defaultdict[str, list[ObjectInfo]](list)
    for family in FAMILIES:
        for item in store.list(family):
            objects[_prefix_of(item.path)].append(item)
        for item in store.list(records_prefix(family)):
            records[_prefix_of(item.path.removeprefix(records_prefix("")))].append(item)
    # Names are read after the listing: what is finished in between is named, or not in the list.
    lookout.look()
    found = sorted({prefix for prefix in (*objects, *records) if prefix})
    entries = tuple(lookout.judge(prefix, objects[prefix], records[prefix]) for prefix in found)
    return GcPlan(store.uri, older_than_s, entries)


def delete(workspace: Workspace, plan: GcPlan) -> str:
    """Delete what the plan dooms and nothing keeps now; says what was freed. Safe to stop, and to run again.

    Raises what `find` raises, before the next prefix is touched, and StoreError with what was freed until then.
    """
    store = workspace_store(workspace)
    lookout = _Lookout(workspace, store, older_than_s=plan.older_than_s)
    freed, kept, num_done = _Freed(), [], 0
    with progress("cache gc", total=sum(entry.num_objects for entry in plan.doomed), unit="objects") as advance:
        for entry in plan.doomed:
            before = freed.num_objects
            try:
                reasons = lookout.judge_now(entry.prefix).reasons
                if not reasons:
                    remover = _Remover(store, entry.prefix, freed=freed, holders=lookout.holders, advance=advance)
                    reasons = remover.run()
            except DraftsmithError as error:
                done = f"{num_done} caches and {freed.text} were deleted before"
                raise type(error)(f"stopped at {entry.prefix}: {error}", where=done) from None
            if reasons:
                half = ", the rest of it" if freed.num_objects > before else ""
                kept.append(f"kept {entry.prefix}{half} after all: {'; '.join(reasons)}")
            else:
                num_done += 1
    return "\n".join([*kept, f"deleted {num_done} of {len(plan.doomed)}: {freed.text}"])


class _Lookout:
    """Judges prefixes: who names them, who works on them, how young they are."""

    def __init__(self, workspace: Workspace, store: Store, *, older_than_s: float) -> None:
        self._root, self._store, self._older_than_s = workspace.root.resolve(), store, older_than_s
        self._histories: dict[Path, History] = {}
        self._named: dict[Path, dict[str, list[str]]] = {}

    def look(self) -> None:
        """Read anew what this repository names. What other clones name is read when a reference leads there."""
        self._named.clear()
        self._names_of(self._root)

    def judge_now(self, prefix: str) -> GcEntry:
        """The prefix as it is at this moment; claims, which come and go, are looked at last."""
        objects = list(self._store.list(prefix))
        self.look()
        return self.judge(prefix, objects, list(self._store.list(records_prefix(prefix))))

    def judge(self, prefix: str, objects: list[ObjectInfo], records: list[ObjectInfo]) -> GcEntry:
        """Why the prefix with these objects and records is kept, if it is; `look` must have been called."""
        newest = max((item.modified_s for item in (*objects, *records)), default=0.0)
        reasons = [f"named by {source}" for source in self._names_of(self._root).get(prefix, [])]
        reasons += self._holders(prefix, records, newest_s=newest)
        return GcEntry(
            prefix,
            len(objects),
            sum(item.size for item in objects),
            len(records),
            time.time() - newest,
            tuple(reasons),
        )

    def holders(self, prefix: str) -> tuple[str, ...]:
        """What records in the store say now: live claims, references, and records that are young."""
        records = list(self._store.list(records_prefix(prefix)))
        newest = max((item.modified_s for item in records), default=0.0)
        return tuple(self._holders(prefix, records, newest_s=newest))

    def _holders(self, prefix: str, records: Iterable[ObjectInfo], *, newest_s: float) -> list[str]:
        reasons = []
        try:
            for item in records:
                holder = live_holder(self._store, item.path) if _is_claim(item.path) else None
                if holder is not None:
                    reasons.append(f"in use by {holder}")
            for reference in read_references(self._store, prefix):
                reason = self._reference_reason(reference, prefix)
                if reason is not None:
                    reasons.append(f"used by {reason}")
        except CacheError as error:
            reasons.append(str(error))
        age_s = time.time() - newest_s
        if age_s < self._older_than_s:
            reasons.append(f"younger than {age_text(self._older_than_s)}")
        return reasons

    def _reference_reason(self, reference: Reference, prefix: str) -> str | None:
        """Who uses the prefix by this reference, or None if it is known that its working copy does not any more."""
        name = copy_name(reference.root)
        cure = f"if it is gone for good, delete {self._store.uri}/{reference.path}"
        if not reference.is_here:
            return f"{name} on {reference.host} ({cure})"
        if reference.root == self._root:
            return None
        try:
            if not reference.root.is_dir():
                return None if reference.is_mounted else f"{name}, and {reference.mount} is not mounted now ({cure})"
            sources = self._names_of(reference.root).get(prefix, [])
        except (DraftsmithError, OSError) as error:
            return f"{name}, which cannot be asked now: {error}"
        if not sources:
            return None
        return sources[0] if sources[0].startswith(name) else f"{name}: {sources[0]}"

    def _names_of(self, root: Path) -> dict[str, list[str]]:
        """Prefix -> who names it in the repository at `root`; of another's folder without git only its manifests."""
        if root not in self._named:
            is_own = root == self._root
            history = self._histories.setdefault(root, History(root) if is_own else History(root, name=copy_name(root)))
            self._named[root] = history.read() if is_own or history.is_repository else history.read_manifests()
        return self._named[root]


@dataclass
class _Freed:
    """What was deleted so far: objects (every version counts as one) and their bytes; records are not counted."""

    num_objects: int = 0
    num_bytes: int = 0

    @property
    def text(self) -> str:
        return f"{self.num_objects:,} objects, {size_text(self.num_bytes)}"


@dataclass
class _Remover:
    """Deletes one prefix: its objects, then its records.

    Records go last because a commit record without objects misleads no writer (a shard is done only if its objects are
    there with their sizes), and because they keep the version ids that a run after a kill needs. A bucket that keeps
    versions frees room only when each version is deleted by its id; versions behind a delete marker that someone else
    set are not seen here.
    """

    store: Store
    prefix: str
    freed: _Freed
    holders: Callable[[str], tuple[str, ...]]
    advance: Callable[[int], None]
    looked_s: float = field(default_factory=time.monotonic)

    def run(self) -> tuple[str, ...]:
        """Returns what made it stop half-way: nothing, unless somebody began to use the prefix."""
        is_versioned = self._is_versioned()
        with ThreadPoolExecutor(THREADS, thread_name_prefix="gc") as pool:
            ids = self._committed_versions(pool) if is_versioned else {}
            for folder in (self.prefix, records_prefix(self.prefix)):
                for _ in range(MAX_VERSIONS if is_versioned else 1):
                    items = list(self.store.list(folder))
                    if not items:
                        break
                    reasons = self._clear(items, pool, remove=partial(self._delete, is_versioned=is_versioned, ids=ids))
                    if reasons:
                        return reasons
                    # What lay under the newest version is not in the commit records.
                    ids = {}
        return ()

    def _clear(
        self, items: list[ObjectInfo], pool: ThreadPoolExecutor, *, remove: Callable[[ObjectInfo], None]
    ) -> tuple[str, ...]:
        """Delete the newest version of each; returns what made it stop."""
        for start in range(0, len(items), CHUNK):
            reasons = self._look_again()
            if reasons:
                return reasons
            chunk = items[start : start + CHUNK]
            for _ in pool.map(remove, chunk):
                pass
            contents = [item.size for item in chunk if not item.path.startswith(records_prefix(""))]
            self.freed.num_objects += len(contents)
            self.freed.num_bytes += sum(contents)
            self.advance(len(contents))
        return ()

    def _is_versioned(self) -> bool:
        """Asked of a small object, because a local folder reads an object to tell about it."""
        items = [*self.store.list(self.prefix), *self.store.list(records_prefix(self.prefix))]
        told = (self.store.head(item.path) for item in sorted(items, key=lambda item: item.size))
        info = next((info for info in told if info is not None), None)
        return info is not None and info.version_id is not None

    def _look_again(self) -> tuple[str, ...]:
        if time.monotonic() - self.looked_s < LOOK_AGAIN_S:
            return ()
        self.looked_s = time.monotonic()
        return self.holders(self.prefix)

    def _delete(self, item: ObjectInfo, *, ids: dict[str, str], is_versioned: bool) -> None:
        version_id = ids.get(item.path)
        if is_versioned and version_id is None:
            info = self.store.head(item.path)
            version_id = None if info is None else info.version_id
        if version_id is None:
            self.store.delete(item.path)
        else:
            self.store.delete(item.path, version_id=version_id)

    def _committed_versions(self, pool: ThreadPoolExecutor) -> dict[str, str]:
        """Path -> version id, from the commit records; saves one request an object."""
        paths = [item.path for item in self.store.list(records_prefix(self.prefix)) if "/commits/" in item.path]
        found: dict[str, str] = {}
        for path, data in zip(paths, pool.map(self.store.get, paths), strict=True):
            below = path.removeprefix(records_prefix("")).partition("/commits/")[0]
            with suppress(ValueError, KeyError, TypeError):
                found |= {f"{below}/{item['path']}": str(item["version_id"]) for item in json.loads(data)["objects"]}
        return found


def copy_name(root: Path) -> str:
    return f"working copy {root}"


def _prefix_of(path: str) -> str:
    """`cache/a-0123abcd/context/zarr.json` -> `cache/a-0123abcd`; "" for what lies in no prefix."""
    parts = path.split("/")
    return "/".join(parts[:2]) if len(parts) > 2 else ""


def _is_claim(path: str) -> bool:
    place = PurePosixPath(path)
    return place.parent.name == "claims" or place.name == "claim.json"


def age_text(seconds: float) -> str:
    """Seconds in the largest unit that gives at least two of it."""
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{max(0.0, seconds):.0f} s"
