"""SPS: steps per second of verification against the batch tokens N of a step, as measured (DSpark section 3.2.2)."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftsmith.errors import DraftsmithError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

PROBES, RATES, MAXIMUM = "sample_batch_tokens", "sample_steps_per_sec", "max_batch_tokens"
"""Keys of SGLang's SPS sidecar."""
CSV_COLUMNS = ("batch_tokens", "steps_per_s")


class CostTable:
    """Profiled points of SPS(N). Letters: P points, N batch tokens of a step (anchors and verified draft tokens).

    SPS(N) is the rate of the nearest point at or below N, the first point's below it, the last one's beyond it: nothing
    is interpolated, so that the steps of real hardware stay where they were measured. Immutable.
    """

    batch_tokens: Ints  # [P], strictly increasing
    steps_per_s: Floats  # [P]
    max_batch_tokens: int

    def __init__(
        self,
        batch_tokens: ArrayLike,
        *,
        steps_per_s: ArrayLike,
        max_batch_tokens: int | None = None,
        where: str | None = None,
    ) -> None:
        """`max_batch_tokens`: the most tokens the table is meant for, by default the last point; `where`: its source.

        Raises DraftsmithError for a table without points, points that are not whole numbers >= 1 or do not strictly
        increase, rates that are not positive and finite or not one a point, a maximum below the last point.
        """
        probes, rates = _numbers(batch_tokens, name=PROBES, where=where), _numbers(steps_per_s, name=RATES, where=where)
        if len(probes) == 0 or len(probes) != len(rates):
            raise DraftsmithError(
                "an SPS table needs one rate for each point",
                got=f"{len(probes)} points, {len(rates)} rates",
                expected="as many of each, at least one",
                where=where,
            )
        _check_each(probes, (probes >= 1) & (probes == np.floor(probes)) & (probes < 2.0**53), "a whole number >= 1",
                    name=PROBES, where=where)  # fmt: skip
        _check_each(probes[1:], np.diff(probes) > 0, "strictly increasing points", name=PROBES, where=where)
        _check_each(rates, (rates > 0) & np.isfinite(rates), "a finite rate > 0", name=RATES, where=where)
        self.batch_tokens, self.steps_per_s = probes.astype(np.int64), rates
        last = int(self.batch_tokens[-1])
        self.max_batch_tokens = last if max_batch_tokens is None else max_batch_tokens
        if self.max_batch_tokens < last:
            raise DraftsmithError(
                f"{MAXIMUM} lies below the last point", got=self.max_batch_tokens, expected=f">= {last}", where=where
            )
        self.batch_tokens.setflags(write=False)
        self.steps_per_s.setflags(write=False)

    def look_up(self, batch_tokens: ArrayLike) -> Floats:
        """SPS(N) of each N, in the shape of `batch_tokens`."""
        points = self.batch_tokens.searchsorted(batch_tokens, side="right") - 1
        return self.steps_per_s[np.maximum(points, 0)]

    def look_up_run(self, first: int, *, count: int) -> Floats:
        """SPS(first), SPS(first + 1), ...: [count], count >= 1. As `look_up`, at the cost of one copy."""
        low, high = np.maximum(self.batch_tokens.searchsorted((first, first + count - 1), side="right") - 1, 0).tolist()
        if low == high:
            return np.full(count, self.steps_per_s[low])
        edges = np.empty(high - low + 2, np.int64)
        edges[0], edges[-1] = 0, count
        np.subtract(self.batch_tokens[low + 1 : high + 1], first, out=edges[1:-1])
        return np.repeat(self.steps_per_s[low : high + 1], np.diff(edges))

    def monotone(self) -> CostTable:
        """The table with each rate lowered to the least of those before it; this one keeps what was measured.

        More tokens a step do not run faster, so that a rate above an earlier one is an artefact of measuring, or of one
        batch size; it would hold up to the next point and make a scheduler verify too much all along.
        """
        return CostTable(
            self.batch_tokens,
            steps_per_s=np.minimum.accumulate(self.steps_per_s),
            max_batch_tokens=self.max_batch_tokens,
        )

    def with_fixed(self, seconds: float) -> CostTable:
        """The table of steps that take `seconds` more, whatever their N.

        Raises DraftsmithError unless they are finite and >= 0.
        """
        if not 0 <= seconds < float("inf"):
            raise DraftsmithError("fixed seconds of a step", got=seconds, expected="finite, >= 0")
        return CostTable(
            self.batch_tokens,
            steps_per_s=1 / (1 / self.steps_per_s + seconds),
            max_batch_tokens=self.max_batch_tokens,
        )

    def to_sidecar(self) -> dict[str, Any]:
        """SGLang's SPS file (METHOD 13)."""
        return {
            PROBES: self.batch_tokens.tolist(),
            RATES: self.steps_per_s.tolist(),
            MAXIMUM: self.max_batch_tokens,
        }

    @classmethod
    def from_sidecar(cls, body: Mapping[str, Any], *, where: str) -> CostTable:
        """A table in SGLang's form; without `max_batch_tokens` it is the last point. Other keys are notes.

        Raises DraftsmithError naming `where` if a key is missing or its value cannot be one.
        """
        missing = [key for key in (PROBES, RATES) if key not in body]
        if missing:
            raise DraftsmithError(
                "not an SPS table", got=f"no {' and no '.join(missing)}", expected=f"{PROBES} and {RATES}", where=where
            )
        maximum = body.get(MAXIMUM)
        if isinstance(maximum, bool) or not isinstance(maximum, int | None):
            raise DraftsmithError(f"{MAXIMUM} is no number of tokens", got=repr(maximum), where=where)
        return cls(body[PROBES], steps_per_s=body[RATES], max_batch_tokens=maximum, where=where)


