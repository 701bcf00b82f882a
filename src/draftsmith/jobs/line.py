"""The whole line on one machine: check the store, let DVC build what is stale, show what came of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.errors import DraftsmithError
from draftsmith.evaluation.page import PageInput, evaluation_page
from draftsmith.evaluation.summary import load_reports, markdown_page
from draftsmith.jobs.stores import workspace_store
from draftsmith.manifest import Manifest, write_bytes
from draftsmith.params import Params
from draftsmith.paths import Workspace
from draftsmith.storage import Store


@dataclass(frozen=True)
class Missing:
    """A stage whose manifest names a prefix that the current store lacks."""

    stage: str
    prefix: str
    store: str


def check_store(workspace: Workspace, params: Params, *, store: Store | None = None) -> list[Missing]:
    """Stages that must run again because the store (by default the workspace's) was emptied or switched, in order."""
    store = store or workspace_store(workspace)
    places = [("prompts", "prompts", workspace.prompts_manifest)]
    places += [(f"answers@{name}", "answers", workspace.answers_manifest(name)) for name in params.active_targets]
    places += [(f"cache@{name}", "cache", workspace.cache_manifest(name)) for name in params.active_targets]
    missing = []
    for stage, kind, path in places:
        if not path.is_file():
            continue
        manifest = Manifest.read(path, kind)
        present = {item.path for item in store.list(manifest.prefix)}
        if any(f"{manifest.prefix}/{item.path}" not in present for item in manifest.objects):
            missing.append(Missing(stage, manifest.prefix, store.uri))
    return missing


def dvc(workspace: Workspace, arguments: list[str]) -> None:
    """Run DVC in the workspace, this interpreter's programs first on the path. Raises DraftsmithError if it fails."""
    folder = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": os.pathsep.join([folder, os.environ.get("PATH", "")])}
    command = [sys.executable, "-m", "dvc", *arguments]
    status = subprocess.run(command, cwd=workspace.root, env=environment, check=False).returncode
    if status != 0:
        raise DraftsmithError(f"dvc {' '.join(arguments)} ended with status {status}", expected="see the message above")


def mend_store(workspace: Workspace, params: Params) -> list[Missing]:
    """Run the stages again whose prefixes the current store lacks."""
    missing = check_store(workspace, params)
    for item in missing:
        dvc(workspace, ["repro", "-f", "-s", item.stage])
    return missing


def tracked_files(workspace: Workspace) -> dict[str, bytes]:
    """The contents of reports and dvc.lock before a run."""
    files = [workspace.root / "dvc.lock", *(workspace.root / "reports").rglob("*")]
    return {str(path.relative_to(workspace.root)): path.read_bytes() for path in files if path.is_file()}


def rewritten_files(workspace: Workspace, before: dict[str, bytes]) -> list[str]:
    """Files that were there before and differ now."""
    after = tracked_files(workspace)
    return sorted(name for name, data in before.items() if name in after and after[name] != data)


def write_comparison(workspace: Workspace, params: Params) -> list[Path]:
    """reports/comparison.md and, of the runs that are evaluated, comparison.html: all of params.yaml side by side.

    Raises DraftsmithError for a report that cannot be used.
    """
    folder = workspace.root / "reports"
    reports = load_reports(workspace, keys=list(params.runs))
    write_bytes(folder / "comparison.md", markdown_page(reports).encode())
    written = [folder / "comparison.md"]
    inputs = [
        PageInput(item.evaluate, _samples(workspace.report_dir(item.key) / "samples.json"))
        for item in reports
        if item.evaluate is not None
    ]
    if inputs:
        write_bytes(folder / "comparison.html", evaluation_page(inputs, title="Drafters side by side").encode())
        written.append(folder / "comparison.html")
    return written


def _samples(path: Path) -> Any:
    """The body of samples.json; None where there is none (it is not in git, `dvc pull` or the stage brings it)."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        raise DraftsmithError(
            "a report is not JSON", expected="run the evaluate stage again", where=str(path)
        ) from None
