"""The cache on every store: the same digest everywhere, resumed after a kill, one writer a shard, moved by a copy."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from draftsmith.cache.reader import CacheReader
from draftsmith.cache.verify import verify_cache
from draftsmith.errors import CacheError, ShardClaimedError, StoreError
from draftsmith.storage import LocalStore, Store, copy_prefix, open_store
from tests.s3 import S3Bucket
from tests.unit.cache.toy import PREFIX, Toy, fill, toy_arrays, toy_plan, toy_writer

ROOT = Path(__file__).parents[2]


class CacheContract:
    """The suite; a store gives its `store_uri`."""

    @pytest.fixture
    def store(self, store_uri: str) -> Store:
        return open_store(store_uri)

    def test_killed_resumed_read_and_verified(self, store: Store, tmp_path: Path) -> None:
        """The child dies inside its second shard; the digest is that of a folder that was never disturbed."""
        plan = toy_plan()
        expected = fill(LocalStore(tmp_path / "undisturbed"), plan, Toy(plan))
        command = [sys.executable, "-m", "tests.unit.cache.toy", store.uri, "bf16", str(5 + 6 + 3)]
        child = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=False)
        assert child.returncode == -9, child.stderr
        toy = Toy(plan)
        manifest = fill(store, plan, toy)
        assert manifest.digest == expected.digest
        assert sorted(toy.computed) == sorted(s.id for shard in plan.shards[1:] for s in shard.samples)
        reader = CacheReader(store, manifest)
        for index, sample in enumerate(reader.samples):
            assert np.array_equal(reader.read(index).context, toy_arrays(sample, plan.spec).context)
        assert verify_cache(store, manifest, deep=True).ok

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

    def test_moved_by_a_copy(self, store: Store, tmp_path: Path) -> None:
        """The copy is whole, and a rerun over it finds every shard done."""
        plan = toy_plan()
        manifest = fill(store, plan, Toy(plan))
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
