"""Measuring with the real engine, on a clock that only the parts of a step move: every sample is known exactly."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.decoding import session
from draftsmith.drafters.base import Proposal, Sampler
from draftsmith.errors import DraftsmithError, MachineError
from draftsmith.nn.kv import FlatBatch, KeyValueRows
from draftsmith.params_serving import Profile as ProfileRow
from draftsmith.serving import profiling
from draftsmith.serving.profiling import (
    Timings,
    context_requests,
    fitted,
    most_context,
    num_steps,
    spread_lengths,
    time_engine,
    token_shapes,
)
from draftsmith.targets.base import TargetOutput
from tests.unit.decoding.toys import ScriptedDrafter, TableTarget, as_target, table_draft

VOCAB, BLOCK = 7, 3
PROMPTS = [[1, 2, 3], [4, 5, 6, 1, 2]]
ROW = ProfileRow(num_requests=(1, 3), context_tokens=(6, 20), repeats=2, warmup=1, budget_s=1e9, seed=3)


class Clock:
    """Seconds that pass only when somebody says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class SlowTarget(TableTarget):
    """A prefill pass takes 1 s and 0.1 s a token; another 2 s, 0.5 s a token and 0.001 s a token before its own."""

    def __init__(self, table: Tensor, *, clock: Clock) -> None:
        super().__init__(table)
        self.clock, self.most = clock, 0

    def forward(self, token_ids: Tensor, *, batch: FlatBatch, rows: KeyValueRows) -> TargetOutput:
        self.most = max(self.most, batch.end)
        if batch.is_prefill:
            self.clock.now += 1 + 0.1 * batch.num_tokens
        else:
            self.clock.now += 2 + 0.5 * batch.num_tokens + 0.001 * sum(batch.starts)
        return super().forward(token_ids, batch=batch, rows=rows)


class SlowDrafter(ScriptedDrafter):
    """A block takes 3 s, 0.25 s a request, and 0.125 s for each slot that it has."""

    def propose(
        self,
        anchors: Tensor,
        *,
        positions: list[int],
        rows: KeyValueRows,
        sample: Sampler,
        slots: Sequence[int] | None = None,
        num_tokens: int | None = None,
    ) -> Proposal:
        assert isinstance(self.clock, Clock)
        self.clock.now += 3 + 0.25 * len(positions) + 0.125 * (BLOCK if num_tokens is None else num_tokens)
        return super().propose(
            anchors, positions=positions, rows=rows, sample=sample, slots=slots, num_tokens=num_tokens
        )

    clock: Any = None


def measure(monkeypatch: pytest.MonkeyPatch, row: ProfileRow = ROW) -> tuple[Timings, SlowTarget, int]:
    """Timings, the target, and how often progress was told."""
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1))
    target = SlowTarget(table, clock=clock)
    drafter = SlowDrafter(table_draft(table + 0.5), target=target, block_size=BLOCK)
    drafter.clock = clock
    told: list[None] = []
    found = time_engine(as_target(target), drafter=drafter, prompts=PROMPTS, row=row, on_step=lambda: told.append(None))
    return found, target, len(told)


def test_every_sample_is_what_its_shape_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's verification starts at the anchors, one before the end of each context."""
    found, _, told = measure(monkeypatch)
    assert told == len(found.steps) == num_steps(ROW, block_size=BLOCK)
    for step in found.steps:
        starts = step.num_requests * (step.context_tokens - 1)
        assert step.verify_s == pytest.approx(2 + 0.5 * step.batch_tokens + 0.001 * starts, abs=1e-9)
        drafted = step.batch_tokens // step.num_requests - 1 if step.sweep == "blocks" else BLOCK
        assert step.draft_s == pytest.approx(3 + 0.25 * step.num_requests + 0.125 * drafted, abs=1e-9)
        assert step.upkeep_s == pytest.approx(0, abs=1e-9)
        assert step.context_tokens >= step.nominal_context + 2  # a token of prefill, one of the warm-up
    for one in found.passes:
        assert one.seconds == pytest.approx(1 + 0.1 * one.num_tokens)


def test_every_shape_is_visited_once_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """R = 3, K = 3: whole lengths 3, 6, 9, 12 and one odd step further; blocks of 1 and 2 tokens, shorter than whole
    ones; at contexts lengths 0, 1 and 3 of 3 requests."""
    found, _, _ = measure(monkeypatch)
    shapes = Counter((step.sweep, step.num_requests, step.batch_tokens, step.nominal_context) for step in found.steps)
    assert shapes == Counter({
        **{("tokens", 1, number, 6): 2 for number in (1, 2, 3, 4)},
        **{("tokens", 3, number, 6): 2 for number in (3, 4, 6, 7, 9, 10, 12)},
        **{("blocks", requests, requests * (1 + length), 6): 2 for requests in (1, 3) for length in (1, 2)},
        **{("context", 3, number, context): 2 for number in (3, 6, 12) for context in (6, 20)},
    })  # fmt: skip
    assert (found.num_rounds, found.rounds_asked) == (2, 2)


