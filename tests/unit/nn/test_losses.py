"""The sliced loss against the plain loss in float64, whose gradients autograd takes through full logits."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode, mm_flop

from draftsmith.nn import losses, slices
from draftsmith.nn.losses import DraftLoss, draft_loss

NUM, HIDDEN, RANK, VOCAB = 23, 16, 5, 67
CASES = [
    pytest.param(rank, cap, id=f"{name}-{'cap' if cap else 'plain'}")
    for rank, name in ((0, "alone"), (RANK, "sequential"))
    for cap in (None, 3.0)
]


@pytest.fixture(autouse=True, params=[VOCAB, None], ids=["chunks", "whole"])
def _chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The vocabulary is so small that a slice is one chunk; once more with a row a thread in each chunk,
    and with the gradient of W2 in parts of 10 rows."""
    if request.param is not None:
        monkeypatch.setattr(slices, "CHUNK_ELEMENTS_PER_THREAD", request.param)
        monkeypatch.setattr(losses, "OUTPUT_ROWS", 10)


@dataclass
class Problem:
    """Random float32 operands; `feature` and `output_weight` are None without a sequential head."""

    hidden: Tensor
    feature: Tensor | None
    output_weight: Tensor | None
    head: Tensor
    target_hidden: Tensor
    labels: Tensor
    weights: Tensor

    @classmethod
    def draw(cls, *, rank: int, seed: int, num: int = NUM) -> Problem:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        return cls(
            hidden=normal(num, HIDDEN),
            feature=normal(num, rank) if rank else None,
            output_weight=normal(VOCAB, rank) if rank else None,
            head=normal(VOCAB, HIDDEN) * 0.5,
            target_hidden=normal(num, HIDDEN),
            labels=torch.randint(VOCAB, (num,), generator=generator),
            weights=torch.rand(num, generator=generator) + 0.1,
        )

    def learnt(self) -> list[Tensor]:
        return [tensor for tensor in (self.hidden, self.feature, self.output_weight) if tensor is not None]

    def loss(
        self, *, softcap: float | None, slice_rows: int | None = None, ce: float = 0.1, tv: float = 0.9
    ) -> DraftLoss:
        return draft_loss(
            self.hidden, feature=self.feature, output_weight=self.output_weight, head=self.head,
            target_hidden=self.target_hidden, labels=self.labels, weights=self.weights,
            ce_weight=ce, tv_weight=tv, softcap=softcap, slice_rows=slice_rows,
        )  # fmt: skip

    def to(self, dtype: torch.dtype) -> Problem:
        def cast(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.detach().to(dtype)

        fields = (self.hidden, self.feature, self.output_weight, self.head, self.target_hidden)
        return Problem(*[cast(field) for field in fields], self.labels, self.weights.to(torch.float64))  # type: ignore[arg-type]


@dataclass
class Plain:
    total: Tensor
    ce: Tensor
    tv: Tensor
    draft: Tensor
    target: Tensor


def plain_loss(
    problem: Problem,
    *,
    softcap: float | None,
    ce: float = 0.1,
    tv: float = 0.9,
    made_in: torch.dtype = torch.float64,
) -> Plain:
    """The loss as section 3.3 writes it, on full float64 logits; `made_in`: what their products are rounded to."""

    def made(product: Tensor) -> Tensor:
        return product + (product.to(made_in).double() - product).detach()

    bias: Tensor | float = 0.0
    if problem.feature is not None and problem.output_weight is not None:
        bias = problem.feature @ problem.output_weight.T
    logits, target = problem.hidden @ problem.head.T, made(problem.target_hidden @ problem.head.T)
    if softcap is None:
        logits = made(logits + bias)
    else:
        logits = softcap * torch.tanh(made(logits) / softcap)
        logits = logits if isinstance(bias, float) else logits + made(bias)
        target = softcap * torch.tanh(target / softcap)
    draft, wanted = logits.softmax(-1), target.softmax(-1)
    ce_sum = (functional.cross_entropy(logits, problem.labels, reduction="none") * problem.weights).sum()
    tv_sum = ((draft - wanted).abs().sum(-1) * problem.weights).sum()
    return Plain(ce * ce_sum + tv * tv_sum, ce_sum, tv_sum, draft.detach(), wanted.detach())


def assert_gradients_equal(got: Problem, exact: Problem) -> None:
    for found, expected in zip(got.learnt(), exact.learnt(), strict=True):
        assert found.grad is not None
        assert expected.grad is not None
        assert relative_error(found.grad, expected.grad) < 1e-5


def require_grad(*problems: Problem) -> None:
    for problem in problems:
        for tensor in problem.learnt():
            tensor.requires_grad_(True)


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got.cpu().double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("slice_rows", [1, 7, 22, 23, 256])
@pytest.mark.parametrize(("rank", "softcap"), CASES)
def test_value_and_gradients_are_those_of_the_plain_loss(rank: int, softcap: float | None, slice_rows: int) -> None:
    problem = Problem.draw(rank=rank, seed=slice_rows)
    exact = problem.to(torch.float64)
    for tensor in (*problem.learnt(), *exact.learnt()):
        tensor.requires_grad_(True)
    loss = problem.loss(softcap=softcap, slice_rows=slice_rows)
    plain = plain_loss(exact, softcap=softcap)
    (3.0 * loss.total).backward()
    (3.0 * plain.total).backward()
    for got, expected in ((loss.total, plain.total), (loss.ce, plain.ce), (loss.tv, plain.tv)):
        assert relative_error(got.detach(), expected.detach()) < 1e-5
    assert_gradients_equal(problem, exact)


@pytest.mark.parametrize(("ce", "tv"), [(1.0, 0.0), (0.0, 1.0)])
@pytest.mark.parametrize(("rank", "softcap"), CASES)
def test_one_term_alone(rank: int, softcap: float | None, ce: float, tv: float) -> None:
    problem = Problem.draw(rank=rank, seed=5)
    exact = problem.to(torch.float64)
    for tensor in (*problem.learnt(), *exact.learnt()):
        tensor.requires_grad_(True)
    problem.loss(softcap=softcap, slice_rows=9, ce=ce, tv=tv).total.backward()
    plain_loss(exact, softcap=softcap, ce=ce, tv=tv).total.backward()
    assert_gradients_equal(problem, exact)


@pytest.mark.parametrize(("rank", "softcap"), CASES)
def test_one_row_with_the_default_slice(rank: int, softcap: float | None) -> None:
    problem = Problem.draw(rank=rank, seed=6, num=1)
    exact = problem.to(torch.float64)
    require_grad(problem, exact)
    loss, plain = problem.loss(softcap=softcap), plain_loss(exact, softcap=softcap)
    loss.total.backward()
    plain.total.backward()
    assert relative_error(loss.total.detach(), plain.total.detach()) < 1e-5
    assert_gradients_equal(problem, exact)


@pytest.mark.parametrize(("rank", "softcap"), CASES)
def test_rows_of_weight_zero_add_nothing(rank: int, softcap: float | None) -> None:
    """Rows of weight zero: the sums and gradients of the others alone; all of weight zero: exactly none."""
    problem = Problem.draw(rank=rank, seed=7)
    problem.weights[::2] = 0.0
    exact = problem.to(torch.float64)
    require_grad(problem, exact)
    loss, plain = problem.loss(softcap=softcap, slice_rows=6), plain_loss(exact, softcap=softcap)
    loss.total.backward()
    plain.total.backward()
    assert relative_error(loss.total.detach(), plain.total.detach()) < 1e-5
    assert_gradients_equal(problem, exact)
    assert problem.hidden.grad is not None
    assert problem.hidden.grad[::2].abs().sum() == 0
    silent = Problem.draw(rank=rank, seed=7)
    silent.weights.zero_()
    require_grad(silent)
    nothing = silent.loss(softcap=softcap, slice_rows=6)
    nothing.total.backward()
    assert nothing.total.item() == 0.0
    assert all(tensor.grad is not None and tensor.grad.abs().sum() == 0 for tensor in silent.learnt())
    assert torch.equal(nothing.acceptance, loss.acceptance)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_confidence_learns_from_the_acceptance_and_the_whole_loss_is_the_plain_one(softcap: float | None) -> None:
    """L = 0.1 CE + 0.9 TV + BCE with the acceptance as a fixed label: its gradients add to those of the slices."""
    problem = Problem.draw(rank=RANK, seed=8)
    exact = problem.to(torch.float64)
    require_grad(problem, exact)
    weight = torch.randn(HIDDEN + RANK, generator=torch.Generator().manual_seed(9)) * 0.3

    def bce(operands: Problem, acceptance: Tensor) -> Tensor:
        assert operands.feature is not None
        logits = torch.cat((operands.hidden, operands.feature), dim=1) @ weight.to(operands.hidden.dtype)
        rows = functional.binary_cross_entropy_with_logits(logits, acceptance, reduction="none")
        return (rows * operands.weights).sum()

    loss, plain = problem.loss(softcap=softcap, slice_rows=9), plain_loss(exact, softcap=softcap)
    total = loss.total + bce(problem, loss.acceptance)
    expected = plain.total + bce(exact, torch.minimum(plain.draft, plain.target).sum(-1))
    total.backward()
    expected.backward()
    assert relative_error(total.detach(), expected.detach()) < 1e-5
    assert_gradients_equal(problem, exact)


def test_large_logits_lose_no_precision() -> None:
    """Logits around 200 whose label is far below: exp underflows there, the cross-entropy must not."""
    problem = Problem.draw(rank=0, seed=10)
    problem.hidden.mul_(60.0)
    problem.target_hidden.mul_(4.0)
    exact = problem.to(torch.float64)
    loss, plain = problem.loss(softcap=None, slice_rows=9), plain_loss(exact, softcap=None)
    assert loss.ce / problem.weights.sum() > 150
    for got, expected in ((loss.ce, plain.ce), (loss.tv, plain.tv)):
        assert relative_error(got, expected) < 1e-5


@pytest.mark.parametrize(("rank", "softcap"), CASES)
def test_acceptance_is_the_mass_that_both_distributions_share(rank: int, softcap: float | None) -> None:
    problem = Problem.draw(rank=rank, seed=2)
    loss, plain = problem.loss(softcap=softcap, slice_rows=10), plain_loss(problem.to(torch.float64), softcap=softcap)
    shared = torch.minimum(plain.draft, plain.target).sum(-1)
    torch.testing.assert_close(loss.acceptance.double(), shared, rtol=1e-5, atol=1e-6)
    assert loss.correct.tolist() == (plain.draft.argmax(-1) == problem.labels).tolist()


def test_acceptance_stays_within_zero_and_one() -> None:
    problem = Problem.draw(rank=0, seed=1, num=2)
    problem.hidden, problem.head = torch.zeros(2, HIDDEN), torch.randn(VOCAB, HIDDEN) * 100
    problem.hidden[0] = problem.target_hidden[0]
    problem.hidden[1] = -problem.target_hidden[1]
    acceptance = problem.loss(softcap=None, slice_rows=8).acceptance
    assert acceptance[0] == 1.0
    assert 0.0 <= acceptance[1] < 1e-6


def test_no_gradient_reaches_the_frozen_head_or_the_target() -> None:
    problem = Problem.draw(rank=RANK, seed=3)
    for tensor in (*problem.learnt(), problem.head, problem.target_hidden):
        tensor.requires_grad_(True)
    loss = problem.loss(softcap=None, slice_rows=8)
    loss.total.backward()
    assert problem.head.grad is None
    assert problem.target_hidden.grad is None
    assert not any(tensor.requires_grad for tensor in (loss.ce, loss.tv, loss.acceptance))


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_sequential_head_learns_when_the_states_do_not(softcap: float | None) -> None:
    problem = Problem.draw(rank=RANK, seed=11)
    exact = problem.to(torch.float64)
    assert problem.output_weight is not None
    assert exact.output_weight is not None
    problem.output_weight.requires_grad_(True)
    exact.output_weight.requires_grad_(True)
    problem.loss(softcap=softcap, slice_rows=8).total.backward()
    plain_loss(exact, softcap=softcap).total.backward()
    assert problem.output_weight.grad is not None
    assert exact.output_weight.grad is not None
    assert relative_error(problem.output_weight.grad, exact.output_weight.grad) < 1e-5
    assert problem.hidden.grad is None


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_only_the_products_that_are_needed_are_made(softcap: float | None) -> None:
    """Forward h W, f W2 and the target's; backward dh, df and dW2; without gradients the forward ones alone."""
    problem = Problem.draw(rank=RANK, seed=12)
    require_grad(problem)
    counted = {torch.ops.aten.addmm_: lambda _total, first, second, **_: mm_flop(first, second)}
    with FlopCounterMode(display=False, custom_mapping=counted) as counter:
        problem.loss(softcap=softcap, slice_rows=8).total.backward()
    assert counter.get_total_flops() == 2 * NUM * VOCAB * ((2 * HIDDEN + RANK) + (HIDDEN + 2 * RANK))
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=counted) as counter:
        loss = problem.loss(softcap=softcap, slice_rows=8)
    assert counter.get_total_flops() == 2 * NUM * VOCAB * (2 * HIDDEN + RANK)
    assert not loss.total.requires_grad
    assert relative_error(loss.total, plain_loss(problem.to(torch.float64), softcap=softcap).total) < 1e-5


