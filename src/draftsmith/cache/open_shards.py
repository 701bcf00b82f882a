"""The few shards of a cache that are in memory, and the next ones, which threads open while these are used."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from numpy.typing import NDArray

from draftsmith.errors import CacheError

SHARDS_AHEAD = 1
# A walk over few shards and many epochs is not looked through to its end.
MOST_COMING = 1 << 14

Rows = dict[str, NDArray[Any]]


class OpenShards:
    """Decoded shards by number; safe to share among threads.

    At most `most` are held, the ones used last; while a walk is followed SHARDS_AHEAD more, and then those that the
    walk needs next are held and opened ahead by `threads` threads.
    """

    def __init__(self, load: Callable[[int], Rows], *, most: int, threads: int) -> None:
        """`load` opens one shard; its errors are raised where that shard is used, and the next use tries again."""
        for name, value in (("max_open_shards", most), ("threads", threads)):
            if value < 1:
                raise CacheError(f"{name} must be >= 1", got=value)
        self._load, self._most = load, most
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="shards")
        self._lock = threading.Lock()
        self._open: OrderedDict[int, Future[Rows]] = OrderedDict()
        self._walk: Iterator[tuple[int, int]] | None = None
        self._coming: deque[tuple[int, int]] = deque()
        self._uses: dict[int, int] = {}

    def follow(self, walk: Iterator[tuple[int, int]]) -> None:
        """From now on uses come in the order of `walk`: pairs (sample index, shard), drawn as far ahead as needed.

        Other uses in between are served as well. A new walk replaces the one before.
        """
        with self._lock:
            self._walk = walk
            self._coming.clear()
            self._uses.clear()
            self._draw()
            self._open_ahead(kept=None)

    def rows(self, shard: int, *, index: int) -> Rows:
        """The arrays of a shard, for its sample of this index; waits until they are there."""
        with self._lock:
            if self._coming and self._coming[0] == (index, shard):
                self._coming.popleft()
                self._uses[shard] -= 1
                if self._uses[shard] == 0:
                    del self._uses[shard]
                self._draw()
            if shard not in self._open:
                self._make_room(kept=None)
                self._open[shard] = self._pool.submit(self._load, shard)
            self._open.move_to_end(shard)
            opened = self._open[shard]
            self._open_ahead(kept=shard)
        try:
            return opened.result()
        except BaseException:
            with self._lock:
                if self._open.get(shard) is opened:
                    del self._open[shard]
            raise

    def close(self) -> None:
        """End the threads; shards that nobody waits for any more are not opened."""
        self._pool.shutdown(cancel_futures=True)

    @property
    def _limit(self) -> int:
        return self._most if self._walk is None else self._most + SHARDS_AHEAD

    def _draw(self) -> None:
        """Draw from the walk until it names as many different shards as may be held."""
        while self._walk is not None and len(self._uses) < self._limit and len(self._coming) < MOST_COMING:
            step = next(self._walk, None)
            if step is None:
                return
            self._coming.append(step)
            self._uses[step[1]] = self._uses.get(step[1], 0) + 1

    def _make_room(self, *, kept: int | None) -> bool:
        """Let go of shards until one more may be held: of those that the walk does not need, but for `kept`; if all
        are needed, of the one used longest ago (kept is None) or of none (then False)."""
        while len(self._open) >= self._limit:
            spare = next((shard for shard in self._open if shard not in self._uses and shard != kept), None)
            if spare is None and kept is not None:
                return False
            del self._open[next(iter(self._open)) if spare is None else spare]
        return True

    def _open_ahead(self, *, kept: int | None) -> None:
        """Open what the walk needs next in place of what it needs no more.

        The shard in use is `kept` until the next use: its memory is not free before that anyway.
        """
        for shard in self._uses:
            if shard not in self._open:
                if not self._make_room(kept=kept):
                    return
                self._open[shard] = self._pool.submit(self._load, shard)
