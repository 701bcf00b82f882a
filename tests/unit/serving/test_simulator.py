"""The simulated engine, step by step on scenarios worked out by hand. All times are sums of powers of two: exact."""

from __future__ import annotations

import math

import numpy as np
import pytest

from draftsmith.decoding.drafting import DraftAll, DraftHistory, DraftNothing
from draftsmith.decoding.policies import DraftedBlocks, LengthPolicy, verify_all
from draftsmith.errors import ContractError, DraftsmithError
from draftsmith.serving.cost_table import CostTable
from draftsmith.serving.outcome import Outcome
from draftsmith.serving.policies import FixedLength, NoSpeculation, StaticThreshold, SynchronousPolicy
from draftsmith.serving.recorded import RecordedRounds, plain_rounds, record_rounds
from draftsmith.serving.requests import Requests, make_requests
from draftsmith.serving.simulator import Limits, simulate
from draftsmith.serving.step_costs import ContextCost, DraftingCost, PrefillCost, StepCosts
from tests.unit.serving import plain
from tests.unit.serving.recordings import answer, drawn_rounds

# One answer: rounds that accept 2, none, and 1 which is an end-of-text; they commit 3, 1 and 1 tokens.
TOLD = [(2, False), (0, False), (1, True)]
LOGITS = [[2.0, 1.0], [0.0, -1.0], [1.0, 3.0]]
ROUNDS = record_rounds({"chat": [answer("a", TOLD, block_size=2, logits=LOGITS)]}, block_size=2)
TABLE = CostTable([1, 2, 3, 5], steps_per_s=[8.0, 4.0, 2.0, 1.0])
COSTS = StepCosts(TABLE, DraftingCost((1, 2), (0.125, 0.25)), PrefillCost(4.0, 0.5))


def three_requests() -> Requests:
    return make_requests([0.0, 0.0, 2.5], prompt_tokens=[3, 2, 4], output_tokens=[6, 2, 4], domain=["chat"] * 3)


def run(
    requests: Requests,
    policy: LengthPolicy = verify_all,
    *,
    rounds: RecordedRounds = ROUNDS,
    costs: StepCosts = COSTS,
    limits: Limits = Limits(2),  # noqa: B008
    **more: object,
) -> Outcome:
    return simulate(requests, rounds=rounds, policy=policy, costs=costs, limits=limits, **more)  # type: ignore[arg-type]


def test_three_requests_by_hand() -> None:
    """Two enter at 0: 5 prompt tokens in 0.5 + 1.25 s. The first step is 6 tokens in 0.25 + 1 s; b has its second token
    at 3. c, there since 2.5, is prefilled from 3 to 4.5 while a waits. Step 2 gives a one token and c its other three;
    step 3, of a alone, 3 tokens in 0.125 + 0.5 s, ends with its end-of-text.
    """
    found = run(three_requests())
    assert found.arrival_s.tolist() == [0.0, 0.0, 2.5]
    assert found.admitted_s.tolist() == [0.0, 0.0, 3.0]
    assert found.first_token_s.tolist() == [1.75, 1.75, 4.5]
    assert found.finish_s.tolist() == [6.375, 3.0, 5.75]
    assert found.num_rounds.tolist() == [3, 1, 1]
    assert found.drafted.tolist() == [6, 2, 2]
    assert found.verified.tolist() == [6, 2, 2]
    assert found.accepted.tolist() == [3, 2, 2]
    steps = found.steps
    assert steps.start_s.tolist() == [1.75, 4.5, 5.75]
    assert steps.draft_s.tolist() == [0.25, 0.25, 0.125]
    assert steps.verify_s.tolist() == [1.0, 1.0, 0.5]
    assert steps.end_s.tolist() == [3.0, 5.75, 6.375]
    assert steps.num_requests.tolist() == [2, 2, 1]
    assert steps.num_drafting.tolist() == [2, 2, 1]
    assert steps.batch_tokens.tolist() == [6, 6, 3]
    assert steps.drafted.tolist() == steps.verified.tolist() == [4, 4, 2]
    assert steps.accepted.tolist() == [4, 2, 1]
    assert steps.committed.tolist() == [4, 4, 1]
    assert steps.kv_tokens.tolist() == [4 + 3 + 4, 7 + 5 + 4, 8 + 2]
    assert steps.kv_reserved.tolist() == [10 + 5, 10 + 9, 10]
    assert steps.num_waiting.tolist() == [0, 0, 0]
    assert found.prefills.start_s.tolist() == [0.0, 3.0]
    assert found.prefills.seconds.tolist() == [1.75, 1.5]
    assert found.prefills.num_requests.tolist() == [2, 1]
    assert found.prefills.num_tokens.tolist() == [5, 4]


