"""What evaluation found: the body of evaluate.json and its series for `dvc plots`."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from draftsmith.evaluation.accepted_length import AcceptedLength

SCHEMA_VERSION = 1


def evaluation_row(
    measured: AcceptedLength,
    *,
    benchmark: str,
    domain: str,
    temperature: float,
    batch_size: int,
    cap: int,
    reference_count: int | None,
    tokens_per_s: float,
    plain_tokens_per_s: float,
    identical_to_plain: float | None,
) -> dict[str, Any]:
    """One row of evaluate.json: one benchmark at one temperature and batch size.

    `cap` is the most prompts that were allowed, `reference_count` how many the paper's evaluation uses (None: unknown).
    `tokens_per_s` is of speculative, `plain_tokens_per_s` of plain decoding by the same engine in the same run.
    `identical_to_plain` is the share of prompts with token-identical answers, measured at temperature 0 only.
    """
    return {
        "benchmark": benchmark,
        "domain": domain,
        "temperature": temperature,
        "batch_size": batch_size,
        "num_prompts": measured.num_prompts,
        "num_requests": measured.num_requests,
        "num_prompts_without_rounds": measured.num_prompts_without_rounds,
        "cap": cap,
        "reference_count": reference_count,
        "num_rounds": measured.num_rounds,
        "num_cut_rounds": measured.num_cut_rounds,
        "share_cut": measured.share_cut,
        "num_tokens": measured.num_tokens,
        "num_committed": measured.num_committed,
        "accepted_length": measured.accepted_length,
        "accepted_length_interval": _pair(measured.accepted_length_interval),
        "accepted_length_without_bonus": measured.accepted_length_without_bonus,
        "accepted_length_without_bonus_interval": _pair(measured.accepted_length_without_bonus_interval),
        "accepted_length_macro": measured.accepted_length_macro,
        "accepted_length_without_bonus_macro": measured.accepted_length_without_bonus_macro,
        "conditional_acceptance": list(measured.conditional_acceptance),
        "conditional_acceptance_interval": [_pair(item) for item in measured.conditional_acceptance_interval],
        "num_conditional": list(measured.num_conditional),
        "prefix_survival": list(measured.prefix_survival),
        "num_counted": list(measured.num_counted),
        "tokens_per_s": tokens_per_s,
        "plain_tokens_per_s": plain_tokens_per_s,
        "speedup": tokens_per_s / plain_tokens_per_s,
        "identical_to_plain": identical_to_plain,
        "prompts": measured.prompts.to_json(),
    }


def evaluation_body(
    rows: Sequence[Mapping[str, Any]], *, key: str, block_size: int, max_new_tokens: int, seed: int, machine: str
) -> dict[str, Any]:
    """The body of evaluate.json. `averages` are plain means over benchmarks at each temperature and batch size."""
    settings = sorted({(row["temperature"], row["batch_size"]) for row in rows})
    averages = []
    for temperature, batch_size in settings:
        group = [row for row in rows if (row["temperature"], row["batch_size"]) == (temperature, batch_size)]
        averages.append(
            {
                "temperature": temperature,
                "batch_size": batch_size,
                "num_benchmarks": len(group),
                "accepted_length": fmean(row["accepted_length"] for row in group),
                "accepted_length_without_bonus": fmean(row["accepted_length_without_bonus"] for row in group),
                "speedup": fmean(row["speedup"] for row in group),
            }
        )
    return {
        "schema_version": SCHEMA_VERSION,
        "key": key,
        "block_size": block_size,
        "max_new_tokens": max_new_tokens,
        "seed": seed,
        "machine": machine,
        "rows": [dict(row) for row in rows],
        "averages": averages,
    }


def conditional_acceptance_csv(body: Mapping[str, Any]) -> str:
    """Acceptance by position as CSV for `dvc plots`: one row a benchmark, temperature, batch size and position."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(
        [
            "benchmark",
            "temperature",
            "batch_size",
            "position",
            "conditional_acceptance",
            "low",
            "high",
            "num_conditional",
            "prefix_survival",
        ]
    )
    for row in body["rows"]:
        for slot in range(body["block_size"]):
            writer.writerow(
                [
                    row["benchmark"],
                    row["temperature"],
                    row["batch_size"],
                    slot + 1,
                    row["conditional_acceptance"][slot],
                    *(row["conditional_acceptance_interval"][slot] or (None, None)),
                    row["num_conditional"][slot],
                    row["prefix_survival"][slot],
                ]
            )
    return stream.getvalue()


def _pair(interval: tuple[float, float] | None) -> list[float] | None:
    return None if interval is None else list(interval)
