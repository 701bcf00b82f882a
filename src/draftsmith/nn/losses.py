"""The draft loss without the logits: cross-entropy and total variation in slices, with their own backward.

At most `slice_rows` rows of [n, V] logits exist at a time, in the weights' dtype; the gradient of a slice takes the
place of its logits at once, so nothing V-wide outlives the forward pass. Letters: n slots, D hidden, r rank,
V vocabulary. Source: DSpark section 3.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from draftsmith.nn.slices import chunk_rows_for, for_device, ranges, slice_rows_for

OUTPUT_ROWS = 4096  # rows of W2 whose gradient is widened to float32 at a time


@dataclass(frozen=True)
class DraftLoss:
    """Weighted sums over slots, and what each slot reached.

    `total` (differentiable) = ce_weight * ce + tv_weight * tv; `ce`, `tv` are detached weighted sums;
    `acceptance` [n] = 1 - 0.5 * ||p_d - p_t||_1 clamped to [0, 1] (Eq. 8); `correct` [n] = draft argmax is the label.
    """

    total: Tensor
    ce: Tensor
    tv: Tensor
    acceptance: Tensor
    correct: Tensor


class _RowTerms(NamedTuple):
    """Of m rows: ce, tv float32 [m] unweighted, correct [m]; weighted gradients [m, V] float32.

    `grad` is that of the draft logits, `grad_product` that of hidden @ head.T (the same without a soft-cap).
    """

    ce: Tensor
    tv: Tensor
    correct: Tensor
    grad: Tensor
    grad_product: Tensor


def _row_terms(
    product: Tensor,
    bias: Tensor | None,
    target_product: Tensor,
    labels: Tensor,
    weights: Tensor,
    *,
    ce_weight: float,
    tv_weight: float,
    softcap: float | None,
) -> _RowTerms:
    """product, bias, target_product [m, V] in any dtype; labels, weights [m]; bias: what the product lacks, or None."""
    draft, target = product.float(), target_product.float()
    slope = None
    if softcap is not None:
        bounded = torch.tanh(draft / softcap)
        slope = 1 - bounded.square()
        draft, target = bounded * softcap, torch.tanh(target / softcap) * softcap
    if bias is not None:
        draft = draft + bias
    label = labels.unsqueeze(1)
    top, best = draft.max(dim=1)
    draft_mass, target_mass = draft.softmax(dim=1), target.softmax(dim=1)
    # The most likely token has probability 1 / sum(exp(draft - top)): no second pass of exponentials.
    ce = (top - draft.gather(1, label).squeeze(1)) - draft_mass.amax(dim=1).log()
    gap = draft_mass - target_mass
    sign = gap.sign()
    tv = torch.linalg.vecdot(gap, sign)
    constant = weights * (ce_weight - tv_weight * torch.linalg.vecdot(draft_mass, sign))
    grad = draft_mass * torch.addcmul(constant.unsqueeze(1), (weights * tv_weight).unsqueeze(1), sign)
    grad = grad.scatter_add(1, label, (-ce_weight * weights).unsqueeze(1))
    return _RowTerms(ce, tv, best == labels, grad, grad if slope is None else grad * slope)


class _Products:
    """The products of one slice, into memory that is made once: the logits and, in their place, their gradients.

    Without a soft-cap, head and sequential bias are one product: narrow weights side by side, [h, f] @ [head, W2].T,
    which rounds once; in float32 f @ W2.T is added in place, which needs no copy of the head.
    """

    def __init__(
        self, head: Tensor, output_weight: Tensor | None, *, softcap: float | None, slice_rows: int, needs_grad: bool
    ) -> None:
        self.head, self.output_weight = head, output_weight
        joined = output_weight is not None and softcap is None and head.dtype != torch.float32
        self.joined = torch.cat((head, output_weight), dim=1) if joined else None  # type: ignore[arg-type]
        shape = (slice_rows, head.shape[0])
        self._product, self._target = head.new_empty(shape), head.new_empty(shape)
        self._bias = head.new_empty(shape) if output_weight is not None and softcap is not None else None
        self.grad_output: Tensor | None = None
        if output_weight is not None and needs_grad:
            self.grad_output = torch.zeros_like(output_weight, dtype=torch.float32)

    def forward(self, hidden: Tensor, feature: Tensor | None, target_hidden: Tensor) -> None:
        """Fill `product`, `bias` (a soft-cap's; else None) and `target` [m, V] from the slice's m rows."""
        num = hidden.shape[0]
        self.product, self.target = self._product[:num], self._target[:num]
        self.bias = None if self._bias is None else self._bias[:num]
        torch.mm(target_hidden, self.head.T, out=self.target)
        if self.joined is not None and feature is not None:
            torch.mm(torch.cat((hidden, feature), dim=1), self.joined.T, out=self.product)
            return
        torch.mm(hidden, self.head.T, out=self.product)
        if self.output_weight is None or feature is None:
            return
        if self.bias is not None:
            torch.mm(feature, self.output_weight.T, out=self.bias)
        else:
            self.product.addmm_(feature, self.output_weight.T)

    def backward(self, feature: Tensor | None, *, grad_hidden: Tensor, grad_feature: Tensor | None) -> None:
        """Gradients of the slice, when `product` and `bias` hold those of the logits; W2's add up in grad_output."""
        if self.output_weight is None or feature is None or grad_feature is None or self.grad_output is None:
            torch.mm(self.product, self.head, out=grad_hidden)
            return
        grad = self.product if self.bias is None else self.bias
        if grad.dtype == torch.float32:
            self.grad_output.addmm_(grad.T, feature)
        else:
            for part in ranges(0, grad.shape[1], size=OUTPUT_ROWS):
                self.grad_output[part].add_(grad[:, part].T @ feature)
        if self.joined is not None:
            both = self.product @ self.joined
            grad_hidden.copy_(both[:, : grad_hidden.shape[1]])
            grad_feature.copy_(both[:, grad_hidden.shape[1] :])
        else:
            torch.mm(self.product, self.head, out=grad_hidden)
            torch.mm(grad, self.output_weight, out=grad_feature)


class _SlicedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        feature: Tensor | None,
        output_weight: Tensor | None,
        head: Tensor,
        target_hidden: Tensor,
        labels: Tensor,
        weights: Tensor,
        ce_weight: float,
        tv_weight: float,
        softcap: float | None,
        slice_rows: int,
        needs_grad: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        num, device = hidden.shape[0], hidden.device
        slice_rows = max(1, min(slice_rows, num))
        grad_hidden = torch.empty_like(hidden) if needs_grad else None
        grad_feature = torch.empty_like(feature) if needs_grad and feature is not None else None
        ce_rows = torch.empty(num, dtype=torch.float32, device=device)
        tv_rows, correct = torch.empty_like(ce_rows), torch.empty(num, dtype=torch.bool, device=device)
        products = _Products(head, output_weight, softcap=softcap, slice_rows=slice_rows, needs_grad=needs_grad)
        chunk_rows = chunk_rows_for(device, vocab_size=head.shape[0], slice_rows=slice_rows)
        row_terms = for_device(_row_terms, device)
        for rows in ranges(0, num, size=slice_rows):
            own_feature = None if feature is None else feature[rows]
            products.forward(hidden[rows], own_feature, target_hidden[rows])
            for chunk in ranges(rows.start, rows.stop, size=chunk_rows):
                own = slice(chunk.start - rows.start, chunk.stop - rows.start)
                terms = row_terms(
                    products.product[own],
                    None if products.bias is None else products.bias[own],
                    products.target[own],
                    labels[chunk],
                    weights[chunk],
                    ce_weight=ce_weight,
                    tv_weight=tv_weight,
                    softcap=softcap,
                )
                ce_rows[chunk], tv_rows[chunk], correct[chunk] = terms.ce, terms.tv, terms.correct
                products.product[own] = terms.grad_product
                if products.bias is not None:
                    products.bias[own] = terms.grad
            if grad_hidden is not None:
                own_grad = None if grad_feature is None else grad_feature[rows]
                products.backward(own_feature, grad_hidden=grad_hidden[rows], grad_feature=own_grad)
        ce, tv = (ce_rows * weights).sum(), (tv_rows * weights).sum()
        acceptance = torch.clamp(1 - 0.5 * tv_rows, 0, 1)
        ctx.gradients = (grad_hidden, grad_feature, products.grad_output)
        ctx.output_dtype = head.dtype if output_weight is None else output_weight.dtype
        ctx.mark_non_differentiable(ce, tv, acceptance, correct)
        return ce_weight * ce + tv_weight * tv, ce, tv, acceptance, correct

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        hidden, feature, output = [None if g is None else g.mul_(grad_total) for g in ctx.gradients]
        ctx.gradients = None
        return (hidden, feature, None if output is None else output.to(ctx.output_dtype), *[None] * 9)


def draft_loss(
    hidden: Tensor,
    *,
    feature: Tensor | None,
    output_weight: Tensor | None,
    head: Tensor,
    target_hidden: Tensor,
    labels: Tensor,
    weights: Tensor,
    ce_weight: float,
    tv_weight: float,
    softcap: float | None = None,
    slice_rows: int | None = None,
) -> DraftLoss:
    """Cross-entropy to the labels and total variation to the target's distribution, as weighted sums.

    hidden [n, D]: drafter states after its final norm; feature [n, r] and output_weight [V, r]: the sequential
    head's bias, both None without one; head [V, D]: frozen LM head; target_hidden [n, D]: the target's last hidden
    state that predicts each label; labels [n]; weights [n] float32. Softmaxes are float32.
    The soft-cap is applied before the sequential bias. Gradients reach hidden, feature and output_weight only, and
    are made in the forward pass: one backward pass is possible. slice_rows: rows of logits at a time, by default
    256 on the CPU and 1,024 on a GPU, where the passes over a slice are compiled into fused kernels. The GPU path was
    run only as far as a machine without one goes: its compiled function on the CPU (tests marked gpu run the rest).
    """
    learnt = (hidden, feature, output_weight)
    needs_grad = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in learnt)
    return DraftLoss(
        *_SlicedLoss.apply(
            hidden,
            feature,
            output_weight,
            head,
            target_hidden,
            labels,
            weights,
            ce_weight,
            tv_weight,
            softcap,
            slice_rows_for(hidden.device) if slice_rows is None else slice_rows,
            needs_grad,
        )
    )
