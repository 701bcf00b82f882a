"""`compare`: keys, folders and files name a report; what cannot be found is told with the places."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftsmith.errors import DraftsmithError
from draftsmith.jobs import compare
from draftsmith.paths import Workspace
from tests.unit.evaluation.evaluations import body_of_lengths

GOOD, POOR = "good-tiny", "poor-tiny"
LENGTHS = {GOOD: {"gsm8k": [[2], [1]] * 4}, POOR: {"gsm8k": [[1], [0]] * 4}}


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    found = Workspace(tmp_path)
    for key, lengths in LENGTHS.items():
        folder = found.report_dir(key)
        folder.mkdir(parents=True)
        (folder / "evaluate.json").write_text(json.dumps(body_of_lengths(key, lengths)))
    return found


def test_keys_folders_and_files_are_the_same(workspace: Workspace) -> None:
    folder = workspace.report_dir(POOR)
    texts = set()
    for name in (POOR, str(folder), str(folder / "evaluate.json")):
        found = compare.run(GOOD, name, margin=0.2, temperature=None, workspace=workspace)
        assert found.regressed
        texts.add(found.text)
    [text] = texts
    assert f"A, the baseline: {GOOD} ({workspace.report_dir(GOOD) / 'evaluate.json'})\n" in text
    assert f"B, the candidate: {POOR} ({folder / 'evaluate.json'})\n" in text
    assert not compare.run(POOR, GOOD, margin=0.2, temperature=0.0, workspace=workspace).regressed


def test_files_need_no_working_copy(workspace: Workspace) -> None:
    places = [str(workspace.report_dir(key)) for key in (GOOD, POOR)]
    assert compare.run(*places, margin=0.2, temperature=None, workspace=None).regressed


def test_a_key_comes_before_a_folder_of_its_name(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workspace.root)
    Path(GOOD).mkdir()
    (Path(GOOD) / "evaluate.json").write_text(json.dumps(body_of_lengths("other", LENGTHS[POOR])))
    assert compare.find_report(GOOD, workspace=workspace) == workspace.report_dir(GOOD) / "evaluate.json"
    assert compare.find_report(f"./{GOOD}", workspace=workspace) == Path(GOOD) / "evaluate.json"
    assert compare.find_report(GOOD, workspace=None) == Path(GOOD) / "evaluate.json"


def test_what_is_not_there_is_told(workspace: Workspace) -> None:
    with pytest.raises(DraftsmithError, match=r"no evaluation 'none-tiny': got no file at .*/reports/none-tiny/eval"):
        compare.run(GOOD, "none-tiny", margin=0.2, temperature=None, workspace=workspace)
    with pytest.raises(DraftsmithError, match=r"no params\.yaml here or above, so a key means nothing"):
        compare.run(GOOD, POOR, margin=0.2, temperature=None, workspace=None)


def test_an_old_report_is_refused(workspace: Workspace) -> None:
    path = workspace.report_dir(POOR) / "evaluate.json"
    path.write_text('{"schema_version": 1}')
    with pytest.raises(DraftsmithError, match=r"got 1, expected 2; run the evaluate stage again \(.*poor-tiny"):
        compare.run(GOOD, POOR, margin=0.2, temperature=None, workspace=workspace)


def test_a_folder_by_itself_is_no_report(workspace: Workspace) -> None:
    with pytest.raises(DraftsmithError, match="no evaluation"):
        compare.run(GOOD, str(workspace.root), margin=0.2, temperature=None, workspace=workspace)


@pytest.mark.parametrize("temperature", [None, 0.0])
def test_a_candidate_that_skipped_a_benchmark_is_refused(workspace: Workspace, temperature: float | None) -> None:
    """What it was not measured on could be what it lost."""
    both = {"gsm8k": [[2], [1]] * 4, "humaneval": [[1], [2]] * 4}
    (workspace.report_dir(GOOD) / "evaluate.json").write_text(json.dumps(body_of_lengths(GOOD, both)))
    with pytest.raises(
        DraftsmithError, match=r"not measured on all .* got no humaneval at temperature 0, expected every"
    ):
        compare.run(GOOD, POOR, margin=0.2, temperature=temperature, workspace=workspace)
    assert not compare.run(POOR, GOOD, margin=0.2, temperature=temperature, workspace=workspace).regressed


@pytest.mark.parametrize("field", ["key", "rows", "provenance"])
def test_a_report_that_lacks_a_field_is_no_regression_but_an_error(workspace: Workspace, field: str) -> None:
    path = workspace.report_dir(POOR) / "evaluate.json"
    body = json.loads(path.read_text())
    del body[field]
    path.write_text(json.dumps(body))
    with pytest.raises(DraftsmithError, match=f"lacks what a comparison needs: got KeyError: '{field}', expected two"):
        compare.run(GOOD, POOR, margin=0.2, temperature=None, workspace=workspace)
