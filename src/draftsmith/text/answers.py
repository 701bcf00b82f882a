"""Answers by the target: batches planned ahead, one object of the store each, resumed by sample id. No model here."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

import pyarrow as pa
import pyarrow.compute as pc

from draftsmith.errors import CacheError, ObjectExistsError, PromptError
from draftsmith.manifest import ObjectRecord, sha256_hex
from draftsmith.params import Domain
from draftsmith.storage import Store
from draftsmith.text.rows import Prompt, decode_table, encode_table

Split = Literal["train", "validation"]
Finish = Literal["end_of_text", "length"]
ANSWER_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("split", pa.string()),
        ("domain", pa.string()),
        ("turn", pa.int32()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("answer_ids", pa.list_(pa.int32())),
        ("finish", pa.string()),
    ]
)


@dataclass(frozen=True)
class AnswerRequest:
    """One answer to be had: turn number `turn` (from 0) of a prompt, after the answers to its earlier turns."""

    prompt_id: str
    split: Split
    domain: Domain
    turns: tuple[str, ...]
    turn: int

    @property
    def id(self) -> str:
        return answer_id(self.prompt_id, self.turn)

    @property
    def earlier_ids(self) -> tuple[str, ...]:
        """Ids of the answers that this one follows."""
        return tuple(answer_id(self.prompt_id, turn) for turn in range(self.turn))

    @property
    def num_chars(self) -> int:
        """Characters of the user's turns so far: the length that batches are sorted by."""
        return sum(len(text) for text in self.turns[: self.turn + 1])


@dataclass(frozen=True)
class AnswerBatch:
    """Requests that are answered together; all of one turn number, so that no answer waits for one beside it."""

    index: int
    turn: int
    requests: tuple[AnswerRequest, ...]

    @property
    def name(self) -> str:
        """The object's name below the answers' prefix."""
        return f"batch-{self.index:05d}.parquet"


@dataclass(frozen=True)
class AnswerRow:
    """An answer as it was sampled. A training sequence is prompt_ids + answer_ids, supervised on the latter.

    `answer_ids` holds the end-of-turn id if the target wrote it (`finish` end_of_text).
    """

    id: str
    split: Split
    domain: Domain
    turn: int
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    finish: Finish


Generate = Callable[[AnswerBatch, Mapping[str, AnswerRow]], Sequence[AnswerRow]]


def answer_id(prompt_id: str, turn: int) -> str:
    """Id of the answer to turn `turn` (from 0) of a prompt."""
    return f"{prompt_id}/t{turn}"


