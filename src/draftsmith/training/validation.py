"""Expected accepted length on held-out answers of the target, from total variation (temperature 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.drafters.base import Drafter
from draftsmith.nn.block import BlockBatch
from draftsmith.params import LossWeights
from draftsmith.training.engine import TrainEngine

MEASURE = LossWeights(ce=1.0, tv=1.0)


@dataclass(frozen=True)
class Validation:
    """`expected_accepted_length`: 1 + mean over whole blocks of sum_k prod_{i<=k} a_i, bonus token included.

    `acceptance` [K]: mean analytic acceptance rate a_k (DSpark Eq. 8) per position; `confidence_bias` [K]: mean of
    predicted c_k - a_k, None without a confidence head; `num_blocks`: blocks whose K slots all count.
    """

    expected_accepted_length: float
    acceptance: tuple[float, ...]
    confidence_bias: tuple[float, ...] | None
    num_blocks: int


def expected_lengths(acceptance: Tensor, *, slot_index: Tensor, block_size: int) -> Tensor:
    """Per whole block, 1 + sum_k prod_{i<=k} a_i.

    acceptance [n] of the counted slots at slot_index [n] into (B * A * K); blocks with fewer than K counted slots
    are left out.
    """
    num_blocks = int(slot_index.max().item()) // block_size + 1 if len(slot_index) else 0
    grid = torch.full((num_blocks * block_size,), float("nan"), dtype=torch.float64)
    grid[slot_index.cpu()] = acceptance.double().cpu()
    grid = grid.view(-1, block_size)
    grid = grid[~grid.isnan().any(dim=1)]
    return 1 + grid.cumprod(dim=1).sum(dim=1)


@torch.no_grad()
def validate(drafter: Drafter, *, batches: Sequence[BlockBatch], engine: TrainEngine) -> Validation:
    """Measure a drafter on held-out micro-batches; every rank brings its own share of them."""
    size = drafter.config.block_size
    sums = torch.zeros(2 + 3 * size, dtype=torch.float64)
    drafter.eval()
    for batch in batches:
        if batch.num_slots == 0:
            continue
        losses = drafter.losses(batch, weights=MEASURE)
        lengths = expected_lengths(losses.acceptance, slot_index=batch.slot_index, block_size=size)
        slots = batch.slot_number.cpu()
        reached = losses.acceptance.double().cpu()
        bias = torch.zeros_like(reached) if losses.confidence is None else losses.confidence.double().cpu() - reached
        sums[:2] += torch.tensor([lengths.sum().item(), len(lengths)], dtype=torch.float64)
        sums[2 : 2 + size] += torch.bincount(slots, weights=reached, minlength=size)
        sums[2 + size : 2 + 2 * size] += torch.bincount(slots, weights=bias, minlength=size)
        sums[2 + 2 * size :] += torch.bincount(slots, minlength=size).double()
    drafter.train()
    sums = engine.sum(sums)
    seen = sums[2 + 2 * size :].clamp(min=1)
    return Validation(
        expected_accepted_length=(sums[0] / sums[1].clamp(min=1)).item(),
        acceptance=tuple((sums[2 : 2 + size] / seen).tolist()),
        confidence_bias=tuple((sums[2 + size : 2 + 2 * size] / seen).tolist()) if drafter.config.confidence else None,
        num_blocks=int(sums[1].item()),
    )
