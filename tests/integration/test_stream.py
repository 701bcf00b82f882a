"""Streaming mode on the tiny line: a drafter trained from a cache that never lies in the store as a whole.

The store may hold little more than half of it. Everything is compared with a training from the whole cache, the
drafter to the bit.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_ISREG
from typing import Any

import psutil
import pytest

from draftsmith.errors import CacheError, MachineError
from draftsmith.jobs.cache import planned_cache, stream_manifest
from draftsmith.jobs.train_stream import StreamFeed, planned_stream
from draftsmith.params import load_params
from draftsmith.storage import open_store
from tests.integration.test_two_ranks import TOLERANCE, curve
from tests.line_fixtures import DSPARK, TARGET, Line, kill_when, line, prepared_line, tiny_target

__all__ = ["line", "prepared_line", "tiny_target"]

TRAIN = ("train", "--key", DSPARK)
BUILD = ("cache", "build", "--target", TARGET)
CACHE = {"shard_tokens": 256, "chunk_tokens": 64, "batch_tokens": 256, "max_length": 256}
STEPS = {"steps": 28, "global_batch": 2, "checkpoint_every": 8}
LIMIT = 750_000


def make_small(line: Line) -> Line:
    """Small shards, so that the tiny cache has many, and nearly three epochs of training on them."""

    def change(body: dict[str, Any]) -> None:
        body["cache"].update(CACHE)
        body["train"].update(STEPS)
        body["targets"][TARGET]["codec"] = "plain"

    line.edit_params(change)
    return line


@pytest.fixture(scope="module")
def whole_line(prepared_line: Line, tmp_path_factory: pytest.TempPathFactory) -> Line:
    """Trained from the whole cache. Tests do not change it."""
    line = make_small(prepared_line.copied(tmp_path_factory.mktemp("whole") / "line"))
    line.run(*BUILD)
    line.run(*TRAIN)
    return line


@pytest.fixture
def stream_line(prepared_line: Line, tmp_path: Path) -> Line:
    """The same params; the cache is planned only."""
    line = make_small(prepared_line.copied(tmp_path / "line"))
    line = line.with_settings(DRAFTSMITH_CACHE_MAX_BYTES=str(LIMIT))
    line.run(*BUILD)
    return line


@contextmanager
def watched(line: Line) -> Iterator[list[int]]:
    """Sums of the files under the stream's prefix and its records, seen from a thread every few milliseconds.

    A walk takes time, in which one file goes and another comes. Those that two walks after each other both met were
    there together between the two, so only they are summed.
    """
    found: list[int] = []
    stop = threading.Event()

    def walk() -> dict[int, int]:
        sizes = {}
        for folder in (line.store / "stream", line.store / "records" / "stream"):
            for path in folder.rglob("*"):
                with suppress(FileNotFoundError):
                    state = path.stat()
                    if S_ISREG(state.st_mode):
                        sizes[state.st_ino] = state.st_size
        return sizes

    def look() -> None:
        before = walk()
        while not stop.is_set():
            now = walk()
            found.append(sum(min(size, now.get(inode, 0)) for inode, size in before.items()))
            before = now
            time.sleep(0.005)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()


def workers(line: Line) -> list[psutil.Process]:
    """The stream's workers of a working copy."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(line.root) and "draftsmith.jobs.stream" in process.cmdline():
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def files_of(line: Line, folder: str) -> list[str]:
    return [str(path) for path in (line.store / folder).rglob("*") if path.is_file()]


def assert_same_drafter(line: Line, whole: Line) -> None:
    for path in ("data/drafters/{}/model.safetensors", "reports/{}/train_curve.csv"):
        place = path.format(DSPARK)
        assert (line.root / place).read_bytes() == (whole.root / place).read_bytes(), place
    ours, theirs = (item.report(DSPARK, "train") for item in (line, whole))
    for name in ("loss", "expected_accepted_length", "acceptance", "validations", "num_validation_blocks"):
        assert ours[name] == theirs[name], name
    folder = f"data/drafters/{DSPARK}/contract.json"
    contracts = [json.loads((item.root / folder).read_text()) for item in (line, whole)]
    digests = [contract.pop("cache_digest") for contract in contracts]
    assert contracts[0] == contracts[1]
    assert digests[0] != digests[1], "a drafter says what it was trained from"


