"""Cells of an evaluation: which prompts are in which, their Parquet form, and what is refused on reading."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftsmith.decoding.rounds import Generation, Round
from draftsmith.errors import CacheError
from draftsmith.evaluation.benchmarks import BenchmarkPrompt
from draftsmith.evaluation.cells import (
    GENERATION_SCHEMA,
    Cell,
    DecodedCell,
    decode_cell,
    encode_cell,
    join_cells,
    plan_cells,
)


def prompts(name: str, count: int, *, num_turns: int = 1) -> tuple[BenchmarkPrompt, ...]:
    domain = "math" if name == "gsm8k" else "chat"
    turns = [tuple(f"{name} {row} turn {turn}" for turn in range(num_turns)) for row in range(count)]
    return tuple(BenchmarkPrompt(f"{name}/{row}", domain, turns[row]) for row in range(count))


CELL = Cell("mt_bench", "chat", 1.0, 0, prompts("mt_bench", 2, num_turns=2))
LOGITS = tuple(float(np.float32(value)) for value in (0.1, -3.7e-5, 12345.678))
# By hand: a whole block and its bonus token, a block rejected at its second token, one that ends on its first.
ROUNDS = (
    Round(20, 3, 3, 4, False, False, LOGITS),
    Round(24, 3, 1, 2, False, False, LOGITS, rejected_token=319),
    Round(26, 3, 1, 1, True, False, LOGITS),
)
FIRST = Generation(
    "mt_bench/0/t0", (5, 6, 7, 8, 9, 10, 11, 3), (False, True, True, True, False, True, False, True), "end_of_text",
    ROUNDS,
)  # fmt: skip
CUT = Round(9, 3, 3, 2, False, True)
SPECULATIVE = DecodedCell(
    (
        FIRST,
        Generation("mt_bench/0/t1", (7,), (False,), "end_of_text", ()),
        Generation("mt_bench/1/t0", (7, 8, 9), (False, True, True), "length", (CUT,)),
        Generation("mt_bench/1/t1", (4, 2), (False, False), "length", (Round(40, 3, 0, 1, False, False, LOGITS, 0),)),
    ),
    wall_s=1.25,
    batch_size=16,
    machine="2 x some processor",
)
PLAIN = replace(
    SPECULATIVE,
    generations=tuple(
        replace(item, rounds=(), drafted=(False,) * len(item.token_ids)) for item in SPECULATIVE.generations
    ),
)


def test_cells_are_consecutive_prompts_of_one_benchmark_at_one_temperature() -> None:
    found = plan_cells(
        {"gsm8k": prompts("gsm8k", 5), "mt_bench": prompts("mt_bench", 2, num_turns=2)},
        temperatures=(0.0, 1.0),
        cell_prompts=2,
    )
    told = [
        (cell.temperature, cell.benchmark, cell.domain, cell.index, [item.id for item in cell.prompts])
        for cell in found
    ]
    once = [
        ("gsm8k", "math", 0, ["gsm8k/0", "gsm8k/1"]),
        ("gsm8k", "math", 1, ["gsm8k/2", "gsm8k/3"]),
        ("gsm8k", "math", 2, ["gsm8k/4"]),
        ("mt_bench", "chat", 0, ["mt_bench/0", "mt_bench/1"]),
    ]
    assert told == [(temperature, *rest) for temperature in (0.0, 1.0) for rest in once]
    assert found[3].request_ids == ("mt_bench/0/t0", "mt_bench/0/t1", "mt_bench/1/t0", "mt_bench/1/t1")


def test_a_name_says_what_is_in_the_cell_and_nothing_else() -> None:
    names = {cell.name for cell in plan_cells({"gsm8k": prompts("gsm8k", 5)}, temperatures=(0.0, 1.0), cell_prompts=2)}
    assert len(names) == 6
    assert all(name.startswith(("gsm8k/t0.0/000", "gsm8k/t1.0/000")) and name.endswith(".parquet") for name in names)
    # More benchmarks, other temperatures and more prompts behind leave whole cells where they are.
    more = {
        cell.name
        for cell in plan_cells(
            {"mt_bench": prompts("mt_bench", 3), "gsm8k": prompts("gsm8k", 7)},
            temperatures=(1.0, 0.5),
            cell_prompts=2,
        )
    }
    assert len(names & more) == 2
    first = CELL.prompts[0]
    for changed in (replace(first, id="mt_bench/7"), replace(first, turns=("other", first.turns[1]))):
        other = replace(CELL, prompts=(changed, CELL.prompts[1]))
        assert other.name != CELL.name
        assert other.name.partition("-")[0] == CELL.name.partition("-")[0]
    # The same characters, cut into turns elsewhere.
    one, two = (replace(CELL, prompts=(BenchmarkPrompt("x", "chat", turns),)) for turns in (("a", "b"), ("ab",)))
    assert one.name != two.name
    assert replace(CELL, temperature=0.1 + 0.2).name != replace(CELL, temperature=0.3).name


@pytest.mark.parametrize(("mode", "decoded"), [("speculative", SPECULATIVE), ("plain", PLAIN)])
def test_what_is_read_is_what_was_written(mode: Any, decoded: DecodedCell) -> None:
    assert decode_cell(encode_cell(decoded, CELL, mode=mode), CELL, mode=mode, where="here") == decoded


def test_random_answers_survive() -> None:
    rng = np.random.default_rng(3)
    cell = replace(CELL, prompts=prompts("mt_bench", 40))
    generations = []
    for name in cell.request_ids:
        rounds, tokens, drafted = [], [int(rng.integers(1 << 18))], [False]
        for _ in range(rng.integers(0, 9)):
            accepted = int(rng.integers(0, 8))
            logits = tuple(rng.normal(size=7).astype(np.float32).astype(float).tolist())
            rejected = int(rng.integers(1 << 18)) if accepted < 7 else None
            rounds.append(Round(len(tokens) + 100, 7, accepted, accepted + 1, False, False, logits, rejected))
            tokens += rng.integers(1 << 18, size=accepted + 1).tolist()
            drafted += [True] * accepted + [False]
        generations.append(Generation(name, tuple(tokens), tuple(drafted), "length", tuple(rounds)))
    decoded = DecodedCell(tuple(generations), 3.5, 4, "m")
    data = encode_cell(decoded, cell, mode="speculative")
    assert decode_cell(data, cell, mode="speculative", where="here") == decoded
    assert encode_cell(decoded, cell, mode="speculative") == data


def test_any_parquet_reader_reads_it() -> None:
    table = pq.read_table(io.BytesIO(encode_cell(SPECULATIVE, CELL, mode="speculative")))
    rows = table.to_pylist()
    assert [row["request_id"] for row in rows] == list(CELL.request_ids)
    assert rows[0]["token_ids"] == [5, 6, 7, 8, 9, 10, 11, 3]
    assert rows[0]["rounds"][1] == {
        "anchor_position": 24, "verified": 3, "accepted": 1, "committed": 2, "ended": False, "cut": False,
        "confidence_logits": list(LOGITS), "rejected_token": 319,
    }  # fmt: skip
    assert rows[2]["rounds"][0]["rejected_token"] is None
    assert table.schema.field("rounds").type.value_type.field("confidence_logits").type.value_type == pa.float32()
    told = json.loads(table.schema.metadata[b"draftsmith.cell"])
    assert told["how"] == {"wall_s": 1.25, "batch_size": 16, "machine": "2 x some processor"}
    assert told["cell"]["mode"] == "speculative"


def test_a_round_is_kept_with_all_its_fields() -> None:
    kept = GENERATION_SCHEMA.field("rounds").type.value_type
    assert [kept.field(index).name for index in range(kept.num_fields)] == [field.name for field in fields(Round)]
    assert GENERATION_SCHEMA.names == [field.name for field in fields(Generation)]


def damaged(data: bytes, cell: Cell = CELL, mode: Any = "speculative") -> str:
    with pytest.raises(CacheError) as caught:
        decode_cell(data, cell, mode=mode, where="delete the object")
    message = str(caught.value)
    assert message.startswith("decoded answers in the store are damaged: got ")
    assert message.endswith("(delete the object)")
    return message


def test_damaged_bytes_are_refused() -> None:
    data = encode_cell(SPECULATIVE, CELL, mode="speculative")
    for length in (0, 3, 4, len(data) // 2, len(data) - 1):
        assert f"{length} bytes" in damaged(data[:length])
    # No bit can turn so that other answers, another wall time or another machine are read.
    seen = 0
    for place in range(0, len(data), 7):
        turned = bytearray(data)
        turned[place] ^= 1 << place % 8
        try:
            assert decode_cell(bytes(turned), CELL, mode="speculative", where="here") == SPECULATIVE
        except CacheError:
            seen += 1
    assert seen > len(data) / 7 / 3


def test_another_table_is_refused() -> None:
    sink = io.BytesIO()
    pq.write_table(pa.table({"request_id": ["a"]}), sink)
    assert "got columns request_id, expected request_id, token_ids, drafted, finish, rounds" in damaged(sink.getvalue())
    sink = io.BytesIO()
    pq.write_table(GENERATION_SCHEMA.empty_table(), sink)
    assert "metadata ''" in damaged(sink.getvalue())


@pytest.mark.parametrize(
    "change",
    [{"benchmark": "gsm8k"}, {"temperature": 0.0}, {"index": 1}],
)
def test_the_answers_of_another_cell_are_refused(change: dict[str, Any]) -> None:
    data = encode_cell(SPECULATIVE, replace(CELL, **change), mode="speculative")
    message = damaged(data)
    assert str(next(iter(change.values()))) in message.partition("expected")[0]


def test_the_answers_of_the_other_mode_are_refused() -> None:
    assert "'mode': 'plain'" in damaged(encode_cell(PLAIN, CELL, mode="plain"))
    assert "'mode': 'speculative'" in damaged(encode_cell(SPECULATIVE, CELL, mode="speculative"), mode="plain")
    assert "mt_bench/0/t0: rounds in plain decoding" in damaged(
        encode_cell(SPECULATIVE, CELL, mode="plain"), mode="plain"
    )


def test_exactly_the_planned_answers_are_taken() -> None:
    def written(generations: tuple[Generation, ...]) -> bytes:
        return encode_cell(replace(SPECULATIVE, generations=generations), CELL, mode="speculative")

    first, *rest = SPECULATIVE.generations
    assert "got 3 answers, 1 of them differing, first mt_bench/0/t0" in damaged(written(tuple(rest)))
    assert "got 4 answers in another order" in damaged(written((*rest, first)))
    assert "got 5 answers in another order, expected the 4 planned ones" in damaged(written((first, first, *rest)))
    strange = replace(first, request_id="mt_bench/9/t0")
    assert "2 of them differing, first mt_bench/0/t0" in damaged(written((strange, *rest)))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda item: replace(item, token_ids=item.token_ids[:-1], drafted=item.drafted[:-1]),
            "7 tokens, but 8 by its",
        ),
        (lambda item: replace(item, rounds=item.rounds[:-1]), "8 tokens, but 7 by its rounds"),
        (lambda item: replace(item, drafted=item.drafted[:-1]), "8 tokens, 7 marks"),
        (lambda item: replace(item, finish="stopped"), "finish 'stopped'"),
        (lambda item: replace(item, token_ids=(), drafted=(), rounds=()), "0 tokens"),
    ],
)
def test_answers_that_cannot_be_are_refused(change: Callable[[Generation], Generation], told: str) -> None:
    generations = (change(FIRST), *SPECULATIVE.generations[1:])
    data = encode_cell(replace(SPECULATIVE, generations=generations), CELL, mode="speculative")
    message = damaged(data)
    assert "mt_bench/0/t0" in message
    assert told in message


def joined(*, batch_size: int = 16, machine: str = "2 x some processor") -> tuple[Any, Any]:
    """Wall times of two cells that were decoded at 16 on that machine."""
    cells = plan_cells({"mt_bench": prompts("mt_bench", 4, num_turns=2)}, temperatures=(1.0,), cell_prompts=2)
    plain = [replace(PLAIN, wall_s=2.0), replace(PLAIN, wall_s=3.0)]
    [found] = join_cells(plain, [SPECULATIVE] * 2, cells=cells, batch_size=batch_size, machine=machine)
    assert found.batch_size == batch_size
    return found.wall_s, found.plain_wall_s


def test_wall_times_add_up_where_they_are_of_this_machine_and_batch_size() -> None:
    assert joined() == (2.5, 5.0)
    assert joined(machine="another") == joined(batch_size=8) == (None, None)
    cells = plan_cells({"mt_bench": prompts("mt_bench", 4, num_turns=2)}, temperatures=(1.0,), cell_prompts=2)
    for change in ({"machine": "another"}, {"batch_size": 8}):
        for plain, speculative in (((PLAIN, replace(PLAIN, **change)), (SPECULATIVE,) * 2),
                                   ((PLAIN,) * 2, (replace(SPECULATIVE, **change), SPECULATIVE))):  # fmt: skip
            [found] = join_cells(plain, speculative, cells=cells, batch_size=16, machine=PLAIN.machine)
            assert (found.wall_s, found.plain_wall_s, found.speedup) == (None, None, None)
    [found] = join_cells(
        [replace(PLAIN, wall_s=2.0)] * 2, [SPECULATIVE] * 2, cells=cells, batch_size=16, machine=PLAIN.machine
    )
    assert found.tokens_per_s == 2 * (8 + 1 + 3 + 2) / 2.5
    assert found.plain_tokens_per_s == 2 * (8 + 1 + 3 + 2) / 4.0
    assert found.speedup == pytest.approx(1.6)


def test_joined_answers_are_by_temperature_and_benchmark_in_the_order_of_the_cells() -> None:
    sets = {"gsm8k": prompts("gsm8k", 3), "mt_bench": prompts("mt_bench", 1, num_turns=2)}
    cells = plan_cells(sets, temperatures=(0.0, 1.0), cell_prompts=2)
    answers = []
    for number, cell in enumerate(cells):
        token = Generation("", (number,), (False,), "length", ())
        answers.append(replace(PLAIN, generations=tuple(replace(token, request_id=name) for name in cell.request_ids)))
    drafted = [replace(item, wall_s=0.5) for item in answers]
    found = join_cells(answers, drafted, cells=cells, batch_size=16, machine=PLAIN.machine)
    assert [(item.benchmark, item.domain, item.temperature) for item in found] == [
        ("gsm8k", "math", 0.0), ("mt_bench", "chat", 0.0), ("gsm8k", "math", 1.0), ("mt_bench", "chat", 1.0),
    ]  # fmt: skip
    assert [[item.request_id for item in entry.generations] for entry in found[:2]] == [
        ["gsm8k/0/t0", "gsm8k/1/t0", "gsm8k/2/t0"],
        ["mt_bench/0/t0", "mt_bench/0/t1"],
    ]
    assert [[item.token_ids for item in entry.plain] for entry in found] == [
        [(0,), (0,), (1,)], [(2,), (2,)], [(3,), (3,), (4,)], [(5,), (5,)],
    ]  # fmt: skip
    assert [(entry.wall_s, entry.plain_wall_s) for entry in found] == [(1.0, 2.5), (0.5, 1.25), (1.0, 2.5), (0.5, 1.25)]
