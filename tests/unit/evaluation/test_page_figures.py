"""Figures of acceptance: what is plotted is what the reports say."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from draftsmith.evaluation.page_figures import (
    acceptance_figure,
    accepted_length_figure,
    place_figure,
    threshold_figures,
    turn_figures,
)
from draftsmith.evaluation.page_model import Page, page_of
from draftsmith.evaluation.page_plot import Figure, basis, figure_html
from tests.html_reader import read_html, table_cells
from tests.page_fixtures import DFLASH, DSPARK, MTP, page_input, page_of_made

NAMES = ["gsm8k", "humaneval", "mt_bench"]


def rows_of(page: Page, drafter: int, temperature: float) -> dict[str, Any]:
    return {
        row["benchmark"]: row for row in page.drafters[drafter].evaluate["rows"] if row["temperature"] == temperature
    }


def ends(trace: dict[str, Any]) -> list[Any]:
    """Intervals as they are drawn."""
    errors = trace["error_y"]
    assert (errors["type"], errors["symmetric"], errors["visible"]) == ("data", False, True)
    return [
        None if up is None else [value - down, value + up]
        for value, up, down in zip(trace["y"], errors["array"], errors["arrayminus"], strict=True)
    ]


def alone(**changes: Any) -> tuple[Page, dict[str, Any]]:
    body = copy.deepcopy(dict(page_input(DSPARK).evaluate)) | changes
    return page_of([(body, None)]), body


@pytest.mark.parametrize(
    ("bonus", "name", "plain"), [("with", "accepted_length", 1), ("without", "accepted_length_without_bonus", 0)]
)
def test_bars_are_rows_and_their_mean(bonus: Any, name: str, plain: int) -> None:
    page = page_of_made(DSPARK, MTP)
    figure = accepted_length_figure(page, 0.0, bonus)
    assert [trace["name"] for trace in figure.traces] == ["dspark_b7", "mtp1"]
    for index, trace in enumerate(figure.traces):
        rows = rows_of(page, index, 0.0)
        [average] = [row for row in page.drafters[index].evaluate["averages"] if row["temperature"] == 0.0]
        assert trace["x"] == [*NAMES, "mean"]
        assert trace["y"] == [*(rows[place][name] for place in NAMES), average[name]]
        expected = [*(rows[place][f"{name}_interval"] for place in NAMES), average[f"{name}_interval"]]
        for drawn, interval in zip(ends(trace), expected, strict=True):
            assert drawn == pytest.approx(interval)
        assert f"6 prompts, {rows['gsm8k']['num_rounds']} rounds" in trace["customdata"][0]
    [rule] = figure.layout["shapes"]
    assert (rule["y0"], rule["y1"], rule["name"]) == (plain, plain, f"plain decoding: {plain}")


def test_bars_of_what_was_not_run_or_has_no_interval() -> None:
    page, body = alone()
    body["rows"] = [row for row in body["rows"] if row["benchmark"] != "gsm8k"]
    body["rows"][2]["accepted_length_interval"] = None
    [trace] = accepted_length_figure(page, 1.0, "with").traces
    assert trace["x"] == ["humaneval", "mt_bench", "mean"]
    assert [interval is None for interval in ends(trace)] == [True, False, False]
    assert "no interval" in trace["customdata"][0]


def test_without_any_interval_no_whisker_is_drawn() -> None:
    page, body = alone()
    for row in (*body["rows"], *body["averages"]):
        row["accepted_length_interval"] = None
    [trace] = accepted_length_figure(page, 1.0, "with").traces
    assert trace["error_y"]["visible"] is False


def test_acceptance_by_position_greys_what_few_rounds_say() -> None:
    page, body = alone()
    row = next(row for row in body["rows"] if (row["benchmark"], row["temperature"]) == ("gsm8k", 1.0))
    row["conditional_acceptance"] = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, None]
    row["conditional_acceptance_interval"] = [[value - 0.125, value + 0.0625] for value in (0.9, 0.8, 0.7, 0.6, 0.5)]
    row["conditional_acceptance_interval"] += [None, None]
    row["num_conditional"] = [400, 300, 200, 20, 19, 1, 0]
    solid, few = acceptance_figure(page, 1.0, "gsm8k").traces
    assert solid["x"] == few["x"] == [1, 2, 3, 4, 5, 6, 7]
    assert solid["y"] == [0.9, 0.8, 0.7, 0.6, None, None, None]
    assert few["y"] == [None, None, None, None, 0.5, 0.4, None]
    assert ends(solid)[:4] == [pytest.approx([value - 0.125, value + 0.0625]) for value in (0.9, 0.8, 0.7, 0.6)]
    assert [interval is None for interval in ends(few)] == [True] * 4 + [False, True, True]
    assert (few["marker"]["color"], few["marker"]["symbol"]) == ("var(--faint)", "circle-open")
    assert solid["marker"]["color"] == "var(--series-0)"
    assert solid["customdata"][3].endswith("; 20 rounds)")
    assert few["customdata"][4].endswith("; 19 rounds, few)")
    lines = acceptance_figure(page, 1.0, "gsm8k").numbers.rows
    assert lines[3] == ("4", "dspark_b7", "60.0 %", "47.5 % to 66.2 %", "20")
    assert lines[4][4] == "19 (few)"
    assert lines[6] == ("7", "dspark_b7", "-", "no interval", "0 (few)")


def test_drafters_of_several_block_sizes_share_the_axis() -> None:
    page = page_of_made(DSPARK, MTP)
    figure = acceptance_figure(page, 0.0, "mt_bench")
    traces = [trace for trace in figure.traces if trace.get("showlegend") is not False]
    assert [[round(place) for place in trace["x"]] for trace in traces] == [[1, 2, 3, 4, 5, 6, 7], [1]]
    assert all(abs(place - round(place)) < 0.2 for trace in traces for place in trace["x"])
    assert traces[0]["x"][0] != traces[1]["x"][0]
    assert traces[1]["y"] == rows_of(page, 1, 0.0)["mt_bench"]["conditional_acceptance"]
    assert figure.layout["xaxis"]["range"] == [0.5, 7.5]
    assert traces[0]["marker"]["symbol"] != traces[1]["marker"]["symbol"]
    assert traces[0]["line"]["dash"] != traces[1]["line"]["dash"]


def test_a_drafter_that_lacks_a_benchmark_is_not_in_its_panel() -> None:
    first = page_input(DSPARK)
    second = page_input(type(DSPARK)(name="other", benchmarks=("gsm8k",), temperatures=(1.0,)))
    page = page_of([(first.evaluate, None), (second.evaluate, None)])
    assert {trace["name"] for trace in acceptance_figure(page, 1.0, "humaneval").traces} == {"dspark_b7"}
    assert {trace["name"] for trace in acceptance_figure(page, 0.0, "gsm8k").traces} == {"dspark_b7"}
    assert {trace["name"] for trace in acceptance_figure(page, 1.0, "gsm8k").traces} == {"dspark_b7", "other"}


def test_threshold_sweep_a_round() -> None:
    page, body = alone()
    points = [point for point in body["thresholds"] if point["temperature"] == 1.0]
    points[19] |= {"verified": 19, "accepted": 19, "rejected": 0, "acceptance_rate": 1.0}
    tokens, rates = threshold_figures(page, 1.0)
    accepted, rejected = tokens.traces
    thresholds = [step / 20 for step in range(20)]
    assert accepted["x"] == rejected["x"] == thresholds
    assert accepted["y"] == [point["accepted"] / point["num_rounds"] for point in points]
    assert rejected["y"] == [point["rejected"] / point["num_rounds"] for point in points]
    assert accepted["y"][0] + rejected["y"][0] == pytest.approx(points[0]["verified"] / points[0]["num_rounds"])
    assert (accepted["name"], rejected["name"]) == ("dspark_b7: accepted", "dspark_b7: rejected")
    solid, few = rates.traces
    enough = [point["verified"] >= 20 for point in points]
    assert solid["y"] == [p["acceptance_rate"] if ok else None for p, ok in zip(points, enough, strict=True)]
    assert few["y"][19] == 1.0
    assert len(tokens.numbers.rows) == 20


def test_a_drafter_without_confidence_is_not_swept() -> None:
    assert threshold_figures(page_of_made(DFLASH, MTP), 1.0) == []
    tokens, rates = threshold_figures(page_of_made(DFLASH, DSPARK), 1.0)
    assert {trace["name"] for trace in tokens.traces} == {"dspark_b7: accepted", "dspark_b7: rejected"}
    assert {trace["name"] for trace in rates.traces} == {"dspark_b7"}


def test_accepted_length_over_the_answer() -> None:
    page = page_of_made(DSPARK, MTP)
    figure = place_figure(page, 1.0)
    for item in page.drafters:
        found = [row for row in item.evaluate["output_positions"] if row["temperature"] == 1.0]
        values: dict[str, float] = {}
        for trace in figure.traces:
            if trace["name"] == item.label:
                drawn = zip(trace["x"], trace["y"], strict=True)
                values |= {place: value for place, value in drawn if value is not None}
        assert values == {f"{row['first']}–{row['last']}": row["accepted_length"] for row in found}
    assert figure.layout["xaxis"]["categoryarray"] == ["0–15", "16–31", "32–63", "64–127"]


def test_turns_of_benchmarks_that_have_several() -> None:
    page = page_of_made(DSPARK, DFLASH)
    [figure] = turn_figures(page, 1.0)
    assert figure.name == "turns-mt_bench-1"
    for index, trace in enumerate(figure.traces):
        turns = rows_of(page, index, 1.0)["mt_bench"]["turns"]
        assert trace["x"] == ["turn 1", "turn 2"]
        assert trace["y"] == [turn["accepted_length"] for turn in turns]
    single = page_of_made(type(DSPARK)(benchmarks=("gsm8k",), temperatures=(1.0,)))
    assert turn_figures(single, 1.0) == []


def test_a_turn_without_a_round_has_no_bar() -> None:
    page, body = alone()
    row = next(row for row in body["rows"] if (row["benchmark"], row["temperature"]) == ("mt_bench", 1.0))
    row["turns"][1] |= {"accepted_length": None, "accepted_length_interval": None, "num_rounds": 0}
    [figure] = turn_figures(page, 1.0)
    assert figure.traces[0]["y"][1] is None
    assert figure.numbers.rows[1] == ("turn 2", "dspark_b7", "-", "-", "0 (few)")


def test_a_figure_carries_its_data_its_numbers_and_its_name() -> None:
    figure = acceptance_figure(page_of_made(DSPARK), 1.0, "gsm8k")
    root = read_html(figure_html(figure, subtitle="target <a>")).one("figure")
    plot = root.one("div", class_="plot")
    assert plot.attributes["id"] == "acceptance-gsm8k-1"
    assert plot.attributes["aria-label"].startswith("gsm8k, temperature 1;")
    assert table_cells(root.one("table")) == [list(figure.numbers.headers), *(list(row) for row in figure.numbers.rows)]
    assert root.one("button").text == "Save as SVG"
    assert isinstance(figure, Figure)


def test_names_with_marks_are_text_in_plots() -> None:
    made = page_input(type(DSPARK)(name="<b>d</b>", temperatures=(1.0,)))
    page = page_of([(made.evaluate, None)])
    assert acceptance_figure(page, 1.0, "gsm8k").traces[0]["name"] == "&lt;b&gt;d&lt;/b&gt;"


def test_what_is_behind_a_section() -> None:
    page = page_of_made(DSPARK, DFLASH)
    rounds = [sum(row["num_rounds"] for row in rows_of(page, index, 0.0).values()) for index in (0, 1)]
    told = basis(page.drafters, 0.0)
    assert told == (
        f"Temperature 0, batch size 16; benchmarks: 3; prompts: 18; rounds: dspark_b7 {rounds[0]:,}, "
        f"dflash_b7 {rounds[1]:,}. Machine: 2 x CPU, 8 GiB, no GPU, Linux x86_64."
    )
    other = page_of([(page.drafters[0].evaluate, None), (dict(page.drafters[1].evaluate) | {"machine": "a GPU"}, None)])
    assert basis(other.drafters, 0.0).endswith(
        "Machine: dspark_b7: 2 x CPU, 8 GiB, no GPU, Linux x86_64, dflash_b7: a GPU."
    )
