"""Streaming: what was changed, broken or left by others is refused, told or swept."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftsmith.cache import stream_worker
from draftsmith.cache.claims import Claim, Owner
from draftsmith.cache.stream import HeldOut, kept_bytes
from draftsmith.cache.stream_keeper import StreamPlace, read_control, sweep_others
from draftsmith.cache.stream_plan import FIRST_PASS
from draftsmith.errors import CacheError, TrainingError
from draftsmith.storage import LocalStore
from tests.unit.cache.toy import Toy
from tests.unit.cache.toy_stream import (
    HELD_OUT,
    MEMBERS,
    NUM_SAMPLES,
    PLACE,
    STOP,
    ToyRun,
    run_worker,
    short_pauses,
    stored_bytes,
    stream_plan,
    stream_slots,
    wait_until,
    whole_cache,
)

__all__ = ["short_pauses"]


def test_a_changed_object_is_refused(tmp_path: Path) -> None:
    plan, store = stream_plan(), LocalStore(tmp_path)
    with ToyRun(store, plan=plan, room=10**9, first=0, stop=STOP, num_workers=1) as run:
        wait_until(lambda: len(run.toy.computed) > 8)
        slot = (int(run.slots.epoch[0]), int(run.slots.shard[0]))
        assert slot[0] == FIRST_PASS
        path = tmp_path / PLACE.epoch_prefix(FIRST_PASS) / f"context/c.{slot[1]}.0.0"
        wait_until(path.exists)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(bytes(data))
        with pytest.raises(CacheError, match=f"context/c.{slot[1]}.0.0 .*sha256"):
            run.first_pass()


def test_a_changed_validation_sample_is_refused_and_a_lost_one_made_again(tmp_path: Path) -> None:
    plan, store = stream_plan(), LocalStore(tmp_path)
    with ToyRun(store, plan=plan, room=10**9, first=0, stop=STOP, num_workers=1) as run:
        run.first_pass()
    held_out = HeldOut(store, PLACE, indices=HELD_OUT)
    assert held_out.load()
    assert not HeldOut(store, PLACE, indices=HELD_OUT[1:]).load(), "other samples are wanted"
    path = tmp_path / PLACE.prefix / f"held-out/{HELD_OUT[1]:08d}.npz"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(CacheError, match=path.name):
        held_out.read(HELD_OUT[1], sample_id="x")
    with pytest.raises(CacheError, match="not among the validation samples"):
        held_out.read(0, sample_id="x")
    path.unlink()
    assert not HeldOut(store, PLACE, indices=HELD_OUT).load()


def test_validation_samples_take_no_more_than_was_set_aside(tmp_path: Path) -> None:
    plan, store = stream_plan(), LocalStore(tmp_path / "s")
    reader, held_out = whole_cache(tmp_path / "whole"), HeldOut(store, PLACE, indices=list(range(NUM_SAMPLES)))
    for index in range(NUM_SAMPLES):
        held_out.add(index, reader.read(index, epoch=-1))
    held_out.close()
    taken = stored_bytes(tmp_path / "s")
    assert kept_bytes(plan, range(NUM_SAMPLES)) - 1800 * NUM_SAMPLES < taken <= kept_bytes(plan, range(NUM_SAMPLES))


def test_worker_and_trainer_must_have_one_sequence(tmp_path: Path) -> None:
    plan, store = stream_plan(), LocalStore(tmp_path)
    with ToyRun(store, plan=plan, room=10**9, first=0, stop=STOP, num_workers=0, start_id="a") as run:
        other = stream_slots(plan, first=0, stop=STOP - 1, first_pass=True)
        with pytest.raises(CacheError, match="another order of shards"):
            run_worker(store, plan, other, part=(0, 1), start_id="a", toy=Toy(plan))
        control = stream_worker.read_own_control(store, PLACE, slots=run.slots, run="a")
        assert control is not None
        assert control.granted == run.first_granted > 0
        assert stream_worker.read_own_control(store, PLACE, slots=run.slots, run="an earlier start") is None


def test_whoever_waits_is_told_why_it_ends(tmp_path: Path) -> None:
    plan, store = stream_plan(), LocalStore(tmp_path)
    with ToyRun(store, plan=plan, room=10**9, first=0, stop=STOP, num_workers=0) as run:
        with pytest.raises(CacheError, match="not one that this run reads in epoch 5"):
            run.reader.read(0, epoch=5)
        run.errors.append(CacheError("out of luck"))
        with pytest.raises(TrainingError, match="out of luck"):
            run.reader.read(MEMBERS[0], epoch=0)
        run.keeper.fail("a worker of the stream ended")
        with pytest.raises(CacheError, match="got a worker of the stream ended"):
            run_worker(store, plan, run.slots, part=(0, 1), start_id="a", toy=Toy(plan))


@pytest.mark.parametrize("data", [b"", b"[]", b'{"run": "a"', b"\xff"])
def test_a_broken_control_record_is_told(tmp_path: Path, data: bytes) -> None:
    store = LocalStore(tmp_path)
    store.put(PLACE.control, data)
    with pytest.raises(CacheError, match=f"broken record {PLACE.control} in {tmp_path}.*run the training again"):
        read_control(store, PLACE)


def test_a_broken_commit_record_of_a_killed_run_is_none(tmp_path: Path) -> None:
    plan, store = stream_plan(), LocalStore(tmp_path)
    with ToyRun(store, plan=plan, room=10**9, first=0, stop=STOP, num_workers=1) as run:
        run.first_pass()
        wait_until(lambda: run.refreshed().num_waiting == 0)
    path = next(item.path for item in store.list(PLACE.records) if "/e0/commits/" in item.path)
    store.put(path, b"{")
    with ToyRun(store, plan=plan, room=10**9, first=0, stop=STOP, num_workers=0, start_id="b") as run:
        assert run.keeper.num_waiting == 1, "its shard is made again"
        assert store.head(path) is None


def test_what_killed_runs_of_other_plans_left_is_swept(tmp_path: Path) -> None:
    """Of the same key only, and only if no live process holds the prefix."""
    store, owner = LocalStore(tmp_path), Owner.this_process(processor="toy")
    prefixes = [f"stream/{name}" for name in ("dspark-toy-99999999", "dspark-toy-77777777", "dspark-toy-b-88888888")]
    for prefix in (PLACE.prefix, *prefixes):
        store.put(f"{prefix}/e0/context/c.0.0.0", b"rows")
        store.put(f"records/{prefix}/e0/commits/000000.json", b"{}")
    with Claim.hold(store, StreamPlace(prefixes[1]).claim, owner=owner, lease_s=60.0):
        assert sweep_others(store, PLACE, owner=owner, lease_s=60.0) == (prefixes[0],)
        left = {item.path for item in store.list("")} - {StreamPlace(prefixes[1]).claim}
    assert left == {
        path
        for prefix in (PLACE.prefix, prefixes[1], prefixes[2])
        for path in (f"{prefix}/e0/context/c.0.0.0", f"records/{prefix}/e0/commits/000000.json")
    }
