"""The serving study of one drafter on one machine: policies in a closed loop, under open loads, and the open questions.

Policies are compared on the same requests and the same recorded rounds; everything is decided by the seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from draftsmith.calibration.ece import roc_auc
from draftsmith.params_serving import Serve, TokenNumbers
from draftsmith.serving.contenders import (
    ASYNCHRONOUS,
    PLAIN,
    Contender,
    Machine,
    contenders,
    principal,
    scheduler_of,
)
from draftsmith.serving.cost_table import CostTable
from draftsmith.serving.recorded import RecordedRounds
from draftsmith.serving.requests import Requests
from draftsmith.serving.study_loads import ClosedPoint, closed_point, open_row
from draftsmith.serving.study_tables import (
    anchors_of,
    closed_figures,
    compare_cells,
    early_exit_rows,
    matched,
)
from draftsmith.serving.study_text import answers
from draftsmith.serving.trace_file import Trace
from draftsmith.serving.workload import (
    AgentMix,
    Deadline,
    RequestMix,
    TokenLaw,
    agentic,
    bursty,
    diurnal,
    poisson,
)

SCHEMA_VERSION = 1
FIRST_TOKENS = 16
"""A deadline of no row's own allows as much for the first token as for so many further ones."""
NUM_BURSTS, NUM_DAYS, MEAN_TURNS = 12, 3, 4.0
"""In a run: bursts, periods of the day; turns of an agent's session."""
IRREGULAR = "bursty", "diurnal", "agentic"


def concurrencies(max_requests: int) -> tuple[int, ...]:
    """1, 2, 4, .. and the most itself."""
    return tuple(dict.fromkeys((*(1 << power for power in range(max_requests.bit_length())), max_requests)))


