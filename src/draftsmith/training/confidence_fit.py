"""The confidence head's last fit, on samples that the rest of the drafter has not learnt from.

In training the head sees drafts of samples that the drafter learns at the same time: they are accepted more often than
any later draft, and the head believes it. So, once the drafter is done, the head alone is fitted to the validation
samples: a logistic regression on frozen features, convex and solved to the end, with a penalty on how far it goes from
the trained head. Letters: n slots, F features.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from draftsmith.drafters.base import Drafter
from draftsmith.nn.block import BlockBatch
from draftsmith.nn.confidence import ConfidenceHead
from draftsmith.params import LossWeights
from draftsmith.training.engine import TrainEngine

PENALTY = 0.1
"""Of the squared distance from the trained head, in features of deviation 1; the loss is a mean over slots."""
MOST_SLOTS = 50_000
"""Slots of one rank that are fitted to: bounds the memory of the features."""
MAX_ITERATIONS = 200
DEVIATION_FLOOR = 1e-3
MEASURE = LossWeights(ce=0.0, tv=0.0, confidence=1.0)


@dataclass(frozen=True)
class ConfidenceFit:
    """Slots fitted to, and the mean weighted cross-entropy of the confidence on them before and after.

    `bce_held_out`: each half of the micro-batches judged by a head fitted to the other; None with fewer than two.
    """

    num_slots: int
    bce_before: float
    bce_after: float
    bce_held_out: float | None


@dataclass(frozen=True)
class _Slots:
    """features [n, F], labels [n] (analytic acceptance), weights [n], fold [n] (0 or 1); float64 on the CPU."""

    features: Tensor
    labels: Tensor
    weights: Tensor
    fold: Tensor


def fit_confidence(drafter: Drafter, *, batches: Sequence[BlockBatch], engine: TrainEngine) -> ConfidenceFit:
    """Refit the drafter's confidence head on held-out micro-batches; every rank brings its own share of them."""
    head = drafter.get_submodule("confidence_head")
    assert isinstance(head, ConfidenceHead)
    slots = _collect(drafter, head=head, batches=batches)
    problem = _Problem(slots, head=head.proj, engine=engine)
    start = torch.zeros(slots.features.shape[1] + 1, dtype=torch.float64)
    fitted = problem.solve(problem.slots.weights)
    held_out = 0.0
    parts = [slots.weights * (slots.fold == fold) for fold in (0, 1)]
    whole = [float(engine.sum(part.sum().reshape(1))[0]) for part in parts]
    if all(whole):
        losses = [problem.loss(problem.solve(parts[1 - fold]), parts[fold]) for fold in (0, 1)]
        held_out = sum(loss * weight for loss, weight in zip(losses, whole, strict=True)) / sum(whole)
    found = ConfidenceFit(
        num_slots=int(engine.sum(torch.tensor([float(len(slots.labels))], dtype=torch.float64))[0]),
        bce_before=problem.loss(start, slots.weights),
        bce_after=problem.loss(fitted, slots.weights),
        bce_held_out=held_out if all(whole) else None,
    )
    problem.write(fitted, head=head.proj)
    return found


@torch.no_grad()
def _collect(drafter: Drafter, *, head: ConfidenceHead, batches: Iterable[BlockBatch]) -> _Slots:
    read: list[Tensor] = []
    labels: list[Tensor] = []
    weights: list[Tensor] = []
    fold: list[Tensor] = []
    handle = head.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0].double().cpu()))
    drafter.eval()
    try:
        for index, batch in enumerate(batches):
            if batch.num_slots == 0 or sum(len(part) for part in labels) >= MOST_SLOTS:
                continue
            labels.append(drafter.losses(batch, weights=MEASURE).acceptance.double().cpu())
            weights.append(batch.weights.double().cpu())
            fold.append(torch.full((batch.num_slots,), index % 2))
    finally:
        handle.remove()
        drafter.train()
    empty = torch.zeros(0, dtype=torch.float64)
    return _Slots(
        torch.cat([empty.new_zeros(0, head.proj.in_features), *read]), torch.cat([empty, *labels]),
        torch.cat([empty, *weights]), torch.cat([torch.zeros(0, dtype=torch.long), *fold]),
    )  # fmt: skip


class _Problem:
    """A penalised logistic regression over all ranks; a solution [F + 1] is what is added to the head, scaled."""

    def __init__(self, slots: _Slots, *, head: nn.Linear, engine: TrainEngine) -> None:
        self.slots, self._engine = slots, engine
        total = self._sum(slots.weights.sum()).clamp(min=torch.finfo(torch.float64).tiny)
        weights = slots.weights.unsqueeze(1)
        self._mean = self._sum((weights * slots.features).sum(dim=0)) / total
        spread = self._sum((weights * (slots.features - self._mean).square()).sum(dim=0)) / total
        self._scale = spread.sqrt() + DEVIATION_FLOOR
        self._scaled = (slots.features - self._mean) / self._scale
        weight, bias = head.weight.detach().double().cpu()[0], head.bias.detach().double().cpu()
        self._trained = slots.features @ weight + bias

    def loss(self, change: Tensor, weights: Tensor) -> float:
        """Mean weighted cross-entropy of the head changed so, over all ranks."""
        terms = self._terms(self._logits(change)) * weights
        sums = self._sum(torch.stack([terms.sum(), weights.sum()]))
        return float(sums[0] / sums[1])

    def solve(self, weights: Tensor) -> Tensor:
        """The change [F + 1] that minimises loss + PENALTY / 2 * |change|^2; the bias is free."""
        total = self._sum(weights.sum())
        change = torch.zeros(self._scaled.shape[1] + 1, dtype=torch.float64, requires_grad=True)
        solver = torch.optim.LBFGS(
            [change], max_iter=MAX_ITERATIONS, tolerance_grad=1e-9, tolerance_change=1e-12,
            line_search_fn="strong_wolfe",
        )  # fmt: skip

        def closure() -> Tensor:
            with torch.no_grad():
                logits = self._logits(change)
                slope = (logits.sigmoid() - self.slots.labels) * weights
                own = (self._terms(logits) * weights).sum().reshape(1)
                sums = self._sum(torch.cat([own, self._scaled.T @ slope, slope.sum().reshape(1)])) / total
                change.grad = sums[1:].clone()
                change.grad[:-1] += PENALTY * change[:-1]
                return sums[0] + PENALTY / 2 * change[:-1].square().sum()

        solver.step(closure)
        return change.detach()

    @torch.no_grad()
    def write(self, change: Tensor, *, head: nn.Linear) -> None:
        """Add a change to the head itself."""
        weight = change[:-1] / self._scale
        bias = change[-1] - weight @ self._mean
        head.weight.copy_(head.weight.double().cpu() + weight)
        head.bias.copy_(head.bias.double().cpu() + bias)

    def _logits(self, change: Tensor) -> Tensor:
        return self._trained + self._scaled @ change[:-1] + change[-1]

    def _terms(self, logits: Tensor) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(logits, self.slots.labels, reduction="none")

    def _sum(self, values: Tensor) -> Tensor:
        return self._engine.sum(values.reshape(-1)).reshape(values.shape)
