"""Target caches of made-up states, as large as one likes, written by the real writer; and the same numbers raw.

The shape is that of the 135 M target: 5 layers and 576 channels, of different sizes, in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from draftsmith.cache.arrays import SampleArrays
from draftsmith.cache.claims import Owner
from draftsmith.cache.plan import CachePlan, CacheSpec, PlannedSample, SampleLength, array_layouts, plan_cache
from draftsmith.cache.reader import CacheReader
from draftsmith.cache.writer import CacheWriter
from draftsmith.manifest import Manifest
from draftsmith.storage import Store

NUM_LAYERS, HIDDEN_SIZE = 5, 576
SAMPLE_TOKENS, PROMPT_TOKENS = 256, 100
PREFIX = "cache/synthetic-00000000"


def synthetic_plan(num_shards: int, *, shard_tokens: int) -> CachePlan:
    """A plan of full shards."""
    spec = CacheSpec(
        num_layers=NUM_LAYERS, hidden_size=HIDDEN_SIZE, codec="bf16", last_hidden="labels", shard_tokens=shard_tokens,
        chunk_tokens=1024, batch_tokens=4096, seed=0,
    )  # fmt: skip
    count = num_shards * shard_tokens // SAMPLE_TOKENS
    num_labels = SAMPLE_TOKENS - PROMPT_TOKENS - 1
    return plan_cache((SampleLength(f"{i:08d}", SAMPLE_TOKENS, num_labels) for i in range(count)), spec=spec)


class States:
    """A Compute: normal numbers, each channel with a size of its own.

    Samples are cut from one pool of states at places of their own, so that making them takes next to no time.
    """

    def __init__(self, *, pool_tokens: int = 4096) -> None:
        draw = np.random.default_rng(0)
        size = np.exp(draw.normal(0, 1, (1, NUM_LAYERS + 1, HIDDEN_SIZE))).astype(np.float32)
        pool = draw.standard_normal((pool_tokens, NUM_LAYERS + 1, HIDDEN_SIZE), dtype=np.float32) * size
        bits = (pool.view(np.uint32) >> 16).astype(np.uint16)
        self._context, self._hidden = np.ascontiguousarray(bits[:, :-1]), np.ascontiguousarray(bits[:, -1])
        self._ids = draw.integers(0, 49152, pool_tokens, dtype=np.int32)
        self._mask = np.ones(SAMPLE_TOKENS, dtype=np.uint8)
        self._mask[:PROMPT_TOKENS] = 0

    def __call__(self, batches: Iterable[tuple[PlannedSample, ...]]) -> Iterator[list[SampleArrays]]:
        for batch in batches:
            yield [self._sample(sample) for sample in batch]

    def _sample(self, sample: PlannedSample) -> SampleArrays:
        start = sample.index * 97 % (len(self._ids) - sample.num_tokens)
        rows, labels = slice(start, start + sample.num_tokens), slice(start, start + sample.num_labels)
        return SampleArrays(self._ids[rows], self._mask, self._context[rows], self._hidden[labels])


def write_cache(store: Store, plan: CachePlan) -> Manifest:
    """The whole cache, by this process."""
    writer = CacheWriter(
        store, prefix=PREFIX, plan=plan, facts={"target": "synthetic", "validation_ids": [plan.samples[0].id]},
        owner=Owner.this_process(processor="benchmark"), lease_s=600.0,
    )  # fmt: skip
    writer.write_shards(plan.shards, States())
    return writer.finish()


def raw_objects(store: Store, manifest: Manifest, plan: CachePlan) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of every array of every shard, uncompressed and without checksums."""
    reader = CacheReader(store, manifest, max_open_shards=1, threads=1)
    for shard in plan.shards:
        samples = [reader.read(sample.index) for sample in shard.samples]
        for layout in array_layouts(plan.spec):
            yield (
                f"{layout.name}-{shard.index:05d}",
                np.concatenate([getattr(s, layout.name) for s in samples]).tobytes(),
            )
    reader.close()


def write_raw(store: Store, manifest: Manifest, plan: CachePlan, *, folder: Path) -> list[Path]:
    """The raw objects as files."""
    folder.mkdir(parents=True)
    paths = []
    for name, data in raw_objects(store, manifest, plan):
        paths.append(folder / name)
        paths[-1].write_bytes(data)
    return paths
