"""One shard behind: a shard is written while the next is computed; what its errors do; how much is in memory."""

from __future__ import annotations

import dataclasses
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from draftsmith.cache import writer as writer_module
from draftsmith.cache.arrays import SampleArrays, ShardRows
from draftsmith.cache.claims import Claim
from draftsmith.cache.commits import read_commit
from draftsmith.cache.pipeline import MOST_BEHIND, MOST_COMPUTED
from draftsmith.cache.plan import CachePlan, PlannedSample, ShardPlan
from draftsmith.cache.shard import ShardCodec
from draftsmith.errors import CacheError, StoreError
from draftsmith.manifest import Manifest
from draftsmith.storage import LocalStore, ObjectInfo
from tests.unit.cache.toy import PREFIX, DyingStore, Toy, each, fill, shard_of, toy_arrays, toy_plan, toy_writer

TIMEOUT_S = 30


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


@pytest.fixture
def expected(tmp_path: Path) -> Manifest:
    return fill(LocalStore(tmp_path / "expected"), toy_plan(), Toy(toy_plan()))


class WatchedStore(DyingStore):
    """A store that tells a function of every object of a shard before it is written."""

    def __init__(self, store: LocalStore, before: Callable[[int], None]) -> None:
        super().__init__(store, die_after=-1)
        self._before = before

    def put_if_absent(self, path: str, data: bytes) -> ObjectInfo:
        shard = shard_of(path)
        if shard is not None:
            self._before(shard)
        return super().put_if_absent(path, data)


def commit_is_there(store: LocalStore, shard: int) -> bool:
    return read_commit(store, PREFIX, shard) is not None


def claim_is_there(store: LocalStore, shard: int) -> bool:
    return store.head(f"records/{PREFIX}/claims/{shard:06d}.json") is not None


def is_last(sample: PlannedSample, plan: CachePlan) -> bool:
    """True for the sample that is computed last of its shard."""
    shard = plan.shards[sample.shard]
    return sample == shard.batch(len(shard.batches) - 1)[-1]


def test_a_shard_is_written_while_the_next_is_computed(store: LocalStore, expected: Manifest) -> None:
    """Nothing of shard 0 is written before all of shard 1 is computed, and both claims are held meanwhile."""
    plan, computed, held = toy_plan(), threading.Event(), []

    def before(shard: int) -> None:
        if shard == 0:
            assert computed.wait(TIMEOUT_S)

    def make(sample: PlannedSample) -> SampleArrays:
        if sample.shard == 1:
            held.append((claim_is_there(store, 0), claim_is_there(store, 1), commit_is_there(store, 0)))
            if is_last(sample, plan):
                computed.set()
        return toy_arrays(sample, plan.spec)

    writer = toy_writer(WatchedStore(store, before), plan)
    report = writer.write_shards(plan.shards, each(make))
    assert set(held) == {(True, True, False)}
    assert report.num_written == len(plan.shards) > 2
    assert report.num_tokens == sum(sample.num_tokens for sample in plan.samples)
    assert writer.finish().digest == expected.digest