def test_a_request_that_outlasts_its_recording_begins_it_anew() -> None:
    """12 tokens: one of the prefill, 5 of each lap, 1 more of the third lap's first round."""
    long = make_requests([0.0], prompt_tokens=[1], output_tokens=[12], domain=["chat"])
    assert run(long).steps.committed.tolist() == [3, 1, 1, 3, 1, 1, 1]
    # of one draft token a round: 2, 1, and 1 that is the end-of-text
    assert run(long, FixedLength(1)).steps.committed.tolist() == [2, 1, 1, 2, 1, 1, 2, 1]


def test_an_answer_of_one_token_has_no_round_and_makes_room_at_once() -> None:
    requests = make_requests([0.0] * 3, prompt_tokens=[4, 4, 4], output_tokens=[1, 1, 2], domain=["chat"] * 3)
    found = run(requests, limits=Limits(1))
    assert found.first_token_s.tolist() == [1.5, 3.0, 4.5]
    assert found.finish_s.tolist() == [1.5, 3.0, 4.5 + 0.625]
    assert found.num_rounds.tolist() == [0, 0, 1]


def test_nobody_overtakes_who_waits_for_memory() -> None:
    """10 of 16 tokens are a's: b, of 9, waits for it, and c, of 5, waits behind b."""
    requests = make_requests([0.0] * 3, prompt_tokens=[3, 4, 2], output_tokens=[6, 4, 2], domain=["chat"] * 3)
    found = run(requests, limits=Limits(8, kv_tokens=16))
    assert found.steps.num_requests.tolist() == [1, 1, 1, 2]
    assert found.steps.num_waiting.tolist() == [2, 2, 2, 0]
    assert found.steps.kv_reserved.tolist() == [10, 10, 10, 14]
    assert found.admitted_s[1] == found.admitted_s[2] == found.finish_s[0]


def test_a_request_that_fits_exactly_is_admitted_and_a_larger_one_refused() -> None:
    requests = three_requests()
    found = run(requests, limits=Limits(2, kv_tokens=10))
    assert np.isfinite(found.finish_s).all()
    assert found.steps.num_requests.max() == 1
    with pytest.raises(DraftsmithError, match=r"never be admitted: got 10 .* expected <= 9 \(request 1\)"):
        run(requests, limits=Limits(2, kv_tokens=9))


def test_prefill_passes_hold_so_many_tokens() -> None:
    """As the engine's own test: prompts of 4 and 1 together, one of 9 alone, then 3. Cached tokens are not in them."""
    requests = make_requests(
        [0.0] * 4, prompt_tokens=[4, 3, 9, 3], output_tokens=[2] * 4, domain=["chat"] * 4, cached_tokens=[0, 2, 0, 0]
    )
    found = run(requests, limits=Limits(4, prefill_tokens=5))
    assert found.prefills.num_tokens.tolist() == [5, 9, 3]
    assert found.prefills.num_requests.tolist() == [2, 1, 1]
    assert found.first_token_s.tolist() == [1.75, 1.75, 1.75 + 2.75, 1.75 + 2.75 + 1.25]


def test_who_comes_during_a_prefill_is_prefilled_before_the_next_step() -> None:
    requests = make_requests([0.0, 1.0], prompt_tokens=[4, 4], output_tokens=[2, 2], domain=["chat"] * 2)
    found = run(requests)
    assert found.first_token_s.tolist() == [1.5, 3.0]
    assert found.steps.num_requests.tolist() == [2]


def test_an_idle_engine_goes_on_to_the_next_arrival() -> None:
    requests = make_requests([3.0, 100.0], prompt_tokens=[2, 2], output_tokens=[2, 2], domain=["chat"] * 2)
    found = run(requests)
    assert found.admitted_s.tolist() == [3.0, 100.0]
    assert found.finish_s.tolist() == [3.0 + 1.0 + 0.625, 100.0 + 1.0 + 0.625]


