"""The layout of a target cache, planned from lengths alone: shards, rows, inference batches and exact bytes.

Imports neither torch nor zarr, so planning needs no GPU and no weights. Letters: T tokens, L captured layers, D hidden.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from math import prod
from typing import Any, Literal

from draftsmith.errors import CacheError
from draftsmith.manifest import json_digest

PLAN_VERSION = 1
OPEN_SHARDS = 8
MAX_OBJECT_BYTES = 5 * 1024**3
CRC_BYTES = 4
INDEX_ENTRY_BYTES = 16

Codec = Literal["plain", "bf16"]
LastHidden = Literal["none", "labels", "all"]

_COLUMNS = ("id", "num_tokens", "num_labels", "shard", "offset", "label_offset")


@dataclass(frozen=True)
class CacheSpec:
    """What the layout depends on besides the samples. Lengths are in tokens.

    `last_hidden` says which rows of the target's last hidden state are kept: none, those of label positions
    (p with tokens p and p+1 both supervised), or all.
    """

    num_layers: int
    hidden_size: int
    codec: Codec
    last_hidden: LastHidden
    shard_tokens: int
    chunk_tokens: int
    batch_tokens: int
    seed: int

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "shard_tokens", "chunk_tokens", "batch_tokens"):
            if getattr(self, name) < 1:
                raise CacheError(f"{name} must be >= 1", got=getattr(self, name), where="params.yaml: cache")
        if self.codec not in ("plain", "bf16"):
            raise CacheError(
                "unknown codec", got=self.codec, expected="plain or bf16", where="params.yaml: targets.*.codec"
            )
        if self.last_hidden not in ("none", "labels", "all"):
            raise CacheError("unknown choice of last_hidden", got=self.last_hidden, expected="none, labels or all")
        if self.shard_tokens % self.chunk_tokens:
            expected = f"a multiple of chunk_tokens {self.chunk_tokens}"
            raise CacheError("shard_tokens", got=self.shard_tokens, expected=expected, where="params.yaml: cache")


@dataclass(frozen=True)
class SampleLength:
    """One sample to be cached. `num_labels` counts positions p with tokens p and p+1 both supervised."""

    id: str
    num_tokens: int
    num_labels: int


@dataclass(frozen=True, slots=True)
class PlannedSample:
    """Where a sample lies. `offset`, `label_offset`: rows within its shard; `num_rows`: its rows of last_hidden."""

    id: str
    index: int
    shard: int
    num_tokens: int
    num_labels: int
    num_rows: int
    offset: int
    label_offset: int


@dataclass(frozen=True)
class ShardPlan:
    """One shard: its samples in row order, and the batches (indices into `samples`) that the target computes."""

    index: int
    samples: tuple[PlannedSample, ...]
    batches: tuple[tuple[int, ...], ...]

    @cached_property
    def num_tokens(self) -> int:
        return sum(sample.num_tokens for sample in self.samples)

    @cached_property
    def num_labels(self) -> int:
        return sum(sample.num_labels for sample in self.samples)

    @cached_property
    def num_rows(self) -> int:
        """Rows of last_hidden that this shard uses."""
        return sum(sample.num_rows for sample in self.samples)

    def batch(self, number: int) -> tuple[PlannedSample, ...]:
        """The samples of one inference batch, longest first."""
        return tuple(self.samples[index] for index in self.batches[number])


@dataclass(frozen=True)
class ArrayLayout:
    """One array of the cache: its rows belong to tokens, or to label positions (`last_hidden`)."""

    name: str
    row_shape: tuple[int, ...]
    dtype: Literal["int32", "uint8", "uint16"]
    fill_value: int
    rows: Literal["tokens", "labels"]

    @property
    def row_bytes(self) -> int:
        return prod(self.row_shape) * {"int32": 4, "uint8": 1, "uint16": 2}[self.dtype]

    def object_path(self, shard: int) -> str:
        """Path of a shard's object below the cache's prefix; flat, because the chunk keys are parted by '.'."""
        return f"{self.name}/c." + ".".join(str(part) for part in (shard, *[0] * len(self.row_shape)))

    def used_rows(self, shard: ShardPlan) -> int:
        return shard.num_tokens if self.rows == "tokens" else shard.num_rows


# Fill values are ones that real data cannot hold (bfloat16 0x7fc0 is a NaN, which the writer refuses), so that a chunk
# of nothing but fill is an unused one, and is not stored.
BF16_FILL = 0x7FC0


def array_layouts(spec: CacheSpec) -> tuple[ArrayLayout, ...]:
    """The arrays of a cache, in the order in which a shard's objects are written."""
    layouts = (
        ArrayLayout("input_ids", (), "int32", -1, "tokens"),
        ArrayLayout("supervised", (), "uint8", 255, "tokens"),
        ArrayLayout("context", (spec.num_layers, spec.hidden_size), "uint16", BF16_FILL, "tokens"),
        ArrayLayout("last_hidden", (spec.hidden_size,), "uint16", BF16_FILL, "labels"),
    )
    return layouts if spec.last_hidden != "none" else layouts[:-1]


