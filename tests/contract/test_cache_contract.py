"""The cache on every store: the same digest everywhere, resumed after a kill, one writer a shard, moved by a copy."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from draftsmith.cache.commits import read_commit
from draftsmith.cache.reader import CacheReader
from draftsmith.cache.verify import verify_cache
from draftsmith.errors import CacheError, ShardClaimedError, StoreError
from draftsmith.manifest import Manifest
from draftsmith.storage import LocalStore, ObjectInfo, Store, copy_prefix, open_store
from tests.s3 import S3Bucket
from tests.unit.cache.toy import (
    PREFIX,
    Toy,
    fill,
    run_killed,
    shard_of,
    start_process,
    toy_arrays,
    toy_plan,
    toy_writer,
)

RECORDS = f"records/{PREFIX}"
# What a process writes of shard 1 is 4 objects, between its claim and its commit record.
OBJECT_1 = r"^put cache/.*/c\.1\b"


def seen(store: Store, paths: list[str]) -> dict[str, ObjectInfo | None]:
    """ETag, version id and time of change of each: another time says that it was written again, whatever the bytes."""
    return {path: store.head(path) for path in paths}


def written(store: Store) -> dict[str, ObjectInfo | None]:
    """All objects and commit records."""
    paths = [item.path for item in [*store.list(PREFIX), *store.list(f"{RECORDS}/commits")]]
    return seen(store, paths)


class CacheContract:
    """The suite; a store gives its `store_uri`."""

    @pytest.fixture
    def store(self, store_uri: str) -> Store:
        return open_store(store_uri)

    @pytest.fixture
    def undisturbed(self, tmp_path: Path) -> Manifest:
        """The toy's cache in a folder of its own, by one process that nothing happened to."""
        plan = toy_plan()
        return fill(LocalStore(tmp_path / "undisturbed"), plan, Toy(plan))

    @pytest.mark.parametrize(
        ("at", "die_after", "has_commit"),
        [
            (r"^put .*/claims/000001", 1, False),
            (OBJECT_1, 1, False),
            (OBJECT_1, 4, False),
            (r"^put .*/commits/000001", 1, True),
            (r"^delete .*/claims/000001", 1, True),
        ],
        ids=["claim", "first object", "all objects", "commit", "claim removed"],
    )
    def test_killed_at_each_point(
        self, store: Store, undisturbed: Manifest, at: str, die_after: int, has_commit: bool
    ) -> None:
        """The dead process's claim is taken over at once; its objects are adopted, its finished shards left alone."""
        plan = toy_plan()
        run_killed(store, "--at", at, "--die-after", str(die_after), "--lease", "3600")
        before = written(store)
        num_objects = sum(1 for path in before if shard_of(path) == 1)
        assert num_objects >= {OBJECT_1: die_after}.get(at, 4 if has_commit else 0)
        assert (read_commit(store, PREFIX, 1) is not None) == has_commit
        claimed = store.head(f"{RECORDS}/claims/000001.json") is not None
        assert claimed == (not at.startswith("^delete"))
        # The shard before is written by threads meanwhile, so it may be done or not.
        done = [shard.index for shard in plan.shards if toy_writer(store, plan).is_done(shard)]
        assert (1 in done) == has_commit

        toy = Toy(plan)
        manifest = fill(store, plan, toy)
        assert manifest.digest == undisturbed.digest
        expected = [sample.id for shard in plan.shards if shard.index not in done for sample in shard.samples]
        assert sorted(toy.computed) == sorted(expected)
        assert seen(store, list(before)) == before
        assert list(store.list(f"{RECORDS}/claims")) == []
        assert verify_cache(store, manifest, deep=True).ok

    def test_objects_of_another_processor_are_replaced(self, store: Store, undisturbed: Manifest) -> None:
        """Written, but never committed: whoever commits first decides, and says with which bytes."""
        plan = toy_plan()
        run_killed(store, "--at", OBJECT_1, "--die-after", "4", "--xor", "1")
        before = written(store)
        manifest = fill(store, plan, Toy(plan))
        replaced = [path for path, info in seen(store, list(before)).items() if info != before[path]]
        # What was committed with the other bytes before stays; shard 1 was not, others may or may not have come so far.
        uncommitted = [number for number in range(3) if f"{RECORDS}/commits/{number:06}.json" not in before]
        paths = [f"{PREFIX}/context/c.{number}.0.0" for number in uncommitted]
        assert f"{PREFIX}/context/c.1.0.0" in replaced
        assert sorted(replaced) == [path for path in paths if path in before]
        theirs = {item.path: item.sha256 for item in undisturbed.objects}
        ours = {item.path: item.sha256 for item in manifest.objects}
        assert {path for path in ours if ours[path] != theirs[path]} <= {"context/c.0.0.0"}

    def test_expired_lease_of_another_machine(self, store: Store, undisturbed: Manifest) -> None:
        """Nobody can see from here that the process is dead: it is waited for as long as its lease says."""
        plan = toy_plan()
        claim = f"{RECORDS}/claims/000001.json"
        run_killed(store, "--at", r"^put .*/claims/000001", "--die-after", "1", "--machine", "far", "--lease", "3")
        toy = Toy(plan)
        with pytest.raises(ShardClaimedError, match=r"is claimed by process .* on far: got a lease with [0-3] s left"):
            toy_writer(store, plan).write_shard(plan.shards[1], toy)
        assert toy.computed == []
        before = store.head(claim)
        assert before is not None
        time.sleep(3)
        taken: list[ObjectInfo | None] = []

        def look(batches):  # type: ignore[no-untyped-def]
            taken.append(store.head(claim))
            return toy(batches)

        toy_writer(store, plan).write_shard(plan.shards[1], look)
        assert taken[0] is not None
        assert taken[0].etag != before.etag
        assert fill(store, plan, Toy(plan)).digest == undisturbed.digest

    def test_live_process_is_named(self, store: Store, undisturbed: Manifest) -> None:
        """All shards but the one that another process works on are done, and it is told who that is."""
        plan = toy_plan()
        other = start_process(store, "--wait-in", "1", "--slice", f"1/{len(plan.shards)}")
        assert other.stdout is not None
        assert other.stdout.readline() == "inside\n"
        toy = Toy(plan)
        report = toy_writer(store, plan).write_shards(plan.shards, toy)
        assert report.claimed == (f"shard 1 is claimed by process {other.pid} on {socket.gethostname()}",)
        assert (report.num_written, report.num_done) == (len(plan.shards) - 1, 0)
        assert sorted(toy.computed) == sorted(sample.id for sample in plan.samples if sample.shard != 1)
        with pytest.raises(CacheError, match=r"not finished: got 1 of \d shards not done, the first is 1"):
            toy_writer(store, plan).finish()
        _, told = other.communicate("go on\n")
        assert other.returncode == 0, told
        again = Toy(plan)
        assert fill(store, plan, again).digest == undisturbed.digest
        assert again.computed == []

    def test_committed_objects_that_are_gone_are_made_again(self, store: Store, undisturbed: Manifest) -> None:
        plan = toy_plan()
        fill(store, plan, Toy(plan))
        store.delete(f"{PREFIX}/context/c.1.0.0")
        store.delete(f"{PREFIX}/input_ids/c.1")
        others = {path: info for path, info in written(store).items() if "000001" not in path}
        toy = Toy(plan)
        assert fill(store, plan, toy).digest == undisturbed.digest
        assert sorted(toy.computed) == sorted(sample.id for sample in plan.shards[1].samples)
        assert seen(store, list(others)) == others

    def test_a_shard_made_again_on_another_processor_is_committed_anew(self, store: Store) -> None:
        """What its old record names is gone, so the record goes as well, and the objects that were left with it."""
        plan = toy_plan()
        process = start_process(store, "--xor", "1", "--slice", f"1/{len(plan.shards)}")
        _, told = process.communicate()
        assert process.returncode == 0, told
        store.delete(f"{PREFIX}/input_ids/c.1")
        manifest = fill(store, plan, Toy(plan))
        assert verify_cache(store, manifest, deep=True).ok
        commit = read_commit(store, PREFIX, 1)
        assert commit is not None
        for item in commit.stored:
            there = store.head(f"{PREFIX}/{item.record.path}")
            assert there is not None
            assert (item.etag, item.version_id) == (there.etag, there.version_id)
        for sample in plan.shards[1].samples:
            assert np.array_equal(
                CacheReader(store, manifest).read(sample.index).context, toy_arrays(sample, plan.spec).context
            )

    @pytest.mark.parametrize("seed", range(2))
    def test_killed_anywhere_and_gone_on_with_by_others(self, store: Store, undisturbed: Manifest, seed: int) -> None:
        """Two processes die after some write; three, then one go on: nothing that was finished is touched again."""
        plan, draw = toy_plan(), random.Random(seed)
        first = [
            start_process(store, "--slice", f"{number}/2", "--at", ".", "--die-after", str(draw.randrange(2, 36)))
            for number in range(2)
        ]
        for process in first:
            process.communicate()
        assert -9 in [process.returncode for process in first]
        done = [shard.index for shard in plan.shards if toy_writer(store, plan).is_done(shard)]
        objects = [item.path for index in done for item in read_commit(store, PREFIX, index).objects]  # type: ignore[union-attr]
        paths = [f"{PREFIX}/{path}" for path in objects] + [f"{RECORDS}/commits/{index:06d}.json" for index in done]
        before = seen(store, paths)
        second = [start_process(store, "--slice", f"{number}/3") for number in range(3)]
        for process in second:
            _, told = process.communicate()
            assert process.returncode == 0, told
        toy = Toy(plan)
        assert fill(store, plan, toy).digest == undisturbed.digest
        assert toy.computed == []
        assert seen(store, paths) == before

    def test_two_live_writers(self, store: Store) -> None:
        """All shards by two writers at once: each shard is computed once, and whoever comes second is told by whom."""
        plan = toy_plan()
        start, refused = threading.Barrier(2), []
        toys = [Toy(plan), Toy(plan)]

        def work(number: int) -> None:
            writer, toy = toy_writer(store, plan), toys[number]
            start.wait()
            for shard in plan.shards:
                try:
                    writer.write_shard(shard, toy)
                except ShardClaimedError as error:
                    refused.append(str(error))

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(work, range(2)))
        computed = toys[0].computed + toys[1].computed
        assert sorted(computed) == sorted(sample.id for sample in plan.samples)
        assert all(f"process {os.getpid()} on" in line for line in refused)
        assert verify_cache(store, toy_writer(store, plan).finish(), deep=True).ok

    def test_read_and_moved_by_a_copy(self, store: Store, tmp_path: Path) -> None:
        """Read back as computed; the copy is whole, and a rerun over it finds every shard done."""
        plan = toy_plan()
        manifest = fill(store, plan, Toy(plan))
        reader = CacheReader(store, manifest)
        for index, sample in enumerate(reader.samples):
            assert np.array_equal(reader.read(index).context, toy_arrays(sample, plan.spec).context)
        copy = LocalStore(tmp_path / "copy")
        copy_prefix(store, copy, prefix=manifest.prefix)
        assert verify_cache(copy, manifest, deep=True).ok
        toy = Toy(plan)
        assert fill(copy, plan, toy).digest == manifest.digest
        assert toy.computed == []

    def test_damage_is_named(self, store: Store) -> None:
        plan = toy_plan()
        manifest = fill(store, plan, Toy(plan))
        place = f"{PREFIX}/context/c.1.0.0"
        data = store.get(place)
        store.put(place, data[:-1] + bytes([data[-1] ^ 1]))
        (problem,) = verify_cache(store, manifest, deep=True).problems
        assert (problem.kind, problem.path) == ("sha256", "context/c.1.0.0")
        with pytest.raises(CacheError, match=place):
            CacheReader(store, manifest).read(plan.shards[1].samples[0].index)


class TestLocalCache(CacheContract):
    @pytest.fixture
    def store_uri(self, tmp_path: Path) -> str:
        return str(tmp_path / "store")


@pytest.mark.s3
class TestS3Cache(CacheContract):
    @pytest.fixture
    def store_uri(self, s3_env: S3Bucket) -> str:
        return s3_env.uri

    def test_wrong_credentials_while_reading(self, s3_env: S3Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
        """A store that refuses is no store that lacks the cache: nobody is told to make it again."""
        plan = toy_plan()
        manifest = fill(open_store(s3_env.uri), plan, Toy(plan))
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        with pytest.raises(StoreError, match="AWS_SECRET_ACCESS_KEY") as caught:
            CacheReader(open_store(s3_env.uri), manifest)
        assert type(caught.value) is StoreError
        with pytest.raises(StoreError, match="AWS_SECRET_ACCESS_KEY"):
            toy_writer(open_store(s3_env.uri), plan).prepare()
