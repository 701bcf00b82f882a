"""Shards behind: threads encode and write a computed shard while the calling thread computes the next one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Condition, Event, Lock

from draftsmith.cache.plan import ShardPlan
from draftsmith.errors import DraftsmithError, ShardClaimedError

MOST_COMPUTED = 2  # and not encoded yet, the one that is being computed among them
MOST_BEHIND = 4


class Tally:
    """Running counts of one call of the writer, and the last refusal."""

    def __init__(self) -> None:
        self.num_written = self.num_done = self.num_tokens = 0
        self.refused: ShardClaimedError | None = None


class Behind:
    """Shards on their way to the store; `go_on`, `encoded` and `encoding` are for threads, all else for who computes.

    That thread computes a shard while at most one waits to be encoded, or is: the numbers of two shards are in memory
    at most. Of those that are encoded as many are being written as MOST_BEHIND leaves.
    A shard whose claim is lost on the way is added to `refused`; every other error is raised with the shard's number.
    """

    def __init__(self, tally: Tally, refused: list[ShardPlan]) -> None:
        self._tally, self._refused = tally, refused
        self._pool = ThreadPoolExecutor(MOST_BEHIND, thread_name_prefix="shard")
        self._stopped = Event()
        self._under_way: list[tuple[ShardPlan, Future[None]]] = []
        self._computed: set[int] = set()
        self._changed = Condition()
        # One shard is encoded at a time, by many threads; the one before it is written meanwhile.
        self.encoding = Lock()

    def __enter__(self) -> Behind:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """Let the shards be finished, whatever ended the one in front; but a stop of the process stops them as well."""
        if error is not None and not isinstance(error, Exception):
            self._stopped.set()
        try:
            while self._under_way:
                try:
                    self.wait()
                except Exception as second:
                    if error is None:
                        raise
                    if not isinstance(second, InterruptedError):
                        error.add_note(f"besides: {second}")
        finally:
            self._pool.shutdown()

    def make_room(self) -> None:
        """Wait until one more shard may be computed. Raises the error of one behind."""
        while len(self._under_way) >= MOST_BEHIND:
            self._settle(*self._under_way[0])
        with self._changed:
            self._changed.wait_for(lambda: len(self._computed) < MOST_COMPUTED)
        self.check()

    def start(self, shard: ShardPlan, work: Callable[[], None]) -> None:
        """Begin to write a shard that was computed; there is room."""

        def run() -> None:
            try:
                work()
            finally:
                self.encoded(shard)

        with self._changed:
            self._computed.add(shard.index)
        self._under_way.append((shard, self._pool.submit(run)))

    def encoded(self, shard: ShardPlan) -> None:
        """For the threads: the shard's numbers are in memory no more."""
        with self._changed:
            self._computed.discard(shard.index)
            self._changed.notify()

    def check(self) -> None:
        """Raises the error of a shard that has failed by now."""
        for shard, future in [item for item in self._under_way if item[1].done()]:
            self._settle(shard, future)

    def wait(self) -> None:
        """Wait until all shards are committed. Raises the error of the first that is not."""
        while self._under_way:
            self._settle(*self._under_way[0])

    def go_on(self) -> None:
        """For the threads, before each write. Raises InterruptedError if the process was told to stop."""
        if self._stopped.is_set():
            raise InterruptedError("the process was told to stop")

    def _settle(self, shard: ShardPlan, future: Future[None]) -> None:
        """Wait for a shard, and count it."""
        try:
            future.result()
        except ShardClaimedError as error:
            self._refused.append(shard)
            self._tally.refused = error
        except DraftsmithError as error:
            what = f"shard {shard.index}: {error.what}"
            raise type(error)(what, got=error.got, expected=error.expected, where=error.where) from error
        except Exception as error:
            error.add_note(f"while shard {shard.index} was written")
            raise
        else:
            self._tally.num_written += 1
            self._tally.num_tokens += shard.num_tokens
        finally:
            # After an interrupt of this thread it is waited for once more.
            if future.done():
                self._under_way.remove((shard, future))
