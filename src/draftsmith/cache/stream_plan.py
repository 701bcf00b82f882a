"""Streaming mode, what is known beforehand: which shard training needs from when to when, and the room that takes.

A cache larger than the disk is never there as a whole: workers make its shards in the order in which training reads
them, and each is deleted once training has passed it. A tick counts the samples of the training walk (update s reads
ticks s*size..(s+1)*size-1); the first pass over the cache, before update one, has the ticks before the first.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftsmith.cache.layout import array_layouts
from draftsmith.cache.plan import CachePlan
from draftsmith.errors import CacheError, MachineError
from draftsmith.manifest import sha256_hex

LIMIT_VARIABLE = "DRAFTSMITH_CACHE_MAX_BYTES"
FIRST_PASS = -1
# Room that the records about a shard take beside it: its commit record, its claim; as much for those of the run.
RECORD_BYTES = 4096
# A number among the scales of codec int8, which are kept as JSON.
SCALE_CHARS = 32

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def storage_limit() -> int | None:
    """Bytes that a cache may take in the store, from DRAFTSMITH_CACHE_MAX_BYTES; None without one."""
    text = os.environ.get(LIMIT_VARIABLE, "")
    return parse_bytes(text, where=LIMIT_VARIABLE) if text else None


def parse_bytes(text: str, *, where: str) -> int:
    """`20GB`, `1.5 TiB`, `500000000` -> bytes. Raises MachineError that names `where`."""
    match = re.fullmatch(r"([0-9]{1,24}(?:\.[0-9]{1,24})?)\s*([A-Za-z]*)", text.strip())
    num_bytes = 0 if match is None else int(float(match[1]) * _UNITS.get(match[2].upper(), 0))
    if num_bytes < 1:
        raise MachineError(
            "a number of bytes cannot be read",
            got=repr(text),
            expected="1 or more, such as 500000000, 20GB or 18.5GiB",
            where=where,
        )
    return num_bytes


@dataclass(frozen=True)
class Slots:
    """The shards of a run in the order in which they are needed, one slot for each use of a shard in an epoch.

    epoch int32 [P] (FIRST_PASS for the pass before training), shard int32 [P], first_use and last_use int64 [P]
    (ticks). Training starts at tick `first`.
    """

    epoch: NDArray[np.int32]
    shard: NDArray[np.int32]
    first_use: NDArray[np.int64]
    last_use: NDArray[np.int64]
    first: int

    def __len__(self) -> int:
        return len(self.shard)

    @property
    def digest(self) -> str:
        """sha256 of the sequence: trainer and workers compare it, so that both work after the same params."""
        columns = (self.epoch, self.shard, self.first_use, self.last_use)
        return sha256_hex(b"".join(np.ascontiguousarray(item).tobytes() for item in columns))


def plan_slots(
    plan: CachePlan, *, first_pass: Sequence[int], members: Sequence[int], order: Callable[[int], NDArray[np.int64]],
    first: int, stop: int,
) -> Slots:  # fmt: skip
    """The slots of a run that reads `first_pass` (sample indices) once and then ticks first..stop-1 of the walk.

    `order(epoch)` gives all sample indices in the order of an epoch; `members` are those that training uses.
    """
    shard_of = plan.shard_of
    used = np.zeros(plan.num_samples, dtype=bool)
    used[list(members)] = True
    parts = []
    if len(first_pass):
        parts.append(_uses(FIRST_PASS, shard_of[list(first_pass)], start=first - len(first_pass)))
    size = len(members)
    for epoch in range(first // size, -(-stop // size)):
        indices = np.asarray(order(epoch), dtype=np.int64)
        walk = shard_of[indices[used[indices]]]
        low, high = max(0, first - epoch * size), min(size, stop - epoch * size)
        if low < high:
            parts.append(_uses(epoch, walk[low:high], start=epoch * size + low))
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)] if parts else [np.empty(0)] * 4
    return Slots(
        columns[0].astype(np.int32), columns[1].astype(np.int32), columns[2].astype(np.int64),
        columns[3].astype(np.int64), first,
    )  # fmt: skip


def _uses(epoch: int, walk: NDArray[np.int32], *, start: int) -> tuple[NDArray[Any], ...]:
    """Epoch, shard, first and last tick of every shard in a walk that starts at tick `start`, by first tick."""
    shards, first = np.unique(walk, return_index=True)
    last = len(walk) - 1 - np.unique(walk[::-1], return_index=True)[1]
    by_first = np.argsort(first)
    epochs = np.full(len(shards), epoch)
    return epochs, shards[by_first], first[by_first] + start, last[by_first] + start


def most_bytes(plan: CachePlan, shard: int) -> int:
    """The most that a shard and its records can take, whatever its numbers.

    That is codec `plain`'s exact size and what zstd adds to bytes that it cannot shrink: under 1/256 and 128 bytes a
    chunk. `bf16` and `int8` store no more numbers than `plain` does.
    """
    planned, spec = plan.shard(shard), plan.spec
    total = RECORD_BYTES
    for layout in array_layouts(spec):
        size = plan.object_bytes(layout, planned)
        total += size + size // 256 + 128 * -(-layout.used_rows(planned) // spec.chunk_tokens)
    return total


def needed_bytes(slots: Slots, *, sizes: Callable[[int], int], ahead: int) -> int:
    """The least room in which a run cannot come to a halt: the most that slots which it needs at once can take.

    At tick t of training the loader reads up to tick t + `ahead`, while what was read from t on is not passed yet; the
    first pass reads one sample after the other. `sizes` gives the bytes of a shard.
    """
    if not len(slots):
        return 0
    in_pass = slots.epoch == FIRST_PASS
    begin = np.where(in_pass, slots.first_use, np.maximum(slots.first_use - ahead, slots.first))
    size = np.array([sizes(int(shard)) for shard in slots.shard], dtype=np.int64)
    ticks = np.concatenate([begin, slots.last_use + 1])
    change = np.concatenate([size, -size])
    # At one tick what is passed goes before what is needed comes.
    return int(np.cumsum(change[np.lexsort((change, ticks))]).max())


def record_bytes(plan: CachePlan) -> int:
    """The most that the records of a run take: claim, control record, and under codec int8 the scales."""
    spec = plan.spec
    return RECORD_BYTES + (SCALE_CHARS * (spec.num_layers + 1) * spec.hidden_size if spec.codec == "int8" else 0)


def check_room(limit: int, *, needed: int, kept: int) -> int:
    """Bytes that shards may take: `limit` less what the validation samples keep.

    Raises CacheError with the number needed if that is too little.
    """
    if limit - kept < needed:
        raise CacheError(
            "the store may hold too little of the cache to train from",
            got=f"{limit} bytes",
            expected=f"at least {needed + kept}: {needed} for the shards that training reads at once, {kept} for the "
            "validation samples; twice that lets workers run ahead",
            where=f"{LIMIT_VARIABLE}; a smaller cache.shard_tokens in params.yaml needs less",
        )
    return limit - kept
