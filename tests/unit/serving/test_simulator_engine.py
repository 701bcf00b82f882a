"""The simulator against the real engine: the same policy, rounds recorded on other prompts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from draftsmith.calibration.sts import confidence
from draftsmith.decoding.engine import Engine, Request
from draftsmith.decoding.policies import DraftedBlocks, LengthPolicy, verify_all
from draftsmith.decoding.rounds import Generation
from draftsmith.errors import DraftsmithError
from draftsmith.params import Sampling
from draftsmith.serving.cost_table import CostTable
from draftsmith.serving.engine_comparison import EngineComparison, compare_with_engine
from draftsmith.serving.policies import (
    AsynchronousPolicy,
    FixedLength,
    NoSpeculation,
    StaticThreshold,
    SynchronousPolicy,
)
from draftsmith.serving.recorded import RecordedRounds, record_rounds
from tests.unit.decoding.toys import ScriptedDrafter, TableTarget, Text, as_target, table_draft

VOCAB, BLOCK_SIZE, END = 16, 5, 15
NUM_PROMPTS, NUM_TOKENS = 64, 40
LIMITS = (2, 8, 24)
TEMPERATURES = [2.0, 1.8, 1.6, 1.4, 1.2]
TABLE = CostTable(np.arange(1, 200), steps_per_s=1 / (1 + np.arange(1, 200) / 16))
"""A step of the least batch takes little longer than one of no tokens, one of the largest many times as long."""


def toy() -> tuple[TableTarget, ScriptedDrafter]:
    """Texts stay for a while among the first tokens, which are drafted well, or the others, which are not.

    Confidence is twice the logit of the true chance of acceptance: overconfident, and mended by a temperature of 2.
    """
    generator = torch.Generator().manual_seed(3)
    hard = torch.arange(VOCAB) >= VOCAB // 2
    table = 1.2 * torch.randn(VOCAB, VOCAB, generator=generator)
    table[:, END] = -1.0
    table += 2.0 * (hard[:, None] == hard[None, :])
    noise = torch.randn(VOCAB, VOCAB, generator=generator)
    draft = table + torch.where(hard, 2.5, 0.4)[:, None] * noise
    chances = torch.minimum(table.softmax(1), draft.softmax(1)).sum(1).tolist()
    target = TableTarget(table)

    def said(texts: list[Text]) -> list[float]:
        return [2.0 * math.log(chances[text[-1]] / (1 - chances[text[-1]])) for text in texts]

    return target, ScriptedDrafter(table_draft(draft), target=target, block_size=BLOCK_SIZE, confidence=said)


def prompts(first: int) -> list[Request]:
    rng = np.random.default_rng(first)
    return [
        Request(f"p{first + i}", tuple(rng.integers(0, END, 4).tolist()), NUM_TOKENS, Sampling(), seed=first + i)
        for i in range(NUM_PROMPTS)
    ]


def decode(requests: list[Request], *, policy: LengthPolicy, batch_size: int = 16) -> list[Generation]:
    target, drafter = toy()
    engine = Engine(
        as_target(target), drafter=drafter, end_ids=[END], batch_size=batch_size, policy=policy,
        temperatures=TEMPERATURES,
    )  # fmt: skip
    return engine.generate(requests)


@pytest.fixture(scope="module")
def rounds() -> RecordedRounds:
    """Of prompts that no test decodes."""
    return record_rounds({"chat": decode(prompts(1_000), policy=verify_all)}, block_size=BLOCK_SIZE)


def compare(rounds: RecordedRounds, new_policy: Callable[[], LengthPolicy]) -> tuple[EngineComparison, ...]:
    target, drafter = toy()
    return compare_with_engine(
        prompts(0), domain=["chat"] * NUM_PROMPTS, target=as_target(target), drafter=drafter, end_ids=[END],
        new_policy=new_policy, temperatures=TEMPERATURES, rounds=rounds, max_requests=LIMITS, seeds=range(4),
    )  # fmt: skip


POLICIES: dict[str, Callable[[], LengthPolicy]] = {
    "synchronous": lambda: SynchronousPolicy(TABLE),
    "asynchronous": lambda: AsynchronousPolicy(TABLE),
    "threshold": lambda: StaticThreshold(0.7),
}


@pytest.mark.parametrize("name", POLICIES)
def test_lengths_are_those_of_the_engine(name: str, rounds: RecordedRounds) -> None:
    assert rounds.ended.any()
    found = compare(rounds, POLICIES[name])
    assert [one.max_requests for one in found] == list(LIMITS)
    for one in found:
        assert one.engine_length > 0.3
        assert abs(one.length_error) < 0.10, one
        assert abs(one.accepted_length_error) < 0.10, one
    if name != "threshold":
        assert found[0].engine_length > 1.5 * found[-1].engine_length, "the load changes nothing"


@pytest.mark.parametrize("length", [0, 1, BLOCK_SIZE])
def test_accepted_lengths_are_those_of_the_engine(length: int, rounds: RecordedRounds) -> None:
    for one in compare(rounds, lambda: FixedLength(length)):
        assert one.engine_length == one.simulated_length == length
        assert one.length_error == 0
        assert abs(one.accepted_length_error) < 0.10
        if length == 0:
            assert one.engine_accepted_length == one.simulated_accepted_length == 1
            assert one.engine_rounds * 4 == one.simulated_rounds


def test_the_same_prompts_are_replayed_round_by_round() -> None:
    """Full-length verification of one recorded answer, asked for again: the engine's own rounds, in its own order."""
    request = prompts(0)[0]
    recorded = decode([request], policy=verify_all)
    told = list[tuple[float, ...]]()

    def spy(blocks: DraftedBlocks) -> list[int]:
        assert blocks.confidence is not None
        told.append(tuple(blocks.confidence[0]))
        return [BLOCK_SIZE]

    target, drafter = toy()
    (found,) = compare_with_engine(
        [request], domain=["chat"], target=as_target(target), drafter=drafter, end_ids=[END], new_policy=lambda: spy,
        temperatures=TEMPERATURES, rounds=record_rounds({"chat": recorded}, block_size=BLOCK_SIZE), max_requests=[1],
        seeds=[0],
    )  # fmt: skip
    num = len(recorded[0].rounds)
    assert num > 5
    assert (found.engine_rounds, found.engine_committed) == (found.simulated_rounds, found.simulated_committed)
    assert told[:num] == told[num:], "the engine's confidences, then the simulator's, equal to the bit"
    expected = confidence([one.confidence_logits for one in recorded[0].rounds], temperatures=TEMPERATURES)
    assert told[:num] == [tuple(row) for row in expected]


def test_errors_by_hand() -> None:
    """3 and 2 draft tokens a round, 2 and 2.5 tokens."""
    one = EngineComparison(8, engine_rounds=10, engine_verified=30, engine_committed=20,
                           simulated_rounds=20, simulated_verified=40, simulated_committed=50)  # fmt: skip
    assert (one.engine_length, one.simulated_length) == (3.0, 2.0)
    assert (one.engine_accepted_length, one.simulated_accepted_length) == (2.0, 2.5)
    assert one.length_error == pytest.approx(-1 / 3)
    assert one.accepted_length_error == pytest.approx(0.25)
    assert dataclasses.replace(one, engine_verified=0).length_error == math.inf
    assert dataclasses.replace(one, engine_verified=0, simulated_verified=0).length_error == 0


def test_rounds_of_a_shorter_verification_cannot_be_replayed() -> None:
    for policy in (NoSpeculation(), FixedLength(2)):
        answers = decode(prompts(0)[:2], policy=policy)
        with pytest.raises(DraftsmithError, match="only rounds of full-length verification can be replayed"):
            record_rounds({"chat": answers}, block_size=BLOCK_SIZE)
