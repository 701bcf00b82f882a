"""Escaping, tables, switches and blocks of the page."""

from __future__ import annotations

import html
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.evaluation.grid import Grid
from draftsmith.evaluation.page_html import (
    Block,
    Choice,
    blocks,
    escape,
    notice,
    plot_text,
    script_json,
    section,
    switch,
    table,
)
from tests.html_reader import Node, read_html, table_cells

ANY_TEXT = st.text(st.characters(codec=None), max_size=20)  # lone surrogates too
ANY_JSON = st.recursive(
    ANY_TEXT | st.integers() | st.none(),
    lambda part: st.lists(part, max_size=3) | st.dictionaries(ANY_TEXT, part, max_size=3),
    max_leaves=6,
)
NASTY = "</script><!--<b>&\"'\u2028\u2029\ud800\0"


@given(ANY_TEXT)
def test_text_in_html_reads_back_and_can_be_written(text: str) -> None:
    made = escape(text)
    made.encode("utf-8")
    assert not set(made) & set("<>\"'\0")
    expected = "".join("�" if letter == "\0" or "\ud800" <= letter <= "\udfff" else letter for letter in text)
    # Two halves that stand together are one letter.
    assert html.unescape(made) == expected.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def test_a_whole_pair_of_surrogates_is_its_letter() -> None:
    assert escape("\ud83d\ude00") == "\U0001f600"


@given(
    st.recursive(ANY_TEXT | st.integers() | st.none(), lambda part: st.lists(part) | st.dictionaries(ANY_TEXT, part))
)
def test_json_in_a_script_reads_back_and_cannot_end_it(value: object) -> None:
    made = script_json(value)
    assert made.isascii()
    assert "<" not in made
    assert json.loads(made) == json.loads(json.dumps(value))


def test_json_of_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        script_json(float("nan"))


def test_labels_of_plots_have_no_tags() -> None:
    assert plot_text("<b>a</b> & 'b'") == "&lt;b&gt;a&lt;/b&gt; &amp; 'b'"


def test_a_table_names_its_rows_and_puts_numbers_to_the_right() -> None:
    grid = Grid(
        ("name", "count", "share", "interval", "text"),
        (("<a>", "1,234", "5.0 %", "1.50 [1.25, 2.00]", "2 x CPU"), ("b", "-", "-", "-1.00 to +2.00", "-")),
    )
    region = read_html(table(grid, caption="of <a>")).one(class_="scroll")
    assert region.attributes == {"class": "scroll", "role": "region", "aria-label": "of <a>", "tabindex": "0"}
    heads = region.one("thead").all("th")
    assert [head.attributes.get("class") for head in heads] == [None, "number", "number", "number", None]
    assert {head.attributes["scope"] for head in heads} == {"col"}
    assert table_cells(region.one("table")) == [list(grid.headers), *(list(row) for row in grid.rows)]
    first = region.one("tbody").all("tr")[0]
    assert [(cell.tag, cell.attributes.get("class")) for cell in first.all()] == [
        ("th", None), ("td", "number"), ("td", "number"), ("td", "number"), ("td", None),
    ]  # fmt: skip


def test_a_switch_checks_what_is_chosen_and_stands_apart_in_each_section() -> None:
    choices = [Choice("0", "cold"), Choice("1", "warm")]
    group = read_html(switch("temperature", "Temperature", choices, chosen="1", place="speed")).one("fieldset")
    assert group.attributes["data-switch"] == "temperature"
    assert group.one("legend").text == "Temperature"
    inputs = group.all("input", type="radio")
    assert [(item.attributes["value"], "checked" in item.attributes) for item in inputs] == [("0", False), ("1", True)]
    assert {item.attributes["name"] for item in inputs} == {"temperature-speed"}
    assert [label.text for label in group.all("label")] == ["cold", "warm"]


def test_a_switch_without_a_choice_is_none() -> None:
    assert switch("temperature", "Temperature", [Choice("1", "1")], chosen="1", place="speed") == ""


def test_blocks_hide_unless_all_their_switches_stand_right() -> None:
    initial = {"temperature": "1", "bonus": "with"}
    made = blocks(
        [
            Block("<p>a</p>", {}),
            Block("<p>b</p>", {"temperature": "1"}),
            Block("<p>c</p>", {"temperature": "0"}),
            Block("<p>d</p>", {"temperature": "1", "bonus": "without"}),
        ],
        initial=initial,
    )
    a, b, c, d = made.split("\n")
    assert a == "<p>a</p>"
    assert b == '<div class="when" data-when-temperature="1"><p>b</p></div>'
    assert c == '<div class="when" data-when-temperature="0" hidden><p>c</p></div>'
    assert d == '<div class="when" data-when-temperature="1" data-when-bonus="without" hidden><p>d</p></div>'


def test_a_section_says_first_what_it_counts() -> None:
    made = section("speed", "Speed & more", lead="a < b", before="<i></i>", switches="<s></s>", body="<b></b>")
    root = read_html(made).one("section")
    assert (root.attributes["id"], root.attributes["aria-labelledby"]) == ("speed", "speed-title")
    assert [(part.tag, part.text) for part in root.parts if isinstance(part, Node)] == [
        ("h2", "Speed & more"), ("p", "a < b"), ("i", ""), ("div", ""), ("b", ""),
    ]  # fmt: skip
    assert root.one("h2").attributes["id"] == "speed-title"


def test_nothing_written_by_others_is_read_as_html() -> None:
    for made in (notice(NASTY, NASTY), table(Grid((NASTY,), ((NASTY,),)), caption=NASTY)):
        assert "</script>" not in made
        assert "<b>" not in made
        made.encode()
