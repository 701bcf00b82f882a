"""The shard protocol: what is computed, what is adopted, who is refused, and what a kill leaves behind."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zarr

from draftsmith.cache.claims import Claim
from draftsmith.cache.commits import read_commit
from draftsmith.cache.plan import PlannedSample, SampleLength, array_layouts, plan_cache
from draftsmith.cache.writer import SampleArrays
from draftsmith.errors import CacheError, ShardClaimedError
from draftsmith.manifest import sha256_hex
from draftsmith.storage import LocalStore, ObjectInfo
from tests.unit.cache.toy import (
    FACTS,
    PREFIX,
    DyingStore,
    Toy,
    each,
    elsewhere,
    fill,
    shard_of,
    toy_arrays,
    toy_plan,
    toy_spec,
    toy_writer,
)

RECORDS = f"records/{PREFIX}"
CLAIM = f"{RECORDS}/claims/000000.json"


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def with_bits(values: np.ndarray, place: int, bits: int) -> np.ndarray:
    """A copy with one number replaced: 0x7fc0 is a NaN, 0xff80 minus infinity."""
    changed = values.copy()
    changed.flat[place] = bits
    return changed


def test_objects_and_manifest(store: LocalStore) -> None:
    plan = toy_plan()
    manifest = fill(store, plan, Toy(plan))
    stored = {item.path.removeprefix(f"{PREFIX}/"): item for item in store.list(PREFIX)}
    assert {item.path for item in manifest.objects} == set(stored)
    for record in manifest.objects:
        data = store.get(f"{PREFIX}/{record.path}")
        assert (record.size, record.sha256) == (len(data), sha256_hex(data))
    assert (manifest.kind, manifest.prefix) == ("cache", PREFIX)
    assert manifest.facts["target"] == "toy_target"
    totals = manifest.facts["totals"]
    assert (totals["num_samples"], totals["num_shards"]) == (18, len(plan.shards))
    assert totals["num_tokens"] == sum(8 + number * 37 % 42 for number in range(18))
    assert totals["processors"] == ["toy"]
    assert [item.path for item in store.list(f"{RECORDS}/claims")] == []


def test_plain_bytes_are_as_planned(store: LocalStore) -> None:
    """To the byte, array by array."""
    plan = toy_plan(codec="plain")
    fill(store, plan, Toy(plan))
    for layout in array_layouts(plan.spec):
        real = sum(item.size for item in store.list(f"{PREFIX}/{layout.name}") if not item.path.endswith("zarr.json"))
        assert real == plan.stored_bytes[layout.name] > 0


def test_planned_bytes_are_the_whole_cache_within_one_percent(store: LocalStore) -> None:
    """All objects, metadata too, of samples with wider hidden states than the toy's (a tenth of a real target's)."""
    spec = dataclasses.replace(toy_spec(codec="plain"), hidden_size=256, shard_tokens=1024, chunk_tokens=128)
    plan = plan_cache([SampleLength(f"{number}", 100 + number, 50) for number in range(30)], spec=spec)

    def make(sample: PlannedSample) -> SampleArrays:
        ids = np.arange(sample.num_tokens, dtype=np.int32)
        mask = (ids < 51).astype(np.uint8)
        return SampleArrays(ids, mask, np.ones((len(ids), 2, 256), np.uint16), np.ones((50, 256), np.uint16))

    writer = toy_writer(store, plan)
    for shard in plan.shards:
        writer.write_shard(shard, each(make))
    real = sum(item.size for item in writer.finish().objects)
    assert abs(sum(plan.stored_bytes.values()) / real - 1) < 0.01


def test_any_zarr_reader_opens_it(store: LocalStore) -> None:
    plan = toy_plan()
    fill(store, plan, Toy(plan))
    group = zarr.open_group(Path(store.uri) / PREFIX, mode="r")
    arrays = {name for name, _ in group.members() if not name.startswith("sample_")}
    assert arrays == {"context", "input_ids", "last_hidden", "supervised"}
    assert group.attrs["draftsmith"]["facts"] == FACTS
    assert group["context"].attrs["holds"] == "bfloat16"
    assert group["context"].metadata.dimension_names == ("token", "layer", "hidden")
    for sample in plan.samples:
        start = sample.shard * plan.spec.shard_tokens + sample.offset
        expected = toy_arrays(sample, plan.spec)
        assert np.array_equal(group["context"][start : start + sample.num_tokens], expected.context)
        assert np.array_equal(group["input_ids"][start : start + sample.num_tokens], expected.input_ids)
        start = sample.shard * plan.spec.shard_tokens + sample.label_offset
        assert np.array_equal(group["last_hidden"][start : start + sample.num_labels], expected.last_hidden)
    last = plan.shards[-1]
    unused = group["context"][last.index * 128 + last.num_tokens : (last.index + 1) * 128]
    assert np.isnan((unused.astype(np.uint32) << 16).view(np.float32)).all()


def test_a_second_run_computes_nothing(store: LocalStore) -> None:
    plan = toy_plan()
    first = fill(store, plan, Toy(plan))
    before = {item.path: item.modified_s for item in store.list("")}
    toy = Toy(plan)
    again = fill(store, plan, toy)
    assert toy.computed == []
    assert again == first
    assert {item.path: item.modified_s for item in store.list("")} == before


def test_slices_in_any_order_make_the_same_cache(store: LocalStore, tmp_path: Path) -> None:
    plan = toy_plan()
    whole = fill(store, plan, Toy(plan))
    other = LocalStore(tmp_path / "other")
    for part in (1, 0):
        writer = toy_writer(other, plan)
        for shard in plan.shards[::-1]:
            if shard.index % 2 == part:
                writer.write_shard(shard, Toy(plan))
        if part == 1:
            with pytest.raises(CacheError, match=r"not finished: got \d of \d shards not done, the first is 0"):
                writer.finish()
    assert toy_writer(other, plan).finish().digest == whole.digest


def test_a_live_writer_is_not_disturbed(store: LocalStore) -> None:
    """Two writers at one shard: the second is refused with the first one's name, and the first goes on."""
    plan = toy_plan()
    inside, leave = threading.Event(), threading.Event()

    def slow(batches: Iterable[tuple[PlannedSample, ...]]) -> Iterator[list[SampleArrays]]:
        inside.set()
        leave.wait(30)
        return Toy(plan)(batches)

    first = threading.Thread(target=lambda: toy_writer(store, plan).write_shard(plan.shards[0], slow))
    first.start()
    assert inside.wait(30)
    toy = Toy(plan)
    with pytest.raises(ShardClaimedError, match=f"is claimed by process {os.getpid()} on .*a lease with"):
        toy_writer(store, plan).write_shard(plan.shards[0], toy)
    assert toy.computed == []
    toy_writer(store, plan).write_shard(plan.shards[1], toy)
    leave.set()
    first.join()
    assert toy_writer(store, plan).is_done(plan.shards[0])


