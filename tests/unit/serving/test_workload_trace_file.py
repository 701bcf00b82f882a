"""Traces read from files: our columns and those of public traces, and what is said of lines that cannot be read."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from draftsmith.decoding.policies import verify_all
from draftsmith.errors import DraftsmithError
from draftsmith.serving.cost_table import CostTable
from draftsmith.serving.recorded import plain_rounds
from draftsmith.serving.simulator import Limits, simulate
from draftsmith.serving.step_costs import StepCosts
from draftsmith.serving.trace_file import Trace, read_trace

ROWS = [
    {"arrival_s": 0.5, "prompt_tokens": 100, "output_tokens": 20, "domain": "math", "deadline_s": 4.5},
    {"arrival_s": 2.25, "prompt_tokens": 7, "output_tokens": 1, "domain": "chat"},
    {"arrival_s": 1.0, "prompt_tokens": 30, "output_tokens": 5},
]


def write(folder: Path, text: str, *, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def as_csv(rows: list[dict[str, object]]) -> str:
    columns = list(ROWS[0])
    return (
        "\n".join([",".join(columns), *(",".join(str(row.get(name, "")) for name in columns) for row in rows)]) + "\n"
    )


def assert_rows(found: Trace) -> None:
    requests = found.requests
    assert requests.arrival_s.tolist() == [0.5, 1.0, 2.25]
    assert requests.prompt_tokens.tolist() == [100, 30, 7]
    assert requests.output_tokens.tolist() == [20, 5, 1]
    assert [requests.domains[index] for index in requests.domain] == ["math", "code", "chat"]
    assert requests.deadline_s.tolist() == [4.5, np.inf, np.inf]
    assert found.num_left_out == 0


def test_csv(tmp_path: Path) -> None:
    assert_rows(read_trace(write(tmp_path, as_csv(ROWS)), domain="code"))


def test_csv_with_other_columns_spaces_and_a_mark_of_byte_order(tmp_path: Path) -> None:
    text = "\ufeffuser, arrival_s, output_tokens, prompt_tokens\nu1, 0.5, 20, 100\nu2, 3, 1.0, 7\n"
    found = read_trace(write(tmp_path, text), domain="chat").requests
    assert found.arrival_s.tolist() == [0.5, 3.0]
    assert (found.prompt_tokens.tolist(), found.output_tokens.tolist()) == ([100, 7], [20, 1])


def test_json_lines(tmp_path: Path) -> None:
    text = "\n\n".join(json.dumps(row) for row in ROWS)
    assert_rows(read_trace(write(tmp_path, text, name="trace.jsonl"), domain="code"))
    with_null = json.dumps({**ROWS[1], "deadline_s": None, "domain": None})
    found = read_trace(write(tmp_path, with_null, name="trace.jsonl"), domain="code").requests
    assert (found.domains, found.deadline_s.tolist()) == (("code",), [np.inf])


def test_requests_of_one_second_keep_their_order(tmp_path: Path) -> None:
    text = "arrival_s,prompt_tokens,output_tokens\n1,1,1\n0,2,1\n1,3,1\n0,4,1\n"
    assert read_trace(write(tmp_path, text), domain="chat").requests.prompt_tokens.tolist() == [2, 4, 1, 3]


def test_azure_2023(tmp_path: Path) -> None:
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9805900,396,109\n"
        "2023-11-17 18:15:46.6805900,879,55\n"
    )
    found = read_trace(write(tmp_path, text), domain="chat")
    assert found.requests.arrival_s == pytest.approx([0.0, 4.3, 86_400.0], abs=1e-6)
    assert found.requests.prompt_tokens.tolist() == [374, 396, 879]
    assert found.requests.output_tokens.tolist() == [44, 109, 55]
    assert found.num_left_out == 0


def test_dates_are_not_the_readers_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the night in which clocks are put back in New York, three hours are three hours."""
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-05 00:30:00,1,1\n2023-11-05 03:30:00,1,1\n"
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        found = read_trace(write(tmp_path, text), domain="chat").requests
    finally:
        monkeypatch.undo()
        time.tzset()
    assert found.arrival_s.tolist() == [0.0, 3 * 3_600.0]


def test_azure_2024_names_its_offset(tmp_path: Path) -> None:
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-12 00:00:01.500000+00:00,374,44\n"
        "2024-05-12 02:00:00+02:00,396,109\n"
    )
    found = read_trace(write(tmp_path, text), domain="code").requests
    assert found.arrival_s.tolist() == [0.0, 1.5]
    assert found.prompt_tokens.tolist() == [396, 374]
    assert found.domains == ("code",)


