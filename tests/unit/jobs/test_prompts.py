"""Stage prompts keeps its splits clear of the benchmarks that are evaluated, of a folder's files as well."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draftsmith.errors import PromptError
from draftsmith.jobs import prompts as job
from draftsmith.manifest import Manifest
from draftsmith.params import Params, load_params
from draftsmith.paths import Workspace
from draftsmith.storage import open_store
from draftsmith.text.rows import decode_prompts
from tests.target_fixtures import REPOSITORY

PLANTED = "Nora packs 12 crates of plums each morning and sells 7 of them at the harbour before noon. How many remain?"
OWN = [f"Describe how a lighthouse keeper spends day {name} on the island." for name in ("one", "two", "three", "four")]


class Tracked:
    """A run that is recorded nowhere."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    @contextlib.contextmanager
    def stage_run(*_: object, **__: object) -> Iterator[Tracked]:
        yield Tracked()

    monkeypatch.setattr(job, "stage_run", stage_run)
    monkeypatch.setenv("DRAFTSMITH_STORE", str(tmp_path / "store"))
    rows = [json.dumps({"turns": [text]}) + "\n" for text in [*OWN, PLANTED.replace("12", "15")]]
    (tmp_path / "mine.jsonl").write_text("".join(rows))
    return Workspace(tmp_path)


def params(folder: str | None) -> Params:
    whole = load_params(REPOSITORY / "params.yaml")
    prompts = {
        "sources": [], "files": [{"path": "mine.jsonl", "domain": "chat"}], "mix": {"chat": 1.0}, "num_train": 2,
        "num_validation": 1, "num_calibration": 1,
    }  # fmt: skip
    evaluate = {**whole.evaluate.model_dump(), "folder": folder, "benchmarks": [{"name": "gsm8k", "cap": 1}]}
    return whole.model_copy(
        update={
            "prompts": type(whole.prompts).model_validate(prompts),
            "evaluate": type(whole.evaluate).model_validate(evaluate),
        }
    )


def run(workspace: Workspace, folder: str | None) -> Manifest:
    job.run(workspace, params(folder))
    return Manifest.read(workspace.prompts_manifest, "prompts")


def texts(workspace: Workspace, manifest: Manifest) -> set[str]:
    store = open_store(workspace.store_uri)
    found = [decode_prompts(store.get(f"{manifest.prefix}/{item.path}")) for item in manifest.objects]
    return {turn for prompts in found for prompt in prompts for turn in prompt.turns}


def test_a_folder_is_kept_clear_of(workspace: Workspace) -> None:
    folder = workspace.root / "bench"
    folder.mkdir()
    rows = [json.dumps({"turns": [text]}) + "\n" for text in ("What is 1 + 1?", PLANTED)]
    (folder / "gsm8k.jsonl").write_text("".join(rows))  # the planted one is beyond the cap of 1
    manifest = run(workspace, "bench")
    assert texts(workspace, manifest) == set(OWN)
    assert manifest.facts["counts"]["file:mine.jsonl"] == {"near a benchmark prompt": 1, "used": 4}
    assert (manifest.facts["kept_clear_of"], manifest.facts["benchmarks_folder"]) == (["gsm8k"], "bench")


def test_without_a_folder_the_sources_are_read(workspace: Workspace) -> None:
    manifest = run(workspace, None)
    assert manifest.facts["counts"]["file:mine.jsonl"] == {"not needed": 1, "used": 4}
    assert manifest.facts["benchmarks_folder"] is None


def test_a_folder_without_the_benchmark_stops_the_stage(workspace: Workspace) -> None:
    (workspace.root / "bench").mkdir()
    with pytest.raises(PromptError, match=r"gsm8k: its file is missing.*evaluate\.folder"):
        run(workspace, "bench")
    assert not workspace.prompts_manifest.exists()
