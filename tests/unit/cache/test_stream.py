"""Streaming: the samples of a cache that is never there as a whole, in bounded room, whatever is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from draftsmith.cache.claims import Claim, Owner
from draftsmith.cache.commits import commit_path
from draftsmith.cache.layout import Codec, array_layouts
from draftsmith.cache.plan import CachePlan
from draftsmith.cache.reader import CachedSample
from draftsmith.cache.stream import StreamReader, kept_bytes
from draftsmith.cache.stream_plan import most_bytes, needed_bytes
from draftsmith.storage import LocalStore, open_store
from tests.s3 import S3Bucket, s3_env, s3_server
from tests.unit.cache.toy import FACTS, ROOT
from tests.unit.cache.toy_stream import (
    HELD_OUT,
    MEMBERS,
    PLACE,
    SEED,
    SIZE,
    STOP,
    ToyRun,
    Watcher,
    assert_same,
    read_all,
    room_needed,
    short_pauses,
    stored_bytes,
    stream_plan,
    stream_slots,
    wait_until,
    walk,
    whole_cache,
)

__all__ = ["s3_env", "s3_server", "short_pauses"]


def plain_bytes(plan: CachePlan, shard: int) -> int:
    """What codec plain makes of a shard, to the byte."""
    return sum(plan.object_bytes(layout, plan.shards[shard]) for layout in array_layouts(plan.spec))


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_a_stream_in_the_least_room_gives_what_the_whole_cache_gives(num_workers: int, tmp_path: Path) -> None:
    """With room for what is needed at once and not a byte more, every sample comes, and the bound always holds."""
    plan, reader = stream_plan(), whole_cache(tmp_path / "whole")
    room = room_needed(plan, stream_slots(plan, first=0, stop=STOP, first_pass=True))
    store = LocalStore(tmp_path / "stream")
    with (
        Watcher(tmp_path / "stream") as watcher,
        ToyRun(store, plan=plan, room=room, first=0, stop=STOP, num_workers=num_workers) as run,
    ):
        started = run.first_pass()
        streamed: list[CachedSample] = []
        for step in run.steps():
            streamed += step
            # Now and then the trainer is slow, and the workers go as far as they may.
            if len(streamed) % 30 == 0:
                wait_until(lambda: run.refreshed().num_waiting == 0)
        kept = [run.reader.read(index, epoch=-1) for index in HELD_OUT]
        order = run.reader.order(SEED, epoch=1)
    assert not run.errors
    assert_same(started, [reader.read(i, epoch=-1) for i in sorted(HELD_OUT + MEMBERS[::4])])
    assert_same(streamed, walk(reader, 0, STOP))
    assert_same(kept, [reader.read(index, epoch=-1) for index in HELD_OUT])
    assert list(order) == list(reader.order(SEED, epoch=1))
    whole = sum(path.stat().st_size for path in (tmp_path / "whole" / "cache").rglob("*") if path.is_file())
    limit = room + kept_bytes(plan, HELD_OUT)
    assert watcher.num_looks > 100
    assert room / 2 < watcher.most <= limit < whole, "else the bound says nothing"
    # Each slot once: in the first pass the shards of its samples, in each epoch those of its members.
    assert len(run.toy.computed) == sum(len(plan.shards[int(shard)].samples) for shard in run.slots.shard)
    assert run.keeper.num_tokens == sum(plan.shards[int(shard)].num_tokens for shard in run.slots.shard)
    at_once = needed_bytes(run.slots, sizes=lambda shard: plain_bytes(plan, shard), ahead=0)
    assert at_once <= run.keeper.high_water_bytes <= watcher.most

    # What is passed is gone but for the samples to validate on, and at the end those go as well.
    assert {path.parent.name for path in (tmp_path / "stream" / PLACE.prefix).rglob("*") if path.is_file()} == {
        "held-out"
    }
    run.keeper.clear()
    assert [item.path for item in store.list("")] == []


@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_every_codec_streams(codec: Codec, tmp_path: Path) -> None:
    plan, reader = stream_plan(codec), whole_cache(tmp_path / "whole", codec)
    room = 2 * room_needed(plan, stream_slots(plan, first=0, stop=20, first_pass=True))
    with ToyRun(LocalStore(tmp_path / "s"), plan=plan, room=room, first=0, stop=20, num_workers=2) as run:
        run.first_pass()
        assert_same(read_all(run), walk(reader, 0, 20))
    assert not run.errors


def test_shards_that_turn_out_small_make_room_for_more(tmp_path: Path) -> None:
    """At first a shard counts with the most that it can take, and once it is there with what it takes."""
    plan, store = stream_plan("bf16"), LocalStore(tmp_path)
    room = room_needed(plan, stream_slots(plan, first=0, stop=STOP, first_pass=True))
    with ToyRun(store, plan=plan, room=room, first=0, stop=STOP, num_workers=1) as run:
        first = run.first_granted
        worst = sum(most_bytes(plan, int(shard)) for shard in run.slots.shard[:first])
        assert worst <= room < worst + most_bytes(plan, int(run.slots.shard[first]))
        wait_until(lambda: run.refreshed().granted > first)
        wait_until(
            lambda: len(run.toy.computed) >= sum(len(plan.shards[int(s)].samples) for s in run.slots.shard[: first + 1])
        )
    assert stored_bytes(tmp_path) <= room


def test_a_run_that_goes_on_uses_what_lies_ahead_and_deletes_the_rest(tmp_path: Path) -> None:
    plan, reader, store = stream_plan(), whole_cache(tmp_path / "whole"), LocalStore(tmp_path / "s")
    room = room_needed(plan, stream_slots(plan, first=0, stop=STOP, first_pass=True))
    with ToyRun(store, plan=plan, room=2 * room, first=0, stop=STOP, num_workers=2) as run:
        run.first_pass()
        steps = run.steps()
        done = [next(steps) for _ in range(9)]
        wait_until(lambda: run.refreshed().granted > 0 and not run.keeper.num_waiting)
    assert_same([sample for step in done for sample in step], walk(reader, 0, 9 * SIZE))
    store.put(f"{PLACE.epoch_prefix(0)}/context/c.9.0.0", b"half an object of a killed worker")
    before = {item.path for item in store.list(PLACE.prefix)}

    # From a checkpoint after update 6, in half the room: some of what was made ahead no longer fits.
    with (
        Watcher(tmp_path / "s") as watcher,
        ToyRun(store, plan=plan, room=room, first=6 * SIZE, stop=STOP, num_workers=1, start_id="b") as run,
    ):
        assert run.was_kept
        assert run.first_pass() == []
        left = {item.path for item in store.list(PLACE.prefix)}
        assert_same(read_all(run), walk(reader, 6 * SIZE, STOP))
    assert not run.errors
    assert f"{PLACE.epoch_prefix(0)}/context/c.9.0.0" in before - left
    assert len(before - left) > 1, "some shards that lie far ahead no longer fit"
    all_samples = sum(len(plan.shards[int(shard)].samples) for shard in run.slots.shard)
    assert len(run.toy.computed) < all_samples, "some shards were there already"
    assert watcher.most <= 2 * room + kept_bytes(plan, HELD_OUT)


def test_a_shard_that_was_there_is_not_made_again_after_training_went_past_it(tmp_path: Path) -> None:
    """A worker that is slow to start finds the first shards of an earlier run deleted: they are not its work."""
    plan, store = stream_plan(), LocalStore(tmp_path)
    room = room_needed(plan, stream_slots(plan, first=0, stop=STOP, first_pass=True))
    with ToyRun(store, plan=plan, room=room, first=0, stop=STOP, num_workers=1) as run:
        run.first_pass()
        wait_until(lambda: run.refreshed().granted > 0 and not run.keeper.num_waiting)
    with ToyRun(store, plan=plan, room=room, first=0, stop=STOP, num_workers=0, start_id="b") as run:
        first = int(run.slots.shard[0])
        commit = commit_path(PLACE.epoch_prefix(int(run.slots.epoch[0])), first)
        assert store.head(commit) is not None
        run.keeper.passed(int(run.slots.last_use[0]) + 1)
        assert store.head(commit) is None
        worker = threading.Thread(target=run._work, args=((0, 1), "b"))
        worker.start()
        run.threads.append(worker)
        wait_until(lambda: run.refreshed().granted > run.first_granted and not run.keeper.num_waiting)
        assert store.head(commit) is None
        objects = {layout.object_path(first) for layout in array_layouts(plan.spec)}
        prefix = PLACE.epoch_prefix(int(run.slots.epoch[0]))
        assert not objects & {item.path.removeprefix(f"{prefix}/") for item in store.list(prefix)}
    assert not run.errors


def test_a_stream_is_made_again_after_its_worker_was_killed(tmp_path: Path) -> None:
    """A worker process that dies right after each of its writes in turn; what it leaves never shows in the samples."""
    plan, reader, store = stream_plan(), whole_cache(tmp_path / "whole"), LocalStore(tmp_path / "s")
    stop = 12
    room = room_needed(plan, stream_slots(plan, first=0, stop=stop, first_pass=True))
    for die_after in (1, 2, 4, 5, 6, 7, 13):
        with ToyRun(store, plan=plan, room=room, first=0, stop=stop, num_workers=0, start_id=str(die_after)) as run:
            options = [store.uri, "0/1", str(die_after), "0", str(stop), "yes"]
            command = [sys.executable, "-m", "tests.unit.cache.toy_stream", *options]
            environment = {**os.environ, "DIE_AFTER": str(die_after)}
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
            assert done.returncode == -signal.SIGKILL, done.stderr
    with ToyRun(store, plan=plan, room=room, first=0, stop=stop, num_workers=1, start_id="last") as run:
        run.first_pass()
        assert_same(read_all(run), walk(reader, 0, stop))
    assert not run.errors


def test_a_rank_that_has_no_sample_of_a_shard_goes_past_it(tmp_path: Path) -> None:
    """Another rank reads one sample in four, so of some shards none; and some of its sequence is never made at all."""
    plan, reader, store = stream_plan(), whole_cache(tmp_path / "whole"), LocalStore(tmp_path / "s")
    room = room_needed(plan, stream_slots(plan, first=0, stop=STOP, first_pass=True))
    found: list[CachedSample] = []
    with (
        ThreadPoolExecutor(1) as rank,
        ToyRun(store, plan=plan, room=room, first=0, stop=STOP, num_workers=1) as run,
    ):
        run.first_pass()
        slots = stream_slots(plan, first=0, stop=STOP, first_pass=False)
        never = {"epoch": [99] * 12, "shard": range(12), "first_use": [-1] * 12, "last_use": [-1] * 12}
        places = np.repeat([3, 7, 11, 15], 3)
        slots = replace(
            slots, **{name: np.insert(getattr(slots, name), places, list(values)) for name, values in never.items()}
        )
        other = StreamReader(
            store, PLACE, plan=plan, facts=FACTS, slots=slots, held_out=run.held_out, watch=lambda: None
        )

        def read_fourth(ticks: range) -> None:
            places = [run.place_of(tick) for tick in ticks if tick % 4 == 0]
            reading = rank.submit(lambda: [other.read(index, epoch=epoch) for index, epoch in places])
            found.extend(reading.result(timeout=20))

        try:
            for _ in run.steps(on_read=read_fourth):
                pass
        finally:
            other.close()
    assert not run.errors
    assert_same(found, walk(reader, 0, STOP)[::4])
    used = {run.slot_of(tick) for tick in range(0, STOP, 4)}
    assert len(set(zip(slots.epoch.tolist(), slots.shard.tolist(), strict=True)) - used) > 6


def test_scales_of_int8_stay_as_long_as_shards_that_were_made_with_them(tmp_path: Path) -> None:
    plan, store = stream_plan("int8"), LocalStore(tmp_path)
    with ToyRun(store, plan=plan, room=10**9, first=0, stop=STOP, num_workers=1) as run:
        run.first_pass()
        wait_until(lambda: run.refreshed().num_waiting == 0)
    scales = store.get(PLACE.scales)
    with ToyRun(store, plan=plan, room=10**9, first=0, stop=STOP, num_workers=0, start_id="b") as run:
        assert run.keeper.num_waiting == 0, "all that was made can be used"
        assert store.get(PLACE.scales) == scales
        run.keeper.clear()
        assert stored_bytes(tmp_path) == 0


def test_nothing_is_left_in_a_versioned_bucket(s3_env: S3Bucket) -> None:
    """No object, no older version, no delete marker: a bucket that keeps versions would keep the whole cache else."""
    client = s3_env.server.client()
    client.put_bucket_versioning(Bucket=s3_env.bucket, VersioningConfiguration={"Status": "Enabled"})
    plan, store = stream_plan("bf16"), open_store(s3_env.uri)
    room = room_needed(plan, stream_slots(plan, first=0, stop=20, first_pass=True))

    def versions() -> list[str]:
        found = client.list_object_versions(Bucket=s3_env.bucket)
        assert not found["IsTruncated"]
        return [item["Key"] for kind in ("Versions", "DeleteMarkers") for item in found.get(kind, [])]

    with ToyRun(store, plan=plan, room=room, first=0, stop=20, num_workers=2) as run:
        run.first_pass()
        during = versions()
        read_all(run)
        shards = [key for key in versions() if "/held-out" not in key and "/control.json" not in key]
    assert len(during) > 10
    assert shards == []
    assert not run.errors
    run.keeper.clear()
    assert versions() == []
    # The claim on the whole, which is renewed all the time.
    owner = Owner.this_process(processor="toy")
    with Claim.hold(store, PLACE.claim, owner=owner, lease_s=0.3):
        time.sleep(0.8)
        assert len(versions()) <= 2, "the one before may be about to go"
    assert versions() == []
