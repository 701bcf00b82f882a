"""Whole texts have the target's law: chi-square of many answers against exact enumeration, and power checks.

The seeds are fixed, so every p-value is a constant. A right engine keeps it above 1e-3; the power checks are engines
made wrong on purpose, which the same test at the same number of answers rejects below 1e-9.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from draftsmith.decoding.engine import Engine, Request
from draftsmith.decoding.policies import DraftedBlocks, LengthPolicy, verify_all
from draftsmith.params import Sampling
from draftsmith.serving.cost_table import CostTable
from draftsmith.serving.policies import AsynchronousPolicy, FixedLength, StaticThreshold, SynchronousPolicy
from tests.unit.decoding import biases
from tests.unit.decoding.laws import PLAIN, p_value, text_law
from tests.unit.decoding.toys import (
    DraftLogits,
    ScriptedDrafter,
    TableTarget,
    Text,
    as_target,
    table_draft,
    whole_text_draft,
)

VOCAB, SIZE, END, NUM_TOKENS, NUM_ANSWERS = 5, 3, 4, 4, 6000
BATCH_SIZE = 1500
RIGHT, WRONG = 1e-3, 1e-9


def random_rows(seed: int, *, spread: float = 1.5, num: int = VOCAB) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((num, VOCAB)) * spread)


TARGET = random_rows(0)
AT_RANDOM = table_draft(random_rows(9))
IMPOSSIBLE = torch.where(torch.arange(VOCAB) == 2, -math.inf, TARGET)
ADVERSARY = table_draft(torch.where(torch.arange(VOCAB) == 2, 3.0, random_rows(1)))
SLOWER = CostTable([1, 1600, 2500, 3000, 4000, 6000], steps_per_s=[1.0, 0.9, 0.65, 0.6, 0.5, 0.3])


def confidence_of(texts: list[Text]) -> list[float]:
    """Logits that depend on everything before the slot that they speak of."""
    return [float((3 * text[-1] + 5 * len(text)) % 7 - 2) for text in texts]


def engine_of(
    target: Tensor, draft: DraftLogits | None, *, policy: LengthPolicy = verify_all, batch_size: int = BATCH_SIZE
) -> Engine:
    toy = TableTarget(target)
    drafter = None
    if draft is not None:
        drafter = ScriptedDrafter(draft, target=toy, block_size=SIZE, confidence=confidence_of)
    return Engine(as_target(toy), drafter=drafter, end_ids=[END], batch_size=batch_size, policy=policy)


def p_of(engine: Engine, *, target: Tensor = TARGET, sampling: Sampling = PLAIN) -> float:
    """p-value of the engine's answers to the prompt (0)."""
    requests = [Request(str(seed), (0,), NUM_TOKENS, sampling, seed) for seed in range(NUM_ANSWERS)]
    found = [one.token_ids for one in engine.generate(requests)]
    return p_value(found, text_law(target, first=0, num=NUM_TOKENS, end_ids=[END], sampling=sampling))


def whole_blocks() -> LengthPolicy:
    return verify_all


def by_threshold() -> LengthPolicy:
    return StaticThreshold(0.6)


def synchronous() -> LengthPolicy:
    return SynchronousPolicy(SLOWER)


def asynchronous() -> LengthPolicy:
    return AsynchronousPolicy(SLOWER)


@pytest.mark.parametrize("policy", [whole_blocks, by_threshold, synchronous, asynchronous])
@pytest.mark.parametrize(
    ("target", "draft"),
    [
        pytest.param(TARGET, whole_text_draft(random_rows(2, num=101)), id="whole-text"),
        pytest.param(IMPOSSIBLE, ADVERSARY, id="adversary"),
    ],
)
def test_answers_have_the_targets_law(target: Tensor, draft: DraftLogits, policy: Callable[[], LengthPolicy]) -> None:
    """The schedulers choose for the whole batch, so that requests of different texts compete."""
    chosen, seen = policy(), set[int]()

    def noted(blocks: DraftedBlocks) -> list[int]:
        lengths = list(chosen(blocks))
        seen.update(lengths)
        return lengths

    assert p_of(engine_of(target, draft, policy=noted), target=target) > RIGHT
    assert seen == {SIZE} if policy is whole_blocks else len(seen) > 2


def test_plain_sampling_has_the_targets_law() -> None:
    assert p_of(engine_of(TARGET, None)) > RIGHT


# Requests of all sorts, which come and go


