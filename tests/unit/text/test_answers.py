"""Answers: the plan, resuming by sample id whatever was killed when, and the stored form."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.errors import CacheError, PromptError
from draftsmith.manifest import ObjectRecord
from draftsmith.storage import Store, open_store
from draftsmith.text.answers import (
    AnswerBatch,
    AnswerRow,
    answer_requests,
    decode_answers,
    encode_answers,
    plan_answer_batches,
    run_answer_batches,
    sample_seed,
)
from draftsmith.text.rows import Prompt

PROMPTS = [
    Prompt("chat", "t", tuple(f"{index} " + "x" * (7 * index % 23) for _ in range(1 + index % 3)))
    for index in range(11)
]


class Killed(Exception):
    """Stands for the end of the process."""


def plan(prompts: Sequence[Prompt] = PROMPTS, batch_size: int = 4) -> list[AnswerBatch]:
    return plan_answer_batches(answer_requests({"train": prompts}), batch_size=batch_size, seed=5)


def answer(batch: AnswerBatch, earlier: Mapping[str, AnswerRow]) -> list[AnswerRow]:
    """An answer whose ids say which earlier answers were handed over."""
    rows = []
    for item in batch.requests:
        seen = [earlier[identity].answer_ids[0] for identity in item.earlier_ids]
        own = sample_seed(0, item.id) % 1000 + sum(seen)
        rows.append(AnswerRow(item.id, item.split, item.domain, item.turn, (1, *seen), (own, 2), "end_of_text"))
    return rows


def run(store: Store, batches: Sequence[AnswerBatch]) -> list[ObjectRecord]:
    return run_answer_batches(store, prefix="answers/t-0", batches=batches, generate=answer)


def test_sample_seed_is_the_start_of_sha256() -> None:
    assert sample_seed(2, "ab/t0") == int(hashlib.sha256(b"2:ab/t0").hexdigest()[:16], 16)
    assert sample_seed(2, "ab/t0") != sample_seed(3, "ab/t0")
    assert 0 <= sample_seed(2, "x") < 1 << 64


def test_plan_holds_every_turn_once_in_waves_longest_first() -> None:
    batches = plan()
    ids = [item.id for batch in batches for item in batch.requests]
    assert sorted(ids) == sorted(f"{prompt.id}/t{turn}" for prompt in PROMPTS for turn in range(len(prompt.turns)))
    assert [batch.turn for batch in batches] == sorted(batch.turn for batch in batches)
    assert [batch.index for batch in batches] == list(range(len(batches)))
    assert batches[2].name == "batch-00002.parquet"
    for batch in batches:
        assert {item.turn for item in batch.requests} == {batch.turn}
        assert len(batch.requests) <= 4
    first_wave = [item.num_chars for batch in batches if batch.turn == 0 for item in batch.requests]
    assert first_wave == sorted(first_wave, reverse=True)


def test_plan_does_not_depend_on_the_order_of_prompts() -> None:
    shuffled = list(PROMPTS)
    random.Random(1).shuffle(shuffled)
    assert plan(shuffled) == plan()


def test_plan_refuses_doubles_and_gaps() -> None:
    requests = answer_requests({"train": PROMPTS})
    with pytest.raises(PromptError, match="twice"):
        plan_answer_batches([*requests, requests[0]], batch_size=2, seed=0)
    with pytest.raises(PromptError, match="without the turns before"):
        plan_answer_batches([item for item in requests if item.turn != 0], batch_size=2, seed=0)


def test_rows_come_back() -> None:
    rows = tuple(row for batch in plan()[:1] for row in answer(batch, {}))
    assert decode_answers(encode_answers(rows)) == rows
    assert encode_answers(rows) == encode_answers(list(rows))
    assert rows[0].prompt_ids == (1,)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 8), max_size=4), st.booleans())
def test_killed_anywhere_and_started_again_gives_the_same_objects(
    tmp_path_factory: pytest.TempPathFactory, kills: list[int], lose_one: bool
) -> None:
    batches = plan()
    whole = open_store(str(tmp_path_factory.mktemp("whole")))
    expected = run(whole, batches)
    store = open_store(str(tmp_path_factory.mktemp("killed")))
    for after in kills:
        made = 0

        def dying(batch: AnswerBatch, earlier: Mapping[str, AnswerRow], limit: int = after) -> list[AnswerRow]:
            nonlocal made
            if made == limit:
                raise Killed
            made += 1
            return answer(batch, earlier)

        with contextlib.suppress(Killed):
            run_answer_batches(store, prefix="answers/t-0", batches=batches, generate=dying)
        if lose_one:
            store.delete("answers/t-0/batch-00001.parquet")
    assert run(store, batches) == expected
    found = [row.id for batch in batches for row in decode_answers(store.get(f"answers/t-0/{batch.name}"))]
    assert sorted(found) == sorted(item.id for item in answer_requests({"train": PROMPTS}))


def test_a_finished_batch_is_read_and_not_made_again(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    batches = plan()
    records = run(store, batches)
    assert [record.path for record in records] == [batch.name for batch in batches]

    def never(batch: AnswerBatch, earlier: Mapping[str, AnswerRow]) -> list[AnswerRow]:
        raise AssertionError(batch.name)

    seen: list[int] = []
    again = run_answer_batches(
        store,
        prefix="answers/t-0",
        batches=batches,
        generate=never,
        on_batch=lambda batch, rows: seen.append(len(rows)),
    )
    assert again == records
    assert seen == [len(batch.requests) for batch in batches]
    for record in records:
        data = store.get(f"answers/t-0/{record.path}")
        assert (record.size, record.sha256) == (len(data), hashlib.sha256(data).hexdigest())


def test_the_first_of_two_writers_wins(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    batch = plan()[0]
    other = [AnswerRow(row.id, row.split, row.domain, row.turn, (9,), (9,), "length") for row in answer(batch, {})]

    def slow(batch: AnswerBatch, earlier: Mapping[str, AnswerRow]) -> list[AnswerRow]:
        store.put_if_absent(f"answers/t-0/{batch.name}", encode_answers(other))
        return answer(batch, earlier)

    records = run_answer_batches(store, prefix="answers/t-0", batches=[batch], generate=slow)
    assert records[0].sha256 == hashlib.sha256(encode_answers(other)).hexdigest()


def test_a_strange_batch_is_refused(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    batch = plan()[0]
    with pytest.raises(CacheError, match="planned samples"):
        run_answer_batches(store, prefix="a", batches=[batch], generate=lambda batch, _: answer(batch, {})[1:])
    rows = answer(batch, {})
    store.put_if_absent(f"a/{batch.name}", encode_answers(rows[::-1]))
    with pytest.raises(CacheError, match=r"a/batch-00000\.parquet"):
        run_answer_batches(store, prefix="a", batches=[batch], generate=answer)
    empty = [AnswerRow(row.id, row.split, row.domain, row.turn, row.prompt_ids, (), "length") for row in rows]
    with pytest.raises(CacheError, match="without ids"):
        run_answer_batches(store, prefix="b", batches=[batch], generate=lambda *_: empty)
