"""The one writer of a target cache: claims a shard, computes it, writes its objects, commits it.

Safe to run anywhere, any number of times, at once: a shard is done when its commit record is there and its objects
have the sizes that it names; a done shard is never computed again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from draftsmith.cache.claims import Claim, Owner
from draftsmith.cache.plan import ArrayLayout, CachePlan, PlannedSample, ShardPlan, array_layouts
from draftsmith.cache.schema import empty_shard, encode_shard, metadata_objects
from draftsmith.errors import CacheError, ObjectChangedError, ObjectExistsError, ObjectMissingError
from draftsmith.manifest import Manifest, ObjectRecord, sha256_hex
from draftsmith.storage import ObjectInfo, Store, check_prefix, records_prefix

MANIFEST_KIND = "cache"
BF16_EXPONENT = 0x7F80
COMMIT_READERS = 8


@dataclass(frozen=True)
class SampleArrays:
    """What the target computed for one sample of T tokens, n label rows; bfloat16 bits as uint16.

    input_ids int32 [T], supervised uint8 [T] of 0 and 1, context uint16 [T, L, D], last_hidden uint16 [n, D] (None if
    the plan keeps none).
    """

    input_ids: np.ndarray
    supervised: np.ndarray
    context: np.ndarray
    last_hidden: np.ndarray | None


@dataclass(frozen=True)
class ShardCommit:
    """The record that makes a shard done: its objects, and the kind of processor that computed them."""

    shard: int
    objects: tuple[ObjectRecord, ...]
    processor: str


Compute = Callable[[tuple[PlannedSample, ...]], Iterable[SampleArrays]]


class CacheWriter:
    """Fills the cache at `prefix` of `store` after `plan`. `facts` (JSON) are kept in the group and the manifest."""

    def __init__(
        self, store: Store, *, prefix: str, plan: CachePlan, facts: dict[str, Any], owner: Owner, lease_s: float
    ) -> None:
        if lease_s <= 0:
            raise CacheError("the lease of a claim must be > 0 s", got=lease_s, where="DRAFTSMITH_LEASE_S")
        self._store, self._prefix, self._plan, self._facts = store, check_prefix(prefix), plan, facts
        self._owner, self._lease_s = owner, lease_s
        self._layouts = array_layouts(plan.spec)
        self._metadata: tuple[ObjectRecord, ...] | None = None
        self._sizes: dict[str, int] | None = None

    def prepare(self) -> None:
        """Write the group's and the arrays' zarr.json, or adopt equal ones.

        Raises CacheError if others are there: then the prefix belongs to another plan, or to another zarr.
        """
        records = []
        for path, data in metadata_objects(self._plan, self._facts).items():
            place = f"{self._prefix}/{path}"
            try:
                self._store.put_if_absent(place, data)
            except ObjectExistsError:
                if self._store.get(place) != data:
                    raise CacheError(
                        f"{place} in store {self._store.uri} is of another layout",
                        expected="the same plan, facts and zarr version as when the cache was begun",
                        where="delete the prefix, or go back to what made it",
                    ) from None
            records.append(ObjectRecord(path, len(data), sha256_hex(data)))
        self._metadata = tuple(records)

    def is_done(self, shard: ShardPlan) -> bool:
        """True if the shard is committed and each of its objects is there with the size that the record names."""
        return self._committed(shard) is not None

    def write_shard(self, shard: ShardPlan, compute: Compute) -> ShardCommit:
        """Compute and commit one shard, unless it is done. `compute` is called once a planned batch, in plan order,
        and yields the arrays of the batch's samples in the order given.

        Raises ShardClaimedError if a live process works on the shard, CacheError for arrays that do not fit the plan
        or hold NaN or infinity, and whatever `compute` raises.
        """
        if self._metadata is None:
            self.prepare()
        done = self._committed(shard)
        if done is not None:
            return done
        with Claim.hold(self._store, self._record("claims", shard), owner=self._owner, lease_s=self._lease_s) as claim:
            done = self._committed(shard)
            if done is not None:
                return done
            # A commit record whose objects are gone or cut says nothing any more.
            if self._store.head(self._record("commits", shard)) is not None:
                self._store.delete(self._record("commits", shard))
            rows = self._compute(shard, compute, claim)
            written = []
            for layout in self._layouts:
                data = encode_shard(rows.pop(layout.name), layout=layout, spec=self._plan.spec)
                if data is not None:
                    path = layout.object_path(shard.index)
                    written.append(
                        (ObjectRecord(path, len(data), sha256_hex(data)), self._put(path, data, shard, claim))
                    )
            claim.check()
            return self._commit(shard, written)

    def finish(self) -> Manifest:
        """The manifest of the whole cache; claims that killed writers left are removed. Raises CacheError while shards
        are missing."""
        if self._metadata is None:
            self.prepare()
        self._sizes = self._list_sizes()
        with ThreadPoolExecutor(COMMIT_READERS) as pool:
            commits = list(pool.map(self._committed, self._plan.shards))
        missing = [shard.index for shard, commit in zip(self._plan.shards, commits, strict=True) if commit is None]
        if missing:
            got = f"{len(missing)} of {len(commits)} shards not done, the first is {missing[0]}"
            raise CacheError(f"cache {self._prefix} is not finished", got=got, expected="all shards committed")
        for claim in self._store.list(f"{records_prefix(self._prefix)}/claims"):
            self._store.delete(claim.path)
        done = [commit for commit in commits if commit is not None]
        objects = tuple(item for commit in done for item in commit.objects)
        totals = {
            "num_samples": self._plan.num_samples,
            "num_tokens": self._plan.num_tokens,
            "num_labels": self._plan.num_labels,
            "num_shards": len(self._plan.shards),
            "logical_bytes": sum(self._plan.logical_bytes.values()),
            "stored_bytes": sum(item.size for item in objects),
            "processors": sorted({commit.processor for commit in done}),
            "plan_digest": self._plan.digest,
        }
        return Manifest(
            MANIFEST_KIND, self._prefix, (*(self._metadata or ()), *objects), {**self._facts, "totals": totals}
        )

    def _record(self, kind: str, shard: ShardPlan) -> str:
        return f"{records_prefix(self._prefix)}/{kind}/{shard.index:06d}.json"

    def _committed(self, shard: ShardPlan) -> ShardCommit | None:
        path = self._record("commits", shard)
        try:
            body = json.loads(self._store.get(path))
            objects = tuple(ObjectRecord(item["path"], item["size"], item["sha256"]) for item in body["objects"])
            commit = ShardCommit(body["shard"], objects, body["processor"])
        except ObjectMissingError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise CacheError(f"broken commit record: {error!r}", where=f"delete {path}") from None
        if self._sizes is None or not self._sizes_agree(commit):
            self._sizes = self._list_sizes()
        return commit if self._sizes_agree(commit) else None

    def _list_sizes(self) -> dict[str, int]:
        return {item.path: item.size for item in self._store.list(self._prefix)}

    def _sizes_agree(self, commit: ShardCommit) -> bool:
        sizes = self._sizes or {}
        return all(sizes.get(f"{self._prefix}/{item.path}") == item.size for item in commit.objects)

    def _compute(self, shard: ShardPlan, compute: Compute, claim: Claim) -> dict[str, np.ndarray]:
        """Array name -> rows [shard_tokens, ...] of the whole shard, from the arrays of its samples."""
        rows = {layout.name: empty_shard(layout, self._plan.spec) for layout in self._layouts}
        for number in range(len(shard.batches)):
            claim.check()
            batch = shard.batch(number)
            arrays = list(compute(batch))
            if len(arrays) != len(batch):
                names = ", ".join(sample.id for sample in batch)
                raise CacheError(
                    "batch of another number of samples", got=len(arrays), expected=f"{len(batch)} ({names})"
                )
            for sample, computed in zip(batch, arrays, strict=True):
                self._place(rows, sample, computed)
        return rows

    def _place(self, rows: dict[str, np.ndarray], sample: PlannedSample, computed: SampleArrays) -> None:
        given = {
            "input_ids": computed.input_ids,
            "supervised": computed.supervised,
            "context": computed.context,
            "last_hidden": computed.last_hidden,
        }
        for layout in self._layouts:
            values = given[layout.name]
            start, count = (
                (sample.offset, sample.num_tokens)
                if layout.rows == "tokens"
                else (sample.label_offset, sample.num_rows)
            )
            _check_values(values, layout, sample, count)
            rows[layout.name][start : start + count] = values
        _check_labels(computed.supervised, sample)

    def _put(self, path: str, data: bytes, shard: ShardPlan, claim: Claim) -> ObjectInfo:
        """Write one object of a claimed shard: adopt equal bytes, replace what a killed writer left."""
        place = f"{self._prefix}/{path}"
        claim.check()
        try:
            return self._store.put_if_absent(place, data)
        except ObjectExistsError:
            there = self._store.head(place)
        if there is not None and there.size == len(data):
            digest = there.sha256 or sha256_hex(self._store.get(place))
            if digest == sha256_hex(data):
                return there
        claim.check()
        if there is None or self._committed(shard) is not None:
            raise CacheError(f"{place} was written by another process while this one held the claim", where="run again")
        try:
            return self._store.put_if_match(place, data, etag=there.etag)
        except ObjectChangedError:
            raise CacheError(f"{place} is being written by another process", where="run again") from None

    def _commit(self, shard: ShardPlan, written: list[tuple[ObjectRecord, ObjectInfo]]) -> ShardCommit:
        """Write the commit record; it alone keeps ETags and version ids, which are the store's and in no digest."""
        commit = ShardCommit(shard.index, tuple(record for record, _ in written), self._owner.processor)
        body = {
            "shard": commit.shard,
            "processor": commit.processor,
            "store": self._store.uri,
            "host": self._owner.host,
            "pid": self._owner.pid,
            "committed_s": time.time(),
            "objects": [
                {**asdict(record), "etag": info.etag, "version_id": info.version_id} for record, info in written
            ],
        }
        if self._sizes is not None:
            self._sizes |= {f"{self._prefix}/{record.path}": record.size for record, _ in written}
        try:
            self._store.put_if_absent(self._record("commits", shard), json.dumps(body, indent=1).encode())
        except ObjectExistsError:
            there = self._committed(shard)
            if there is None or there.objects != commit.objects:
                what = f"shard {shard.index} was committed with other bytes by another process"
                raise CacheError(what, where="run again") from None
            return there
        return commit


