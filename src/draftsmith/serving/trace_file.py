"""Requests that were recorded elsewhere, to be replayed: a CSV file or JSON lines.

Three sets of columns are read, known by the names that a file has; further columns are notes:

- our own: `arrival_s`, `prompt_tokens`, `output_tokens`, and optionally `domain` and `deadline_s`;
- the Azure LLM inference traces of 2023 and 2024 (github.com/Azure/AzurePublicDataset): `TIMESTAMP`, a date and time,
  `ContextTokens`, `GeneratedTokens`;
- BurstGPT (github.com/HPMLL/BurstGPT, arXiv 2401.17644): `Timestamp` in seconds, `Request tokens`, `Response tokens`.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.errors import DraftsmithError
from draftsmith.serving.requests import Requests, make_requests

Row = tuple[int, Mapping[str, Any]]
"""Line of the file (the first is 1) and its cells by column."""

DOMAIN, DEADLINE = "domain", "deadline_s"


@dataclass(frozen=True)
class _Columns:
    arrival: str
    prompt: str
    output: str
    dates: bool = False
    foreign: bool = True
    """Begins at any time, and has rows of requests that failed: no tokens."""

    @property
    def names(self) -> tuple[str, str, str]:
        return self.arrival, self.prompt, self.output


COLUMNS = (
    _Columns("arrival_s", "prompt_tokens", "output_tokens", foreign=False),
    _Columns("TIMESTAMP", "ContextTokens", "GeneratedTokens", dates=True),
    _Columns("Timestamp", "Request tokens", "Response tokens"),
)


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests of a file in the order of their arrival, those of one second in the order of the file.

    `num_left_out` rows of a public trace had no prompt or no output tokens, as those of requests that failed.
    """

    requests: Requests
    num_left_out: int


def read_trace(path: Path, *, domain: str) -> Trace:
    """Requests of a `.csv` or `.jsonl` file; rows that name no domain are about `domain`.

    Arrivals in our own columns are kept; those of public traces count from the file's earliest. Dates are read to the
    microsecond, without an offset as UTC.
    Raises DraftsmithError for a file that cannot be read or has neither set of columns, and, naming line and column,
    for a value that cannot be.
    """
    if path.suffix not in (".csv", ".jsonl"):
        raise DraftsmithError("a trace of unknown form", got=path.name, expected="a .csv or .jsonl file")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DraftsmithError("the trace cannot be read", got=error.strerror, where=str(path)) from error
    except UnicodeDecodeError as error:
        raise DraftsmithError("the trace is not text", got=error.reason, where=str(path)) from error
    rows = _csv_rows(text) if path.suffix == ".csv" else _json_rows(text, path)
    first = next(rows, None)
    if first is None:
        raise DraftsmithError("a trace without requests", where=str(path))
    columns = _columns_of(first[1], path)
    arrivals, prompts, outputs, domains, deadlines, left_out = [], [], [], [], [], 0
    for line, cells in (first, *rows):
        where = f"{path}, line {line}, column"
        prompt = _whole(cells, columns.prompt, where, least=0 if columns.foreign else 1)
        output = _whole(cells, columns.output, where, least=0 if columns.foreign else 1)
        arrival = _date(cells, columns.arrival, where) if columns.dates else _number(cells, columns.arrival, where)
        if not columns.foreign and arrival < 0:
            raise _unfit(arrival, "seconds >= 0", columns.arrival, where)
        if prompt == 0 or output == 0:
            left_out += 1
            continue
        arrivals.append(arrival)
        prompts.append(prompt)
        outputs.append(output)
        domains.append(domain if columns.foreign else _domain(cells, where) or domain)
        deadlines.append(math.inf if columns.foreign else _deadline(cells, where))
    if not arrivals:
        raise DraftsmithError("a trace without requests", got=f"{left_out} rows without tokens", where=str(path))
    seconds = np.array(arrivals)
    order = np.argsort(seconds, kind="stable")
    requests = make_requests(
        seconds[order] - (seconds.min() if columns.foreign else 0.0),
        prompt_tokens=np.array(prompts)[order],
        output_tokens=np.array(outputs)[order],
        domain=[domains[index] for index in order],
        deadline_s=np.array(deadlines)[order],
    )
    return Trace(requests, left_out)


def _csv_rows(text: str) -> Iterator[Row]:
    reader = csv.DictReader(text.splitlines(), skipinitialspace=True)
    reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
    for cells in reader:
        yield reader.line_num, cells


def _json_rows(text: str, path: Path) -> Iterator[Row]:
    for line, row in enumerate(text.splitlines(), start=1):
        if not row.strip():
            continue
        try:
            cells = json.loads(row)
        except json.JSONDecodeError as error:
            where = f"{path}, line {line}, column {error.colno}"
            raise DraftsmithError("a line of the trace is not JSON", got=error.msg, where=where) from error
        if not isinstance(cells, dict):
            got = type(cells).__name__
            raise DraftsmithError("a line of the trace", got=got, expected="an object", where=f"{path}, line {line}")
        yield line, cells


def _columns_of(cells: Mapping[str, Any], path: Path) -> _Columns:
    for columns in COLUMNS:
        if all(name in cells for name in columns.names):
            return columns
    raise DraftsmithError(
        "not a trace",
        got=f"columns {', '.join(map(str, cells))}",
        expected=" or ".join(", ".join(columns.names) for columns in COLUMNS),
        where=str(path),
    )


def _number(cells: Mapping[str, Any], column: str, where: str) -> float:
    cell = cells.get(column)
    try:
        number = math.nan if cell is None or isinstance(cell, bool) else float(cell)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise _unfit(cell, "a finite number", column, where)
    return number


def _whole(cells: Mapping[str, Any], column: str, where: str, *, least: int) -> int:
    number = _number(cells, column, where)
    if number != int(number) or number < least:
        raise _unfit(cells[column], f"a whole number >= {least}", column, where)
    return int(number)


def _date(cells: Mapping[str, Any], column: str, where: str) -> float:
    """Seconds since 1970."""
    cell = cells.get(column)
    try:
        date = datetime.fromisoformat(cell or "")
    except (TypeError, ValueError):
        raise _unfit(cell, "a date and time", column, where) from None
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()


def _domain(cells: Mapping[str, Any], where: str) -> str | None:
    cell = cells.get(DOMAIN)
    if cell is not None and not isinstance(cell, str):
        raise _unfit(cell, "a name", DOMAIN, where)
    return cell or None


def _deadline(cells: Mapping[str, Any], where: str) -> float:
    if cells.get(DEADLINE) in (None, ""):
        return math.inf
    seconds = _number(cells, DEADLINE, where)
    if seconds <= 0:
        raise _unfit(cells[DEADLINE], "seconds > 0, or nothing", DEADLINE, where)
    return seconds


def _unfit(cell: object, expected: str, column: str, where: str) -> DraftsmithError:
    return DraftsmithError("a value of the trace", got=repr(cell), expected=expected, where=f"{where} {column}")
