"""EAGLE-3's soft cross-entropy in slices against full float64 logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from draftsmith.nn import slices
from draftsmith.nn.soft_loss import SoftLoss, soft_loss

STEPS, NUM, HIDDEN, VOCAB = 3, 23, 16, 67


@pytest.fixture(autouse=True, params=[VOCAB, None], ids=["chunks", "whole"])
def _chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The vocabulary is so small that a slice is one chunk; once more with a row a thread in each chunk."""
    if request.param is not None:
        monkeypatch.setattr(slices, "CHUNK_ELEMENTS_PER_THREAD", request.param)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Problem:
    """hidden [J, n, D] (learnt), head [V, D], target_hidden [n, D], weights [J, n]."""

    def __init__(self, *, num: int = NUM, steps: int = STEPS) -> None:
        self.hidden = normal(steps, num, HIDDEN, seed=1).requires_grad_(True)
        self.head = normal(VOCAB, HIDDEN, seed=2) * 0.5
        self.target_hidden = normal(num, HIDDEN, seed=3)
        self.weights = normal(steps, num, seed=4).abs()
        self.exact = self.hidden.detach().double().requires_grad_(True)

    def loss(self, *, softcap: float | None, slice_rows: int | None = None) -> SoftLoss:
        return soft_loss(
            self.hidden,
            head=self.head,
            target_hidden=self.target_hidden,
            weights=self.weights,
            softcap=softcap,
            slice_rows=slice_rows,
        )

    def plain(self, *, softcap: float | None) -> tuple[Tensor, Tensor, Tensor]:
        """Total, draft and target distributions by full float64 logits of `exact`."""
        logits, target = self.exact @ self.head.double().T, self.target_hidden.double() @ self.head.double().T
        if softcap is not None:
            logits, target = softcap * torch.tanh(logits / softcap), softcap * torch.tanh(target / softcap)
        wanted = target.softmax(-1)
        rows = -(wanted * logits.log_softmax(-1)).sum(-1)
        return (rows * self.weights.double()).sum(), logits.softmax(-1).detach(), wanted


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("steps", [1, STEPS])
@pytest.mark.parametrize("slice_rows", [1, 7, 22, 23, None])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_value_and_gradient_are_those_of_the_plain_loss(
    softcap: float | None, slice_rows: int | None, steps: int
) -> None:
    problem = Problem(steps=steps)
    problem.weights[0, ::4] = 0.0
    loss, (plain, _, _) = problem.loss(softcap=softcap, slice_rows=slice_rows), problem.plain(softcap=softcap)
    (3.0 * loss.total).backward()
    (3.0 * plain).backward()
    assert problem.hidden.grad is not None
    assert problem.exact.grad is not None
    assert relative_error(loss.total.detach(), plain.detach()) < 1e-5
    assert relative_error(problem.hidden.grad, problem.exact.grad) < 1e-5
    assert problem.hidden.grad[0, ::4].abs().sum() == 0


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_acceptance_is_the_shared_mass_and_correct_the_targets_choice(softcap: float | None) -> None:
    problem = Problem()
    with torch.no_grad():
        problem.hidden[0, :5] = problem.target_hidden[:5]
    loss = problem.loss(softcap=softcap, slice_rows=6)
    problem.exact = problem.hidden.detach().double()
    _, draft, target = problem.plain(softcap=softcap)
    torch.testing.assert_close(loss.acceptance.double(), torch.minimum(draft, target).sum(-1), rtol=1e-5, atol=1e-6)
    assert torch.equal(loss.correct, draft.argmax(-1) == target.argmax(-1))
    assert loss.correct[0, :5].all()
    assert not loss.acceptance.requires_grad


def test_large_logits_lose_no_precision() -> None:
    problem = Problem()
    with torch.no_grad():
        problem.hidden.mul_(60.0)
    problem.exact = problem.hidden.detach().double()
    plain, _, _ = problem.plain(softcap=None)
    assert relative_error(problem.loss(softcap=None, slice_rows=9).total.detach(), plain) < 1e-5


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("num", [0, 1])
def test_weights_of_zero_no_column_and_one_column(num: int, softcap: float | None) -> None:
    problem = Problem(num=num)
    if num:
        problem.plain(softcap=softcap)[0].backward()
    problem.loss(softcap=softcap).total.backward()
    assert problem.hidden.grad is not None
    if num:
        assert problem.exact.grad is not None
        assert relative_error(problem.hidden.grad, problem.exact.grad) < 1e-5
    silent = Problem(num=num)
    silent.weights.zero_()
    loss = silent.loss(softcap=softcap)
    loss.total.backward()
    assert silent.hidden.grad is not None
    assert loss.total.item() == 0.0
    assert silent.hidden.grad.abs().sum() == 0


def test_no_gradient_reaches_the_frozen_head_or_the_target_and_none_is_made_without_need() -> None:
    problem = Problem()
    problem.head.requires_grad_(True)
    problem.target_hidden.requires_grad_(True)
    problem.loss(softcap=None).total.backward()
    assert problem.head.grad is None
    assert problem.target_hidden.grad is None
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        assert not problem.loss(softcap=None).total.requires_grad
    assert counter.get_total_flops() == 2 * NUM * VOCAB * HIDDEN * (STEPS + 1)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(("num", "slice_rows"), [(NUM, 8), (NUM, 5), (1, None)])
def test_bfloat16_states_keep_float32_softmaxes(num: int, slice_rows: int | None, softcap: float | None) -> None:
    problem = Problem(num=num)
    problem.head, problem.target_hidden = problem.head.bfloat16(), problem.target_hidden.bfloat16()
    problem.hidden = problem.hidden.detach().bfloat16().requires_grad_(True)
    problem.exact = problem.hidden.detach().double().requires_grad_(True)
    loss, (plain, _, _) = problem.loss(softcap=softcap, slice_rows=slice_rows), problem.plain(softcap=softcap)
    loss.total.backward()
    plain.backward()
    assert loss.total.dtype == torch.float32
    assert relative_error(loss.total.detach(), plain.detach()) < 2.0**-8
    assert problem.hidden.grad is not None
    assert problem.exact.grad is not None
    assert problem.hidden.grad.dtype == torch.bfloat16
    assert relative_error(problem.hidden.grad, problem.exact.grad) < 2.0**-6
