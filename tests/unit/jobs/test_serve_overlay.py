"""reports/serving.md and .html from whatever serving studies lie in a working copy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftsmith.errors import DraftsmithError
from draftsmith.jobs.serve_overlay import write_overlay
from draftsmith.params import load_params
from draftsmith.paths import Workspace
from tests.serve_bodies import study

PARAMS = load_params(Path(__file__).parents[3] / "params.yaml")
KEYS = list(PARAMS.runs)


def put(workspace: Workspace, key: str, text: str) -> None:
    workspace.report_dir(key).mkdir(parents=True)
    (workspace.report_dir(key) / "serve.json").write_text(text)


def test_without_a_study_nothing_is_written(tmp_path: Path) -> None:
    assert write_overlay(Workspace(tmp_path), PARAMS) == []
    assert not (tmp_path / "reports").exists()


def test_the_keys_that_have_a_study_are_shown(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    put(workspace, KEYS[0], json.dumps(study(key=KEYS[0])))
    paths = write_overlay(workspace, PARAMS)
    assert paths == [tmp_path / "reports" / name for name in ("serving.md", "serving.html")]
    assert f"- target: {PARAMS.run(KEYS[0]).target}\n" in paths[0].read_text()
    assert "Group 1: measured" in paths[1].read_text()
    put(workspace, KEYS[1], json.dumps(study(key=KEYS[1])))
    write_overlay(workspace, PARAMS)
    assert f"| {KEYS[1].split('-')[0]} (" in paths[0].read_text()


def test_a_broken_study_is_named(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    put(workspace, KEYS[0], "{")
    with pytest.raises(DraftsmithError, match="not JSON: expected run the serve stage again"):
        write_overlay(workspace, PARAMS)
