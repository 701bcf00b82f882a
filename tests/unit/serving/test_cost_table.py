"""SPS tables: what they refuse, the lookup against a scan, the monotone one, and their files."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.errors import DraftsmithError
from draftsmith.serving.cost_table import CostTable, read_cost_table

TABLE = CostTable([2, 4, 9], steps_per_s=[100.0, 90.0, 95.5])


def scan(table: CostTable, batch_tokens: int) -> float:
    """The nearest point at or below, the first one below that."""
    rate = table.steps_per_s[0]
    for point, measured in zip(table.batch_tokens, table.steps_per_s, strict=True):
        if point <= batch_tokens:
            rate = measured
    return float(rate)


def test_lookup_by_hand() -> None:
    found = TABLE.look_up([0, 1, 2, 3, 4, 8, 9, 10, 10**9])
    assert found.tolist() == [100.0, 100.0, 100.0, 100.0, 90.0, 90.0, 95.5, 95.5, 95.5]


def test_lookup_keeps_the_shape_and_takes_one_number() -> None:
    assert TABLE.look_up(np.array([[2, 4], [9, 3]])).tolist() == [[100.0, 90.0], [95.5, 100.0]]
    assert float(TABLE.look_up(5)) == 90.0


points = st.lists(st.integers(1, 30), min_size=1, max_size=8, unique=True).map(sorted)


@settings(deadline=None)
@given(points, st.integers(0, 40), st.integers(1, 40), st.randoms(use_true_random=False))
def test_a_run_is_the_lookup_of_each(probes: list[int], first: int, count: int, random: object) -> None:
    rates = [1.0 + random.random() for _ in probes]  # type: ignore[attr-defined]
    table = CostTable(probes, steps_per_s=rates)
    expected = [scan(table, number) for number in range(first, first + count)]
    assert table.look_up_run(first, count=count).tolist() == expected
    assert table.look_up(np.arange(first, first + count)).tolist() == expected


def test_monotone_is_the_running_least_and_keeps_the_raw_one() -> None:
    table = CostTable([1, 2, 3, 5, 8], steps_per_s=[10.0, 7.0, 9.0, 7.5, 6.0], max_batch_tokens=12)
    lowered = table.monotone()
    assert lowered.steps_per_s.tolist() == [10.0, 7.0, 7.0, 7.0, 6.0]
    assert lowered.batch_tokens.tolist() == [1, 2, 3, 5, 8]
    assert lowered.max_batch_tokens == 12
    assert table.steps_per_s.tolist() == [10.0, 7.0, 9.0, 7.5, 6.0]


def test_a_table_is_a_copy_and_cannot_be_written() -> None:
    rates = np.array([3.0, 2.0])
    table = CostTable([1, 2], steps_per_s=rates)
    rates[0] = 99.0
    assert table.look_up(1) == 3.0
    with pytest.raises(ValueError, match="read-only"):
        table.steps_per_s[0] = 99.0
    with pytest.raises(ValueError, match="read-only"):
        table.batch_tokens[0] = 5


@pytest.mark.parametrize(
    ("probes", "rates", "message"),
    [
        ([], [], "got 0 points, 0 rates, expected as many of each, at least one"),
        ([1, 2], [1.0], "got 2 points, 1 rates"),
        ([2, 2], [1.0, 1.0], "sample_batch_tokens is unfit: got 2, expected strictly increasing"),
        ([1, 3, 2], [1.0, 1.0, 1.0], "got 2, expected strictly increasing"),
        ([0, 1], [1.0, 1.0], "sample_batch_tokens is unfit: got 0, expected a whole number >= 1"),
        ([1, 2.5], [1.0, 1.0], "got 2.5, expected a whole number"),
        ([1, math.nan], [1.0, 1.0], "got nan, expected a whole number"),
        ([1, math.inf], [1.0, 1.0], "got inf, expected a whole number"),
        ([1, 2], [1.0, 0.0], "sample_steps_per_sec is unfit: got 0, expected a finite rate > 0"),
        ([1, 2], [-1.0, 1.0], "got -1, expected a finite rate"),
        ([1, 2], [1.0, math.nan], "got nan, expected a finite rate"),
        ([1, 2], [1.0, math.inf], "got inf, expected a finite rate"),
        (["1", "2"], [1.0, 1.0], "sample_batch_tokens must be a list of numbers"),
        ([True], [1.0], "sample_batch_tokens must be a list of numbers"),
        ([1], [None], "sample_steps_per_sec must be a list of numbers"),
        ([[1], [2, 3]], [1.0, 1.0], "sample_batch_tokens must be a list of numbers"),
        (3, 1.0, "sample_batch_tokens must be a list of numbers"),
    ],
)
def test_what_a_table_refuses(probes: object, rates: object, message: str) -> None:
    with pytest.raises(DraftsmithError) as caught:
        CostTable(probes, steps_per_s=rates, where="sps.json")  # type: ignore[arg-type]
    assert message in str(caught.value)
    assert "(sps.json)" in str(caught.value)


def test_the_maximum_is_the_last_point_or_more() -> None:
    assert TABLE.max_batch_tokens == 9
    assert CostTable([2, 4], steps_per_s=[1.0, 1.0], max_batch_tokens=4).max_batch_tokens == 4
    with pytest.raises(DraftsmithError, match="max_batch_tokens lies below the last point: got 3, expected >= 4"):
        CostTable([2, 4], steps_per_s=[1.0, 1.0], max_batch_tokens=3)


def test_sidecar_is_sglangs_form() -> None:
    table = CostTable([8, 16], steps_per_s=[50.5, 40.0], max_batch_tokens=64)
    expected = {"sample_batch_tokens": [8, 16], "sample_steps_per_sec": [50.5, 40.0], "max_batch_tokens": 64}
    assert json.loads(json.dumps(table.to_sidecar())) == expected


def test_json_from_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "sps.json"
    body = {"sample_batch_tokens": [8, 16], "sample_steps_per_sec": [50, 40.25], "machine": "8 accelerators"}
    path.write_text(json.dumps(body | {"max_batch_tokens": 512}))
    table = read_cost_table(path)
    assert table.batch_tokens.tolist() == [8, 16]
    assert table.steps_per_s.tolist() == [50.0, 40.25]
    assert table.max_batch_tokens == 512
    path.write_text(json.dumps(body))
    assert read_cost_table(path).max_batch_tokens == 16


def test_csv_from_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "sps.csv"
    path.write_text("\ufeffsteps_per_s, note, batch_tokens\n50.5,warm,8\n40,,16\n", encoding="utf-8")
    table = read_cost_table(path)
    assert table.batch_tokens.tolist() == [8, 16]
    assert table.steps_per_s.tolist() == [50.5, 40.0]
    assert table.max_batch_tokens == 16


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "[1, 2]", "not an SPS table: got list, expected an object"),
        ("a.json", "{", "the SPS table is not JSON"),
        ("a.json", '{"bias": 1, "sample_batch_tokens": [1]}', "not an SPS table: got no sample_steps_per_sec"),
        ("a.json", "{}", "got no sample_batch_tokens and no sample_steps_per_sec"),
        ("a.json", '{"sample_batch_tokens": [1], "sample_steps_per_sec": "fast"}', "must be a list of numbers"),
        ("a.json", '{"sample_batch_tokens": [1], "sample_steps_per_sec": [1], "max_batch_tokens": true}', "got True"),
        ("a.json", '{"sample_batch_tokens": [1], "sample_steps_per_sec": [1], "max_batch_tokens": 2.5}', "got 2.5"),
        ("a.json", '{"sample_batch_tokens": [2, 1], "sample_steps_per_sec": [1, 1]}', "strictly increasing"),
        ("a.csv", "batch_tokens,sps\n1,2\n", "got columns ['batch_tokens', 'sps'], expected also steps_per_s"),
        ("a.csv", "", "got columns [], expected also batch_tokens, steps_per_s"),
        ("a.csv", "batch_tokens,steps_per_s\n1,2\n3\n", "a cell of steps_per_s is no number: got None"),
        ("a.csv", "batch_tokens,steps_per_s\n1,fast\n", "a cell of steps_per_s is no number: got 'fast'"),
        ("a.csv", "batch_tokens,steps_per_s\n", "got 0 points, 0 rates"),
        ("a.csv", "batch_tokens,steps_per_s\n1,2\n1,3\n", "got 1, expected strictly increasing"),
    ],
)
def test_files_that_are_no_table(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(DraftsmithError) as caught:
        read_cost_table(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DraftsmithError, match=r"cannot be read: got No such file.*missing\.json"):
        read_cost_table(tmp_path / "missing.json")
    with pytest.raises(DraftsmithError, match=r"unknown form: got a\.txt, expected a \.json or \.csv file"):
        read_cost_table(tmp_path / "a.txt")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x80")
    with pytest.raises(DraftsmithError, match=r"is not text.*binary\.json"):
        read_cost_table(tmp_path / "binary.json")


def test_fixed_seconds_lengthen_every_step() -> None:
    table = CostTable([1, 4], steps_per_s=[4.0, 2.0], max_batch_tokens=9)
    longer = table.with_fixed(0.25)
    assert longer.steps_per_s.tolist() == [2.0, pytest.approx(4 / 3)]
    assert (longer.batch_tokens.tolist(), longer.max_batch_tokens) == ([1, 4], 9)
    for seconds in (-1.0, float("nan"), float("inf")):
        with pytest.raises(DraftsmithError, match="fixed seconds of a step"):
            table.with_fixed(seconds)
