"""The page as a whole: one file without anything from outside, in order, and nothing in it can break it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from plotly.offline import get_plotlyjs

from draftsmith.errors import DraftsmithError
from draftsmith.evaluation.page import SECTIONS, PageInput, evaluation_page
from tests.html_reader import Node, read_html
from tests.page_fixtures import DFLASH, DSPARK, MTP, WORDS, Made, page_input

NASTY = "</script><script>alert(1)</script><!-- \"'`&\u2028\u2029\ud800\0<b>"
SMALL = Made(benchmarks=("gsm8k", "mt_bench"), num_prompts=5, max_new_tokens=48)


def page(*made: Made, title: str = "Drafters", samples: bool = True) -> Node:
    return read_html(evaluation_page([page_input(item, samples=samples) for item in made], title=title))


def section_text(root: Node, name: str) -> str:
    return root.one("section", id=name).text


def shows(root: Node) -> list[str]:
    """The plots that are not inside something hidden."""
    hidden = [node for node in root.all() if "hidden" in node.attributes]
    inside = {id(plot) for node in hidden for plot in node.all("div", class_="plot")}
    return [plot.attributes["id"] for plot in root.all("div", class_="plot") if id(plot) not in inside]


def test_sections_come_in_order_and_each_says_what_it_counts() -> None:
    root = page(SMALL)
    sections = root.all("section")
    assert [node.attributes["id"] for node in sections] == [name for name, _ in SECTIONS]
    assert [node.one("h2").text for node in sections] == [title for _, title in SECTIONS]
    assert [link.attributes["href"] for link in root.one("nav").all("a")] == [f"#{name}" for name, _ in SECTIONS]
    for node in sections:
        lead = node.all("p", class_="lead")[0].text
        assert 40 < len(lead) < 500
    for name in ("lengths", "benchmarks", "positions", "places"):
        assert "another training seed is not in them" in section_text(root, name)
    assert "bonus included" in section_text(root, "places")
    assert "without the bonus" in section_text(root, "thresholds")


def test_nothing_comes_from_outside() -> None:
    text = evaluation_page([page_input(SMALL)], title="t")
    root = read_html(text)
    for node in root.all():
        for name in ("src", "srcset", "data", "poster", "action", "background"):
            assert name not in node.attributes, node.attributes
        href = node.attributes.get("href", "#")
        assert href.startswith("#") or href == "data:,"
        assert "url(" not in node.attributes.get("style", "")
    [style] = root.all("style")
    assert "url(" not in style.text
    assert "@import" not in style.text
    policy = root.one("meta", http_equiv="Content-Security-Policy").attributes["content"]
    assert policy.startswith("default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline';")
    assert "http" not in policy
    own = text.replace(get_plotlyjs(), "")
    assert not re.search(r"https?://", own)


def test_the_page_is_plotly_and_little_else() -> None:
    text = evaluation_page([page_input(item) for item in (DSPARK, DFLASH, MTP)], title="t")
    assert text.count(get_plotlyjs()) == 1
    assert len(text.encode()) - len(get_plotlyjs().encode()) < 900_000
    assert text == evaluation_page([page_input(item) for item in (DSPARK, DFLASH, MTP)], title="t")


def test_ids_are_unique_and_labels_point_at_them() -> None:
    root = page(DSPARK, DFLASH)
    ids = [node.attributes["id"] for node in root.all() if "id" in node.attributes]
    assert len(set(ids)) == len(ids)
    assert {node.attributes["aria-labelledby"] for node in root.all("section")} <= set(ids)
    groups = [node.all("input")[0].attributes["name"] for node in root.all("fieldset")]
    assert len(set(groups)) == len(groups) == 10  # temperature in eight sections, the bonus in two


def test_one_variant_of_each_figure_shows_first_at_temperature_one() -> None:
    root = page(DSPARK, DFLASH)
    assert shows(root) == [
        "accepted-length-1-with", "acceptance-gsm8k-1", "acceptance-humaneval-1", "acceptance-mt_bench-1",
        "threshold-tokens-1", "threshold-rate-1", "output-position-1", "turns-mt_bench-1", "accepted-histogram-1",
        "answer-lengths-1", "step-times-1-1", "step-times-4-1", "throughput-1", "step-parts-1-1", "step-parts-4-1",
    ]  # fmt: skip
    assert len(root.all("div", class_="plot")) == 2 * 15 + 2
    checked = {node.attributes["value"] for node in root.all("input") if "checked" in node.attributes}
    assert checked == {"1", "with"}


def test_without_temperature_one_the_lowest_comes_first() -> None:
    root = page(replace(SMALL, temperatures=(0.7, 0.0)))
    checked = {node.attributes["value"] for node in root.all("input") if "checked" in node.attributes}
    assert checked == {"0", "with"}
    assert "accepted-length-0-with" in shows(root)


def test_a_single_temperature_has_no_switch() -> None:
    root = page(replace(SMALL, temperatures=(0.0,)))
    assert {node.attributes["data-switch"] for node in root.all("fieldset")} == {"bonus"}
    assert "accepted-length-0-with" in shows(root)


def test_a_drafter_that_was_not_evaluated_at_a_temperature_is_named() -> None:
    root = page(SMALL, replace(SMALL, name="cold", temperatures=(0.0,)))
    at_one = root.one("section", id="positions").one(class_="when", data_when_temperature="1")
    assert at_one.all("p")[0].text == "Not evaluated at temperature 1: cold."


def test_without_a_confidence_head_the_drafters_are_named() -> None:
    both = section_text(page(DSPARK, DFLASH, MTP), "thresholds")
    assert "No confidence head, so no threshold to sweep: dflash_b7, mtp1." in both
    root = page(MTP)
    assert "no threshold to sweep: mtp1." in section_text(root, "thresholds")
    assert root.one("section", id="thresholds").all("div", class_="plot") == []
    assert root.one("section", id="thresholds").all("fieldset") == []


def test_without_a_speed_run_it_is_said() -> None:
    root = page(replace(SMALL, batch_sizes=()))
    for name in ("histograms", "speed"):
        assert "Times of steps were not measured: the evaluation had no speed run." in section_text(root, name)
    assert not [plot for plot in root.all("div", class_="plot") if "step" in plot.attributes["id"]]
    assert "tokens/s" in section_text(root, "speed")


def test_speed_at_one_temperature_alone_is_said() -> None:
    made = page_input(SMALL)
    body = dict(made.evaluate)
    body["speed"] = [point for point in body["speed"] if point["temperature"] == 1.0]
    root = read_html(evaluation_page([PageInput(body, None)], title="t"))
    assert "Times of steps were not measured at temperature 0, only at 1." in section_text(root, "speed")


def test_without_samples_it_is_said() -> None:
    root = page(SMALL, samples=False)
    assert "No samples were given: dspark_b7." in section_text(root, "tokens")
    assert root.all("script", id="samples") == []
    mixed = [page_input(SMALL), page_input(replace(SMALL, name="other"), samples=False)]
    root = read_html(evaluation_page(mixed, title="t"))
    assert "No samples were given: other." in section_text(root, "tokens")
    assert len(root.all("script", id="samples")) == 1


def test_text_of_others_cannot_break_the_page() -> None:
    made = replace(
        SMALL, name=f"d{NASTY}", target=f"t{NASTY}", machine=f"m{NASTY}", words=(NASTY, *WORDS[1:]),
        contaminated=(f"gsm8k/{NASTY}",),
    )  # fmt: skip
    inputs = page_input(made)
    assert inputs.samples is not None
    inputs.samples["samples"][0]["prompt"] = NASTY
    text = evaluation_page([inputs], title=NASTY)
    text.encode("utf-8")
    root, clean = read_html(text), read_html(evaluation_page([page_input(SMALL)], title="t"))
    assert len(root.all("script")) == len(clean.all("script"))
    assert root.all("b") == []
    shown = NASTY.replace("\ud800", "�").replace("\0", "�")
    assert root.one("title").text == root.one("h1").text == shown
    samples = json.loads(root.one("script", id="samples").text)
    assert samples[0]["asked"] == NASTY
    assert {sample["drafter"] for sample in samples} == {f"d{NASTY}"}
    assert any(NASTY in sample["text"] for sample in samples)
    for script in root.all("script", type="application/json"):
        json.loads(script.text)


def test_tables_show_in_every_position_of_the_switches() -> None:
    root = page(SMALL, replace(SMALL, name="other", quality=0.5))
    found = root.one("section", id="lengths").all(class_="when")
    positions = [
        (node.attributes.get("data-when-temperature"), node.attributes.get("data-when-bonus")) for node in found
    ]
    assert positions == [("0", "with"), ("0", "without"), ("1", "with"), ("1", "without"), ("0", None), ("1", None)]
    assert all(node.all("table") for node in found)


def broken(**changes: Any) -> PageInput:
    made = page_input(SMALL)
    return PageInput({**made.evaluate, **changes}, made.samples)


@pytest.mark.parametrize(
    ("reports", "told"),
    [
        ([], "no evaluation to show"),
        (
            [broken(schema_version=1)],
            "evaluate.json is of another schema version: got 1, expected 2; run the",
        ),
        ([broken(rows=[])], "an evaluation without rows"),
        ([page_input(SMALL), page_input(SMALL)], "a key is to be shown twice: got dspark_b7-smollm2_135m"),
        ([PageInput(page_input(SMALL).evaluate, page_input(DFLASH).samples)], "samples of another key: got dflash_b7"),
        (
            [PageInput(page_input(SMALL).evaluate, {"schema_version": 7, "key": "k", "samples": []})],
            "samples.json is of another schema version: got 7, expected 1",
        ),
        ([PageInput({}, None)], r"another schema version: expected 2.*\(evaluate.json of an unnamed key\)"),
    ],
)
def test_what_cannot_be_shown_is_refused(reports: list[PageInput], told: str) -> None:
    with pytest.raises(DraftsmithError, match=told):
        evaluation_page(reports, title="t")
