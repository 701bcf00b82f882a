"""From cached samples to micro-batches: an assembled batch by hand, and the same samples at any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import pytest
import torch

from draftsmith.cache.reader import CachedSample, CacheReader
from draftsmith.errors import TrainingError
from draftsmith.nn.block import BlockBatch
from draftsmith.storage import open_store
from draftsmith.training.batches import BatchShape, bf16_tensor, make_block_batch, pack_rows
from draftsmith.training.loader import Planned, StepLoader, global_batch, micro_batches
from tests.unit.cache.toy import HIDDEN_SIZE, NUM_LAYERS, Toy, fill, toy_plan

SHAPE = BatchShape(
    block_size=3,
    num_anchors=10,
    gamma_w=4.0,
    dtype=torch.float32,
    device=torch.device("cpu"),
    context_shape=(NUM_LAYERS, HIDDEN_SIZE),
)


# Plans


def test_a_walk_through_the_epochs_by_hand() -> None:
    """Five members, four a step: steps cross epochs, and every epoch has an order of its own."""
    orders = {0: [3, 0, 4, 1, 2], 1: [2, 1, 0, 3, 4], 2: [0, 1, 2, 3, 4]}
    found = [
        [(item.sample, item.epoch) for item in global_batch(step, size=4, num_members=5, order=orders.__getitem__)]
        for step in range(3)
    ]
    assert found == [
        [(3, 0), (0, 0), (4, 0), (1, 0)],
        [(2, 0), (2, 1), (1, 1), (0, 1)],
        [(3, 1), (4, 1), (0, 2), (1, 2)],
    ]


def test_a_batch_larger_than_an_epoch_goes_around() -> None:
    found = global_batch(0, size=5, num_members=2, order=lambda _: [1, 0])
    assert [(item.sample, item.epoch) for item in found] == [(1, 0), (0, 0), (1, 1), (0, 1), (1, 2)]


@pytest.mark.parametrize("size", [1, 2, 5, 6, 7, 12])
@pytest.mark.parametrize("micro_batch", [1, 2, 4, 6])
def test_ranks_share_the_same_samples(size: int, micro_batch: int) -> None:
    planned = [Planned(sample, 0) for sample in range(size)]
    for num_ranks in (1, 2, 3, 5):
        shares = [
            micro_batches(planned, rank=rank, num_ranks=num_ranks, micro_batch=micro_batch) for rank in range(num_ranks)
        ]
        assert [item for share in shares for batch in share for item in batch] == planned
        assert len({len(share) for share in shares}) == 1  # every rank takes part in every micro-step
        assert all(len(batch) <= micro_batch for share in shares for batch in share)


def test_shares_by_hand() -> None:
    planned = [Planned(sample, 0) for sample in range(5)]
    shares = [
        [[item.sample for item in batch] for batch in micro_batches(planned, rank=rank, num_ranks=4, micro_batch=1)]
        for rank in range(4)
    ]
    assert shares == [[[0], [1]], [[2], [3]], [[4], []], [[], []]]


# An assembled batch


def sample_of(name: str, ids: list[int], supervised: str, *, seed: int) -> CachedSample:
    """Context value of token t, layer l, dimension d: 100 t + 10 l + d; last hidden of position p: p in every place."""
    num = len(ids)
    mask = np.array([int(letter) for letter in supervised], dtype=np.uint8)
    labels = np.array([p for p in range(num - 1) if mask[p] and mask[p + 1]], dtype=np.int64)
    token, layer, place = np.meshgrid(np.arange(num), np.arange(NUM_LAYERS), np.arange(HIDDEN_SIZE), indexing="ij")
    context = (seed + token + 4 * layer + 16 * place).astype(np.float32)  # small integers are exact in bfloat16
    hidden = np.repeat(labels[:, None], HIDDEN_SIZE, axis=1).astype(np.float32)

    def bits(values: np.ndarray) -> np.ndarray:
        return (values.view(np.uint32) >> 16).astype(np.uint16)

    return CachedSample(name, np.array(ids, dtype=np.int32), mask, bits(context), bits(hidden), labels)


FIRST = sample_of("a/t0", [10, 11, 12, 13, 14], "01111", seed=0)  # anchors 1, 2, 3 with 3, 2, 1 slots
SECOND = sample_of("b/t0", [20, 21, 22], "011", seed=1)  # anchor 1 with 1 slot
WITHOUT = sample_of("c/t0", [30, 31, 32, 33], "0101", seed=2)


def test_a_batch_by_hand() -> None:
    batch = make_block_batch([(FIRST, 0), (SECOND, 0)], shape=SHAPE, seed=1)
    assert batch.context.shape == (2, 5, NUM_LAYERS, HIDDEN_SIZE)
    assert batch.context[0, 3, 1].tolist() == [3 + 4 + 16 * place for place in range(HIDDEN_SIZE)]
    assert batch.context[1, 2, 0].tolist() == [1 + 2 + 16 * place for place in range(HIDDEN_SIZE)]
    assert batch.context[1, 3:].abs().sum() == 0
    assert batch.block_ids(3, mask_token_id=99).tolist() == [
        [11, 99, 99, 12, 99, 99, 13, 99, 99],
        [21, 99, 99, 99, 99, 99, 99, 99, 99],
    ]
    assert batch.block_positions(3).tolist() == [[1, 2, 3, 2, 3, 4, 3, 4, 5], [1, 2, 3, 0, 1, 2, 0, 1, 2]]
    assert batch.slot_index.tolist() == [0, 1, 2, 3, 4, 6, 9]
    assert batch.slot_number.tolist() == [0, 1, 2, 0, 1, 0, 0]
    assert batch.previous.tolist() == [11, 12, 13, 12, 13, 13, 21]
    assert batch.labels.tolist() == [12, 13, 14, 13, 14, 14, 22]
    assert batch.target_hidden[:, 0].tolist() == [1, 2, 3, 2, 3, 3, 1]  # the state that predicts each label
    e = math.exp(-0.25)
    assert batch.weights.tolist() == pytest.approx([1, e, e * e, 1, e, 1, 1])
    assert (batch.num_tokens, batch.num_anchors, batch.num_slots) == (8, 4, 7)
    mask = batch.visibility.mask(batch.block_positions(3), num_own=3, window=None)
    seen = ["".join(str(int(cell)) for cell in mask[b, slot]) for b, slot in ((0, 4), (1, 0), (1, 5))]
    assert seen == ["11000000111000", "10000111000000", "00000000111000"]


def test_fewer_anchors_than_candidates_are_those_of_the_samples_own_draw() -> None:
    shape = BatchShape(**{**vars(SHAPE), "num_anchors": 2})
    anchors = {}
    for epoch in range(12):
        batch = make_block_batch([(FIRST, epoch), (SECOND, 0)], shape=shape, seed=1)
        alone = make_block_batch([(FIRST, epoch)], shape=shape, seed=1)
        assert batch.num_anchors == 3
        assert torch.equal(batch.anchors[0], alone.anchors[0])
        anchors[epoch] = tuple(batch.anchors[0].tolist())
    assert set(anchors.values()) == {(1, 2), (1, 3), (2, 3)}


def test_a_sample_without_anchors_takes_no_slot() -> None:
    batch = make_block_batch([(WITHOUT, 0), (SECOND, 0)], shape=SHAPE, seed=1)
    assert (batch.num_anchors, batch.num_slots, batch.num_tokens) == (1, 1, 7)
    assert batch.slot_index.tolist() == [3]
    assert batch.labels.tolist() == [22]


def test_no_samples_give_a_batch_of_the_same_kind_without_slots() -> None:
    batch = make_block_batch([], shape=SHAPE, seed=1)
    assert batch.context.shape == (1, 1, NUM_LAYERS, HIDDEN_SIZE)
    assert batch.target_hidden.shape == (0, HIDDEN_SIZE)
    assert (batch.num_tokens, batch.num_anchors, batch.num_slots) == (0, 0, 0)
    assert batch.anchors.tolist() == [[-1]]
    assert not batch.visibility.mask(batch.block_positions(3), num_own=3, window=None)[:, :, 0].any()


def test_rows_are_packed_longest_first_and_read_in_order() -> None:
    assert pack_rows([5, 3, 4, 9, 2], row_tokens=8) == [[0, 1], [2, 4], [3]]
    assert pack_rows([5, 3], row_tokens=0) == [[0], [1]]
    assert pack_rows([], row_tokens=8) == []


def test_a_packed_row_by_hand() -> None:
    """FIRST, SECOND and WITHOUT in one row of twelve: positions start anew, slots keep their sample's own tokens."""
    shape = BatchShape(**{**vars(SHAPE), "row_tokens": 12})
    batch = make_block_batch([(FIRST, 0), (SECOND, 0), (WITHOUT, 0)], shape=shape, seed=1)
    assert batch.token_ids.tolist() == [[10, 11, 12, 13, 14, 20, 21, 22, 30, 31, 32, 33]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3]]
    assert batch.documents.tolist() == [[0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2]]
    assert batch.anchors.tolist() == [[1, 2, 3, 6]]
    assert batch.block_positions(2).tolist() == [[1, 2, 2, 3, 3, 4, 1, 2]]
    assert batch.block_ids(2, mask_token_id=99).tolist() == [[11, 99, 12, 99, 13, 99, 21, 99]]
    assert batch.slot_index.tolist() == [0, 1, 2, 3, 4, 6, 9]
    assert batch.labels.tolist() == [12, 13, 14, 13, 14, 14, 22]
    assert (batch.num_tokens, batch.num_anchors) == (12, 4)
    mask = batch.visibility.mask(batch.block_positions(1), num_own=0, window=None)
    seen = ["".join(str(int(cell)) for cell in row) for row in mask[0]]
    assert seen == ["100000000000", "110000000000", "111000000000", "000001000000"]