def test_rounds_are_in_orders_of_their_own_and_of_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    def order(row: ProfileRow) -> list[tuple[str, int, int]]:
        return [(one.sweep, one.batch_tokens, one.nominal_context) for one in measure(monkeypatch, row)[0].steps]

    found = order(ROW)
    half = len(found) // 2
    assert sorted(found[:half]) == sorted(found[half:])
    assert found[:half] != found[half:]
    assert found == order(ROW)
    assert found != order(ROW.model_copy(update={"seed": 4}))


def test_prefill_is_one_pass_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for 20 tokens: 3 prompts of 6 are one pass; of the longest context only 1 is, so that R there is 1."""
    for module in (session, profiling):
        monkeypatch.setattr(module, "PREFILL_TOKENS", 20)
    found, _, _ = measure(monkeypatch)
    passes = Counter((one.num_requests, one.num_tokens) for one in found.passes)
    # Twice each R of the sweep over tokens; once each context, which stays in flight.
    assert passes == Counter({(1, 6): 2 + 1, (3, 18): 2, (1, 20): 1})


def test_a_batch_that_no_pass_holds_is_admitted_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (session, profiling):
        monkeypatch.setattr(module, "PREFILL_TOKENS", 13)
    found, _, _ = measure(monkeypatch, ROW.model_copy(update={"context_tokens": (6,)}))
    passes = Counter((one.num_requests, one.num_tokens) for one in found.passes)
    assert passes == Counter({(1, 6): 2 + 1 + 2, (2, 12): 2})
    assert {step.num_requests for step in found.steps if step.sweep == "tokens"} == {1, 3}


def test_contexts_stay_within_what_is_foretold(monkeypatch: pytest.MonkeyPatch) -> None:
    _, target, _ = measure(monkeypatch)
    assert 20 < target.most <= most_context(ROW, block_size=BLOCK)


def test_a_spent_budget_leaves_rounds_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rounds are always measured; another one only if it fits, by the time that those before it took."""
    found, _, told = measure(monkeypatch, ROW.model_copy(update={"repeats": 9, "budget_s": 0.1}))
    assert (found.num_rounds, found.rounds_asked, told) == (3, 9, 3 * num_steps(ROW, block_size=BLOCK) // 2)
    spent = sum(step.draft_s + step.verify_s for step in found.steps)
    more, _, _ = measure(monkeypatch, ROW.model_copy(update={"repeats": 9, "budget_s": 2.2 * spent}))
    assert 3 < more.num_rounds < 9
    all_of_them, _, _ = measure(monkeypatch, ROW.model_copy(update={"repeats": 2, "budget_s": 0.1}))
    assert all_of_them.num_rounds == 2


@pytest.mark.parametrize(
    ("requests", "tokens", "lengths"),
    [(1, 1, [0]), (1, 8, [7]), (3, 3, [0, 0, 0]), (3, 10, [3, 2, 2]), (4, 10, [2, 2, 1, 1])],
)
def test_lengths_are_spread_evenly(requests: int, tokens: int, lengths: list[int]) -> None:
    assert spread_lengths(requests, batch_tokens=tokens) == lengths


def test_shapes_cover_whole_lengths_and_odd_numbers_between() -> None:
    assert token_shapes(1, block_size=3) == (1, 2, 3, 4)
    assert token_shapes(2, block_size=2) == (2, 3, 4, 5, 6)
    assert token_shapes(16, block_size=2) == (16, 25, 32, 41, 48)
    for requests in range(2, 20):
        shapes = token_shapes(requests, block_size=5)
        assert len(shapes) == 11
        assert all(max(spread_lengths(requests, batch_tokens=number)) <= 5 for number in shapes)


@pytest.mark.parametrize(("requests", "contexts", "expected"), [((1, 8, 16), (128, 512), 8), ((4, 2), (4000,), 2)])
def test_the_most_requests_whose_contexts_fit_a_pass(
    requests: tuple[int, ...], contexts: tuple[int, ...], expected: int
) -> None:
    assert context_requests(ProfileRow(num_requests=requests, context_tokens=contexts)) == expected


def test_prompts_keep_their_end() -> None:
    assert fitted([1, 2, 3], num=2) == (2, 3)
    assert fitted([1, 2, 3], num=7) == (3, 1, 2, 3, 1, 2, 3)


def test_without_prompts_there_is_nothing_to_measure() -> None:
    target = TableTarget(torch.eye(VOCAB))
    drafter = ScriptedDrafter(table_draft(torch.eye(VOCAB)), target=target, block_size=BLOCK)
    with pytest.raises(DraftsmithError, match="no prompt to profile with"):
        time_engine(as_target(target), drafter=drafter, prompts=[[]], row=ROW, on_step=lambda: None)


def test_a_machine_without_the_memory_says_what_to_change() -> None:
    class Full(TableTarget):
        def forward(self, token_ids: Tensor, *, batch: FlatBatch, rows: KeyValueRows) -> TargetOutput:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried 9 GiB\nmore")

    target = Full(torch.eye(VOCAB))
    drafter = ScriptedDrafter(table_draft(torch.eye(VOCAB)), target=target, block_size=BLOCK)
    with pytest.raises(
        MachineError, match=r"got CUDA out of memory\. Tried 9 GiB, expected fewer.*profile.num_requests"
    ):
        time_engine(as_target(target), drafter=drafter, prompts=PROMPTS, row=ROW, on_step=lambda: None)
