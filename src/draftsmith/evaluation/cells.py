"""What an evaluation decodes, cut into cells: an object of the store for each way of decoding. No model here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal, cast, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from draftsmith.decoding.rounds import Generation, Round
from draftsmith.errors import CacheError
from draftsmith.evaluation.benchmarks import BenchmarkPrompt
from draftsmith.evaluation.decoded import Decoded
from draftsmith.manifest import hash8, sha256_hex
from draftsmith.params import Domain
from draftsmith.text.answers import Finish, answer_id

FORMAT_VERSION = 1
Mode = Literal["plain", "speculative"]
MODES: tuple[Mode, ...] = get_args(Mode)
_FACTS, _FACTS_SHA256 = b"draftsmith.cell", b"draftsmith.cell.sha256"  # the pages of the table have checksums too


def _list_of(kind: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", kind, nullable=False))


_ROUND = pa.struct(
    [
        pa.field("anchor_position", pa.int32(), nullable=False),
        pa.field("verified", pa.int32(), nullable=False),
        pa.field("accepted", pa.int32(), nullable=False),
        pa.field("committed", pa.int32(), nullable=False),
        pa.field("ended", pa.bool_(), nullable=False),
        pa.field("cut", pa.bool_(), nullable=False),
        pa.field("confidence_logits", _list_of(pa.float32()), nullable=False),
        pa.field("rejected_token", pa.int32()),
    ]
)
GENERATION_SCHEMA = pa.schema(
    [
        pa.field("request_id", pa.string(), nullable=False),
        pa.field("token_ids", _list_of(pa.int32()), nullable=False),
        pa.field("drafted", _list_of(pa.bool_()), nullable=False),
        pa.field("finish", pa.string(), nullable=False),
        pa.field("rounds", _list_of(_ROUND), nullable=False),
    ]
)


@dataclass(frozen=True)
class Cell:
    """Prompts of one benchmark that are answered together at one temperature, in all their turns."""

    benchmark: str
    domain: Domain
    temperature: float
    index: int  # of the benchmark's cells at this temperature, from 0
    prompts: tuple[BenchmarkPrompt, ...]

    @cached_property
    def name(self) -> str:
        """The object's name below its prefix: it says which prompts are in it, whatever else is evaluated."""
        digest = hash8([[prompt.id, *prompt.turns] for prompt in self.prompts])
        return f"{self.benchmark}/t{self.temperature!r}/{self.index:04d}-{digest}.parquet"

    @cached_property
    def request_ids(self) -> tuple[str, ...]:
        """Ids of the answers, in the order of prompts, then turns."""
        return tuple(answer_id(prompt.id, turn) for prompt in self.prompts for turn in range(len(prompt.turns)))


@dataclass(frozen=True)
class DecodedCell:
    """The answers of a cell in the order of its request ids, and the seconds of the engine that they took, prefill
    included, with at most `batch_size` requests in flight on `machine`."""

    generations: tuple[Generation, ...]
    wall_s: float
    batch_size: int
    machine: str


def plan_cells(
    prompts: Mapping[str, Sequence[BenchmarkPrompt]], *, temperatures: Sequence[float], cell_prompts: int
) -> list[Cell]:
    """Every prompt of every benchmark at every temperature, in cells of up to `cell_prompts` consecutive prompts."""
    return [
        Cell(name, found[0].domain, temperature, index, tuple(found[start : start + cell_prompts]))
        for temperature in temperatures
        for name, found in prompts.items()
        for index, start in enumerate(range(0, len(found), cell_prompts))
    ]


def encode_cell(decoded: DecodedCell, cell: Cell, *, mode: Mode) -> bytes:
    """Parquet bytes: a row an answer with its rounds; how it was decoded is in the schema's metadata.

    Confidence logits are kept as float32, which is what confidence heads compute in or less.
    """
    columns = [
        pa.array([item.request_id for item in decoded.generations], pa.string()),
        *(
            pa.array([getattr(item, name) for item in decoded.generations], GENERATION_SCHEMA.field(name).type)
            for name in ("token_ids", "drafted")
        ),
        pa.array([item.finish for item in decoded.generations], pa.string()),
        pa.array([[_row(item) for item in answer.rounds] for answer in decoded.generations], _list_of(_ROUND)),
    ]
    how = {"wall_s": decoded.wall_s, "batch_size": decoded.batch_size, "machine": decoded.machine}
    body = json.dumps({"cell": _facts(cell, mode), "how": how}, sort_keys=True).encode()
    metadata = {_FACTS: body, _FACTS_SHA256: sha256_hex(body)}
    table = pa.Table.from_arrays(columns, schema=GENERATION_SCHEMA.with_metadata(metadata))
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", version="2.6", row_group_size=1 << 20, write_page_checksum=True)
    return sink.getvalue().to_pybytes()