def test_every_packed_sample_gets_its_own_draw_of_anchors() -> None:
    shape = BatchShape(**{**vars(SHAPE), "num_anchors": 2, "row_tokens": 100})
    batch = make_block_batch([(FIRST, 3), (SECOND, 3), (FIRST, 4)], shape=shape, seed=1)
    counts = torch.bincount(batch.documents[0, batch.anchors[0]])
    assert counts.tolist() == [2, 1, 2]


def test_all_hidden_states_may_be_kept() -> None:
    """With a row of last hidden states a position, the same rows are picked as with a row a label."""
    every = np.repeat(np.arange(5, dtype=np.float32)[:, None], HIDDEN_SIZE, axis=1)
    bits = (every.view(np.uint32) >> 16).astype(np.uint16)
    whole = CachedSample(FIRST.id, FIRST.input_ids, FIRST.supervised, FIRST.context, bits, np.arange(5))
    own, other = (make_block_batch([(sample, 0)], shape=SHAPE, seed=1) for sample in (FIRST, whole))
    assert torch.equal(own.target_hidden, other.target_hidden)


def test_bfloat16_bits_are_not_changed() -> None:
    values = torch.tensor([1.5, -0.0, 3e38, 1e-40, float("inf")], dtype=torch.bfloat16)
    bits = values.view(torch.int16).numpy().view(np.uint16)
    assert torch.equal(bf16_tensor(bits).view(torch.int16), values.view(torch.int16))


