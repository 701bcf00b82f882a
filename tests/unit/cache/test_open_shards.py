"""Which shards are in memory: how many, which go first, which are opened ahead, and where errors come out."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from draftsmith.cache.open_shards import OpenShards, Rows
from draftsmith.errors import CacheError

WAIT_S = 10.0


class Disk:
    """Opens shards, remembers which, and knows how many of them are alive."""

    def __init__(self) -> None:
        self.opened: list[int] = []
        self.broken: set[int] = set()
        self.alive: list[weakref.ref[np.ndarray]] = []
        self.most_alive = 0
        self.changed = threading.Condition()

    def load(self, shard: int) -> Rows:
        values = np.full(3, shard)
        with self.changed:
            self.opened.append(shard)
            self.alive = [item for item in self.alive if item() is not None] + [weakref.ref(values)]
            self.most_alive = max(self.most_alive, len(self.alive))
            self.changed.notify_all()
        if shard in self.broken:
            raise CacheError(f"shard {shard} is broken")
        return {"x": values}

    def wait_for(self, done: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(done, WAIT_S), self.opened


def settle(shards: OpenShards) -> None:
    """Wait until the one thread of `shards` has nothing to do."""
    shards._pool.submit(lambda: None).result(WAIT_S)


@pytest.fixture
def disk() -> Disk:
    return Disk()


def test_the_ones_used_last_are_held(disk: Disk) -> None:
    shards = OpenShards(disk.load, most=2, threads=1)
    for shard in (0, 1, 0, 2, 0, 1):
        assert shards.rows(shard, index=shard)["x"].tolist() == [shard] * 3
    assert disk.opened == [0, 1, 2, 1]


def test_the_next_shards_are_opened_before_their_use(disk: Disk) -> None:
    """Two at a time and one ahead: 2 is opened while 0 and 1 are used, 3 when 0 was used for the last time and its
    memory can be free, no sooner."""
    shards = OpenShards(disk.load, most=2, threads=1)
    walk = [0, 1, 0, 1, 2, 3, 2, 3]
    shards.follow(iter(list(enumerate(walk))))
    opened = []
    for index, shard in enumerate(walk):
        settle(shards)
        opened.append(list(disk.opened))
        assert shards.rows(shard, index=index)["x"][0] == shard
    assert opened == [[0, 1, 2]] * 4 + [[0, 1, 2, 3]] * 4


@pytest.mark.parametrize("most", [1, 2, 4])
def test_memory_is_bounded_and_each_shard_is_opened_once_an_epoch(disk: Disk, most: int) -> None:
    """Epochs of 12 shards in windows of `most`, three samples a shard, the samples of a window mixed; the caller holds
    the sample that it read last."""
    shards, draw, walk = OpenShards(disk.load, most=most, threads=1), np.random.default_rng(0), []
    for _ in range(3):
        order = draw.permutation(12)
        for start in range(0, 12, most):
            walk += draw.permutation(np.repeat(order[start : start + most], 3)).tolist()
    shards.follow(enumerate(walk))
    for index, shard in enumerate(walk):
        held = None
        held = shards.rows(shard, index=index)
        settle(shards)
        assert held["x"][0] == shard
    assert len(disk.opened) <= 36
    assert disk.most_alive <= most + 1


def test_a_walk_is_drawn_no_further_than_needed(disk: Disk) -> None:
    drawn = []

    def walk() -> Iterator[tuple[int, int]]:
        for index in range(1_000_000):
            drawn.append(index)
            yield index, index // 10

    shards = OpenShards(disk.load, most=2, threads=1)
    shards.follow(walk())
    assert len(drawn) == 21
    shards.follow((index, 0) for index in drawn)
    shards.follow(walk_of_one_shard := iter([(index, 7) for index in range(1_000_000)]))
    assert next(walk_of_one_shard)[0] < 100_000


def test_uses_beside_the_walk_do_not_disturb_it(disk: Disk) -> None:
    """Validation between two steps: a shard outside of the walk, and samples of shards that are in it."""
    shards = OpenShards(disk.load, most=2, threads=1)
    walk = [0, 1, 0, 1, 2, 3, 2, 3]
    shards.follow(iter(list(enumerate(walk))))
    assert shards.rows(9, index=90)["x"][0] == 9
    for index, shard in enumerate(walk):
        assert shards.rows(0, index=77)["x"][0] == 0
        assert shards.rows(shard, index=index)["x"][0] == shard
    assert not shards._coming


def test_shards_are_opened_at_the_same_time() -> None:
    """Each of two loads waits for the other."""
    meet = threading.Barrier(2, timeout=WAIT_S)

    def load(shard: int) -> Rows:
        meet.wait()
        return {"x": np.full(3, shard)}

    shards = OpenShards(load, most=1, threads=2)
    shards.follow(iter([(0, 0), (1, 1)]))
    assert shards.rows(0, index=0)["x"][0] == 0


def test_an_error_comes_out_where_its_shard_is_used_and_does_not_stay(disk: Disk) -> None:
    disk.broken = {1}
    shards = OpenShards(disk.load, most=1, threads=1)
    shards.follow(iter([(0, 0), (1, 1), (2, 2)]))
    disk.wait_for(lambda: 1 in disk.opened)
    assert shards.rows(0, index=0)["x"][0] == 0
    with pytest.raises(CacheError, match="shard 1 is broken"):
        shards.rows(1, index=1)
    disk.broken = set()
    assert shards.rows(1, index=1)["x"][0] == 1


def test_closed_shards_open_no_more(disk: Disk) -> None:
    shards = OpenShards(disk.load, most=1, threads=1)
    shards.rows(0, index=0)
    shards.close()
    assert shards.rows(0, index=0)["x"][0] == 0
    with pytest.raises(RuntimeError, match="shutdown"):
        shards.rows(1, index=1)


@pytest.mark.parametrize("name", ["max_open_shards", "threads"])
def test_at_least_one(disk: Disk, name: str) -> None:
    sizes = {"max_open_shards": 1, "threads": 1, name: 0}
    with pytest.raises(CacheError, match=f"{name} must be >= 1: got 0"):
        OpenShards(disk.load, most=sizes["max_open_shards"], threads=sizes["threads"])
