"""Who drafts in a step and how far: what a draft policy is told, what it spares, and that texts keep their law."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from draftsmith.decoding.drafting import DraftHistory, DraftNothing, DraftPolicy
from draftsmith.decoding.engine import Engine, Request
from draftsmith.decoding.policies import DraftedBlocks, LengthPolicy, verify_all
from draftsmith.decoding.rounds import Generation
from draftsmith.errors import DraftsmithError, TargetError
from draftsmith.serving.cost_table import CostTable
from draftsmith.serving.policies import AsynchronousPolicy, FixedLength, SynchronousPolicy
from draftsmith.serving.recorded import record_rounds
from draftsmith.serving.requests import make_requests
from draftsmith.serving.simulator import Limits, simulate
from draftsmith.serving.step_costs import StepCosts
from tests.unit.decoding.laws import PLAIN, p_value, text_law
from tests.unit.decoding.toys import ScriptedDrafter, TableTarget, Text, as_target, table_draft, whole_text_draft

VOCAB, SIZE, END = 5, 3, 4
TABLE = torch.from_numpy(np.random.default_rng(0).standard_normal((VOCAB, VOCAB)) * 1.5)
NEAR = TABLE + torch.from_numpy(np.random.default_rng(1).standard_normal((VOCAB, VOCAB)))


def confidence_of(texts: list[Text]) -> list[float]:
    return [float((3 * text[-1] + 5 * len(text)) % 7 - 2) for text in texts]


class Noting(ScriptedDrafter):
    """Notes how many requests and slots each proposal was for."""

    def __init__(self, confident: bool = True) -> None:
        super().__init__(
            table_draft(NEAR), target=TableTarget(TABLE), block_size=SIZE,
            confidence=confidence_of if confident else None,
        )  # fmt: skip
        self.asked: list[tuple[int, int | None]] = []

    def propose(self, anchors, *, num_tokens=None, **how):  # type: ignore[no-untyped-def]
        self.asked.append((len(anchors), num_tokens))
        return super().propose(anchors, num_tokens=num_tokens, **how)


@dataclass
class Dictated:
    """Draft lengths step by step, the last ones for good; keeps what it was told."""

    lengths: Sequence[Sequence[int]]
    told: list[DraftHistory] = field(default_factory=list)

    def draft_lengths(self, request_ids: tuple[str, ...], history: DraftHistory) -> Sequence[int]:
        self.told.append(history)
        return self.lengths[min(len(self.told), len(self.lengths)) - 1][: len(request_ids)]


def decode(
    drafting: DraftPolicy | None, *, num: int, policy: LengthPolicy = verify_all,
    drafter: ScriptedDrafter | None = None, num_tokens: int = 9,
) -> list[Generation]:  # fmt: skip
    engine = Engine(
        as_target(TableTarget(TABLE)), drafter=drafter or Noting(), end_ids=[], batch_size=num, policy=policy,
        drafting=drafting,
    )  # fmt: skip
    return engine.generate([Request(str(seed), (0,), num_tokens, PLAIN, seed) for seed in range(num)])


def test_only_who_drafts_is_proposed_for_and_no_further_than_the_longest() -> None:
    drafter = Noting()
    rows = decode(Dictated([[3, 0, 2], [0, 0, 0], [1, 1, 1], [3, 3, 3]]), num=3, drafter=drafter)
    assert drafter.asked[:3] == [(2, 3), (3, 1), (3, 3)]
    for number, lengths in enumerate([(3, 0, 1, 3), (0, 0, 1, 3), (2, 0, 1, 3)]):
        assert [one.verified for one in rows[number].rounds[:4]] == list(lengths)[: len(rows[number].rounds)]


def test_a_shorter_block_has_the_tokens_of_a_whole_one() -> None:
    """The first round of each: what is verified was drafted with the same numbers."""
    whole, short = (decode(Dictated([[length] * 40]), num=40) for length in (SIZE, 2))
    for one, other in zip(whole, short, strict=True):
        first, second = one.rounds[0], other.rounds[0]
        assert second.accepted == min(first.accepted, 2)
        assert first.confidence_logits[:2] == second.confidence_logits[:2]
        assert np.isnan(second.confidence_logits[2])


def test_without_drafts_it_is_plain_decoding() -> None:
    """The same numbers, so the same texts to the token."""
    drafter = Noting()
    nothing = decode(DraftNothing(), num=8, drafter=drafter)
    plain = Engine(as_target(TableTarget(TABLE)), drafter=None, end_ids=[], batch_size=8)
    expected = plain.generate([Request(str(seed), (0,), 9, PLAIN, seed) for seed in range(8)])
    assert [one.token_ids for one in nothing] == [one.token_ids for one in expected]
    assert drafter.asked == []
    assert {one.confidence_logits for item in nothing for one in item.rounds} == {()}


def test_what_a_draft_policy_is_told() -> None:
    policy = Dictated([[3, 2], [0, 1], [3, 3]])
    rows = decode(policy, num=2, policy=FixedLength(2))
    first, second, third = policy.told[:3]
    assert first.block_size == SIZE
    assert [counts.tolist() for counts in (first.rounds, first.total.drafted, first.last.accepted)] == [[0, 0]] * 3
    assert first.confidence is not None
    assert np.isnan(first.confidence).all()
    accepted = [[one.accepted for one in item.rounds] for item in rows]
    assert second.rounds.tolist() == [1, 1]
    assert second.last.drafted.tolist() == second.total.drafted.tolist() == [3, 2]
    assert second.last.verified.tolist() == [2, 2]
    assert second.last.accepted.tolist() == [accepted[0][0], accepted[1][0]]
    logits = np.array([item.rounds[0].confidence_logits for item in rows])
    assert second.confidence is not None
    np.testing.assert_allclose(second.confidence, 1 / (1 + np.exp(-logits)))
    assert np.isnan(second.confidence[1, 2])
    assert third.last.drafted.tolist() == [0, 1]
    assert third.total.drafted.tolist() == [3, 3]
    assert third.total.accepted.tolist() == [sum(accepted[0][:2]), sum(accepted[1][:2])]
    assert third.confidence is not None
    assert np.isnan(third.confidence[0]).all()


def test_a_drafter_without_confidence_has_none_to_tell() -> None:
    policy = Dictated([[1, 0]])
    decode(policy, num=2, drafter=Noting(confident=False))
    assert {history.confidence is None for history in policy.told} == {True}


def test_slots_that_were_not_drafted_have_no_chance() -> None:
    seen = list[list[list[float]]]()

    def spy(blocks: DraftedBlocks) -> list[int]:
        assert blocks.confidence is not None
        seen.append(blocks.confidence.tolist())
        return [SIZE] * blocks.num_requests

    rows = decode(Dictated([[2, 0]]), num=2, policy=spy)
    assert [[value > 0 for value in row] for row in seen[0]] == [[True, True, False], [False] * 3]
    assert [one.rounds[0].verified for one in rows] == [2, 0]


def test_a_confidence_that_is_no_number_is_not_taken_for_an_undrafted_slot() -> None:
    drafter = ScriptedDrafter(
        table_draft(NEAR), target=TableTarget(TABLE), block_size=SIZE, confidence=lambda texts: [math.nan] * len(texts)
    )
    with pytest.raises(DraftsmithError, match="confidences must be probabilities: got nan"):
        decode(Dictated([[2, 0]]), num=2, policy=SynchronousPolicy(SLOWER), drafter=drafter)


@pytest.mark.parametrize("lengths", [[1], [1, SIZE + 1], [-1, 0]])
def test_draft_lengths_that_cannot_be_used(lengths: list[int]) -> None:
    with pytest.raises(TargetError, match="the draft lengths of a policy cannot be used"):
        decode(Dictated([lengths]), num=2)


# The law


class ByThePast:
    """Skips whoever's last token was rejected or whose first confidence was low, and shortens in turn."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def draft_lengths(self, request_ids: tuple[str, ...], history: DraftHistory) -> Sequence[int]:
        assert history.confidence is not None
        lost = history.last.accepted < history.last.verified
        unsure = np.nan_to_num(history.confidence[:, 0], nan=1.0) < 0.5
        lengths = np.where(lost & unsure, 0, np.where(lost, 1, np.where(unsure, 2, SIZE)))
        lengths[history.last.drafted == 0] = np.where(history.rounds[history.last.drafted == 0] % 2, 0, SIZE)
        self.seen.update(lengths.tolist())
        return lengths.tolist()


