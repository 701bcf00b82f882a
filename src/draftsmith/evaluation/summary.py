"""Several keys side by side: the reports of a working copy as Markdown and as the closing page of `draftsmith run`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from draftsmith.errors import DraftsmithError
from draftsmith.evaluation.grid import MISSING, Grid, markdown, number, percent
from draftsmith.evaluation.tables import (
    benchmark_columns,
    caveats,
    four_lengths_grid,
    length_grid,
    output_position_grid,
    position_grid,
    run_grid,
    settings_lines,
    speed_grid,
    temperatures,
    threshold_grid,
    turn_grid,
)
from draftsmith.paths import Workspace

__all__ = [
    "Grid", "KeyReports", "drafter_grid", "evaluation_markdown", "load_reports", "markdown_page", "method_grid",
    "read_report", "speed_summary_grid", "summary",
]  # fmt: skip

READABLE_VERSIONS = {"train": 1, "calibrate": 1, "evaluate": 2}
"""The `schema_version` of each stage's report that this module reads."""


@dataclass(frozen=True)
class KeyReports:
    """The report bodies of one key; None where that stage has not run."""

    key: str
    train: Mapping[str, Any] | None
    calibrate: Mapping[str, Any] | None
    evaluate: Mapping[str, Any] | None


def load_reports(workspace: Workspace, *, keys: Sequence[str]) -> list[KeyReports]:
    """Read reports/<key>/{train,calibrate,evaluate}.json of each key; raises DraftsmithError if one cannot be used."""

    def read(key: str, stage: str) -> Mapping[str, Any] | None:
        return read_report(workspace.report_dir(key) / f"{stage}.json", stage=stage)

    return [KeyReports(key, *(read(key, stage) for stage in ("train", "calibrate", "evaluate"))) for key in keys]


def read_report(path: Path, *, stage: str) -> Mapping[str, Any] | None:
    """The body of one stage's report, None if there is no such file.

    Raises DraftsmithError if it is not JSON or of another schema version.
    """
    try:
        body = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError:
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


def markdown_page(reports: Sequence[KeyReports]) -> str:
    """reports/comparison.md: every key in tables like the paper's Table 1, then speed, acceptance, training."""
    bodies = [item.evaluate for item in reports if item.evaluate is not None]
    waiting = [item.key for item in reports if item.evaluate is None]
    parts = ["# Drafters side by side", "", *_length_section(bodies)]
    if waiting:
        parts += [f"Not evaluated yet: {', '.join(waiting)}.", ""]
    return "\n".join(
        [
            *parts,
            *_speed_section(bodies),
            *_position_section(bodies),
            "## Training and calibration",
            "",
            "Expected length: the accepted length that training expects on held-out answers. Calibration on held-out "
            "rounds, means over positions; by chance: the 95 % quantile of the error that a perfectly calibrated "
            "predictor shows on as many rounds; no head: the drafter has no confidence head.",
            "",
            markdown(drafter_grid(reports)),
        ]
    )


def evaluation_markdown(body: Mapping[str, Any]) -> str:
    """reports/<key>/evaluate.md: everything that evaluate.json says of one key, in tables."""
    drafter = body["drafter"]
    parts = [
        f"# Evaluation of {body['key']}",
        "",
        f"Drafter {drafter['name']} ({drafter['kind']}), K = {drafter['block_size']} draft tokens a round"
        f"{'' if drafter['confidence'] else ', without a confidence head'}.",
        "",
        *_length_section([body]),
        "## By benchmark, domain and mean",
        "",
        "Macro: the mean over prompts of each prompt's own ratio, instead of all tokens over all rounds.",
        "",
        markdown(four_lengths_grid(body)),
    ]
    if turn_grid(body).rows:
        parts += ["## By turn", "", markdown(turn_grid(body))]
    parts += [
        "## By output position",
        "",
        "Where in the answer a round begins, in tokens from 0; prompts of all benchmarks together.",
        "",
        markdown(output_position_grid(body)),
        *_position_section([body]),
    ]
    if body["thresholds"]:
        parts += [
            "## By confidence threshold",
            "",
            "If only the draft tokens before the first raw confidence below the threshold had been verified, replayed "
            "over rounds that verified the whole block; tokens a round. Rejected: verified and not accepted.",
            "",
            markdown(threshold_grid(body)),
        ]
    return "\n".join([*parts, *_speed_section([body])])