@pytest.mark.parametrize(("rank", "softcap"), CASES)
def test_no_slots_give_a_loss_of_zero_with_gradients_of_zero(rank: int, softcap: float | None) -> None:
    problem = Problem.draw(rank=rank, seed=3, num=0)
    require_grad(problem)
    loss = problem.loss(softcap=softcap, slice_rows=8)
    loss.total.backward()
    assert loss.total.item() == loss.ce.item() == loss.tv.item() == 0.0
    assert loss.acceptance.shape == loss.correct.shape == (0,)
    for tensor in problem.learnt():
        assert tensor.grad is not None
        assert tensor.grad.shape == tensor.shape
        assert tensor.grad.abs().sum() == 0


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_draft_that_is_the_target_has_no_total_variation_and_no_gradient_of_it(softcap: float | None) -> None:
    problem = Problem.draw(rank=0, seed=13)
    problem.hidden = problem.target_hidden.clone()
    exact = problem.to(torch.float64)
    require_grad(problem, exact)
    loss, plain = problem.loss(softcap=softcap, slice_rows=9), plain_loss(exact, softcap=softcap)
    loss.total.backward()
    plain.total.backward()
    assert loss.tv.item() == 0.0
    assert loss.acceptance.tolist() == [1.0] * NUM
    assert_gradients_equal(problem, exact)


