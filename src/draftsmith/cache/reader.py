"""The reader of a target cache: samples by index, through a few decoded shards, checked against the manifest.

The order of training hangs on (seed, epoch) alone: shards are shuffled, and their samples among each few shards. So
whole shards are read one after the other, and the next ones are opened by threads while these are used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from draftsmith.cache.open_shards import OpenShards, Rows
from draftsmith.cache.plan import CachePlan, CacheSpec, PlannedSample, array_layouts
from draftsmith.cache.recycled import RecycledMemory
from draftsmith.cache.schema import read_metadata
from draftsmith.cache.shard import ShardCodec
from draftsmith.errors import CacheError, ObjectMissingError
from draftsmith.manifest import Manifest, ObjectRecord, sha256_hex
from draftsmith.storage import Store

ORDER_WINDOW = 4
READ_THREADS = 4


@dataclass(frozen=True)
class CachedSample:
    """One sample of T tokens and n label rows; bfloat16 bits as uint16.

    input_ids int32 [T], supervised uint8 [T], context uint16 [T, L, D], last_hidden uint16 [n, D]; row i of
    last_hidden belongs to position label_positions[i] (int64 [n]). The arrays may be read-only parts of their shard,
    which then stays in memory as long as one of them does: copy what is to be kept.
    """

    id: str
    input_ids: np.ndarray
    supervised: np.ndarray
    context: np.ndarray
    last_hidden: np.ndarray
    label_positions: np.ndarray


class SampleSource(Protocol):
    """Where the samples of a training run come from: a cache that lies in a store, or one that is made meanwhile."""

    @property
    def samples(self) -> Sequence[PlannedSample]:
        """All samples of the cache, by index."""
        ...

    @property
    def spec(self) -> CacheSpec: ...

    @property
    def facts(self) -> dict[str, Any]:
        """What the cache's maker recorded: target, layers, digests."""
        ...

    def order(self, seed: int, *, epoch: int) -> NDArray[np.int64]:
        """Every sample index once; see `window_order`."""
        ...

    def follow(self, walk: Iterable[int]) -> None:
        """Told by the one who reads: these indices will be read in this order (drawn only as far as is useful)."""
        ...

    def read(self, index: int, *, epoch: int) -> CachedSample:
        """One sample, in an epoch of training; epoch -1 stands for a use outside of training, such as validation."""
        ...


def window_order(plan: CachePlan, seed: int, epoch: int) -> NDArray[np.int64]:
    """Every sample index once, in an order that depends on the plan and (seed, epoch) alone.

    Shards are shuffled, then the samples of each ORDER_WINDOW shards among themselves: with that many open shards
    each one is opened once an epoch. Samples are spread over shards at random by the plan already.
    """
    shards = _places((str(shard).encode() for shard in range(plan.num_shards)), start=f"{seed}:{epoch}:shard ")
    windows = np.empty(plan.num_shards, dtype=np.int64)
    windows[np.lexsort(shards)] = np.arange(plan.num_shards) // ORDER_WINDOW
    places = _places(plan.sample_ids(), start=f"{seed}:{epoch}:sample ")
    return np.lexsort((*places, windows[plan.shard_of])).astype(np.int64)


def _places(names: Iterable[bytes], *, start: str) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Sort keys of names, least significant first: the first 16 bytes of sha256 over `start` and the name."""
    sha256, head = hashlib.sha256, start.encode()
    digests = np.frombuffer(b"".join([sha256(head + name).digest()[:16] for name in names]), dtype=">u8").reshape(-1, 2)
    return digests[:, 1].astype(np.uint64), digests[:, 0].astype(np.uint64)


def cut_sample(rows: Rows, sample: PlannedSample, *, spec: CacheSpec) -> CachedSample:
    """One sample out of its shard's rows, without a copy."""
    tokens = slice(sample.offset, sample.offset + sample.num_tokens)
    labels = slice(sample.label_offset, sample.label_offset + sample.num_rows)
    supervised = rows["supervised"][tokens]
    if spec.last_hidden == "labels":
        positions = np.flatnonzero(supervised[:-1] & supervised[1:]).astype(np.int64)
    else:
        positions = np.arange(sample.num_rows, dtype=np.int64)
    no_rows = np.empty((0, spec.hidden_size), dtype=np.uint16)
    last_hidden = no_rows if spec.last_hidden == "none" else rows["last_hidden"][labels]
    return CachedSample(
        sample.id, rows["input_ids"][tokens], supervised, rows["context"][tokens], last_hidden, positions
    )


