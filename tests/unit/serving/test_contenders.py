"""Which policies a drafter allows, and that each is made anew."""

from __future__ import annotations

import numpy as np
import pytest

from draftsmith.serving.contenders import ASYNCHRONOUS, Contender, Machine, contenders, principal, scheduler_of
from draftsmith.serving.cost_table import CostTable
from draftsmith.serving.early_exit import DraftFirst, EarlyExit, WorthDrafting
from draftsmith.serving.policies import AsynchronousPolicy, FixedLength, StaticThreshold, SynchronousPolicy
from draftsmith.serving.simulator import Limits
from draftsmith.serving.step_costs import DraftingCost, StepCosts, UpkeepCost
from tests.unit.serving.recordings import drawn_rounds

JAGGED = CostTable([1, 4, 8], steps_per_s=[10.0, 12.0, 5.0])
COSTS = StepCosts(JAGGED, DraftingCost((1, 2), (0.1, 0.2)), None, None, UpkeepCost((1,), (0.05,)))
MACHINE = Machine(drawn_rounds(), COSTS, JAGGED.monotone(), Limits(2), None, 0.5, 32, 0)


def names(block_size: int, *, confident: bool) -> list[str]:
    return [item.name for item in contenders(block_size=block_size, confident=confident, thresholds=(0.3, 0.7))]


def test_a_confidence_head_allows_schedulers_and_thresholds() -> None:
    assert names(2, confident=True) == [
        "none", "fixed_1", "fixed_2", "threshold_0.3", "threshold_0.7", "sync", "async_2",
        "fixed_2+recent", "fixed_2+worth", "async_2+recent", "async_2+worth",
    ]  # fmt: skip
    assert names(3, confident=False) == ["none", "fixed_1", "fixed_2", "fixed_3", "fixed_3+recent", "fixed_3+worth"]
    assert names(1, confident=False) == ["none", "fixed_1", "fixed_1+recent", "fixed_1+worth"]


@pytest.mark.parametrize("confident", [True, False])
def test_the_few_are_among_all_and_labels_differ(confident: bool) -> None:
    for block_size in (1, 2, 7):
        every = contenders(block_size=block_size, confident=confident, thresholds=())
        assert set(principal(block_size=block_size, confident=confident)) <= set(every)
        assert len({item.label for item in every}) == len(every)
        assert len({item.name for item in every}) == len(every)


def test_policies_believe_in_the_monotone_table_and_the_time_of_whole_steps() -> None:
    policy = Contender("synchronous").policy(MACHINE)
    assert isinstance(policy, SynchronousPolicy)
    seconds = 1 / policy.tables.of(2).look_up([2, 4, 8])
    assert seconds == pytest.approx(np.array([0.1, 0.1, 0.2]) + 0.25)
    told = Contender("synchronous").policy(MACHINE, table=JAGGED)
    assert isinstance(told, SynchronousPolicy)
    assert told.tables.of(2).look_up(4) == pytest.approx(1 / (1 / 12 + 0.25))


def test_each_name_makes_its_policies_anew() -> None:
    stale = scheduler_of(4).policy(MACHINE)
    assert isinstance(stale, AsynchronousPolicy)
    assert stale.staleness == 4
    assert stale is not scheduler_of(4).policy(MACHINE)
    assert scheduler_of(0) == Contender("synchronous")
    assert scheduler_of(2) == ASYNCHRONOUS
    assert Contender("fixed", 3).policy(MACHINE) == FixedLength(3)
    assert Contender("threshold", 0.3).policy(MACHINE) == StaticThreshold(0.3)
    assert Contender("fixed", 3).drafting(MACHINE) == DraftFirst(3)
    assert Contender("fixed", 4).drafting(MACHINE) is None
    assert ASYNCHRONOUS.drafting(MACHINE) is None
    assert isinstance(Contender("fixed", 4, "recent").drafting(MACHINE), EarlyExit)
    assert isinstance(Contender("asynchronous", 2, "worth").drafting(MACHINE), WorthDrafting)