def summary(reports: Sequence[KeyReports], *, reports_dir: Path, mlflow_url: str) -> Group:
    """The closing page of `draftsmith run`, for rich's console: results, where the files are, how to open the UIs."""
    waiting = [item.key for item in reports if item.evaluate is None]
    measured = speed_summary_grid(reports)
    title = "Accepted length (bonus token included)" + ("" if measured.rows else " and speed")
    parts: list[Table | Text] = [_rich_table(method_grid(reports), title=title, num_text_columns=2)]
    if measured.rows:
        parts.append(_rich_table(measured, title="Speed against plain decoding", num_text_columns=1))
    parts.append(
        _rich_table(
            drafter_grid(reports),
            title="Accepted length that training expects; calibration on held-out rounds",
            num_text_columns=1,
        )
    )
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


def method_grid(reports: Sequence[KeyReports]) -> Grid:
    """Accepted length in few columns, for the terminal: of each benchmark, plain decoding and below it the keys.

    The two columns of speed are left out where speed was measured by batch size, which is the better measurement.
    """
    bodies = [item.evaluate for item in reports if item.evaluate is not None]
    shows_speed = not any(body["speed"] for body in bodies)
    headers = ["benchmark", "decoding", "accepted\nlength", "without\nbonus"]
    rows = []
    for temperature in temperatures(bodies):
        for name in benchmark_columns(bodies, temperature=temperature):
            found = [
                (body["key"], row)
                for body in bodies
                for row in body["rows"]
                if (row["benchmark"], row["temperature"]) == (name, temperature)
            ]
            captions = [f"{name}, T {temperature:g}", _prompts([row for _, row in found])]
            lines = [["plain decoding", "1.00", "0.00"]]
            lines += [
                [key, f"{row['accepted_length']:.2f}", f"{row['accepted_length_without_bonus']:.2f}"]
                for key, row in found
            ]
            if shows_speed:
                captions.append(f"batch {', '.join(dict.fromkeys(str(row['batch_size']) for _, row in found))}")
                lines[0] += [_plain_speed([row for _, row in found]), "1.00x"]
                for line, (_, row) in zip(lines[1:], found, strict=True):
                    line += [number(row["tokens_per_s"], digits=1), _times(row["speedup"])]
            width = len(lines[0])
            for caption, cells in zip_longest(captions, lines):
                rows.append((caption or "", *(cells or [""] * width)))
    if shows_speed:
        headers += ["tokens\n/s", "times\nplain"]
    return Grid(tuple(headers), tuple(rows))


def speed_summary_grid(reports: Sequence[KeyReports]) -> Grid:
    """Speed in few columns, for the terminal: a row a key, temperature and batch size; none if it was not measured."""
    rows = [
        (
            item.key,
            f"{row['temperature']:g}",
            str(row["batch_size"]),
            f"{row['tokens_per_s']:.1f}",
            f"{row['plain_tokens_per_s']:.1f}",
            _times(row["speedup"]),
        )
        for item in reports
        if item.evaluate is not None
        for row in sorted(item.evaluate["speed"], key=lambda row: (row["temperature"], row["batch_size"]))
    ]
    return Grid(("key", "T", "batch", "tokens\n/s", "plain\n/s", "times\nplain"), tuple(rows))


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
        rows.append((item.key, number(expected, digits=3), *_calibration_cells(item.calibrate)))
    return Grid(headers, tuple(rows))


