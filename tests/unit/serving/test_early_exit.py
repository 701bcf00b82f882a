"""Early exits: what they remember, when they draft, and that they know the past alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from draftsmith.decoding.drafting import DraftCounts, DraftHistory, DraftPolicy
from draftsmith.errors import DraftsmithError
from draftsmith.serving.cost_table import CostTable
from draftsmith.serving.early_exit import DraftFirst, EarlyExit, Memory, RecentAcceptance, WorthDrafting
from draftsmith.serving.policies import FixedLength
from draftsmith.serving.recorded import RecordedRounds
from draftsmith.serving.requests import make_requests
from draftsmith.serving.simulator import Limits, simulate
from draftsmith.serving.step_costs import DraftingCost, StepCosts, UpkeepCost
from draftsmith.serving.synthetic_rounds import synthetic_rounds

K = 4
COSTS = StepCosts(CostTable(np.arange(1, 65), steps_per_s=1 / (1.0 + 0.05 * np.arange(64))))


def history(
    accepted: Sequence[int], verified: Sequence[int], confidence: Sequence[Sequence[float]] | None = None
) -> DraftHistory:
    """Requests that had one round, or none where nothing was verified."""
    told, seen = np.array(accepted), np.array(verified)
    counts = DraftCounts(np.where(seen > 0, K, 0), seen, told)
    return DraftHistory(K, (seen > 0) * 1, counts, counts, None if confidence is None else np.array(confidence))


def test_acceptance_is_counted_and_drawn_to_that_of_all() -> None:
    recent = RecentAcceptance(Memory(rounds=4, pool_rounds=10, prior=0.5, prior_tokens=2.0))
    # b breaks off; a's whole verification was accepted, which says nothing of the next token
    found = recent.update(("a", "b", "new"), history([2, 1, 0], [2, 4, 0]))
    pooled = (3 + 2 * 0.5) / (3 + 1 + 2)
    assert found == pytest.approx([(2 + 2 * pooled) / 4, (1 + 2 * pooled) / 4, pooled])
    # the batch is another one: b keeps its count, c is new, a round without verification tells nothing
    found = recent.update(("c", "b"), history([0, 0], [0, 0]))
    assert found == pytest.approx([pooled, (1 + 2 * pooled) / 4])
    found = recent.update(("c", "b"), history([0, 3], [0, 4]))
    survived, broke = 3 * 0.9 + 3, 1 * 0.9 + 1
    pooled = (survived + 1) / (survived + broke + 2)
    assert found[1] == pytest.approx((0.75 * 1 + 3 + 2 * pooled) / (0.75 * 2 + 4 + 2))


def test_confidences_count_what_they_expect() -> None:
    recent = RecentAcceptance(Memory(evidence="confidence", prior=0.5))
    nan = float("nan")
    found = recent.update(("a", "b"), history([0, 0], [1, 0], [[0.9, 0.5, nan, nan], [nan] * 4]))
    survived, broke = 0.9 + 0.45, 1 - 0.45
    pooled = (survived + 1) / (survived + broke + 2)
    assert found == pytest.approx([(survived + 2 * pooled) / (survived + broke + 2), pooled])
    with pytest.raises(DraftsmithError, match="without a confidence head"):
        recent.update(("a", "b"), history([0, 0], [1, 0]))


def test_hopeless_requests_stop_drafting_probe_and_come_back() -> None:
    policy = EarlyExit(0.5, probe_every=5)
    ids = ("easy", "hard")
    told = [list(policy.draft_lengths(ids, history([0, 0], [0, 0])))]
    for _ in range(9):
        last = told[-1]
        told.append(list(policy.draft_lengths(ids, history([min(last[0], 3), 0], last))))
    assert [lengths[0] for lengths in told] == [K] * 10
    hard = [lengths[1] for lengths in told]
    assert hard[0] == K
    assert hard[4] == hard[9] == K  # every fifth step is a probe
    assert hard[5:9] == [0] * 4
    for _ in range(30):
        last = told[-1]
        told.append(list(policy.draft_lengths(ids, history(last, last))))
    assert told[-1] == [K, K]


def test_a_shortened_exit_drafts_while_the_prefix_is_expected_to_survive() -> None:
    policy = EarlyExit(0.3, shape="shortened", memory=Memory(prior=0.6))
    # 0.6, 0.36, 0.216: two of them are at least 0.3
    assert list(policy.draft_lengths(("a",), history([0], [0]))) == [2]


def test_probes_become_rare_while_nobody_drafts() -> None:
    policy = EarlyExit(0.9, probe_every=2, memory=Memory(prior=0.1))
    told = [sum(policy.draft_lengths(("a",), history([0], [0]))) for _ in range(200)]
    probes = np.flatnonzero(told)
    assert np.diff(probes)[:4].tolist() == [4, 8, 16, 32]
    assert np.diff(probes).max() == 32


def brute_force(chances: np.ndarray, costs: StepCosts) -> float:
    """The best Theta over every number of requests of the powers of two, and every number of tokens."""
    num, size = len(chances), K
    upkeep = 0.0 if costs.upkeep is None else costs.upkeep.up_to(num)[num]
    best = num / (1 / costs.verification.look_up(num) + upkeep)
    ranked = np.sort(chances)[::-1]
    for drafting in {1, 2, 4, num}:
        survival = np.sort([p**k for p in ranked[:drafting] for k in range(1, size + 1)])[::-1]
        draft = 0.0 if costs.drafting is None else costs.drafting.up_to(num)[drafting]
        for count in range(1, len(survival) + 1):
            step = draft + 1 / costs.verification.look_up(num + count) + upkeep
            best = max(best, (num + survival[:count].sum()) / step)
    return float(best)


@pytest.mark.parametrize("seed", range(8))
def test_what_is_drafted_is_worth_the_most(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num = int(rng.integers(4, 8))
    costs = replace(
        COSTS, drafting=DraftingCost((1, 8), (float(rng.uniform(0, 0.4)), float(rng.uniform(0, 1.0)))),
        upkeep=UpkeepCost((1, 8), (0.01, 0.1)),
    )  # fmt: skip
    ids = tuple(f"r{at}" for at in range(num))
    verified = np.full(num, K)
    past = history(rng.integers(0, K + 1, num).tolist(), verified.tolist())
    chances = RecentAcceptance(Memory()).update(ids, past)
    lengths = np.array(WorthDrafting(costs, max_requests=num, shape="shortened").draft_lengths(ids, past))
    drafting = int((lengths > 0).sum())
    expected = num + sum(chances[at] ** k for at in range(num) for k in range(1, lengths[at] + 1))
    assert costs.drafting is not None
    assert costs.upkeep is not None
    # the policy pays for those that it tried to let draft; a request of them may be left without a token
    tried = [number for number in (1, 2, 4, num) if number >= drafting] if drafting else [0]
    thetas = [
        expected
        / (costs.drafting.up_to(num)[number] + 1 / costs.verification.look_up(num + lengths.sum())
           + costs.upkeep.up_to(num)[num])
        for number in tried
    ]  # fmt: skip
    assert max(thetas) == pytest.approx(brute_force(chances, costs))


def test_nothing_is_drafted_where_it_costs_more_than_it_brings_and_all_where_it_is_free() -> None:
    past = history([3, 2, 4], [K] * 3)
    dear = replace(COSTS, drafting=DraftingCost((1,), (50.0,)))
    assert list(WorthDrafting(dear, max_requests=3).draft_lengths(("a", "b", "c"), past)) == [0, 0, 0]
    flat = StepCosts(CostTable([1], steps_per_s=[1.0]))
    assert list(WorthDrafting(flat, max_requests=3).draft_lengths(("a", "b", "c"), past)) == [K] * 3


def test_a_sequential_drafter_is_told_how_many_slots_pay() -> None:
    costs = replace(COSTS, drafting=DraftingCost((1,), (2.0,), fixed_share=0.0))
    policy = WorthDrafting(costs, max_requests=1, shape="shortened", memory=Memory(prior=0.7))
    # by hand: (1 + 0.7 + .. ) / (1 + 0.05 k + 0.5 k) for k = 0..4 is 1, 1.097, 1.043, ..
    assert list(policy.draft_lengths(("a",), history([0], [0]))) == [1]


def served(rounds: RecordedRounds, policy: DraftPolicy, costs: StepCosts = COSTS) -> tuple[list[int], float]:
    """Draft tokens by step, and the seconds of all."""
    requests = make_requests(np.zeros(4), prompt_tokens=[5] * 4, output_tokens=[80] * 4, domain=["chat"] * 4)
    done = simulate(requests, rounds=rounds, policy=FixedLength(K), costs=costs, limits=Limits(4), drafting=policy)
    return done.steps.drafted.tolist(), float(done.finish_s.max())


@pytest.mark.parametrize("evidence", ["acceptance", "confidence"])
def test_only_the_past_decides(evidence: str) -> None:
    rounds = synthetic_rounds({"chat": 3.5}, block_size=K, confident=True, num_answers=1, rounds_per_answer=60, seed=1)
    assert rounds.logits is not None
    memory = Memory(evidence="confidence" if evidence == "confidence" else "acceptance")
    change = 12
    accepted, logits = rounds.accepted.copy(), rounds.logits.copy()
    accepted[change:], logits[change:] = 0, -9.0
    other = replace(rounds, accepted=accepted, logits=logits)
    policies = (
        lambda: EarlyExit(0.5, memory=memory),
        lambda: WorthDrafting(replace(COSTS, drafting=DraftingCost((1,), (0.3,))), max_requests=4, memory=memory),
    )
    for make in policies:
        one, two = served(rounds, make())[0], served(other, make())[0]
        assert one[: change + 1] == two[: change + 1]
        assert one != two


def test_a_worthless_drafter_costs_little_and_equal_runs_are_equal() -> None:
    rounds = synthetic_rounds({"chat": 1.02}, block_size=K, confident=False, num_answers=5, seed=1)
    costs = replace(COSTS, drafting=DraftingCost((1,), (1.0,)))

    def run(policy: DraftPolicy) -> tuple[list[int], float]:
        return served(rounds, policy, costs)

    worth = WorthDrafting(costs, max_requests=4)
    spared, plain, always = run(worth)[1], run(DraftFirst(0))[1], run(DraftFirst(K))[1]
    assert spared < 1.1 * plain < 0.6 * always
    assert run(WorthDrafting(costs, max_requests=4)) == run(WorthDrafting(costs, max_requests=4))


def test_unfit_settings_are_refused() -> None:
    with pytest.raises(DraftsmithError, match="floor"):
        EarlyExit(1.5)
    with pytest.raises(DraftsmithError, match="probes"):
        EarlyExit(0.5, probe_every=1)
    with pytest.raises(DraftsmithError, match="probes"):
        WorthDrafting(COSTS, max_requests=1, probe_every=0)
    with pytest.raises(DraftsmithError, match="memory"):
        Memory(prior=1.0)
    with pytest.raises(DraftsmithError, match="below zero"):
        DraftFirst(-1)