@dataclass(frozen=True)
class Sort:
    """What a request may ask for."""

    sampling: Sampling
    first: int
    num: int
    stop_ids: frozenset[int] = frozenset()


SORTS = [
    Sort(PLAIN, first=0, num=4),
    Sort(Sampling(temperature=0.7, top_p=0.8), first=1, num=4, stop_ids=frozenset({2})),
    Sort(Sampling(temperature=0.0), first=2, num=7),
    Sort(Sampling(temperature=1.7, top_k=3), first=3, num=3),
    Sort(Sampling(temperature=1.3, top_k=4, top_p=0.9, min_p=0.05), first=0, num=4, stop_ids=frozenset({0, 3})),
    Sort(Sampling(temperature=0.3), first=3, num=5),
    Sort(PLAIN, first=2, num=2, stop_ids=frozenset({1})),
]
EACH, NUM_DOOMED = 2000, 1500


@pytest.mark.parametrize("policy", [by_threshold, asynchronous])
def test_requests_that_join_and_leave_at_any_round_keep_their_own_laws(policy: Callable[[], LengthPolicy]) -> None:
    """Samplings, stop ids and length limits of all sorts share the batch; requests come in at random rounds, and some
    that were chosen beforehand are cancelled at random ones; a cancelled request's id comes back with another request.
    """
    draw = np.random.default_rng(5)
    doomed = [(int(kind), True) for kind in draw.integers(len(SORTS), size=NUM_DOOMED)]
    waiting = [(kind, False) for kind in range(len(SORTS)) for _ in range(EACH)] + doomed
    order = draw.permutation(len(waiting)).tolist()
    session = engine_of(TARGET, AT_RANDOM, policy=policy(), batch_size=700).session()
    here, free, num_cancelled = dict[str, tuple[int, bool]](), list[str](), 0
    found = [list[Text]() for _ in SORTS]
    while order or not session.is_idle:
        for place in order[: int(draw.integers(0, 900))]:
            name = free.pop() if free else str(place)
            here[name] = waiting[place]
            sort = SORTS[here[name][0]]
            session.submit(Request(name, (1, sort.first), sort.num, sort.sampling, place, sort.stop_ids))
            order.remove(place)
        for name in [name for name, (_, is_doomed) in here.items() if is_doomed and draw.random() < 0.4]:
            session.cancel(name)
            del here[name]
            free.append(name)
            num_cancelled += 1
        for one in session.step():
            kind, is_doomed = here.pop(one.request_id)
            if not is_doomed:
                found[kind].append(one.token_ids)
    assert num_cancelled > NUM_DOOMED // 3
    assert [len(texts) for texts in found] == [EACH] * len(SORTS)
    for sort, texts in zip(SORTS, found, strict=True):
        law = text_law(TARGET, first=sort.first, num=sort.num, end_ids=[END, *sort.stop_ids], sampling=sort.sampling)
        assert p_value(texts, law) > RIGHT, sort
    assert len(set(found[2])) == 1


# Power: the same test rejects engines that are wrong


@pytest.mark.parametrize("bias", biases.OF_VERIFICATION)
def test_a_biased_verification_is_found(bias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 3 are verified whole, but for the bonus token: behind those it would be past the length limit."""
    policy = FixedLength(1) if bias == "bonus of the draft" else verify_all
    biases.OF_VERIFICATION[bias](monkeypatch)
    assert p_of(engine_of(TARGET, AT_RANDOM, policy=policy)) < WRONG


HALF, THREE = Sampling(temperature=0.5), Sampling(top_k=3)


@pytest.mark.parametrize(
    ("bias", "sampling"),
    [
        (biases.verifying(biases.untransformed_acceptance), HALF),
        (biases.no_filters, THREE),
        (biases.one_number_for_two_purposes, PLAIN),
    ],
)
def test_a_bias_of_sampling_is_found(bias: biases.Bias, sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    assert p_of(engine_of(TARGET, AT_RANDOM), sampling=sampling) > RIGHT
    bias(monkeypatch)
    assert p_of(engine_of(TARGET, AT_RANDOM), sampling=sampling) < WRONG


def looks_back(blocks: DraftedBlocks) -> list[int]:
    """Verifies all where the last confidence, which has seen the other tokens, is high, otherwise nothing."""
    assert blocks.confidence is not None
    return [blocks.block_size * int(row[-1] > 0.5) for row in blocks.confidence]


def test_a_schedule_that_looks_back_is_found() -> None:
    assert p_of(engine_of(TARGET, AT_RANDOM, policy=looks_back)) < WRONG
