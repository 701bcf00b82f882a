"""Speculative decoding has the target's own law, exactly: `exact` sums over all drafts and acceptances of a round.

Toy targets here; every kind of drafter on every family of target is in the contract tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from draftsmith.decoding.policies import DraftedBlocks, LengthPolicy
from draftsmith.params import Sampling
from draftsmith.serving.cost_table import CostTable
from draftsmith.serving.policies import (
    AsynchronousPolicy,
    FixedLength,
    NoSpeculation,
    StaticThreshold,
    SynchronousPolicy,
)
from tests.unit.decoding import biases
from tests.unit.decoding.exact import CLOSE, RoundLaw, World, round_laws, table_logits
from tests.unit.decoding.toys import DraftLogits, ScriptedDrafter, TableTarget, Text, table_draft, whole_text_draft

VOCAB, SIZE = 4, 3
FAR = 2e-2
"""Total variation that a biased engine's law is off by, at least."""


def random_rows(seed: int, *, spread: float = 1.5, num: int = VOCAB) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((num, VOCAB)) * spread)


def with_token_2(rows: Tensor, logit: float) -> Tensor:
    return torch.where(torch.arange(VOCAB) == 2, logit, rows)


TARGET = random_rows(0)
IMPOSSIBLE = with_token_2(TARGET, -math.inf)  # a target that never writes token 2
UNLIKELY = with_token_2(TARGET, -25.0)  # and one that hardly ever does
DRAFTERS: dict[str, tuple[Tensor, DraftLogits]] = {
    "the target's own law": (TARGET, table_draft(TARGET)),
    "likely where the target is not": (TARGET, table_draft(-TARGET)),
    "at random": (TARGET, table_draft(random_rows(9))),
    "by the whole text": (TARGET, whole_text_draft(random_rows(2, num=101))),
    "nearly one-hot": (TARGET, table_draft(random_rows(3, spread=40.0))),
    "mostly what is impossible": (IMPOSSIBLE, table_draft(with_token_2(random_rows(1), 3.0))),
    "only what is impossible": (IMPOSSIBLE, table_draft(with_token_2(torch.full((VOCAB, VOCAB), -math.inf), 0.0))),
    "mostly what hardly ever comes": (UNLIKELY, table_draft(with_token_2(random_rows(1), 8.0))),
    "never one of the tokens": (TARGET, table_draft(IMPOSSIBLE)),
}
"""Name -> a target, and how a drafter drafts for it."""
SAMPLINGS = {
    "plain": Sampling(),
    "cold": Sampling(temperature=0.3),
    "hot": Sampling(temperature=1.7),
    "nucleus": Sampling(top_p=0.8),
    "two likeliest": Sampling(top_k=2),
    "likely": Sampling(min_p=0.3),
    "hot, three, nucleus": Sampling(temperature=1.7, top_k=3, top_p=0.85),
    "cold, all filters": Sampling(temperature=0.6, top_k=3, top_p=0.95, min_p=0.1),
    "greedy": Sampling(temperature=0.0),
}


def confidence_of(texts: list[Text]) -> list[float]:
    """Logits that depend on everything before the slot that they speak of."""
    return [float((3 * text[-1] + 5 * len(text)) % 7 - 2) for text in texts]


def laws(worlds: list[World], *, name: str = "at random", rounds_before: int = 1) -> dict[str, RoundLaw]:
    table, draft = DRAFTERS[name]
    target = TableTarget(table)
    return round_laws(
        target,
        drafter=ScriptedDrafter(draft, target=target, block_size=SIZE, confidence=confidence_of),
        worlds=worlds,
        prompt=(0, 1),
        rounds_before=rounds_before,
        logits_after=table_logits(table),
    )


@pytest.mark.parametrize("rounds_before", [0, 2])
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_sampling_with_every_drafter(name: str, rounds_before: int) -> None:
    """All samplings share one batch; each has a past of its own."""
    worlds = [World(key, sampling, seed) for seed, (key, sampling) in enumerate(SAMPLINGS.items())]
    found = laws(worlds, name=name, rounds_before=rounds_before)
    assert {key: law.distance for key, law in found.items() if not law.distance < CLOSE} == {}
    for law in found.values():
        assert law.found.sum() == pytest.approx(1.0)
    assert found["plain"].accepted == {
        "the target's own law": {3}, "only what is impossible": {0}
    }.get(name, {0, 1, 2, 3})  # fmt: skip


# With verification lengths that a policy chooses

