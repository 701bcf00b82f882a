"""The prompts of a benchmark. They are read where they lie (a package, the hub or a folder) and never copied."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from draftsmith.errors import PromptError
from draftsmith.evaluation.benchmark_rows import BENCHMARKS, Benchmark, HubFile, PackageFile, TurnList
from draftsmith.manifest import sha256_hex
from draftsmith.params import Domain
from draftsmith.text.hub import hub_rows
from draftsmith.text.packages import DATA_COMMAND, package_files
from draftsmith.text.rows import SetAside, row_turns

__all__ = [
    "BENCHMARKS", "Benchmark", "BenchmarkPrompt", "benchmark_facts", "benchmark_turns", "folder_file", "load_benchmark",
    "package_file", "spread",
]  # fmt: skip

UNCAPPED = 1 << 40
WHERE_FOLDER = "params.yaml: evaluate.folder"


@dataclass(frozen=True)
class BenchmarkPrompt:
    """One prompt of a benchmark; `id` is the benchmark's name and the row's number in the source, from 0."""

    id: str
    domain: Domain
    turns: tuple[str, ...]


@dataclass(frozen=True)
class _Row:
    """A parsed row, and its place for messages."""

    value: Any
    where: str | None


def load_benchmark(name: str, *, cap: int, folder: Path | None = None) -> list[BenchmarkPrompt]:
    """At most `cap` prompts of a benchmark, evenly spaced over its rows (some are sorted by category).

    With `folder`, the benchmark's file of {"turns": [...]} lines there is read instead of the source, with any number
    of turns. All rows are checked, whatever the cap: a benchmark is whole or it is none. Rows of equal turns all count,
    as they do in the source.

    Raises PromptError if there is no such benchmark, its package is not installed in the version that the row names,
    the hub cannot be reached, the folder lacks its file, it has no rows, or a row has no usable turns.
    """
    row = _benchmark(name)
    items = _source_rows(row) if folder is None else _lines(folder_file(name, folder=folder))
    turns = [_checked(row, index, item, of_source=folder is None) for index, item in enumerate(items)]
    if not turns:
        place = row.source.id if folder is None else folder_file(name, folder=folder)
        raise PromptError(f"benchmark {name} has no rows", where=str(place))
    return [BenchmarkPrompt(f"{name}/{index}", row.domain, turns[index]) for index in spread(len(turns), cap)]


def benchmark_facts(name: str, *, folder: Path | None = None) -> dict[str, Any]:
    """`Benchmark.facts`; with `folder`, the facts of the file there, whose revision is its sha256.

    Raises PromptError as `load_benchmark` does.
    """
    facts = _benchmark(name).facts()
    if folder is None:
        return facts
    path = folder_file(name, folder=folder)
    return {
        **facts,
        "source": f"folder ({path.name})",
        "revision": f"sha256:{sha256_hex(path.read_bytes())}",
        "split": None,
        "prompt_form": TurnList().told,
        "turns": max(len(prompt.turns) for prompt in load_benchmark(name, cap=UNCAPPED, folder=folder)),
        "licence": "that of the folder's file",
    }


def benchmark_turns(names: Iterable[str], *, folder: Path | None = None) -> list[tuple[str, ...]]:
    """The turns of every prompt of the named benchmarks, uncapped: what training prompts must keep clear of."""
    return [prompt.turns for name in names for prompt in load_benchmark(name, cap=UNCAPPED, folder=folder)]


def spread(count: int, cap: int) -> list[int]:
    """At most `cap` of 0..count-1, evenly spaced from 0."""
    return list(range(count)) if cap >= count else [index * count // cap for index in range(cap)]


def folder_file(name: str, *, folder: Path) -> Path:
    """The file of a benchmark in a folder: `file` of its row or `<name>.jsonl`, plain or with .gz behind it.

    Raises PromptError if the folder holds none of them, naming what it does hold, or more than one.
    """
    names = [stem + end for stem in dict.fromkeys((_benchmark(name).file, f"{name}.jsonl")) for end in ("", ".gz")]
    there = [item for item in names if (folder / item).is_file()]
    if len(there) == 1:
        return folder / there[0]
    if there:
        raise PromptError(
            f"benchmark {name} has more than one file",
            got=f"{', '.join(there)} in {folder}",
            expected="one of them",
            where=WHERE_FOLDER,
        )
    if not folder.is_dir():
        raise PromptError("the folder of benchmarks is missing", got=folder, where=WHERE_FOLDER)
    found = sorted(item.name for item in folder.iterdir() if item.name.endswith((".jsonl", ".jsonl.gz")))
    raise PromptError(
        f"benchmark {name}: its file is missing",
        got=f"{', '.join(found) or 'no .jsonl file'} in {folder}",
        expected=" or ".join(names),
        where=WHERE_FOLDER,
    )


def package_file(source: PackageFile, *, where: str) -> Path:
    """The file of a source inside its package; raises PromptError if package, version or file are not there."""
    path = package_files(source.package, suffix=source.suffix, where=where)[0]
    version = metadata.version(source.package)
    if version != source.revision:
        raise PromptError(
            f"package {source.package} is of another version",
            got=version,
            expected=f"{source.revision}: {DATA_COMMAND}",
            where=where,
        )
    return path


def _benchmark(name: str) -> Benchmark:
    if name not in BENCHMARKS:
        raise PromptError(
            f"no benchmark {name!r}",
            expected=f"one of {', '.join(BENCHMARKS)}",
            where="params.yaml: evaluate.benchmarks",
        )
    return BENCHMARKS[name]


def _checked(row: Benchmark, index: int, item: _Row, *, of_source: bool) -> tuple[str, ...]:
    """The turns of row number `index`, or a PromptError that says what is wrong with it."""
    place = f"benchmark {row.name}: row {index}"
    if not isinstance(item.value, dict):
        raise PromptError(f"{place} is not a JSON object", got=type(item.value).__name__, where=item.where)
    try:
        turns = row_turns({"turns": (row if of_source else TurnList()).turns(item.value)})
    except KeyError as error:
        raise PromptError(f"{place} has no {error}", got=sorted(item.value), where=item.where) from None
    except PromptError as error:
        raise PromptError(f"{place}: {error}", where=item.where) from None
    if isinstance(turns, SetAside):
        raise PromptError(f"{place} is unusable", got=turns.reason, where=item.where)
    if of_source and len(turns) != row.num_turns:
        raise PromptError(
            f"{place} has another number of turns", got=len(turns), expected=row.num_turns, where=item.where
        )
    return turns


def _source_rows(row: Benchmark) -> list[_Row]:
    where = f"benchmark {row.name}"
    match row.source:
        case PackageFile() as source:
            return _lines(package_file(source, where=where))
        case HubFile() as source:
            found = hub_rows(
                source.hf_id,
                split=source.split,
                revision=source.revision,
                config=source.config,
                data_file=source.data_file,
                columns=row.form.columns,
                where=where,
            )
            return [_Row(item, None) for item in found]


def _lines(path: Path) -> list[_Row]:
    """The values of a file of JSON lines, gzipped if its name says so; blank lines do not count as rows."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise PromptError("the benchmark's file is not whole gzip", got=error, where=str(path)) from None
    except OSError as error:
        raise PromptError(f"the benchmark's file cannot be read: {error.strerror}", where=str(path)) from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError("the benchmark's file is not UTF-8", got=f"byte {error.start}", where=str(path)) from None
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"{path}:{number}"
            try:
                rows.append(_Row(json.loads(line), where))
            except json.JSONDecodeError as error:
                raise PromptError("not JSON lines", got=f"{error.msg} at column {error.colno}", where=where) from None
            except (ValueError, RecursionError) as error:  # a number too long, a list too deep
                raise PromptError("not JSON lines", got=error, where=where) from None
    return rows
