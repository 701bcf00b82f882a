"""evaluate.json, its series, the tables and figures over several keys."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from draftsmith.calibration.report import not_applicable_body
from draftsmith.decoding.rounds import Generation, Round
from draftsmith.errors import DraftsmithError
from draftsmith.evaluation.accepted_length import measure_accepted_length
from draftsmith.evaluation.figures import Curve, accepted_length_figure, conditional_acceptance_figure, loss_figure
from draftsmith.evaluation.report import conditional_acceptance_csv, evaluation_body, evaluation_row
from draftsmith.evaluation.summary import (
    KeyReports,
    comparison_grid,
    drafter_grid,
    load_reports,
    markdown,
    markdown_page,
    method_grid,
    position_grid,
    summary,
)
from draftsmith.figures import png_bytes
from draftsmith.paths import Workspace

DSPARK, DFLASH = "dspark_b7_2l-smollm2_135m", "dflash_b7_2l-smollm2_135m"


def make_row(
    lengths: list[list[int]], *, benchmark: str = "gsm8k", temperature: float = 0.0, tokens_per_s: float = 60.0
) -> dict[str, Any]:
    """A row measured on one prompt a list, one round an accepted length; K = 2."""
    generations = [
        Generation(
            f"p{index}",
            tuple(range(1 + sum(n + 1 for n in prompt))),
            (),
            "length",
            tuple(Round(0, 2, n, n + 1, False, False) for n in prompt),
        )
        for index, prompt in enumerate(lengths)
    ]
    return evaluation_row(
        measure_accepted_length(generations, block_size=2, seed=0),
        benchmark=benchmark,
        domain="math",
        temperature=temperature,
        batch_size=16,
        cap=4,
        reference_count=500,
        tokens_per_s=tokens_per_s,
        plain_tokens_per_s=40.0,
        identical_to_plain=1.0 if temperature == 0 else None,
    )


def make_body(key: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return evaluation_body(rows, key=key, block_size=2, max_new_tokens=96, seed=6, machine="2 x CPU")


CALIBRATED = {
    "schema_version": 1,
    "applicable": True,
    "mean_ece_before": 0.052,
    "mean_ece_after": 0.0121,
    "null_mean_ece_quantile_95_after": 0.02,
    "auc": [0.8, None, 0.9],
    "num_rounds": 1440,
}


@pytest.fixture
def reports() -> list[KeyReports]:
    ours = [
        make_row([[2, 1], [1, 0]]),
        make_row([[2, 2], [2, 2]], benchmark="humaneval"),
        make_row([[1, 1], [1, 1]], temperature=1.0),
    ]
    theirs = [make_row([[0, 1], [1, 0]], tokens_per_s=50.0)]
    return [
        KeyReports(DSPARK, {"expected_accepted_length": 1.3609}, CALIBRATED, make_body(DSPARK, ours)),
        KeyReports(DFLASH, None, not_applicable_body(2, reason="no head"), make_body(DFLASH, theirs)),
        KeyReports("mtp1-smollm2_135m", None, None, None),
    ]


def test_row_by_hand() -> None:
    row = json.loads(json.dumps(make_row([[2, 1], [1, 0]])))
    assert (row["accepted_length"], row["accepted_length_without_bonus"], row["speedup"]) == (2.0, 1.0, 1.5)
    assert (row["num_prompts"], row["cap"], row["reference_count"], row["num_rounds"]) == (2, 4, 500, 4)
    assert (row["num_tokens"], row["num_committed"]) == (10, 8)
    assert row["conditional_acceptance"] == pytest.approx([3 / 4, 1 / 3])
    assert row["prefix_survival"] == [0.75, 0.25]
    low, high = row["accepted_length_interval"]
    assert (low, high) == (1.5, 2.5)  # two prompts: one drawn twice, either way
    assert row["identical_to_plain"] == 1.0


def test_body_averages_over_benchmarks_at_each_setting(reports: list[KeyReports]) -> None:
    assert reports[0].evaluate is not None
    averages = reports[0].evaluate["averages"]
    assert [(item["temperature"], item["num_benchmarks"]) for item in averages] == [(0.0, 2), (1.0, 1)]
    assert averages[0]["accepted_length"] == pytest.approx((2.0 + 3.0) / 2)
    assert reports[0].evaluate["schema_version"] == 1


def test_series_have_a_row_a_position(reports: list[KeyReports]) -> None:
    assert reports[0].evaluate is not None
    rows = list(csv.DictReader(io.StringIO(conditional_acceptance_csv(reports[0].evaluate))))
    assert [(row["benchmark"], row["temperature"], row["position"]) for row in rows] == [
        (name, temperature, position)
        for name, temperature in (("gsm8k", "0.0"), ("humaneval", "0.0"), ("gsm8k", "1.0"))
        for position in ("1", "2")
    ]
    assert float(rows[1]["conditional_acceptance"]) == pytest.approx(1 / 3)


def test_comparison_puts_keys_side_by_side_with_the_cap(reports: list[KeyReports]) -> None:
    grid = comparison_grid(reports)
    assert grid.headers[:5] == ("benchmark", "T", "batch", "prompts", "plain: tok/s")
    assert grid.headers[5] == f"{DSPARK}: accepted length"
    assert grid.headers[10] == f"{DFLASH}: accepted length"
    assert grid.rows[0] == (
        *("gsm8k", "0", "16", "2/500, cap 4", "40.0"),
        *("2.00 [1.50, 2.50]", "1.00", "60.0", "1.50x", "100.0 %"),
        *("1.50 [1.50, 1.50]", "0.50", "50.0", "1.25x", "100.0 %"),
    )
    assert [row[:2] for row in grid.rows] == [("gsm8k", "0"), ("humaneval", "0"), ("gsm8k", "1")]
    assert grid.rows[2][9] == "-"  # not measured at temperature 1
    assert grid.rows[1][10:] == ("-",) * 5


def test_methods_below_one_another_begin_with_plain_decoding(reports: list[KeyReports]) -> None:
    assert method_grid(reports).rows[:3] == (
        ("gsm8k, T 0", "plain decoding", "1.00", "0.00", "40.0", "1.00x"),
        ("2/500, cap 4", DSPARK, "2.00", "1.00", "60.0", "1.50x"),
        ("batch 16", DFLASH, "1.50", "0.50", "50.0", "1.25x"),
    )


def test_differing_speeds_of_plain_decoding_are_a_range(reports: list[KeyReports]) -> None:
    assert reports[1].evaluate is not None
    row = {**reports[1].evaluate["rows"][0], "plain_tokens_per_s": 41.26}
    other = KeyReports(DFLASH, None, None, make_body(DFLASH, [row]))
    assert comparison_grid([reports[0], other]).rows[0][4] == "40.0-41.3"


def test_positions_and_drafters(reports: list[KeyReports]) -> None:
    assert position_grid(reports).rows[0] == (DSPARK, "gsm8k", "0", "16", "4", "0.750", "0.333")
    assert drafter_grid(reports).rows == (
        (DSPARK, "1.361", "5.2 %", "1.2 %", "2.0 %", "0.850", "1440"),
        (DFLASH, "-", "no head", "-", "-", "-", "-"),
        ("mtp1-smollm2_135m", "-", "-", "-", "-", "-", "-"),
    )


def test_markdown_tables_have_equal_cells_in_every_line(reports: list[KeyReports]) -> None:
    for grid in (comparison_grid(reports), position_grid(reports), drafter_grid(reports)):
        lines = markdown(grid).splitlines()
        assert len(lines) == 2 + len(grid.rows)
        assert {line.count("|") for line in lines} == {len(grid.headers) + 1}
    page = markdown_page(reports)
    assert "2 x CPU" in page
    assert "2/500, cap 4" in page


@pytest.mark.parametrize("width", [80, 160])
def test_summary_says_everything_a_reader_needs(reports: list[KeyReports], width: int) -> None:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(summary(reports, reports_dir=Path("reports"), mlflow_url="http://127.0.0.1:5000/#/experiments/1"))
    text = console.export_text()
    for line in (
        ("plain decoding", "1.00", "0.00", "40.0"),
        (DSPARK, "2.00", "1.00", "60.0", "1.50x"),
        (DFLASH, "1.50", "0.50", "50.0", "1.25x"),
        (DSPARK, "1.361", "5.2 %", "1.2 %"),
    ):
        assert any(all(part in printed for part in line) for printed in text.splitlines()), line
    assert "Not evaluated yet: mtp1-smollm2_135m" in text
    assert "reports/<key>" in text
    assert "http://127.0.0.1:5000/#/experiments/1" in text
    assert "make up" in text
    assert max(len(line) for line in text.splitlines()) <= width


def test_summary_of_nothing_does_not_fail() -> None:
    console = Console(width=80, file=io.StringIO())
    console.print(summary([KeyReports("a-b", None, None, None)], reports_dir=Path("r"), mlflow_url="u"))


def test_reports_are_read_from_the_working_copy(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    folder = workspace.report_dir(DSPARK)
    folder.mkdir(parents=True)
    body = make_body(DSPARK, [make_row([[1]])])
    (folder / "evaluate.json").write_text(json.dumps(body))
    loaded = load_reports(workspace, keys=[DSPARK, DFLASH])
    assert loaded[0] == KeyReports(DSPARK, None, None, body)
    assert loaded[1] == KeyReports(DFLASH, None, None, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"not JSON: expected run the evaluate stage again \(.*evaluate.json\)"),
        ('{"schema_version": 2}', "another schema version: got 2, expected 1"),
        ("[]", "another schema version: got None"),
    ],
)
def test_reports_that_cannot_be_used_are_refused(tmp_path: Path, text: str, message: str) -> None:
    folder = Workspace(tmp_path).report_dir(DSPARK)
    folder.mkdir(parents=True)
    (folder / "evaluate.json").write_text(text)
    with pytest.raises(DraftsmithError, match=message):
        load_reports(Workspace(tmp_path), keys=[DSPARK])


def test_accepted_length_figure_draws_each_key_at_each_benchmark(reports: list[KeyReports]) -> None:
    figure = accepted_length_figure(reports, temperature=0.0)
    panel = figure.axes[0]
    assert [label.get_text() for label in panel.get_xticklabels()] == ["gsm8k", "humaneval"]
    assert [bar.get_height() for bar in panel.patches] == [2.0, 3.0, 1.5]
    assert set(panel.get_legend_handles_labels()[1]) == {DSPARK, DFLASH, "plain decoding"}
    assert png_bytes(figure).startswith(b"\x89PNG")


def test_conditional_acceptance_figure_draws_a_panel_a_benchmark(reports: list[KeyReports]) -> None:
    figure = conditional_acceptance_figure(reports, temperature=0.0)
    assert [panel.get_title() for panel in figure.axes] == ["gsm8k", "humaneval"]
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    assert lines[DSPARK].get_ydata().tolist() == pytest.approx([0.75, 1 / 3])
    assert lines[DFLASH].get_ydata().tolist() == pytest.approx([0.5, 0.0])
    assert png_bytes(figure).startswith(b"\x89PNG")


def test_figures_of_a_temperature_without_results_are_refused(reports: list[KeyReports]) -> None:
    with pytest.raises(DraftsmithError, match=r"nothing was evaluated at this temperature: got 0.5"):
        accepted_length_figure(reports, temperature=0.5)


def test_loss_figure_draws_every_curve() -> None:
    figure = loss_figure(
        [Curve("loss", [1, 2, 3], [3.0, 2.0, 1.5]), Curve("validation", [2], [2.5])], title="Training of a key"
    )
    drawn = {line.get_label(): line.get_ydata().tolist() for line in figure.axes[0].lines}
    assert drawn == {"loss": [3.0, 2.0, 1.5], "validation": [2.5]}
