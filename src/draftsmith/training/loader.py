"""From cached samples to micro-batches: an order that depends on (seed, step) alone, never on the number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftsmith.cache.reader import SampleSource
from draftsmith.errors import TrainingError
from draftsmith.nn.block import BlockBatch
from draftsmith.training.batches import BatchShape, make_block_batch

ORDERS_KEPT = 2


@dataclass(frozen=True)
class Planned:
    """One sample of a step: its index in the cache and the epoch that its anchors are drawn in."""

    sample: int
    epoch: int


def global_batch(
    step: int, *, size: int, num_members: int, order: Callable[[int], Sequence[int] | NDArray[np.int64]]
) -> list[Planned]:
    """The `size` samples of update `step`: a walk through the epochs' orders, the same at any number of ranks.

    `order` gives the `num_members` samples of an epoch in that epoch's order.
    """
    planned = []
    for position in range(step * size, (step + 1) * size):
        epoch, offset = divmod(position, num_members)
        planned.append(Planned(int(order(epoch)[offset]), epoch))
    return planned


def micro_batches(
    planned: Sequence[Planned], *, rank: int, num_ranks: int, micro_batch: int
) -> list[Sequence[Planned]]:
    """This rank's share of a global batch, cut into micro-batches; every rank gets as many, some may be empty."""
    share = math.ceil(len(planned) / num_ranks)
    count = num_micro_batches(len(planned), num_ranks=num_ranks, micro_batch=micro_batch)
    mine = planned[rank * share : (rank + 1) * share]
    return [mine[index * micro_batch : (index + 1) * micro_batch] for index in range(count)]


def num_micro_batches(size: int, *, num_ranks: int, micro_batch: int) -> int:
    """Micro-batches that every rank runs for a global batch of `size` samples."""
    return math.ceil(math.ceil(size / num_ranks) / micro_batch)


class StepLoader:
    """Yields this rank's micro-batches of each step, the next step being prepared by a thread meanwhile."""

    def __init__(
        self,
        source: SampleSource,
        *,
        members: Sequence[int],
        shape: BatchShape,
        size: int,
        micro_batch: int,
        seed: int,
        rank: int,
        num_ranks: int,
    ) -> None:
        """`members`: cache indices that training may use. Raises TrainingError if there are none."""
        if not members:
            raise TrainingError(
                "no training sample has enough supervised tokens",
                expected="at least one",
                where="params.yaml: train.min_supervised",
            )
        self.source, self.shape = source, shape
        self._is_member = np.zeros(len(source.samples), dtype=bool)
        self._is_member[np.asarray(members, dtype=np.int64)] = True
        self._num_members = int(self._is_member.sum())
        self.size, self.micro_batch, self.seed = size, micro_batch, seed
        self.rank, self.num_ranks = rank, num_ranks
        self._orders: dict[int, NDArray[np.int64]] = {}

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self._orders:
            # Two are in use at once: the epoch that is read, and the one that shards are opened ahead for.
            while len(self._orders) >= ORDERS_KEPT:
                del self._orders[min(self._orders)]
            order = self.source.order(self.seed, epoch=epoch)
            self._orders[epoch] = order[self._is_member[order]]
        return self._orders[epoch]

    def _shares(self, step: int) -> list[Sequence[Planned]]:
        planned = global_batch(step, size=self.size, num_members=self._num_members, order=self._order)
        return micro_batches(planned, rank=self.rank, num_ranks=self.num_ranks, micro_batch=self.micro_batch)

    def load(self, step: int) -> list[BlockBatch]:
        """The micro-batches of one step, for this rank."""
        return [
            make_block_batch(
                [(self.source.read(item.sample, epoch=item.epoch), item.epoch) for item in share],
                shape=self.shape, seed=self.seed,
            )
            for share in self._shares(step)
        ]  # fmt: skip

    def _walk(self, first: int, stop: int) -> Iterator[int]:
        """The indices that this rank reads in steps first..stop-1, in order."""
        return (item.sample for step in range(first, stop) for share in self._shares(step) for item in share)

    def steps(self, first: int, *, stop: int) -> Iterator[tuple[int, list[BlockBatch]]]:
        """(step, micro-batches) for first..stop-1; the source is told beforehand what will be read."""
        self.source.follow(self._walk(first, stop))
        with ThreadPoolExecutor(1, thread_name_prefix="loader") as pool:
            ahead = pool.submit(self.load, first) if first < stop else None
            for step in range(first, stop):
                assert ahead is not None
                ready = ahead.result()
                ahead = pool.submit(self.load, step + 1) if step + 1 < stop else None
                yield step, ready
