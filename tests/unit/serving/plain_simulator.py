"""The simulated engine as one would write it down first: a list of objects, one request after another."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from draftsmith.serving.recorded import RecordedRounds
from draftsmith.serving.requests import Requests

Lengths = Callable[[list[int], list[list[float]]], list[int]]
"""Requests of a step and their confidences -> verification lengths."""


@dataclass
class Machine:
    """Seconds of what a step does, and the limits."""

    step_s: Callable[[int], float]
    draft_s: Callable[[int], float]
    prefill_s: Callable[[int], float]
    context_s: Callable[[int, int], float]
    max_requests: int
    kv_tokens: float = math.inf
    prefill_tokens: float = math.inf


@dataclass
class Live:
    """A request in flight."""

    number: int
    rounds: list[int]
    prompt: int
    output: int
    reserved: int
    written: int = 0
    done_rounds: int = 0


@dataclass
class Told:
    """What came of it."""

    arrival_s: dict[int, float] = field(default_factory=dict)
    admitted_s: dict[int, float] = field(default_factory=dict)
    first_token_s: dict[int, float] = field(default_factory=dict)
    finish_s: dict[int, float] = field(default_factory=dict)
    rounds: dict[int, int] = field(default_factory=dict)
    steps: list[tuple[float, float, int, int, int, int, int]] = field(default_factory=list)
    """(start, seconds, requests, batch tokens, accepted, committed, key-value tokens)."""
    batches: list[list[int]] = field(default_factory=list)


def serve(
    requests: Requests,
    *,
    pool: RecordedRounds,
    answers: Sequence[int],
    machine: Machine,
    lengths: Lengths,
    temperatures: Sequence[float],
) -> Told:
    told, clock, batch, queue = Told(), 0.0, list[Live](), list[int]()
    coming = [
        (float(requests.arrival_s[i]), i) for i in range(len(requests)) if requests.follows[i] < 0
    ]  # fmt: skip

    def finish_those_who_are_done() -> None:
        for place in reversed(range(len(batch))):
            one = batch[place]
            if one.written < one.output:
                continue
            told.finish_s[one.number], told.rounds[one.number] = clock, one.done_rounds
            last = batch.pop()
            if last is not one:
                batch[place] = last
            for i in range(len(requests)):
                if requests.follows[i] == one.number:
                    coming.append((clock + float(requests.arrival_s[i]), i))

    def join() -> None:
        for when, i in sorted(coming):
            if when <= clock:
                told.arrival_s[i] = when
                queue.append(i)
                coming.remove((when, i))

    while True:
        join()
        while True:
            entering, tokens = list[Live](), 0
            while queue and len(batch) + len(entering) < machine.max_requests:
                i = queue[0]
                prompt, output = int(requests.prompt_tokens[i]), int(requests.output_tokens[i])
                needed = prompt + output + pool.block_size - 1
                held = sum(one.reserved for one in batch + entering)
                new = prompt - int(requests.cached_tokens[i])
                if held + needed > machine.kv_tokens or (entering and tokens + new > machine.prefill_tokens):
                    break
                rounds = list(range(int(pool.first[answers[i]]), int(pool.last[answers[i]]) + 1))
                entering.append(Live(i, rounds, prompt, output, needed))
                tokens += new
                queue.pop(0)
            if not entering:
                break
            for one in entering:
                told.admitted_s[one.number] = clock
            clock += machine.prefill_s(tokens)
            for one in entering:
                told.first_token_s[one.number] = clock
                one.written = 1
            batch += entering
            finish_those_who_are_done()
            join()
        if not batch:
            if not coming:
                return told
            clock = min(coming)[0]
            continue
        now = [one.rounds[one.done_rounds % len(one.rounds)] for one in batch]
        confidences = []
        if pool.logits is not None:
            for index in now:
                scaled = [float(x) / t for x, t in zip(pool.logits[index], temperatures, strict=True)]
                confidences.append([1 / (1 + math.exp(-x)) for x in scaled])
        chosen = lengths([one.number for one in batch], confidences)
        held, accepted, committed = 0, 0, 0
        for one, index, length in zip(batch, now, chosen, strict=True):
            held += one.prompt + one.written + length
            right = int(pool.accepted[index])
            tokens = [False] * min(right, length)
            if pool.ended[index] and length >= right:
                tokens[-1] = True  # the end-of-text: nothing behind it
            else:
                tokens.append(False)
            accepted += min(right, length)
            tokens = tokens[: one.output - one.written]
            committed += len(tokens)
            one.written += len(tokens)
            one.done_rounds += 1
        num, batch_tokens = len(batch), len(batch) + sum(chosen)
        context = held - sum(chosen)
        seconds = machine.draft_s(num) + (machine.step_s(batch_tokens) + machine.context_s(context, num))
        told.steps.append((clock, seconds, num, batch_tokens, accepted, committed, held))
        told.batches.append([one.number for one in batch])
        clock += seconds
        finish_those_who_are_done()