def test_arrivals_need_no_order() -> None:
    requests = make_requests([100.0, 3.0], prompt_tokens=[2, 2], output_tokens=[2, 2], domain=["chat"] * 2)
    assert run(requests).admitted_s.tolist() == [100.0, 3.0]


def test_who_follows_comes_after_the_end_of_the_other() -> None:
    requests = make_requests(
        [1.0, 2.0, 0.0], prompt_tokens=[2] * 3, output_tokens=[2] * 3, domain=["chat"] * 3, follows=[-1, 0, 1]
    )
    found = run(requests)
    assert found.arrival_s.tolist() == [1.0, found.finish_s[0] + 2.0, found.finish_s[1]]
    assert found.finish_s.tolist() == [2.625, 2.625 + 2.0 + 1.625, 6.25 + 1.625]


def test_long_contexts_cost_what_is_beyond_the_profiled() -> None:
    """Contexts of 4 and 3, then 7 and 5, then 8 tokens, profiled at 4: none, 4 and 4 beyond."""
    costs = StepCosts(TABLE, context=ContextCost(0.25, profiled_tokens=4))
    requests = make_requests([0.0, 0.0, 0.5], prompt_tokens=[3, 2, 4], output_tokens=[6, 2, 4], domain=["chat"] * 3)
    found = run(requests, costs=costs)
    assert found.steps.verify_s.tolist() == [1.0, 1.0 + 1.0, 0.5 + 1.0]
    assert found.steps.draft_s.tolist() == [0.0, 0.0, 0.0]


def test_the_last_in_the_batch_takes_the_slot_of_who_leaves() -> None:
    """As in the engine: a of a, b, c leaves, c is first from then on, and d is appended."""
    seen = list[tuple[str, ...]]()

    def policy(blocks: DraftedBlocks) -> list[int]:
        seen.append(blocks.request_ids)
        return [0] * blocks.num_requests

    requests = make_requests([0.0] * 4, prompt_tokens=[1] * 4, output_tokens=[2, 4, 4, 2], domain=["chat"] * 4)
    run(requests, policy, limits=Limits(3))
    assert seen == [("0", "1", "2"), ("2", "1", "3"), ("2", "1")]


def test_confidences_are_the_recorded_ones_at_the_temperatures() -> None:
    seen = list[np.ndarray]()

    def policy(blocks: DraftedBlocks) -> list[int]:
        assert blocks.confidence is not None
        assert blocks.block_size == 2
        seen.append(blocks.confidence)
        return [2] * blocks.num_requests

    requests = make_requests([0.0], prompt_tokens=[1], output_tokens=[6], domain=["chat"])
    run(requests, policy)
    run(requests, policy, temperatures=[2.0, 0.5])
    for found, (first, second) in zip(seen[:3], LOGITS, strict=True):
        assert found[0] == pytest.approx([1 / (1 + math.exp(-first)), 1 / (1 + math.exp(-second))], rel=1e-12)
    for found, (first, second) in zip(seen[3:], LOGITS, strict=True):
        assert found[0] == pytest.approx([1 / (1 + math.exp(-first / 2)), 1 / (1 + math.exp(-second * 2))], rel=1e-12)


def test_the_prefix_scheduler_gets_what_algorithm_1_needs() -> None:
    """Lengths of every step against Algorithm 1 in plain Python, on the same confidences."""
    table = CostTable(np.arange(1, 41), steps_per_s=1 / (1 + 0.15 * np.arange(1, 41)))
    rates = dict(enumerate(table.steps_per_s.tolist(), start=1))
    lengths = list[int]()

    class Spy(SynchronousPolicy):
        def __call__(self, blocks: DraftedBlocks) -> list[int]:
            found = super().__call__(blocks)
            assert blocks.confidence is not None
            assert found == plain.algorithm_1(plain.products(blocks.confidence.tolist()), rates)
            lengths.extend(found)
            return found

    requests = make_requests(np.arange(12.0), prompt_tokens=[9] * 12, output_tokens=[30] * 12, domain=["chat"] * 12)
    found = run(requests, Spy(table), rounds=drawn_rounds(), costs=StepCosts(table), limits=Limits(8))
    assert found.steps.verified.sum() == sum(lengths)
    assert len(set(lengths)) > 2