def test_the_numbers_of_two_shards_are_in_memory_at_most(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the encoding: a third shard is begun when the arrays of the first are gone."""
    plan = toy_plan()
    alive: list[tuple[int, weakref.ref[np.ndarray]]] = []
    most, encode = 0, ShardCodec.encode

    class CountedRows(ShardRows):
        def __init__(self, shard: ShardPlan, **options) -> None:  # type: ignore[no-untyped-def]
            super().__init__(shard, **options)
            alive.extend((shard.index, weakref.ref(rows)) for rows in self._rows.values())

    def slowly(codec: ShardCodec, rows: np.ndarray) -> memoryview | None:
        time.sleep(0.05)
        return encode(codec, rows)

    monkeypatch.setattr(writer_module, "ShardRows", CountedRows)
    monkeypatch.setattr(ShardCodec, "encode", slowly)

    def make(sample: PlannedSample) -> SampleArrays:
        nonlocal most
        gc.collect()
        most = max(most, len({shard for shard, rows in alive if rows() is not None}))
        return toy_arrays(sample, plan.spec)

    toy_writer(store, plan).write_shards(plan.shards, each(make))
    assert most == MOST_COMPUTED == 2


def test_few_shards_are_on_their_way_however_slow_the_store(store: LocalStore) -> None:
    plan, early, ahead = toy_plan(), [], []
    assert plan.num_shards > MOST_BEHIND

    def make(sample: PlannedSample) -> SampleArrays:
        if sample.shard >= MOST_BEHIND and not commit_is_there(store, sample.shard - MOST_BEHIND):
            early.append(sample.shard)
        if sample.shard == MOST_BEHIND - 1 and not commit_is_there(store, 0):
            ahead.append(sample.shard)
        return toy_arrays(sample, plan.spec)

    toy_writer(WatchedStore(store, lambda shard: time.sleep(0.2)), plan).write_shards(plan.shards, each(make))
    assert early == []
    assert ahead, "several are written at once"


def failing(store: LocalStore, *, after: threading.Event | None = None) -> WatchedStore:
    """A store that refuses the objects of shard 0, when the event is there."""

    def before(shard: int) -> None:
        if shard == 0:
            assert after is None or after.wait(TIMEOUT_S)
            raise StoreError("the disk is full", where="free room")

    return WatchedStore(store, before)


def test_an_error_of_the_store_is_raised_at_once(store: LocalStore) -> None:
    """In the midst of the next shard, with the number of its own; neither is committed, and no claim stays."""
    plan, computed, begun = toy_plan(), [], threading.Event()

    def make(sample: PlannedSample) -> SampleArrays:
        computed.append(sample)
        if sample.shard == 1:
            begun.set()
        deadline = time.monotonic() + TIMEOUT_S
        while sample.shard == 1 and claim_is_there(store, 0) and time.monotonic() < deadline:
            time.sleep(0.01)
        # The claim is given up just before the error can be seen.
        time.sleep(0.2 if sample.shard == 1 else 0)
        return toy_arrays(sample, plan.spec)

    with pytest.raises(StoreError, match=r"^shard 0: the disk is full \(free room\)$"):
        toy_writer(failing(store, after=begun), plan).write_shards(plan.shards, each(make))
    assert len(plan.shards[1].batches) > 1
    assert [sample for sample in computed if sample.shard == 1] == list(plan.shards[1].batch(0))
    assert [shard.index for shard in plan.shards if commit_is_there(store, shard.index)] == []
    assert list(store.list(f"records/{PREFIX}")) == []


def test_an_error_is_seen_while_there_is_nothing_to_compute(store: LocalStore) -> None:
    """Shards that come one by one, with None in between."""
    plan = toy_plan()

    def shards() -> Iterator[ShardPlan | None]:
        yield plan.shards[0]
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            time.sleep(0.01)
            yield None
        yield plan.shards[1]

    toy = Toy(plan)
    with pytest.raises(StoreError, match="shard 0: the disk is full"):
        toy_writer(failing(store), plan).write_shards(shards(), toy)
    assert sorted(toy.computed) == sorted(sample.id for sample in plan.shards[0].samples)


def test_an_error_of_the_last_shard_is_raised(store: LocalStore) -> None:
    plan = toy_plan()
    with pytest.raises(StoreError, match="shard 0: the disk is full"):
        toy_writer(failing(store), plan).write_shards(plan.shards[:1], Toy(plan))


def test_broken_states_do_not_harm_the_shard_before(store: LocalStore) -> None:
    """The slice stops with the sample's name; what was computed before it is committed."""
    plan, victim = toy_plan(), toy_plan().shards[1].samples[2]

    def make(sample: PlannedSample) -> SampleArrays:
        arrays = toy_arrays(sample, plan.spec)
        return dataclasses.replace(arrays, context=arrays.context | np.uint16(0x7F80)) if sample == victim else arrays

    with pytest.raises(CacheError, match=f"sample {victim.id}: NaN or infinity in context"):
        toy_writer(store, plan).write_shards(plan.shards, each(make))
    assert [shard.index for shard in plan.shards if commit_is_there(store, shard.index)] == [0]
    assert {shard_of(item.path) for item in store.list(PREFIX)} == {None, 0}
    assert list(store.list(f"records/{PREFIX}/claims")) == []


def test_a_stop_of_the_process_stops_the_shard_behind(store: LocalStore) -> None:
    """Ctrl-C: what is being written is written, nothing else is begun, and the claims are given up."""
    plan, stopped = toy_plan(), threading.Event()

    def make(sample: PlannedSample) -> SampleArrays:
        if sample.shard == 1:
            threading.Timer(0.3, stopped.set).start()
            raise KeyboardInterrupt
        return toy_arrays(sample, plan.spec)

    with pytest.raises(KeyboardInterrupt):
        toy_writer(WatchedStore(store, lambda shard: bool(stopped.wait(TIMEOUT_S))), plan).write_shards(
            plan.shards, each(make)
        )
    assert list(store.list(f"records/{PREFIX}")) == []


def test_a_claim_that_ran_out_is_taken_once_more(
    store: LocalStore, expected: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that slept while it wrote shard 0 does the others first, and then finds nobody at shard 0."""
    plan, slept = toy_plan(), []
    renew = Claim._renew_until_stopped
    monkeypatch.setattr(
        Claim, "_renew_until_stopped", lambda self: None if self._path.endswith("000000.json") else renew(self)
    )

    def before(shard: int) -> None:
        if shard == 0 and not slept:
            slept.append(shard)
            time.sleep(2.5)

    toy = Toy(plan)
    writer = toy_writer(WatchedStore(store, before), plan, lease_s=2.0)
    report = writer.write_shards(plan.shards, toy)
    assert (report.num_written, report.claimed) == (len(plan.shards), ())
    assert sorted(toy.computed) == sorted(
        [sample.id for sample in plan.samples] + [sample.id for sample in plan.shards[0].samples]
    )
    assert writer.finish().digest == expected.digest
