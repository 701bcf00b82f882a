"""Drafters side by side: only what is alike shares a group, and each has its own frontier and anchors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from draftsmith.errors import DraftsmithError
from draftsmith.serving.overlay import anchors_grid, overlay, overlay_markdown, overlay_notices
from draftsmith.serving.overlay_page import overlay_page
from tests.html_reader import Node, read_html
from tests.serve_bodies import study

LOADS = (1, 2, 4)
PLAIN = [10.0, 20.0, 36.0]
DSPARK = {"none": PLAIN, "fixed_1": [14.0, 26.0, 36.0], "fixed_7": [20.0, 30.0, 32.0]}
DFLASH = {"none": PLAIN, "fixed_7": [16.0, 24.0, 28.0]}


def dspark(**more: Any) -> dict[str, Any]:
    return study(**({"key": "dspark_b7-toy", "rates": DSPARK, "loads": LOADS} | more))


def dflash(**more: Any) -> dict[str, Any]:
    return study(**({"key": "dflash_b7-toy", "kind": "dflash", "rates": DFLASH, "loads": LOADS} | more))


def over(*bodies: dict[str, Any], target: str = "toy", **targets: str) -> dict[str, Any]:
    return overlay(bodies, targets={body["key"]: target for body in bodies} | targets)


def test_like_studies_share_a_group_and_plain_decoding_is_drawn_once() -> None:
    body = over(dspark(), dflash())
    [group] = body["groups"]
    assert [item["label"] for item in group["series"]] == ["dspark_b7", "dflash_b7"]
    assert [item["label"] for item in group["plain"]] == ["no drafter"]
    assert [point["tokens_per_s"] for point in group["plain"][0]["points"]] == PLAIN
    assert body["differences"] == []
    assert overlay_notices(body) == []
    assert json.loads(json.dumps(body, allow_nan=False)) == body


def test_a_frontier_takes_the_best_policy_at_each_speed_and_never_plain_decoding() -> None:
    [group] = over(dspark())["groups"]
    [series] = group["series"]
    found = [(item["policy"], item["concurrency"], item["tokens_per_s"], item["user_tokens_per_s"])
             for item in series["points"]]  # fmt: skip
    # fixed 7 for 4 users (32, 8) is beaten by fixed 1 (36, 9), fixed 1 for 1 user (14, 14) by fixed 7 for 2 (30, 15).
    assert found == [("fixed 1", 4, 36.0, 9.0), ("fixed 7", 2, 30.0, 15.0), ("fixed 7", 1, 20.0, 20.0)]


def test_anchors_are_at_one_speed_for_all_with_gains_over_each_own_plain_decoding() -> None:
    [group] = over(dspark(), dflash())["groups"]
    low, high = group["anchors"]
    assert (low["user_tokens_per_s"], high["user_tokens_per_s"]) == pytest.approx((5.0, 12.0))
    first, second = low["rows"]
    assert (first["policy"], first["tokens_per_s"], first["at_limit"]) == ("fixed 1", 36.0, True)
    assert (second["tokens_per_s"], second["gain"]) == pytest.approx((28.0, 28 / 36 - 1))
    # At 12 tokens/s a user: dspark's fixed 7 lies between (30, 15) for 2 users and (32, 8) for 4.
    first, second = high["rows"]
    share = (15 - 12) / (15 - 8)
    assert (first["policy"], first["tokens_per_s"]) == ("fixed 7", pytest.approx(30 + share * 2))
    assert first["concurrency"] == pytest.approx(2 + share * 2)
    assert (first["gain"], first["plain_tokens_per_s"]) == (None, None)
    assert (second["tokens_per_s"], second["concurrency"]) == pytest.approx((24.0, 2.0))
    assert high["best"] == "dspark_b7"
    # A drafter that has no more than plain decoding is not the best.
    assert low["best"] == "no drafter"


def test_the_table_has_drafters_plain_decoding_and_what_is_out_of_reach() -> None:
    [group] = over(dspark(), dflash())["groups"]
    grid = anchors_grid(group)
    assert grid.headers[2:] == ("5 tokens/s a user", "12 tokens/s a user")
    assert [row[0] for row in grid.rows] == ["dspark_b7 (dspark, K 7)", "dflash_b7 (dflash, K 7)", "no drafter"]
    assert grid.rows[0][2:] == (
        ">= 36, 4 users, +0.0 %: fixed 1", "30.86, 2.86 users, -: fixed 7 (best)",
    )  # fmt: skip
    assert grid.rows[2][1:] == ("1.00", "36 (best)", "out of reach")


@pytest.mark.parametrize(
    ("change", "setting"),
    [
        ({"processor": "another"}, "machine"),
        ({"temperature": 0.0}, "temperature"),
    ],
)
def test_unlike_studies_form_groups_and_it_is_told_why(change: dict[str, Any], setting: str) -> None:
    body = over(dspark(), dflash(**change))
    assert [[item["label"] for item in group["series"]] for group in body["groups"]] == [["dspark_b7"], ["dflash_b7"]]
    assert [item["setting"] for item in body["differences"]] == [setting]
    [(title, text)] = overlay_notices(body)
    assert title == "Not comparable."
    assert text.startswith(f"Groups differ in {setting}, so no figure holds both (group 1: ")
    assert text in overlay_markdown(body)


def test_other_targets_requests_or_limits_form_groups_too() -> None:
    assert [item["setting"] for item in over(dspark(), dflash(), **{"dflash_b7-toy": "big"})["differences"]] == [
        "target"
    ]
    for part, name, value, setting in (
        ("workload", "domains", {"code": 1.0}, "requests"),
        ("limits", "prefill_tokens", None, "limits"),
    ):
        other = dflash()
        other[part][name] = value
        assert [item["setting"] for item in over(dspark(), other)["differences"]] == [setting]


def test_what_does_not_forbid_to_compare_is_told() -> None:
    other = dflash()
    other["rounds"]["domains"]["chat"]["num_answers"] = 7
    other["limits"]["max_requests"] = 99
    other["settings"]["seed"] = 3
    body = over(dspark(), other)
    assert len(body["groups"]) == 1
    told = [text for title, text in overlay_notices(body) if title == "Not quite alike."]
    assert told == [
        "Group 1: keys differ in rounds (dspark_b7: evaluation, chat 30 answers; dflash_b7: evaluation, chat 7 "
        "answers).",
        "Group 1: keys differ in loads (dspark_b7: up to 4 users; dflash_b7: up to 99 users).",
        "Group 1: keys differ in seed (dspark_b7: 0; dflash_b7: 3).",
    ]


def test_plain_decoding_that_differs_is_drawn_for_each_key_and_told_where_far_apart() -> None:
    near = dflash(rates=DFLASH | {"none": [value * 1.02 for value in PLAIN]})
    [group] = over(dspark(), near)["groups"]
    assert [item["label"] for item in group["plain"]] == [
        f"no drafter (run of {name}_b7)" for name in ("dspark", "dflash")
    ]
    assert group["plain_spread"] == pytest.approx(0.02)
    assert overlay_notices(over(dspark(), near)) == []
    far = over(dspark(), dflash(rates=DFLASH | {"none": [value * 1.1 for value in PLAIN]}))
    [(title, text)] = overlay_notices(far)
    assert title == "Machines in different states."
    assert "by up to 10.0 %" in text
    marked = [row[2] for row in anchors_grid(far["groups"][0]).rows[2:]]
    assert marked == ["36", "39.6 (best)"]


def what_if(key: str, **more: Any) -> dict[str, Any]:
    return study(key=key, name="tiles", synthetic=True, temperature=None, processor="tiles", loads=(1, 8, 64), **more)


def both_with_what_ifs() -> dict[str, Any]:
    return over(
        dspark(what_if=[what_if("dspark_b7-toy", gain=1.5)]),
        dflash(what_if=[what_if("dflash_b7-toy", kind="dflash", gain=1.0)]),
    )


def test_what_ifs_of_one_name_stand_side_by_side_after_what_was_measured() -> None:
    body = both_with_what_ifs()
    assert [(group["scenario"], group["synthetic"], len(group["series"])) for group in body["groups"]] == [
        ("measured", False, 2), ("tiles", True, 2),
    ]  # fmt: skip
    assert body["differences"] == []
    text = overlay_markdown(body)
    assert text.index("## Group 1: measured\n") < text.index("## Group 2: tiles (synthetic)\n")
    assert text.count("**SYNTHETIC: nothing in this group was measured.**") == 1


def test_drafters_of_one_name_go_by_their_keys() -> None:
    [group] = over(dspark(), dspark(key="dspark_b7-toy-long"))["groups"]
    assert [item["label"] for item in group["series"]] == ["dspark_b7-toy", "dspark_b7-toy-long"]


@pytest.mark.parametrize(
    ("bodies", "told"),
    [
        ([], "no serving study to show: expected at least one serve.json"),
        ([dspark() | {"schema_version": 9}], "another schema version: got 9, expected 1"),
        ([dspark(), dspark()], "a key is to be shown twice: got dspark_b7-toy"),
    ],
)
def test_what_cannot_be_shown(bodies: list[dict[str, Any]], told: str) -> None:
    with pytest.raises(DraftsmithError) as raised:
        over(*bodies)
    assert told in str(raised.value)


def plots(root: Node) -> list[dict[str, Any]]:
    return [json.loads(node.text) for node in root.all("script", type="application/json")]


def test_the_page_has_a_figure_a_group_and_marks_what_is_made_up() -> None:
    root = read_html(overlay_page(both_with_what_ifs(), title="Side by side"))
    assert [node.one("h2").text for node in root.all("section")] == ["Group 1: measured", "Group 2: tiles (synthetic)"]
    measured, tiles = plots(root)
    assert [item["name"] for item in measured["data"]] == ["dspark_b7", "dflash_b7", "no drafter"]
    assert measured["data"][0]["x"] == [9.0, 15.0, 20.0]
    assert measured["data"][0]["y"] == [36.0, 30.0, 20.0]
    assert "fixed 1" in measured["data"][0]["customdata"][0]
    assert "annotations" not in measured["layout"]
    assert tiles["layout"]["annotations"][0]["text"] == "SYNTHETIC"
    assert tiles["layout"]["xaxis"]["type"] == "log"
    signs = [len(node.all("p", class_="made-up")) for node in root.all("section")]
    assert signs == [0, 1]
    ids = [node.attributes["id"] for node in root.all() if "id" in node.attributes]
    assert len(set(ids)) == len(ids)


def test_the_page_shows_the_notices() -> None:
    body = over(dspark(), dflash(processor="another"))
    root = read_html(overlay_page(body, title="t"))
    [shown] = root.all("div", class_="notice")
    assert shown.text.startswith("Not comparable. Groups differ in machine")
