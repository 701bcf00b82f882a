"""The cells of an evaluation on a real S3 server, and a server that refuses."""

from __future__ import annotations

import pytest

from draftsmith.errors import StoreError
from draftsmith.jobs import evaluate_cells
from draftsmith.jobs.evaluate_cells import load_decoded
from draftsmith.storage import open_store
from tests.evaluate_job import DSPARK, NUM_ANSWERS, NUM_CELLS, Evaluation, decode, evaluation, evaluation_source
from tests.s3 import S3Bucket

__all__ = ["evaluation", "evaluation_source"]

pytestmark = pytest.mark.s3


def test_cells_lie_in_a_bucket_as_in_a_folder(
    evaluation: Evaluation, s3_env: S3Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode(evaluation)
    local = load_decoded(evaluation.workspace, evaluation.params(), DSPARK)
    monkeypatch.setenv("DRAFTSMITH_STORE", s3_env.uri)
    decode(evaluation)
    found = load_decoded(evaluation.workspace, evaluation.params(), DSPARK)
    assert [(item.generations, item.plain) for item in found] == [(item.generations, item.plain) for item in local]
    paths = [item.path for item in open_store(s3_env.uri).list("")]
    assert paths == [f"evaluate/{name}" for name in evaluation.cells()]
    assert len(paths) == 2 * NUM_CELLS
    monkeypatch.setattr(evaluate_cells, "load_placed", lambda _: pytest.fail("all is there"))
    assert decode(evaluation) == 2 * NUM_ANSWERS


def test_a_server_that_refuses_is_told_before_anything_is_decoded(
    evaluation: Evaluation, s3_env: S3Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate_cells, "load_placed", lambda _: pytest.fail("too late"))
    monkeypatch.setenv("DRAFTSMITH_STORE", s3_env.uri)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(StoreError) as caught:
        decode(evaluation)
    assert s3_env.uri in str(caught.value)
    assert "SignatureDoesNotMatch" in str(caught.value)