@dataclass(frozen=True)
class CachePlan:
    """The whole layout. Two plans of the same samples and spec are equal, in whatever order the samples came."""

    spec: CacheSpec
    shards: tuple[ShardPlan, ...]

    @cached_property
    def samples(self) -> tuple[PlannedSample, ...]:
        """All samples by their global index: shard by shard, in row order."""
        return tuple(sample for shard in self.shards for sample in shard.samples)

    @property
    def num_samples(self) -> int:
        return sum(len(shard.samples) for shard in self.shards)

    @property
    def num_tokens(self) -> int:
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def num_labels(self) -> int:
        return sum(shard.num_labels for shard in self.shards)

    def object_bytes(self, layout: ArrayLayout, shard: ShardPlan) -> int:
        """Exact size of a shard's object under codec `plain`; 0 says that there is no object.

        Zarr's sharding format: the used inner chunks, each with its crc32c, then the index of all with its own.
        """
        used_chunks = -(-layout.used_rows(shard) // self.spec.chunk_tokens)
        if used_chunks == 0:
            return 0
        index = INDEX_ENTRY_BYTES * (self.spec.shard_tokens // self.spec.chunk_tokens) + CRC_BYTES
        return used_chunks * (self.spec.chunk_tokens * layout.row_bytes + CRC_BYTES) + index

    @property
    def stored_bytes(self) -> dict[str, int]:
        """Stored bytes by array: exact under codec `plain`, what `bf16` starts from otherwise. Metadata not counted."""
        return {
            layout.name: sum(self.object_bytes(layout, shard) for shard in self.shards)
            for layout in array_layouts(self.spec)
        }

    @property
    def logical_bytes(self) -> dict[str, int]:
        """Bytes of the numbers themselves by array: no padding, no checksums, no index."""
        return {
            layout.name: sum(layout.used_rows(shard) for shard in self.shards) * layout.row_bytes
            for layout in array_layouts(self.spec)
        }

    @property
    def digest(self) -> str:
        """sha256 of `to_json()`; the batches follow from it."""
        return json_digest(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """A JSON value from which `from_json` makes an equal plan: the spec, and the samples as columns."""
        columns = {name: [getattr(sample, name) for sample in self.samples] for name in _COLUMNS}
        return {"version": PLAN_VERSION, "spec": asdict(self.spec), "samples": columns}

    @classmethod
    def from_json(cls, body: object) -> CachePlan:
        """Raises CacheError if `body` is no plan of this version."""
        if not isinstance(body, dict) or body.get("version") != PLAN_VERSION:
            got = body.get("version") if isinstance(body, dict) else type(body).__name__
            raise CacheError("not a cache plan of this version", got=got, expected=PLAN_VERSION)
        try:
            spec = CacheSpec(**{item.name: body["spec"][item.name] for item in fields(CacheSpec)})
            columns = [body["samples"][name] for name in _COLUMNS]
            rows = list(zip(*columns, strict=True))
        except (KeyError, TypeError, ValueError) as error:
            raise CacheError(f"broken cache plan: {error!r}") from None
        shards: list[list[PlannedSample]] = []
        for index, (name, num_tokens, num_labels, shard, offset, label_offset) in enumerate(rows):
            if shard == len(shards):
                shards.append([])
            if shard != len(shards) - 1:
                raise CacheError("broken cache plan: shards out of order", got=shard, expected=len(shards) - 1)
            num_rows = _num_rows(spec, num_tokens, num_labels)
            shards[-1].append(PlannedSample(name, index, shard, num_tokens, num_labels, num_rows, offset, label_offset))
        return cls(spec, tuple(_shard(spec, index, samples) for index, samples in enumerate(shards)))


def plan_cache(samples: Iterable[SampleLength], *, spec: CacheSpec) -> CachePlan:
    """Permute the samples by the seed, pack them whole into shards and cut each shard into inference batches.

    The order is that of sha256 over (seed, id), so it does not depend on the order in which `samples` come. Packing
    is first fit over the last few open shards. Raises CacheError for no samples, two of one id, an empty or too long
    one, or more labels than a sequence can have.
    """
    ordered = sorted(samples, key=lambda sample: (_place(spec.seed, sample.id), sample.id))
    if not ordered:
        raise CacheError("no samples to cache", got=0, expected="at least one", where="the answers of this target")
    for before, after in itertools.pairwise(ordered):
        if before.id == after.id:
            raise CacheError("two samples of one id", got=after.id, expected="unique ids")
    filled = [_check(sample, spec) for sample in ordered]
    shards = _pack(filled, spec.shard_tokens)
    planned, index = [], 0
    for number, members in enumerate(shards):
        offset = label_offset = 0
        rows = []
        for sample in members:
            num_rows = _num_rows(spec, sample.num_tokens, sample.num_labels)
            rows.append(
                PlannedSample(
                    sample.id, index, number, sample.num_tokens, sample.num_labels, num_rows, offset, label_offset
                )
            )
            index, offset, label_offset = index + 1, offset + sample.num_tokens, label_offset + num_rows
        planned.append(_shard(spec, number, rows))
    plan = CachePlan(spec, tuple(planned))
    largest = max(plan.object_bytes(layout, shard) for layout in array_layouts(spec) for shard in plan.shards)
    if largest > MAX_OBJECT_BYTES:
        expected = f"objects of at most {MAX_OBJECT_BYTES}, S3's limit for one put"
        raise CacheError(
            "shards are too large", got=f"{largest} bytes", expected=expected, where="params.yaml: cache.shard_tokens"
        )
    return plan


def _place(seed: int, sample_id: str) -> bytes:
    return hashlib.sha256(f"{seed}:{sample_id}".encode()).digest()


def _num_rows(spec: CacheSpec, num_tokens: int, num_labels: int) -> int:
    return {"none": 0, "labels": num_labels, "all": num_tokens}[spec.last_hidden]


def _check(sample: SampleLength, spec: CacheSpec) -> SampleLength:
    if not 1 <= sample.num_tokens <= spec.shard_tokens:
        expected = f"1..{spec.shard_tokens} tokens (shard_tokens)"
        raise CacheError(f"sample {sample.id} does not fit a shard", got=sample.num_tokens, expected=expected)
    if not 0 <= sample.num_labels < sample.num_tokens:
        expected = f"0..{sample.num_tokens - 1}, one less than its tokens"
        raise CacheError(f"sample {sample.id}: number of labels", got=sample.num_labels, expected=expected)
    return sample


def _pack(samples: Sequence[SampleLength], capacity: int) -> list[list[SampleLength]]:
    """First fit over a window of open shards; when none has room and the window is full, the fullest is closed."""
    shards: list[list[SampleLength]] = []
    room: dict[int, int] = {}
    for sample in samples:
        number = next((shard for shard, free in room.items() if free >= sample.num_tokens), None)
        if number is None:
            if len(room) == OPEN_SHARDS:
                del room[min(room, key=lambda shard: (room[shard], shard))]
            number = len(shards)
            shards.append([])
            room[number] = capacity
        shards[number].append(sample)
        room[number] -= sample.num_tokens
    return shards


def _shard(spec: CacheSpec, index: int, samples: Sequence[PlannedSample]) -> ShardPlan:
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
    return ShardPlan(index, tuple(samples), tuple(tuple(batch) for batch in batches))
