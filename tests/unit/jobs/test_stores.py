"""Which store a cache is read from: S3 behind a folder of the working copy, if the environment gives room for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from draftsmith.cache.reader import CacheReader
from draftsmith.errors import MachineError
from draftsmith.jobs.stores import reading_store, workspace_store
from draftsmith.paths import Workspace
from draftsmith.storage import open_store
from draftsmith.storage_s3 import S3Store
from tests.s3 import S3Bucket
from tests.unit.cache.toy import Toy, fill, shard_of, toy_arrays, toy_plan

VARIABLE = "DRAFTSMITH_DISK_CACHE_BYTES"


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    monkeypatch.delenv("DRAFTSMITH_STORE", raising=False)
    monkeypatch.delenv(VARIABLE, raising=False)
    return Workspace(tmp_path)


def test_a_folder_is_read_as_it_is(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1GB")
    assert type(reading_store(workspace)) is type(workspace_store(workspace))
    assert not (workspace.data / "scratch").exists()


def test_s3_without_room(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_STORE", "s3://bucket/store")
    assert type(reading_store(workspace)) is type(workspace_store(workspace))


@pytest.mark.parametrize("text", ["much", "-1", "0", "1 XB", "0.1", "9" * 400])
def test_room_that_cannot_be_read(workspace: Workspace, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("DRAFTSMITH_STORE", "s3://bucket/store")
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(MachineError, match=f"cannot be read: got '{text}'.*{VARIABLE}"):
        reading_store(workspace)


@pytest.mark.s3
def test_a_second_process_reads_from_the_folder(
    workspace: Workspace, s3_env: S3Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that the first one read lies in the folder, and the second one fetches no object from the store."""
    monkeypatch.setenv("DRAFTSMITH_STORE", s3_env.uri)
    monkeypatch.setenv(VARIABLE, "10MB")
    plan = toy_plan()
    manifest = fill(open_store(s3_env.uri), plan, Toy(plan))
    fetched: list[str] = []
    get = S3Store.get
    monkeypatch.setattr(S3Store, "get", lambda self, path: (fetched.append(path), get(self, path))[1])
    for expected in (4 * plan.num_shards, 0):
        fetched.clear()
        reader = CacheReader(reading_store(workspace), manifest)
        for index, sample in enumerate(reader.samples):
            assert np.array_equal(reader.read(index).context, toy_arrays(sample, plan.spec).context)
        assert len([path for path in fetched if shard_of(path) is not None]) == expected
    assert fetched == []
    kept = [path for path in (workspace.data / "scratch" / "disk-cache").iterdir() if path.name != "lock"]
    assert len(kept) > 4 * plan.num_shards
