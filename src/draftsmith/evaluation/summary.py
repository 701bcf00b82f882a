"""Several keys side by side: the reports of a working copy as Markdown and as the closing page of `draftsmith run`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from draftsmith.errors import DraftsmithError
from draftsmith.paths import Workspace

Detail = Literal["brief", "full"]
Setting = tuple[str, float, int]  # benchmark, temperature, batch size
MISSING = "-"
READABLE_VERSIONS = {"train": 1, "calibrate": 1, "evaluate": 2}
"""The `schema_version` of each stage's report that this module reads."""


@dataclass(frozen=True)
class KeyReports:
    """The report bodies of one key; None where that stage has not run."""

    key: str
    train: Mapping[str, Any] | None
    calibrate: Mapping[str, Any] | None
    evaluate: Mapping[str, Any] | None


@dataclass(frozen=True)
class Grid:
    """A table of text cells: what Markdown and the terminal both print."""

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def load_reports(workspace: Workspace, *, keys: Sequence[str]) -> list[KeyReports]:
    """Read reports/<key>/{train,calibrate,evaluate}.json of each key; raises DraftsmithError if one cannot be used."""
    return [
        KeyReports(
            key=key,
            train=_read(workspace.report_dir(key), stage="train"),
            calibrate=_read(workspace.report_dir(key), stage="calibrate"),
            evaluate=_read(workspace.report_dir(key), stage="evaluate"),
        )
        for key in keys
    ]


def comparison_grid(reports: Sequence[KeyReports]) -> Grid:
    """One row a benchmark, temperature and batch size; plain decoding, then each key's columns side by side.

    Plain decoding commits one token a step, by definition, so only its speed is a column; a range means that it was
    measured with each key and differed. `prompts` names the cap and, after the stroke, the paper's number of prompts.
    """
    tables = _tables(reports)
    headers = ["benchmark", "T", "batch", "prompts", "plain: tok/s"]
    for key in tables:
        headers += [f"{key}: accepted length", "without bonus", "tok/s", "speed-up", "identical to plain"]
    rows = []
    for setting in _settings(tables):
        benchmark, temperature, batch_size = setting
        found = [table[setting] for table in tables.values() if setting in table]
        cells = [benchmark, f"{temperature:g}", str(batch_size), _prompts(found), _plain_speed(found)]
        for table in tables.values():
            row = table.get(setting)
            cells += [MISSING] * 5 if row is None else [*_key_cells(row, detail="full"), _identical(row)]
        rows.append(tuple(cells))
    return Grid(tuple(headers), tuple(rows))


def method_grid(reports: Sequence[KeyReports]) -> Grid:
    """The comparison in few columns, for the terminal: of each benchmark, plain decoding and below it the keys."""
    tables = _tables(reports)
    rows = []
    for setting in _settings(tables):
        benchmark, temperature, batch_size = setting
        found = [table[setting] for table in tables.values() if setting in table]
        captions = [f"{benchmark}, T {temperature:g}", _prompts(found), f"batch {batch_size}"]
        lines: list[tuple[str, ...]] = [("plain decoding", "1.00", "0.00", _plain_speed(found), "1.00x")]
        lines += [
            (key, *_key_cells(table[setting], detail="brief")) for key, table in tables.items() if setting in table
        ]
        for caption, line in zip_longest(captions, lines):
            rows.append((caption or "", *(line or [""] * 5)))
    return Grid(
        ("benchmark", "decoding", "accepted\nlength", "without\nbonus", "tokens\n/s", "times\nplain"), tuple(rows)
    )


def position_grid(reports: Sequence[KeyReports]) -> Grid:
    """Conditional acceptance by position, one row a key, benchmark, temperature and batch size."""
    bodies = [(item.key, item.evaluate) for item in reports if item.evaluate is not None]
    block_size = max((body["block_size"] for _, body in bodies), default=0)
    rows = []
    for key, body in bodies:
        for row in body["rows"]:
            shares = [_number(value, digits=3) for value in row["conditional_acceptance"]]
            padding = [MISSING] * (block_size - len(shares))
            setting = [row["benchmark"], f"{row['temperature']:g}", str(row["batch_size"])]
            rows.append((key, *setting, str(row["num_rounds"]), *shares, *padding))
    positions = [str(position) for position in range(1, block_size + 1)]
    return Grid(("key", "benchmark", "T", "batch", "rounds", *positions), tuple(rows))


def drafter_grid(reports: Sequence[KeyReports]) -> Grid:
    """One row a key: the accepted length that training expects, and calibration before and after on held-out rounds.

    Calibration errors and AUC are means over positions; `by chance` is the 95 % quantile of the error after that a
    perfectly calibrated predictor would show on as many rounds.
    """
    headers = (
        "key",
        "expected\nlength",
        "ECE\nbefore",
        "ECE\nafter",
        "by\nchance",
        "AUC",
        "rounds",
    )
    rows = []
    for item in reports:
        expected = None if item.train is None else item.train.get("expected_accepted_length")
        rows.append((item.key, _number(expected, digits=3), *_calibration_cells(item.calibrate)))
    return Grid(headers, tuple(rows))


def markdown(grid: Grid) -> str:
    """The grid as a Markdown table, numbers to the right."""
    lines = [
        "| " + " | ".join(header.replace("\n", " ") for header in grid.headers) + " |",
        "|" + "|".join(["---"] + ["---:"] * (len(grid.headers) - 1)) + "|",
        *("| " + " | ".join(row) + " |" for row in grid.rows),
    ]
    return "\n".join(lines) + "\n"


