"""What an evaluation leaves: files of reports/<key>, and the same figures in MLflow."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from draftsmith.evaluation.breakdown import temperatures_of
from draftsmith.evaluation.figures import (
    accepted_length_figure,
    conditional_acceptance_figure,
    output_position_figure,
    speed_figure,
    threshold_figure,
)
from draftsmith.evaluation.page import PageInput, evaluation_page
from draftsmith.evaluation.series import evaluation_series
from draftsmith.evaluation.summary import KeyReports, evaluation_markdown
from draftsmith.figures import png_bytes
from draftsmith.manifest import write_bytes, write_json
from draftsmith.tracking import StageRun

LENGTHS = ("accepted_length", "accepted_length_without_bonus")
SPEEDS = ("tokens_per_s", "plain_tokens_per_s", "speedup")
STEP_SPEEDS = (*SPEEDS, "draft_ms", "verify_ms", "sample_ms", "overhead_share")


def write_reports(body: Mapping[str, Any], samples: Mapping[str, Any], *, folder: Path, tracked: StageRun) -> None:
    """Write everything but evaluate.json, which comes last, and give the same to MLflow."""
    reports = [KeyReports(body["key"], None, None, body)]
    for name, text in evaluation_series(body).items():
        write_bytes(folder / name, text.encode())
    kept, shown = report_figures(reports, body)
    for name, figure in kept.items():
        write_bytes(folder / name, png_bytes(figure))
    for name, figure in {**kept, **shown}.items():
        tracked.log_figure(figure, name)
    pages = {
        "evaluate.md": evaluation_markdown(body),
        "evaluate.html": evaluation_page([PageInput(body, samples)], title=f"Evaluation of {body['key']}"),
    }
    for name, text in pages.items():
        write_bytes(folder / name, text.encode())
        tracked.log_text(text, name)
    write_json(folder / "samples.json", samples)
    tracked.log_json(samples, "samples.json")
    tracked.log_json(body, "evaluate.json")


def report_figures(reports: list[KeyReports], body: Mapping[str, Any]) -> tuple[dict[str, Figure], dict[str, Figure]]:
    """Figures by file name: those of the reports' folder, and those that only MLflow shows."""
    kept, shown = {}, {}
    for temperature in temperatures_of(body["rows"]):
        stem = f"t{temperature:g}.png"
        kept[f"acceptance_{stem}"] = conditional_acceptance_figure(reports, temperature=temperature)
        shown[f"accepted_length_{stem}"] = accepted_length_figure(reports, temperature=temperature)
        shown[f"output_positions_{stem}"] = output_position_figure(reports, temperature=temperature)
        if body["thresholds"]:
            shown[f"thresholds_{stem}"] = threshold_figure(reports, temperature=temperature)
    if body["speed"]:
        shown["speed.png"] = speed_figure(reports)
    return kept, shown


def log_body(tracked: StageRun, body: Mapping[str, Any]) -> None:
    """The figures of evaluate.json as metrics, `<benchmark | domain | average>_t<temperature>_<name>`; what depends on
    the position in the block has it as the step. What is null is left out."""
    for row in body["rows"]:
        stem = f"{row['benchmark']}_t{row['temperature']:g}"
        _log(tracked, stem, row, (*LENGTHS, *SPEEDS, "identical_to_plain"))
        for position, value in enumerate(row["conditional_acceptance"], start=1):
            _log(tracked, stem, {"conditional_acceptance": value}, ("conditional_acceptance",), step=position)
    for row in body["domains"]:
        _log(tracked, f"{row['domain']}_t{row['temperature']:g}", row, LENGTHS)
    for row in body["averages"]:
        _log(tracked, f"average_t{row['temperature']:g}", row, (*LENGTHS, "speedup"))
    for row in body["speed"]:
        _log(tracked, f"batch{row['batch_size']}_t{row['temperature']:g}", row, STEP_SPEEDS)


def _log(tracked: StageRun, stem: str, row: Mapping[str, Any], names: tuple[str, ...], *, step: int = 0) -> None:
    values = {f"{stem}_{name}": row[name] for name in names if row[name] is not None}
    tracked.log_metrics(values, step=step)
