"""Streaming mode, the reader: samples of a cache that is never there as a whole, in the order of training.

A StreamReader stands where a CacheReader stands for a cache that lies in the store. It waits until workers have
committed the shard that it needs, checks the shard's objects against the commit record, and opens the next shards of
the sequence meanwhile. Validation samples are read at every start of a run, so they are kept in the store by
themselves while the run lasts.
"""

from __future__ import annotations

import io
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftsmith.cache.commits import ShardCommit, read_commit
from draftsmith.cache.layout import ArrayLayout, CacheSpec, array_layouts
from draftsmith.cache.open_shards import Rows
from draftsmith.cache.plan import CachePlan
from draftsmith.cache.reader import ORDER_WINDOW, CachedSample, cut_sample, window_order
from draftsmith.cache.scales import settle_scales
from draftsmith.cache.shard import ShardCodec
from draftsmith.cache.stream_keeper import StreamPlace
from draftsmith.cache.stream_plan import FIRST_PASS, Slots
from draftsmith.errors import CacheError, ObjectMissingError
from draftsmith.manifest import sha256_hex
from draftsmith.storage import Store

SHARDS_AHEAD = 2
POLL_FIRST_S, POLL_MOST_S, POLL_GROWTH = 0.01, 0.5, 1.5
KEPT_OVERHEAD_BYTES = 2048  # of a validation sample's file beside its arrays


@dataclass(frozen=True)
class _Kept:
    """One validation sample in the store: size in bytes, sha256 of its file."""

    size: int
    sha256: str


class HeldOut:
    """The validation samples of a run in the store, one object each, and a record that names them all.

    Rank 0 adds them in the first pass; with the record in place any rank reads them, at this start or a later one.
    """

    def __init__(self, store: Store, place: StreamPlace, *, indices: Sequence[int]) -> None:
        self._store, self._place, self._indices = store, place, list(indices)
        self._kept: dict[int, _Kept] = {}

    @property
    def paths(self) -> frozenset[str]:
        """All that is to stay between two starts; empty while the samples are not all there."""
        return frozenset((self._place.kept, *map(self._path, self._kept))) if self._kept else frozenset()

    @property
    def num_bytes(self) -> int:
        return sum(item.size for item in self._kept.values())

    def load(self) -> bool:
        """Read the record; False if there is none, or if it or a sample is not what this run needs."""
        try:
            body = json.loads(self._store.get(self._place.kept))
            kept = {int(index): _Kept(**item) for index, item in body["samples"].items()}
        except (ObjectMissingError, ValueError, KeyError, TypeError):
            return False
        sizes = {item.path: item.size for item in self._store.list(f"{self._place.prefix}/held-out")}
        if sorted(kept) != self._indices or any(sizes.get(self._path(i)) != item.size for i, item in kept.items()):
            return False
        self._kept = kept
        return True

    def add(self, index: int, sample: CachedSample) -> None:
        """Keep one sample."""
        stream = io.BytesIO()
        np.savez(
            stream, input_ids=sample.input_ids, supervised=sample.supervised, context=sample.context,
            last_hidden=sample.last_hidden, label_positions=sample.label_positions,
        )  # fmt: skip
        data = stream.getvalue()
        self._store.put(self._path(index), data)
        self._kept[index] = _Kept(len(data), sha256_hex(data))

    def close(self) -> None:
        """Write the record, when every sample was added."""
        body = {"samples": {str(index): asdict(self._kept[index]) for index in self._indices}}
        self._store.put(self._place.kept, json.dumps(body).encode())

    def read(self, index: int, *, sample_id: str) -> CachedSample:
        """One sample. Raises CacheError if it is not one of them or was changed."""
        kept = self._kept.get(index)
        if kept is None:
            raise CacheError(f"sample {sample_id} is not among the validation samples that {self._place.prefix} keeps")
        arrays = np.load(io.BytesIO(_checked(self._store, self._path(index), sha256=kept.sha256)))
        return CachedSample(
            sample_id, arrays["input_ids"], arrays["supervised"], arrays["context"], arrays["last_hidden"],
            arrays["label_positions"],
        )  # fmt: skip

    def _path(self, index: int) -> str:
        return f"{self._place.prefix}/held-out/{index:08d}.npz"


def kept_bytes(plan: CachePlan, indices: Sequence[int]) -> int:
    """The most that the validation samples of these indices take in the store, their record included."""
    layouts, total = array_layouts(plan.spec), 0
    for index in indices:
        sample = plan.samples[index]
        rows = {"tokens": sample.num_tokens, "labels": sample.num_rows}
        total += sum(rows[layout.rows] * layout.row_bytes for layout in layouts) + 8 * sample.num_tokens
    return total + KEPT_OVERHEAD_BYTES * len(indices)