FALLING = CostTable([1, 2, 3, 4, 6, 8], steps_per_s=[1.0, 0.95, 0.75, 0.7, 0.62, 0.5])
STEEP = CostTable([1, 2, 3, 4], steps_per_s=[1.0, 0.7, 0.5, 0.3])
CALM, TIGHT = (0.9, 0.8, 0.1), (0.2, 0.9, 0.9)
POLICIES: dict[str, tuple[Callable[[], LengthPolicy], tuple[tuple[float, ...], ...]]] = {
    "no speculation": (NoSpeculation, ()),
    "one token": (lambda: FixedLength(1), ()),
    "two tokens": (lambda: FixedLength(2), ()),
    "threshold": (lambda: StaticThreshold(0.6), ()),
    "synchronous, alone": (lambda: SynchronousPolicy(FALLING), ()),
    "synchronous, among others": (lambda: SynchronousPolicy(FALLING), (CALM, TIGHT)),
    "asynchronous, alone": (lambda: AsynchronousPolicy(STEEP), ()),
    "asynchronous, among others": (lambda: AsynchronousPolicy(FALLING), (CALM, TIGHT)),
    "asynchronous, one step stale": (lambda: AsynchronousPolicy(FALLING, staleness=1), (CALM,)),
}
"""Name -> a policy of each request's own, and the confidences of requests beside it."""
FIXED = {"no speculation": {0}, "one token": {1}, "two tokens": {2}}


@pytest.mark.parametrize("name", ["likely where the target is not", "at random", "by the whole text"])
def test_every_schedule_keeps_the_law(name: str) -> None:
    """Each with two samplings, at once and after enough rounds for a history; lengths differ within a schedule."""
    worlds = [
        World(f"{key}: {choice}", SAMPLINGS[choice], seed, policy, companions)
        for key, (policy, companions) in POLICIES.items()
        for choice, seed in (("plain", 1), ("hot, three, nucleus", 2))
    ]
    lengths = {key: set[int]() for key in POLICIES}
    for rounds_before in (0, 3):
        found = laws(worlds, name=name, rounds_before=rounds_before)
        assert {key: law.distance for key, law in found.items() if not law.distance < CLOSE} == {}
        for key, law in found.items():
            lengths[key.split(":")[0]] |= law.verified
    for key, seen in lengths.items():
        assert seen == FIXED[key] if key in FIXED else len(seen) > 1, key


# Power: biased engines are far from the law, by the same sum


@pytest.mark.parametrize("bias", biases.OF_VERIFICATION)
def test_a_biased_verification_is_found(bias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert laws([World("plain")])["plain"].distance < CLOSE
    biases.OF_VERIFICATION[bias](monkeypatch)
    assert laws([World("plain")])["plain"].distance > FAR


def test_acceptance_against_the_untransformed_target_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    worlds = [World("half", Sampling(temperature=0.5)), World("three", Sampling(top_k=3))]
    assert max(law.distance for law in laws(worlds).values()) < CLOSE
    with monkeypatch.context() as patch:
        biases.verifying(biases.untransformed_acceptance)(patch)
        assert laws(worlds)["half"].distance > FAR
    biases.no_filters(monkeypatch)
    found = laws(worlds)
    assert found["half"].distance < CLOSE
    assert found["three"].distance > FAR


def looks_back(blocks: DraftedBlocks) -> list[int]:
    """Verifies all where the last confidence, which has seen the other tokens, is high, otherwise nothing."""
    assert blocks.confidence is not None
    return [blocks.block_size * int(row[-1] > 0.5) for row in blocks.confidence]


def test_a_schedule_that_looks_back_is_found() -> None:
    assert laws([World("back", policy=lambda: looks_back)])["back"].distance > FAR


def test_the_counterexample_of_a_retrospective_schedule() -> None:
    """DSpark appendix A: p_t = (0.7, 0.3), p_d = (0.5, 0.5), c_1 = 0.8, c_2 = 0.9 after A and 0 after B.

    The length of most throughput, of all, emits (0.85, 0.15); Algorithm 1 verifies nothing and emits (0.7, 0.3).
    """
    costs = CostTable([1, 2, 3], steps_per_s=[1.0, 0.5, 0.45])
    table, even = torch.tensor([[0.7, 0.3]] * 2).log(), torch.zeros(2, 2)

    def confidence(texts: list[Text]) -> list[float]:
        return [math.log(4) if len(text) == 3 else (math.log(9) if text[-1] == 0 else -40.0) for text in texts]

    def retrospective(blocks: DraftedBlocks) -> list[int]:
        assert blocks.confidence is not None
        survival = blocks.confidence.cumprod(axis=1)
        gain = np.column_stack([np.ones(len(survival)), 1 + survival.cumsum(axis=1)]) * costs.look_up([1, 2, 3])
        return gain.argmax(axis=1).tolist()

    drafter = ScriptedDrafter(table_draft(even), target=TableTarget(table), block_size=2, confidence=confidence)
    found = round_laws(
        TableTarget(table),
        drafter=drafter,
        worlds=[World("one", policy=lambda: SynchronousPolicy(costs)), World("all", policy=lambda: retrospective)],
        prompt=(0, 1),
        rounds_before=0,
        logits_after=table_logits(table),
    )
    first = {name: law.found.reshape(2, -1).sum(axis=1) for name, law in found.items()}
    assert first["one"] == pytest.approx([0.7, 0.3], abs=1e-6)
    assert first["all"] == pytest.approx([0.85, 0.15], abs=1e-6)
    assert found["one"].verified == {0}
    assert found["all"].verified == {0, 2}