def test_no_speculation_is_plain_decoding_at_the_price_of_drafting() -> None:
    requests = make_requests(np.arange(6.0), prompt_tokens=[5] * 6, output_tokens=[7] * 6, domain=["chat"] * 6)
    free = StepCosts(TABLE, prefill=PrefillCost(4.0))
    speculative = run(requests, NoSpeculation(), costs=free, limits=Limits(4))
    plainly = run(requests, costs=free, rounds=plain_rounds(["chat"]), limits=Limits(4))
    assert (speculative.steps.committed == speculative.steps.num_requests).all()
    assert (speculative.num_rounds == 6).all()
    assert (speculative.finish_s == plainly.finish_s).all()
    paid = run(requests, NoSpeculation(), limits=Limits(4))
    assert (paid.steps.draft_s > 0).all()


def test_fixed_lengths_commit_what_each_round_gives() -> None:
    """One request over whole laps of an answer: the mean of min(accepted, k) + 1, less 1 behind an end-of-text."""
    told = [(4, False), (2, False), (0, False), (1, False), (3, True)]
    rounds = record_rounds({"chat": [answer("a", told, block_size=4)]}, block_size=4)
    for length, lap in ((0, 5), (1, 2 + 2 + 1 + 2 + 2), (2, 3 + 3 + 1 + 2 + 3), (3, 4 + 3 + 1 + 2 + 3), (4, 14)):
        requests = make_requests([0.0], prompt_tokens=[1], output_tokens=[1 + 3 * lap], domain=["chat"])
        found = run(requests, FixedLength(length), rounds=rounds)
        assert found.num_rounds.tolist() == [15]
    assert rounds.accepted_length == 14 / 5


def test_policies_without_confidences_say_so() -> None:
    rounds = record_rounds({"chat": [answer("a", [(1, False)], block_size=2)]}, block_size=2)
    with pytest.raises(ContractError, match="without a confidence head"):
        run(three_requests(), StaticThreshold(0.5), rounds=rounds)


@pytest.mark.parametrize("lengths", [[2], [2, 2, 2], [3, 2], [-1, 2], [[2, 2]]])
def test_lengths_that_cannot_be_are_refused(lengths: list[int]) -> None:
    with pytest.raises(DraftsmithError, match=r"verification lengths of a policy .* 2 numbers from 0 to 2"):
        run(three_requests(), lambda _: lengths)


def test_temperatures_of_another_block_size_are_refused() -> None:
    with pytest.raises(ContractError, match=r"another block size than the rounds: got \(3,\), expected \(2,\)"):
        run(three_requests(), temperatures=[1.0, 1.0, 1.0])


@pytest.mark.parametrize("wrong", [{"max_requests": 0}, {"max_requests": 1, "kv_tokens": 0}])
def test_limits_that_admit_nobody_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(DraftsmithError, match=r"the limit .* of a simulation: got 0, expected >= 1"):
        Limits(**wrong)


class Alternating:
    """Drafts 0, 1 and 2 tokens in turn for the first request of a batch, all for the others; keeps what it was told."""

    def __init__(self) -> None:
        self.told: list[DraftHistory] = []

    def draft_lengths(self, request_ids: tuple[str, ...], history: DraftHistory) -> list[int]:
        self.told.append(history)
        return [(len(self.told) - 1) % 3, *[2] * (len(request_ids) - 1)]


