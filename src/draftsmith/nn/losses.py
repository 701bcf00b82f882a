"""The draft loss without the logits: cross-entropy and total variation in slices, with their own backward.

At most `slice_rows` rows of [n, V] logits exist at a time; each slice's gradient is computed as soon as its logits
are there. Letters: n slots, D hidden, r rank, V vocabulary. Source: DSpark section 3.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SLICE_ROWS = 256


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


class _Space:
    """Memory for one slice, made once: logits in the weights' dtype, and two float32 copies, [slice_rows, V] each."""

    def __init__(self, slice_rows: int, head: Tensor) -> None:
        shape = (slice_rows, head.shape[0])
        self._narrow = torch.empty(shape, dtype=head.dtype, device=head.device)
        self._draft = torch.empty(shape, dtype=torch.float32, device=head.device)
        self._target = torch.empty_like(self._draft)

    def rows(self, num: int) -> tuple[Tensor, Tensor, Tensor]:
        return self._narrow[:num], self._draft[:num], self._target[:num]


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
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        num = hidden.shape[0]
        needs_grad = ctx.needs_input_grad[0]
        grad_hidden = torch.zeros_like(hidden) if needs_grad else None
        grad_feature = torch.zeros_like(feature) if needs_grad and feature is not None else None
        grad_output = (
            torch.zeros_like(output_weight, dtype=torch.float32) if needs_grad and output_weight is not None else None
        )
        ce_rows = hidden.new_zeros(num, dtype=torch.float32)
        tv_rows, acceptance = torch.zeros_like(ce_rows), torch.zeros_like(ce_rows)
        correct = torch.zeros(num, dtype=torch.bool, device=hidden.device)
        fused = feature is not None and softcap is None
        product = torch.cat((head, output_weight), dim=1) if fused else head  # type: ignore[arg-type]
        space = _Space(min(slice_rows, num), head)
        for start in range(0, num, slice_rows):
            rows = slice(start, min(start + slice_rows, num))
            narrow, draft, target = space.rows(rows.stop - rows.start)
            inputs = torch.cat((hidden[rows], feature[rows]), dim=1) if fused else hidden[rows]  # type: ignore[index]
            torch.mm(inputs, product.T, out=narrow)
            draft.copy_(narrow)
            slope = None
            if softcap is not None:
                draft.div_(softcap).tanh_()
                slope = 1 - draft.square()
                draft.mul_(softcap)
                if feature is not None:
                    draft.add_(torch.mm(feature[rows], output_weight.T, out=narrow))  # type: ignore[union-attr]
            label = labels[rows].unsqueeze(1)
            top, best = draft.max(dim=1, keepdim=True)
            correct[rows] = best.squeeze(1) == labels[rows]
            label_logit = draft.gather(1, label)
            draft.sub_(top).exp_()
            mass = draft.sum(dim=1, keepdim=True)
            draft.div_(mass)
            ce_rows[rows] = (top + mass.log() - label_logit).squeeze(1)
            torch.mm(target_hidden[rows], head.T, out=narrow)
            target.copy_(narrow)
            if softcap is not None:
                target.div_(softcap).tanh_().mul_(softcap)
            torch.softmax(target, dim=1, out=target)
            gap = torch.sub(draft, target, out=target)
            tv_rows[rows] = torch.linalg.vector_norm(gap, ord=1, dim=1)
            if not needs_grad:
                continue
            weight = weights[rows].unsqueeze(1)
            if tv_weight > 0:
                sign = gap.sign_()
                mean = torch.linalg.vecdot(draft, sign).unsqueeze(1)
                grad = sign.sub_(mean).mul_(tv_weight).add_(ce_weight).mul_(draft)
            else:
                grad = draft.mul_(ce_weight)
            grad.scatter_add_(1, label, torch.full_like(label_logit, -ce_weight))
            grad.mul_(weight)
            if feature is not None:
                grad_output.add_(narrow.copy_(grad).T @ feature[rows])  # type: ignore[union-attr]
            if slope is not None:
                if feature is not None:
                    grad_feature[rows] = narrow @ output_weight  # type: ignore[index,operator]
                grad.mul_(slope)
            both = narrow.copy_(grad) @ product
            grad_hidden[rows] = both[:, : hidden.shape[1]]  # type: ignore[index]
            if fused:
                grad_feature[rows] = both[:, hidden.shape[1] :]  # type: ignore[index]
        torch.clamp(1 - 0.5 * tv_rows, 0, 1, out=acceptance)
        ce, tv = (ce_rows * weights).sum(), (tv_rows * weights).sum()
        ctx.gradients = (grad_hidden, grad_feature, grad_output)
        ctx.output_dtype = output_weight.dtype if output_weight is not None else None
        total = ce_weight * ce + tv_weight * tv
        ctx.mark_non_differentiable(ce, tv, acceptance, correct)
        return total, ce, tv, acceptance, correct

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_feature, grad_output = ctx.gradients
        ctx.gradients = None
        scaled = [None if g is None else g.mul_(grad_total) for g in (grad_hidden, grad_feature, grad_output)]
        if scaled[2] is not None:
            scaled[2] = scaled[2].to(ctx.output_dtype)
        return (*scaled, *[None] * 8)


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
    slice_rows: int = SLICE_ROWS,
) -> DraftLoss:
    """Cross-entropy to the labels and total variation to the target's distribution, as weighted sums.

    hidden [n, D]: drafter states after its final norm; feature [n, r] and output_weight [V, r]: the sequential
    head's bias, both None without one; head [V, D]: frozen LM head; target_hidden [n, D]: the target's last hidden
    state that predicts each label; labels [n]; weights [n] float32. Softmaxes are float32.
    The soft-cap is applied before the sequential bias. Gradients reach hidden, feature and output_weight only.
    """
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
            slice_rows,
        )
    )
