"""Benchmark rows: one figure each, measured against a baseline in the same run, kept in reports/bench/."""

from __future__ import annotations

import json
import operator
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from draftsmith.paths import Workspace
from draftsmith.provenance import read_hardware


def within(ratio: float, limit: float) -> bool:
    """No further than `limit` from 1."""
    return abs(ratio - 1) <= limit


OPERATORS = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt, "within": within}


@dataclass(frozen=True)
class Row:
    """One figure. `ratio` is ours / baseline, `bound` (such as ">= 1.0") is about the ratio, `holds` judges it."""

    name: str
    ours: float
    baseline: float
    unit: str
    ratio: float
    bound: str
    holds: bool
    command: str
    machine: str
    note: str


def write_row(name: str, *, ours: float, baseline: float, unit: str, bound: str, command: str, note: str = "") -> Row:
    """Judge a figure, print it and write reports/bench/<name>.json."""
    sign, limit = bound.split()
    ratio = ours / baseline
    row = Row(
        name, round(ours, 4), round(baseline, 4), unit, round(ratio, 4), bound,
        OPERATORS[sign](ratio, float(limit)), command, read_hardware().description, note,
    )  # fmt: skip
    path: Path = Workspace.find().root / "reports" / "bench" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(row), indent=1) + "\n")
    sys.stdout.write(f"{name}: {row.ours} against {row.baseline} {unit}, ratio {row.ratio} ({bound}: {row.holds})\n")
    return row
