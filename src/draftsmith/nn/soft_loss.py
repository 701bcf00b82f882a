"""EAGLE-3's soft cross-entropy to the target's distribution, in the slices of `slices.py`, with its own backward.

J states may share one target distribution, whose product is then made once (steps of different rows that predict the
same token). Letters: J states, n target distributions, D hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from draftsmith.nn.slices import chunk_rows_for, for_device, ranges, slice_rows_for


@dataclass(frozen=True)
class SoftLoss:
    """`total` (differentiable): weighted sum of soft cross-entropies over states and distributions, float32.

    `acceptance` [J, n] = 1 - 0.5 * ||p_d - p_t||_1 clamped to [0, 1]; `correct` [J, n] = the argmaxes are one token.
    """

    total: Tensor
    acceptance: Tensor
    correct: Tensor


class _SoftTerms(NamedTuple):
    """Of m rows: ce, tv float32 [m] unweighted, correct [m]; grad [m, V] of hidden @ head.T, weighted, float32."""

    ce: Tensor
    tv: Tensor
    correct: Tensor
    grad: Tensor


def _soft_terms(product: Tensor, target_product: Tensor, weights: Tensor, *, softcap: float | None) -> _SoftTerms:
    """product, target_product [m, V] in any dtype; weights [m] float32."""
    draft, target = product.float(), target_product.float()
    slope = None
    if softcap is not None:
        bounded = torch.tanh(draft / softcap)
        slope = 1 - bounded.square()
        draft, target = bounded * softcap, torch.tanh(target / softcap) * softcap
    top, best = draft.max(dim=1)
    draft_mass, target_mass = draft.softmax(dim=1), target.softmax(dim=1)
    # log of sum(exp(draft - top)) is that of 1 / the largest probability; both terms are positive: nothing cancels.
    ce = torch.linalg.vecdot(target_mass, top.unsqueeze(1) - draft) - draft_mass.amax(dim=1).log()
    gap = draft_mass - target_mass
    grad = gap * weights.unsqueeze(1)
    correct = best == target.argmax(dim=1)
    return _SoftTerms(ce, gap.abs().sum(dim=1), correct, grad if slope is None else grad * slope)


class _SlicedSoftLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        target_hidden: Tensor,
        weights: Tensor,
        softcap: float | None,
        slice_rows: int,
        needs_grad: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_steps, num, _ = hidden.shape
        slice_rows = max(1, min(slice_rows, num))
        grad_hidden = torch.empty_like(hidden) if needs_grad else None
        ce_rows = torch.empty((num_steps, num), dtype=torch.float32, device=hidden.device)
        tv_rows, correct = torch.empty_like(ce_rows), torch.empty_like(ce_rows, dtype=torch.bool)
        products, targets = head.new_empty((slice_rows, head.shape[0])), head.new_empty((slice_rows, head.shape[0]))
        chunk_rows = chunk_rows_for(hidden.device, vocab_size=head.shape[0], slice_rows=slice_rows)
        soft_terms = for_device(_soft_terms, hidden.device)
        for rows in ranges(0, num, size=slice_rows):
            product, target = products[: rows.stop - rows.start], targets[: rows.stop - rows.start]
            torch.mm(target_hidden[rows], head.T, out=target)
            for step in range(num_steps):
                torch.mm(hidden[step, rows], head.T, out=product)
                for chunk in ranges(rows.start, rows.stop, size=chunk_rows):
                    own = slice(chunk.start - rows.start, chunk.stop - rows.start)
                    terms = soft_terms(product[own], target[own], weights[step, chunk], softcap=softcap)
                    ce_rows[step, chunk], tv_rows[step, chunk] = terms.ce, terms.tv
                    correct[step, chunk] = terms.correct
                    product[own] = terms.grad
                if grad_hidden is not None:
                    torch.mm(product, head, out=grad_hidden[step, rows])
        acceptance = torch.clamp(1 - 0.5 * tv_rows, 0, 1)
        ctx.grad_hidden = grad_hidden
        ctx.mark_non_differentiable(acceptance, correct)
        return (ce_rows * weights).sum(), acceptance, correct

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, ctx.grad_hidden = ctx.grad_hidden, None
        return (grad_hidden.mul_(grad_total), *[None] * 6)


def soft_loss(
    hidden: Tensor,
    *,
    head: Tensor,
    target_hidden: Tensor,
    weights: Tensor,
    softcap: float | None = None,
    slice_rows: int | None = None,
) -> SoftLoss:
    """Weighted sum of -sum_v p_t(v) log p_d(v) over J states of n distributions; both are float32.

    hidden [J, n, D]: states after the drafter's norm; head [V, D]: frozen LM head; target_hidden [n, D]: the target's
    last hidden state that predicts the same token; weights [J, n] float32. The soft-cap bounds the logits of both.
    The gradient reaches hidden only and is made in the forward pass: one backward pass is possible. On GPUs as
    `draft_loss`: compiled, and not run on one here.
    """
    needs_grad = torch.is_grad_enabled() and hidden.requires_grad
    rows = slice_rows_for(hidden.device) if slice_rows is None else slice_rows
    return SoftLoss(*_SlicedSoftLoss.apply(hidden, head, target_hidden, weights, softcap, rows, needs_grad))
