"""The reader of a target cache: samples by index, through a few decoded shards, checked against the manifest."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from draftsmith.cache.plan import ArrayLayout, CacheSpec, PlannedSample, ShardPlan, array_layouts
from draftsmith.cache.schema import GROUP_OBJECT, decode_shard, read_metadata
from draftsmith.errors import CacheError, ObjectMissingError
from draftsmith.manifest import Manifest, sha256_hex
from draftsmith.storage import Store

ORDER_WINDOW = 4


@dataclass(frozen=True)
class CachedSample:
    """One sample of T tokens and n label rows; bfloat16 bits as uint16. The arrays are the caller's own.

    input_ids int32 [T], supervised uint8 [T], context uint16 [T, L, D], last_hidden uint16 [n, D]; row i of
    last_hidden belongs to position label_positions[i] (int64 [n]).
    """

    id: str
    input_ids: np.ndarray
    supervised: np.ndarray
    context: np.ndarray
    last_hidden: np.ndarray
    label_positions: np.ndarray


class CacheReader:
    """Reads the cache that `manifest` names from `store`; safe to share among threads.

    Holds at most `max_open_shards` decoded shards in memory. Raises ObjectMissingError, with the command that makes
    the cache again, if the store lacks it, and CacheError if it is not the one the manifest names.
    """

    def __init__(self, store: Store, manifest: Manifest, *, max_open_shards: int = ORDER_WINDOW) -> None:
        if max_open_shards < 1:
            raise CacheError("max_open_shards must be >= 1", got=max_open_shards)
        self._store, self._manifest, self._max_open = store, manifest, max_open_shards
        self._records = {item.path: item for item in manifest.objects}
        self._verified: set[str] = set()
        self._open: OrderedDict[int, dict[str, np.ndarray]] = OrderedDict()
        self._lock = threading.Lock()
        group = self._object(GROUP_OBJECT)
        self._plan, self.facts = read_metadata(group, where=f"{manifest.prefix}/{GROUP_OBJECT} in {store.uri}")
        self.samples: tuple[PlannedSample, ...] = self._plan.samples

    @property
    def spec(self) -> CacheSpec:
        return self._plan.spec

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, index: int) -> CachedSample:
        """The sample of this index into `samples`."""
        sample = self.samples[index]
        with self._lock:
            rows = self._shard(self._plan.shards[sample.shard])
        tokens = slice(sample.offset, sample.offset + sample.num_tokens)
        labels = slice(sample.label_offset, sample.label_offset + sample.num_rows)
        supervised = rows["supervised"][tokens].copy()
        if self.spec.last_hidden == "none":
            last_hidden = np.empty((0, self.spec.hidden_size), dtype=np.uint16)
        else:
            last_hidden = rows["last_hidden"][labels].copy()
        return CachedSample(
            sample.id,
            rows["input_ids"][tokens].copy(),
            supervised,
            rows["context"][tokens].copy(),
            last_hidden,
            self._label_positions(supervised),
        )

    def order(self, seed: int, epoch: int) -> list[int]:
        """Every sample index once, in an order that depends on (seed, epoch) alone.

        Shards are shuffled, then the samples of each ORDER_WINDOW shards among themselves: with that many open shards
        each one is decoded once an epoch. Samples are spread over shards at random by the plan already.
        """
        shards = sorted(self._plan.shards, key=lambda shard: _place(seed, epoch, f"shard {shard.index}"))
        order = []
        for start in range(0, len(shards), ORDER_WINDOW):
            window = [sample for shard in shards[start : start + ORDER_WINDOW] for sample in shard.samples]
            order += [item.index for item in sorted(window, key=lambda item: _place(seed, epoch, f"sample {item.id}"))]
        return order

    def _label_positions(self, supervised: np.ndarray) -> np.ndarray:
        if self.spec.last_hidden == "labels":
            return np.flatnonzero(supervised[:-1] & supervised[1:]).astype(np.int64)
        return np.arange(len(supervised) if self.spec.last_hidden == "all" else 0, dtype=np.int64)

    def _shard(self, shard: ShardPlan) -> dict[str, np.ndarray]:
        if shard.index in self._open:
            self._open.move_to_end(shard.index)
            return self._open[shard.index]
        while len(self._open) >= self._max_open:
            self._open.popitem(last=False)
        self._open[shard.index] = {layout.name: self._rows(layout, shard) for layout in array_layouts(self.spec)}
        return self._open[shard.index]

    def _rows(self, layout: ArrayLayout, shard: ShardPlan) -> np.ndarray:
        num_rows = layout.used_rows(shard)
        if num_rows == 0:
            return np.empty((0, *layout.row_shape), dtype=layout.dtype)
        path = layout.object_path(shard.index)
        where = f"{self._manifest.prefix}/{path} in {self._store.uri}"
        return decode_shard(self._object(path), layout=layout, spec=self.spec, num_rows=num_rows, where=where)

    def _object(self, path: str) -> bytes:
        """The bytes of an object; the first time they are checked against the manifest."""
        record = self._records.get(path)
        if record is None:
            raise CacheError(f"the manifest of {self._manifest.prefix} does not name {path}")
        place = f"{self._manifest.prefix}/{path}"
        try:
            data = self._store.get(place)
        except ObjectMissingError:
            raise missing_cache(self._store, self._manifest, path) from None
        if path not in self._verified:
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


def _place(seed: int, epoch: int, name: str) -> bytes:
    return hashlib.sha256(f"{seed}:{epoch}:{name}".encode()).digest()