def _length_section(bodies: Sequence[Mapping[str, Any]]) -> list[str]:
    """Tables like the paper's Table 1, one a temperature: values, below them intervals, and without the bonus token."""
    if not bodies:
        return ["Nothing was evaluated yet.", ""]
    parts = [
        "Accepted length: tokens committed a round, bonus token included; plain decoding commits 1, and K + 1 is the "
        "most. Average: the mean over benchmarks. Intervals are 95 %, by bootstrap over prompts; another training seed "
        "is not in them.",
        "",
    ]
    if len(bodies) > 1:
        parts += [
            "Bold: the best of its target, where the paired interval of its difference to the second best on the same "
            "prompts excludes 0. Where intervals of two keys overlap, the paired one may still tell them apart.",
            "",
        ]
    for temperature in temperatures(bodies):
        parts += [
            f"## Accepted length at temperature {temperature:g}",
            "",
            markdown(length_grid(bodies, temperature=temperature)),
        ]
        if len(bodies) == 1:
            continue  # one key has its intervals in a table of its own
        parts += [
            "With intervals:",
            "",
            markdown(length_grid(bodies, temperature=temperature, cells="intervals")),
            "Without the bonus token (what the drafter proposed and the target accepted):",
            "",
            markdown(length_grid(bodies, temperature=temperature, bonus="without", cells="intervals")),
        ]
    parts += ["## Settings", ""]
    parts += [f"- {line}" for line in (*settings_lines(bodies), *caveats(bodies))]
    machines = "; ".join(dict.fromkeys(str(body["machine"]) for body in bodies))
    return [*parts, f"- measured on {machines}.", ""]


def _speed_section(bodies: Sequence[Mapping[str, Any]]) -> list[str]:
    parts = ["## Speed", ""]
    if any(body["speed"] for body in bodies):
        parts += [
            "Speculative against plain decoding of the same requests by the same engine, one after the other; prefill "
            "is apart. Milliseconds: medians of a step; overhead: the share of a step outside the forward passes.",
            "",
            _table(speed_grid(bodies), bodies),
        ]
    return [
        *parts,
        "By benchmark, from the wall times of the evaluation, prefill included. Cut: rounds that the length limit cut; "
        "ended: rounds that ended on an accepted end-of-text. Identical to plain: the share of prompts whose answers "
        "at temperature 0 equal those of plain decoding token for token.",
        "",
        _table(run_grid(bodies), bodies),
    ]


def _position_section(bodies: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        "## Conditional acceptance by position",
        "",
        "Of the rounds in which all earlier tokens were accepted, the share in which this one was.",
        "",
        _table(position_grid(bodies), bodies),
    ]


def _table(grid: Grid, bodies: Sequence[Mapping[str, Any]]) -> str:
    """A table whose first column is the key, which goes without saying if there is one only."""
    if len(bodies) == 1:
        grid = Grid(grid.headers[1:], tuple(row[1:] for row in grid.rows))
    return markdown(grid)


def _prompts(rows: Sequence[Mapping[str, Any]]) -> str:
    texts = []
    for row in rows:
        reference = "" if row["reference_count"] is None else f"/{row['reference_count']}"
        texts.append(f"{row['num_prompts']}{reference}, cap {row['cap']}")
    return "; ".join(dict.fromkeys(texts))


def _plain_speed(rows: Sequence[Mapping[str, Any]]) -> str:
    speeds = [f"{row['plain_tokens_per_s']:.1f}" for row in rows if row["plain_tokens_per_s"] is not None]
    if not speeds:
        return MISSING
    low, high = min(speeds, key=float), max(speeds, key=float)
    return low if low == high else f"{low}-{high}"


def _times(value: float | None) -> str:
    return MISSING if value is None else f"{value:.2f}x"


def _calibration_cells(body: Mapping[str, Any] | None) -> tuple[str, ...]:
    if body is None:
        return (MISSING,) * 5
    if not body["applicable"]:
        return ("no head", *(MISSING,) * 4)
    names = ("mean_ece_before", "mean_ece_after", "null_mean_ece_quantile_95_after")
    areas = [area for area in body["auc"] if area is not None]
    mean_area = fmean(areas) if areas else None
    return (*(percent(body[name]) for name in names), number(mean_area, digits=3), str(body["num_rounds"]))


def _rich_table(grid: Grid, *, title: str, num_text_columns: int) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for index, header in enumerate(grid.headers):
        is_text = index < num_text_columns
        table.add_column(header, justify="left" if is_text else "right", overflow="fold", no_wrap=is_text)
    for row in grid.rows:
        table.add_row(*row)
    return table
