"""Series of evaluate.json as CSV, for `dvc plots`."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def evaluation_series(body: Mapping[str, Any]) -> dict[str, str]:
    """Every series of one key by the name of its file; one without data has its head only."""
    return {
        "conditional_acceptance.csv": conditional_acceptance_csv(body),
        "accepted_length.csv": accepted_length_csv(body),
        "thresholds.csv": thresholds_csv(body),
        "speed.csv": speed_csv(body),
    }


def conditional_acceptance_csv(body: Mapping[str, Any]) -> str:
    """One row a benchmark, temperature and position (from 1)."""
    names = ("benchmark", "temperature", "position", "conditional_acceptance", "low", "high", "num_conditional",
             "prefix_survival")  # fmt: skip
    return _csv(
        names,
        (
            (
                row["benchmark"],
                row["temperature"],
                slot + 1,
                row["conditional_acceptance"][slot],
                *_ends(row["conditional_acceptance_interval"][slot]),
                row["num_conditional"][slot],
                row["prefix_survival"][slot],
            )
            for row in body["rows"]
            for slot in range(body["block_size"])
        ),
    )


def accepted_length_csv(body: Mapping[str, Any]) -> str:
    """One row a benchmark and temperature; the mean over benchmarks is the row `average`."""
    names = ("benchmark", "domain", "temperature", "accepted_length", "low", "high", "accepted_length_without_bonus")
    rows = [(row["benchmark"], row["domain"], row) for row in body["rows"]]
    rows += [("average", "all", row) for row in body["averages"]]
    return _csv(
        names,
        (
            (
                benchmark,
                domain,
                row["temperature"],
                row["accepted_length"],
                *_ends(row["accepted_length_interval"]),
                row["accepted_length_without_bonus"],
            )
            for benchmark, domain, row in rows
        ),
    )


def thresholds_csv(body: Mapping[str, Any]) -> str:
    """The sweep over confidence thresholds; no rows without a confidence head."""
    names = ("temperature", "threshold", "num_rounds", "verified", "accepted", "rejected", "acceptance_rate",
             "accepted_length")  # fmt: skip
    return _csv(names, ([row[name] for name in names] for row in body["thresholds"]))


def speed_csv(body: Mapping[str, Any]) -> str:
    """Speculative against plain decoding, one row a batch size and temperature."""
    names = ("batch_size", "temperature", "tokens_per_s", "plain_tokens_per_s", "speedup", "draft_ms", "verify_ms",
             "sample_ms", "overhead_share")  # fmt: skip
    return _csv(names, ([row[name] for name in names] for row in body["speed"]))


def _csv(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(rows)
    return stream.getvalue()


def _ends(interval: Sequence[float] | None) -> Sequence[float | None]:
    return (None, None) if interval is None else interval