class Study:
    """One study; `body` runs it."""

    def __init__(self, machine: Machine, *, row: Serve, trace: Trace | None = None) -> None:
        """`machine.limits.max_requests` is the highest concurrency."""
        self._machine, self._row, self._trace = machine, row, trace
        self._on_run: Callable[[], None] = lambda: None
        self._all = contenders(block_size=machine.block_size, confident=machine.confident, thresholds=row.thresholds)
        self._few = tuple(dict.fromkeys(principal(block_size=machine.block_size, confident=machine.confident)))
        self._loads = concurrencies(machine.limits.max_requests)
        domains = {str(name): share for name, share in (row.domains or {}).items()}
        domains = domains or dict.fromkeys(machine.rounds.domains, 1.0)
        self._mix = RequestMix(law(row.prompt_tokens), law(row.output_tokens), domains)
        numbers = self._mix.output_tokens.draw(np.random.default_rng(row.seed), 10_000)
        self._mean_output = float(numbers.mean())

    @property
    def num_runs(self) -> int:
        """Simulations that `body` runs; fewer if the trace has no load that could be scaled."""
        confident, row = self._machine.confident, self._row
        closed = (len(self._all) + 2 * confident) * len(self._loads)
        opened = len(self._few) * (len(row.loads) + len(IRREGULAR) + 2 * (self._trace is not None))
        return closed + opened + confident * len(row.burst_factors) * (1 + len(row.staleness))

    def body(self, *, on_run: Callable[[], None]) -> dict[str, Any]:
        """Everything in serve.json that is computed. `on_run` is called after each simulation."""
        self._on_run = on_run
        closed = {item.name: [self._closed(item, users) for users in self._loads] for item in self._all}
        plain = closed[PLAIN]
        one_user = plain[0].user.p50
        deadline, basis = self._deadline(one_user)
        best = max((point for points in closed.values() for point in points), key=lambda point: point.tokens_per_s)
        capacity = best.tokens_per_s / self._mean_output
        mix = replace(self._mix, deadline=deadline)
        found: dict[str, Any] = {
            "limits": asdict(self._machine.limits),
            "workload": {
                "prompt_tokens": self._row.prompt_tokens.model_dump(),
                "output_tokens": self._row.output_tokens.model_dump(),
                "mean_output_tokens": self._mean_output,
                "domains": _shares(self._mix.domains),
            },
            "policies": [asdict(item) | {"name": item.name, "label": item.label} for item in self._all],
            "believed_table": "monotone",
            "costs_table": "jagged",
            **closed_figures(closed),
            "anchors": anchors_of(
                closed,
                speeds=[
                    *((share, share * one_user) for share in self._row.anchor_shares),
                    *((None, speed) for speed in self._row.anchor_tokens_per_s),
                ],
            ),
            "matched_throughput": matched(closed),
            "deadline": {**asdict(deadline), "basis": basis},
            "capacity": {"policy": best.policy, "tokens_per_s": best.tokens_per_s, "requests_per_s": capacity},
            "latencies": self._latencies(mix, capacity=capacity),
            "staleness": self._staleness(mix, closed[ASYNCHRONOUS.name]) if self._machine.confident else None,
            "believed": self._believed(closed) if self._machine.confident else None,
            "early_exit": {"rows": early_exit_rows(self._all, closed)},
        }
        return found | {"answers": answers(found)}

    def _closed(self, contender: Contender, users: int, *, table: CostTable | None = None) -> ClosedPoint:
        num = math.ceil(self._row.closed_requests * math.sqrt(users))
        point = closed_point(self._machine, contender, mix=self._mix, concurrency=users, num_requests=num, table=table)
        self._on_run()
        return point

    def _deadline(self, one_user: float) -> tuple[Deadline, str]:
        row = self._row
        if row.deadline is not None:
            return Deadline(row.deadline.first_token_s, row.deadline.per_token_s), "params.yaml: serve.deadline"
        per_token = 1 / (row.deadline_share * one_user)
        basis = f"{row.deadline_share:g} of plain decoding's {one_user:.4g} tokens/s for one user"
        return Deadline(FIRST_TOKENS * per_token, per_token), basis

    def _latencies(self, mix: RequestMix, *, capacity: float) -> list[dict[str, Any]]:
        loads = [("poisson", load) for load in self._row.loads]
        loads += [(name, self._row.irregular_load) for name in IRREGULAR]
        offered = [(name, load, self._open(name, mix, rate=load * capacity)) for name, load in loads]
        rows = [self._opened(item, requests, name, load) for name, load, requests in offered for item in self._few]
        return rows + (self._replayed(mix, capacity=capacity) if self._trace is not None else [])

    def _replayed(self, mix: RequestMix, *, capacity: float) -> list[dict[str, Any]]:
        """The trace as it was recorded, and drawn to the load of the other irregular ones."""
        assert self._trace is not None
        requests = first_requests(self._trace.requests, self._row.trace_requests)
        if mix.deadline is not None and not np.isfinite(requests.deadline_s).any():
            requests = replace(requests, deadline_s=mix.deadline.seconds(requests.output_tokens))
        load = self._row.irregular_load
        offered: list[tuple[float | None, Requests]] = [(None, requests)]
        if requests.offered_requests_per_s is not None:
            scale = self._mean_output / float(requests.output_tokens.mean())
            offered.append((load, requests.at_load(load * capacity * scale)))
        return [self._opened(item, part, "trace", share) for share, part in offered for item in self._few]

    def _opened(self, contender: Contender, requests: Requests, workload: str, load: float | None) -> dict[str, Any]:
        row = open_row(self._machine, contender, requests=requests, workload=workload, load=load)
        self._on_run()
        return row

    def _open(self, name: str, mix: RequestMix, *, rate: float, burst_factor: float = 8.0) -> Requests:
        """Requests at a rate, several times as many as can be in flight."""
        num = max(self._row.open_requests, 5 * self._machine.limits.max_requests)
        span, seed = num / rate, self._row.seed
        match name:
            case "poisson":
                return poisson(mix, requests_per_s=rate, num_requests=num, seed=seed)
            case "diurnal":
                return diurnal(
                    mix, requests_per_s=rate, depth=0.8, period_s=span / NUM_DAYS, num_requests=num, seed=seed
                )
            case "agentic":
                sessions = math.ceil(num / MEAN_TURNS)
                return agentic(_agents(mix, tool_s=10 / rate), sessions_per_s=rate / MEAN_TURNS,
                               num_sessions=sessions, seed=seed)  # fmt: skip
        share = self._row.burst_share
        return bursty(
            mix, requests_per_s=rate, burst_factor=burst_factor, burst_share=share, burst_s=share * span / NUM_BURSTS,
            num_requests=num, seed=seed,
        )  # fmt: skip

    def _staleness(self, mix: RequestMix, points: Sequence[ClosedPoint]) -> dict[str, Any]:
        """Schedulers from synchronous to very stale, under traffic from even to bursty, always at one mean load: a
        share of what the asynchronous one reaches in the closed loop (`points`)."""
        row, capacity = self._row, max(point.tokens_per_s for point in points)
        rate = row.irregular_load * capacity / self._mean_output
        cells: list[dict[str, Any]] = []
        for factor in row.burst_factors:
            requests = self._open("bursty", mix, rate=rate, burst_factor=factor)
            for steps in (0, *row.staleness):
                found = self._opened(scheduler_of(steps), requests, "bursty", row.irregular_load)
                cells.append({
                    "burst_factor": factor,
                    "staleness": steps,
                    "user_tokens_per_s": (found["user_tokens_per_s"] or {"p50": 0.0})["p50"],
                    "end_to_end_p50_s": found["end_to_end_s"]["p50"],
                    "end_to_end_p95_s": found["end_to_end_s"]["p95"],
                    **{name: found[name] for name in (
                        "share_in_time", "budget", "accepted_length", "mean_concurrency", "tokens_per_busy_s"
                    )},
                })  # fmt: skip
        num = max(row.open_requests, 5 * self._machine.limits.max_requests)
        return {
            "load": row.irregular_load,
            "capacity_tokens_per_s": capacity,
            "requests_per_s": rate,
            "burst_share": row.burst_share,
            "burst_s": row.burst_share * num / rate / NUM_BURSTS,
            "burst_factors": list(row.burst_factors),
            "staleness": [0, *row.staleness],
            "cells": compare_cells(cells),
        }

    def _believed(self, closed: Mapping[str, Sequence[ClosedPoint]]) -> list[dict[str, Any]]:
        """Schedulers that believe in the table as it was measured, beside those that believe in the monotone one."""
        rows = []
        for contender in (Contender("synchronous"), ASYNCHRONOUS):
            for users, point in zip(self._loads, closed[contender.name], strict=True):
                jagged = self._closed(contender, users, table=self._machine.costs.verification)
                for table, found in (("monotone", point), ("jagged", jagged)):
                    rows.append({
                        "policy": contender.name, "table": table, "concurrency": users,
                        "tokens_per_s": found.tokens_per_s, "ratio": found.tokens_per_s / point.tokens_per_s,
                    })  # fmt: skip
        return rows


