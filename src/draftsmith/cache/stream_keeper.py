"""Streaming mode, rank 0's part: who may compute what when, so that the store never holds more than its limit.

Workers compute slots in order up to the one that the control record grants. A granted slot counts with the most that
it can take until its commit record says what it takes; slots that training has passed are deleted, which makes room.
Everything is deleted by version id, so that a versioned bucket keeps nothing either.
"""

from __future__ import annotations

import json
import re
import threading
import time
from dataclasses import asdict, dataclass, replace

import numpy as np

from draftsmith.cache.claims import Claim, Owner
from draftsmith.cache.commits import ShardCommit, commit_path, read_commit
from draftsmith.cache.plan import CachePlan
from draftsmith.cache.stream_plan import FIRST_PASS, RECORD_BYTES, Slots, most_bytes
from draftsmith.errors import CacheError, ObjectMissingError, ShardClaimedError
from draftsmith.storage import Store, records_prefix

REFRESH_S = 0.2
HASH_CHARS = 8


@dataclass(frozen=True)
class StreamPlace:
    """Where a streaming run lies in the store: `prefix` is `stream/<key>-<hash8>`."""

    prefix: str

    @property
    def records(self) -> str:
        return records_prefix(self.prefix)

    @property
    def control(self) -> str:
        return f"{self.records}/control.json"

    @property
    def claim(self) -> str:
        return f"{self.records}/claim.json"

    @property
    def scales(self) -> str:
        """Where `settle_scales` puts those of codec int8."""
        return f"{self.records}/scales.json"

    @property
    def kept(self) -> str:
        """The record of the validation samples."""
        return f"{self.records}/held-out.json"

    def epoch_prefix(self, epoch: int) -> str:
        """The prefix of an epoch's shards, a cache of its own."""
        return f"{self.prefix}/{'first-pass' if epoch == FIRST_PASS else f'e{epoch}'}"


@dataclass(frozen=True)
class Control:
    """What rank 0 tells the workers and the other ranks. Slots before `granted` may be computed.

    `run` names one start of the training job: a record that a killed run left says nothing to the next. `found`: slots
    that were there at the start, which no worker makes; training may have deleted one again before its worker comes to
    it. `ready`: the first pass is over. `failed`: why the run ends.
    """

    run: str
    slots: str
    granted: int
    found: tuple[int, ...]
    ready: bool
    failed: str | None


def read_control(store: Store, place: StreamPlace) -> Control | None:
    """The control record, None if there is none. Raises CacheError for a broken one."""
    try:
        body = json.loads(store.get(place.control))
        control = Control(**{**body, "found": tuple(body["found"])})
        if not isinstance(control.granted, int):
            raise TypeError(f"granted {control.granted!r}")
        return control
    except ObjectMissingError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        where = "run the training again: it writes a new one"
        raise CacheError(f"broken record {place.control} in {store.uri}: {error!r}", where=where) from None


