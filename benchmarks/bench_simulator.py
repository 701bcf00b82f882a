"""Scheduled request-rounds a second of the serving simulator, on one core: 64 and 256 users under each policy.

A request-round is one request in one step, everything counted that `simulate` does: arrivals, prefill, the policy's
decision, acceptance, bookkeeping. Users send one request after another (a closed loop), so that all but the last steps
are full. The baseline is the rate that a study of serving needs: minutes for millions of rounds. A figure is that of
the fastest of several runs.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable

import numpy as np
from rows import write_row

from draftsmith.decoding.policies import LengthPolicy, verify_all
from draftsmith.decoding.rounds import Generation, Round
from draftsmith.serving.cost_table import CostTable
from draftsmith.serving.figures import measure
from draftsmith.serving.outcome import Outcome
from draftsmith.serving.policies import AsynchronousPolicy, SynchronousPolicy
from draftsmith.serving.recorded import RecordedRounds, record_rounds
from draftsmith.serving.simulator import Limits, simulate
from draftsmith.serving.step_costs import DraftingCost, PrefillCost, StepCosts
from draftsmith.serving.workload import RequestMix, TokenLaw, closed_loop

COMMAND = "python benchmarks/bench_simulator.py"
LEAST_ROUNDS_PER_S = 200_000.0
BLOCK_SIZE, NUM_ANSWERS, NUM_ROUNDS = 7, 200, 60
USERS, REQUESTS_PER_USER = (64, 256), 12

POLICIES: dict[str, Callable[[CostTable], LengthPolicy]] = {
    "full": lambda _: verify_all,
    "synchronous": SynchronousPolicy,
    "asynchronous": AsynchronousPolicy,
}


def draw_rounds() -> RecordedRounds:
    """Answers whose tokens are accepted as likely as their confidence says."""
    rng = np.random.default_rng(0)
    answers: dict[str, list[Generation]] = {"chat": [], "code": []}
    for number in range(NUM_ANSWERS):
        rounds = []
        for confidence in rng.beta(5.0, 1.5, (NUM_ROUNDS, BLOCK_SIZE)):
            accepted = int((rng.random(BLOCK_SIZE) < confidence).cumprod().sum())
            logits = tuple(math.log(c / (1 - c)) for c in confidence)
            rounds.append(Round(0, BLOCK_SIZE, accepted, accepted + 1, False, False, logits))
        answers["chat" if number % 2 else "code"].append(Generation(str(number), (), (), "length", tuple(rounds)))
    return record_rounds(answers, block_size=BLOCK_SIZE)


def affine_table(num_requests: int) -> CostTable:
    """Twice the time with all tokens as with none."""
    tokens = np.arange(1, num_requests * (BLOCK_SIZE + 1) + 1)
    return CostTable(tokens, steps_per_s=1 / (0.01 * (1 + tokens / (num_requests * BLOCK_SIZE))))


def fastest(rounds: RecordedRounds, *, policy: str, num_users: int, runs: int) -> tuple[float, Outcome]:
    """Request-rounds a second, and what was simulated."""
    table = affine_table(num_users)
    mix = RequestMix(TokenLaw(500, 0.5, 10, 4_000), TokenLaw(256, 0.3, 32, 1_000), {"chat": 1.0, "code": 1.0})
    requests = closed_loop(mix, num_users=num_users, requests_per_user=REQUESTS_PER_USER, seed=1)
    costs = StepCosts(table, DraftingCost((1, num_users), (0.002, 0.003)), PrefillCost(1e5))
    best = 0.0
    for _ in range(runs):
        started = time.perf_counter()
        outcome = simulate(
            requests, rounds=rounds, policy=POLICIES[policy](table), costs=costs, limits=Limits(num_users)
        )
        best = max(best, int(outcome.num_rounds.sum()) / (time.perf_counter() - started))
    return best, outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    rounds = draw_rounds()
    for num_users in USERS:
        for policy in POLICIES:
            rate, outcome = fastest(rounds, policy=policy, num_users=num_users, runs=options.runs)
            figures = measure(outcome)
            assert figures.verification is not None
            note = (
                f"{num_users} users, block size {BLOCK_SIZE}, {figures.verification.num_rounds} request-rounds in "
                f"{figures.verification.num_steps} steps, {figures.verification.mean_length:.2f} tokens verified a "
                f"round; baseline: the least that is allowed"
            )
            write_row(
                f"simulator_{policy}_{num_users}", ours=rate, baseline=LEAST_ROUNDS_PER_S, unit="request-rounds/s",
                bound=">= 1.0", command=COMMAND, note=note,
            )  # fmt: skip


if __name__ == "__main__":
    main()
