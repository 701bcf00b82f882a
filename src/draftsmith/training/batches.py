"""From cached samples to one micro-batch: rows of one or more samples, their anchors, and the slots that count.

Letters: B rows, T tokens of the longest row, A most anchors of a row, K block size, L layers, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from draftsmith.cache.reader import CachedSample
from draftsmith.nn.block import BlockBatch, candidate_anchors, draw_anchors, num_valid_slots, position_weights


@dataclass(frozen=True)
class BatchShape:
    """What a loader needs to know of the drafter and the recipe; `context_shape` is (L, D).

    `row_tokens`: samples are packed into rows of at most so many tokens (0: a row a sample). `last_hidden`: keep the
    target's last hidden state of every token, for drafters that read it.
    """

    block_size: int
    num_anchors: int
    gamma_w: float
    dtype: torch.dtype
    device: torch.device
    context_shape: tuple[int, int]
    row_tokens: int = 0
    last_hidden: bool = False


def bf16_tensor(bits: NDArray[np.uint16]) -> torch.Tensor:
    """bfloat16 bits as uint16 -> a bfloat16 tensor of the same shape; bits that may not be written to are copied."""
    own = bits if bits.flags.writeable else bits.copy()
    return torch.from_numpy(own.view(np.int16)).view(torch.bfloat16)


def pack_rows(lengths: Sequence[int], *, row_tokens: int) -> list[list[int]]:
    """Which samples share a row: first fit, longest first; a sample longer than a row has one of its own.

    Rows come in the order of their first sample, and so do the samples within a row.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        row = next((row for row, free in enumerate(room) if free >= lengths[index]), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(row_tokens)
        rows[row].append(index)
        room[row] -= lengths[index]
    return sorted(sorted(row) for row in rows)


def make_block_batch(samples: Sequence[tuple[CachedSample, int]], *, shape: BatchShape, seed: int) -> BlockBatch:
    """Assemble samples (with the epoch of each) into one padded micro-batch; anchors from (seed, epoch, sample id).

    Every sample gets its own draw of anchors, packed or not. An empty list gives a batch with one token, no anchors
    and no slots.
    """
    size = shape.block_size
    lengths = [len(sample.input_ids) for sample, _ in samples]
    rows = pack_rows(lengths, row_tokens=shape.row_tokens)
    drawn = [
        draw_anchors(sample.supervised, num=shape.num_anchors, seed=seed, epoch=epoch, sample_id=sample.id)
        for sample, epoch in samples
    ]
    num_rows = max(1, len(rows))
    longest = max((sum(lengths[index] for index in row) for row in rows), default=1)
    widest = max((sum(len(drawn[index]) for index in row) for row in rows), default=0) or 1
    token_ids = np.zeros((num_rows, longest), dtype=np.int64)
    positions = np.zeros((num_rows, longest), dtype=np.int64)
    documents = np.full((num_rows, longest), -1, dtype=np.int64)
    anchors = np.full((num_rows, widest), -1, dtype=np.int64)
    # As bits, so that samples, which may be read-only, are copied once.
    context = np.zeros((num_rows, longest, *shape.context_shape), dtype=np.uint16)
    all_hidden = np.zeros((num_rows, longest, shape.context_shape[1]), dtype=np.uint16)
    index, previous, labels, numbers, thinning = [], [], [], [], []
    hidden = [torch.zeros(0, shape.context_shape[1], dtype=torch.bfloat16)]
    for b, row in enumerate(rows):
        start = first = 0
        for document, which in enumerate(row):
            sample, own = samples[which][0], drawn[which]
            stop = start + lengths[which]
            token_ids[b, start:stop] = sample.input_ids
            positions[b, start:stop] = np.arange(lengths[which])
            documents[b, start:stop] = document
            anchors[b, first : first + len(own)] = start + own
            context[b, start:stop] = sample.context
            if shape.last_hidden:
                all_hidden[b, start:stop] = sample.last_hidden
            valid = num_valid_slots(sample.supervised, own, block_size=size)
            block, slot = np.nonzero(np.arange(size) < valid[:, None])
            position = own[block] + slot
            index.append((b * widest + first + block) * size + slot)
            previous.append(sample.input_ids[position])
            labels.append(sample.input_ids[position + 1])
            numbers.append(slot)
            thinning.append(np.full(len(slot), len(candidate_anchors(sample.supervised)) / max(1, len(own))))
            places = np.searchsorted(sample.label_positions, position)
            hidden.append(bf16_tensor(sample.last_hidden[places]))
            start, first = stop, first + len(own)
    number = np.concatenate(numbers) if numbers else np.zeros(0, dtype=np.int64)

    def joined(parts: list[NDArray[np.int64]]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64))

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(shape.device, non_blocking=True)

    return BlockBatch(
        token_ids=moved(torch.from_numpy(token_ids)),
        positions=moved(torch.from_numpy(positions)),
        documents=moved(torch.from_numpy(documents)),
        context=bf16_tensor(context).to(shape.device, shape.dtype),
        hidden=bf16_tensor(all_hidden).to(shape.device, shape.dtype) if shape.last_hidden else None,
        anchors=moved(torch.from_numpy(anchors)),
        slot_index=moved(joined(index)),
        previous=moved(joined(previous)),
        labels=moved(joined(labels)),
        target_hidden=torch.cat(hidden).to(shape.device, shape.dtype),
        weights=moved(torch.from_numpy(position_weights(size, gamma_w=shape.gamma_w)[number])),
        slot_number=moved(torch.from_numpy(number)),
        thinning=moved(torch.from_numpy(np.concatenate([np.zeros(0), *thinning]).astype(np.float32))),
        num_tokens=sum(lengths),
        num_anchors=sum(len(own) for own in drawn),
    )
