"""Evaluations made by hand: rounds from accepted lengths, answers, decoded benchmarks, bodies of evaluate.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from draftsmith.decoding.rounds import Generation, Round
from draftsmith.evaluation.decoded import Decoded, SpeedPoint
from draftsmith.evaluation.report import DrafterFacts, evaluation_body
from draftsmith.params import Domain

DOMAINS: dict[str, Domain] = {"gsm8k": "math", "math500": "math", "humaneval": "code", "mt_bench": "chat"}
Lengths = dict[str, list[list[int]]]  # benchmark -> of each prompt the accepted draft tokens of each round


def make_round(
    accepted: int,
    *,
    verified: int = 3,
    committed: int | None = None,
    ended: bool = False,
    cut: bool = False,
    logits: Sequence[float] = (),
    rejected: int | None = None,
) -> Round:
    usual = accepted if ended else accepted + 1
    return Round(
        anchor_position=0,
        verified=verified,
        accepted=accepted,
        committed=usual if committed is None else committed,
        ended=ended,
        cut=cut,
        confidence_logits=tuple(logits),
        rejected_token=rejected,
    )


def make_generation(request_id: str, rounds: Sequence[Round], *, first_token: int = 0) -> Generation:
    """An answer whose tokens count up from `first_token`."""
    drafted = [False]
    for item in rounds:
        drafted += [True] * item.committed_draft + [False] * (item.committed - item.committed_draft)
    ids = tuple(range(first_token, first_token + len(drafted)))
    return Generation(request_id, ids, tuple(drafted), "length", tuple(rounds))


def make_decoded(
    benchmark: str,
    prompts: Sequence[Sequence[int]],
    *,
    temperature: float = 0.0,
    block_size: int = 2,
    wall_s: float | None = 1.0,
    plain_wall_s: float | None = 2.0,
) -> Decoded:
    """One prompt a list, one round an accepted length; plain decoding gives the same answers."""
    answers = tuple(
        make_generation(f"{benchmark}/{index}/t0", [make_round(n, verified=block_size) for n in lengths])
        for index, lengths in enumerate(prompts)
    )
    return Decoded(benchmark, DOMAINS[benchmark], temperature, 16, answers, answers, wall_s, plain_wall_s)


def make_facts(name: str, **changes: Any) -> dict[str, Any]:
    return {
        "name": name, "domain": DOMAINS[name], "source": f"package {name}", "revision": "1.0", "split": "test",
        "prompt_form": "{question}", "turns": 1, "reference_count": 500, "licence": "MIT", "cap": 4,
        "num_prompts": 2, "replaced_by": None, "contaminated": [], **changes,
    }  # fmt: skip


def make_point(batch_size: int, *, temperature: float = 0.0, tokens_per_s: float = 60.0) -> SpeedPoint:
    return SpeedPoint(
        batch_size=batch_size, temperature=temperature, num_tokens=100, num_rounds=40, num_steps=40,
        tokens_per_s=tokens_per_s, rounds_per_s=20.0, steps_per_s=20.0, plain_tokens_per_s=40.0,
        plain_steps_per_s=40.0, draft_ms=10.0, verify_ms=25.0, sample_ms=15.0, plain_verify_ms=20.0,
        plain_sample_ms=5.0, step_ms=(49.0, 51.0),
    )  # fmt: skip


def body_of(
    key: str,
    decoded: Sequence[Decoded],
    *,
    speed: Sequence[SpeedPoint] = (),
    block_size: int = 2,
    confidence: bool = False,
    facts: Sequence[dict[str, Any]] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """The body as it is read back from its file; `changes` are laid over its first level."""
    names = dict.fromkeys(item.benchmark for item in decoded)
    body = evaluation_body(
        key=key,
        drafter=DrafterFacts(name=key.split("-")[0], kind="dspark", block_size=block_size, confidence=confidence),
        target="tiny",
        dtype="float32",
        benchmarks=[make_facts(name) for name in names] if facts is None else facts,
        decoded=decoded,
        speed=speed,
        max_new_tokens=96,
        seed=6,
        machine="2 x CPU",
        provenance={"git_commit": "0123456789abcdef"},
    )
    return {**json.loads(json.dumps(body, allow_nan=False)), **changes}


def body_of_lengths(
    key: str, lengths: Lengths, *, temperatures: Sequence[float] = (0.0,), block_size: int = 2, **changes: Any
) -> dict[str, Any]:
    decoded = [
        make_decoded(name, prompts, temperature=temperature, block_size=block_size)
        for temperature in temperatures
        for name, prompts in lengths.items()
    ]
    return body_of(key, decoded, block_size=block_size, **changes)
