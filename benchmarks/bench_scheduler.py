"""One decision of the prefix scheduler, synchronous and asynchronous: microseconds for 512 requests and for 8,192.

From a step's confidences [R, 7] to lengths, as the policies do it, on one core. The baselines are Algorithm 1 and the
asynchronous scheduler as one would write them down first, in plain Python on lists; both must give the same lengths.
The table has a point for every N, a step's time is affine in N, and Algorithm 1 admits some half of the tokens. In each
step one request in 64 leaves and another comes. A figure is the least of many steps, each of other confidences.
Memory is as in a process that has been at work: what arrays of such a size free stays with it (`settle_memory`).
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from rows import write_row

from draftsmith.decoding.policies import DraftedBlocks, LengthPolicy
from draftsmith.serving.cost_table import CostTable
from draftsmith.serving.policies import AsynchronousPolicy, SynchronousPolicy

COMMAND = "python benchmarks/bench_scheduler.py"
NUM_REQUESTS, MANY_REQUESTS, BLOCK_SIZE = 512, 8_192, 7
LIMIT_US = {"synchronous": 150.0, "asynchronous": 250.0}
GROWTH_BOUND = "<= 1.25"
NUM_STEPS, NUM_COMPARED, NUM_FIRST = 48, 6, 2
LEAVE = 64
"""One request in so many leaves in a step."""

LARGE = 4_000_000

Rows = list[list[float]]


@dataclass(frozen=True)
class Step:
    """A step as the policies get it, and as plain Python does."""

    blocks: DraftedBlocks
    confidence: Rows


def draw_steps(num_requests: int, *, count: int) -> list[Step]:
    rng = np.random.default_rng(0)
    leaving = num_requests // LEAVE
    names = [f"request-{number}" for number in range(num_requests + leaving * count)]
    steps = []
    for first in range(0, leaving * count, leaving):
        confidence = rng.beta(5.0, 1.5, (num_requests, BLOCK_SIZE))
        blocks = DraftedBlocks(tuple(names[first : first + num_requests]), BLOCK_SIZE, confidence)
        steps.append(Step(blocks, confidence.tolist()))
    return steps


def affine_table(num_requests: int) -> CostTable:
    """Twice the time with all tokens as with none."""
    tokens = np.arange(1, num_requests * (BLOCK_SIZE + 1) + 1)
    return CostTable(tokens, steps_per_s=1 / (0.01 * (1 + tokens / (num_requests * BLOCK_SIZE))))


def in_order(confidence: Rows) -> list[tuple[float, int, int]]:
    """(-a, j, r) of every slot, sorted."""
    slots = []
    for request, row in enumerate(confidence):
        for slot, a in enumerate(itertools.accumulate(row, lambda before, now: before * now)):
            slots.append((-a, slot, request))
    slots.sort()
    return slots


class PlainSynchronous:
    def __init__(self, table: CostTable) -> None:
        self.rates = dict(zip(table.batch_tokens.tolist(), table.steps_per_s.tolist(), strict=True))

    def __call__(self, step: Step) -> list[int]:
        num = len(step.confidence)
        lengths = [0] * num
        tau, best, tokens = float(num), num * self.rates[num], num
        for negative, _, request in in_order(step.confidence):
            tau, tokens = tau - negative, tokens + 1
            theta = tau * self.rates[tokens]
            if negative == 0 or theta <= best:
                break
            best = theta
            lengths[request] += 1
        return lengths


class PlainAsynchronous:
    """As `AsynchronousPolicy` with a staleness of 2."""

    def __init__(self, table: CostTable) -> None:
        self.rates = dict(zip(table.batch_tokens.tolist(), table.steps_per_s.tolist(), strict=True))
        self.memory: list[dict[str, list[float]]] = []

    def __call__(self, step: Step) -> list[int]:
        ids = step.blocks.request_ids
        present = set(ids)
        self.memory = [{name: row for name, row in old.items() if name in present} for old in self.memory]
        then = self.memory.pop(0) if len(self.memory) == 2 else {}
        self.memory.append(dict(zip(ids, step.confidence, strict=True)))
        budget = self.budget(list(then.values()), len(ids))
        lengths = [0] * len(ids)
        for _, _, request in in_order(step.confidence)[:budget]:
            lengths[request] += 1
        return lengths

    def budget(self, then: Rows, num: int) -> int:
        unknown = (num - len(then)) * BLOCK_SIZE
        tau, budget = float(num + unknown), unknown
        best = tau * self.rates[num + unknown]
        for count, (negative, _, _) in enumerate(in_order(then), start=unknown + 1):
            tau -= negative
            theta = tau * self.rates[num + count]
            if theta > best:
                best, budget = theta, count
        return budget


POLICIES: dict[str, Callable[[CostTable], LengthPolicy]] = {
    "synchronous": SynchronousPolicy,
    "asynchronous": AsynchronousPolicy,
}
PLAIN: dict[str, Callable[[CostTable], Callable[[Step], list[int]]]] = {
    "synchronous": PlainSynchronous,
    "asynchronous": PlainAsynchronous,
}


def least_us(begin: Callable[[], Callable[[Step], Sequence[int]]], steps: Sequence[Step], *, rounds: int) -> float:
    """Least time of a decision; each round begins anew, and its first steps, in which all is admitted, do not count."""
    best = float("inf")
    for _ in range(rounds):
        decide = begin()
        for number, step in enumerate(steps):
            started = time.perf_counter()
            decide(step)
            if number >= NUM_FIRST:
                best = min(best, time.perf_counter() - started)
    return best * 1e6


def settle_memory() -> None:
    """Free one large array: from then on glibc gives memory of such sizes back to the system no more.

    Otherwise each decision for 8,192 requests maps its arrays anew, and most of its time are page faults.
    """
    array = np.ones(LARGE)
    del array


def measure(name: str, num_requests: int, *, rounds: int) -> tuple[float, float, float]:
    """Microseconds of a decision, ours and in plain Python, and the share of tokens that are admitted."""
    table, steps = affine_table(num_requests), draw_steps(num_requests, count=NUM_STEPS)

    def begin() -> Callable[[Step], Sequence[int]]:
        policy = POLICIES[name](table)
        return lambda step: policy(step.blocks)

    ours, plain = begin(), PLAIN[name](table)
    lengths = [ours(step) for step in steps[:NUM_COMPARED]]
    assert lengths == [plain(step) for step in steps[:NUM_COMPARED]], f"{name}: ours and the baseline differ"
    return (
        least_us(begin, steps, rounds=rounds),
        least_us(lambda: PLAIN[name](table), steps[:NUM_COMPARED], rounds=max(1, rounds // 8)),
        sum(lengths[-1]) / (num_requests * BLOCK_SIZE),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40, help="rounds over the steps")
    options = parser.parse_args()
    settle_memory()
    for name, limit in LIMIT_US.items():
        ours, plain, share = measure(name, NUM_REQUESTS, rounds=options.rounds)
        many, _, many_share = measure(name, MANY_REQUESTS, rounds=max(1, options.rounds // 8))
        note = f"{NUM_REQUESTS} requests, block size {BLOCK_SIZE}, {share:.0%} of the tokens admitted; least of many"
        write_row(f"scheduler_{name}", ours=ours, baseline=plain, unit="us a decision", bound="<= 0.1",
                  command=COMMAND, note=f"{note}; baseline: plain Python")  # fmt: skip
        write_row(f"scheduler_{name}_limit", ours=ours, baseline=limit, unit="us a decision", bound="<= 1.0",
                  command=COMMAND, note=f"{note}; baseline: the most that is allowed")  # fmt: skip
        write_row(f"scheduler_{name}_growth", ours=many / MANY_REQUESTS, baseline=ours / NUM_REQUESTS,
                  unit="us a request", bound=GROWTH_BOUND, command=COMMAND,
                  note=f"{MANY_REQUESTS} requests ({many_share:.0%} admitted) against {NUM_REQUESTS}")  # fmt: skip


if __name__ == "__main__":
    main()
