"""A streaming run over the toy cache without torch: a trainer's walk that reads samples, and workers beside it.

`python -m tests.unit.cache.toy_stream STORE PART START_ID FIRST STOP CODEC` is a worker in a process of its own, which
kills itself with SIGKILL after so many writes if DIE_AFTER is in the environment.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

import numpy as np
import pytest

from draftsmith.cache import stream_keeper, stream_worker
from draftsmith.cache.claims import Owner
from draftsmith.cache.plan import CachePlan, Codec, plan_cache
from draftsmith.cache.reader import CachedSample, CacheReader, window_order
from draftsmith.cache.stream import HeldOut, StreamReader
from draftsmith.cache.stream_keeper import StreamKeeper, StreamPlace
from draftsmith.cache.stream_plan import Slots, most_bytes, needed_bytes, plan_slots
from draftsmith.cache.stream_worker import work
from draftsmith.errors import CacheError, TrainingError
from draftsmith.storage import LocalStore, Store, open_store
from tests.unit.cache.toy import FACTS, DyingStore, Toy, fill, toy_samples, toy_spec

PLACE = StreamPlace("stream/dspark-toy-0123abcd")
SEED, SIZE = 11, 3  # samples an update
NUM_SAMPLES = 120
HELD_OUT = [4, 17, 33, 90]
MEMBERS = [index for index in range(NUM_SAMPLES) if index not in HELD_OUT and index % 7]
AHEAD = 2 * SIZE - 1
STOP = len(MEMBERS) + 40  # into the second epoch


def stream_plan(codec: Codec = "plain") -> CachePlan:
    return plan_cache(toy_samples(NUM_SAMPLES), spec=toy_spec(codec=codec))


def stream_slots(plan: CachePlan, *, first: int, stop: int, first_pass: bool) -> Slots:
    indices = sorted(HELD_OUT + MEMBERS[::4]) if first_pass else []
    return plan_slots(
        plan, first_pass=indices, members=MEMBERS, order=lambda epoch: window_order(plan, SEED, epoch), first=first,
        stop=stop,
    )  # fmt: skip


def room_needed(plan: CachePlan, slots: Slots) -> int:
    return needed_bytes(slots, sizes=lambda shard: most_bytes(plan, shard), ahead=AHEAD)


class Watcher:
    """Adds up the files of a stream, again and again, from a thread of its own; `most` is the most they ever took."""

    def __init__(self, store: Path) -> None:
        self._folders = [store / PLACE.prefix, store / PLACE.records]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.most = self.num_looks = 0

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.is_set():
            self.most = max(self.most, sum(self._sizes()))
            self.num_looks += 1

    def _sizes(self) -> Iterator[int]:
        for folder in self._folders:
            for path in folder.rglob("*"):
                try:
                    if path.is_file():
                        yield path.stat().st_size
                except FileNotFoundError:
                    continue


class ToyRun:
    """Rank 0 of a run, and its workers as threads of this process (`num_workers` 0: they are elsewhere)."""

    def __init__(
        self, store: Store, *, plan: CachePlan, room: int, first: int, stop: int, num_workers: int, start_id: str = "a"
    ) -> None:
        self.store, self.plan, self.stop = store, plan, stop
        self._orders: dict[int, list[int]] = {}
        self.held_out = HeldOut(store, PLACE, indices=HELD_OUT)
        self.was_kept = self.held_out.load()
        self.slots = stream_slots(plan, first=first, stop=stop, first_pass=not self.was_kept)
        self.keeper = StreamKeeper(store, PLACE, plan=plan, slots=self.slots, room=room, run=start_id)
        self.keeper.begin(keep=self.held_out.paths)
        self.first_granted = self.keeper.granted
        self.toy = Toy(plan)
        self.errors: list[BaseException] = []
        self.threads = [
            threading.Thread(target=self._work, args=((number, num_workers), start_id)) for number in range(num_workers)
        ]
        for thread in self.threads:
            thread.start()
        self.reader = StreamReader(
            store, PLACE, plan=plan, facts=FACTS, slots=self.slots, held_out=self.held_out, watch=self._watch
        )

    def __enter__(self) -> ToyRun:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.reader.close()
        if error is not None or self.keeper.failed is None:
            self.keeper.fail("the test is over")
        for thread in self.threads:
            thread.join()

    def first_pass(self) -> list[CachedSample]:
        """Every sample of the first pass, in index order; those to validate on are kept."""
        indices = [] if self.was_kept else sorted(HELD_OUT + MEMBERS[::4])
        found = []
        for tick, index in enumerate(indices, start=self.slots.first - len(indices)):
            self.keeper.passed(tick)
            found.append(self.reader.read_first(index))
            if index in HELD_OUT:
                self.held_out.add(index, found[-1])
        self.keeper.passed(self.slots.first)
        if not self.was_kept:
            self.held_out.close()
        return found

    def steps(self, *, on_read: Callable[[range], object] = lambda ticks: None) -> Iterator[list[CachedSample]]:
        """The samples of each update, an update ahead of what is passed, as a loader reads them.

        `on_read` gets the ticks of an update when they are read here, so that another rank may read its share of them.
        """
        ahead: list[list[CachedSample]] = []
        for start in range(self.slots.first, self.stop, SIZE):
            ticks = range(start, min(start + SIZE, self.stop))
            ahead.append([self.reader.read(index, epoch=epoch) for index, epoch in map(self.place_of, ticks)])
            on_read(ticks)
            if len(ahead) == 2:
                yield ahead.pop(0)
                self.keeper.passed(start)
        yield from ahead
        self.keeper.passed(self.stop)

    def place_of(self, tick: int) -> tuple[int, int]:
        """Sample index and epoch of a tick of the walk."""
        epoch, place = divmod(tick, len(MEMBERS))
        if epoch not in self._orders:
            self._orders[epoch] = [int(i) for i in window_order(self.plan, SEED, epoch) if i in MEMBERS]
        return self._orders[epoch][place], epoch

    def slot_of(self, tick: int) -> tuple[int, int]:
        index, epoch = self.place_of(tick)
        return epoch, self.plan.samples[index].shard

    def refreshed(self) -> StreamKeeper:
        """The keeper, after a look at the store."""
        self.keeper.refresh()
        return self.keeper

    def _watch(self) -> None:
        self.keeper.refresh()
        if self.errors:
            raise TrainingError(f"a worker failed: {self.errors[0]}")

    def _work(self, part: tuple[int, int], start_id: str) -> None:
        try:
            run_worker(self.store, self.plan, self.slots, part=part, start_id=start_id, toy=self.toy)
        except CacheError as error:
            if "the test is over" not in str(error):
                self.errors.append(error)
        except BaseException as error:
            self.errors.append(error)


def run_worker(store: Store, plan: CachePlan, slots: Slots, *, part: tuple[int, int], start_id: str, toy: Toy) -> None:
    work(
        store, PLACE, plan=plan, facts=FACTS, slots=slots, part=part, run=start_id,
        owner=Owner.this_process(processor="toy"), lease_s=60.0, compute=toy,
    )  # fmt: skip


def same(ours: CachedSample, theirs: CachedSample) -> bool:
    """Equal in every number."""
    return ours.id == theirs.id and all(
        np.array_equal(getattr(ours, name), getattr(theirs, name))
        for name in ("input_ids", "supervised", "context", "last_hidden", "label_positions")
    )


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Toy shards are made in milliseconds."""
    monkeypatch.setattr(stream_keeper, "REFRESH_S", 0.01)
    monkeypatch.setattr(stream_worker, "POLL_S", 0.01)


