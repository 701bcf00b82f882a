"""Planning 50,000 shards and their manifest: seconds, and memory beside what the process had before.

The baseline does the same in the plainest way: a dataclass a sample and an object, one JSON document at the end. Both
run in a process of their own and draw their samples while they plan, so that no list of samples is counted.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from rows import write_row

from draftsmith.cache.plan import OPEN_SHARDS, CacheSpec, SampleLength, array_layouts, plan_cache
from draftsmith.manifest import Manifest, ObjectRecord

COMMAND = "python benchmarks/bench_cache_plan.py"
NUM_SAMPLES = 800_000
SPEC = CacheSpec(5, 2560, "bf16", "labels", shard_tokens=16384, chunk_tokens=1024, batch_tokens=4096, seed=3)
LIMIT_S, LIMIT_MB = 10.0, 100.0


@dataclass(frozen=True)
class Placed:
    """A sample of the baseline."""

    id: str
    index: int
    shard: int
    num_tokens: int
    num_labels: int
    offset: int
    label_offset: int


def samples(count: int) -> Iterator[SampleLength]:
    """Ids as answers have them; lengths that fill a shard with sixteen samples."""
    draw = random.Random(0)
    for number in range(count):
        length = draw.randint(200, 1848)
        yield SampleLength(f"{number * 2654435761 % 2**64:016x}/t0", length, length * 4 // 5)


def objects(num_shards: int) -> Iterator[ObjectRecord]:
    """Shard by shard, as a writer's commit records name them."""
    for shard in range(num_shards):
        for number, layout in enumerate(array_layouts(SPEC)):
            digest = hashlib.sha256(f"{shard} {number}".encode()).hexdigest()
            yield ObjectRecord(layout.object_path(shard), 400_000_000 + shard, digest)


def columnar(path: Path) -> int:
    """The package: plan, manifest, and the manifest read back."""
    plan = plan_cache(samples(NUM_SAMPLES), spec=SPEC)
    Manifest("cache", "cache/x-12345678", objects(plan.num_shards), {"plan_digest": plan.digest}).write(path)
    Manifest.read(path, "cache")
    return plan.num_shards


def plainest(path: Path) -> int:
    """The same packing and the same manifest, in objects."""
    order = sorted(
        samples(NUM_SAMPLES), key=lambda item: (hashlib.sha256(f"{SPEC.seed}:{item.id}".encode()).digest(), item.id)
    )
    shards: list[list[SampleLength]] = []
    room: dict[int, int] = {}
    for item in order:
        number = next((shard for shard, free in room.items() if free >= item.num_tokens), None)
        if number is None:
            if len(room) == OPEN_SHARDS:
                del room[min(room, key=lambda shard: (room[shard], shard))]
            number = len(shards)
            shards.append([])
            room[number] = SPEC.shard_tokens
        shards[number].append(item)
        room[number] -= item.num_tokens
    placed: list[Placed] = []
    for shard, members in enumerate(shards):
        offset = label_offset = 0
        for item in members:
            placed.append(Placed(item.id, len(placed), shard, item.num_tokens, item.num_labels, offset, label_offset))
            offset, label_offset = offset + item.num_tokens, label_offset + item.num_labels
    digest = hashlib.sha256(json.dumps([[*vars(item).values()] for item in placed]).encode()).hexdigest()
    records = sorted(objects(len(shards)), key=lambda item: item.path)
    body = {"plan_digest": digest, "objects": [asdict(item) for item in records]}
    path.write_text(json.dumps(body, indent=1))
    back = [ObjectRecord(**item) for item in json.loads(path.read_text())["objects"]]
    assert back == records
    return len(shards)


def measure(kind: str) -> dict[str, float]:
    """Run one of the two in a process of its own."""
    command = [sys.executable, __file__, "--measure", kind]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def report(kind: str) -> None:
    """This is the process: seconds, and megabytes of the peak above what it had before."""
    run = {"columnar": columnar, "plainest": plainest}[kind]
    with tempfile.TemporaryDirectory() as folder:
        before = psutil.Process().memory_info().rss
        started = time.perf_counter()
        num_shards = run(Path(folder) / "manifest.json")
        seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # kilobytes on Linux
    body = {"seconds": seconds, "megabytes": (peak - before) / 1e6, "num_shards": num_shards}
    sys.stdout.write(json.dumps(body))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--measure", choices=["columnar", "plainest"])
    options = parser.parse_args()
    if options.measure:
        report(options.measure)
        return
    ours, baseline = measure("columnar"), measure("plainest")
    what = f"{NUM_SAMPLES:,} samples, {ours['num_shards']:,} shards: plan, manifest written and read back"
    for name, key, limit, unit in (
        ("cache_plan_seconds", "seconds", LIMIT_S, "s"),
        ("cache_plan_memory", "megabytes", LIMIT_MB, "MB more than before, at the peak"),
    ):
        write_row(name, ours=ours[key], baseline=baseline[key], unit=unit, bound="<= 1.0", command=COMMAND,
                  note=f"{what}; baseline: a dataclass each")  # fmt: skip
        write_row(f"{name}_limit", ours=ours[key], baseline=limit, unit=unit, bound="<= 1.0", command=COMMAND,
                  note=f"{what}; baseline: the most that is allowed")  # fmt: skip


if __name__ == "__main__":
    main()