class LostAnswers(DyingStore):
    """Every conditional write goes through, but its answer is lost and the repeated request meets its own object."""

    def put_if_absent(self, path: str, data: bytes) -> ObjectInfo:
        self._store.put_if_absent(path, data)
        return self._store.put_if_absent(path, data)

    def put_if_match(self, path: str, data: bytes, *, etag: str) -> ObjectInfo:
        self._store.put_if_match(path, data, etag=etag)
        return self._store.put_if_match(path, data, etag=etag)


def test_lost_answers_of_the_store_are_survived(store: LocalStore, tmp_path: Path) -> None:
    plan = toy_plan()
    expected = fill(LocalStore(tmp_path / "whole"), plan, Toy(plan))
    lossy = LostAnswers(store, die_after=-1)
    assert fill(lossy, plan, Toy(plan)).digest == expected.digest
    with Claim.hold(lossy, CLAIM, owner=elsewhere(), lease_s=0.6) as claim:
        for _ in range(8):
            time.sleep(0.1)
            claim.check()


def test_what_a_killed_writer_left_is_replaced_or_adopted(store: LocalStore, tmp_path: Path) -> None:
    plan = toy_plan()
    expected = fill(LocalStore(tmp_path / "whole"), plan, Toy(plan))
    store.put(f"{PREFIX}/context/c.0.0.0", b"of another kind of processor")
    store.put(f"{PREFIX}/input_ids/c.0", LocalStore(tmp_path / "whole").get(f"{PREFIX}/input_ids/c.0"))
    before = store.head(f"{PREFIX}/input_ids/c.0")
    assert fill(store, plan, Toy(plan)).digest == expected.digest
    assert store.head(f"{PREFIX}/input_ids/c.0") == before


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_committed_shard_that_lost_an_object_is_made_again(store: LocalStore, damage: str) -> None:
    """And it alone: done never means that a record exists."""
    plan = toy_plan()
    expected = fill(store, plan, Toy(plan))
    place = f"{PREFIX}/context/c.1.0.0"
    data = store.get(place)
    store.delete(place)
    if damage == "cut":
        store.put(place, data[:-9])
    toy = Toy(plan)
    assert fill(store, plan, toy).digest == expected.digest
    assert sorted(toy.computed) == sorted(sample.id for sample in plan.shards[1].samples)
    assert store.get(place) == data


