"""Prompt rows: their identity, their deterministic Parquet form, and the reading of a user's own JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from draftsmith.errors import PromptError
from draftsmith.manifest import json_digest
from draftsmith.params import Domain, PromptFile
from draftsmith.text.chat import turns_problem

DOMAINS: tuple[Domain, ...] = get_args(Domain)
PROMPT_SCHEMA = pa.schema(
    [("id", pa.string()), ("domain", pa.string()), ("source", pa.string()), ("turns", pa.list_(pa.string()))]
)


@dataclass(frozen=True)
class Prompt:
    """One prompt: the user's turns (the target's answers come between them), where it is from and of which domain."""

    domain: Domain
    source: str
    turns: tuple[str, ...]

    @property
    def id(self) -> str:
        """Sixteen hexadecimal digits of sha256 over the turns: equal turns, equal id."""
        return prompt_id(self.turns)


@dataclass(frozen=True)
class SetAside:
    """A row that a source could not use, with its reason; it is counted and the job goes on."""

    reason: str


def prompt_id(turns: Sequence[str]) -> str:
    """Sixteen hexadecimal digits of sha256 over the turns in canonical JSON."""
    return json_digest(list(turns))[:16]


def row_turns(row: object) -> tuple[str, ...] | SetAside:
    """The user turns of a parsed row {"turns": [...]} or {"messages": [{"role", "content"}, ...]}.

    Messages must alternate user, assistant, user, ...; what the assistant says is dropped, because the target answers
    anew. A system message sets a row aside: the system prompt belongs to the target's row in params.yaml.
    """
    if not isinstance(row, dict):
        return SetAside("not a JSON object")
    if ("turns" in row) == ("messages" in row):
        return SetAside("needs exactly one of turns and messages")
    turns: Any = row["turns"] if "turns" in row else _message_turns(row["messages"])
    if isinstance(turns, SetAside):
        return turns
    problem = turns_problem(turns)
    return SetAside(problem) if problem is not None else tuple(turns)


def _message_turns(messages: object) -> list[str] | SetAside:
    if not isinstance(messages, list) or not messages:
        return SetAside("messages is not a list of messages")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            return SetAside("a message without role and content")
        if message["role"] == "system":
            return SetAside("a system message (targets.<name>.system_prompt sets it)")
        if message["role"] not in ("user", "assistant"):
            return SetAside(f"unknown role {message['role']!r}"[:80])
        if message["role"] != ("user", "assistant")[index % 2]:
            return SetAside("turns do not alternate from user to assistant")
        if not isinstance(message["content"], str):
            return SetAside("a turn is not text")
        if not message["content"].strip():
            return SetAside("a turn is empty")
    return [message["content"] for message in messages[::2]]


def read_prompt_file(file: PromptFile, *, root: Path) -> Iterator[Prompt | SetAside]:
    """The rows of a user's JSON lines file; `file.path` is relative to `root` unless absolute.

    Raises PromptError with path and line if the file is missing, unreadable, not UTF-8 or not JSON lines.
    """
    path = root / Path(file.path).expanduser()
    where = "params.yaml: prompts.files"
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise PromptError("prompt file is missing", got=path, expected="a JSON lines file", where=where) from None
    except OSError as error:
        raise PromptError(f"prompt file cannot be read: {error.strerror}", got=path, where=where) from None
    except UnicodeDecodeError as error:
        raise PromptError("prompt file is not UTF-8", got=f"byte {error.start} of {path}", where=where) from None
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row: Any = json.loads(line)
        except json.JSONDecodeError as error:
            raise PromptError(
                "prompt file is not JSON lines",
                got=f"{error.msg} at column {error.colno}",
                expected='one {"turns": [...]} or {"messages": [...]} a line',
                where=f"{path}:{number}",
            ) from None
        turns = row_turns(row)
        yield turns if isinstance(turns, SetAside) else Prompt(file.domain, f"file:{file.path}", turns)


def encode_prompts(prompts: Iterable[Prompt]) -> bytes:
    """Parquet bytes of prompts in their order; equal prompts give equal bytes under one pyarrow version."""
    rows = [
        {"id": prompt.id, "domain": prompt.domain, "source": prompt.source, "turns": list(prompt.turns)}
        for prompt in prompts
    ]
    return encode_table(pa.Table.from_pylist(rows, schema=PROMPT_SCHEMA))


def decode_prompts(data: bytes) -> tuple[Prompt, ...]:
    """The prompts of `encode_prompts`; raises PromptError if the bytes are not such a table or an id does not fit."""
    prompts = []
    for row in decode_table(data, PROMPT_SCHEMA).to_pylist():
        prompt = Prompt(cast(Domain, row["domain"]), row["source"], tuple(row["turns"]))
        if prompt.domain not in DOMAINS or prompt.id != row["id"]:
            raise PromptError("a stored prompt does not fit its id or domain", got=row["id"], expected=prompt.id)
        prompts.append(prompt)
    return tuple(prompts)


def encode_table(table: pa.Table) -> bytes:
    """Parquet bytes of a table, with fixed settings and no metadata of time or place."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", version="2.6", use_dictionary=True, row_group_size=1 << 20)
    return sink.getvalue().to_pybytes()


def decode_table(data: bytes, schema: pa.Schema, *, columns: Sequence[str] | None = None) -> pa.Table:
    """The table of Parquet bytes, or some `columns` of it; raises PromptError unless it has exactly `schema`."""
    try:
        # Not pq.read_table: its data set scanner lets go of Python's bytes in a thread of its own, and if the
        # interpreter is leaving just then, the whole process aborts.
        with pq.ParquetFile(pa.BufferReader(data)) as file:
            found = file.schema_arrow
            table = file.read(columns=columns, use_threads=False) if found.equals(schema) else None
    # Damaged bytes are told as any of Arrow's errors, and as OSError.
    except (pa.ArrowException, OSError) as error:
        raise PromptError(f"not a Parquet table: {' '.join(str(error).split())[:200]}") from None
    if table is None:
        raise PromptError("a Parquet table of other columns", got=found.names, expected=schema.names)
    return table