def decode_cell(data: bytes, cell: Cell, *, mode: Mode, where: str) -> DecodedCell:
    """The inverse of `encode_cell`. Raises CacheError, naming `where`, unless it is whole and holds what is planned."""
    try:
        # As in `text.rows`: no data set scanner, which may outlive the interpreter.
        with pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True) as file:
            schema = file.schema_arrow
            table = file.read(use_threads=False) if schema.equals(GENERATION_SCHEMA) else None
        metadata = schema.metadata or {}
    # Damaged bytes are told as any of Arrow's errors, and as OSError.
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _damaged(where, got=f"{len(data)} bytes: {' '.join(str(error).split())[:200]}") from None
    if table is None:
        raise _damaged(where, got=f"columns {', '.join(schema.names)}", expected=", ".join(GENERATION_SCHEMA.names))
    told = metadata.get(_FACTS, b"")
    if sha256_hex(told) != metadata.get(_FACTS_SHA256, b"").decode(errors="replace"):
        raise _damaged(where, got=f"metadata {told.decode(errors='replace')[:200]!r}")
    body = json.loads(told)
    if body["cell"] != _facts(cell, mode):
        raise _damaged(where, got=f"answers of {body['cell']}", expected=f"{_facts(cell, mode)}")
    generations = tuple(_generations(table))
    found = tuple(item.request_id for item in generations)
    if found != cell.request_ids:
        strange = sorted(set(found) ^ set(cell.request_ids))
        how = f", {len(strange)} of them differing, first {strange[0]}" if strange else " in another order"
        raise _damaged(where, got=f"{len(found)} answers{how}", expected=f"the {len(cell.request_ids)} planned ones")
    for item in generations:
        if problem := _problem(item, mode):
            raise _damaged(where, got=f"{item.request_id}: {problem}")
    return DecodedCell(generations, **body["how"])


def join_cells(
    plain: Sequence[DecodedCell], speculative: Sequence[DecodedCell], *, cells: Sequence[Cell], batch_size: int,
    machine: str,
) -> tuple[Decoded, ...]:  # fmt: skip
    """What was decoded, one entry a benchmark and temperature, in the order of `cells`; all three are parallel.

    Wall times are those of `machine` at `batch_size`, or None.
    """
    groups: dict[tuple[str, float], list[int]] = {}
    for place, cell in enumerate(cells):
        groups.setdefault((cell.benchmark, cell.temperature), []).append(place)
    found = []
    for (benchmark, temperature), places in groups.items():
        ours, theirs = [speculative[place] for place in places], [plain[place] for place in places]
        timed = all((item.machine, item.batch_size) == (machine, batch_size) for item in (*ours, *theirs))
        found.append(
            Decoded(
                benchmark,
                cells[places[0]].domain,
                temperature,
                batch_size,
                generations=tuple(item for decoded in ours for item in decoded.generations),
                plain=tuple(item for decoded in theirs for item in decoded.generations),
                wall_s=sum(item.wall_s for item in ours) if timed else None,
                plain_wall_s=sum(item.wall_s for item in theirs) if timed else None,
            )
        )
    return tuple(found)


def _facts(cell: Cell, mode: Mode) -> dict[str, Any]:
    return {
        "format": FORMAT_VERSION,
        "mode": mode,
        "benchmark": cell.benchmark,
        "temperature": cell.temperature,
        "index": cell.index,
    }


def _row(item: Round) -> dict[str, Any]:
    return {field.name: getattr(item, field.name) for field in fields(Round)}


def _generations(table: pa.Table) -> Iterator[Generation]:
    """Rounds are read column by column: one dictionary a round would take most of the time."""
    lists = table["rounds"].combine_chunks()
    columns = dict(zip(_ROUND.names, (part.to_pylist() for part in lists.flatten().flatten()), strict=True))
    columns["confidence_logits"] = [tuple(logits) for logits in columns["confidence_logits"]]
    rounds = [Round(*row) for row in zip(*(columns[field.name] for field in fields(Round)), strict=True)]
    start = 0
    names = ("request_id", "token_ids", "drafted", "finish")
    for number, *own in zip(
        lists.value_lengths().to_pylist(), *(table[name].to_pylist() for name in names), strict=True
    ):
        request_id, token_ids, drafted, finish = own
        yield Generation(
            request_id, tuple(token_ids), tuple(drafted), cast(Finish, finish), tuple(rounds[start : start + number])
        )
        start += number


def _problem(item: Generation, mode: Mode) -> str | None:
    """What cannot be in an answer of this mode, if something is: every token but the first is of a round."""
    if not item.token_ids or len(item.drafted) != len(item.token_ids) or item.finish not in get_args(Finish):
        return f"{len(item.token_ids)} tokens, {len(item.drafted)} marks, finish {item.finish!r}"
    committed = 1 + sum(item.committed for item in item.rounds)
    if mode == "plain" and (item.rounds or any(item.drafted)):
        return "rounds in plain decoding"
    if mode == "speculative" and committed != len(item.token_ids):
        return f"{len(item.token_ids)} tokens, but {committed} by its rounds"
    return None


def _damaged(where: str, *, got: str, expected: str = "a table of answers, written by this command") -> CacheError:
    return CacheError("decoded answers in the store are damaged", got=got, expected=expected, where=where)
