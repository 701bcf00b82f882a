"""Reports read from a working copy, as Markdown pages and as the closing page of a run."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from draftsmith.calibration.report import not_applicable_body
from draftsmith.errors import DraftsmithError
from draftsmith.evaluation.summary import (
    KeyReports,
    drafter_grid,
    evaluation_markdown,
    load_reports,
    markdown_page,
    method_grid,
    read_report,
    speed_summary_grid,
    summary,
)
from draftsmith.paths import Workspace
from tests.unit.evaluation.evaluations import body_of, body_of_lengths, make_decoded, make_point

DSPARK, DFLASH = "dspark_b7_2l-smollm2_135m", "dflash_b7_2l-smollm2_135m"
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
    ours = body_of(
        DSPARK,
        [
            make_decoded("humaneval", [[2, 2], [2, 2]]),
            make_decoded("gsm8k", [[2, 1], [1, 0]]),  # 10 tokens, in 1 s against 2 s
            make_decoded("gsm8k", [[1, 1], [1, 1]], temperature=1.0),
        ],
    )
    theirs = body_of(DFLASH, [make_decoded("gsm8k", [[0, 1], [1, 0]], plain_wall_s=1.25)])  # 8 tokens
    return [
        KeyReports(DSPARK, {"expected_accepted_length": 1.3609}, CALIBRATED, ours),
        KeyReports(DFLASH, None, not_applicable_body(2, reason="no head"), theirs),
        KeyReports("mtp1-smollm2_135m", None, None, None),
    ]


def with_speed(reports: list[KeyReports]) -> list[KeyReports]:
    body: dict[str, Any] = dict(reports[0].evaluate or {})
    speed = body_of("k", [make_decoded("gsm8k", [[1]])], speed=[make_point(16, tokens_per_s=44.0), make_point(1)])
    return [KeyReports(DSPARK, None, None, {**body, "speed": speed["speed"]}), *reports[1:]]


def test_methods_stand_below_plain_decoding(reports: list[KeyReports]) -> None:
    assert method_grid(reports).rows == (
        ("gsm8k, T 0", "plain decoding", "1.00", "0.00", "5.0-6.4", "1.00x"),
        ("2/500, cap 4", DSPARK, "2.00", "1.00", "10.0", "2.00x"),
        ("batch 16", DFLASH, "1.50", "0.50", "8.0", "1.25x"),
        ("humaneval, T 0", "plain decoding", "1.00", "0.00", "7.0", "1.00x"),
        ("2/500, cap 4", DSPARK, "3.00", "2.00", "14.0", "2.00x"),
        ("batch 16", "", "", "", "", ""),
        ("gsm8k, T 1", "plain decoding", "1.00", "0.00", "5.0", "1.00x"),
        ("2/500, cap 4", DSPARK, "2.00", "1.00", "10.0", "2.00x"),
        ("batch 16", "", "", "", "", ""),
    )


def test_speeds_that_are_not_known(reports: list[KeyReports]) -> None:
    body = body_of(DSPARK, [make_decoded("gsm8k", [[1]], wall_s=None, plain_wall_s=None)])
    grid = method_grid([KeyReports(DSPARK, None, None, body)])
    assert [row[4:] for row in grid.rows] == [("-", "1.00x"), ("-", "-"), ("", "")]


def test_speed_by_batch_size_stands_in_a_table_of_its_own(reports: list[KeyReports]) -> None:
    measured = with_speed(reports)
    assert speed_summary_grid(reports).rows == ()
    assert speed_summary_grid(measured).rows == (
        (DSPARK, "0", "1", "60.0", "40.0", "1.50x"),
        (DSPARK, "0", "16", "44.0", "40.0", "1.10x"),
    )
    assert method_grid(measured).rows[:3] == (
        ("gsm8k, T 0", "plain decoding", "1.00", "0.00"),
        ("2/500, cap 4", DSPARK, "2.00", "1.00"),
        ("", DFLASH, "1.50", "0.50"),
    )


def test_drafters(reports: list[KeyReports]) -> None:
    assert drafter_grid(reports).rows == (
        (DSPARK, "1.361", "5.2 %", "1.2 %", "2.0 %", "0.850", "1440"),
        (DFLASH, "-", "no head", "-", "-", "-", "-"),
        ("mtp1-smollm2_135m", "-", "-", "-", "-", "-", "-"),
    )


def tables(page: str) -> list[list[str]]:
    """Every table of a page, as its lines."""
    found: list[list[str]] = [[]]
    for line in page.splitlines():
        if line.startswith("|"):
            found[-1].append(line)
        elif found[-1]:
            found.append([])
    return [item for item in found if item]


def test_tables_have_equal_cells_in_every_line(reports: list[KeyReports]) -> None:
    for page in (markdown_page(with_speed(reports)), evaluation_markdown(with_speed(reports)[0].evaluate or {})):
        assert len(tables(page)) >= 6
        for lines in tables(page):
            assert {line.count("|") for line in lines} == {lines[0].count("|")}
            assert len(lines) > 2


def test_the_comparison_has_the_papers_table_and_its_settings(reports: list[KeyReports]) -> None:
    page = markdown_page(reports)
    assert page.startswith("# Drafters side by side\n")
    places = [page.index(part) for part in (
        "## Accepted length at temperature 0", "With intervals:", "Without the bonus token",
        "## Accepted length at temperature 1", "## Settings", "Not evaluated yet: mtp1-smollm2_135m.", "## Speed",
        "## Conditional acceptance by position", "## Training and calibration",
    )]  # fmt: skip
    assert places == sorted(places)
    first = tables(page)[0]
    assert [cell.strip() for cell in first[0].strip("|").split("|")] == [
        "key", "target", "K", "math: gsm8k", "code: humaneval", "average",
    ]  # fmt: skip
    assert [cell.strip() for cell in first[3].strip("|").split("|")][3:] == ["1.50", "-", "1.50 (1 of 2)"]
    for text in ("gsm8k 2 of the paper's 500 (cap 4)", "at most 96 new tokens", "measured on 2 x CPU", "Bold: "):
        assert text in page


def test_the_page_of_one_key(reports: list[KeyReports]) -> None:
    body = reports[0].evaluate or {}
    page = evaluation_markdown(body)
    assert page.startswith(f"# Evaluation of {DSPARK}\n")
    assert "Drafter dspark_b7_2l (dspark), K = 2 draft tokens a round, without a confidence head." in page
    for heading in ("## By benchmark, domain and mean", "## By output position", "## Speed"):
        assert heading in page
    assert "\n| benchmark | T | rounds |" in page  # without a column for the one key
    for text in ("## By turn", "## By confidence threshold", "Bold: ", "With intervals:", "one after the other"):
        assert text not in page
    headed = {**body, "drafter": {**body["drafter"], "confidence": True}}
    headed["thresholds"] = [
        {"temperature": 0.0, "threshold": 0.5, "num_rounds": 2, "verified": 3, "accepted": 2, "rejected": 1,
         "acceptance_rate": 2 / 3, "accepted_length": 2.0}
    ]  # fmt: skip
    page = evaluation_markdown(headed)
    assert "a round.\n" in page
    assert "| 0.50      | 0 |" in page


def test_a_page_of_nothing() -> None:
    page = markdown_page([KeyReports("a-b", None, None, None)])
    assert "Nothing was evaluated yet." in page


@pytest.mark.parametrize("width", [80, 160])
def test_the_closing_page_says_everything_a_reader_needs(reports: list[KeyReports], width: int) -> None:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(
        summary(with_speed(reports), reports_dir=Path("reports"), mlflow_url="http://127.0.0.1:5000/#/experiments/1")
    )
    text = console.export_text()
    for line in (
        ("plain decoding", "1.00", "0.00"),
        (DSPARK, "2.00", "1.00"),
        (DFLASH, "1.50", "0.50"),
        (DSPARK, "16", "44.0", "40.0", "1.10x"),
    ):
        assert any(all(part in printed for part in line) for printed in text.splitlines()), line
    assert "Not evaluated yet: mtp1-smollm2_135m" in text
    assert "reports/<key>" in text
    assert "http://127.0.0.1:5000/#/experiments/1" in text
    assert "make up" in text
    assert max(len(line) for line in text.splitlines()) <= width


@pytest.mark.parametrize("width", [80, 160])
def test_without_measured_speed_it_shows_that_of_the_evaluation(reports: list[KeyReports], width: int) -> None:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(summary(reports, reports_dir=Path("reports"), mlflow_url="u"))
    text = console.export_text()
    for line in ((DSPARK, "2.00", "1.00", "10.0", "2.00x"), (DSPARK, "1.361", "5.2 %", "1.2 %")):
        assert any(all(part in printed for part in line) for printed in text.splitlines()), line
    assert max(len(line) for line in text.splitlines()) <= width


def test_a_closing_page_of_nothing() -> None:
    console = Console(width=80, file=io.StringIO())
    console.print(summary([KeyReports("a-b", None, None, None)], reports_dir=Path("r"), mlflow_url="u"))


def test_reports_are_read_from_the_working_copy(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    folder = workspace.report_dir(DSPARK)
    folder.mkdir(parents=True)
    body = body_of_lengths(DSPARK, {"gsm8k": [[1]]})
    (folder / "evaluate.json").write_text(json.dumps(body))
    (folder / "train.json").write_text('{"schema_version": 1}')
    loaded = load_reports(workspace, keys=[DSPARK, DFLASH])
    assert loaded[0] == KeyReports(DSPARK, {"schema_version": 1}, None, body)
    assert loaded[1] == KeyReports(DFLASH, None, None, None)


@pytest.mark.parametrize(
    ("stage", "text", "message"),
    [
        ("evaluate", "{", r"not JSON: expected run the evaluate stage again \(.*evaluate.json\)"),
        ("evaluate", '{"schema_version": 1}', "schema version: got 1, expected 2; run the evaluate stage again"),
        ("evaluate", "[]", "another schema version: got None"),
        ("train", '{"schema_version": 2}', "schema version: got 2, expected 1; run the train stage again"),
    ],
)
def test_reports_that_cannot_be_used_are_refused(tmp_path: Path, stage: str, text: str, message: str) -> None:
    path = tmp_path / f"{stage}.json"
    path.write_text(text)
    with pytest.raises(DraftsmithError, match=message):
        read_report(path, stage=stage)
    assert read_report(tmp_path / "nothing.json", stage=stage) is None
