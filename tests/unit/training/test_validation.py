"""Expected accepted length and validation against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.drafters.base import LossSums
from draftsmith.nn.block import BlockBatch
from draftsmith.params import LossWeights
from draftsmith.training.validation import Validation, expected_lengths, validate


def test_expected_lengths_by_hand() -> None:
    """Three blocks of two slots; the second has one counted slot only and is left out.

    1 + 0.5 + 0.5 * 0.4 = 1.7 and 1 + 1 + 1 = 3.
    """
    acceptance = torch.tensor([0.5, 0.4, 0.9, 1.0, 1.0])
    got = expected_lengths(acceptance, slot_index=torch.tensor([0, 1, 2, 4, 5]), block_size=2)
    assert got.tolist() == pytest.approx([1.7, 3.0])


def test_blocks_in_between_and_behind_may_be_empty() -> None:
    got = expected_lengths(torch.tensor([0.25, 0.5]), slot_index=torch.tensor([6, 7]), block_size=2)
    assert got.tolist() == pytest.approx([1.375])
    assert expected_lengths(torch.zeros(0), slot_index=torch.zeros(0, dtype=torch.int64), block_size=2).tolist() == []


class Scripted:
    """A drafter whose acceptance and confidence per slot are given."""

    def __init__(self, per_batch: list[tuple[list[float], list[float] | None]]) -> None:
        self.per_batch, self.modes = list(per_batch), list[str]()
        confident = self.per_batch[0][1] is not None
        self.config: Any = type("Config", (), {"block_size": 2, "confidence": confident})()

    def train(self) -> None:
        self.modes.append("train")

    def eval(self) -> None:
        self.modes.append("eval")

    def losses(self, batch: BlockBatch, *, weights: LossWeights) -> LossSums:
        acceptance, confidence = self.per_batch.pop(0)
        zero = torch.zeros(())
        said = None if confidence is None else torch.tensor(confidence)
        return LossSums(zero, zero, zero, None, zero, torch.tensor(acceptance), zero, said, batch.slot_number)


class OneRank:
    def sum(self, values: Tensor) -> Tensor:
        return values


def batch_with(slots: list[int]) -> BlockBatch:
    """Counted slots at these places of (B * A * K)."""
    index = torch.tensor(slots, dtype=torch.int64)
    nothing = torch.zeros(0)
    return BlockBatch(
        token_ids=nothing, positions=nothing, documents=nothing, context=nothing, hidden=None, anchors=nothing,
        slot_index=index, previous=index, labels=index, target_hidden=nothing, weights=nothing,
        slot_number=index % 2, thinning=nothing, num_tokens=0, num_anchors=0,
    )  # fmt: skip


def test_validation_by_hand() -> None:
    """Two batches: whole blocks (0.5, 0.4) and (1, 1), one half block 0.9; a batch without slots is passed over."""
    drafter: Any = Scripted([([0.5, 0.4, 0.9], [0.6, 0.5, 0.9]), ([1.0, 1.0], [0.7, 0.9])])
    engine: Any = OneRank()
    batches = [batch_with([0, 1, 2]), batch_with([]), batch_with([0, 1])]
    got = validate(drafter, batches=batches, engine=engine)
    expected = Validation(
        expected_accepted_length=(1.7 + 3.0) / 2,
        acceptance=((0.5 + 0.9 + 1.0) / 3, (0.4 + 1.0) / 2),
        confidence_bias=((0.1 + 0.0 - 0.3) / 3, (0.1 - 0.1) / 2),
        num_blocks=2,
    )
    assert got.expected_accepted_length == pytest.approx(expected.expected_accepted_length)
    assert got.acceptance == pytest.approx(expected.acceptance)
    assert got.confidence_bias == pytest.approx(expected.confidence_bias, abs=1e-7)
    assert got.num_blocks == 2
    assert drafter.modes == ["eval", "train"]


def test_ranks_are_added_before_they_are_divided() -> None:
    """The other rank brings the same sums again: every mean stays, the number of blocks doubles."""

    class TwoRanks:
        def sum(self, values: Tensor) -> Tensor:
            return values * 2

    def one(engine: Any) -> Validation:
        drafter: Any = Scripted([([0.5, 0.4], None)])
        return validate(drafter, batches=[batch_with([0, 1])], engine=engine)

    alone, both = one(OneRank()), one(TwoRanks())
    assert replace(both, num_blocks=1) == alone
    assert (both.num_blocks, alone.confidence_bias) == (2, None)
