"""Measuring what a step costs: the real engine on real prompts, with verification lengths that are dictated.

A probe policy has R requests verify N batch tokens, spread as evenly as possible, so that every shape of a step can be
timed without waiting for a drafter's confidence to ask for it. Requests have no end ids and no limit: R is constant.
The shapes are visited in a new order each round, so that a machine that drifts does so under all of them alike.

Verification runs the LM head only over the rows on which a decision hangs (`decoding.verification`: in waves on a CPU),
so that its time is that of the acceptance which the drafter has at the row's temperature, as in serving.
Letters: R requests of a step, K block size, N batch tokens.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from draftsmith.decoding.drafting import DraftHistory
from draftsmith.decoding.engine import Engine, Request
from draftsmith.decoding.policies import DraftedBlocks
from draftsmith.decoding.session import PREFILL_TOKENS
from draftsmith.drafters.base import Drafter
from draftsmith.errors import DraftsmithError, MachineError
from draftsmith.params import Sampling
from draftsmith.params_serving import Profile as ProfileRow
from draftsmith.serving.profile_points import PassSample, StepSample, Sweep
from draftsmith.targets.base import Target

UNLIMITED = 1 << 40
LEAST_ROUNDS = 3  # a median of fewer is no protection from a moment in which the machine was busy
WHERE = "params.yaml: profile"
Prompts = Sequence[Sequence[int]]


@dataclass
class Timings:
    """What was timed; `num_rounds` visits of every shape, of `rounds_asked`."""

    rounds_asked: int
    num_rounds: int = 0
    steps: list[StepSample] = field(default_factory=list)
    passes: list[PassSample] = field(default_factory=list)


@dataclass(frozen=True)
class Shape:
    """A step to be timed: N, and the length of the blocks that are drafted for it."""

    sweep: Sweep
    batch_tokens: int
    draft_tokens: int


@dataclass(frozen=True)
class Visit:
    """A batch and its steps. That of a context stays in flight for all rounds, others begin anew."""

    num_requests: int
    context: int
    shapes: tuple[Shape, ...]
    stays: bool


def spread_lengths(num_requests: int, *, batch_tokens: int) -> list[int]:
    """Draft tokens to verify of each request [R]: N - R in all, no two further apart than 1, the longer ones first."""
    length, longer = divmod(batch_tokens - num_requests, num_requests)
    return [length + (place < longer) for place in range(num_requests)]


def token_shapes(num_requests: int, *, block_size: int) -> tuple[int, ...]:
    """The N that are measured at R: every length of all requests, and between two of them one uneven, odd number."""
    whole = [num_requests * (1 + length) for length in range(block_size + 1)]
    between = [number + (num_requests // 2 | 1) for number in whole[:-1]] if num_requests > 1 else []
    return tuple(sorted({*whole, *between}))


def context_requests(row: ProfileRow) -> int:
    """R of the sweep over contexts: the most whose longest contexts are one prefill pass, else the fewest."""
    fit = [number for number in row.num_requests if number * max(row.context_tokens) <= PREFILL_TOKENS]
    return max(fit, default=min(row.num_requests))


def visits(row: ProfileRow, *, block_size: int) -> list[Visit]:
    """Of one round. The sweep over tokens, and that over blocks that are shorter than K, have the shortest context."""
    shortest, held = min(row.context_tokens), context_requests(row)
    lengths = dict.fromkeys((0, block_size // 2, block_size))
    contexts = tuple(Shape("context", held * (1 + length), block_size) for length in lengths)
    return [
        *(Visit(number, shortest, _shapes(number, block_size), False) for number in sorted(set(row.num_requests))),
        *(Visit(held, context, contexts, True) for context in sorted(set(row.context_tokens))),
    ]


def _shapes(num_requests: int, block_size: int) -> tuple[Shape, ...]:
    shorter = sorted({1, (1 + block_size) // 2} - {block_size})
    numbers = token_shapes(num_requests, block_size=block_size)
    return (
        *(Shape("tokens", number, block_size) for number in numbers),
        *(Shape("blocks", num_requests * (1 + length), length) for length in shorter),
    )


def num_steps(row: ProfileRow, *, block_size: int) -> int:
    """Steps that are kept, if the budget suffices."""
    return row.repeats * sum(len(visit.shapes) for visit in visits(row, block_size=block_size))


def most_context(row: ProfileRow, *, block_size: int) -> int:
    """Tokens that a request may reach: its context, and whole blocks of all steps that it is in flight for."""
    return max(
        visit.context + (block_size + 1) * (row.warmup + _num_groups(visit)
                         + len(visit.shapes) * (row.repeats if visit.stays else 1))
        for visit in visits(row, block_size=block_size)
    )  # fmt: skip


def time_engine(
    target: Target, *, drafter: Drafter, prompts: Prompts, row: ProfileRow, on_step: Callable[[], None]
) -> Timings:
    """Time every shape of the sweeps `row.repeats` times, fewer (at least 3) if `row.budget_s` is spent before.

    `on_step` is called for each step that is kept. Raises DraftsmithError without prompts, MachineError if the
    machine's memory does not hold a batch.
    """
    if not any(prompts):
        raise DraftsmithError("no prompt to profile with", expected="prompts of the calibration split")
    bench = _Bench(target, drafter=drafter, prompts=[ids for ids in prompts if ids], row=row)
    try:
        for _ in bench.run():
            on_step()
    except torch.OutOfMemoryError as error:
        raise MachineError(
            "this machine's memory does not hold the batches of the profile", got=str(error).splitlines()[0],
            expected="fewer requests or shorter contexts", where=f"{WHERE}.num_requests, {WHERE}.context_tokens",
        ) from error  # fmt: skip
    return bench.timings


class _Bench:
    """All rounds of a profile; contexts stay in flight, the sweep over tokens begins anew each time."""

    def __init__(self, target: Target, *, drafter: Drafter, prompts: Prompts, row: ProfileRow) -> None:
        self.timings = Timings(row.repeats)
        self._target, self._drafter, self._prompts, self._row = target, drafter, prompts, row
        self._order = random.Random(row.seed)
        self._held: dict[int, _Batch] = {}

    def run(self) -> Iterator[None]:
        """Yields at each step that is kept."""
        started = time.perf_counter()
        todo = visits(self._row, block_size=self._drafter.config.block_size)
        for number in range(1, self._row.repeats + 1):
            for visit in self._order.sample(todo, len(todo)):
                yield from self._visit(visit)
            self.timings.num_rounds = number
            spent = time.perf_counter() - started
            if number >= LEAST_ROUNDS and spent * (number + 1) / number > self._row.budget_s:
                return

    def _visit(self, visit: Visit) -> Iterator[None]:
        batch = self._held.get(visit.context) if visit.stays else None
        if batch is None:
            batch = _Batch(visit, bench=self)
            if visit.stays:
                self._held[visit.context] = batch
        for shape in self._order.sample(visit.shapes, len(visit.shapes)):
            self.timings.steps.append(batch.step(shape))
            yield

    def batch_parts(self, visit: Visit) -> tuple[Engine, list[Request]]:
        """An engine with nothing in flight, and what is to be."""
        sampling = Sampling(temperature=self._row.temperature)
        chosen = [self._order.choice(self._prompts) for _ in range(visit.num_requests)]
        requests = [
            Request(str(index), fitted(ids, num=visit.context), UNLIMITED, sampling, seed=self._order.getrandbits(32))
            for index, ids in enumerate(chosen)
        ]
        return Engine(self._target, drafter=self._drafter, end_ids=(), batch_size=visit.num_requests), requests

    @property
    def warmup(self) -> int:
        return self._row.warmup


class _Batch:
    """R requests in flight that verify what they are told to."""

    def __init__(self, visit: Visit, *, bench: _Bench) -> None:
        """Prefill, one pass a group, and the steps of warm-up, which are not kept."""
        self._visit, self._shape = visit, visit.shapes[-1]
        engine, requests = bench.batch_parts(visit)
        engine.policy, engine.drafting = self._lengths, self
        self._times, self._session = engine.times, engine.session()
        size = -(-len(requests) // _num_groups(visit))
        for start in range(0, len(requests), size):
            group = requests[start : start + size]
            for request in group:
                self._session.submit(request)
            before = self._times.prefill_s
            self._shape = replace(self._shape, batch_tokens=start + len(group))
            self._session.step()
            bench.timings.passes.append(
                PassSample(len(group), len(group) * visit.context, self._times.prefill_s - before)
            )
        for index in range(bench.warmup):
            self.step(visit.shapes[-1 - index % len(visit.shapes)])

    def step(self, shape: Shape) -> StepSample:
        """One step. Its contexts are those that verification meets, anchors included."""
        context = self._visit.context + self._times.num_tokens / self._visit.num_requests
        self._shape = shape
        self._session.step()
        spent = self._times.steps[-1]
        assert (spent.num_requests, spent.num_tokens) == (self._visit.num_requests, shape.batch_tokens)
        return StepSample(
            shape.sweep,
            spent.num_requests,
            spent.num_tokens,
            nominal_context=self._visit.context,
            context_tokens=context,
            draft_s=spent.draft_s,
            verify_s=spent.verify_s,
            upkeep_s=spent.sample_s,
        )

    def draft_lengths(self, request_ids: tuple[str, ...], history: DraftHistory) -> list[int]:
        """Blocks of one length for all requests (`DraftPolicy`)."""
        return [self._shape.draft_tokens] * len(request_ids)

    def _lengths(self, blocks: DraftedBlocks) -> list[int]:
        return spread_lengths(blocks.num_requests, batch_tokens=self._shape.batch_tokens)


def fitted(ids: Sequence[int], *, num: int) -> tuple[int, ...]:
    """The last `num` of the ids, repeated before themselves as often as it takes: answers follow the prompt's end."""
    return (tuple(ids) * -(-num // len(ids)))[-num:]


def _num_groups(visit: Visit) -> int:
    """Prefill passes of a batch."""
    at_once = max(1, PREFILL_TOKENS // visit.context)
    return -(-visit.num_requests // at_once)
