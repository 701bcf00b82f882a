"""The rows of the benchmarks: what they say about themselves, and the form of their prompts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from draftsmith.errors import PromptError
from draftsmith.evaluation.benchmark_rows import BENCHMARKS, HubFile, PackageFile, Template, TurnList
from draftsmith.manifest import json_digest
from tests.target_fixtures import REPOSITORY

SHARED = REPOSITORY.parent / "shared" / "benchmarks"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="no ../shared/benchmarks beside this repository")
STEP_BY_STEP = "\nPlease reason step by step, and put your final answer within \\boxed{}."
STEPWISE = ("math500", "aime25", "aime24")
PLAIN = {"mbpp": "prompt", "arena_hard": "prompt", "lbpp": "instruction"}

# A row of each source, with what a template could stumble over, and the digest of its turns.
PINNED: list[tuple[str, dict[str, Any], str]] = [
    (
        "gsm8k",
        {"prompt": "How many  legs\nhave 3 spiders?"},
        "3aa0fee688d71a63296eb13a6f5384595579d5aa258930f0d5d52cbe492ddc2e",
    ),
    (
        "math500",
        {"problem": "Solve $x^{2} = \\{4\\}$."},
        "6cf3f2bfd0da05329479cc290c5c96f25f3e48e003d13a54c53fe5198e5df102",
    ),
    (
        "aime25",
        {"problem": "Find $\\boxed{}$ of {x}."},
        "db72a50e71359f67f9856b7d8a68dc1483a18948a4c31bffd731768eed3fdbbe",
    ),
    (
        "mbpp",
        {"prompt": "Write a function to add {a} and \\1."},
        "b0b1592eae1fc38ffbf68202476c20fc382c259f51afa201070d25b4720849fd",
    ),
    (
        "humaneval",
        {"prompt": 'def f(x: dict) -> str:\n    """{x}"""\n'},
        "1d14b5dc657daef639aa4f7414d5abbc1dd4a9a9a931bec4e42f8c6328a7d11a",
    ),
    (
        "livecodebench",
        {"question_content": "Read n. {starter_code}", "starter_code": ""},
        "e9b2e04f4f39f1b2fa19af2bccc28b2893de1219aaa5c8f43937f30097b50743",
    ),
    (
        "livecodebench",
        {"question_content": "Q", "starter_code": "class S:"},
        "4e51044c07a2b943a63450171ef5f60a41deff6c56f3175d1e9524c95b74ed30",
    ),
    (
        "mt_bench",
        {"turns": ["First {turns}.", "Second."]},
        "a407710804920a3bd083cb0714e34ead5a8d8b632a95913d16f0ba0aca093af9",
    ),
    (
        "alpaca",
        {"instruction": "Sort {input}.", "input": "3 1"},
        "720ab6ee63582073a251bc830799398693772f6f88c2b0d11010fe8da2b21836",
    ),
    (
        "alpaca",
        {"instruction": "Sing.", "input": ""},
        "c81c31ec854b4248129e3e4202efa18df8d419b3caf0ab26a7f9a0ce5b5bfd3f",
    ),
    (
        "arena_hard",
        {"prompt": "Tell me\r\na story. "},
        "8e4362a33f8e2abbdc279b68939bd3f144011fb430741cf0cb8ebd79b80df0fd",
    ),
]


def shared_turns(name: str) -> list[list[str]]:
    lines = (SHARED / BENCHMARKS[name].file).read_text().split("\n")
    return [json.loads(line)["turns"] for line in lines if line]


def test_the_rows() -> None:
    paper = {"gsm8k": 500, "math500": 500, "aime25": 30, "humaneval": 164, "mbpp": 256, "livecodebench": 500}
    chat = {"mt_bench": 80, "alpaca": 500, "arena_hard": 500}
    beyond = {"aime24": None, "lbpp": None, "swe_bench_lite": None}
    assert {name: row.reference_count for name, row in BENCHMARKS.items()} == {**paper, **chat, **beyond}
    assert {name for name, row in BENCHMARKS.items() if row.domain == "chat"} == set(chat)
    assert {name for name, row in BENCHMARKS.items() if row.domain == "math"} == {"gsm8k", *STEPWISE}
    assert {name: row.num_turns for name, row in BENCHMARKS.items() if row.num_turns != 1} == {"mt_bench": 2}
    files = [row.file for row in BENCHMARKS.values()]
    assert len(set(files)) == len(files)


def test_facts_of_a_row() -> None:
    assert BENCHMARKS["mbpp"].facts() == {
        "name": "mbpp",
        "domain": "code",
        "source": "google-research-datasets/mbpp (sanitized)",
        "revision": "4bb6404fdc6cacfda99d4ac4205087b89d32030c",
        "split": "test",
        "prompt_form": "{prompt}",
        "turns": 1,
        "reference_count": 256,
        "licence": "CC-BY-4.0",
    }
    mt_bench = BENCHMARKS["mt_bench"].facts()
    assert (mt_bench["turns"], mt_bench["prompt_form"], mt_bench["revision"]) == (2, "each of {turns}", "26.3")
    assert BENCHMARKS["lbpp"].facts()["revision"] is None
    assert BENCHMARKS["aime24"].facts()["prompt_form"] == "{problem}" + STEP_BY_STEP
    assert BENCHMARKS["alpaca"].facts()["prompt_form"] == (
        "{instruction}\n\n{input} [or a form for rows without input]"
    )


@pytest.mark.parametrize("name", BENCHMARKS)
def test_facts_are_json_of_one_shape(name: str) -> None:
    facts = BENCHMARKS[name].facts()
    assert json.loads(json.dumps(facts)) == facts
    assert list(facts) == list(BENCHMARKS["gsm8k"].facts())
    assert facts["licence"]
    assert facts["source"]


def test_revisions_are_commits_of_the_hub_or_the_versions_that_are_installed() -> None:
    pins = dict(
        line.split("#")[0].strip().split("==")
        for line in (REPOSITORY / "requirements-data.txt").read_text().splitlines()
        if "==" in line and not line.startswith("#")
    )
    for row in BENCHMARKS.values():
        if isinstance(row.source, PackageFile):
            assert row.source.revision == pins[row.source.package]
        elif row.name != "lbpp":
            assert isinstance(row.source, HubFile)
            assert row.source.revision is not None
            assert len(row.source.revision) == 40
            int(row.source.revision, 16)


@pytest.mark.parametrize(("name", "row", "digest"), PINNED)
def test_the_texts_of_earlier_rows_stay(name: str, row: dict[str, Any], digest: str) -> None:
    assert json_digest(BENCHMARKS[name].turns(row)) == digest


def test_every_earlier_row_is_pinned() -> None:
    assert {name for name, *_ in PINNED} == set(BENCHMARKS) - {"aime24", "lbpp", "swe_bench_lite"}


def test_forms_of_later_rows() -> None:
    assert BENCHMARKS["aime24"].turns({"problem": "1 + {problem}?"}) == ["1 + {problem}?" + STEP_BY_STEP]
    assert BENCHMARKS["lbpp"].turns({"instruction": "Sort.", "signature": "def f"}) == ["Sort."]
    assert BENCHMARKS["swe_bench_lite"].turns({"problem_statement": "It fails.\r\n"}) == [
        "Problem Statement:\nIt fails.\r\n\n\nPlease fix the issue described above."
    ]


@needs_shared
def test_forms_give_the_public_prompts() -> None:
    for name in STEPWISE:
        for (text,) in shared_turns(name):
            assert BENCHMARKS[name].turns({"problem": text.removesuffix(STEP_BY_STEP)}) == [text]
    for (text,) in shared_turns("livecodebench"):
        question = text.partition("### Question:\n")[2].rpartition("\n\n### Format:")[0]
        assert BENCHMARKS["livecodebench"].turns({"question_content": question, "starter_code": ""}) == [text]
    for (text,) in shared_turns("swe_bench_lite"):
        issue = text.removeprefix("Problem Statement:\n").removesuffix("\n\nPlease fix the issue described above.")
        assert len(issue) < len(text) - 50
        assert BENCHMARKS["swe_bench_lite"].turns({"problem_statement": issue}) == [text]
    for name, column in PLAIN.items():
        for (text,) in shared_turns(name):
            assert BENCHMARKS[name].turns({column: text}) == [text]


def test_forms_with_optional_parts() -> None:
    form = BENCHMARKS["livecodebench"].turns({"question_content": "Q", "starter_code": "class S:"})[0]
    assert "```python\nclass S:\n```" in form
    assert "YOUR CODE HERE" not in form
    assert "YOUR CODE HERE" in BENCHMARKS["livecodebench"].turns({"question_content": "Q", "starter_code": ""})[0]
    assert BENCHMARKS["alpaca"].turns({"instruction": "Sort.", "input": "3 1"}) == ["Sort.\n\n3 1"]
    assert BENCHMARKS["alpaca"].turns({"instruction": "Sing.", "input": ""}) == ["Sing."]


def test_columns_of_a_form() -> None:
    assert BENCHMARKS["livecodebench"].form.columns == ("question_content", "starter_code")
    assert BENCHMARKS["aime25"].form.columns == ("problem",)
    assert TurnList().columns == ("turns",)
    assert Template("{b}", optional="c", without="{a}").columns == ("a", "b", "c")


def test_a_column_must_be_there_and_be_text() -> None:
    with pytest.raises(KeyError, match="problem"):
        BENCHMARKS["aime24"].turns({"prompt": "a"})
    with pytest.raises(PromptError, match="column problem is not text: got int"):
        BENCHMARKS["aime24"].turns({"problem": 4})