def test_burstgpt_and_its_failures(tmp_path: Path) -> None:
    text = (
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n"
        "45,ChatGPT,1087,230,1317,Conversation log\n"
        "118,GPT-4,417,0,417,Conversation log\n"
        "118.5,GPT-4,0,3,3,API log\n"
        "120,GPT-4,1360,276,1636,API log\n"
    )
    found = read_trace(write(tmp_path, text), domain="chat")
    assert found.requests.arrival_s.tolist() == [0.0, 40.0, 115.0]
    assert found.requests.prompt_tokens.tolist() == [472, 1087, 1360]
    assert found.requests.output_tokens.tolist() == [18, 230, 276]
    assert found.num_left_out == 2


def test_a_replay_is_its_file(tmp_path: Path) -> None:
    """What arrives in the simulation, and what is written, is what the file says."""
    requests = read_trace(write(tmp_path, as_csv(ROWS)), domain="code").requests
    found = simulate(
        requests, rounds=plain_rounds(["chat", "code", "math"]), policy=verify_all,
        costs=StepCosts(CostTable([1], steps_per_s=[10.0])), limits=Limits(4),
    )  # fmt: skip
    assert found.arrival_s.tolist() == [0.5, 1.0, 2.25]
    assert found.num_rounds.tolist() == [19, 4, 0]


OWN = "arrival_s,prompt_tokens,output_tokens,domain,deadline_s\n0,1,1,,\n"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.csv", OWN + "x,1,1,,\n", "got 'x', expected a finite number .*t.csv, line 3, column arrival_s"),
        ("t.csv", OWN + "-1,1,1,,\n", "got -1.0, expected seconds >= 0 .*line 3, column arrival_s"),
        ("t.csv", OWN + "inf,1,1,,\n", "got 'inf', expected a finite number .*line 3, column arrival_s"),
        ("t.csv", OWN + "0,0,1,,\n", "got '0', expected a whole number >= 1 .*line 3, column prompt_tokens"),
        ("t.csv", OWN + "0,1,1,,\n0,1,0,,\n", "got '0', expected a whole number >= 1 .*line 4, column output_tokens"),
        ("t.csv", OWN + "0,1,2.5,,\n", "got '2.5', expected a whole number >= 1 .*line 3, column output_tokens"),
        ("t.csv", OWN + "0,1\n", "got None, expected a finite number .*line 3, column output_tokens"),
        ("t.csv", OWN + "0,1,1,,0\n", "got '0', expected seconds > 0, or nothing .*line 3, column deadline_s"),
        ("t.csv", OWN + "0,1,1,,soon\n", "got 'soon', expected a finite number .*line 3, column deadline_s"),
        ("t.csv", "arrival_s,prompt_tokens\n0,1\n", "not a trace: got columns arrival_s, prompt_tokens, expected"),
        ("t.csv", "arrival_s,prompt_tokens,output_tokens\n", "a trace without requests .*t.csv"),
        ("t.csv", "", "a trace without requests"),
        ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,1\n",
         "got 'noon', expected a date and time .*line 2, column TIMESTAMP"),
        ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,-1,1\n",
         "got '-1', expected a whole number >= 0 .*line 2, column ContextTokens"),
        ("t.csv", "Timestamp,Request tokens,Response tokens\n1,5,0\n", "got 1 rows without tokens"),
        ("t.jsonl", '{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1}\n\n{"arrival_s": 0,\n',
         "a line of the trace is not JSON: .*t.jsonl, line 3, column"),
        ("t.jsonl", "[1, 2]\n", "got list, expected an object .*line 1"),
        ("t.jsonl", '{"arrival_s": true, "prompt_tokens": 1, "output_tokens": 1}\n',
         "got True, expected a finite number .*line 1, column arrival_s"),
        ("t.jsonl", '{"arrival_s": 0, "prompt_tokens": [1], "output_tokens": 1}\n',
         r"got \[1\], expected a finite number .*line 1, column prompt_tokens"),
        ("t.jsonl", '{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1, "domain": 5}\n',
         "got 5, expected a name .*line 1, column domain"),
        ("t.txt", "", "a trace of unknown form: got t.txt, expected a .csv or .jsonl file"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named_by_line_and_column(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(DraftsmithError, match=message):
        read_trace(write(tmp_path, text, name=name), domain="chat")


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(DraftsmithError, match="the trace cannot be read: got No such file"):
        read_trace(tmp_path / "none.csv", domain="chat")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DraftsmithError, match="the trace is not text"):
        read_trace(tmp_path / "binary.csv", domain="chat")
