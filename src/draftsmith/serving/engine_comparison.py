"""Whether a simulation can be trusted: the real engine and the simulator under one policy, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from draftsmith.decoding.engine import Engine, Request
from draftsmith.decoding.policies import LengthPolicy
from draftsmith.decoding.session import PREFILL_TOKENS
from draftsmith.drafters.base import Drafter
from draftsmith.serving.cost_table import CostTable
from draftsmith.serving.recorded import RecordedRounds
from draftsmith.serving.requests import make_requests
from draftsmith.serving.simulator import Limits, simulate
from draftsmith.serving.step_costs import StepCosts
from draftsmith.targets.base import Target


@dataclass(frozen=True)
class EngineComparison:
    """Sums over the steps of the real engine and of the simulator, at one limit of requests in flight."""

    max_requests: int
    engine_rounds: int  # of single requests
    engine_verified: int  # draft tokens
    engine_committed: int
    simulated_rounds: int
    simulated_verified: int
    simulated_committed: int
    engine_s: float = 0.0  # of steps and prefill passes
    simulated_s: float = 0.0

    @property
    def engine_length(self) -> float:
        """Mean verification length: draft tokens a round."""
        return self.engine_verified / self.engine_rounds

    @property
    def simulated_length(self) -> float:
        return self.simulated_verified / self.simulated_rounds

    @property
    def engine_accepted_length(self) -> float:
        """Tokens committed a round."""
        return self.engine_committed / self.engine_rounds

    @property
    def simulated_accepted_length(self) -> float:
        return self.simulated_committed / self.simulated_rounds

    @property
    def length_error(self) -> float:
        """Simulated mean verification length over the engine's, less 1; infinite if the engine alone verified none."""
        if self.engine_verified == 0:
            return 0.0 if self.simulated_verified == 0 else float("inf")
        return self.simulated_length / self.engine_length - 1

    @property
    def accepted_length_error(self) -> float:
        """Simulated accepted length over the engine's, less 1."""
        return self.simulated_accepted_length / self.engine_accepted_length - 1

    @property
    def engine_tokens_per_s(self) -> float:
        """Tokens committed by steps, over the time of steps and prefill."""
        return self.engine_committed / self.engine_s

    @property
    def simulated_tokens_per_s(self) -> float:
        return self.simulated_committed / self.simulated_s

    @property
    def throughput_error(self) -> float:
        """Simulated tokens a second over the engine's, less 1; means something where the costs are this machine's."""
        return self.simulated_tokens_per_s / self.engine_tokens_per_s - 1


def compare_with_engine(
    requests: Sequence[Request],
    *,
    domain: Sequence[str],
    target: Target,
    drafter: Drafter,
    end_ids: Iterable[int],
    new_policy: Callable[[], LengthPolicy],
    temperatures: ArrayLike | None,
    rounds: RecordedRounds,
    max_requests: Sequence[int],
    seeds: Sequence[int],
    costs: StepCosts | None = None,
) -> tuple[EngineComparison, ...]:
    """Both answer the same requests, all there from the beginning, at each limit of requests in flight.

    The engine decodes; the simulator is given the lengths of prompts and of the engine's answers, the domain of each
    request, and `rounds` recorded on other prompts; its sums are those of all `seeds`. `new_policy` makes a policy
    without a memory. `costs` are those of the machine, for the seconds; which tokens are verified does not hang on
    them, as nothing arrives later.
    """
    end_ids = tuple(end_ids)
    costs = costs or StepCosts(CostTable([1], steps_per_s=[1.0]))
    found = []
    for limit in max_requests:
        engine = Engine(
            target, drafter=drafter, end_ids=end_ids, batch_size=limit, policy=new_policy(), temperatures=temperatures
        )
        answers = engine.generate(requests)
        offered = make_requests(
            np.zeros(len(requests)),
            prompt_tokens=[len(request.prompt_ids) for request in requests],
            output_tokens=[len(answer.token_ids) for answer in answers],
            domain=domain,
        )
        outcomes = [
            simulate(
                offered, rounds=rounds, policy=new_policy(), costs=costs,
                limits=Limits(limit, prefill_tokens=PREFILL_TOKENS), temperatures=temperatures, seed=seed,
            )
            for seed in seeds
        ]  # fmt: skip
        steps, simulated = engine.times.steps, [outcome.steps for outcome in outcomes]
        found.append(
            EngineComparison(
                max_requests=limit,
                engine_rounds=sum(step.num_requests for step in steps),
                engine_verified=sum(step.num_tokens - step.num_requests for step in steps),
                engine_committed=sum(step.num_committed for step in steps),
                simulated_rounds=sum(int(step.num_requests.sum()) for step in simulated),
                simulated_verified=sum(int(step.verified.sum()) for step in simulated),
                simulated_committed=sum(int(step.committed.sum()) for step in simulated),
                engine_s=sum(step.total_s for step in steps) + engine.times.prefill_s,
                simulated_s=sum(
                    float(outcome.steps.seconds.sum() + outcome.prefills.seconds.sum()) for outcome in outcomes
                ),
            )
        )
    return tuple(found)
