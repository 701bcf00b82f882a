"""What `draftsmith cache gc` deletes: on a folder and a real S3 server, with others coming between, killed half-way."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from draftsmith.cache.claims import Owner
from draftsmith.cache.references import register
from draftsmith.errors import CacheError, StoreError
from draftsmith.jobs import gc
from draftsmith.storage import LocalStore, ObjectInfo, Store, open_store
from tests.s3 import S3Bucket
from tests.unit.cache.toy import PREFIX, Toy, fill, toy_plan
from tests.unit.jobs.clones import OBJECTS, Clone, fill_prefix, make_old
from tests.unit.jobs.gc_fixtures import (
    DOOMED,
    USED,
    WEEK_S,
    claim,
    clone,
    doomed,
    folder_of,
    paths,
    store,
)

__all__ = ["clone", "store"]


@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_only_what_nothing_names_is_deleted(
    clone: Clone, kind: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = str(tmp_path / "store") if kind == "folder" else request.getfixturevalue("s3_env").uri
    monkeypatch.setenv("DRAFTSMITH_STORE", uri)
    store = open_store(uri)
    num_objects, num_bytes = fill_prefix(store, DOOMED)
    others = [USED, "answers/toy-0000dead", "prompts/0000dead", "train/a-0000dead", "cache/toy-0000dead2"]
    for prefix in others:
        fill_prefix(store, prefix)
    store.put(f"records/{DOOMED}/claims/000001.json", store.get(f"records/{DOOMED}/commits/000000.json"))
    store.delete(f"records/{DOOMED}/claims/000001.json")
    clone.commit_cache(USED)
    clone.write_manifest("cache/toy-0000dead2", target="other")
    before = paths(store)

    plan = gc.find(clone.workspace, older_than_s=0)
    assert paths(store) == before
    assert [(entry.prefix, entry.num_objects, entry.num_bytes) for entry in plan.doomed] == [
        (DOOMED, num_objects, num_bytes)
    ]
    assert f"delete  {DOOMED}: 3 objects, 743 B" in plan.text
    assert f"keep    {USED}" in plan.text
    assert "answers" not in plan.text
    assert plan.text.splitlines()[-2:] == [
        "to delete: 1 of 3, 3 objects, 743 B",
        "Commits that this clone has not fetched were not read: `git fetch --all` brings them.",
    ]

    assert gc.delete(clone.workspace, plan) == "deleted 1 of 1: 3 objects, 743 B"
    gone = {f"{DOOMED}/{path}" for path in OBJECTS} | {f"records/{DOOMED}/commits/000000.json"}
    assert paths(store) == sorted(set(before) - gone)
    assert doomed(clone, older_than_s=0) == []
    assert "nothing to delete, 2 kept" in gc.find(clone.workspace, older_than_s=0).text


def test_nothing_is_deleted_while_a_commit_cannot_be_read(clone: Clone, store: Store) -> None:
    before = paths(store)
    plan = gc.find(clone.workspace, older_than_s=WEEK_S)
    clone.commit_cache(USED)
    clone.forget()
    shutil.rmtree(clone.folder / ".dvc" / "cache")
    with pytest.raises(CacheError, match="dvc fetch --all-commits"):
        gc.find(clone.workspace, older_than_s=WEEK_S)
    with pytest.raises(CacheError, match=f"stopped at {DOOMED}: .*0 caches and 0 objects, 0 B were deleted"):
        gc.delete(clone.workspace, plan)
    assert paths(store) == before


def _claimed(clone: Clone, store: Store) -> None:
    claim(store, DOOMED, Owner.this_process(processor="toy"), left_s=60)


def _registered(clone: Clone, store: Store) -> None:
    register(store, DOOMED, root=clone.folder)


def _committed(clone: Clone, store: Store) -> None:
    clone.commit_cache(DOOMED)
    clone.forget()


def _grown(clone: Clone, store: Store) -> None:
    store.put(f"{DOOMED}/context/c/1/0/0", b"new")


@pytest.mark.parametrize("event", [_claimed, _registered, _committed, _grown], ids=lambda way: way.__name__.strip("_"))
def test_what_comes_between_showing_and_deleting_keeps_it(
    clone: Clone, store: Store, event: Callable[[Clone, Store], None]
) -> None:
    store.put("cache/other-00000001/zarr.json", b"{}")
    make_old(folder_of(store))
    plan = gc.find(clone.workspace, older_than_s=WEEK_S)
    assert len(plan.doomed) == 2
    event(clone, store)
    before = [path for path in paths(store) if DOOMED in path]
    told = gc.delete(clone.workspace, plan)
    assert told.startswith(f"kept {DOOMED} after all: ")
    assert told.endswith("deleted 1 of 2: 1 objects, 2 B")
    assert paths(store) == before


def test_a_commit_that_comes_while_another_cache_is_being_deleted(
    clone: Clone, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("cache/a-00000001/zarr.json", b"{}")
    make_old(folder_of(store))
    plan, honest = gc.find(clone.workspace, older_than_s=WEEK_S), LocalStore.delete

    def delete(self: LocalStore, path: str, **version: str) -> None:
        honest(self, path, **version)
        if path == "cache/a-00000001/zarr.json":
            _committed(clone, store)

    monkeypatch.setattr(LocalStore, "delete", delete)
    told = gc.delete(clone.workspace, plan)
    assert told.startswith(f"kept {DOOMED} after all: named by commit ")
    assert told.endswith("deleted 1 of 2: 1 objects, 2 B")


def test_a_writer_that_comes_while_it_is_being_deleted(
    clone: Clone, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gc, "CHUNK", 1)
    monkeypatch.setattr(gc, "LOOK_AGAIN_S", 0.0)
    plan, honest = gc.find(clone.workspace, older_than_s=WEEK_S), LocalStore.delete

    def delete(self: LocalStore, path: str, **version: str) -> None:
        honest(self, path, **version)
        claim(store, DOOMED, Owner.this_process(processor="toy"), left_s=60)

    monkeypatch.setattr(LocalStore, "delete", delete)
    told = gc.delete(clone.workspace, plan)
    assert told.startswith(f"kept {DOOMED}, the rest of it after all: in use by process {os.getpid()}")
    assert told.endswith("deleted 0 of 1: 1 objects, 700 B")
    assert paths(store) == [
        f"{DOOMED}/input_ids/c/0", f"{DOOMED}/zarr.json",
        f"records/{DOOMED}/claims/000000.json", f"records/{DOOMED}/commits/000000.json",
    ]  # fmt: skip


def test_a_store_that_fails_in_the_middle_says_what_was_freed(
    clone: Clone, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("cache/a-00000001/zarr.json", b"{}")
    make_old(folder_of(store))
    plan, honest = gc.find(clone.workspace, older_than_s=WEEK_S), LocalStore.delete

    def delete(self: LocalStore, path: str, **version: str) -> None:
        if path.startswith(DOOMED):
            raise StoreError("the disk is on fire")
        honest(self, path, **version)

    monkeypatch.setattr(LocalStore, "delete", delete)
    with pytest.raises(StoreError, match=rf"stopped at {DOOMED}: the disk is on fire \(1 caches and 1 objects, 2 B"):
        gc.delete(clone.workspace, plan)


def test_a_writer_makes_whole_what_was_half_deleted(
    clone: Clone, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commit records without objects mislead nobody: only the shard that lost an object is computed again."""
    plan = toy_plan()
    digest = fill(store, plan, Toy(plan)).digest
    make_old(folder_of(store))
    honest, deleted = LocalStore.delete, []

    def delete(self: LocalStore, path: str, **version: str) -> None:
        if deleted:
            raise StoreError("the machine goes down")
        deleted.append(path)
        honest(self, path, **version)

    entries = gc.find(clone.workspace, older_than_s=WEEK_S).entries
    only = gc.GcPlan(store.uri, WEEK_S, tuple(entry for entry in entries if entry.prefix == PREFIX))
    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "delete", delete)
        patch.setattr(gc, "THREADS", 1)
        with pytest.raises(StoreError, match="goes down"):
            gc.delete(clone.workspace, only)
    assert deleted == [f"{PREFIX}/context/c.0.0.0"]
    again = Toy(plan)
    assert fill(store, plan, again).digest == digest
    assert sorted(again.computed) == sorted(sample.id for sample in plan.samples if sample.shard == 0)