def test_a_planned_cache_trains_the_drafter_of_the_whole_one(stream_line: Line, whole_line: Line) -> None:
    manifest, whole = stream_line.manifest("cache"), whole_line.manifest("cache")
    assert manifest.is_stream
    assert list(manifest.objects) == []
    assert manifest.facts["totals"]["plan_digest"] == whole.facts["totals"]["plan_digest"]
    first = stream_line.workspace.cache_manifest(TARGET).read_bytes()
    stream_line.run(*BUILD)
    assert stream_line.workspace.cache_manifest(TARGET).read_bytes() == first
    stream_line.run("cache", "verify", "--target", TARGET)
    stream_line.run("store", "check")
    assert files_of(stream_line, manifest.prefix) == [], "nothing was computed so far"

    with watched(stream_line) as found:
        stream_line.run(*TRAIN)
    assert_same_drafter(stream_line, whole_line)
    assert len(found) > 100
    assert LIMIT / 2 < max(found) <= LIMIT < whole.num_bytes
    assert files_of(stream_line, "stream") == files_of(stream_line, "records/stream") == []
    assert workers(stream_line) == []
    figures = stream_line.report(DSPARK, "train")["stream"]
    assert LIMIT / 2 < figures["high_water_bytes"] <= LIMIT
    # The first pass makes all shards, each epoch those that hold a sample to train on.
    assert 2 < figures["num_tokens"] / whole.facts["totals"]["num_tokens"] < 4


def test_training_and_its_workers_killed_on_the_way(stream_line: Line, whole_line: Line) -> None:
    """A worker in the first pass, then the trainer after a checkpoint; two workers, which end with their trainer."""
    line = stream_line.with_settings(DRAFTSMITH_STREAM_WORKERS="2")
    with watched(line) as found:
        process = line.start(*TRAIN)
        wait_until(process, lambda: any("/held-out/" in path for path in files_of(line, "stream")))
        workers(line)[0].kill()
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 2, errors
        assert "a worker of the stream ended with status -9" in errors
        assert not (line.store / "train").exists()
        wait_for_the_end(line)

        process = line.start(*TRAIN)
        kill_when(process, lambda: bool(list((line.store / "train").glob("*/step-000016/_complete.json"))))
        wait_for_the_end(line)
        assert files_of(line, "stream")
        assert not line.workspace.drafter_dir(DSPARK).exists()

        line.run(*TRAIN)
    assert max(found) <= LIMIT
    assert_same_drafter(line, whole_line)
    assert files_of(line, "stream") == files_of(line, "records/stream") == []


def wait_until(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    """Wait for something that happens while a command runs."""
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def wait_for_the_end(line: Line) -> None:
    deadline = time.monotonic() + 10
    while left := workers(line):
        assert time.monotonic() < deadline, [process.cmdline() for process in left]
        time.sleep(0.02)


def test_two_ranks_stream_as_one_reads(stream_line: Line, whole_line: Line) -> None:
    with watched(stream_line) as found:
        stream_line.with_settings(DRAFTSMITH_LAUNCH="local:2").run(*TRAIN)
    assert max(found) <= LIMIT
    for row, expected in zip(curve(stream_line), curve(whole_line), strict=True):
        for name in ("loss", "ce", "tv", "bce", "acceptance_1"):
            assert row[name] == pytest.approx(expected[name], rel=TOLERANCE), (row["step"], name)
    assert files_of(stream_line, "stream") == files_of(stream_line, "records/stream") == []


def test_what_does_not_fit_together_is_told(prepared_line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """No limit, too small a one, and answers or params that are no longer those of the plan."""
    workspace, params = prepared_line.workspace, load_params(prepared_line.workspace.params)
    planned, recipe = planned_cache(workspace, params, TARGET), params.train_of(DSPARK)
    store = open_store(str(prepared_line.store))

    def open_feed() -> None:
        StreamFeed(
            workspace, store, DSPARK, planned=planned, digest="d", recipe=recipe, first_step=0, wants_head_start=True,
            rank=0, start_id="s",
        ).close()  # fmt: skip

    monkeypatch.delenv("DRAFTSMITH_CACHE_MAX_BYTES", raising=False)
    with pytest.raises(MachineError, match="set DRAFTSMITH_CACHE_MAX_BYTES, or build the whole cache without it"):
        open_feed()
    monkeypatch.setenv("DRAFTSMITH_CACHE_MAX_BYTES", "64KB")
    with pytest.raises(CacheError, match="got 64000 bytes, expected at least") as caught:
        open_feed()
    needed = int(str(caught.value.expected).split()[2].rstrip(":"))
    monkeypatch.setenv("DRAFTSMITH_CACHE_MAX_BYTES", str(needed - 1))
    with pytest.raises(CacheError, match=f"got {needed - 1} bytes, expected at least {needed}"):
        open_feed()
    monkeypatch.setenv("DRAFTSMITH_CACHE_MAX_BYTES", str(needed))
    monkeypatch.setenv("DRAFTSMITH_STREAM_WORKERS", "none")
    with pytest.raises(MachineError, match="DRAFTSMITH_STREAM_WORKERS"):
        open_feed()
    assert files_of(prepared_line, "stream") == files_of(prepared_line, "records/stream") == []

    manifest = stream_manifest(planned)
    assert planned_stream(workspace, params, manifest, TARGET).plan == planned.plan
    changed = params.model_copy(update={"cache": params.cache.model_copy(update={"seed": 4})})
    with pytest.raises(CacheError, match=f"dvc repro cache@{TARGET}"):
        planned_stream(workspace, changed, manifest, TARGET)
