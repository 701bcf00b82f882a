"""Profiles: made of points, kept as JSON, read from elsewhere; and the examples, against the formulas they state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftsmith.errors import DraftsmithError
from draftsmith.serving.profile import EXAMPLES, Origin, Profile, example_profile, is_profile, read_profile
from draftsmith.serving.profile_points import PassSample, StepSample, Sweep, prefill_points, step_points
from draftsmith.serving.sidecars import check_sps


def measured() -> Profile:
    """R of 1 and 2 at K = 2: verification 1 s and 0.1 s a token, drafting R s, upkeep 0.5 s, context 0.01 s a token."""

    def step(sweep: Sweep, requests: int, tokens: int, context: int) -> StepSample:
        verify = 1 + 0.1 * tokens + 0.01 * requests * (context - 20)
        return StepSample(sweep, requests, tokens, context, context, requests, verify, 0.5)

    steps = [
        step("tokens", requests, tokens, 20) for requests in (1, 2) for tokens in range(requests, 3 * requests + 1)
    ]
    steps += [step("context", 2, tokens, context) for tokens in (2, 6) for context in (20, 50)]
    passes = [PassSample(requests, requests * 20, 0.5 + requests * 20 / 100) for requests in (1, 2)]
    origin = Origin(key="k", target="t", drafter="d", block_size=2, created="now", machine={"threads": 2}, note="half")
    return Profile.of_points(origin, points=step_points(steps), prefill=prefill_points(passes))


def test_costs_of_points() -> None:
    costs = measured().step_costs()
    assert (1 / costs.verification.steps_per_s).tolist() == pytest.approx([1.1, 1.2, 1.3, 1.4, 1.5, 1.6])
    assert costs.drafting is not None
    assert costs.drafting.seconds == (1, 2)
    assert costs.upkeep is not None
    assert costs.upkeep.seconds == (0.5, 0.5)
    assert costs.prefill is not None
    assert (costs.prefill.tokens_per_s, costs.prefill.seconds_per_pass) == pytest.approx((100, 0.5))
    assert costs.context is not None
    assert (costs.context.seconds_per_token, costs.context.profiled_tokens) == pytest.approx((0.01, 20))


def test_the_sidecar_is_of_whole_steps_and_fits_sglang() -> None:
    """At N = 1 one request, at 2 and 3 one or two (median of drafting 1.5 s), above them two."""
    sidecar = measured().sidecar()
    check_sps(sidecar, where="here")
    assert sidecar.keys() == {"sample_batch_tokens", "sample_steps_per_sec", "max_batch_tokens"}
    assert sidecar["sample_batch_tokens"] == [1, 2, 3, 4, 5, 6]
    whole = [1.1 + 1.5, 1.2 + 2, 1.3 + 2, 1.4 + 2.5, 1.5 + 2.5, 1.6 + 2.5]
    assert [1 / rate for rate in sidecar["sample_steps_per_sec"]] == pytest.approx(whole)


def test_a_profile_is_what_is_read_of_it(tmp_path: Path) -> None:
    body = measured().to_body()
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(body))
    found = read_profile(path)
    assert json.loads(json.dumps(found.to_body())) == json.loads(json.dumps(body))
    assert found.step_costs().drafting == measured().drafting
    assert is_profile(path)


def test_the_body_has_what_its_readers_need() -> None:
    body = measured().to_body()
    assert body["schema_version"] == 1
    assert (body["key"], body["synthetic"], body["note"], body["machine"]) == ("k", False, "half", {"threads": 2})
    assert body["jagged"]["sample_batch_tokens"] == body["table"]["sample_batch_tokens"] == [1, 2, 3, 4, 5, 6]
    assert {point["sweep"] for point in body["points"]} == {"tokens", "requests", "context"}
    first = body["points"][0]
    assert first["verify_s"] == pytest.approx({"median": 1.1, "p10": 1.1, "p90": 1.1})
    assert body["prefill"][1]["num_tokens"] == 40
    assert body["prefill_cost"] == pytest.approx({"tokens_per_s": 100, "seconds_per_pass": 0.5})


@pytest.mark.parametrize("name", ["jagged", "table"])
def test_a_profile_from_elsewhere_needs_one_table(name: str) -> None:
    """Seconds 1, 3, 2 at 1, 2, 3: `table` is monotone whichever was given; what else there is costs nothing."""
    table = {"sample_batch_tokens": [1, 2, 3], "sample_steps_per_sec": [1, 1 / 3, 0.5]}
    found = Profile.from_body({"schema_version": 1, name: table}, where="here")
    assert (1 / found.jagged.steps_per_s).tolist() == pytest.approx([1, 3, 2])
    assert (1 / found.table.steps_per_s).tolist() == pytest.approx([1, 2.5, 2.5])
    costs = found.step_costs()
    assert (costs.drafting, costs.upkeep, costs.prefill, costs.context) == (None, None, None, None)
    assert found.sidecar() == found.table.to_sidecar()


TABLE = {"sample_batch_tokens": [1, 2], "sample_steps_per_sec": [2.0, 1.0]}


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ([], "not a profile of this version: got schema_version list"),
        ({}, "got schema_version None"),
        ({"schema_version": 2, "table": TABLE}, "got schema_version 2, expected 1"),
        ({"schema_version": 1}, "a profile without a table"),
        ({"schema_version": 1, "table": {"sample_batch_tokens": [1]}}, "no sample_steps_per_sec"),
        ({"schema_version": 1, "table": 7}, "cannot be read"),
        ({"schema_version": 1, "table": TABLE, "points": [{}]}, "cannot be read"),
        ({"schema_version": 1, "table": TABLE, "drafting": {"seconds": [1.0]}}, "cannot be read"),
        ({"schema_version": 1, "table": TABLE, "drafting": {"num_requests": [1], "seconds": [-1.0]}}, "drafting cost"),
        ({"schema_version": 1, "table": TABLE, "prefill_cost": {"tokens_per_s": 0}}, "rate of prefill"),
    ],
)
def test_what_is_no_profile_is_refused(body: Any, told: str) -> None:
    with pytest.raises(DraftsmithError, match=told):
        Profile.from_body(body, where="p.json")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    with pytest.raises(DraftsmithError, match=r"cannot be read: got No such file.*p\.json"):
        read_profile(path)
    path.write_text("{")
    with pytest.raises(DraftsmithError, match=r"not JSON.*p\.json"):
        read_profile(path)


def test_a_bare_table_is_no_profile(tmp_path: Path) -> None:
    path = tmp_path / "sps.json"
    path.write_text(json.dumps(TABLE))
    assert not is_profile(path)
    assert not is_profile(tmp_path / "sps.csv")


def smooth(number: int) -> float:
    return float((0.022**4 + (3.5e-5 * number) ** 4) ** 0.25)


def tiles(number: int) -> float:
    tile, per_token = next(
        (tile, factor)
        for last, tile, factor in ((80, 16, 1.6), (224, 32, 1.3), (896, 64, 1.1), (2048, 128, 0.95))
        if number <= last
    )
    return 0.020 + 3e-5 * per_token * tile * -(-number // tile)


FORMULAS = {"smooth": smooth, "tiles": tiles, "graph_limit": lambda n: smooth(n) + 0.014 * (n > 512)}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_their_formulas(name: str) -> None:
    """At every N, but for the curve of the smooth ones between points; drafting is 5 to 10 % of a full step."""
    found = example_profile(name)
    cost = np.array([FORMULAS[name](number) for number in range(1, 2049)])
    assert found.jagged.batch_tokens.tolist() == list(range(1, 2049))
    assert 1 / found.jagged.steps_per_s == pytest.approx(cost, rel=1e-5 if name == "tiles" else 2e-3)
    assert (np.diff(found.table.steps_per_s) <= 0).all()
    assert 1 / found.table.steps_per_s == pytest.approx(cost, rel=6e-3)
    assert found.origin.synthetic
    assert found.origin.note.startswith("Synthetic: nothing of this was measured.")
    assert found.drafting is not None
    for requests, drafting in zip(found.drafting.num_requests, found.drafting.seconds, strict=True):
        step = drafting + 1 / found.jagged.look_up(8 * requests)
        assert 0.05 <= drafting / step <= 0.1
    check_sps(found.sidecar(), where=name)


def test_tiles_are_not_quite_monotone_and_the_cliff_is_where_it_is() -> None:
    jagged = example_profile("tiles").jagged
    assert [n for n in range(1, 2048) if jagged.steps_per_s[n] > jagged.steps_per_s[n - 1]] == [80, 224, 896]
    cliff = 1 / example_profile("graph_limit").table.steps_per_s
    assert cliff[512] - cliff[511] == pytest.approx(0.014, rel=0.02)


def test_there_is_no_other_example() -> None:
    with pytest.raises(
        DraftsmithError, match="no such example profile: got stairs, expected smooth, tiles, graph_limit"
    ):
        example_profile("stairs")