def sample_seed(seed: int, sample_id: str) -> int:
    """A 64-bit seed of one sample, from the run's seed and the sample's id alone: no batch or order changes it."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{sample_id}".encode()).digest()[:8], "big")


def answer_requests(splits: Mapping[Split, Sequence[Prompt]]) -> list[AnswerRequest]:
    """One request for every turn of every prompt."""
    return [
        AnswerRequest(prompt.id, split, prompt.domain, prompt.turns, turn)
        for split, prompts in splits.items()
        for prompt in prompts
        for turn in range(len(prompt.turns))
    ]


def plan_answer_batches(requests: Iterable[AnswerRequest], *, batch_size: int, seed: int) -> list[AnswerBatch]:
    """Cut requests into batches, in waves: all first turns, then all second turns, and so on.

    Inside a wave the longest come first (a machine too small fails at once, not in an hour), requests of a length in an
    order drawn from `seed`. The plan depends on the requests as a set, never on their order.

    Raises PromptError if an id comes twice or an earlier turn is missing.
    """
    pending = list(requests)
    ids = {request.id for request in pending}
    if len(ids) != len(pending):
        raise PromptError("answers planned twice", got=f"{len(pending)} requests", expected=f"{len(ids)} different ids")
    if any(earlier not in ids for request in pending for earlier in request.earlier_ids):
        raise PromptError("a later turn is planned without the turns before it")
    pending.sort(key=lambda request: (request.turn, -request.num_chars, sample_seed(seed, request.id)))
    batches: list[AnswerBatch] = []
    for turn in sorted({request.turn for request in pending}):
        wave = [request for request in pending if request.turn == turn]
        for start in range(0, len(wave), batch_size):
            batches.append(AnswerBatch(len(batches), turn, tuple(wave[start : start + batch_size])))
    return batches


def run_answer_batches(
    store: Store,
    *,
    prefix: str,
    batches: Sequence[AnswerBatch],
    generate: Generate,
    on_batch: Callable[[AnswerBatch, Sequence[AnswerRow]], None] | None = None,
) -> list[ObjectRecord]:
    """Answer every batch that the store does not hold yet, and return the record of every object, paths below `prefix`.

    `generate(batch, earlier)` gets the rows of the batch's earlier turns by id, and returns one row a request.
    A batch is written whole by put-if-absent, so a killed run leaves finished batches or nothing; where another process
    wrote the same batch first, its object counts. `on_batch` is called for each batch, read or made.

    Raises:
        CacheError: a batch in the store, or one just generated, does not hold exactly the planned ids.
        StoreError: the store fails.
    """
    earlier: dict[str, AnswerRow] = {}
    wanted = {identity for batch in batches for request in batch.requests for identity in request.earlier_ids}
    records = []
    for batch in batches:
        path = f"{prefix}/{batch.name}"
        if store.head(path) is not None:
            data = store.get(path)
            rows = _checked(batch, decode_answers(data), path=path)
        else:
            needed = {identity: earlier[identity] for item in batch.requests for identity in item.earlier_ids}
            rows = _checked(batch, generate(batch, needed), path=path)
            data = encode_answers(rows)
            try:
                store.put_if_absent(path, data)
            except ObjectExistsError:
                data = store.get(path)
                rows = _checked(batch, decode_answers(data), path=path)
        earlier.update({row.id: row for row in rows if row.id in wanted})
        records.append(ObjectRecord(batch.name, len(data), sha256_hex(data)))
        if on_batch is not None:
            on_batch(batch, rows)
    return records


def encode_answers(rows: Iterable[AnswerRow]) -> bytes:
    """Parquet bytes of answers in their order."""
    columns = [
        {name: list(value) if isinstance(value := getattr(row, name), tuple) else value for name in ANSWER_SCHEMA.names}
        for row in rows
    ]
    return encode_table(pa.Table.from_pylist(columns, schema=ANSWER_SCHEMA))


def decode_answers(data: bytes) -> tuple[AnswerRow, ...]:
    """The answers of `encode_answers`; raises PromptError if the bytes are not such a table."""
    return tuple(
        AnswerRow(
            row["id"],
            cast(Split, row["split"]),
            cast(Domain, row["domain"]),
            row["turn"],
            tuple(row["prompt_ids"]),
            tuple(row["answer_ids"]),
            cast(Finish, row["finish"]),
        )
        for row in decode_table(data, ANSWER_SCHEMA).to_pylist()
    )


def decode_answer_lengths(data: bytes) -> Iterator[tuple[str, int, int]]:
    """Id, number of prompt ids and number of answer ids of each answer, as `decode_answers` but no ids are made."""
    table = decode_table(data, ANSWER_SCHEMA, columns=["id", "prompt_ids", "answer_ids"])
    lengths = (pc.list_value_length(table[name]).to_pylist() for name in ("prompt_ids", "answer_ids"))
    return zip(table["id"].to_pylist(), *lengths, strict=True)


def _checked(batch: AnswerBatch, rows: Sequence[AnswerRow], *, path: str) -> Sequence[AnswerRow]:
    planned = [(item.id, item.split, item.domain, item.turn) for item in batch.requests]
    found = [(row.id, row.split, row.domain, row.turn) for row in rows]
    if found != planned:
        strange = sorted(set(found) ^ set(planned))
        raise CacheError(
            "an answer batch does not hold its planned samples",
            got=f"{len(found)} rows, {len(strange)} of them differing"
            + (f", first {strange[0][0]}" if strange else ""),
            expected=f"the {len(planned)} planned ones in their order",
            where=path,
        )
    for row in rows:
        if not row.prompt_ids or not row.answer_ids or row.finish not in get_args(Finish):
            raise CacheError("an answer without ids or with an unknown finish", got=row.id, where=path)
    return rows