def markdown_page(reports: Sequence[KeyReports]) -> str:
    """The comparison as a Markdown page: accepted length, speed, acceptance by position, training, calibration."""
    machines = _distinct([str(item.evaluate["machine"]) for item in reports if item.evaluate is not None])
    return "\n".join(
        [
            "# Drafters side by side\n",
            "Accepted length: tokens committed a round, bonus token included, with its 95 % interval over prompts; "
            "plain decoding commits 1. T: temperature.\n",
            markdown(comparison_grid(reports)),
            f"Measured on: {machines}\n",
            "## Conditional acceptance by position\n",
            "Of the rounds in which all earlier tokens were accepted, the share in which this one was.\n",
            markdown(position_grid(reports)),
            "## Training and calibration\n",
            "Expected length: the accepted length that training expects on held-out answers. Calibration on held-out "
            "rounds, means over positions; by chance: the 95 % quantile of the error that a perfectly calibrated "
            "predictor shows on as many rounds; no head: the drafter has no confidence head.\n",
            markdown(drafter_grid(reports)),
        ]
    )


def summary(reports: Sequence[KeyReports], *, reports_dir: Path, mlflow_url: str) -> Group:
    """The closing page of `draftsmith run`, for rich's console: results, where the files are, how to open the UIs."""
    waiting = [item.key for item in reports if item.evaluate is None]
    parts: list[Table | Text] = [
        _rich_table(method_grid(reports), title="Accepted length (bonus token included) and speed", num_text_columns=2),
        _rich_table(
            drafter_grid(reports),
            title="Accepted length that training expects; calibration on held-out rounds",
            num_text_columns=1,
        ),
    ]
    if waiting:
        parts.append(Text(f"Not evaluated yet: {', '.join(waiting)}"))
    parts.append(
        Text(
            f"Reports:  {reports_dir}/<key>/*.json and *.png\n"
            f"Runs:     {mlflow_url} (MLflow)\n"
            "`make up` opens the MLflow and Prefect pages; `dvc plots show` draws the curves of this working copy."
        )
    )
    return Group(*parts)


def _read(folder: Path, *, stage: str) -> Mapping[str, Any] | None:
    path = folder / f"{stage}.json"
    try:
        body = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except json.JSONDecodeError:
        raise DraftsmithError(
            "a report is not JSON", expected=f"run the {stage} stage again", where=str(path)
        ) from None
    version = body.get("schema_version") if isinstance(body, dict) else None
    if version != READABLE_VERSIONS[stage]:
        raise DraftsmithError(
            "a report of another schema version",
            got=str(version),
            expected=f"{READABLE_VERSIONS[stage]}; run the {stage} stage again",
            where=str(path),
        )
    return body


def _tables(reports: Sequence[KeyReports]) -> dict[str, dict[Setting, Mapping[str, Any]]]:
    """The rows of each evaluated key by benchmark, temperature and batch size."""
    return {
        item.key: {(row["benchmark"], row["temperature"], row["batch_size"]): row for row in item.evaluate["rows"]}
        for item in reports
        if item.evaluate is not None
    }


def _settings(tables: Mapping[str, Mapping[Setting, Any]]) -> list[Setting]:
    return list(dict.fromkeys(setting for table in tables.values() for setting in table))


def _prompts(rows: Sequence[Mapping[str, Any]]) -> str:
    texts = []
    for row in rows:
        reference = "" if row["reference_count"] is None else f"/{row['reference_count']}"
        texts.append(f"{row['num_prompts']}{reference}, cap {row['cap']}")
    return _distinct(texts)


def _plain_speed(rows: Sequence[Mapping[str, Any]]) -> str:
    values = [row["plain_tokens_per_s"] for row in rows]
    low, high = f"{min(values):.1f}", f"{max(values):.1f}"
    return low if low == high else f"{low}-{high}"


def _key_cells(row: Mapping[str, Any], *, detail: Detail) -> list[str]:
    """Accepted length (with its interval if `full`), the same without bonus, tokens a second, speed-up."""
    length = f"{row['accepted_length']:.2f}"
    if detail == "full" and row["accepted_length_interval"] is not None:
        length += " [{:.2f}, {:.2f}]".format(*row["accepted_length_interval"])
    without_bonus = f"{row['accepted_length_without_bonus']:.2f}"
    return [length, without_bonus, f"{row['tokens_per_s']:.1f}", f"{row['speedup']:.2f}x"]


def _identical(row: Mapping[str, Any]) -> str:
    return _percent(row["identical_to_plain"])


def _calibration_cells(body: Mapping[str, Any] | None) -> tuple[str, ...]:
    if body is None:
        return (MISSING,) * 5
    if not body["applicable"]:
        return ("no head", *(MISSING,) * 4)
    names = ("mean_ece_before", "mean_ece_after", "null_mean_ece_quantile_95_after")
    areas = [area for area in body["auc"] if area is not None]
    mean_area = fmean(areas) if areas else None
    return (*(_percent(body[name]) for name in names), _number(mean_area, digits=3), str(body["num_rounds"]))


def _number(value: float | None, *, digits: int) -> str:
    return MISSING if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return MISSING if value is None else f"{100 * value:.1f} %"


def _distinct(texts: Sequence[str]) -> str:
    return "; ".join(dict.fromkeys(texts))


def _rich_table(grid: Grid, *, title: str, num_text_columns: int) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for index, header in enumerate(grid.headers):
        is_text = index < num_text_columns
        table.add_column(header, justify="left" if is_text else "right", overflow="fold", no_wrap=is_text)
    for row in grid.rows:
        table.add_row(*row)
    return table
