"""Both sliced losses on a GPU (compiled passes, larger slices) against full float64 logits on the CPU."""

from __future__ import annotations

import pytest
import torch

from draftsmith.nn.soft_loss import soft_loss
from tests.unit.nn.test_losses import CASES, Problem, assert_gradients_equal, plain_loss, relative_error, require_grad
from tests.unit.nn.test_soft_loss import Problem as SoftProblem

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("slice_rows", [7, None])
@pytest.mark.parametrize(("rank", "softcap"), CASES)
def test_draft_loss_on_a_gpu(rank: int, softcap: float | None, slice_rows: int | None) -> None:
    problem = Problem.draw(rank=rank, seed=1)
    exact = problem.to(torch.float64)
    fields = ("hidden", "feature", "output_weight", "head", "target_hidden", "labels", "weights")
    values = [getattr(problem, field) for field in fields]
    on_gpu = Problem(*[None if value is None else value.cuda() for value in values])
    require_grad(on_gpu, exact)
    loss, plain = on_gpu.loss(softcap=softcap, slice_rows=slice_rows), plain_loss(exact, softcap=softcap)
    loss.total.backward()
    plain.total.backward()
    assert relative_error(loss.total.detach(), plain.total.detach()) < 1e-5
    shared = torch.minimum(plain.draft, plain.target).sum(-1)
    torch.testing.assert_close(loss.acceptance.cpu().double(), shared, rtol=1e-5, atol=1e-6)
    assert loss.correct.tolist() == (plain.draft.argmax(-1) == problem.labels).tolist()
    assert_gradients_equal(on_gpu, exact)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_soft_loss_on_a_gpu(softcap: float | None) -> None:
    problem = SoftProblem()
    hidden = problem.hidden.detach().cuda().requires_grad_(True)
    loss = soft_loss(
        hidden,
        head=problem.head.cuda(),
        target_hidden=problem.target_hidden.cuda(),
        weights=problem.weights.cuda(),
        softcap=softcap,
    )
    plain, _, _ = problem.plain(softcap=softcap)
    loss.total.backward()
    plain.backward()
    assert relative_error(loss.total.detach(), plain.detach()) < 1e-5
    assert hidden.grad is not None
    assert problem.exact.grad is not None
    assert relative_error(hidden.grad, problem.exact.grad) < 1e-5
