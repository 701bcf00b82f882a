"""From cached samples to micro-batches: an order that depends on (seed, step) alone, never on the number of ranks.

Letters: B samples of a micro-batch, T tokens of its longest, A anchors, K block size, L layers, D hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from draftsmith.cache.reader import CachedSample, SampleSource
from draftsmith.errors import TrainingError
from draftsmith.nn.block import BlockBatch, block_mask, draw_anchors, num_valid_slots, position_weights

ORDERS_KEPT = 2


@dataclass(frozen=True)
class BatchShape:
    """What a loader needs to know of the drafter and the recipe; `context_shape` is (L, D)."""

    block_size: int
    num_anchors: int
    gamma_w: float
    mask_token_id: int
    dtype: torch.dtype
    device: torch.device
    context_shape: tuple[int, int]


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


def bf16_tensor(bits: NDArray[np.uint16]) -> torch.Tensor:
    """bfloat16 bits as uint16 -> a bfloat16 tensor of the same shape; bits that may not be written to are copied."""
    own = bits if bits.flags.writeable else bits.copy()
    return torch.from_numpy(own.view(np.int16)).view(torch.bfloat16)


def make_block_batch(samples: Sequence[tuple[CachedSample, int]], *, shape: BatchShape, seed: int) -> BlockBatch:
    """Assemble samples (with the epoch of each) into one padded micro-batch; anchors from (seed, epoch, sample id).

    An empty list gives a batch with one token, no anchors and no slots.
    """
    size, num_samples = shape.block_size, max(1, len(samples))
    drawn = [
        draw_anchors(sample.supervised, num=shape.num_anchors, seed=seed, epoch=epoch, sample_id=sample.id)
        for sample, epoch in samples
    ]
    longest = max((len(sample.input_ids) for sample, _ in samples), default=1)
    widest = max((len(anchors) for anchors in drawn), default=0) or 1
    context_bits = np.zeros((num_samples, longest, *shape.context_shape), dtype=np.uint16)
    no_hidden = torch.zeros(0, shape.context_shape[1], dtype=torch.bfloat16)
    anchors = np.full((num_samples, widest), -1, dtype=np.int64)
    block_ids = np.full((num_samples, widest, size), shape.mask_token_id, dtype=np.int64)
    lengths = np.ones(num_samples, dtype=np.int64)
    index, previous, labels, numbers, hidden = [], [], [], [], []
    for b, (sample, _) in enumerate(samples):
        own = drawn[b]
        length = len(sample.input_ids)
        lengths[b] = length
        context_bits[b, :length] = sample.context
        anchors[b, : len(own)] = own
        block_ids[b, : len(own), 0] = sample.input_ids[own]
        valid = num_valid_slots(sample.supervised, own, block_size=size)
        slots = np.arange(size)
        which, slot = np.nonzero(slots < valid[:, None])
        position = own[which] + slot
        index.append((b * widest + which) * size + slot)
        previous.append(sample.input_ids[position])
        labels.append(sample.input_ids[position + 1])
        numbers.append(slot)
        rows = np.searchsorted(sample.label_positions, position)
        hidden.append(bf16_tensor(sample.last_hidden[rows]))
    number = np.concatenate(numbers) if numbers else np.zeros(0, dtype=np.int64)
    weights = position_weights(size, gamma_w=shape.gamma_w)[number]
    anchor_tensor = torch.from_numpy(anchors)
    positions = (anchor_tensor.clamp(min=0).unsqueeze(-1) + torch.arange(size)).flatten(1)
    mask = block_mask(anchor_tensor, lengths=torch.from_numpy(lengths), num_tokens=longest, block_size=size)

    def joined(parts: list[NDArray[np.int64]]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64))

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(shape.device, non_blocking=True)

    return BlockBatch(
        context=bf16_tensor(context_bits).to(shape.device, shape.dtype),
        block_ids=moved(torch.from_numpy(block_ids).flatten(1)),
        block_positions=moved(positions),
        mask=moved(mask),
        slot_index=moved(joined(index)),
        previous=moved(joined(previous)),
        labels=moved(joined(labels)),
        target_hidden=torch.cat([no_hidden, *hidden]).to(shape.device, shape.dtype),
        weights=moved(torch.from_numpy(weights)),
        slot_number=moved(torch.from_numpy(number)),
        num_tokens=sum(len(sample.input_ids) for sample, _ in samples),
        num_anchors=sum(len(own) for own in drawn),
    )


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
