"""A toy cache: a few dozen short samples whose arrays follow from their ids; and a process that fills one.

`python -m tests.unit.cache.toy STORE` fills it; it can be told to kill itself with SIGKILL after a certain write.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from draftsmith.cache import planes
from draftsmith.cache.claims import Owner
from draftsmith.cache.plan import CachePlan, CacheSpec, Codec, LastHidden, PlannedSample, SampleLength, plan_cache
from draftsmith.cache.scales import fit_plan
from draftsmith.cache.writer import CacheWriter, Compute, SampleArrays
from draftsmith.manifest import Manifest
from draftsmith.storage import ObjectInfo, Store, open_store

PREFIX = "cache/toy_target-0123abcd"
FACTS: dict[str, Any] = {"target": "toy_target", "capture_layers": [1, 3]}
NUM_LAYERS, HIDDEN_SIZE = 2, 6
ROOT = Path(__file__).parents[3]


def toy_spec(*, codec: Codec = "bf16", last_hidden: LastHidden = "labels") -> CacheSpec:
    return CacheSpec(
        num_layers=NUM_LAYERS,
        hidden_size=HIDDEN_SIZE,
        codec=codec,
        last_hidden=last_hidden,
        shard_tokens=128,
        chunk_tokens=16,
        batch_tokens=100,
        seed=7,
    )


def toy_samples(count: int = 18) -> list[SampleLength]:
    """Lengths 8..49; a sample's labels are those of a mask whose last two thirds are supervised, in two runs."""
    return [
        SampleLength(f"sample-{number}", 8 + number * 37 % 42, count_labels(toy_mask(8 + number * 37 % 42)))
        for number in range(count)
    ]


