"""A small study: its fields, and its figures computed another way."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from draftsmith.figures import png_bytes
from draftsmith.params_serving import Serve, TokenNumbers
from draftsmith.serving.contenders import Contender, Machine
from draftsmith.serving.cost_table import CostTable
from draftsmith.serving.requests import make_requests
from draftsmith.serving.simulator import Limits
from draftsmith.serving.step_costs import DraftingCost, PrefillCost, StepCosts, UpkeepCost
from draftsmith.serving.study import Study, concurrencies, rounds_facts
from draftsmith.serving.study_figures import study_figures
from draftsmith.serving.study_loads import closed_point, serve
from draftsmith.serving.study_text import serve_csv, serve_markdown
from draftsmith.serving.synthetic_rounds import synthetic_rounds
from draftsmith.serving.trace_file import Trace
from draftsmith.serving.workload import RequestMix, TokenLaw

ROW = Serve(
    closed_requests=8,
    open_requests=40,
    thresholds=(0.5,),
    loads=(0.5,),
    burst_factors=(1.0, 8.0),
    staleness=(1, 4),
    anchor_shares=(0.5, 50.0),
    anchor_tokens_per_s=(3.0,),
    output_tokens=TokenNumbers(median=12, spread=0.4, low=2, high=40),
    seed=3,
)


def machine(*, confident: bool, block_size: int = 3) -> Machine:
    rounds = synthetic_rounds(
        {"chat": 1.8, "math": 2.2} if block_size > 1 else {"chat": 1.5},
        block_size=block_size, confident=confident, num_answers=20, seed=1,
    )  # fmt: skip
    table = CostTable(np.arange(1, 17), steps_per_s=1 / (0.01 + 0.001 * np.ceil(np.arange(1, 17) / 4) * 4))
    costs = StepCosts(
        table, DraftingCost((1, 4), (0.002, 0.004)), PrefillCost(5000.0, 0.001), None, UpkeepCost((1,), (0.0005,))
    )
    return Machine(rounds, costs, table.monotone(), Limits(4), None, 0.5, 8, 3)


def body_of(found: Machine, trace: Trace | None = None) -> tuple[dict[str, Any], int, int]:
    """(body as of a job, simulations told, simulations promised)."""
    told: list[int] = []
    study = Study(found, row=ROW, trace=trace)
    body = study.body(on_run=lambda: told.append(1))
    facts = {
        "key": "k", "name": "measured", "synthetic": False, "note": "A note.",
        "rounds": rounds_facts(found.rounds, source="evaluation", temperature=1.0),
    }  # fmt: skip
    return facts | body, len(told), study.num_runs


@pytest.fixture(scope="module")
def body() -> dict[str, Any]:
    return body_of(machine(confident=True))[0]


def points(body: dict[str, Any], policy: str) -> list[dict[str, Any]]:
    return next(list(item["points"]) for item in body["pareto"] if item["policy"] == policy)


def test_concurrencies_are_powers_of_two_and_the_most() -> None:
    assert concurrencies(1) == (1,)
    assert concurrencies(16) == (1, 2, 4, 8, 16)
    assert concurrencies(21) == (1, 2, 4, 8, 16, 21)


def test_equal_seeds_give_equal_studies_and_runs_are_counted(body: dict[str, Any]) -> None:
    again, told, promised = body_of(machine(confident=True))
    assert json.dumps(again, sort_keys=True, allow_nan=False) == json.dumps(body, sort_keys=True, allow_nan=False)
    assert told == promised


def test_every_policy_has_every_load_and_the_best_is_the_best(body: dict[str, Any]) -> None:
    names = [item["name"] for item in body["policies"]]
    assert [item["policy"] for item in body["pareto"]] == names
    for item in body["pareto"]:
        assert [point["concurrency"] for point in item["points"]] == [1, 2, 4]
    for at, best in enumerate(body["best_by_concurrency"]):
        rates = {name: points(body, name)[at]["tokens_per_s"] for name in names}
        assert best["tokens_per_s"] == max(rates.values())
        assert rates[best["policy"]] == best["tokens_per_s"]
        assert best["policy"] not in best["as_good"]
    for name in names:
        for point, plain in zip(points(body, name), points(body, "none"), strict=True):
            assert point["speedup"] == pytest.approx(point["tokens_per_s"] / plain["tokens_per_s"])
    steady = body["overall"][0]
    assert steady["worst_share"] == max(row["worst_share"] for row in body["overall"])
    shares = [
        point["tokens_per_s"] / best["tokens_per_s"]
        for point, best in zip(points(body, steady["policy"]), body["best_by_concurrency"], strict=True)
    ]
    assert steady["worst_share"] == pytest.approx(min(shares))


def test_a_fixed_length_verifies_it_and_plain_decoding_nothing(body: dict[str, Any]) -> None:
    for length in (1, 2, 3):
        assert {point["budget"] for point in points(body, f"fixed_{length}")} == {1.0 + length}
    for point in points(body, "none"):
        assert (point["budget"], point["accepted_length"], point["acceptance"]) == (1.0, 1.0, None)
        assert point["draft_share"] == point["drafting_share"] == 0.0
    one = points(body, "none")[0]
    # one user: a prefill pass, then a token a step of 1 batch token
    step = 1 / (0.014 + 0.0005)
    assert one["user_tokens_per_s"]["p50"] == pytest.approx(step)
    assert one["tokens_per_s"] < step


def test_the_frontier_is_marked_on_its_points(body: dict[str, Any]) -> None:
    marked = {
        (item["policy"], point["concurrency"])
        for item in body["pareto"]
        for point in item["points"]
        if point["on_frontier"]
    }
    assert marked == {(row["policy"], row["concurrency"]) for row in body["frontier"]}


def test_anchors_are_shares_of_plain_decoding_and_none_is_promised_out_of_reach(body: dict[str, Any]) -> None:
    half, beyond, absolute = body["anchors"]
    one_user = points(body, "none")[0]["user_tokens_per_s"]["p50"]
    assert half["user_tokens_per_s"] == pytest.approx(0.5 * one_user)
    assert beyond["best"] is None
    assert all(row["tokens_per_s"] is None and row["gain"] is None for row in beyond["rows"])
    assert (absolute["share"], absolute["user_tokens_per_s"]) == (None, 3.0)
    for row in absolute["rows"]:
        assert row["at_limit"]
        plain = absolute["rows"][0]["tokens_per_s"]
        assert row["gain"] == pytest.approx(row["tokens_per_s"] / plain - 1)


def test_open_loads_have_every_workload_and_shares_of_the_capacity(body: dict[str, Any]) -> None:
    assert {row["workload"] for row in body["latencies"]} == {"poisson", "bursty", "diurnal", "agentic"}
    assert body["capacity"]["tokens_per_s"] == max(item["tokens_per_s"] for item in body["best_by_concurrency"])
    for row in body["latencies"]:
        assert 0 <= row["share_in_time"] <= 1
        assert row["goodput_requests_per_s"] <= row["requests_per_s"] * 2
        assert row["ttft_s"]["p50"] <= row["end_to_end_s"]["p50"]


def test_cells_are_compared_with_the_synchronous_and_the_freshest(body: dict[str, Any]) -> None:
    found = body["staleness"]
    assert found["staleness"] == [0, 1, 4]
    cells = {(cell["burst_factor"], cell["staleness"]): cell for cell in found["cells"]}
    assert len(cells) == 6
    for (factor, _), cell in cells.items():
        base, fresh = cells[factor, 0], cells[factor, 1]
        assert cell["change"] == pytest.approx(cell["user_tokens_per_s"] / base["user_tokens_per_s"] - 1)
        assert cell["fresh_p95_change"] == pytest.approx(cell["end_to_end_p95_s"] / fresh["end_to_end_p95_s"] - 1)


def test_early_exits_are_beside_what_always_drafts(body: dict[str, Any]) -> None:
    rows = body["early_exit"]["rows"]
    assert {(row["policy"], row["early_exit"]) for row in rows} == {
        ("fixed_3", "recent"), ("fixed_3", "worth"), ("async_2", "recent"), ("async_2", "worth"),
    }  # fmt: skip
    for row in rows:
        base = next(point for point in points(body, row["policy"]) if point["concurrency"] == row["concurrency"])
        assert row["base_tokens_per_s"] == base["tokens_per_s"]
        assert row["gain"] == pytest.approx(row["tokens_per_s"] / base["tokens_per_s"] - 1)


def test_without_a_confidence_head_nothing_is_scheduled() -> None:
    found, told, promised = body_of(machine(confident=False))
    assert told == promised
    assert found["staleness"] is found["believed"] is found["answers"]["staleness"] is None
    assert {item["kind"] for item in found["policies"]} == {"none", "fixed"}
    assert set(study_figures(found)) == {"pareto", "budget", "early_exit"}
    assert "irregular traffic" not in serve_markdown(found)


def test_a_drafter_of_one_token_has_its_study() -> None:
    found = body_of(machine(confident=False, block_size=1))[0]
    assert [item["name"] for item in found["policies"]] == ["none", "fixed_1", "fixed_1+recent", "fixed_1+worth"]


def test_a_trace_is_replayed_as_it_is_and_at_the_load_of_the_others() -> None:
    requests = make_requests(np.arange(30) * 5.0, prompt_tokens=[9] * 30, output_tokens=[10] * 30, domain=["math"] * 30)
    found, told, promised = body_of(machine(confident=False), Trace(requests, 0))
    rows = [row for row in found["latencies"] if row["workload"] == "trace"]
    assert told == promised
    assert {row["load"] for row in rows} == {None, ROW.irregular_load}
    as_recorded = next(row for row in rows if row["load"] is None)
    assert as_recorded["requests_per_s"] == pytest.approx(0.2, rel=0.1)
    assert as_recorded["mean_concurrency"] == pytest.approx(1.0)


def test_thresholds_read_raw_confidences() -> None:
    found = machine(confident=True)
    hot = replace(found, temperatures=(9.0,) * 3)
    mix = RequestMix(TokenLaw(8, 0.0, 8, 8), TokenLaw(12, 0.4, 2, 40), {"chat": 1.0})

    def rate(which: Machine, contender: Contender) -> float:
        return closed_point(which, contender, mix=mix, concurrency=2, num_requests=16).tokens_per_s

    assert rate(found, Contender("threshold", 0.7)) == rate(hot, Contender("threshold", 0.7))
    assert rate(found, Contender("synchronous")) != rate(hot, Contender("synchronous"))


def test_a_closed_loop_keeps_its_users_busy_and_is_as_good_as_itself() -> None:
    found = machine(confident=True)
    mix = RequestMix(TokenLaw(8, 0.0, 8, 8), TokenLaw(12, 0.4, 2, 40), {"chat": 1.0, "math": 1.0})
    whole = closed_point(found, Contender("fixed", 3), mix=mix, concurrency=4, num_requests=60)
    assert whole.figures.mean_concurrency == pytest.approx(4.0, rel=0.05)
    assert whole.as_good_as(whole)
    slow = replace(found, costs=replace(found.costs, upkeep=UpkeepCost((1,), (0.5,))))
    slower = closed_point(slow, Contender("fixed", 3), mix=mix, concurrency=4, num_requests=60)
    assert whole.as_good_as(slower)
    assert not slower.as_good_as(whole)


def test_plain_decoding_pays_for_no_drafter() -> None:
    found = machine(confident=True)
    requests = make_requests([0.0], prompt_tokens=[5], output_tokens=[10], domain=["chat"])
    steps = serve(found, Contender("none"), requests).steps
    assert steps.draft_s.sum() == 0.0
    assert len(steps.start_s) == 9


def test_texts_and_figures_are_made_of_the_body(body: dict[str, Any]) -> None:
    text = serve_markdown({**body, "what_if": [{**body, "name": "other", "synthetic": True}]})
    assert text.startswith("# Serving k\n")
    assert "# What if: other (synthetic)" in text
    assert text.count(body["answers"]["staleness"]) == 2
    assert "out of reach" in text
    rows = list(csv.DictReader(io.StringIO(serve_csv([body]))))
    assert len(rows) == sum(len(item["points"]) for item in body["pareto"])
    first = points(body, "none")[0]
    assert float(rows[0]["tokens_per_s"]) == first["tokens_per_s"]
    assert float(rows[0]["user_tokens_per_s"]) == first["user_tokens_per_s"]["p50"]
    figures = study_figures(body)
    assert set(figures) == {"pareto", "budget", "early_exit", "staleness"}
    for figure in figures.values():
        assert png_bytes(figure).startswith(b"\x89PNG")


def test_sentences_say_what_the_numbers_say(body: dict[str, Any]) -> None:
    answers = body["answers"]
    best = body["best_by_concurrency"][0]
    label = next(item["label"] for item in body["policies"] if item["name"] == best["policy"])
    assert label in answers["policy"]
    stalest = [cell for cell in body["staleness"]["cells"] if cell["staleness"] == 4]
    for cell in stalest:
        change = 100 * cell["fresh_change"]
        assert ("no change" if abs(change) < 0.05 else f"{change:+.1f} %") in answers["staleness"]
    gains = [row["gain"] for row in body["early_exit"]["rows"] if row["policy"] == "fixed_3"]
    assert f"{100 * max(gains[:3]):+.1f} %" in answers["early_exit"]
