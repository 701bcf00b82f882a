"""Codecs and shards of the target cache on real hidden states: how much smaller, how fast to a local disk and back.

The states are those of the cache that `make run` makes; what is timed is the path of an object alone, from encoder to
file and from file to arrays (`bench_cache_write.py` and `bench_cache_read.py` time the whole writer and reader). Ours
and the baseline take turns; figures are medians. A virtual machine whose memory was never touched pays once for each
new page of its page cache: the raw write then varies tenfold, and the ratio with it.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import BoundedSemaphore
from unittest import mock

import numpy as np
from numpy.typing import NDArray
from rows import write_row

from draftsmith.cache.arrays import SampleArrays
from draftsmith.cache.layout import CacheSpec, array_layouts
from draftsmith.cache.reader import CacheReader
from draftsmith.cache.recycled import RecycledMemory
from draftsmith.cache.scales import fit_scales
from draftsmith.cache.shard import ShardCodec
from draftsmith.errors import DraftsmithError
from draftsmith.jobs.stores import cache_manifest, workspace_store
from draftsmith.manifest import sha256_hex
from draftsmith.paths import Workspace
from draftsmith.storage import LocalStore

ROOT = Path(__file__).resolve().parents[1]
COMMAND = "make run && python benchmarks/bench_cache_codec.py"
TARGET = "smollm2_135m"
RATIOS = {"bf16": 1.44, "int8": 2.15}
NUM_SHARDS, NUM_THREADS, ROUNDS = 6, 2, 7

Shard = dict[str, NDArray[np.uint16]]


def real_shards(reader: CacheReader) -> list[Shard]:
    """The hidden states of each shard but the last, array by array."""
    found = []
    for number in range(max(1, max(sample.shard for sample in reader.samples))):  # the last one is seldom full
        samples = [reader.read(sample.index) for sample in reader.samples if sample.shard == number]
        found.append({
            name: np.concatenate([getattr(sample, name) for sample in samples])
            for name in ("context", "last_hidden") if reader.spec.last_hidden != "none" or name == "context"
        })  # fmt: skip
    return found


def real_scales(reader: CacheReader) -> Mapping[str, NDArray[np.float32]]:
    """Channel RMS for codec int8, fitted as the cache job does."""
    planned = [sample for sample in reader.samples if sample.shard == 0]
    read = [reader.read(sample.index) for sample in planned]
    given = [SampleArrays(item.input_ids, item.supervised, item.context, item.last_hidden) for item in read]
    return fit_scales(zip(planned, given, strict=True), spec=reader.spec)


def coders(spec: CacheSpec, scales: Mapping[str, NDArray[np.float32]]) -> dict[str, ShardCodec]:
    return {
        layout.name: ShardCodec(layout, spec=spec, scales=scales.get(layout.name) if spec.codec == "int8" else None)
        for layout in array_layouts(spec)
        if layout.dtype == "uint16"
    }


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def bench_ratio(shards: list[Shard], spec: CacheSpec, scales: Mapping[str, NDArray[np.float32]]) -> None:
    """Logical bytes over stored ones, checksums and index included; whole chunks, so that no fill flatters."""
    for codec, bound in RATIOS.items():
        logical = stored = 0
        for name, coder in coders(replace(spec, codec=codec), scales).items():  # type: ignore[arg-type]
            for shard in shards:
                rows = shard[name][: len(shard[name]) // spec.chunk_tokens * spec.chunk_tokens]
                if data := coder.encode(rows):
                    logical, stored = logical + rows.nbytes, stored + len(data)
        write_row(
            f"cache_codec_ratio_{codec}", ours=logical / stored, baseline=1.0, unit="logical bytes a stored byte",
            bound=f">= {bound}", command=COMMAND, note=f"{logical / 1e6:.0f} MB of hidden states of {TARGET}",
        )  # fmt: skip


class Files:
    """Writes and reads the same shards raw and by the codec, below one folder."""

    def __init__(self, folder: Path, shards: list[Shard], codec: dict[str, ShardCodec]) -> None:
        self._folder, self._codec, self._count = folder, codec, 0
        self._shards = [shards[number % len(shards)] for number in range(NUM_SHARDS)]
        self.logical_bytes = sum(rows.nbytes for shard in self._shards for rows in shard.values())
        self._memory = {
            name: RecycledMemory(block_bytes=max(shard[name].nbytes for shard in shards), most_idle=NUM_THREADS)
            for name in codec
        }

    def new_folder(self) -> Path:
        """One that holds nothing; what was written before stays, as in a cache that grows."""
        self._count += 1
        folder = self._folder / str(self._count)
        folder.mkdir()
        os.sync()
        return folder

    def write_raw(self, folder: Path, *, flush: bool = False) -> None:
        for number, shard in enumerate(self._shards):
            for name, rows in shard.items():
                with open(folder / f"{name}-{number}", "wb") as stream:
                    stream.write(rows.data)
                    if flush:
                        stream.flush()
                        os.fsync(stream.fileno())

    def write_coded(self, folder: Path) -> None:
        """NUM_THREADS encode while as many write what was encoded before; few objects are in memory."""
        store, room = LocalStore(folder), BoundedSemaphore(2 * NUM_THREADS)

        def put(path: str, data: memoryview) -> None:
            store.put_if_absent(path, data)
            room.release()

        def encode(number: int, name: str) -> Future[None]:
            room.acquire()
            data = self._codec[name].encode(self._shards[number][name])
            assert data is not None
            return writers.submit(put, f"{name}/c.{number}", data)

        names = [(number, name) for number, shard in enumerate(self._shards) for name in shard]
        with ThreadPoolExecutor(NUM_THREADS) as writers, ThreadPoolExecutor(NUM_THREADS) as encoders:
            for started in [encoders.submit(encode, number, name) for number, name in names]:
                started.result().result()

    def read_raw(self, folder: Path) -> None:
        for number, shard in enumerate(self._shards):
            for name in shard:
                np.fromfile(folder / f"{name}-{number}", dtype=np.uint16)

    def digests(self, folder: Path) -> dict[str, str]:
        store = LocalStore(folder)
        return {item.path: sha256_hex(store.get(item.path)) for item in store.list("")}

    def read_coded(self, folder: Path, *, digests: Mapping[str, str] | None) -> None:
        """`digests`: sha256 by path, to be verified; crc32c always are."""
        store = LocalStore(folder)

        def read(number: int) -> None:
            for name, rows in self._shards[number].items():
                path = f"{name}/c.{number}"
                data = store.get(path)
                if digests is not None and sha256_hex(data) != digests[path]:
                    raise SystemExit(f"{path} is damaged")
                out = self._memory[name].empty(rows.shape, dtype=np.uint16)
                self._codec[name].decode(data, num_rows=len(rows), where=path, out=out)

        with ThreadPoolExecutor(NUM_THREADS) as pool:
            list(pool.map(read, range(NUM_SHARDS)))

    def check(self, folder: Path) -> None:
        """See that what was written is what was given."""
        for number, shard in enumerate(self._shards):
            for name, rows in shard.items():
                data = LocalStore(folder).get(f"{name}/c.{number}")
                back = self._codec[name].decode(data, num_rows=len(rows), where=name)
                assert np.array_equal(back, rows)


def bench_write(files: Files) -> None:
    rates: dict[str, list[float]] = {"baseline": [], "flushed": [], "ours": [], "unflushed": []}
    for _ in range(ROUNDS):
        folder = files.new_folder()
        rates["baseline"].append(timed(lambda folder=folder: files.write_raw(folder)))
        folder = files.new_folder()
        rates["ours"].append(timed(lambda folder=folder: files.write_coded(folder)))
        folder = files.new_folder()
        rates["flushed"].append(timed(lambda folder=folder: files.write_raw(folder, flush=True)))
        folder = files.new_folder()
        with mock.patch("os.fsync"):
            rates["unflushed"].append(timed(lambda folder=folder: files.write_coded(folder)))
    speed = {name: files.logical_bytes / statistics.median(seconds) / 1e6 for name, seconds in rates.items()}
    write_row(
        "cache_codec_write_local", ours=speed["ours"], baseline=speed["baseline"], unit="MB/s of logical bytes",
        bound=">= 0.5", command=COMMAND,
        note=f"codec bf16, crc32c, sha256 and fsync, {NUM_THREADS} threads encode and {NUM_THREADS} write, against "
        f"open().write without fsync; both without: {speed['unflushed']:.0f} MB/s, ratio "
        f"{speed['unflushed'] / speed['baseline']:.2f}; both with: raw {speed['flushed']:.0f} MB/s, ratio "
        f"{speed['ours'] / speed['flushed']:.2f}; new files each time, medians of {ROUNDS}",
    )  # fmt: skip


def bench_read(files: Files) -> None:
    raw, coded = files.new_folder(), files.new_folder()
    files.write_raw(raw)
    files.write_coded(coded)
    files.check(coded)
    digests = files.digests(coded)
    rates: dict[str, list[float]] = {"baseline": [], "verifying": [], "verified": []}
    for _ in range(ROUNDS):
        rates["baseline"].append(timed(lambda: files.read_raw(raw)))
        rates["verifying"].append(timed(lambda: files.read_coded(coded, digests=digests)))
        rates["verified"].append(timed(lambda: files.read_coded(coded, digests=None)))
    speed = {name: files.logical_bytes / statistics.median(seconds) / 1e6 for name, seconds in rates.items()}
    for kind, bound, what in (
        ("verifying", ">= 0.25", "crc32c and sha256"),
        ("verified", ">= 0.4", "crc32c"),
    ):
        write_row(
            f"cache_codec_read_{kind}", ours=speed[kind], baseline=speed["baseline"], unit="MB/s of logical bytes",
            bound=bound, command=COMMAND,
            note=f"codec bf16, {what}, {NUM_THREADS} threads, page cache, against np.fromfile of raw files; medians of "
            f"{ROUNDS}",
        )  # fmt: skip


def main() -> None:
    workspace = Workspace.find()
    try:
        reader = CacheReader(workspace_store(workspace), cache_manifest(workspace, TARGET))
    except DraftsmithError as error:
        sys.exit(f"no hidden states to measure with, run `make run` first: {error}")
    if reader.spec.codec == "int8":
        sys.exit(f"the cache of {TARGET} is rounded (codec int8): set bf16 or plain in params.yaml, then `make run`")
    shards, spec = real_shards(reader), replace(reader.spec, codec="bf16")
    bench_ratio(shards, spec, real_scales(reader))
    reader.close()
    with tempfile.TemporaryDirectory(dir=ROOT / "data") as scratch:
        files = Files(Path(scratch), shards, coders(spec, {}))
        bench_write(files)
        bench_read(files)


if __name__ == "__main__":
    main()
