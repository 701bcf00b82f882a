"""What evaluation found: the body of evaluate.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from draftsmith.decoding.rounds import Generation
from draftsmith.errors import DraftsmithError
from draftsmith.evaluation.accepted_length import measure_accepted_length, share_identical
from draftsmith.evaluation.breakdown import (
    accepted_histogram,
    averages,
    by_domain,
    by_output_position,
    by_turn,
    pair,
)
from draftsmith.evaluation.decoded import Decoded, SpeedPoint
from draftsmith.evaluation.thresholds import threshold_sweep

SCHEMA_VERSION = 2
DOMAINS = ("math", "code", "chat")
"""The order of the paper's Table 1."""


@dataclass(frozen=True)
class DrafterFacts:
    """What was evaluated. `confidence`: its rounds carry the logits of a confidence head."""

    name: str
    kind: str
    block_size: int
    confidence: bool


def evaluation_body(
    *,
    key: str,
    drafter: DrafterFacts,
    target: str,
    dtype: str,
    benchmarks: Sequence[Mapping[str, Any]],
    decoded: Sequence[Decoded],
    speed: Sequence[SpeedPoint],
    max_new_tokens: int,
    seed: int,
    machine: str,
    provenance: Mapping[str, Any],
) -> dict[str, Any]:
    """The body of evaluate.json, of JSON values only (no NaN, no tuples).

    `benchmarks` are copied into the body, one each: name, domain, source, revision, split, prompt_form, turns,
    reference_count (how many prompts the paper evaluated, None if unknown), licence, cap (the most that were allowed),
    num_prompts, replaced_by, contaminated. `decoded` holds one entry a benchmark and temperature, in any order; rows
    follow it. `speed` may be empty. `seed` is that of the evaluation, and seeds the bootstrap too.

    Raises DraftsmithError if nothing was decoded, a benchmark has no facts or stands twice at one temperature, or none
    of its answers has a round.
    """
    facts = {item["name"]: item for item in benchmarks}
    _check(decoded, facts)
    rows = [_row(item, facts[item.benchmark], block_size=drafter.block_size, seed=seed) for item in decoded]
    temperatures = list(dict.fromkeys(item.temperature for item in decoded))
    answers = {
        temperature: [answer for item in decoded if item.temperature == temperature for answer in item.generations]
        for temperature in temperatures
    }
    return {
        "schema_version": SCHEMA_VERSION,
        "key": key,
        "drafter": asdict(drafter),
        "target": target,
        "dtype": dtype,
        "block_size": drafter.block_size,
        "max_new_tokens": max_new_tokens,
        "seed": seed,
        "machine": machine,
        "provenance": dict(provenance),
        "benchmarks": [dict(item) for item in benchmarks],
        "rows": rows,
        "domains": by_domain(rows, domains=DOMAINS, seed=seed),
        "averages": averages(rows, seed=seed),
        "output_positions": [
            {"temperature": temperature, **row}
            for temperature, found in answers.items()
            for row in by_output_position(found, seed=seed)
        ],
        "thresholds": [
            {"temperature": temperature, **row}
            for temperature, found in answers.items()
            for row in _thresholds(found, drafter)
        ],
        "accepted_histogram": [
            {"temperature": temperature, "counts": accepted_histogram(found, block_size=drafter.block_size)}
            for temperature, found in answers.items()
        ],
        "answer_lengths": [
            {"temperature": temperature, "lengths": [len(answer.token_ids) for answer in found]}
            for temperature, found in answers.items()
        ],
        "speed": [_speed(item) for item in speed],
    }


def _check(decoded: Sequence[Decoded], facts: Mapping[str, Mapping[str, Any]]) -> None:
    if not decoded:
        raise DraftsmithError("nothing was decoded", expected="a benchmark", where="params.yaml: evaluate.benchmarks")
    seen: set[tuple[str, float]] = set()
    for item in decoded:
        setting = f"{item.benchmark} at temperature {item.temperature:g}"
        if item.benchmark not in facts:
            raise DraftsmithError("a benchmark without facts", got=item.benchmark, expected=", ".join(facts))
        if (item.benchmark, item.temperature) in seen:
            raise DraftsmithError("decoded twice", got=setting, expected="one entry a benchmark and temperature")
        seen.add((item.benchmark, item.temperature))
        if not any(answer.rounds for answer in item.generations):
            raise DraftsmithError(
                f"no decoding round to measure: {setting}",
                got=f"{len(item.generations)} answers of one token",
                expected="longer answers",
                where="params.yaml: evaluate.max_new_tokens",
            )


def _row(item: Decoded, facts: Mapping[str, Any], *, block_size: int, seed: int) -> dict[str, Any]:
    """One benchmark at one temperature. `identical_to_plain` is a share of prompts, at temperature 0 only; speeds are
    null where the wall times cannot be compared.
    """
    measured = measure_accepted_length(item.generations, block_size=block_size, seed=seed)
    return {
        "benchmark": item.benchmark,
        "domain": item.domain,
        "temperature": item.temperature,
        "batch_size": item.batch_size,
        "num_prompts": measured.num_prompts,
        "num_requests": measured.num_requests,
        "num_prompts_without_rounds": measured.num_prompts_without_rounds,
        "cap": facts["cap"],
        "reference_count": facts["reference_count"],
        "num_rounds": measured.num_rounds,
        "num_tokens": measured.num_tokens,
        "num_committed": measured.num_committed,
        "num_cut_rounds": measured.num_cut_rounds,
        "share_cut": measured.share_cut,
        "num_ended_rounds": measured.num_ended_rounds,
        "share_ended": measured.share_ended,
        "accepted_length": measured.accepted_length,
        "accepted_length_interval": pair(measured.accepted_length_interval),
        "accepted_length_without_bonus": measured.accepted_length_without_bonus,
        "accepted_length_without_bonus_interval": pair(measured.accepted_length_without_bonus_interval),
        "accepted_length_macro": measured.accepted_length_macro,
        "accepted_length_macro_interval": pair(measured.accepted_length_macro_interval),
        "accepted_length_without_bonus_macro": measured.accepted_length_without_bonus_macro,
        "accepted_length_without_bonus_macro_interval": pair(measured.accepted_length_without_bonus_macro_interval),
        "conditional_acceptance": list(measured.conditional_acceptance),
        "conditional_acceptance_interval": [pair(interval) for interval in measured.conditional_acceptance_interval],
        "num_conditional": list(measured.num_conditional),
        "prefix_survival": list(measured.prefix_survival),
        "num_counted": list(measured.num_counted),
        "turns": by_turn(item.generations, seed=seed),
        "tokens_per_s": item.tokens_per_s,
        "plain_tokens_per_s": item.plain_tokens_per_s,
        "speedup": item.speedup,
        "identical_to_plain": share_identical(item.generations, plain=item.plain) if item.temperature == 0 else None,
        "prompts": measured.prompts.to_json(),
    }


def _thresholds(answers: Sequence[Generation], drafter: DrafterFacts) -> list[dict[str, Any]]:
    if not drafter.confidence:
        return []
    return threshold_sweep((item for answer in answers for item in answer.rounds), block_size=drafter.block_size)


def _speed(point: SpeedPoint) -> dict[str, Any]:
    return {
        **asdict(point),
        "step_ms": list(point.step_ms),
        "speedup": point.speedup,
        "overhead_share": point.overhead_share,
    }
