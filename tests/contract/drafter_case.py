"""A drafter under the contract: its losses and samples, and its decoding form walked step by step with true tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from draftsmith.cache.reader import CachedSample
from draftsmith.drafters.base import Drafter, LossSums, Observation, Proposal
from draftsmith.nn.block import BlockBatch, candidate_anchors
from draftsmith.nn.kv import FlatBatch, KeyValueRows
from draftsmith.training.batches import make_block_batch
from tests.tiny_models import WEIGHTS, batch_shape, make_sample, random_ids, widened

CPU = torch.device("cpu")


@dataclass
class Case:
    """A drafter (a row of tiny_models.KINDS) on a family's tiny target: its folder, Hugging Face's model of it, and a
    random drafter."""

    kind: str
    folder: Path
    model: Any
    drafter: Any

    @property
    def size(self) -> int:
        """K."""
        return int(self.drafter.config.block_size)

    @property
    def window(self) -> int:
        """How many positions back a query sees, its own included."""
        return self.drafter.config.windows[0] or 10**6

    @property
    def reaches(self) -> int:
        """Positions of the row that makes the first slot, seen from the anchor: its own, or the one before."""
        return 0 if self.is_block else 1

    @property
    def is_block(self) -> bool:
        """Whether the drafter runs blocks of masks."""
        return self.kind.startswith(("dspark", "dflash"))

    def losses(self, batch: BlockBatch) -> LossSums:
        return self.drafter.losses(batch, weights=WEIGHTS[self.kind])

    def sample(self, length: int, *, seed: int, supervised: str | None = None) -> CachedSample:
        """A random text of `length` tokens; by default all but the first three are supervised."""
        mask = [int(letter) for letter in supervised or "0" * 3 + "1" * (length - 3)]
        every = self.drafter.reads_last_hidden
        return make_sample(self.model, random_ids(length, seed=seed), supervised=mask, name=f"s{seed}/t0", every=every)

    def batch(self, *samples: CachedSample, num_anchors: int = 64, row_tokens: int = 0) -> BlockBatch:
        """One micro-batch of all anchors of the samples (or `num_anchors` of each)."""
        shape = batch_shape(
            block_size=self.size,
            num_anchors=num_anchors,
            row_tokens=row_tokens,
            last_hidden=self.drafter.reads_last_hidden,
        )
        return make_block_batch([(sample, 0) for sample in samples], shape=shape, seed=0)


@dataclass
class Drafted:
    """Decoding of one block with true tokens put in for sampled ones: logits [K, V], confidence logits [K] or None."""

    logits: Tensor
    confidence: Tensor | None


class StepByStep:
    """The decoding form of a drafter over one or more samples, fed in uneven pieces, with teacher forcing."""

    def __init__(self, drafter: Drafter, samples: list[CachedSample]) -> None:
        self.drafter, self.samples = drafter, samples
        self.rows: KeyValueRows = drafter.new_rows()
        self.shown = [0] * len(samples)

    def show(self, stops: list[int], *, pieces: int) -> None:
        """Observe each sample up to its stop, in up to `pieces` pieces of different sizes."""
        for piece in range(1, pieces + 1):
            live = []
            for slot, stop in enumerate(stops):
                end = stop if piece == pieces else min(stop, self.shown[slot] + 1 + (3 * piece + 2 * slot) % 5)
                if end > self.shown[slot]:
                    live.append((slot, self.shown[slot], end))
            if live:
                self._observe(live)

    def _observe(self, live: list[tuple[int, int, int]]) -> None:
        batch = FlatBatch.make(
            [start for _, start, _ in live],
            counts=[end - start for _, start, end in live],
            slots=[slot for slot, _, _ in live],
            device=CPU,
        )
        ids = [torch.from_numpy(self.samples[slot].input_ids[start:end]).long() for slot, start, end in live]
        captured = [widened(self.samples[slot].context[start:end]) for slot, start, end in live]
        hidden = torch.zeros(batch.num_tokens, captured[0].shape[-1])
        if self.drafter.reads_last_hidden:
            hidden = torch.cat([widened(self.samples[slot].last_hidden[start:end]) for slot, start, end in live])
        self.drafter.observe(Observation(torch.cat(ids), torch.cat(captured), hidden, batch), rows=self.rows)
        for slot, _, end in live:
            self.shown[slot] = end

    def propose(self, anchors: list[int]) -> list[Drafted]:
        """Draft at one anchor per sample, each slot's token replaced by the true one."""
        seen: list[Tensor] = []

        def sample_true(logits: Tensor, slot: int) -> tuple[Tensor, None]:
            seen.append(logits)
            assert slot == len(seen) - 1
            return torch.tensor([self._true(r, anchor + slot + 1) for r, anchor in enumerate(anchors)]), None

        firsts = torch.tensor([int(sample.input_ids[a]) for sample, a in zip(self.samples, anchors, strict=True)])
        proposal: Proposal = self.drafter.propose(firsts, positions=anchors, rows=self.rows, sample=sample_true)
        assert proposal.probabilities is None
        logits = torch.stack(seen, dim=1)
        assert logits.dtype == torch.float32
        confidence = proposal.confidence_logits
        return [Drafted(logits[r], None if confidence is None else confidence[r]) for r in range(len(anchors))]

    def _true(self, row: int, position: int) -> int:
        ids = self.samples[row].input_ids
        return int(ids[position]) if position < len(ids) else 0


