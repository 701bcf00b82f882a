"""The page's tables of accepted length and its differences by pairs of prompts."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from draftsmith.evaluation.page_differences import Differences
from draftsmith.evaluation.page_model import Page, Shown, page_of
from draftsmith.evaluation.page_tables import counts_grid, glance_grid, length_table
from tests.html_reader import Node, read_html, table_cells
from tests.page_fixtures import DFLASH, DSPARK, MTP, evaluate_report, page_input, page_of_made

NAMES = ["gsm8k", "humaneval", "mt_bench"]


def read_lengths(page: Page, *, bonus: Any = "with", temperature: float = 1.0) -> Node:
    return read_html(length_table(page, temperature, bonus, Differences(page))).one("table")


def shown_cell(row: Any, name: str) -> str:
    low, high = row[f"{name}_interval"]
    return f"{row[name]:.2f}{low:.2f}–{high:.2f}"


def changed(page: Page, **bodies: dict[str, Any]) -> Page:
    """The page again, with the bodies of some drafters in place of theirs."""
    return page_of([(bodies.get(item.label, item.evaluate), item.samples) for item in page.drafters])


def row_of(body: Any, benchmark: str, temperature: float) -> dict[str, Any]:
    return next(row for row in body["rows"] if (row["benchmark"], row["temperature"]) == (benchmark, temperature))


def micro_length(body: Any, benchmark: str, temperature: float) -> float:
    prompts = row_of(body, benchmark, temperature)["prompts"]
    return sum(prompts["committed"]) / sum(prompts["rounds"])


@pytest.mark.parametrize(
    ("bonus", "name", "plain"), [("with", "accepted_length", "1"), ("without", "accepted_length_without_bonus", "0")]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_cell_is_that_of_the_report(bonus: str, name: str, plain: str, temperature: float) -> None:
    page = page_of_made(DSPARK, MTP)
    groups, heads, *lines, last = table_cells(read_lengths(page, bonus=bonus, temperature=temperature))
    assert groups == ["drafter", "all", "math", "code", "chat"]
    assert heads == ["meanof 3", "gsm8kn = 6", "humanevaln = 6", "mt_benchn = 6"]
    assert [line[0] for line in lines] == ["dspark_b7K 7", "mtp1K 1"]
    for item, line in zip(page.drafters, lines, strict=True):
        [average] = [row for row in item.evaluate["averages"] if row["temperature"] == temperature]
        rows = [average, *(row_of(item.evaluate, benchmark, temperature) for benchmark in NAMES)]
        assert line[1:] == [shown_cell(row, name) for row in rows]
    assert last == ["plain decoding", *[plain] * 4]


def test_a_domain_of_several_benchmarks_has_its_mean() -> None:
    made = page_input(type(DSPARK)(benchmarks=("gsm8k", "math500", "mt_bench"), temperatures=(1.0,)))
    page = page_of([(made.evaluate, None)])
    table = read_lengths(page)
    groups, heads, line, _ = table_cells(table)
    spans = [head.attributes.get("colspan") for head in table.all("tr")[0].all("th")]
    assert (groups, spans) == (["drafter", "all", "math", "chat"], [None, "1", "3", "1"])
    assert heads == ["meanof 3", "gsm8kn = 6", "math500n = 6", "meanof 2", "mt_benchn = 6"]
    [math] = [row for row in made.evaluate["domains"] if row["domain"] == "math"]
    assert line[4] == shown_cell(math, "accepted_length")
    assert float(line[4][:4]) == pytest.approx((float(line[2][:4]) + float(line[3][:4])) / 2, abs=0.011)


def test_one_benchmark_alone_has_no_mean() -> None:
    made = page_input(type(DSPARK)(benchmarks=("gsm8k",), temperatures=(1.0,)))
    groups, heads, *_ = table_cells(read_lengths(page_of([(made.evaluate, None)])))
    assert (groups, heads) == (["drafter", "math"], ["gsm8kn = 6"])


def test_what_was_not_measured_is_no_number() -> None:
    page = page_of_made(DSPARK, DFLASH)
    body = copy.deepcopy(dict(page.drafters[1].evaluate))
    body["rows"] = [row for row in body["rows"] if row["benchmark"] != "gsm8k"]
    row_of(body, "humaneval", 1.0)["accepted_length_interval"] = None
    cells = table_cells(read_lengths(changed(page, dflash_b7=body)))[3]
    value = row_of(body, "humaneval", 1.0)["accepted_length"]
    assert (cells[2], cells[3]) == ("-", f"{value:.2f}no interval")


def bold(page: Page, **where: Any) -> list[list[bool]]:
    lines = read_lengths(page, **where).one("tbody").all("tr")
    return [[bool(cell.all("strong")) for cell in line.all("td")] for line in lines]


def test_bold_is_what_is_better_on_the_same_prompts() -> None:
    page = page_of_made(DFLASH, DSPARK)
    better = copy.deepcopy(dict(page.drafters[1].evaluate))
    for name in NAMES:  # the same rounds, and on two benchmarks one more token in every other round
        row, own = row_of(better, name, 1.0), row_of(page.drafters[0].evaluate, name, 1.0)
        row["prompts"] = copy.deepcopy(own["prompts"])
        more = 0 if name == "humaneval" else 1
        row["prompts"]["committed"] = [
            tokens + more * (rounds // 2)
            for tokens, rounds in zip(own["prompts"]["committed"], own["prompts"]["rounds"], strict=True)
        ]
        row["accepted_length"] = micro_length(better, name, 1.0)
    [average] = [item for item in better["averages"] if item["temperature"] == 1.0]
    average["accepted_length"] = sum(micro_length(better, name, 1.0) for name in NAMES) / 3
    # mean, gsm8k, humaneval, mt_bench; the last line is plain decoding
    assert bold(changed(page, dspark_b7=better)) == [[False] * 4, [True, True, False, True], [False] * 4]


def test_nothing_is_bold_where_drafters_cannot_be_compared() -> None:
    page = page_of_made(DSPARK, MTP)
    assert any(any(line) for line in bold(page))
    body = copy.deepcopy(dict(page.drafters[1].evaluate))
    body["target"] = "another"
    assert not any(any(line) for line in bold(changed(page, mtp1=body)))
    assert not any(any(line) for line in bold(page_of_made(DSPARK)))


def test_differences_are_those_of_the_prompts_both_have() -> None:
    page = page_of_made(DSPARK, DFLASH, MTP)
    grid = Differences(page).grid(1.0)
    assert grid is not None
    assert grid.headers[1] == "less dspark_b7"
    base = page.drafters[0].evaluate
    expected = []
    for item in page.drafters[1:]:
        found = [micro_length(item.evaluate, name, 1.0) - micro_length(base, name, 1.0) for name in NAMES]
        expected += [(f"{item.label}, {name}", f"{value:+.3f}", "6") for name, value in zip(NAMES, found, strict=True)]
        expected.append((f"{item.label}, mean of 3", f"{sum(found) / 3:+.3f}", "18"))
    assert [(row[0], row[1], row[4]) for row in grid.rows] == expected
    for _, value, ends, clear, _ in grid.rows:
        low, high = (float(end) for end in ends.split(" to "))
        assert low <= float(value) <= high
        assert clear == ("yes" if low > 0 or high < 0 else "no")
    assert {row[3] for row in grid.rows} == {"yes", "no"}


def test_a_difference_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    page = page_of_made(DSPARK, DFLASH)
    calls: list[Any] = []
    monkeypatch.setattr(
        "draftsmith.evaluation.page_differences.paired_difference", lambda *given, **more: calls.append(given)
    )
    differences, (base, item) = Differences(page), page.drafters
    for bonus in ("with", "with", "without"):
        differences.of(item, base=base, names=["gsm8k"], temperature=1.0, bonus=bonus)  # type: ignore[arg-type]
    assert len(calls) == 2


@pytest.mark.parametrize("name", ["target", "dtype", "max_new_tokens"])
def test_other_settings_have_no_differences(name: str) -> None:
    page = page_of_made(DSPARK, DFLASH)
    body = copy.deepcopy(dict(page.drafters[1].evaluate))
    body[name] = "another"
    assert Differences(changed(page, dflash_b7=body)).grid(1.0) is None


def test_a_single_drafter_has_no_differences() -> None:
    assert Differences(page_of_made(DSPARK)).grid(1.0) is None


def test_the_means_of_each_drafter() -> None:
    page = page_of_made(DSPARK, MTP)
    grid = glance_grid(page, 0.0)
    for item, line in zip(page.drafters, grid.rows, strict=True):
        [average] = [row for row in item.evaluate["averages"] if row["temperature"] == 0.0]
        rows = [row_of(item.evaluate, name, 0.0) for name in NAMES]
        low, high = average["accepted_length_interval"]
        assert line[0] == item.label
        assert line[2] == f"{sum(row['accepted_length'] for row in rows) / 3:.2f} [{low:.2f}, {high:.2f}]"
        assert line[3].startswith(f"{sum(row['accepted_length_without_bonus'] for row in rows) / 3:.2f} [")
        assert line[4:] == ("1.90", "16", "3", f"{sum(row['num_rounds'] for row in rows):,}")
    assert [line[1] for line in grid.rows] == ["7", "1"]


def test_a_speed_that_is_not_known_is_no_number() -> None:
    page = page_of_made(DSPARK)
    for row in page.drafters[0].evaluate["averages"]:
        row["speedup"] = None
    assert glance_grid(page, 0.0).rows[0][4] == "-"


def test_what_is_behind_each_cell() -> None:
    page = page_of_made(DSPARK, DFLASH)
    grid = counts_grid(page, 1.0)
    assert [line[0] for line in grid.rows] == [
        f"{name}, {label}" for name in NAMES for label in ("dspark_b7", "dflash_b7")
    ]
    row, line = row_of(page.drafters[0].evaluate, "mt_bench", 1.0), grid.rows[4]
    assert line[1:6] == ("6", "12", "0", f"{row['num_rounds']:,}", f"{row['num_tokens']:,}")
    assert line[6] == f"{100 * row['num_cut_rounds'] / row['num_rounds']:.1f} %"
    assert line[7] == f"{100 * row['num_ended_rounds'] / row['num_rounds']:.1f} %"
    prompts = row["prompts"]
    ratios = [a / b for a, b in zip(prompts["committed"], prompts["rounds"], strict=True)]
    assert line[8].startswith(f"{sum(ratios) / len(ratios):.2f} [")


def test_labels_are_names_or_keys_where_names_are_the_same() -> None:
    one, other = evaluate_report(DSPARK), evaluate_report(DSPARK)
    other["key"] = "dspark_b7-smollm2_135m-long"
    page = page_of([(one, None), (other, None)])
    assert [item.label for item in page.drafters] == ["dspark_b7-smollm2_135m", "dspark_b7-smollm2_135m-long"]
    assert [item.slot for item in page.drafters] == [0, 1]
    assert isinstance(page.drafters[0], Shown)