class StreamKeeper:
    """Grants and deletes the slots of one run. `room` is the bytes that shards and their records may take.

    Safe to share among threads. `high_water_bytes`: the most that committed shards took at once; `num_tokens`: tokens
    of the shards that workers made for this run.
    """

    def __init__(self, store: Store, place: StreamPlace, *, plan: CachePlan, slots: Slots, room: int, run: str) -> None:
        self._store, self._place, self._plan, self._slots, self._room = store, place, plan, slots, room
        self._lock = threading.RLock()
        self._control = Control(run, slots.digest, 0, (), False, None)
        self._control_version: str | None = None
        self._committed: dict[int, ShardCommit] = {}
        self._waiting: dict[str, int] = {}
        self._removed: set[int] = set()
        self._low = 0  # every slot before it is removed
        self._reserved = self._held = 0
        self._most: dict[int, int] = {}
        self._refreshed_s = 0.0
        self.high_water_bytes = 0
        self.num_tokens = 0

    def begin(self, *, keep: frozenset[str]) -> None:
        """Delete what an earlier run left, but for shards at the head of the sequence and the paths in `keep`.

        Then grant the first slots.
        """
        with self._lock:
            sizes = {item.path: item.size for item in self._store.list(self._place.prefix)}
            records = [item.path for item in self._store.list(self._place.records)]
            position = {self._commit_path(slot): slot for slot in range(len(self._slots))}
            found: dict[int, ShardCommit] = {}
            for path in records:
                slot = position.get(path)
                commit = None if slot is None else self._read_left(slot)
                if slot is None or commit is None:
                    continue
                prefix = self._prefix(slot)
                if all(sizes.get(f"{prefix}/{item.path}") == item.size for item in commit.objects):
                    found[slot] = commit
            self._committed = dict(found)
            self._grant()
            self._committed = {slot: item for slot, item in found.items() if slot < self._control.granted}
            self._control = replace(self._control, found=tuple(sorted(self._committed)))
            kept = {self._place.claim, self._place.scales, *keep}
            for slot, commit in self._committed.items():
                kept |= {self._commit_path(slot), *(f"{self._prefix(slot)}/{item.path}" for item in commit.objects)}
            delete_all(self._store, self._place, keep=frozenset(kept))
            self._publish()

    def refresh(self) -> None:
        """Look for new commit records and grant what they leave room for; does nothing if it did so just now."""
        with self._lock:
            if time.monotonic() - self._refreshed_s < REFRESH_S:
                return
            if self._waiting:
                for item in self._store.list(self._place.records):
                    slot = self._waiting.get(item.path)
                    if slot is not None:
                        self._settle(slot)
            self._refreshed_s = time.monotonic()
            if self._grant():
                self._publish()

    def passed(self, tick: int) -> None:
        """Training is done with every sample before `tick` on every rank: delete the slots that hold no later one."""
        with self._lock:
            span = self._slots.last_use[self._low : self._control.granted]
            done = [self._low + int(place) for place in np.flatnonzero(span < tick)]
            for slot in done:
                if slot not in self._removed:
                    self._remove(slot)
                    self._refreshed_s = 0.0
            while self._low in self._removed:
                self._removed.remove(self._low)
                self._low += 1
            self.refresh()

    def set_ready(self) -> None:
        """Say that the first pass is over."""
        with self._lock:
            self._control = replace(self._control, ready=True)
            self._publish()

    def fail(self, reason: str) -> None:
        """Say why the run ends, to all who wait."""
        with self._lock:
            self._control = replace(self._control, failed=reason)
            self._publish()

    @property
    def failed(self) -> str | None:
        return self._control.failed

    @property
    def granted(self) -> int:
        """How many slots may be there or be computed."""
        return self._control.granted

    @property
    def num_waiting(self) -> int:
        """Of those, how many are not known to be committed."""
        return len(self._waiting)

    def clear(self) -> None:
        """Delete everything of the run but its claim."""
        with self._lock:
            for slot, commit in self._committed.items():
                self._delete_objects(slot, commit)
            delete_all(self._store, self._place, keep=frozenset([self._place.claim]))

    def _grant(self) -> bool:
        """Move the grant on while the next slot fits; True if it moved."""
        granted = self._control.granted
        while granted < len(self._slots):
            known = self._committed.get(granted)
            size = self._most_of(granted) if known is None else _size(known) + RECORD_BYTES
            if self._reserved + size > self._room:
                break
            self._reserved += size
            if known is None:
                self._waiting[self._commit_path(granted)] = granted
            else:
                self._count(known)
            granted += 1
        moved = granted != self._control.granted
        self._control = replace(self._control, granted=granted)
        return moved

    def _settle(self, slot: int) -> ShardCommit:
        """A granted slot's commit record is there: count what it takes instead of what it might."""
        commit = self._read(slot)
        if commit is None:
            raise CacheError(f"commit record {self._commit_path(slot)} is gone", expected="this run alone to delete it")
        self._waiting.pop(self._commit_path(slot), None)
        self._committed[slot] = commit
        self._reserved += _size(commit) + RECORD_BYTES - self._most_of(slot)
        self._count(commit)
        return commit

    def _count(self, commit: ShardCommit) -> None:
        self.num_tokens += commit.num_tokens
        self._held += _size(commit)
        self.high_water_bytes = max(self.high_water_bytes, self._held)

    def _remove(self, slot: int) -> None:
        commit = self._committed.get(slot) or self._settle(slot)
        self._delete_objects(slot, commit)
        delete(self._store, self._commit_path(slot))
        self._reserved -= _size(commit) + RECORD_BYTES
        self._held -= _size(commit)
        self._removed.add(slot)
        del self._committed[slot]

    def _read(self, slot: int) -> ShardCommit | None:
        return read_commit(self._store, self._prefix(slot), int(self._slots.shard[slot]))

    def _read_left(self, slot: int) -> ShardCommit | None:
        """What an earlier run committed; a broken record is none, and its shard is made again."""
        try:
            return self._read(slot)
        except CacheError:
            return None

    def _prefix(self, slot: int) -> str:
        return self._place.epoch_prefix(int(self._slots.epoch[slot]))

    def _commit_path(self, slot: int) -> str:
        return commit_path(self._prefix(slot), int(self._slots.shard[slot]))

    def _delete_objects(self, slot: int, commit: ShardCommit) -> None:
        for item in commit.stored:
            self._store.delete(f"{self._prefix(slot)}/{item.record.path}", version_id=item.version_id)

    def _most_of(self, slot: int) -> int:
        shard = int(self._slots.shard[slot])
        if shard not in self._most:
            self._most[shard] = most_bytes(self._plan, shard)
        return self._most[shard]

    def _publish(self) -> None:
        info = self._store.put(self._place.control, json.dumps(asdict(self._control)).encode())
        if self._control_version is not None:
            self._store.delete(self._place.control, version_id=self._control_version)
        self._control_version = info.version_id


def delete(store: Store, path: str) -> None:
    """Delete an object for good: in a versioned bucket its version, so that no delete marker stays either."""
    there = store.head(path)
    if there is not None:
        store.delete(path, version_id=there.version_id)


def delete_all(store: Store, place: StreamPlace, *, keep: frozenset[str]) -> None:
    """Delete every object and record of a stream but those whose paths are in `keep`."""
    for folder in (place.prefix, place.records):
        for item in list(store.list(folder)):
            if item.path not in keep:
                delete(store, item.path)


def sweep_others(store: Store, place: StreamPlace, *, owner: Owner, lease_s: float) -> tuple[str, ...]:
    """Delete what killed runs of the same key left of other plans; returns the prefixes.

    A prefix whose claim a live process holds is left alone.
    """
    stem, own = place.prefix[:-HASH_CHARS], place.prefix
    found = {"/".join(item.path.split("/")[:2]) for item in store.list("stream")}
    found |= {"/".join(item.path.split("/")[1:3]) for item in store.list(records_prefix("stream"))}
    swept = []
    for prefix in sorted(found):
        if (
            prefix == own
            or not prefix.startswith(stem)
            or not re.fullmatch(f"[0-9a-f]{{{HASH_CHARS}}}", prefix[len(stem) :])
        ):
            continue
        other = StreamPlace(prefix)
        try:
            with Claim.hold(store, other.claim, owner=owner, lease_s=lease_s):
                delete_all(store, other, keep=frozenset([other.claim]))
        except ShardClaimedError:
            continue
        swept.append(prefix)
    return tuple(swept)


def _size(commit: ShardCommit) -> int:
    return sum(item.size for item in commit.objects)
