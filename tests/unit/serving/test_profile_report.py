"""What is written of a profile beside its JSON."""

from __future__ import annotations

import csv
import io

from draftsmith.serving.cost_table import CostTable
from draftsmith.serving.profile import example_profile
from draftsmith.serving.profile_report import num_rises, profile_csv, profile_figure, profile_lines, table_lines
from tests.unit.serving.test_profile import measured


def test_csv_has_every_point() -> None:
    profile = measured()
    rows = list(csv.DictReader(io.StringIO(profile_csv(profile))))
    assert len(rows) == len(profile.points)
    first, requests = rows[0], next(row for row in rows if row["sweep"] == "requests")
    assert (first["sweep"], first["num_requests"], first["batch_tokens"], first["num_steps"]) == (
        "tokens",
        "1",
        "1",
        "1",
    )
    assert float(first["verify_s_median"]) == 1.1
    assert (requests["batch_tokens"], requests["verify_s_p90"]) == ("", "")
    assert float(requests["draft_s_median"]) == 1.0


def test_figure_shows_tables_and_points() -> None:
    """Two curves and two numbers of requests on the left; drafting and upkeep on the right."""
    tokens, requests = profile_figure(measured()).axes
    assert [text.get_text() for text in tokens.get_legend().get_texts()] == [
        "as measured", "monotone", "1 requests", "2 requests",
    ]  # fmt: skip
    assert tokens.lines[0].get_ydata()[0] == 1100
    assert [text.get_text() for text in requests.get_legend().get_texts()] == ["drafting", "upkeep"]
    assert requests.lines[0].get_ydata().tolist() == [1000, 2000]


def test_figure_of_an_example_says_that_it_is_none() -> None:
    figure = profile_figure(example_profile("tiles"))
    assert "synthetic: nothing was measured" in figure.get_suptitle()
    assert len(figure.axes[1].lines) == 4  # both curves, and their places in the legend


def test_lines_of_a_profile() -> None:
    text = "\n".join(profile_lines(measured()))
    assert "profile of k: threads 2\nhalf\n" in text
    assert "measured: 12 steps, 14 points, 2 sizes of prefill" in text
    assert "verification, ms by batch tokens: 1: 1100.00, 2: 1200.00, 4: 1400.00, 6: 1600.00" in text
    assert "drafting, ms by requests: 1: 1000.00, 2: 2000.00" in text
    assert "prefill: 100 tokens/s and 500.0 ms a pass" in text
    assert "context: 1e+04 us more for each token beyond 20 a request" in text


def test_lines_of_a_table_say_what_monotone_changes() -> None:
    """Rates 2, 1, 1.2, 1: one rise, of 20 %; lowered to 1 it is 1/6 less."""
    table = CostTable([1, 2, 3, 4], steps_per_s=[2, 1, 1.2, 1], max_batch_tokens=9)
    text = "\n".join(table_lines(table, monotone=table.monotone()))
    assert "verification: 4 points up to 4 tokens, meant for 9" in text
    assert "at most 16.7 % apart (at 3 tokens), 1 rises of more than 10 %" in text
    assert num_rises(table) == 1
    assert num_rises(CostTable([1, 2, 3], steps_per_s=[1.0, 1.1, 1.2])) == 0
