"""Commit records: a shard is done when its record is there and its objects have the sizes that the record names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from draftsmith.cache.plan import ArrayLayout
from draftsmith.errors import CacheError, ObjectMissingError
from draftsmith.manifest import ObjectRecord
from draftsmith.storage import ObjectInfo, Store, records_prefix

ABSENT = -1


@dataclass(frozen=True)
class CommittedObject:
    """An object of a shard, and what its store called it when it was written; the latter is in no digest."""

    record: ObjectRecord
    etag: str
    version_id: str | None

    @classmethod
    def written(cls, path: str, info: ObjectInfo, sha256: str) -> CommittedObject:
        return cls(ObjectRecord(path, info.size, sha256), info.etag, info.version_id)


@dataclass(frozen=True)
class ShardCommit:
    """What a commit record says: the shard's objects, and the kind of processor that computed it in `compute_s`.

    `logical_bytes` are those of the numbers themselves.
    """

    shard: int
    stored: tuple[CommittedObject, ...]
    processor: str
    num_tokens: int
    logical_bytes: int
    compute_s: float

    @property
    def objects(self) -> tuple[ObjectRecord, ...]:
        return tuple(item.record for item in self.stored)

    def to_json(self, **others: Any) -> bytes:
        """The record's bytes; `others` say who committed it and when, for people."""
        body = {
            "shard": self.shard,
            "processor": self.processor,
            "num_tokens": self.num_tokens,
            "logical_bytes": self.logical_bytes,
            "compute_s": round(self.compute_s, 3),
            **others,
            "objects": [
                {**asdict(item.record), "etag": item.etag, "version_id": item.version_id} for item in self.stored
            ],
        }
        return json.dumps(body, indent=1).encode()


def commit_path(prefix: str, shard: int) -> str:
    """Where the commit record of a shard lies."""
    return f"{records_prefix(prefix)}/commits/{shard:06d}.json"


def claim_path(prefix: str, shard: int) -> str:
    """Where the claim on a shard lies."""
    return f"{records_prefix(prefix)}/claims/{shard:06d}.json"


def read_commit(store: Store, prefix: str, shard: int) -> ShardCommit | None:
    """The commit record of a shard, or None if there is none. Raises CacheError for a broken one."""
    path = commit_path(prefix, shard)
    try:
        body = json.loads(store.get(path))
        if body["shard"] != shard:
            raise ValueError(f"it says shard {body['shard']}")
        stored = tuple(
            CommittedObject(ObjectRecord(item["path"], item["size"], item["sha256"]), item["etag"], item["version_id"])
            for item in body["objects"]
        )
        return ShardCommit(
            shard, stored, body["processor"], body["num_tokens"], body["logical_bytes"], body["compute_s"]
        )
    except ObjectMissingError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise CacheError(f"broken commit record: {error!r}", where=f"delete {store.uri}/{path}") from None


def list_commits(store: Store, prefix: str) -> frozenset[int]:
    """The numbers of the shards that have a commit record."""
    names = (item.path.rpartition("/")[2] for item in store.list(f"{records_prefix(prefix)}/commits"))
    return frozenset(int(name.removesuffix(".json")) for name in names if name.removesuffix(".json").isdigit())


class ObjectSizes:
    """Sizes in bytes of a prefix's shard objects as they were last seen, a few bytes each however many there are."""

    def __init__(self, store: Store, prefix: str, *, layouts: Sequence[ArrayLayout], num_shards: int) -> None:
        self._store, self._prefix, self._layouts = store, prefix, tuple(layouts)
        self._sizes = np.full((len(self._layouts), num_shards), ABSENT, dtype=np.int64)

    def refresh(self) -> None:
        """List the prefix."""
        self._sizes[:] = ABSENT
        for row, layout in enumerate(self._layouts):
            for item in self._store.list(f"{self._prefix}/{layout.name}"):
                shard = _shard_of(item.path.removeprefix(f"{self._prefix}/"), layout)
                if shard is not None and shard < self._sizes.shape[1]:
                    self._sizes[row, shard] = item.size

    def agree(self, commit: ShardCommit) -> bool:
        """True if the objects are there with the sizes that the commit names; what disagrees is looked at again."""
        wanted = {item.path: item.size for item in commit.objects}
        for row, layout in enumerate(self._layouts):
            path = layout.object_path(commit.shard)
            size = wanted.pop(path, None)
            if size is None or self._sizes[row, commit.shard] == size:
                continue
            there = self._store.head(f"{self._prefix}/{path}")
            self._sizes[row, commit.shard] = ABSENT if there is None else there.size
            if self._sizes[row, commit.shard] != size:
                return False
        return not wanted

    def set(self, commit: ShardCommit) -> None:
        """Note the objects of a shard that was written by this process."""
        sizes = {item.path: item.size for item in commit.objects}
        for row, layout in enumerate(self._layouts):
            self._sizes[row, commit.shard] = sizes.get(layout.object_path(commit.shard), ABSENT)


def _shard_of(path: str, layout: ArrayLayout) -> int | None:
    """The shard whose object has this path; None if it is no shard's object."""
    number = path.removeprefix(f"{layout.name}/c.").partition(".")[0]
    return int(number) if number.isdigit() and layout.object_path(int(number)) == path else None
