"""Provenance against git itself and against folders that are no repository."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from draftsmith import provenance
from draftsmith.provenance import read_hardware, read_provenance, read_source, read_versions


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "copy with spaces"
    root.mkdir()
    git(root, "init", "-b", "work")
    (root / "params.yaml").write_text("a: 1\n")
    (root / "dvc.lock").write_text("schema: '2.0'\n")
    (root / "reports" / "k").mkdir(parents=True)
    (root / "reports" / "k" / "evaluate.json").write_text("{}\n")
    git(root, "add", "-A")
    git(root, "commit", "-m", "first")
    return root


def test_a_clean_copy(repository: Path) -> None:
    source = read_source(repository)
    assert source.commit == git(repository, "rev-parse", "HEAD")
    assert (source.branch, source.dirty, source.changed) == ("work", "no", ())
    assert source.dvc_lock == hashlib.sha256(b"schema: '2.0'\n").hexdigest()


def test_figures_and_lock_do_not_make_a_copy_dirty(repository: Path) -> None:
    (repository / "dvc.lock").write_text("changed\n")
    (repository / "reports" / "k" / "evaluate.json").write_text("[1]\n")
    (repository / "reports" / "k" / "new.json").write_text("{}\n")
    assert read_source(repository).dirty == "no"
    (repository / "params.yaml").write_text("a: 2\n")
    (repository / "new file.py").write_text("")
    assert read_source(repository).changed == ("new file.py", "params.yaml")
    assert read_source(repository).dirty == "yes"


def test_a_renamed_file_counts_under_both_names(repository: Path) -> None:
    git(repository, "mv", "params.yaml", "renamed.yaml")
    assert read_source(repository).changed == ("params.yaml", "renamed.yaml")


def test_a_workspace_below_the_top_folder_names_its_own_files(repository: Path) -> None:
    inner = repository / "inner"
    (inner / "reports").mkdir(parents=True)
    (inner / "reports" / "x.json").write_text("{}")
    (inner / "dvc.lock").write_text("x")
    assert read_source(inner).dirty == "no"
    (inner / "params.yaml").write_text("")
    assert read_source(inner).changed == ("params.yaml",)


def test_a_detached_head(repository: Path) -> None:
    git(repository, "checkout", "--detach")
    assert read_source(repository).branch == "detached"


def test_a_repository_without_a_commit(tmp_path: Path) -> None:
    git(tmp_path, "init", "-b", "main")
    source = read_source(tmp_path)
    assert (source.commit, source.branch, source.dirty, source.dvc_lock) == ("unknown", "main", "no", "none")


def test_no_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    source = read_source(tmp_path)
    assert (source.commit, source.branch, source.dirty, source.changed) == ("unknown", "unknown", "unknown", ())


def test_no_git_program(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    source = read_source(repository)
    assert (source.commit, source.branch, source.dirty) == ("unknown", "unknown", "unknown")
    assert len(source.dvc_lock) == 64


def test_variables_of_a_git_hook_do_not_mislead(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-b", "elsewhere")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    assert read_source(repository).branch == "work"


def test_hardware_agrees_with_the_system() -> None:
    hardware = read_hardware()
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert hardware.memory_bytes == pytest.approx(pages, rel=0.01)
    assert 1 <= hardware.num_cores <= (os.cpu_count() or 1)
    assert hardware.cpu_model
    assert f"{hardware.num_cores} x {hardware.cpu_model}" in hardware.description


def test_gpu_names_come_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H100'\necho 'NVIDIA L4'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert provenance._gpu_names() == ("NVIDIA H100", "NVIDIA L4")
    program.write_text("#!/bin/sh\nexit 9\n")
    assert provenance._gpu_names() == ()


def test_versions_and_tags(repository: Path) -> None:
    import numpy
    import torch

    versions = read_versions()
    assert versions["python"] == ".".join(str(part) for part in sys.version_info[:3])
    assert versions["torch"] == torch.__version__
    assert numpy.__name__ not in versions
    facts = read_provenance(repository)
    tags = facts.as_tags()
    assert tags["version.torch"] == torch.__version__
    assert tags["git_commit"] == facts.as_dict()["git_commit"] == git(repository, "rev-parse", "HEAD")
    assert tags["hardware"] == read_hardware().description
    assert all(isinstance(value, str) for value in tags.values())


def test_no_torch_is_imported() -> None:
    code = "import sys, draftsmith.provenance, draftsmith.tracking; print({'torch', 'mlflow'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
