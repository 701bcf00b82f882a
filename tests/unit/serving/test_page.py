"""The serving page as a whole: one file without anything from outside, marked where made up, true to the body."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from plotly.offline import get_plotlyjs

from draftsmith.errors import DraftsmithError
from draftsmith.serving.page import SECTIONS, serve_page
from draftsmith.serving.page_model import scenarios_of, short, signed, users
from draftsmith.serving.page_open import MOST_POINTS, thinned
from tests.html_reader import Node, read_html, table_cells
from tests.serve_bodies import profile, study

NASTY = "</script><script>alert(1)</script><!-- \"'`&\u2028\ud800\0<b>"


def tiles(**more: Any) -> dict[str, Any]:
    return study(name="tiles", synthetic=True, loads=(1, 4, 16, 64), gain=1.5, temperature=None, **more)


BODY = study(what_if=[tiles()])
PROFILES = {"measured": profile(), "tiles": profile(synthetic=True)}


def page(body: dict[str, Any] = BODY, **more: Any) -> Node:
    return read_html(serve_page(body, title="Serving", **({"profiles": PROFILES} | more)))


def figures(root: Node) -> dict[str, dict[str, Any]]:
    """The data of every plot by its id."""
    found = {}
    for figure in root.all("figure"):
        [script] = figure.all("script", type="application/json")
        found[figure.one("div", class_="plot").attributes["id"]] = json.loads(script.text)
    return found


def trace(spec: dict[str, Any], name: str) -> dict[str, Any]:
    [found] = [item for item in spec["data"] if item["name"] == name]
    return found


def shown(root: Node, section: str) -> list[Node]:
    """Blocks of a section that are not hidden at first."""
    return [node for node in root.one("section", id=section).all(class_="when") if "hidden" not in node.attributes]


def test_sections_come_in_order_and_each_says_what_it_counts() -> None:
    root = page()
    sections = root.all("section")
    assert [node.attributes["id"] for node in sections] == [name for name, _ in SECTIONS]
    assert [node.one("h2").text for node in sections] == [title for _, title in SECTIONS]
    assert [link.attributes["href"] for link in root.one("nav").all("a")] == [f"#{name}" for name, _ in SECTIONS]
    assert all(40 < len(node.all("p", class_="lead")[0].text) < 500 for node in sections)


def test_nothing_comes_from_outside_and_the_page_is_plotly_and_little_else() -> None:
    text = serve_page(BODY, title="t", profiles=PROFILES)
    root = read_html(text)
    for node in root.all():
        assert not {"src", "srcset", "data", "poster", "action", "background"} & set(node.attributes)
        href = node.attributes.get("href", "#")
        assert href.startswith("#") or href == "data:,"
    assert text.count(get_plotlyjs()) == 1
    assert not re.search(r"https?://", text.replace(get_plotlyjs(), ""))
    assert len(text) - len(get_plotlyjs()) < 700_000
    assert text == serve_page(BODY, title="t", profiles=PROFILES)


def test_ids_are_unique_and_switches_stand_in_every_section() -> None:
    root = page()
    ids = [node.attributes["id"] for node in root.all() if "id" in node.attributes]
    assert len(set(ids)) == len(ids)
    groups = [node.attributes["data-switch"] for node in root.all("fieldset")]
    assert groups.count("scenario") == len(SECTIONS)
    assert groups.count("workload") == 1
    labels = [node.text for node in root.one("section", id="answer").one("fieldset").all("span")]
    assert labels == ["measured", "what if: tiles (synthetic)"]
    assert "fieldset" not in {node.tag for node in page(study(), profiles={}).one("section", id="answer").all()}


def test_what_is_made_up_is_marked_in_every_section_and_figure() -> None:
    root = page()
    for section in root.all("section"):
        for block in section.all(class_="when"):
            signs = [node.text for node in block.all("p", class_="made-up")]
            made_up = block.attributes["data-when-scenario"] == "tiles"
            assert signs == (["SYNTHETIC: nothing here was measured (tiles)"] if made_up else []), section.attributes
    for name, spec in figures(root).items():
        marks = [mark["text"] for mark in spec["layout"].get("annotations", [])]
        assert marks == (["SYNTHETIC"] if name.endswith("-tiles") else []), name
        assert ("synthetic" in spec["subtitle"]) == name.endswith("-tiles")


def test_the_measured_scenario_shows_first() -> None:
    root = page()
    for name, _ in SECTIONS:
        [block] = shown(root, name)
        assert block.attributes["data-when-scenario"] == "measured"
    [loads] = shown(root, "loads")
    assert loads.attributes["data-when-workload"] == "poisson"


def test_the_frontier_figure_holds_every_policy_and_point() -> None:
    spec = figures(page())["frontier-measured"]
    for entry in BODY["pareto"]:
        label = next(item["label"] for item in BODY["policies"] if item["name"] == entry["policy"])
        found = trace(spec, label)
        assert found["x"] == pytest.approx([point["user_tokens_per_s"]["p50"] for point in entry["points"]], rel=1e-5)
        assert found["y"] == pytest.approx([point["tokens_per_s"] for point in entry["points"]], rel=1e-5)
        for text, point in zip(found["customdata"], entry["points"], strict=True):
            lines = text.split("<br>")
            assert lines[0] == f"{label}, {users(point['concurrency'])}"
            assert f"of {point['budget']:.2f} verified" in text
            assert f"{point['accepted_length']:.2f}" in text
            assert "acceptance" in text
    front = trace(spec, "frontier")
    assert front["x"] == pytest.approx([point["user_tokens_per_s"] for point in BODY["frontier"]], rel=1e-5)
    visible = {item["name"]: item.get("visible") for item in spec["data"]}
    assert visible["no drafter"] is True
    assert visible["fixed 7"] is True
    assert visible["fixed 1"] == "legendonly"


def test_wide_ranges_of_load_get_logarithmic_axes() -> None:
    found = figures(page())
    assert "type" not in found["frontier-measured"]["layout"]["xaxis"]
    wide = found["frontier-tiles"]["layout"]["yaxis"]
    assert wide["type"] == "log"
    assert wide["ticktext"] == [short(tick) for tick in wide["tickvals"]]


def test_budget_and_acceptance_by_load() -> None:
    found = figures(page())
    budget = trace(found["budget-measured"], "fixed 7")
    assert budget["x"] == [1, 2, 4, 8, 16]
    assert budget["y"] == [8.0] * 5
    assert all(item["name"] != "no drafter" for item in found["acceptance-measured"]["data"])
    assert trace(found["speedup-measured"], "no drafter")["y"] == [1.0] * 5


def test_loads_show_quantiles_goodput_and_overload() -> None:
    root = page()
    found = figures(root)
    spec = found["ttft-poisson-measured"]
    plain = trace(spec, "no drafter")
    rows = [row for row in BODY["latencies"] if row["workload"] == "poisson" and row["policy"] == "none"]
    assert plain["x"] == ["30 %", "90 %"]
    assert plain["y"] == pytest.approx([row["ttft_s"]["p50"] for row in rows])
    assert plain["error_y"]["array"] == pytest.approx([row["ttft_s"]["p95"] - row["ttft_s"]["p50"] for row in rows])
    assert plain["marker"]["pattern"]["shape"] == ["", "x"]
    assert "overloaded, the queue grows" in plain["customdata"][1]
    goodput = trace(found["goodput-poisson-measured"], "no drafter")
    assert goodput["y"] == pytest.approx([row["goodput_requests_per_s"] for row in rows])
    assert set(found) >= {f"{name}-bursty-tiles" for name in ("ttft", "tpot", "end-to-end", "goodput")}


def test_no_second_token_means_no_time_of_one() -> None:
    body = study()
    for row in body["latencies"]:
        row["tpot_s"] = row["user_tokens_per_s"] = None
    spec = figures(page(body))["tpot-poisson-measured"]
    assert trace(spec, "no drafter")["y"] == [None, None]


def test_a_workload_that_a_scenario_lacks_is_said() -> None:
    body = study(what_if=[tiles()])
    body["latencies"] += [{**row, "workload": "trace", "load": None} for row in body["latencies"][:2]]
    blocks = page(body).one("section", id="loads").all(class_="when", data_when_workload="trace")
    told = {node.attributes["data-when-scenario"]: node.text for node in blocks}
    assert "as recorded" in told["measured"]
    assert told["tiles"] == "This scenario was not studied under this workload."


def test_heat_maps_hold_the_changes_and_colour_what_is_better() -> None:
    found = figures(page())
    cells = {(cell["burst_factor"], cell["staleness"]): cell for cell in BODY["staleness"]["cells"]}
    for name, what in (("staleness-speed", "fresh_change"), ("staleness-tail", "fresh_p95_change")):
        [heat] = found[f"{name}-measured"]["data"]
        assert heat["x"] == ["synchronous", "1", "2", "4"]
        assert heat["y"] == ["even", "4 times", "16 times"]
        for row, burst in zip(heat["z"], (1.0, 4.0, 16.0), strict=True):
            assert row == pytest.approx([cells[burst, steps][what] for steps in (0, 1, 2, 4)])
        assert heat["zmin"] == -heat["zmax"]
        ends = [heat["colorscale"][0][1], heat["colorscale"][2][1]]
        assert ends == (
            ["var(--worse)", "var(--better)"] if name == "staleness-speed" else ["var(--better)", "var(--worse)"]
        )


def test_without_a_confidence_head_there_is_nothing_to_schedule() -> None:
    root = page(study(confidence=False, kind="dflash", key="dflash_b7-toy"), profiles={})
    assert "no confidence head" in root.one("section", id="staleness").text
    assert not any(name.startswith(("staleness", "believed")) for name in figures(root))
    assert "No profile was given for this scenario." in root.one("section", id="profile").text


def test_early_exits_and_what_lies_within_the_noise() -> None:
    body = study()
    rows = body["early_exit"]["rows"]
    rows[0]["clear"] = False
    found = figures(page(body))
    first = found["exit-gain-measured"]["data"][0]
    assert first["y"] == pytest.approx([row["gain"] for row in rows[:5]], rel=1e-5)
    assert [symbol.endswith("-open") for symbol in first["marker"]["symbol"]] == [True, False, False, False, False]
    assert "within the noise" in first["customdata"][0]
    assert set(found) >= {"exit-gain-over-none-measured", "exit-drafting-share-measured"}


def test_the_profile_has_both_tables() -> None:
    found = figures(page())
    measured, monotone = found["profile-rate-measured"]["data"]
    assert (measured["name"], monotone["name"]) == ("as measured", "monotone")
    assert measured["y"] == pytest.approx(PROFILES["measured"]["jagged"]["sample_steps_per_sec"], rel=1e-5)
    rates = PROFILES["measured"]["table"]["sample_steps_per_sec"]
    assert rates[3] == rates[2]
    assert monotone["y"] == pytest.approx([*rates[:3], *rates[4:]], rel=1e-5)
    assert measured["line"]["shape"] == "hv"
    times = found["profile-time-measured"]["data"][0]["y"]
    assert times == pytest.approx([1000 / rate for rate in measured["y"]], rel=1e-4)
    believed = trace(found["believed-measured"], "sync")
    assert believed["y"] == pytest.approx([-0.03] * 5)


def test_a_curve_keeps_the_points_where_it_changes_and_not_too_many() -> None:
    assert thinned([1, 2, 3, 4, 5], [9.0, 9.0, 7.0, 7.0, 7.0]) == ([1, 3, 5], [9.0, 7.0, 7.0])
    tokens, rates = thinned(list(range(1, 2001)), [1 / count for count in range(1, 2001)])
    assert len(tokens) == MOST_POINTS
    assert (tokens[0], tokens[-1]) == (1, 2000)
    assert rates == [1 / count for count in tokens]
    assert len(set(tokens)) == len(tokens)


def test_the_anchors_table_says_bounds_gains_and_what_is_out_of_reach() -> None:
    body = study(rates={"none": [10.0, 20.0], "fixed_1": [15.0, 26.0]}, loads=(1, 2))
    [block] = page(body, profiles={}).one("section", id="anchors").all(class_="when")
    first, _ = block.all("table")
    assert table_cells(first) == [
        ["policy", "5 tokens/s a user (50 % of plain's one user)", "12 tokens/s a user (120 % of plain's one user)"],
        ["no drafter", ">= 20, 2 users, +0.0 %", "out of reach"],
        ["fixed 1", ">= 26, 2 users, +30.0 % (best)", ">= 26, 2 users, - (best)"],
    ]


def test_the_answer_says_whether_speculation_pays_and_on_what_it_rests() -> None:
    body = study(rates={"none": [10.0, 20.0], "fixed_1": [15.0, 19.0]}, loads=(1, 2))
    root = page(body, profiles={})
    items = [node.text for node in root.one("ul", class_="headline").all("li")]
    assert items[0].startswith("On this machine no policy beats plain decoding above 1 user;")
    text = root.one("section", id="answer").text
    for told in ("Measured on a toy.", "dspark_b7: dspark, K 7, with confidence head", "temperature 1",
                 "1,200 rounds of 30 answers", "toy processor"):  # fmt: skip
        assert told in text


def test_settings_are_those_of_the_scenario() -> None:
    blocks = page().one("section", id="settings").all(class_="when")
    assert [node.attributes["data-when-scenario"] for node in blocks] == ["measured", "tiles"]
    for node in blocks:
        assert [heading.text for heading in node.all("h3")] == ["vLLM", "SGLang"]
        commands = [item.text for item in node.all("pre")]
        assert any(text.startswith("vllm serve TARGET") for text in commands)
        assert any("sglang.launch_server" in text for text in commands)
    dflash = study(kind="dflash", key="dflash_b7-toy", confidence=False)
    assert "was trained to do" in page(dflash).one("section", id="settings").text
    assert "was trained to do" not in page(dflash, sample_from_anchor=False).one("section", id="settings").text


def test_text_of_others_cannot_break_the_page() -> None:
    body = study(key=f"k{NASTY}-toy", processor=NASTY)
    body["note"] = body["answers"]["policy"] = NASTY
    for item in body["policies"]:
        item["label"] += NASTY
    text = serve_page(body, title=NASTY, profiles=PROFILES)
    text.encode("utf-8")
    root = read_html(text)
    assert len(root.all("script")) == len(page(study(), profiles=PROFILES).all("script"))
    assert root.all("b") == []


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (study() | {"schema_version": 2}, "another schema version: got 2, expected 1; run the serve stage again"),
        (study(what_if=[tiles(), tiles()]), "two scenarios of one name: got tiles"),
    ],
)
def test_bodies_that_cannot_be_shown(body: dict[str, Any], told: str) -> None:
    with pytest.raises(DraftsmithError) as raised:
        serve_page(body, title="t")
    assert told in str(raised.value)


def test_scenarios_say_what_they_are() -> None:
    elsewhere = study(name="h200")
    [scenario] = scenarios_of(elsewhere | {"what_if": []}, profiles={})
    assert scenario.label == "elsewhere: h200"
    [scenario] = scenarios_of(study(synthetic=True), profiles={})
    assert scenario.label == "measured (synthetic)"


def test_numbers_for_people() -> None:
    assert [short(value) for value in (13155.4, 0.041234, 99.999, 1_316_000.0, 0.0)] == [
        "13,160", "0.04123", "100", "1,316,000", "0",
    ]  # fmt: skip
    assert [signed(value) for value in (0.51, -0.004, None)] == ["+51.0 %", "-0.4 %", "-"]
    assert [users(value) for value in (1, 2, 63.14)] == ["1 user", "2 users", "63.1 users"]
