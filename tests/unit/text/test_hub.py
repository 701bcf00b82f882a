"""What is read from the hub: columns, file formats, and what is in its cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftsmith.errors import PromptError
from draftsmith.text import hub

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ROWS = [{"prompt": f"question {index}", "tests": "x" * 9} for index in range(3)]


@pytest.fixture
def snapshot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder that the hub's library says it has downloaded."""
    folder = tmp_path / "snapshot"
    folder.mkdir()
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", lambda *_, **__: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(folder))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    return folder


def read(**named: Any) -> list[dict[str, Any]]:
    return list(hub.hub_rows("some/set", **{"split": "test", "revision": COMMIT, "where": "here", **named}))


def write(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path.name


@pytest.mark.parametrize("name", ["test.jsonl", "test.parquet"])
def test_one_file_is_read_under_the_name_of_its_split(snapshot: Path, name: str) -> None:
    write(snapshot / "python" / name)
    assert read(data_file=f"python/{name}") == ROWS


def test_columns(snapshot: Path) -> None:
    write(snapshot / "test.parquet")
    assert read(data_file="test.parquet", columns=("prompt",)) == [{"prompt": row["prompt"]} for row in ROWS]
    with pytest.raises(PromptError, match=r"some/set has no column problem: got \['prompt', 'tests'\] \(here\)"):
        read(data_file="test.parquet", columns=("prompt", "problem"))


def test_a_missing_and_a_broken_file_are_told_by_the_name_of_the_set(snapshot: Path) -> None:
    with pytest.raises(PromptError, match=r"some/set cannot be read.*\(here\)"):
        read(data_file="test.jsonl")
    (snapshot / "test.parquet").write_bytes(b"no parquet")
    with pytest.raises(PromptError, match=r"some/set cannot be read.*\(here\)"):
        read(data_file="test.parquet")


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The hub's cache with one commit of a data set, and no way to the hub."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", lambda *_, **__: pytest.fail("the hub was asked"))
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_tree", lambda *_, **__: pytest.fail("the hub was asked"))
    folder = tmp_path / "datasets--some--set"
    write(folder / "snapshots" / COMMIT / "python" / "test.parquet")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    return folder


def test_what_is_in_the_hubs_cache(cache: Path) -> None:
    assert hub.in_hub_cache("some/set", revision=COMMIT)
    assert hub.in_hub_cache("some/set", revision=None)
    assert hub.in_hub_cache("some/set", revision=COMMIT, data_file="python/test.parquet")
    assert not hub.in_hub_cache("some/set", revision=COMMIT, data_file="java/test.parquet")
    assert not hub.in_hub_cache("some/set", revision=COMMIT[::-1])
    assert not hub.in_hub_cache("some/other", revision=COMMIT)
    (cache / "refs" / "main").unlink()
    assert not hub.in_hub_cache("some/set", revision=None)