def test_who_does_not_draft_is_not_verified_and_costs_no_drafting() -> None:
    """a drafts 0, 1, 2 tokens of rounds that accept 2, 0 and 1: it commits 1, 1, 1 and then 1 of the fourth round."""
    drafting, seen = Alternating(), list[list[list[float]]]()

    def policy(blocks: DraftedBlocks) -> list[int]:
        assert blocks.confidence is not None
        seen.append(blocks.confidence.tolist())
        return [2] * blocks.num_requests

    requests = make_requests([0.0, 0.0], prompt_tokens=[1, 1], output_tokens=[5, 4], domain=["chat"] * 2)
    found = run(requests, policy, drafting=drafting)
    assert found.steps.num_requests.tolist() == [2, 1, 1, 1]
    assert found.steps.num_drafting.tolist() == [1, 1, 1, 0]
    assert found.steps.draft_s.tolist() == [0.125, 0.125, 0.125, 0.0]
    assert found.steps.drafted.tolist() == found.steps.verified.tolist() == [2, 1, 2, 0]
    assert found.steps.batch_tokens.tolist() == [4, 2, 3, 1]
    assert found.steps.committed.tolist() == [1 + 3, 1, 1, 1]
    assert seen[0][0] == [0.0, 0.0]
    assert seen[0][1] == pytest.approx([1 / (1 + math.exp(-2)), 1 / (1 + math.exp(-1))])
    assert seen[1] == [[0.5, 0.0]]
    assert (found.drafted.tolist(), found.verified.tolist(), found.accepted.tolist()) == ([3, 2], [3, 2], [1, 2])


def test_a_draft_policy_is_told_what_was() -> None:
    drafting = Alternating()
    requests = make_requests([0.0], prompt_tokens=[1], output_tokens=[6], domain=["chat"])
    run(requests, FixedLength(1), drafting=drafting)
    told = drafting.told  # drafts 0, 1, 2, 0, 1 of rounds that accept 2, 0, 1, 2, 0; at most one is verified
    assert [one.rounds.tolist() for one in told] == [[0], [1], [2], [3], [4]]
    assert [one.total.drafted.tolist() for one in told] == [[0], [0], [1], [3], [3]]
    assert [one.total.verified.tolist() for one in told] == [[0], [0], [1], [2], [2]]
    assert [one.total.accepted.tolist() for one in told] == [[0], [0], [0], [1], [1]]
    assert [one.last.drafted.tolist() for one in told] == [[0], [0], [1], [2], [0]]
    assert [one.last.verified.tolist() for one in told] == [[0], [0], [1], [1], [0]]
    assert [one.last.accepted.tolist() for one in told] == [[0], [0], [0], [1], [0]]
    known = np.array([one.confidence[0] for one in told if one.confidence is not None])
    assert np.isnan(known).tolist() == [[True, True], [True, True], [False, True], [False, False], [True, True]]
    assert known[2][0] == pytest.approx(0.5)
    assert known[3].tolist() == pytest.approx([1 / (1 + math.exp(-1)), 1 / (1 + math.exp(-3))])
    assert all(one.block_size == 2 for one in told)


def test_histories_go_with_their_requests() -> None:
    """b leaves first, and c, which was last, takes its slot with all that it has been through."""
    told = list[tuple[tuple[str, ...], list[int]]]()

    class Keeping:
        def draft_lengths(self, request_ids: tuple[str, ...], history: DraftHistory) -> list[int]:
            told.append((request_ids, history.total.accepted.tolist()))
            return [2] * len(request_ids)

    requests = make_requests([0.0] * 3, prompt_tokens=[1] * 3, output_tokens=[9, 2, 9], domain=["chat"] * 3)
    run(requests, limits=Limits(3), drafting=Keeping())
    assert told[:3] == [(("0", "1", "2"), [0, 0, 0]), (("0", "2"), [2, 2]), (("0", "2"), [2, 2])]


def test_drafting_policies_of_all_and_nothing() -> None:
    requests = three_requests()
    default, everything = run(requests), run(requests, drafting=DraftAll())
    assert (default.finish_s == everything.finish_s).all()
    nothing = run(requests, drafting=DraftNothing())
    assert (nothing.steps.draft_s == 0).all()
    assert (nothing.steps.committed == nothing.steps.num_requests).all()
    plainly = run(requests, costs=StepCosts(TABLE, prefill=COSTS.prefill), rounds=plain_rounds(["chat"]))
    assert (nothing.finish_s == plainly.finish_s).all()


@pytest.mark.parametrize("lengths", [[2], [3, 2], [-1, 2]])
def test_draft_lengths_that_cannot_be_are_refused(lengths: list[int]) -> None:
    class Wrong:
        def draft_lengths(self, request_ids: tuple[str, ...], history: DraftHistory) -> list[int]:
            return lengths

    with pytest.raises(DraftsmithError, match=r"draft lengths of a policy .* 2 numbers from 0 to 2"):
        run(three_requests(), drafting=Wrong())
