"""One shard behind: threads encode and write it while the calling thread computes the next one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event

from draftsmith.cache.plan import ShardPlan
from draftsmith.errors import DraftsmithError, ShardClaimedError


class Tally:
    """Running counts of one call of the writer, and the last refusal."""

    def __init__(self) -> None:
        self.num_written = self.num_done = self.num_tokens = 0
        self.refused: ShardClaimedError | None = None


class Behind:
    """The shard on its way to the store; all methods but `go_on` are for the thread that computes.

    A shard whose claim is lost on the way is added to `refused`; every other error is raised with the shard's number.
    """

    def __init__(self, tally: Tally, refused: list[ShardPlan]) -> None:
        self._tally, self._refused = tally, refused
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="shard")
        self._stopped = Event()
        self._current: tuple[ShardPlan, Future[None]] | None = None

    def __enter__(self) -> Behind:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """Let the shard be finished, whatever ended the one in front; but a stop of the process stops it as well."""
        if error is not None and not isinstance(error, Exception):
            self._stopped.set()
        try:
            self.wait()
        except Exception as second:
            if error is None:
                raise
            if not isinstance(second, InterruptedError):
                error.add_note(f"besides: {second}")
        finally:
            self._pool.shutdown()

    def start(self, shard: ShardPlan, work: Callable[[], None]) -> None:
        """Begin with the next shard, when the one before has been waited for."""
        self._current = shard, self._pool.submit(work)

    def check(self) -> None:
        """Raises the error of the shard if it has failed by now."""
        if self._current is not None and self._current[1].done():
            self.wait()

    def wait(self) -> None:
        """Wait until the shard is committed, and count it. Raises its error."""
        if self._current is None:
            return
        shard, future = self._current
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
            # After an interrupt the thread is waited for once more.
            if future.done():
                self._current = None

    def go_on(self) -> None:
        """For the threads, before each write. Raises InterruptedError if the process was told to stop."""
        if self._stopped.is_set():
            raise InterruptedError("the process was told to stop")
