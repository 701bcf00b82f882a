"""The layout of a target cache, planned from lengths alone: shards, rows, inference batches and exact bytes.

Imports neither torch nor zarr, so planning needs no GPU and no weights. Letters: N samples.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from draftsmith.cache.layout import (
    CRC_BYTES,
    INDEX_ENTRY_BYTES,
    ArrayLayout,
    CacheSpec,
    Codec,
    LastHidden,
    PlannedSample,
    SampleLength,
    ShardPlan,
    array_layouts,
)
from draftsmith.cache.sample_ids import SampleIds, SampleIdsBuilder
from draftsmith.errors import CacheError
from draftsmith.manifest import json_digest

__all__ = [
    "ArrayLayout", "CachePlan", "CacheSpec", "Codec", "LastHidden", "PlannedSample", "SampleLength", "ShardPlan",
    "array_layouts", "plan_cache",
]  # fmt: skip

PLAN_VERSION = 2
OPEN_SHARDS = 8
MAX_OBJECT_BYTES = 5 * 1024**3
COLUMNS = ("num_tokens", "num_labels", "shard", "offset", "label_offset")
KEY_BYTES = 8  # of a sha256, to order samples by

T = TypeVar("T")
Ints = NDArray[np.int32]


class _Lazy(Sequence[T]):
    """A sequence whose items are made when they are asked for."""

    def __init__(self, size: int, make: Callable[[int], T]) -> None:
        self._size, self._make = size, make

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        if isinstance(index, slice):
            return [self._make(number) for number in range(self._size)[index]]
        return self._make(range(self._size)[index])


class CachePlan:
    """The whole layout, in columns: samples and shards are made when they are asked for.

    Two plans of the same samples and spec are equal, in whatever order the samples came.
    """

    def __init__(self, spec: CacheSpec, *, ids: SampleIds, columns: Mapping[str, Ints]) -> None:
        """`columns`: int32 [N] each of num_tokens, num_labels, shard, offset, label_offset; they and `ids` are in the
        order of the global index."""
        self.spec = spec
        self._ids, self._columns = ids, dict(columns)
        shard = self._columns["shard"]
        self._starts = np.append(np.flatnonzero(np.diff(shard, prepend=-1)), len(shard))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CachePlan) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def num_samples(self) -> int:
        return len(self._ids)

    @property
    def num_shards(self) -> int:
        return len(self._starts) - 1

    @property
    def num_tokens(self) -> int:
        return int(self._columns["num_tokens"].sum(dtype=np.int64))

    @property
    def num_labels(self) -> int:
        return int(self._columns["num_labels"].sum(dtype=np.int64))

    @property
    def shard_of(self) -> Ints:
        """The shard of each sample, int32 [N]."""
        return self._columns["shard"]

    @property
    def samples(self) -> Sequence[PlannedSample]:
        """All samples by their global index: shard by shard, in row order."""
        return _Lazy(self.num_samples, self._sample)

    @property
    def shards(self) -> Sequence[ShardPlan]:
        """All shards by their index."""
        return _Lazy(self.num_shards, self.shard)

    def shard(self, index: int) -> ShardPlan:
        """One shard with its samples and batches."""
        start, stop = (int(place) for place in self._starts[index : index + 2])
        samples = tuple(self._sample(number) for number in range(start, stop))
        return ShardPlan(index, samples, _batches(self.spec, samples))

    def sample_ids(self) -> Iterator[bytes]:
        """The ids of all samples, UTF-8, by global index."""
        return iter(self._ids)

    def find(self, sample_id: str) -> PlannedSample:
        """The sample of this id. Raises CacheError, with a few ids like it, if there is none."""
        index = self._ids.find(sample_id)
        if index is None:
            expected = f"one of {len(self._ids)}, such as {', '.join(self._ids.near(sample_id))}"
            raise CacheError(f"no sample {sample_id!r} in the cache", expected=expected)
        return self._sample(index)

    def object_bytes(self, layout: ArrayLayout, shard: ShardPlan) -> int:
        """Exact size of a shard's object under codec `plain`; 0 says that there is no object.

        Zarr's sharding format: the used inner chunks, each with its crc32c, then the index of all with its own.
        """
        return int(self._object_bytes(layout, np.array([layout.used_rows(shard)]))[0])

    @cached_property
    def stored_bytes(self) -> dict[str, int]:
        """Stored bytes by array: exact under codec `plain`, what others start from otherwise. Metadata not counted."""
        return {
            layout.name: int(self._object_bytes(layout, self._used_rows(layout)).sum())
            for layout in array_layouts(self.spec)
        }

    @cached_property
    def logical_bytes(self) -> dict[str, int]:
        """Bytes of the numbers themselves by array: no padding, no checksums, no index."""
        return {
            layout.name: int(self._used_rows(layout).sum()) * layout.row_bytes for layout in array_layouts(self.spec)
        }

    @property
    def num_objects(self) -> int:
        """Data objects of all shards."""
        return sum(int(np.count_nonzero(self._used_rows(layout))) for layout in array_layouts(self.spec))

    @property
    def largest_object_bytes(self) -> int:
        """Size of the largest object under codec `plain`."""
        return max(
            int(self._object_bytes(layout, self._used_rows(layout)).max()) for layout in array_layouts(self.spec)
        )

    @cached_property
    def digest(self) -> str:
        """sha256 over the spec in canonical JSON and the bytes of the columns; the batches follow from them."""
        sha256 = hashlib.sha256(json_digest({"version": PLAN_VERSION, "spec": asdict(self.spec)}).encode())
        for name, values in self.columns().items():
            sha256.update(f"{name} {values.dtype.str} {len(values)}".encode())
            sha256.update(values.data)
        return sha256.hexdigest()

    def columns(self) -> dict[str, NDArray[Any]]:
        """The samples as columns by global index: `sample_id` uint8 (UTF-8, a line feed after each id), the others
        little-endian int32 [N]. `from_columns` makes an equal plan of them."""
        return {"sample_id": self._ids.column(), **{name: self._columns[name] for name in COLUMNS}}

    @classmethod
    def from_columns(cls, spec: CacheSpec, columns: Mapping[str, NDArray[Any]]) -> CachePlan:
        """The inverse of `columns`. Raises CacheError if they do not make a plan."""
        missing = [name for name in ("sample_id", *COLUMNS) if name not in columns]
        if missing:
            raise CacheError(f"broken cache plan: no column {missing[0]}")
        ids = SampleIds.parse(columns["sample_id"].astype(np.uint8).tobytes())
        own = {name: np.ascontiguousarray(columns[name], dtype="<i4") for name in COLUMNS}
        if any(values.shape != (len(ids),) for values in own.values()):
            got = ", ".join(f"{name} {len(values)}" for name, values in own.items())
            raise CacheError("broken cache plan: columns of different lengths", got=f"{len(ids)} ids, {got}")
        tokens, labels = own["num_tokens"], own["num_labels"]
        if (tokens < 1).any() or (labels < 0).any() or (labels >= tokens).any():
            raise CacheError("broken cache plan: numbers of tokens and labels")
        steps = np.diff(own["shard"], prepend=-1)
        if own["shard"][0] != 0 or ((steps != 0) & (steps != 1)).any():
            raise CacheError("broken cache plan: shards out of order")
        plan = cls(spec, ids=ids, columns=own)
        for name, sizes in (("offset", own["num_tokens"]), ("label_offset", plan._num_rows)):
            if not np.array_equal(own[name], _offsets(sizes, plan._starts)):
                raise CacheError(f"broken cache plan: column {name} does not follow from the samples")
        if (own["offset"] > spec.shard_tokens - tokens).any():
            raise CacheError("broken cache plan: a shard holds too much", expected=f"{spec.shard_tokens} tokens")
        return plan

    @cached_property
    def _num_rows(self) -> Ints:
        """Rows of last_hidden of each sample, int32 [N]."""
        return _num_rows(self.spec, self._columns["num_tokens"], self._columns["num_labels"])

    def _used_rows(self, layout: ArrayLayout) -> NDArray[np.int64]:
        """Rows of each shard, int64 [shards]."""
        sizes = self._columns["num_tokens"] if layout.rows == "tokens" else self._num_rows
        return np.add.reduceat(sizes, self._starts[:-1], dtype=np.int64)

    def _object_bytes(self, layout: ArrayLayout, used_rows: NDArray[np.int64]) -> NDArray[np.int64]:
        used_chunks = -(-used_rows // self.spec.chunk_tokens)
        index = INDEX_ENTRY_BYTES * (self.spec.shard_tokens // self.spec.chunk_tokens) + CRC_BYTES
        sizes = used_chunks * (self.spec.chunk_tokens * layout.row_bytes + CRC_BYTES) + index
        return np.where(used_chunks == 0, 0, sizes)

    def _sample(self, index: int) -> PlannedSample:
        tokens, labels, shard, offset, label_offset = (int(self._columns[column][index]) for column in COLUMNS)
        return PlannedSample(
            self._ids[index], index, shard, tokens, labels, int(self._num_rows[index]), offset, label_offset
        )


def plan_cache(samples: Iterable[SampleLength], *, spec: CacheSpec) -> CachePlan:
    """Permute the samples by the seed, pack them whole into shards and cut each shard into inference batches.

    The order is that of sha256 over (seed, id), so it does not depend on the order in which `samples` come. Packing
    is first fit over the last few open shards. Raises CacheError for no samples, two of one id, an empty or too long
    one, or more labels than a sequence can have.
    """
    builder, keys, sizes = SampleIdsBuilder(), array("Q"), array("i")
    start, sha256 = f"{spec.seed}:".encode(), hashlib.sha256
    for sample in samples:
        _check(sample, spec)
        name = sample.id.encode()
        builder.add(name)
        keys.append(int.from_bytes(sha256(start + name).digest()[:KEY_BYTES]))
        sizes.extend((sample.num_tokens, sample.num_labels))
    if not keys:
        raise CacheError("no samples to cache", got=0, expected="at least one", where="the answers of this target")
    ids = builder.build()
    order = _order(np.frombuffer(keys, dtype=np.uint64), ids)
    table = np.frombuffer(sizes, dtype=np.int32).reshape(-1, 2)
    shard = _pack(np.ascontiguousarray(table[order, 0]), spec.shard_tokens)
    order = order[np.argsort(shard, kind="stable")]
    shard.sort()
    # What is not needed any more goes as soon as can be: there may be hundreds of thousands of samples.
    del builder, keys, sizes
    ids = ids.take(order)
    num_tokens, num_labels = (np.ascontiguousarray(table[order, column], dtype="<i4") for column in (0, 1))
    del table, order
    starts = np.append(np.flatnonzero(np.diff(shard, prepend=-1)), len(shard))
    columns = {
        "num_tokens": num_tokens,
        "num_labels": num_labels,
        "shard": shard.astype("<i4"),
        "offset": _offsets(num_tokens, starts),
        "label_offset": _offsets(_num_rows(spec, num_tokens, num_labels), starts),
    }
    plan = CachePlan(spec, ids=ids, columns=columns)
    if plan.largest_object_bytes > MAX_OBJECT_BYTES:
        expected = f"objects of at most {MAX_OBJECT_BYTES}, S3's limit for one put"
        got = f"{plan.largest_object_bytes} bytes"
        raise CacheError("shards are too large", got=got, expected=expected, where="params.yaml: cache.shard_tokens")
    return plan


def _num_rows(spec: CacheSpec, num_tokens: Ints, num_labels: Ints) -> Ints:
    return {"none": np.zeros_like(num_tokens), "labels": num_labels, "all": num_tokens}[spec.last_hidden]


def _offsets(sizes: Ints, starts: NDArray[np.int64]) -> Ints:
    """Where each sample begins within its shard, int32 [N], from the sizes and the first sample of each shard."""
    before = np.cumsum(sizes, dtype=np.int64) - sizes
    return (before - np.repeat(before[starts[:-1]], np.diff(starts))).astype("<i4")


def _check(sample: SampleLength, spec: CacheSpec) -> None:
    if not 1 <= sample.num_tokens <= spec.shard_tokens:
        expected = f"1..{spec.shard_tokens} tokens (shard_tokens)"
        raise CacheError(f"sample {sample.id} does not fit a shard", got=sample.num_tokens, expected=expected)
    if not 0 <= sample.num_labels < sample.num_tokens:
        expected = f"0..{sample.num_tokens - 1}, one less than its tokens"
        raise CacheError(f"sample {sample.id}: number of labels", got=sample.num_labels, expected=expected)
    if "\n" in sample.id or not sample.id:
        raise CacheError("an id of a sample", got=repr(sample.id), expected="one line of text")


def _order(keys: NDArray[np.uint64], ids: SampleIds) -> NDArray[np.int64]:
    """The samples in the order of their keys, those of one key in that of their ids, int64 [N].

    Raises CacheError for two samples of one id.
    """
    order = np.argsort(keys)
    tied = np.flatnonzero(keys[order[1:]] == keys[order[:-1]])
    for run in np.split(tied, np.flatnonzero(np.diff(tied) > 1) + 1) if len(tied) else ():
        places = slice(run[0], run[-1] + 2)
        by_id = sorted(order[places].tolist(), key=ids.__getitem__)
        for before, after in itertools.pairwise(by_id):
            if ids[before] == ids[after]:
                raise CacheError("two samples of one id", got=ids[after], expected="unique ids")
        order[places] = by_id
    return order


def _pack(lengths: Ints, capacity: int) -> Ints:
    """First fit over a window of open shards; when none has room and the window is full, the fullest is closed.

    Returns the shard of each sample, int32 [N].
    """
    shard_of = array("i")
    room: dict[int, int] = {}
    num_shards = 0
    for length in lengths.data:
        for shard, free in room.items():
            if free >= length:
                room[shard] = free - length
                shard_of.append(shard)
                break
        else:
            if len(room) == OPEN_SHARDS:
                del room[min(room, key=lambda shard: (room[shard], shard))]
            room[num_shards] = capacity - length
            shard_of.append(num_shards)
            num_shards += 1
    return np.array(shard_of, dtype=np.int32)


def _batches(spec: CacheSpec, samples: Sequence[PlannedSample]) -> tuple[tuple[int, ...], ...]:
    """Cut a shard into batches of like lengths: longest first, `batch_tokens` tokens at most, at least one sample.

    Tokens are counted as they are: the target runs a batch flat, without padding (padding changes its numbers).
    """
    order = sorted(range(len(samples)), key=lambda place: (-samples[place].num_tokens, place))
    batches: list[list[int]] = []
    filled = 0
    for place in order:
        num_tokens = samples[place].num_tokens
        if batches and filled + num_tokens <= spec.batch_tokens:
            batches[-1].append(place)
            filled += num_tokens
        else:
            batches.append([place])
            filled = num_tokens
    return tuple(tuple(batch) for batch in batches)