def test_bits_that_may_not_be_written_to_are_copied() -> None:
    """torch knows no read-only tensors: writing to one of them would change the shard under everybody's feet."""
    bits = np.array([0x3F80, 0x4000], dtype=np.uint16)
    bits.setflags(write=False)
    tensor = bf16_tensor(bits)
    tensor.zero_()
    assert bits.tolist() == [0x3F80, 0x4000]


# From a cache on disk


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> CacheReader:
    store, plan = open_store(str(tmp_path_factory.mktemp("store"))), toy_plan()
    return CacheReader(store, fill(store, plan, Toy(plan)))


def loader_of(
    reader: CacheReader | Recording,
    *,
    rank: int = 0,
    num_ranks: int = 1,
    members: list[int] | None = None,
    seed: int = 5,
    micro_batch: int = 2,
) -> StepLoader:
    return StepLoader(
        reader, members=list(range(len(reader.samples))) if members is None else members, shape=SHAPE, size=7,
        micro_batch=micro_batch, seed=seed, rank=rank, num_ranks=num_ranks,
    )  # fmt: skip


def slots_of(batches: list[BlockBatch]) -> list[tuple[int, int, float]]:
    """Label, slot number and a number of the hidden state of every slot, in order."""
    return [
        (label, slot, round(float(hidden[0]), 5))
        for batch in batches
        for label, slot, hidden in zip(
            batch.labels.tolist(), batch.slot_number.tolist(), batch.target_hidden, strict=True
        )
    ]