SLOWER = CostTable([1, 1600, 2500, 3000, 4000, 6000], steps_per_s=[1.0, 0.9, 0.65, 0.6, 0.5, 0.3])
POLICIES: dict[str, Callable[[], LengthPolicy]] = {
    "whole": lambda: verify_all,
    "synchronous": lambda: SynchronousPolicy(SLOWER),
    "asynchronous": lambda: AsynchronousPolicy(SLOWER),
}


@pytest.mark.parametrize("name", POLICIES)
def test_texts_keep_the_targets_law(name: str) -> None:
    """Chi-square of 6,000 answers against exact enumeration; the seeds are fixed, so p is a constant."""
    toy, drafting = TableTarget(TABLE), ByThePast()
    rows = torch.from_numpy(np.random.default_rng(2).standard_normal((101, VOCAB)) * 1.5)
    drafter = ScriptedDrafter(whole_text_draft(rows), target=toy, block_size=SIZE, confidence=confidence_of)
    engine = Engine(
        as_target(toy), drafter=drafter, end_ids=[END], batch_size=1500, policy=POLICIES[name](), drafting=drafting
    )
    found = engine.generate([Request(str(seed), (0,), 5, PLAIN, seed) for seed in range(6000)])
    law = text_law(TABLE, first=0, num=5, end_ids=[END], sampling=PLAIN)
    assert p_value([one.token_ids for one in found], law) > 1e-3
    assert drafting.seen == {0, 1, 2, 3}


# The simulator tells a policy the same


def test_the_simulator_tells_what_the_engine_tells() -> None:
    """One recorded answer replayed: the same histories, round by round, while whole blocks are drafted and verified."""
    answer = decode(None, num=1, num_tokens=30)[0]
    policies = [Dictated([[SIZE]]), Dictated([[SIZE]])]
    decode(policies[0], num=1, num_tokens=30)
    requests = make_requests([0.0], prompt_tokens=[1], output_tokens=[30], domain=["chat"])
    simulate(
        requests, rounds=record_rounds({"chat": [answer]}, block_size=SIZE), policy=verify_all, limits=Limits(1),
        costs=StepCosts(CostTable([1], steps_per_s=[1.0])), drafting=policies[1],
    )  # fmt: skip
    engine, simulated = (policy.told for policy in policies)
    assert len(engine) == len(simulated) > 5
    for one, other in zip(engine, simulated, strict=True):
        assert one.rounds.tolist() == other.rounds.tolist()
        for name in ("drafted", "verified", "accepted"):
            assert getattr(one.total, name).tolist() == getattr(other.total, name).tolist()
            assert getattr(one.last, name).tolist() == getattr(other.last, name).tolist()
        assert one.confidence is not None
        assert other.confidence is not None
        np.testing.assert_allclose(one.confidence, other.confidence, rtol=1e-12)