def drafted_step_by_step(case: Case, samples: Sequence[CachedSample]) -> Iterator[tuple[CachedSample, int, Drafted]]:
    """Every anchor of the samples with its block, drafted one after the other on rows that are never rebuilt.

    The samples sit side by side in the rows; those with few anchors stay at their last one.
    """
    anchors = [candidate_anchors(sample.supervised).tolist() for sample in samples]
    steps = StepByStep(case.drafter, samples)
    blocks: dict[tuple[int, int], Drafted] = {}
    for number in range(max(len(row) for row in anchors)):
        current = [row[min(number, len(row) - 1)] for row in anchors]
        steps.show(current, pieces=3)
        for row, drafted in enumerate(steps.propose(current)):
            blocks[row, current[row]] = drafted
    return ((sample, anchor, blocks[row, anchor]) for row, sample in enumerate(samples) for anchor in anchors[row])


def expected_losses(case: Case, blocks: Iterator[tuple[CachedSample, int, Drafted]]) -> dict[str, Any]:
    """The loss of section 6 (of section 7 for EAGLE-3) in float64 from step-by-step logits, in the batch's order."""
    soft = case.kind.startswith("eagle3")
    head = case.model.get_output_embeddings().weight.detach().double()
    softcap = case.model.config.to_dict().get("final_logit_softcapping")
    ce, tv, bce = 0.0, 0.0, 0.0
    acceptance, correct, confidence = [], [], []
    for sample, anchor, drafted in blocks:
        rows = dict(zip(sample.label_positions.tolist(), widened(sample.last_hidden).double(), strict=True))
        for slot in range(case.size):
            label_at = anchor + slot + 1
            if label_at >= len(sample.input_ids) or not sample.supervised[anchor : label_at + 1].all():
                break
            draft = drafted.logits[slot].double().softmax(-1)
            wanted = rows[anchor + slot] @ head.T
            wanted = (wanted if softcap is None else softcap * (wanted / softcap).tanh()).softmax(-1)
            label, w = int(sample.input_ids[label_at]), math.exp(-slot / 4.0)
            if soft:
                w = 0.8**slot
            accept = float(torch.minimum(draft, wanted).sum())
            ce += -w * (float(wanted @ draft.log()) if soft else math.log(float(draft[label])))
            tv += w * float((draft - wanted).abs().sum())
            acceptance.append(accept)
            # A soft label is the target's whole distribution: what is right is its own first place.
            correct.append(int(draft.argmax()) == (int(wanted.argmax()) if soft else label))
            if drafted.confidence is not None:
                c = 1 / (1 + math.exp(-float(drafted.confidence[slot])))
                bce -= w * (accept * math.log(c) + (1 - accept) * math.log(1 - c))
                confidence.append(c)
    row = WEIGHTS[case.kind]
    return {
        "total": (row.soft_ce if soft else row.ce) * ce + row.tv * tv + row.confidence * bce,
        "ce": ce, "tv": tv, "bce": bce,
        "acceptance": acceptance, "correct": correct, "confidence": confidence,
    }  # fmt: skip


def check_losses(losses: LossSums, expected: dict[str, Any]) -> None:
    for name in ("total", "ce", "tv"):
        assert float(getattr(losses, name)) == pytest.approx(expected[name], rel=1e-4), name
    np.testing.assert_allclose(losses.acceptance.numpy(), expected["acceptance"], atol=1e-5)
    assert losses.correct.tolist() == expected["correct"]
    if losses.confidence is None:
        assert losses.bce is None
        assert not expected["confidence"]
    else:
        assert losses.bce is not None
        assert float(losses.bce) == pytest.approx(expected["bce"], rel=1e-4)
        np.testing.assert_allclose(losses.confidence.numpy(), expected["confidence"], atol=1e-5)