DIES = """
    import os, signal, sys
    from pathlib import Path
    from draftsmith.jobs import gc
    from draftsmith.paths import Workspace
    from draftsmith.storage import LocalStore
    honest, left = LocalStore.delete, int(sys.argv[2])
    def delete(self, path, **version):
        global left
        honest(self, path, **version)
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    LocalStore.delete, gc.THREADS = delete, 1
    workspace = Workspace(Path(sys.argv[1]))
    gc.delete(workspace, gc.find(workspace, older_than_s=7 * 86400.0))
"""


@pytest.mark.parametrize("num_deletes", [1, 3, 4])
def test_killed_in_the_middle_and_run_again(clone: Clone, store: Store, num_deletes: int) -> None:
    """After the first object, after the last one, and with one record of two left."""
    store.put(f"records/{DOOMED}/references/0.json", b"{}")
    register(store, DOOMED, root=clone.folder)
    (folder_of(store) / f"records/{DOOMED}/references/0.json").unlink()
    make_old(folder_of(store))
    command = [sys.executable, "-c", textwrap.dedent(DIES), str(clone.folder), str(num_deletes)]
    assert subprocess.run(command, timeout=60).returncode == -signal.SIGKILL
    left = paths(store)
    assert len(left) == 5 - num_deletes
    assert sum(path.startswith("records/") for path in left) == min(2, 5 - num_deletes)
    plan = gc.find(clone.workspace, older_than_s=WEEK_S)
    assert [entry.prefix for entry in plan.doomed] == [DOOMED]
    gc.delete(clone.workspace, plan)
    assert paths(store) == []