class StreamReader:
    """Samples of the shards that workers make, by index and epoch; safe to share among threads.

    `slots` is the sequence of this run (a rank that does not know where it begins gives a longer one). `watch` is
    called while a shard is waited for, and raises if it will not come. At most ORDER_WINDOW + SHARDS_AHEAD shards are
    decoded at a time. `wait_s`: seconds in which `read` and `read_first` waited for a shard.
    """

    def __init__(
        self, store: Store, place: StreamPlace, *, plan: CachePlan, facts: dict[str, Any], slots: Slots,
        held_out: HeldOut, watch: Callable[[], None],
    ) -> None:  # fmt: skip
        self._store, self._place, self._plan, self._held_out, self._watch = store, place, plan, held_out, watch
        self.facts, self.samples = facts, plan.samples
        self._codecs: dict[str, ShardCodec] = {}
        self._sequence = list(zip(slots.epoch.tolist(), slots.shard.tolist(), strict=True))
        self._position = {slot: position for position, slot in enumerate(self._sequence)}
        self._reached = -1
        self._open: OrderedDict[tuple[int, int], Rows] = OrderedDict()
        self._ahead: OrderedDict[tuple[int, int], Future[Rows]] = OrderedDict()
        self._pool = ThreadPoolExecutor(SHARDS_AHEAD, thread_name_prefix="stream")
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.wait_s = 0.0

    @property
    def spec(self) -> CacheSpec:
        return self._plan.spec

    def order(self, seed: int, *, epoch: int) -> NDArray[np.int64]:
        """The order that a CacheReader of the same plan gives."""
        return window_order(self._plan, seed, epoch)

    def follow(self, walk: Iterable[int]) -> None:
        """Nothing to do: the sequence of shards is known from the start."""

    def read(self, index: int, *, epoch: int) -> CachedSample:
        """The sample of this index into `samples`, in this epoch; epoch -1 reads a validation sample."""
        if epoch < 0:
            return self._held_out.read(index, sample_id=self.samples[index].id)
        return self._cut(index, epoch)

    def read_first(self, index: int) -> CachedSample:
        """The sample of this index in the first pass, which goes through the indices upwards."""
        return self._cut(index, FIRST_PASS)

    def close(self) -> None:
        """Stop waiting for shards ahead."""
        self._closed.set()
        self._pool.shutdown(cancel_futures=True)

    def _cut(self, index: int, epoch: int) -> CachedSample:
        sample = self.samples[index]
        with self._lock:
            rows = self._shard((epoch, sample.shard))
        return cut_sample(rows, sample, spec=self.spec)

    def _shard(self, slot: tuple[int, int]) -> Rows:
        if slot not in self._position:
            raise CacheError(f"shard {slot[1]} is not one that this run reads in epoch {slot[0]}")
        if slot in self._open:
            self._open.move_to_end(slot)
            return self._open[slot]
        started = time.monotonic()
        while len(self._open) >= ORDER_WINDOW:
            self._open.popitem(last=False)
        self._reached = max(self._reached, self._position[slot])
        waited = self._ahead.pop(slot, None)
        self._look_ahead(self._position[slot])
        self._open[slot] = self._load(slot) if waited is None else waited.result()
        self.wait_s += time.monotonic() - started
        return self._open[slot]

    def _look_ahead(self, position: int) -> None:
        """Let threads open the next shards; forget those that this rank went past without a sample in them.

        Their threads stop to wait for them, so that no shard that is needed waits for a thread.
        """
        for slot in [slot for slot in self._ahead if self._is_behind(slot)]:
            del self._ahead[slot]
        for slot in self._sequence[position + 1 : position + 1 + ORDER_WINDOW + SHARDS_AHEAD]:
            if len(self._ahead) >= SHARDS_AHEAD:
                return
            if slot not in self._open and slot not in self._ahead:
                self._ahead[slot] = self._pool.submit(self._load, slot)

    def _is_behind(self, slot: tuple[int, int]) -> bool:
        return self._position[slot] + ORDER_WINDOW < self._reached

    def _load(self, slot: tuple[int, int]) -> Rows:
        """Wait for the shard's commit record, then read, check and decode its objects."""
        commit, planned = self._wait(slot), self._plan.shard(slot[1])
        digests = {item.path: item.sha256 for item in commit.objects}
        rows: Rows = {}
        for layout in array_layouts(self.spec):
            path, num_rows = layout.object_path(planned.index), layout.used_rows(planned)
            if num_rows == 0:
                rows[layout.name] = np.empty((0, *layout.row_shape), dtype=layout.dtype)
                continue
            where = f"{self._place.epoch_prefix(slot[0])}/{path}"
            data = _checked(self._store, where, sha256=digests[path])
            rows[layout.name] = self._codec(layout).decode(data, num_rows=num_rows, where=where)
            rows[layout.name].setflags(write=False)
        return rows

    def _codec(self, layout: ArrayLayout) -> ShardCodec:
        """Made when the first shard is there: then the scales of codec int8 are settled as well."""
        if layout.name not in self._codecs:
            fitted = {}
            if self.spec.codec == "int8":
                fitted = settle_scales(self._store, self._place.prefix, known=None, fit=None)
            self._codecs[layout.name] = ShardCodec(layout, spec=self.spec, scales=fitted.get(layout.name))
        return self._codecs[layout.name]

    def _wait(self, slot: tuple[int, int]) -> ShardCommit:
        prefix, pause = self._place.epoch_prefix(slot[0]), POLL_FIRST_S
        while (commit := read_commit(self._store, prefix, slot[1])) is None:
            self._watch()
            if self._closed.wait(pause) or self._is_behind(slot):
                raise CacheError(f"shard {slot[1]} of the stream {self._place.prefix} is waited for no more")
            pause = min(POLL_MOST_S, pause * POLL_GROWTH)
        return commit


def _checked(store: Store, path: str, *, sha256: str) -> bytes:
    """The bytes of an object. Raises CacheError if they are not those that its record names."""
    data = store.get(path)
    digest = sha256_hex(data)
    if digest != sha256:
        raise CacheError(
            f"{path} in {store.uri} is not what its record names",
            got=f"{len(data)} bytes, sha256 {digest}",
            expected=f"sha256 {sha256}",
            where="delete it, then run the training again: it is made again",
        )
    return data
