"""What a cache consists of: its spec, its arrays, and the places of samples and shards.

Letters: L captured layers, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal, get_args

from draftsmith.errors import CacheError

CRC_BYTES = 4
INDEX_ENTRY_BYTES = 16
MOST = 2**31 - 1  # rows and their places are int32

Codec = Literal["plain", "bf16", "int8"]
LastHidden = Literal["none", "labels", "all"]


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
            if not 1 <= getattr(self, name) <= MOST:
                raise CacheError(f"{name} must be in 1..{MOST}", got=getattr(self, name), where="params.yaml: cache")
        if self.codec not in get_args(Codec):
            expected = ", ".join(get_args(Codec))
            raise CacheError("unknown codec", got=self.codec, expected=expected, where="params.yaml: targets.*.codec")
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
