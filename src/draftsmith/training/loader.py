"""From cached samples to micro-batches: an order that depends on (seed, step) alone, never on the number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from draftsmith.cache.reader import CacheReader
from draftsmith.errors import TrainingError
from draftsmith.nn.block import BlockBatch
from draftsmith.training.batches import BatchShape, make_block_batch


@dataclass(frozen=True)
class Planned:
    """One sample of a step: its index in the cache and the epoch that its anchors are drawn in."""

    sample: int
    epoch: int


def global_batch(step: int, *, size: int, order: Callable[[int], Sequence[int]]) -> list[Planned]:
    """The `size` samples of update `step`: a walk through the epochs' orders, the same at any number of ranks."""
    first = order(0)
    planned = []
    for position in range(step * size, (step + 1) * size):
        epoch, offset = divmod(position, len(first))
        planned.append(Planned((first if epoch == 0 else order(epoch))[offset], epoch))
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
        reader: CacheReader,
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
        self.reader, self.shape = reader, shape
        self.members = frozenset(members)
        self.size, self.micro_batch, self.seed = size, micro_batch, seed
        self.rank, self.num_ranks = rank, num_ranks
        self._orders: dict[int, list[int]] = {}

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            self._orders[epoch] = [i for i in self.reader.order(self.seed, epoch=epoch) if i in self.members]
        return self._orders[epoch]

    def load(self, step: int) -> list[BlockBatch]:
        """The micro-batches of one step, for this rank."""
        planned = global_batch(step, size=self.size, order=self._order)
        shares = micro_batches(planned, rank=self.rank, num_ranks=self.num_ranks, micro_batch=self.micro_batch)
        return [
            make_block_batch(
                [(self.reader.read(item.sample), item.epoch) for item in share], shape=self.shape, seed=self.seed
            )
            for share in shares
        ]

    def steps(self, first: int, *, stop: int) -> Iterator[tuple[int, list[BlockBatch]]]:
        """(step, micro-batches) for first..stop-1."""
        with ThreadPoolExecutor(1, thread_name_prefix="loader") as pool:
            ahead = pool.submit(self.load, first) if first < stop else None
            for step in range(first, stop):
                assert ahead is not None
                ready = ahead.result()
                ahead = pool.submit(self.load, step + 1) if step + 1 < stop else None
                yield step, ready