def rounds_facts(rounds: RecordedRounds, *, source: str, temperature: float | None) -> dict[str, Any]:
    """What serve.json says of the rounds that were replayed."""
    committed, domains = rounds.committed, {}
    for place, name in enumerate(rounds.domains):
        chosen = rounds.domain == place
        size = (rounds.last - rounds.first + 1)[chosen]
        tokens = np.add.reduceat(committed, rounds.first)[chosen]
        domains[name] = {
            "num_answers": int(chosen.sum()),
            "num_rounds": int(size.sum()),
            "accepted_length": float(tokens.sum() / size.sum()),
        }
    return {
        "source": source,
        "temperature": temperature,
        "num_answers": rounds.num_answers,
        "num_rounds": rounds.num_rounds,
        "accepted_length": rounds.accepted_length,
        "domains": domains,
        "confidence_auc": None if rounds.logits is None else _auc(rounds),
    }


def law(numbers: TokenNumbers) -> TokenLaw:
    return TokenLaw(numbers.median, numbers.spread, numbers.low, numbers.high)


def first_requests(requests: Requests, num: int) -> Requests:
    """The first `num` requests of a trace, which do not follow each other."""
    columns = ("arrival_s", "prompt_tokens", "output_tokens", "domain", "deadline_s", "cached_tokens", "follows")
    return replace(requests, **{name: getattr(requests, name)[:num] for name in columns})


def _agents(mix: RequestMix, *, tool_s: float) -> AgentMix:
    """Sessions whose first prompts and answers are those of the mix; a tool says half as much as a first prompt."""
    prompt = mix.prompt_tokens
    result = TokenLaw(max(1.0, prompt.median / 2), prompt.spread, 1, prompt.high)
    return AgentMix(prompt, result, mix.output_tokens, mix.domains, MEAN_TURNS, tool_s, mix.deadline)


def _auc(rounds: RecordedRounds) -> list[float | None]:
    """[K]: of each confidence, over the rounds whose slot counts and whose prefix survived."""
    assert rounds.logits is not None
    found: list[float | None] = []
    for slot in range(rounds.block_size):
        rows = (rounds.counted > slot) & (rounds.accepted >= slot)
        found.append(roc_auc(rounds.logits[rows, slot], outcome=rounds.accepted[rows] > slot) if rows.any() else None)
    return found


def _shares(domains: Mapping[str, float]) -> dict[str, float]:
    total = sum(domains.values())
    return {name: share / total for name, share in domains.items()}