def test_a_step_holds_the_same_slots_at_any_number_of_ranks_and_micro_batch_size(reader: CacheReader) -> None:
    for step in (0, 2, 5):
        expected = slots_of(loader_of(reader, micro_batch=7).load(step))
        assert len(expected) > 100
        for num_ranks in (1, 2, 3):
            parts = [loader_of(reader, rank=rank, num_ranks=num_ranks).load(step) for rank in range(num_ranks)]
            assert [slot for part in parts for slot in slots_of(part)] == expected


def test_steps_are_those_loaded_one_by_one_and_may_start_anywhere(reader: CacheReader) -> None:
    loader = loader_of(reader)
    found = [(step, slots_of(batches)) for step, batches in loader.steps(2, stop=5)]
    assert found == [(step, slots_of(loader.load(step))) for step in (2, 3, 4)]
    assert list(loader.steps(3, stop=3)) == []


class Recording:
    """A source that keeps what it was told beforehand, and what was read of it then."""

    def __init__(self, reader: CacheReader) -> None:
        self.reader, self.told, self.read_then = reader, list[int](), list[tuple[int, int]]()
        self.samples, self.spec, self.facts = reader.samples, reader.spec, reader.facts

    def order(self, seed: int, *, epoch: int) -> np.ndarray:
        return self.reader.order(seed, epoch=epoch)

    def follow(self, walk: Iterable[int]) -> None:
        self.told = list(walk)

    def read(self, index: int, *, epoch: int) -> CachedSample:
        self.read_then.append((index, epoch))
        return self.reader.read(index, epoch=epoch)


@pytest.mark.parametrize(("rank", "num_ranks"), [(0, 1), (0, 2), (1, 2), (2, 3)])
def test_the_source_is_told_what_this_rank_will_read(reader: CacheReader, rank: int, num_ranks: int) -> None:
    """Seven steps of 7 out of 18 samples: through three epochs."""
    source = Recording(reader)
    loader = loader_of(source, rank=rank, num_ranks=num_ranks)
    assert len(list(loader.steps(1, stop=8))) == 7
    assert source.told == [index for index, _ in source.read_then]
    orders = [reader.order(5, epoch=epoch).tolist() for epoch in range(4)]
    whole = [(index, epoch) for epoch in range(4) for index in orders[epoch]]
    share = -(-7 // num_ranks)
    steps = [whole[step * 7 : step * 7 + 7] for step in range(1, 8)]
    assert source.read_then == [item for step in steps for item in step[rank * share : (rank + 1) * share]]


def test_an_epoch_holds_every_member_once_and_no_other_sample(reader: CacheReader) -> None:
    members = [1, 4, 6, 7, 9, 12, 17]
    loader = loader_of(reader, members=members)
    counts = [sum(batch.num_tokens for batch in loader.load(step)) for step in (0, 1, 2)]
    assert counts == [sum(reader.samples[index].num_tokens for index in members)] * 3
    assert slots_of(loader.load(0)) != slots_of(loader.load(1))
    assert slots_of(loader.load(0)) != slots_of(loader_of(reader, members=members, seed=6).load(0))


def test_an_error_while_reading_ahead_is_raised_where_its_step_is_due(
    reader: CacheReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader, load = loader_of(reader), StepLoader.load

    def failing(self: StepLoader, step: int) -> list[BlockBatch]:
        if step == 2:
            raise TrainingError("shard lost")
        return load(self, step)

    monkeypatch.setattr(StepLoader, "load", failing)
    seen = []
    with pytest.raises(TrainingError, match="shard lost"):  # noqa: PT012 (the steps before must arrive)
        for step, _ in loader.steps(0, stop=4):
            seen.append(step)
    assert seen == [0] or seen == [0, 1]


def test_no_members_are_refused(reader: CacheReader) -> None:
    with pytest.raises(TrainingError, match=r"no training sample .*params.yaml: train.min_supervised"):
        loader_of(reader, members=[])
