"""What a step costs, and what cannot be a cost."""

from __future__ import annotations

import pytest

from draftsmith.errors import DraftsmithError
from draftsmith.serving.cost_table import CostTable
from draftsmith.serving.step_costs import ContextCost, DraftingCost, PrefillCost, StepCosts, UpkeepCost


def test_drafting_lies_on_lines_between_the_points() -> None:
    cost = DraftingCost((2, 4, 8), (1.0, 2.0, 3.0))
    assert cost.up_to(10).tolist() == [0.0, 1.0, 1.0, 1.5, 2.0, 2.25, 2.5, 2.75, 3.0, 3.0, 3.0]
    assert cost.up_to(0).tolist() == [0.0]


def test_prefill_is_affine() -> None:
    assert PrefillCost(200.0, 0.25).seconds(100) == 0.75
    assert PrefillCost(200.0).seconds(100) == 0.5


def test_contexts_cost_beyond_the_profiled() -> None:
    cost = ContextCost(0.5, profiled_tokens=10)
    assert [cost.seconds(tokens, num_requests=3) for tokens in (20, 30, 34)] == [0.0, 0.0, 2.0]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: DraftingCost((), ()), "got 0 numbers, 0 seconds"),
        (lambda: DraftingCost((1, 2), (1.0,)), "got 2 numbers, 1 seconds"),
        (lambda: DraftingCost((0, 2), (1.0, 2.0)), r"got \(0, 2\), expected >= 1, strictly increasing"),
        (lambda: DraftingCost((2, 2), (1.0, 2.0)), r"got \(2, 2\), expected >= 1, strictly increasing"),
        (lambda: DraftingCost((1, 2), (1.0, -2.0)), "seconds of a drafting cost"),
        (lambda: DraftingCost((1, 2), (1.0, float("inf"))), "seconds of a drafting cost"),
        (lambda: DraftingCost((1,), (1.0,), fixed_share=1.5), "fixed_share of a drafting cost: got 1.5"),
        (lambda: UpkeepCost((1,), (-1.0,)), "seconds of an upkeep cost"),
        (lambda: PrefillCost(0.0), "the rate of prefill: got 0.0, expected > 0 tokens a second"),
        (lambda: PrefillCost(float("nan")), "the rate of prefill"),
        (lambda: PrefillCost(1.0, -1.0), "seconds_per_pass of prefill: got -1.0"),
        (lambda: ContextCost(-1.0), "seconds_per_token of a context"),
        (lambda: ContextCost(1.0, -1), "profiled_tokens of a context cost: got -1, expected >= 0"),
    ],
)
def test_what_cannot_be_a_cost(make, text: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(DraftsmithError, match=text):
        make()


def test_a_shorter_block_spares_its_share() -> None:
    cost = DraftingCost((1,), (1.0,), fixed_share=0.25)
    assert [cost.share(longest, block_size=4) for longest in (0, 2, 4)] == [0.25, 0.625, 1.0]
    assert DraftingCost((1,), (1.0,)).share(1, block_size=4) == 1.0


def test_what_verification_cannot_change() -> None:
    costs = StepCosts(
        CostTable([1], steps_per_s=[1.0]), DraftingCost((1, 3), (0.5, 1.5)), upkeep=UpkeepCost((2,), (0.25,))
    )
    assert costs.fixed_s(4).tolist() == [0.0, 0.75, 1.25, 1.75, 1.75]
    assert StepCosts(CostTable([1], steps_per_s=[1.0])).fixed_s(2).tolist() == [0.0, 0.0, 0.0]