def narrowed(problem: Problem) -> Problem:
    """The same operands in bfloat16, weights aside."""
    fields = (problem.hidden, problem.feature, problem.output_weight, problem.head, problem.target_hidden)
    narrow = [None if field is None else field.bfloat16() for field in fields]
    return Problem(*narrow, problem.labels, problem.weights)  # type: ignore[arg-type]


@pytest.mark.parametrize("num", [1, NUM])
@pytest.mark.parametrize("slice_rows", [5, 8, None])
@pytest.mark.parametrize(("rank", "softcap"), CASES)
def test_bfloat16_weights_keep_float32_softmaxes(
    rank: int, softcap: float | None, slice_rows: int | None, num: int
) -> None:
    """bf16 operands: what is lost is the rounding of the logits, and of the gradients before they are multiplied."""
    narrow = narrowed(Problem.draw(rank=rank, seed=4, num=num))
    exact = narrow.to(torch.float64)
    require_grad(narrow, exact)
    loss = narrow.loss(softcap=softcap, slice_rows=slice_rows)
    plain = plain_loss(exact, softcap=softcap, made_in=torch.bfloat16)
    loss.total.backward()
    plain.total.backward()
    assert loss.total.dtype == torch.float32
    assert relative_error(loss.total.detach(), plain.total.detach()) < 1e-5
    for got, expected in zip(narrow.learnt(), exact.learnt(), strict=True):
        assert got.grad is not None
        assert expected.grad is not None
        assert got.grad.dtype == torch.bfloat16
        assert relative_error(got.grad, expected.grad) < 2.0**-8


def test_bfloat16_probabilities_are_not_rounded() -> None:
    """Logits that bfloat16 holds exactly: value and acceptance are then as good as in float32."""
    problem = Problem.draw(rank=0, seed=14)
    whole = Problem(
        torch.eye(NUM, HIDDEN), None, None, (problem.head * 8).round() / 8,
        torch.eye(NUM, HIDDEN).roll(3, dims=1), problem.labels, problem.weights,
    )  # fmt: skip
    narrow, exact = narrowed(whole), whole.to(torch.float64)
    assert torch.equal(narrow.head.float(), whole.head)
    loss, plain = narrow.loss(softcap=None, slice_rows=7), plain_loss(exact, softcap=None)
    for got, expected in ((loss.total, plain.total), (loss.ce, plain.ce), (loss.tv, plain.tv)):
        assert relative_error(got, expected) < 1e-5
    shared = torch.minimum(plain.draft, plain.target).sum(-1)
    torch.testing.assert_close(loss.acceptance.double(), shared, rtol=1e-5, atol=1e-6)