@dataclass(frozen=True)
class ObjectRead:
    """Rows first_row..first_row + num_rows - 1 of an object of `size` bytes, of which `num_bytes` were read."""

    path: str
    size: int
    first_row: int
    num_rows: int
    num_bytes: int


@dataclass(frozen=True)
class FoundSample:
    """One sample, where it lies, and what was read to get it."""

    sample: CachedSample
    planned: PlannedSample
    objects: tuple[ObjectRead, ...]


class CacheReader:
    """Reads the cache that `manifest` names from `store`; safe to share among threads.

    Holds at most `max_open_shards` decoded shards, and one more when it is told what comes next (`follow`); they are
    read and decoded by `threads` threads. Each object is checked against the manifest's sha256 the first time, its
    size and the crc32c of its chunks every time. Raises ObjectMissingError, with the command that makes the cache
    again, if the store lacks it, and CacheError if it is not the one the manifest names.
    """

    def __init__(
        self, store: Store, manifest: Manifest, *, max_open_shards: int = ORDER_WINDOW, threads: int = READ_THREADS
    ) -> None:
        self._shards = OpenShards(self._open_shard, most=max_open_shards, threads=threads)
        self._store, self._manifest = store, manifest
        self._verified: set[str] = set()
        metadata = read_metadata(self._object, where=f"{manifest.prefix} in {store.uri}")
        self._plan, self.facts = metadata.plan, metadata.facts
        self._codecs = [
            ShardCodec(layout, spec=self._plan.spec, scales=metadata.scales.get(layout.name))
            for layout in array_layouts(self._plan.spec)
        ]
        self._memory = [
            RecycledMemory(block_bytes=self.spec.shard_tokens * codec.layout.row_bytes, most_idle=max_open_shards)
            for codec in self._codecs
        ]
        self.samples: Sequence[PlannedSample] = self._plan.samples

    @property
    def uri(self) -> str:
        """The store that is read from."""
        return self._store.uri

    @property
    def spec(self) -> CacheSpec:
        return self._plan.spec

    def __len__(self) -> int:
        return self._plan.num_samples

    def order(self, seed: int, *, epoch: int) -> NDArray[np.int64]:
        """See `window_order`."""
        return window_order(self._plan, seed, epoch)

    def follow(self, walk: Iterable[int]) -> None:
        """Open the shards of these samples ahead of their use; the samples are then to be read in this order."""
        self._shards.follow(self._with_shards(walk))

    def read(self, index: int, *, epoch: int = -1) -> CachedSample:
        """The sample of this index into `samples`, the same in every epoch; its arrays are read-only."""
        sample = self.samples[index]
        return cut_sample(self._shards.rows(sample.shard, index=index), sample, spec=self.spec)

    def read_one(self, sample_id: str) -> FoundSample:
        """The sample of this id by byte ranges: of each object the index and the chunks that hold the sample's rows.

        The chunks' crc32c are checked, but no sha256. Raises CacheError, with near ids, for an unknown id.
        """
        planned, rows, objects = self._plan.find(sample_id), {}, []
        for codec in self._codecs:
            rows[codec.layout.name], part = self._range(codec, planned)
            objects += [part] if part.num_rows else []
        inside = replace(planned, offset=0, label_offset=0)
        return FoundSample(cut_sample(rows, inside, spec=self.spec), planned, tuple(objects))

    def close(self) -> None:
        """End the reader's threads."""
        self._shards.close()

    def _with_shards(self, walk: Iterable[int]) -> Iterator[tuple[int, int]]:
        for index in walk:
            yield index, int(self._plan.shard_of[index])

    def _open_shard(self, number: int) -> Rows:
        shard = self._plan.shard(number)
        rows: Rows = {}
        for codec, memory in zip(self._codecs, self._memory, strict=True):
            layout = codec.layout
            num_rows = layout.used_rows(shard)
            if num_rows:
                path = layout.object_path(number)
                data, out = self._object(path), memory.empty((num_rows, *layout.row_shape), dtype=layout.dtype)
                values = codec.decode(data, num_rows=num_rows, where=self._where(path), out=out)
            else:
                values = np.empty((0, *layout.row_shape), dtype=layout.dtype)
            values.setflags(write=False)
            rows[layout.name] = values
        return rows

    def _range(self, codec: ShardCodec, sample: PlannedSample) -> tuple[NDArray[Any], ObjectRead]:
        """The rows of one sample in one array."""
        by_token = codec.layout.rows == "tokens"
        first_row = sample.offset if by_token else sample.label_offset
        num_rows = sample.num_tokens if by_token else sample.num_rows
        path = codec.layout.object_path(sample.shard)
        if not num_rows:
            return np.empty((0, *codec.layout.row_shape), dtype=codec.layout.dtype), ObjectRead(
                path, 0, first_row, 0, 0
            )
        size, where = self._record(path).size, self._where(path)
        place = f"{self._manifest.prefix}/{path}"
        start, length = codec.index_range(size, where=where)
        num_bytes = length
        try:
            index = self._store.get_range(place, start=start, length=length)
            chunks = []
            for item in codec.chunk_ranges(index, first_row=first_row, num_rows=num_rows, where=where):
                chunks.append((item, self._store.get_range(place, start=item.start, length=item.length)))
                num_bytes += item.length
        except ObjectMissingError:
            raise missing_cache(self._store, self._manifest, path) from None
        rows = codec.decode_rows(chunks, first_row=first_row, num_rows=num_rows, where=where)
        return rows, ObjectRead(path, size, first_row, num_rows, num_bytes)

    def _where(self, path: str) -> str:
        return f"{self._manifest.prefix}/{path} in {self._store.uri}"

    def _record(self, path: str) -> ObjectRecord:
        record = self._manifest.find(path)
        if record is None:
            raise CacheError(f"the manifest of {self._manifest.prefix} does not name {path}")
        return record

    def _object(self, path: str) -> bytes:
        """The bytes of an object; the first time they are checked against the manifest."""
        record = self._record(path)
        place = f"{self._manifest.prefix}/{path}"
        try:
            data = self._store.get(place)
        except ObjectMissingError:
            raise missing_cache(self._store, self._manifest, path) from None
        if len(data) == record.size and path in self._verified:
            return data
        digest = sha256_hex(data)
        if digest != record.sha256:
            raise CacheError(
                f"{place} in {self._store.uri} is not what the manifest names",
                got=f"{len(data)} bytes, sha256 {digest}",
                expected=f"{record.size} bytes, sha256 {record.sha256}",
                where=f"delete it, then {remake_command(self._manifest)}",
            )
        self._verified.add(path)
        return data


def remake_command(manifest: Manifest) -> str:
    """The command that makes the cache of this manifest again."""
    target = manifest.prefix.rpartition("/")[2].rpartition("-")[0]
    return f"dvc repro -f -s cache@{target}"


def missing_cache(store: Store, manifest: Manifest, path: str) -> ObjectMissingError:
    """The error for a store that lacks a cache, or an object of it."""
    return ObjectMissingError(
        f"store {store.uri} lacks cache {manifest.prefix}",
        got=f"no object {path}",
        expected=f"what the manifest names; `{remake_command(manifest)}` makes it again",
        where="DRAFTSMITH_STORE names the store",
    )