def whole_cache(folder: Path, codec: Codec = "plain") -> CacheReader:
    """The same cache, all of it in a store of its own."""
    plan = stream_plan(codec)
    store = LocalStore(folder)
    return CacheReader(store, fill(store, plan, Toy(plan)))


def walk(reader: CacheReader, first: int, stop: int) -> list[CachedSample]:
    """The samples of ticks first..stop-1, from the whole cache."""
    orders = [[int(i) for i in reader.order(SEED, epoch=e) if i in MEMBERS] for e in range(stop // len(MEMBERS) + 1)]
    places = [divmod(tick, len(MEMBERS)) for tick in range(first, stop)]
    return [reader.read(orders[epoch][place], epoch=epoch) for epoch, place in places]


def read_all(run: ToyRun) -> list[CachedSample]:
    return [sample for step in run.steps() for sample in step]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "waited for too long"
        time.sleep(0.02)


def stored_bytes(folder: Path) -> int:
    """Bytes of all files of a store but its private ones."""
    files = (path for path in folder.rglob("*") if ".draftsmith" not in path.parts)
    return sum(path.stat().st_size for path in files if path.is_file())


def assert_same(ours: list[CachedSample], theirs: list[CachedSample]) -> None:
    assert [sample.id for sample in ours] == [sample.id for sample in theirs]
    assert all(same(a, b) for a, b in zip(ours, theirs, strict=True))


def main() -> None:
    """A worker process; PART is i/n."""
    uri, part, start_id, first, stop, first_pass = sys.argv[1:]
    index, _, count = part.partition("/")
    store = open_store(uri)
    if "DIE_AFTER" in os.environ:
        store = DyingStore(store, die_after=int(os.environ["DIE_AFTER"]))
    plan = stream_plan()
    slots = stream_slots(plan, first=int(first), stop=int(stop), first_pass=first_pass == "yes")
    run_worker(store, plan, slots, part=(int(index), int(count)), start_id=start_id, toy=Toy(plan))


if __name__ == "__main__":
    main()
