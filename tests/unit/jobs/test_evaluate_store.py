"""What an evaluation says of cells that are missing or damaged, and of stores that cannot be used."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from draftsmith.errors import CacheError, ObjectMissingError, StoreError
from draftsmith.jobs import evaluate as job
from draftsmith.jobs import evaluate_cells
from draftsmith.jobs.evaluate_cells import load_decoded
from draftsmith.storage import LocalStore
from tests.evaluate_job import DSPARK, NUM_CELLS, Evaluation, decode, evaluation, evaluation_source, watch

__all__ = ["evaluation", "evaluation_source"]


def test_missing_cells_are_told_with_their_command(evaluation: Evaluation) -> None:
    with pytest.raises(ObjectMissingError) as caught:
        load_decoded(evaluation.workspace, evaluation.params(), DSPARK)
    assert f"lacks {2 * NUM_CELLS} of {2 * NUM_CELLS} decoded cells" in str(caught.value)
    assert "`draftsmith evaluate --key dspark-tiny`" in str(caught.value)
    decode(evaluation)
    lost = next(iter(evaluation.cells(DSPARK)))
    (evaluation.store / "evaluate" / lost).unlink()
    with pytest.raises(ObjectMissingError, match=f"lacks 1 of {2 * NUM_CELLS} decoded cells: got no evaluate/{lost}"):
        load_decoded(evaluation.workspace, evaluation.params(), DSPARK)


def test_a_damaged_cell_is_named_and_mended(evaluation: Evaluation, monkeypatch: pytest.MonkeyPatch) -> None:
    job.run(evaluation.workspace, evaluation.params(), DSPARK)
    before, report = evaluation.cells(), evaluation.report()
    damaged = list(before)[3]
    place = evaluation.store / "evaluate" / damaged
    place.write_bytes(place.read_bytes()[:-9])
    evaluation.workspace.report_dir(DSPARK).joinpath("evaluate.json").unlink()
    with pytest.raises(CacheError) as caught:
        job.run(evaluation.workspace, evaluation.params(), DSPARK)
    assert "decoded answers in the store are damaged" in str(caught.value)
    cure = f"delete evaluate/{damaged} in {evaluation.store}, then `draftsmith evaluate --key dspark-tiny`"
    assert cure in str(caught.value)
    assert not evaluation.workspace.report_dir(DSPARK).joinpath("evaluate.json").exists()
    place.unlink()
    seen = watch(monkeypatch)
    job.run(evaluation.workspace, evaluation.params(), DSPARK)
    assert [name for _, name in seen] == [damaged.partition("/")[2]]
    assert evaluation.report()["accepted_histogram"] == report["accepted_histogram"]
    after = evaluation.cells()
    assert {name for name in after if after[name] != before[name]} == {damaged}


def test_a_store_that_cannot_be_used_is_told_before_weights_are_loaded(
    evaluation: Evaluation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(evaluate_cells, "load_placed", lambda _: pytest.fail("too late"))
    file = tmp_path / "file"
    file.write_text("no folder")
    monkeypatch.setenv("DRAFTSMITH_STORE", str(file))
    with pytest.raises(StoreError, match=str(file)):
        decode(evaluation)

    def refuse(self: LocalStore, path: str, data: bytes) -> None:
        raise StoreError("cannot write x in store s3://b/s", got="AccessDenied", where="DRAFTSMITH_STORE")

    monkeypatch.setenv("DRAFTSMITH_STORE", str(tmp_path / "store"))
    monkeypatch.setattr(LocalStore, "put_if_absent", refuse)
    with pytest.raises(StoreError, match="AccessDenied"):
        decode(evaluation)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_leave_to_write_is_told(evaluation: Evaluation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate_cells, "load_placed", lambda _: pytest.fail("too late"))
    evaluation.store.mkdir(parents=True)
    evaluation.store.chmod(0o555)
    with pytest.raises(StoreError, match="Permission denied"):
        decode(evaluation)
    evaluation.store.chmod(0o755)


def test_a_store_that_refuses_in_the_middle_keeps_what_is_done(
    evaluation: Evaluation, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = LocalStore.put_if_absent

    def full(self: LocalStore, path: str, data: Any) -> Any:
        if path.startswith("evaluate/") and len(evaluation.cells()) == 3:
            raise StoreError(f"the disk of store {self.uri} is full: cannot write {path}")
        return real(self, path, data)

    monkeypatch.setattr(LocalStore, "put_if_absent", full)
    with pytest.raises(StoreError, match="is full: cannot write evaluate/"):
        decode(evaluation)
    before = evaluation.cells()
    assert len(before) == 3
    monkeypatch.setattr(LocalStore, "put_if_absent", real)
    decode(evaluation)
    assert {name: evaluation.cells()[name] for name in before} == before