def _check_values(values: np.ndarray | None, layout: ArrayLayout, sample: PlannedSample, num_rows: int) -> None:
    """Raises CacheError unless `values` is what the layout wants for this sample, and finite."""
    shape = (num_rows, *layout.row_shape)
    if values is None or values.dtype != np.dtype(layout.dtype) or values.shape != shape:
        got = "none" if values is None else f"{values.dtype} {list(values.shape)}"
        raise CacheError(f"sample {sample.id}: {layout.name}", got=got, expected=f"{layout.dtype} {list(shape)}")
    if layout.dtype == "uint16":
        broken = (values & BF16_EXPONENT) == BF16_EXPONENT
        if broken.any():
            first = [int(part) for part in np.argwhere(broken)[0]]
            got = f"{int(broken.sum())} values, the first at {first}"
            raise CacheError(
                f"sample {sample.id}: NaN or infinity in {layout.name}", got=got, expected="finite hidden states"
            )
    elif layout.name == "supervised" and values.max() > 1:
        raise CacheError(f"sample {sample.id}: supervised", got=int(values.max()), expected="0 or 1")
    elif layout.name == "input_ids" and values.min() < 0:
        raise CacheError(f"sample {sample.id}: input_ids", got=int(values.min()), expected="token ids >= 0")


def _check_labels(supervised: np.ndarray, sample: PlannedSample) -> None:
    """Raises CacheError unless the mask has as many label positions as the plan counted."""
    num_labels = int((supervised[:-1] & supervised[1:]).sum())
    if num_labels != sample.num_labels:
        expected = f"{sample.num_labels} as planned"
        raise CacheError(f"sample {sample.id}: label positions of its mask", got=num_labels, expected=expected)