def test_the_first_committed_wins(store: LocalStore) -> None:
    """A writer whose claim ran out while it computed finds the shard committed with other bytes, and says so."""
    plan = toy_plan()
    shard = plan.shards[0]

    def overtaken(sample: PlannedSample) -> SampleArrays:
        if sample == shard.batch(0)[0]:
            store.delete(CLAIM)
            toy_writer(store, plan).write_shard(shard, Toy(plan))
        arrays = toy_arrays(sample, plan.spec)
        return dataclasses.replace(arrays, context=arrays.context ^ 1)

    with pytest.raises(CacheError, match="was written by another process"):
        toy_writer(store, plan).write_shard(shard, each(overtaken))
    committed = toy_writer(store, plan).write_shard(shard, Toy(plan))
    record = next(item for item in committed.objects if item.path == "context/c.0.0.0")
    assert sha256_hex(store.get(f"{PREFIX}/{record.path}")) == record.sha256


def test_another_layout_at_the_prefix_is_refused(store: LocalStore) -> None:
    toy_writer(store, toy_plan()).prepare()
    with pytest.raises(CacheError, match="of another layout"):
        toy_writer(store, toy_plan(codec="plain")).prepare()


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("context", lambda a: with_bits(a, 17, 0x7FC0), r"NaN or infinity in context: got 1 values.*\[1, 0, 5\]"),
        ("last_hidden", lambda a: with_bits(a, 0, 0xFF80), r"NaN or infinity in last_hidden"),
        ("context", lambda a: a[:, :1], r"context: got uint16 \[.*, 1, 6\], expected uint16 \[.*, 2, 6\]"),
        ("context", lambda a: a.astype(np.float32), "context: got float32"),
        ("last_hidden", lambda a: a[:-1], "last_hidden: got uint16"),
        ("last_hidden", lambda a: None, "last_hidden: got none"),
        ("input_ids", lambda a: a - 60, "input_ids: got -.*, expected token ids >= 0"),
        ("supervised", lambda a: a * 2, "supervised: got 2, expected 0 or 1"),
        ("supervised", lambda a: 1 - a, "label positions of its mask: got .* as planned"),
    ],
)  # fmt: skip
def test_arrays_that_do_not_fit_are_refused(store: LocalStore, name: str, change: object, expected: str) -> None:
    """The error names the sample; nothing of the shard is written, and the claim is given up."""
    plan = toy_plan()
    victim = plan.shards[0].samples[1]

    def make(sample: PlannedSample) -> SampleArrays:
        arrays = toy_arrays(sample, plan.spec)
        changed = {name: change(getattr(arrays, name))}  # type: ignore[operator]
        return dataclasses.replace(arrays, **changed) if sample == victim else arrays

    with pytest.raises(CacheError, match=f"sample {victim.id}: {expected}"):
        toy_writer(store, plan).write_shard(plan.shards[0], each(make))
    assert {shard_of(item.path) for item in store.list("")} == {None}
    assert list(store.list("records")) == []


def test_a_lease_must_last(store: LocalStore) -> None:
    with pytest.raises(CacheError, match=r"must be > 0 s: got 0.*DRAFTSMITH_LEASE_S"):
        toy_writer(store, toy_plan(), lease_s=0)