def test_every_version_is_freed_on_a_bucket_that_keeps_versions(
    clone: Clone, s3_env: S3Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replaced object, objects without a commit record, and one whose id the commit record has."""
    client = s3_env.server.client()
    client.put_bucket_versioning(Bucket=s3_env.bucket, VersioningConfiguration={"Status": "Enabled"})
    monkeypatch.setenv("DRAFTSMITH_STORE", s3_env.uri)
    store = open_store(s3_env.uri)
    infos: list[ObjectInfo] = []
    for path in ("a/c/0", "a/c/1"):
        store.put(f"{DOOMED}/{path}", b"what a killed writer left")
        infos.append(store.put(f"{DOOMED}/{path}", b"the shard" * 20))
    store.put(f"{DOOMED}/zarr.json", b"{}")
    objects = [{"path": "a/c/0", "size": 180, "sha256": "", "version_id": infos[0].version_id}]
    store.put(f"records/{DOOMED}/commits/000000.json", json.dumps({"objects": objects}).encode())
    fill_prefix(store, USED)
    clone.write_manifest(USED)
    assert infos[0].version_id is not None
    told = gc.delete(clone.workspace, gc.find(clone.workspace, older_than_s=0))
    assert told == f"deleted 1 of 1: 5 objects, {2 * 180 + 2 * 25 + 2} B"
    left = client.list_object_versions(Bucket=s3_env.bucket)
    assert sorted(item["Key"].removeprefix("store/") for item in left["Versions"]) == paths(store)
    assert all(USED in path for path in paths(store))
    assert "DeleteMarkers" not in left
