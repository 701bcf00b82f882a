"""Tables like the paper's Table 1, from evaluations made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from draftsmith.evaluation.grid import Grid, markdown, number, percent, with_interval
from draftsmith.evaluation.tables import (
    benchmark_columns,
    caveats,
    four_lengths_grid,
    length_grid,
    output_position_grid,
    position_grid,
    run_grid,
    settings_lines,
    speed_grid,
    threshold_grid,
    turn_grid,
)
from tests.unit.evaluation.evaluations import (
    body_of,
    body_of_lengths,
    make_decoded,
    make_facts,
    make_point,
)

# Eight prompts of one round each. `good` accepts one token more than `poor` on every prompt of gsm8k and humaneval; on
# mt_bench it is better on average, by chance.
HARD = [[0], [1], [0], [1], [0], [1], [0], [1]]
EASY = [[1], [2], [1], [2], [1], [2], [1], [2]]
GOOD = {"mt_bench": [[2], [0], [1], [1], [2], [0], [1], [1]], "humaneval": EASY, "gsm8k": EASY}
POOR = {"mt_bench": [[0], [2], [1], [1], [1], [0], [1], [1]], "humaneval": HARD, "gsm8k": HARD}


@pytest.fixture(scope="module")
def bodies() -> list[dict[str, Any]]:
    return [body_of_lengths("poor", POOR, temperatures=(0.0, 1.0)), body_of_lengths("good", GOOD)]


def test_columns_are_in_the_papers_order(bodies: list[dict[str, Any]]) -> None:
    assert benchmark_columns(bodies, temperature=0.0) == {"gsm8k": "math", "humaneval": "code", "mt_bench": "chat"}
    shuffled = [{"rows": [{"benchmark": name, "domain": domain, "temperature": 1.0} for name, domain in (
        ("own", "math"), ("alpaca", "chat"), ("humaneval", "code"), ("mt_bench", "chat"), ("mbpp", "code"),
        ("aime25", "math"), ("gsm8k", "math"),
    )]}]  # fmt: skip
    assert list(benchmark_columns(shuffled, temperature=1.0)) == [
        "gsm8k", "aime25", "own", "mbpp", "humaneval", "mt_bench", "alpaca",
    ]  # fmt: skip


def test_the_best_is_bold_where_the_pairs_say_so(bodies: list[dict[str, Any]]) -> None:
    grid = length_grid(bodies, temperature=0.0)
    assert grid.headers == (
        "key", "target", "K", "math: gsm8k", "code: humaneval", "chat: mt_bench", "average",
    )  # fmt: skip
    assert grid.rows == (
        ("poor", "tiny", "2", "1.50", "1.50", "1.88", "1.62"),
        ("good", "tiny", "2", "**2.50**", "**2.50**", "2.00", "**2.33**"),
    )
    bare = length_grid(bodies, temperature=0.0, bonus="without")
    assert bare.rows[1][3:] == ("**1.50**", "**1.50**", "1.00", "**1.33**")


def test_intervals_stand_behind_values(bodies: list[dict[str, Any]]) -> None:
    cells = length_grid(bodies, temperature=0.0, cells="intervals").rows[0]
    low, high = bodies[0]["rows"][2]["accepted_length_interval"]
    assert cells[3] == f"1.50 [{low:.2f}, {high:.2f}]"
    assert low < 1.5 < high


def test_the_highest_of_three_is_judged_against_the_second(bodies: list[dict[str, Any]]) -> None:
    twin = {**bodies[1], "key": "twin"}
    rows = length_grid([*bodies, twin], temperature=0.0).rows
    assert [row[3] for row in rows] == ["1.50", "2.50", "2.50"]


def test_keys_of_other_targets_or_settings_are_not_judged(bodies: list[dict[str, Any]]) -> None:
    poor, good = bodies
    for change in ({"target": "large"}, {"max_new_tokens": 4}):
        rows = length_grid([poor, {**good, **change}], temperature=0.0).rows
        assert rows[1][3] == "2.50", change
    third = {**poor, "key": "third", "target": "large"}
    rows = length_grid([poor, {**good, "target": "large"}, third], temperature=0.0).rows
    assert [row[3] for row in rows] == ["1.50", "**2.50**", "1.50"]


def test_other_prompts_are_not_judged(bodies: list[dict[str, Any]]) -> None:
    poor, good = bodies
    rows = [
        {**row, "prompts": {**row["prompts"], "ids": [f"other/{name}" for name in row["prompts"]["ids"]]}}
        for row in good["rows"]
    ]
    assert length_grid([poor, {**good, "rows": rows}], temperature=0.0).rows[1][3] == "2.50"


def test_a_key_without_a_benchmark_says_so(bodies: list[dict[str, Any]]) -> None:
    part = body_of_lengths("part", {"gsm8k": EASY})
    rows = length_grid([bodies[0], part], temperature=0.0).rows
    assert rows[1] == ("part", "tiny", "2", "**2.50**", "-", "-", "2.50 (1 of 3)")
    assert [row[0] for row in length_grid(bodies, temperature=1.0).rows] == ["poor"]


def test_speed_rows_are_sorted() -> None:
    body = body_of("k", [make_decoded("gsm8k", [[1]])], speed=[make_point(4, tokens_per_s=30.0), make_point(1)])
    assert speed_grid([body]).rows == (
        ("k", "0", "1", "60.0", "40.0", "1.50x", "10.00", "25.00", "15.00", "30.0 %"),
        ("k", "0", "4", "30.0", "40.0", "0.75x", "10.00", "25.00", "15.00", "30.0 %"),
    )


def test_what_lies_behind(bodies: list[dict[str, Any]]) -> None:
    assert run_grid([bodies[0]]).rows[0] == (
        "poor", "mt_bench", "0", "8", "8", "0.0 %", "0.0 %", "100.0 %", "16", "23.0", "11.5", "2.00x",
    )  # fmt: skip
    blind = body_of("k", [make_decoded("gsm8k", [[1]], temperature=1.0, wall_s=None, plain_wall_s=None)])
    assert run_grid([blind]).rows[0][7:] == ("-", "16", "-", "-", "-")


def test_positions_are_padded_to_the_longest_block(bodies: list[dict[str, Any]]) -> None:
    single = body_of_lengths("single", {"gsm8k": [[1], [0]]}, block_size=1)
    grid = position_grid([bodies[1], single])
    assert grid.headers[-2:] == ("1", "2")
    assert grid.rows[2] == ("good", "gsm8k", "0", "8", "1.000", "0.500")
    assert grid.rows[3] == ("single", "gsm8k", "0", "2", "0.500", "-")


def test_four_lengths_with_domains_of_more_than_one_benchmark() -> None:
    lengths = {"gsm8k": [[2, 2], [0]], "math500": [[1], [1]], "humaneval": [[0], [0]]}
    grid = four_lengths_grid(body_of_lengths("k", lengths))
    assert [row[0] for row in grid.rows] == ["gsm8k", "math500", "humaneval", "all math", "average"]
    # 7 tokens in 3 rounds; by prompt 3 and 1.
    assert grid.rows[0][1:] == (
        "0", "3", "2.33 [1.00, 3.00]", "1.33 [0.00, 2.00]", "2.00 [1.00, 3.00]", "1.00 [0.00, 2.00]",
    )  # fmt: skip
    assert grid.rows[3][3].startswith("2.17 [")
    assert grid.rows[4][3].startswith("1.78 [")


def test_turns_of_benchmarks_that_have_more_than_one(bodies: list[dict[str, Any]]) -> None:
    assert turn_grid(bodies[0]).rows == ()
    row = bodies[0]["rows"][0]
    second = {**row["turns"][0], "turn": 1, "num_rounds": 0, "accepted_length": None, "accepted_length_interval": None}
    body = {**bodies[0], "rows": [{**row, "turns": [*row["turns"], second]}]}
    assert [(cells[0], cells[2], cells[3][:4]) for cells in turn_grid(body).rows] == [
        ("mt_bench, turn 1", "8", "1.88"), ("mt_bench, turn 2", "0", "-"),
    ]  # fmt: skip


def test_output_positions_and_thresholds(bodies: list[dict[str, Any]]) -> None:
    assert [row[:3] for row in output_position_grid(bodies[0]).rows] == [("0-15", "0", "24"), ("0-15", "1", "24")]
    sweep = [
        {"temperature": 1.0, "threshold": step / 20, "num_rounds": 8, "verified": 12, "accepted": 10, "rejected": 2,
         "acceptance_rate": 10 / 12, "accepted_length": 2.25}
        for step in range(20)
    ]  # fmt: skip
    grid = threshold_grid({**bodies[0], "thresholds": sweep})
    assert [row[0] for row in grid.rows] == [f"0.{tenth}0" for tenth in range(10)]
    assert grid.rows[3] == ("0.30", "1", "1.50", "1.25", "0.25", "83.3 %", "2.25")


def test_settings_are_told_once_for_those_alike(bodies: list[dict[str, Any]]) -> None:
    text = (
        "target tiny in float32, at most 96 new tokens an answer, batch size 16, seed 6; prompts: gsm8k 8 of the "
        "paper's 500 (cap 4), humaneval 8 of the paper's 500 (cap 4), mt_bench 8 of the paper's 500 (cap 4)."
    )
    assert settings_lines(bodies) == [text]
    other = {**bodies[1], "dtype": "bfloat16"}
    assert settings_lines([bodies[0], other]) == [f"poor: {text}", f"good: {text.replace('float32', 'bfloat16')}"]
    unknown = body_of("k", [make_decoded("gsm8k", [[1]])], facts=[make_facts("gsm8k", reference_count=None)])
    assert settings_lines([unknown])[0].endswith("prompts: gsm8k 1 (cap 4).")


def test_caveats() -> None:
    facts = [make_facts("gsm8k", replaced_by="own/gsm8k.jsonl", contaminated=["gsm8k/0", "gsm8k/2"]),
             make_facts("humaneval"), make_facts("mt_bench")]  # fmt: skip
    decoded = [make_decoded("gsm8k", [[1]] * 5), make_decoded("humaneval", [[1]] * 4 + [[]])]
    body = body_of("k", decoded, facts=facts)
    assert caveats([body, body]) == [
        "gsm8k is read from own/gsm8k.jsonl, not from the paper's source.",
        "gsm8k: 2 of 5 prompts are equal or near to a training prompt.",
        "humaneval: intervals over fewer than 5 prompts are narrower than their 95 %.",
    ]


def test_tables_line_up() -> None:
    text = markdown(Grid(("na\nme", "n"), (("a", "1.25"), ("longer", "-"))))
    assert text == "| na me  |    n |\n|--------|-----:|\n| a      | 1.25 |\n| longer |    - |\n"


def test_cells() -> None:
    assert (number(None, digits=1), number(1.25, digits=1), percent(0.1234), percent(None)) == (
        "-", "1.2", "12.3 %", "-",
    )  # fmt: skip
    assert with_interval(1.5, [1.0, 2.25]) == "1.50 [1.00, 2.25]"
    assert with_interval(1.5, None, digits=3) == "1.500"
    assert with_interval(None, None) == "-"