def toy_mask(num_tokens: int) -> np.ndarray:
    mask = np.zeros(num_tokens, dtype=np.uint8)
    mask[num_tokens // 3 :] = 1
    mask[num_tokens // 2] = 0
    return mask


def count_labels(mask: np.ndarray) -> int:
    """Positions p with p and p+1 both supervised, counted one by one."""
    return sum(1 for p in range(len(mask) - 1) if mask[p] == 1 and mask[p + 1] == 1)


def toy_plan(*, codec: Codec = "bf16", last_hidden: LastHidden = "labels") -> CachePlan:
    return plan_cache(toy_samples(), spec=toy_spec(codec=codec, last_hidden=last_hidden))


def toy_arrays(sample: PlannedSample, spec: CacheSpec) -> SampleArrays:
    """Finite bfloat16 numbers drawn from the sample's id; last_hidden rows are cut by the mask's own loop."""
    draw = np.random.default_rng(int.from_bytes(hashlib.sha256(sample.id.encode()).digest()[:8]))
    mask = toy_mask(sample.num_tokens)
    hidden = bf16_bits(draw.standard_normal((sample.num_tokens, HIDDEN_SIZE)))
    labels = [p for p in range(sample.num_tokens - 1) if mask[p] == 1 and mask[p + 1] == 1]
    kept = {"none": None, "labels": hidden[labels], "all": hidden}[spec.last_hidden]
    context = bf16_bits(draw.standard_normal((sample.num_tokens, NUM_LAYERS, HIDDEN_SIZE)))
    return SampleArrays(draw.integers(0, 50, sample.num_tokens, dtype=np.int32), mask, context, kept)


def bf16_bits(values: np.ndarray) -> np.ndarray:
    """float -> the upper 16 bits of float32."""
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


class Toy:
    """Computes the toy's batches and counts how often each sample was computed."""

    def __init__(self, plan: CachePlan) -> None:
        self.plan = plan
        self.computed: list[str] = []

    def __call__(self, batches: Iterable[tuple[PlannedSample, ...]]) -> Iterator[list[SampleArrays]]:
        for batch in batches:
            self.computed += [sample.id for sample in batch]
            yield [toy_arrays(sample, self.plan.spec) for sample in batch]


def shard_of(path: str) -> int | None:
    """The shard of an object's path in the store; None for metadata, samples' columns and records."""
    found = re.fullmatch(re.escape(PREFIX) + r"/(?:input_ids|supervised|context|last_hidden)/c\.(\d+)[.0]*", path)
    return None if found is None else int(found[1])


def each(make: Callable[[PlannedSample], SampleArrays]) -> Compute:
    """A Compute that makes the arrays sample by sample."""

    def compute(batches: Iterable[tuple[PlannedSample, ...]]) -> Iterator[list[SampleArrays]]:
        for batch in batches:
            yield [make(sample) for sample in batch]

    return compute


def elsewhere() -> Owner:
    """A process of another machine."""
    return dataclasses.replace(Owner.this_process(processor="toy"), host="other-host", machine="other", pid=4242)


def toy_writer(store: Store, plan: CachePlan, *, owner: Owner | None = None, lease_s: float = 60.0) -> CacheWriter:
    owner = owner or Owner.this_process(processor="toy")
    return CacheWriter(
        store, prefix=PREFIX, plan=plan, facts=FACTS, owner=owner, lease_s=lease_s,
        scales=lambda: fit_plan(plan, Toy(plan)),
    )  # fmt: skip


def fill(store: Store, plan: CachePlan, toy: Compute) -> Manifest:
    """The whole cache by this process."""
    writer = toy_writer(store, plan)
    writer.write_shards(plan.shards, toy)
    return writer.finish()


class DyingStore:
    """A store whose process is killed, as by kill -9 or the power cut, right after its n-th write that `at` matches.

    `at` is searched in `put PATH` and `delete PATH`.
    """

    def __init__(self, store: Store, *, die_after: int, at: str = "^put ") -> None:
        self._store, self._left, self._at = store, die_after, re.compile(at)
        self._lock = threading.Lock()

    @property
    def uri(self) -> str:
        return self._store.uri

    @property
    def retries(self) -> Mapping[str, int]:
        return {}

    def get(self, path: str) -> bytes:
        return self._store.get(path)

    def get_range(self, path: str, *, start: int, length: int) -> bytes:
        return self._store.get_range(path, start=start, length=length)

    def head(self, path: str) -> ObjectInfo | None:
        return self._store.head(path)

    def put(self, path: str, data: bytes) -> ObjectInfo:
        return self._counted(self._store.put(path, data))

    def put_if_absent(self, path: str, data: bytes) -> ObjectInfo:
        return self._counted(self._store.put_if_absent(path, data))

    def put_if_match(self, path: str, data: bytes, *, etag: str) -> ObjectInfo:
        return self._counted(self._store.put_if_match(path, data, etag=etag))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return self._store.list(prefix)

    def delete(self, path: str, *, version_id: str | None = None) -> None:
        self._store.delete(path) if version_id is None else self._store.delete(path, version_id=version_id)
        self._count(f"delete {path}")

    def _counted(self, info: ObjectInfo) -> ObjectInfo:
        self._count(f"put {info.path}")
        return info

    def _count(self, operation: str) -> None:
        with self._lock:
            if self._at.search(operation) is None:
                return
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def start_process(store: Store, *arguments: str) -> subprocess.Popen[str]:
    """A process of its own that fills the toy; see `main` for the arguments."""
    command = [sys.executable, "-m", "tests.unit.cache.toy", store.uri, *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=dict(os.environ), text=True, stdin=pipe, stdout=pipe, stderr=pipe)


def run_killed(store: Store, *arguments: str) -> int:
    """Run such a process until it has killed itself; returns its pid."""
    process = start_process(store, *arguments)
    _, told = process.communicate()
    assert process.returncode == -signal.SIGKILL, told
    return process.pid


def main() -> None:
    """Fill the toy cache of a store, or every n-th shard of it from i; die at a write; wait inside a shard."""
    parser = argparse.ArgumentParser()
    parser.add_argument("store")
    parser.add_argument("--codec", default="bf16")
    parser.add_argument("--die-after", type=int, default=-1)
    parser.add_argument("--at", default="^put ")
    parser.add_argument("--slice", default="0/1")
    parser.add_argument("--machine", help="Say that this is another machine")
    parser.add_argument("--lease", type=float, default=60.0)
    parser.add_argument(
        "--xor", type=int, default=0, help="Change all context by these bits, as another processor might"
    )
    parser.add_argument("--wait-in", type=int, help="Say so inside this shard, and wait for a line of stdin")
    options = parser.parse_args()
    plan = toy_plan(codec=options.codec)
    owner = Owner.this_process(processor="toy")
    if options.machine is not None:
        owner = dataclasses.replace(owner, machine=options.machine, host=options.machine)

    def make(sample: PlannedSample) -> SampleArrays:
        if sample.shard == options.wait_in and sample == plan.shards[sample.shard].batch(0)[0]:
            sys.stdout.write("inside\n")
            sys.stdout.flush()
            sys.stdin.readline()
        arrays = toy_arrays(sample, plan.spec)
        return dataclasses.replace(arrays, context=arrays.context ^ np.uint16(options.xor))

    store = DyingStore(open_store(options.store), die_after=options.die_after, at=options.at)
    part, count = map(int, options.slice.split("/"))
    toy_writer(store, plan, owner=owner, lease_s=options.lease).write_shards(plan.shards[part::count], each(make))


@contextmanager
def loops_of(kind: str) -> Iterator[None]:
    """The loops over bfloat16 bits are those of `kind`: library (skipped where none was built) or numpy."""
    if kind == "library":
        if planes.library() is None:
            pytest.skip("planes.c was not built: `pip install -e .` with a C compiler builds it")
        yield
    else:
        with mock.patch.object(planes, "library", return_value=None):
            yield


if __name__ == "__main__":
    main()