def read_cost_table(path: Path) -> CostTable:
    """A table that was measured anywhere: SGLang's JSON, or a CSV with columns `batch_tokens` and `steps_per_s`.

    Further columns are notes. Raises DraftsmithError naming the file if it is missing, of another form or unfit.
    """
    if path.suffix not in (".json", ".csv"):
        raise DraftsmithError("an SPS table of unknown form", got=path.name, expected="a .json or .csv file")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DraftsmithError("the SPS table cannot be read", got=error.strerror, where=str(path)) from error
    except UnicodeDecodeError as error:
        raise DraftsmithError("the SPS table is not text", got=error.reason, where=str(path)) from error
    if path.suffix == ".csv":
        return _from_csv(text, where=str(path))
    try:
        body = json.loads(text)
    except json.JSONDecodeError as error:
        raise DraftsmithError("the SPS table is not JSON", got=str(error), where=str(path)) from error
    if not isinstance(body, dict):
        raise DraftsmithError("not an SPS table", got=type(body).__name__, expected="an object", where=str(path))
    return CostTable.from_sidecar(body, where=str(path))


def _from_csv(text: str, *, where: str) -> CostTable:
    reader = csv.DictReader(text.splitlines(), skipinitialspace=True)
    columns = [name.strip() for name in reader.fieldnames or ()]
    reader.fieldnames = columns
    if missing := [name for name in CSV_COLUMNS if name not in columns]:
        raise DraftsmithError(
            "not an SPS table", got=f"columns {columns}", expected=f"also {', '.join(missing)}", where=where
        )
    rows = list(reader)
    probes, rates = ([_parsed(row[name], name, where) for row in rows] for name in CSV_COLUMNS)
    return CostTable(probes, steps_per_s=rates, where=where)


def _parsed(cell: str | None, name: str, where: str) -> float:
    try:
        return float(cell or "")
    except ValueError:
        raise DraftsmithError(f"a cell of {name} is no number", got=repr(cell), where=where) from None


def _numbers(values: ArrayLike, *, name: str, where: str | None) -> Floats:
    """A copy in float64, [P]."""
    try:
        array = np.asarray(values)
    except ValueError:
        array = np.array(None)  # ragged
    if array.ndim != 1 or (array.dtype.kind not in "iuf" and array.size):
        raise DraftsmithError(f"{name} must be a list of numbers", got=repr(values), where=where)
    return array.astype(np.float64)


def _check_each(values: Floats, good: NDArray[np.bool_], expected: str, *, name: str, where: str | None) -> None:
    if not good.all():
        at = int(good.argmin())
        raise DraftsmithError(f"{name} is unfit", got=f"{values[at]:g}", expected=expected, where=where)
