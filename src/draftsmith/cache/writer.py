"""The one writer of a target cache: claims a shard, computes it, writes its objects, commits it.

Safe to run anywhere, any number of times, at once: a shard is done when its commit record is there and its objects
have the sizes that it names; a done shard is never computed again. While a shard is computed, the one before it is
encoded and those before it are uploaded by threads: at most two are in memory as numbers, and a few encoded.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from draftsmith.cache.arrays import Compute, SampleArrays, ShardRows
from draftsmith.cache.claims import Claim, Owner, live_holder
from draftsmith.cache.commits import (
    CommittedObject,
    ObjectSizes,
    ShardCommit,
    claim_path,
    commit_path,
    list_commits,
    read_commit,
)
from draftsmith.cache.pipeline import MOST_COMPUTED, Behind, Tally
from draftsmith.cache.plan import CachePlan, PlannedSample, ShardPlan, array_layouts
from draftsmith.cache.recycled import RecycledMemory
from draftsmith.cache.scales import Scales, settle_scales
from draftsmith.cache.schema import metadata_objects, read_metadata
from draftsmith.cache.shard import ShardCodec
from draftsmith.errors import (
    CacheError,
    ObjectChangedError,
    ObjectExistsError,
    ObjectMissingError,
    ShardClaimedError,
)
from draftsmith.manifest import Manifest, ObjectRecord, ObjectTable, sha256_hex
from draftsmith.storage import Store, check_prefix, records_prefix

__all__ = ["CacheWriter", "Compute", "SampleArrays", "Scales", "ShardCommit", "WriteReport", "plan_totals"]

MANIFEST_KIND = "cache"
LOOKERS, LOOK_AHEAD = 8, 256
UPLOADS = 4
ENCODE_THREADS = 8

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class WriteReport:
    """What `write_shards` did: shards written now, shards that were done already, tokens computed now; and which
    shards live processes hold (`shard 3 is claimed by process 12 on host`)."""

    num_written: int
    num_done: int
    num_tokens: int
    claimed: tuple[str, ...]


def plan_totals(plan: CachePlan) -> dict[str, Any]:
    """What a manifest says of the plan as a whole (JSON)."""
    return {
        "num_samples": plan.num_samples,
        "num_tokens": plan.num_tokens,
        "num_labels": plan.num_labels,
        "num_shards": plan.num_shards,
        "logical_bytes": sum(plan.logical_bytes.values()),
        "plan_digest": plan.digest,
    }


class CacheWriter:
    """Fills the cache at `prefix` of `store` after `plan`. `facts` (JSON) are kept in the group and the manifest.

    `scales` fits the channel RMS of codec int8, by array; it is called at most once, and only if the store has none.
    `contents`: a cache with its metadata, or `shards` alone, for a reader that has the plan; then `scales` has to give
    the same each time.
    """

    def __init__(
        self, store: Store, *, prefix: str, plan: CachePlan, facts: dict[str, Any], owner: Owner, lease_s: float,
        scales: Callable[[], Scales] | None = None, contents: Literal["cache", "shards"] = "cache",
    ) -> None:  # fmt: skip
        if lease_s <= 0:
            raise CacheError("the lease of a claim must be > 0 s", got=lease_s, where="DRAFTSMITH_LEASE_S")
        self._store, self._prefix, self._plan, self._facts = store, check_prefix(prefix), plan, facts
        self._owner, self._lease_s, self._fit, self._contents = owner, lease_s, scales, contents
        self._layouts = array_layouts(plan.spec)
        self._memory = {
            layout.name: RecycledMemory(block_bytes=plan.spec.shard_tokens * layout.row_bytes, most_idle=MOST_COMPUTED)
            for layout in self._layouts
        }
        self._metadata: tuple[ObjectRecord, ...] | None = None
        self._codecs: dict[str, ShardCodec] = {}
        self._sizes: ObjectSizes | None = None

    def prepare(self) -> None:
        """Write the group's metadata, or adopt equal ones; under codec int8 the scales are settled first.

        Raises CacheError if others are there: then the prefix belongs to another plan, or to another zarr.
        """
        scales = self._settle_scales() if self._plan.spec.codec == "int8" else {}
        threads = min(ENCODE_THREADS, os.cpu_count() or 1)
        self._codecs = {
            layout.name: ShardCodec(layout, spec=self._plan.spec, scales=scales.get(layout.name), threads=threads)
            for layout in self._layouts
        }
        records = []
        described = metadata_objects(self._plan, self._facts, scales=scales) if self._contents == "cache" else {}
        for path, data in described.items():
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
        return self._committed(shard.index) is not None

    def pending(self, shards: Sequence[ShardPlan]) -> list[ShardPlan]:
        """Those of `shards` that are not done."""
        self._refresh()
        recorded = list_commits(self._store, self._prefix)
        done = self._in_threads(lambda shard: shard.index in recorded and self.is_done(shard), shards)
        return [shard for shard, is_done in zip(shards, done, strict=True) if not is_done]

    def write_shards(self, shards: Iterable[ShardPlan | None], compute: Compute) -> WriteReport:
        """Compute and commit the shards that are neither done nor held by a live process.

        `compute` is called in this thread, once a shard, with the shard's batches in plan order, and yields for each,
        in order, the arrays of its samples. `shards` may take its time: it yields None when there is nothing to
        compute at the moment, so that an error of a shard on its way to the store is seen. At the end, shards that
        were held are tried once more.
        Raises CacheError for arrays that do not fit the plan or hold NaN or infinity, whatever `compute` raises, and
        errors of the store; of the shard concerned nothing is committed then.
        """
        tally = Tally()
        held = self._write(shards, compute, tally)
        while held and len(still := self._write(held, compute, tally)) < len(held):
            held = still
        return WriteReport(
            tally.num_written, tally.num_done, tally.num_tokens, tuple(self._held_by(shard) for shard in held)
        )

    def write_shard(self, shard: ShardPlan, compute: Compute) -> ShardCommit:
        """Compute and commit one shard, unless it is done. Raises as `write_shards`, and ShardClaimedError if a live
        process works on the shard, or took it over."""
        tally = Tally()
        self._write([shard], compute, tally)
        if tally.refused is not None:
            raise tally.refused
        commit = self._committed(shard.index)
        if commit is None:
            raise CacheError(f"shard {shard.index} of {self._prefix} went away as soon as it was written")
        return commit

    def finish(self) -> Manifest:
        """The manifest of the whole cache; claims that killed writers left are removed. Raises CacheError while shards
        are missing."""
        if self._metadata is None:
            self.prepare()
        self._refresh()
        missing: list[int] = []
        processors: set[str] = set()

        def objects() -> Iterator[ObjectRecord]:
            yield from self._metadata or ()
            for index, commit in enumerate(self._in_threads(self._committed, range(self._plan.num_shards))):
                if commit is None:
                    missing.append(index)
                else:
                    processors.add(commit.processor)
                    yield from commit.objects

        table = ObjectTable(objects())
        if missing:
            got = f"{len(missing)} of {self._plan.num_shards} shards not done, the first is {missing[0]}"
            raise CacheError(f"cache {self._prefix} is not finished", got=got, expected="all shards committed")
        for claim in self._store.list(f"{records_prefix(self._prefix)}/claims"):
            self._store.delete(claim.path)
        metadata_bytes = sum(item.size for item in self._metadata or ())
        totals = {
            **plan_totals(self._plan),
            "stored_bytes": table.num_bytes - metadata_bytes,
            "processors": sorted(processors),
        }
        return Manifest(MANIFEST_KIND, self._prefix, table, {**self._facts, "totals": totals})

    def _in_threads(self, look: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
        """`look` at each of `items`, in order, some of them at once."""
        with ThreadPoolExecutor(LOOKERS) as pool:
            for start in range(0, len(items), LOOK_AHEAD):
                yield from pool.map(look, items[start : start + LOOK_AHEAD])

    def _settle_scales(self) -> Scales:
        """The scales that the prefix has, or those of the fit."""
        if self._contents == "shards" and self._fit is not None:
            return self._fit()
        where = f"{self._prefix} in store {self._store.uri}"
        try:
            known = read_metadata(lambda path: self._store.get(f"{self._prefix}/{path}"), where=where).scales
        except ObjectMissingError:
            known = None
        return settle_scales(self._store, self._prefix, known=known, fit=self._fit)

    def _refresh(self) -> ObjectSizes:
        if self._sizes is None:
            self._sizes = ObjectSizes(
                self._store, self._prefix, layouts=self._layouts, num_shards=self._plan.num_shards
            )
        self._sizes.refresh()
        return self._sizes

    def _committed(self, index: int) -> ShardCommit | None:
        commit = read_commit(self._store, self._prefix, index)
        if commit is None:
            return None
        return commit if (self._sizes or self._refresh()).agree(commit) else None

    def _held_by(self, shard: ShardPlan) -> str:
        holder = live_holder(self._store, claim_path(self._prefix, shard.index))
        if holder is None:
            # The lease may also be too short to be renewed in time, so that this very process lost the claim.
            return f"shard {shard.index} was claimed by a process that has ended since, or its claim ran out"
        return f"shard {shard.index} is claimed by {holder}"

    def _write(self, shards: Iterable[ShardPlan | None], compute: Compute, tally: Tally) -> list[ShardPlan]:
        """One pass over `shards`; returns those that another process holds or took over."""
        if self._metadata is None:
            self.prepare()
        refused: list[ShardPlan] = []
        with Behind(tally, refused) as behind:
            for shard in shards:
                behind.check()
                if shard is None:
                    continue
                if self.is_done(shard):
                    tally.num_done += 1
                    continue
                try:
                    self._begin(shard, compute, behind, tally)
                except ShardClaimedError as error:
                    refused.append(shard)
                    tally.refused = error
            behind.wait()
        return refused

    def _begin(self, shard: ShardPlan, compute: Compute, behind: Behind, tally: Tally) -> None:
        """Claim and compute a shard, and hand it over to the threads."""
        path = claim_path(self._prefix, shard.index)
        behind.make_room()
        with ExitStack() as held:
            claim = held.enter_context(Claim.hold(self._store, path, owner=self._owner, lease_s=self._lease_s))
            if self.is_done(shard):
                tally.num_done += 1
                return
            # A commit record whose objects are gone or cut says nothing any more.
            if self._store.head(commit_path(self._prefix, shard.index)) is not None:
                self._store.delete(commit_path(self._prefix, shard.index))
            started = time.monotonic()
            rows = self._compute(shard, compute, claim, behind)
            compute_s = time.monotonic() - started
            release = held.pop_all()

            def finish() -> None:
                with release:
                    self._finish(shard, rows, claim, behind, compute_s)

            behind.start(shard, finish)

    def _compute(self, shard: ShardPlan, compute: Compute, claim: Claim, behind: Behind) -> ShardRows:
        """All rows of the shard, from the arrays of its samples."""
        rows = ShardRows(shard, layouts=self._layouts, memory=self._memory)

        def batches() -> Iterator[tuple[PlannedSample, ...]]:
            for number in range(len(shard.batches)):
                claim.check()
                behind.check()
                yield shard.batch(number)

        computed = iter(compute(batches()))
        for number in range(len(shard.batches)):
            batch, arrays = shard.batch(number), next(computed, ())
            if len(arrays) != len(batch):
                names = ", ".join(sample.id for sample in batch)
                raise CacheError(
                    "batch of another number of samples", got=len(arrays), expected=f"{len(batch)} ({names})"
                )
            for sample, item in zip(batch, arrays, strict=True):
                rows.place(sample, item)
        if next(computed, None) is not None:
            raise CacheError(
                "more batches than were asked for", expected=f"{len(shard.batches)} of shard {shard.index}"
            )
        return rows

    def _finish(self, shard: ShardPlan, rows: ShardRows, claim: Claim, behind: Behind, compute_s: float) -> None:
        """Encode and write the objects of a computed shard, and commit it."""
        writing: list[Future[CommittedObject]] = []
        with ThreadPoolExecutor(UPLOADS, thread_name_prefix="upload") as uploads:
            for layout in self._layouts:
                with behind.encoding:
                    data = self._codecs[layout.name].encode(rows.take(layout.name))
                if data is not None:
                    path = layout.object_path(shard.index)
                    writing.append(uploads.submit(self._put, path, data, shard, claim, behind))
            behind.encoded(shard)
        stored = tuple(future.result() for future in writing)
        behind.go_on()
        claim.check()
        logical_bytes = sum(layout.used_rows(shard) * layout.row_bytes for layout in self._layouts)
        self._commit(
            ShardCommit(shard.index, stored, self._owner.processor, shard.num_tokens, logical_bytes, compute_s)
        )

    def _put(self, path: str, data: memoryview, shard: ShardPlan, claim: Claim, behind: Behind) -> CommittedObject:
        """Write one object of a claimed shard: adopt equal bytes, replace what a killed writer left."""
        place = f"{self._prefix}/{path}"
        behind.go_on()
        claim.check()
        try:
            info = self._store.put_if_absent(place, data)
            return CommittedObject.written(path, info, info.sha256 or sha256_hex(data))
        except ObjectExistsError:
            there, digest = self._store.head(place), sha256_hex(data)
        if there is not None and there.size == len(data):
            known = there.sha256 or sha256_hex(self._store.get(place))
            if known == digest:
                return CommittedObject.written(path, there, digest)
        claim.check()
        if there is None or self.is_done(shard):
            raise CacheError(f"{place} was written by another process while this one held the claim", where="run again")
        try:
            return CommittedObject.written(path, self._store.put_if_match(place, data, etag=there.etag), digest)
        except ObjectChangedError:
            raise CacheError(f"{place} is being written by another process", where="run again") from None

    def _commit(self, commit: ShardCommit) -> None:
        """Write the commit record, unless another process has committed the very same objects."""
        owner = self._owner
        record = commit.to_json(store=self._store.uri, host=owner.host, pid=owner.pid, committed_s=time.time())
        if self._sizes is not None:
            self._sizes.set(commit)
        try:
            self._store.put_if_absent(commit_path(self._prefix, commit.shard), record)
        except ObjectExistsError:
            there = self._committed(commit.shard)
            if there is None or there.objects != commit.objects:
                what = f"shard {commit.shard} was committed with other bytes by another process"
                raise CacheError(what, where="run again") from None