def test_a_batch_of_another_number_of_samples_is_refused(store: LocalStore) -> None:
    plan = toy_plan()
    with pytest.raises(CacheError, match="batch of another number of samples: got 0"):
        toy_writer(store, plan).write_shard(plan.shards[0], lambda batches: iter([]))


def test_more_batches_than_were_asked_for_are_refused(store: LocalStore) -> None:
    plan = toy_plan()

    def compute(batches: Iterable[tuple[PlannedSample, ...]]) -> Iterator[list[SampleArrays]]:
        yield from Toy(plan)(batches)
        yield [toy_arrays(plan.samples[0], plan.spec)]

    with pytest.raises(CacheError, match=r"more batches than were asked for: expected \d of shard 0"):
        toy_writer(store, plan).write_shard(plan.shards[0], compute)
    assert not toy_writer(store, plan).is_done(plan.shards[0])


def test_an_error_of_the_target_gives_the_claim_up(store: LocalStore) -> None:
    plan = toy_plan()

    def broken(sample: PlannedSample) -> SampleArrays:
        raise MemoryError("out of memory")

    with pytest.raises(MemoryError):
        toy_writer(store, plan).write_shard(plan.shards[0], each(broken))
    assert store.head(CLAIM) is None


@pytest.mark.parametrize("last_hidden", ["none", "all"])
def test_other_choices_of_last_hidden(store: LocalStore, last_hidden: str) -> None:
    plan = toy_plan(last_hidden=last_hidden)  # type: ignore[arg-type]
    manifest = fill(store, plan, Toy(plan))
    assert any(item.path.startswith("last_hidden") for item in manifest.objects) == (last_hidden == "all")


@pytest.mark.parametrize("kind", ["claims", "commits"])
def test_broken_records_are_named(store: LocalStore, kind: str) -> None:
    plan = toy_plan()
    store.put(f"{RECORDS}/{kind}/000000.json", b"{not json")
    with pytest.raises(CacheError, match=f"broken .* record.*delete {store.uri}/{RECORDS}/{kind}/000000.json"):
        toy_writer(store, plan).write_shard(plan.shards[0], Toy(plan))


def test_a_commit_record_says_what_was_written(store: LocalStore) -> None:
    plan = toy_plan(codec="plain")
    started = time.monotonic()
    fill(store, plan, Toy(plan))
    wall_s = time.monotonic() - started
    for shard in plan.shards:
        commit = read_commit(store, PREFIX, shard.index)
        assert commit is not None
        assert (commit.shard, commit.processor) == (shard.index, "toy")
        assert commit.num_tokens == sum(sample.num_tokens for sample in shard.samples)
        # int32 ids, uint8 masks, 2 x 6 numbers of 16 bits a token, 6 a label.
        assert commit.logical_bytes == commit.num_tokens * (4 + 1 + 24) + 12 * sum(s.num_labels for s in shard.samples)
        assert 0 <= commit.compute_s < wall_s
        assert {shard_of(f"{PREFIX}/{item.path}") for item in commit.objects} == {shard.index}
        for item in commit.stored:
            data, there = store.get(f"{PREFIX}/{item.record.path}"), store.head(f"{PREFIX}/{item.record.path}")
            assert (item.record.size, item.record.sha256) == (len(data), sha256_hex(data))
            assert there is not None
            assert item.etag == there.etag
    assert read_commit(store, PREFIX, plan.num_shards) is None


def test_pending_shards_are_those_that_are_not_done(store: LocalStore) -> None:
    plan = toy_plan()
    writer = toy_writer(store, plan)
    assert writer.pending(plan.shards) == list(plan.shards)
    writer.write_shards([plan.shards[2], plan.shards[0]], Toy(plan))
    store.delete(f"{PREFIX}/input_ids/c.0")
    other = toy_writer(store, plan)
    assert [shard.index for shard in other.pending(plan.shards)] == [
        shard.index for shard in plan.shards if shard.index != 2
    ]
    assert [shard.index for shard in other.pending(plan.shards[2:])] == [s.index for s in plan.shards[3:]]
