"""`draftsmith cache gc` on real repositories, a folder and a real S3 server."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from draftsmith.cache.claims import Owner
from draftsmith.cache.references import register
from draftsmith.errors import CacheError, ParamsError, StoreError
from draftsmith.jobs import gc
from draftsmith.storage import LocalStore, ObjectInfo, Store, open_store
from tests.s3 import S3Bucket
from tests.unit.cache.toy import PREFIX, Toy, fill, toy_plan
from tests.unit.jobs.clones import DAY_S, OBJECTS, Clone, fill_prefix, make_old

WEEK_S = 7 * DAY_S
DOOMED, USED = "cache/toy-0000dead", "cache/toy-00000111"


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone.make(tmp_path / "clone")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A folder store with one cache of a month ago that nothing names."""
    monkeypatch.setenv("DRAFTSMITH_STORE", str(tmp_path / "store"))
    store = LocalStore(tmp_path / "store")
    fill_prefix(store, DOOMED)
    make_old(tmp_path / "store")
    return store


def folder_of(store: Store) -> Path:
    return Path(store.uri)


def doomed(clone: Clone, *, older_than_s: float = WEEK_S) -> list[str]:
    return [entry.prefix for entry in gc.find(clone.workspace, older_than_s=older_than_s).doomed]


def reasons(clone: Clone, prefix: str = DOOMED, *, older_than_s: float = WEEK_S) -> str:
    """Why the prefix is kept; "" if it is not."""
    entries = gc.find(clone.workspace, older_than_s=older_than_s).entries
    return "; ".join(next(entry for entry in entries if entry.prefix == prefix).reasons)


def paths(store: Store, prefix: str = "") -> list[str]:
    return [item.path for item in store.list(prefix)]


def claim(store: Store, prefix: str, owner: Owner, *, left_s: float) -> None:
    """A claim as a writer leaves it, and made old by its own time in the store."""
    body = {"owner": asdict(owner), "token": "t", "renewed_s": time.time(), "lease_s": left_s}
    store.put(f"records/{prefix}/claims/000000.json", json.dumps(body).encode())
    if isinstance(store, LocalStore):
        make_old(folder_of(store))


def reference(store: Store, prefix: str, **changes: str) -> str:
    """A reference of another working copy, a month old; returns the record's path."""
    there = set(paths(store))
    register(store, prefix, root=Path("/"))
    (path,) = set(paths(store)) - there
    body = json.loads(store.get(path)) | changes
    store.put(path, json.dumps(body).encode())
    make_old(folder_of(store))
    return path


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


def test_an_empty_store(clone: Clone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_STORE", str(tmp_path / "nowhere"))
    plan = gc.find(clone.workspace, older_than_s=0)
    assert (plan.doomed, plan.text) == ((), f"store {tmp_path / 'nowhere'} holds no caches")


def test_a_commit_on_another_branch_keeps_it(clone: Clone, store: Store) -> None:
    assert doomed(clone) == [DOOMED]
    clone.git("checkout", "-q", "-b", "side")
    commit = clone.commit_cache(DOOMED)
    clone.git("checkout", "-q", "main")
    clone.forget()
    assert reasons(clone) == f"named by commit {commit[:10]} (data/cache/toy.json)"


def test_an_uncommitted_manifest_keeps_it(clone: Clone, store: Store) -> None:
    clone.write_manifest(DOOMED)
    assert reasons(clone) == "named by this working copy (data/cache/toy.json)"


def test_another_worktree_keeps_it(clone: Clone, store: Store, tmp_path: Path) -> None:
    clone.git("worktree", "add", "-q", str(tmp_path / "tree"))
    Clone(tmp_path / "tree").write_manifest(DOOMED)
    assert reasons(clone) == f"named by worktree {tmp_path / 'tree'} (data/cache/toy.json)"


def test_many_reasons_are_cut_in_the_text_only(clone: Clone, store: Store) -> None:
    for number in range(5):
        clone.write_manifest(DOOMED, target=f"t{number}")
    plan = gc.find(clone.workspace, older_than_s=WEEK_S)
    assert len(plan.entries[0].reasons) == 5
    assert "t2.json" in plan.text
    assert "t3.json" not in plan.text
    assert "and 2 more" in plan.text


@pytest.fixture
def neighbour(clone: Clone, store: Store, tmp_path: Path) -> Clone:
    """Another clone on this machine, which has registered that it uses the cache, a month ago."""
    other = clone.clone_to(tmp_path / "neighbour")
    register(store, DOOMED, root=other.folder)
    make_old(folder_of(store))
    return other


def test_a_registered_clones_manifest_keeps_it(clone: Clone, neighbour: Clone) -> None:
    neighbour.write_manifest(DOOMED)
    assert reasons(clone) == f"used by working copy {neighbour.folder} (data/cache/toy.json)"


def test_a_registered_clones_commit_keeps_it(clone: Clone, neighbour: Clone) -> None:
    commit = neighbour.commit_cache(DOOMED)
    neighbour.git("reset", "-q", "--hard", "HEAD~1")
    neighbour.write_manifest(USED)
    expected = f"used by working copy {neighbour.folder}: commit {commit[:10]} (data/cache/toy.json)"
    assert reasons(clone) == expected


def test_a_registered_clone_that_names_another_does_not(clone: Clone, neighbour: Clone) -> None:
    neighbour.write_manifest(USED)
    assert doomed(clone) == [DOOMED]


def test_a_registered_clone_that_is_gone_does_not(clone: Clone, neighbour: Clone) -> None:
    shutil.rmtree(neighbour.folder)
    assert doomed(clone) == [DOOMED]


def test_a_registered_clone_that_cannot_be_read_keeps_it(clone: Clone, neighbour: Clone) -> None:
    neighbour.write_manifest(DOOMED).write_text("{")
    assert f"{neighbour.folder}, which cannot be asked now" in reasons(clone)


def test_a_registered_tree_without_git_counts_by_its_manifests(clone: Clone, neighbour: Clone) -> None:
    shutil.rmtree(neighbour.folder / ".git")
    assert doomed(clone) == [DOOMED]
    neighbour.write_manifest(DOOMED)
    assert str(neighbour.folder) in reasons(clone)


def test_this_copys_own_reference_alone_keeps_nothing(clone: Clone, store: Store) -> None:
    register(store, DOOMED, root=clone.folder)
    assert "younger than 7 d" in reasons(clone)
    make_old(folder_of(store))
    assert doomed(clone) == [DOOMED]
    clone.write_manifest(DOOMED)
    assert reasons(clone) == "named by this working copy (data/cache/toy.json)"


def test_a_working_copy_on_another_host_keeps_it_until_its_record_is_dropped(clone: Clone, store: Store) -> None:
    path = reference(store, DOOMED, host="far", machine="far 1234", root="/home/you/draftsmith")
    assert reasons(clone) == (
        "used by working copy /home/you/draftsmith on far "
        f"(if it is gone for good, delete {store.uri}/{path})"
    )  # fmt: skip
    (folder_of(store) / path).unlink()
    assert doomed(clone) == [DOOMED]


def test_a_host_of_the_same_name_is_another_machine(clone: Clone, store: Store) -> None:
    reference(store, DOOMED, machine="another", root="/nowhere")
    assert "/nowhere" in reasons(clone)


def test_a_working_copy_on_a_disk_that_is_not_mounted_keeps_it(clone: Clone, store: Store) -> None:
    reference(store, DOOMED, root="/media/disk/draftsmith", mount="/media/disk")
    assert "/media/disk is not mounted now" in reasons(clone)


def test_a_broken_reference_keeps_it(clone: Clone, store: Store) -> None:
    path = reference(store, DOOMED)
    store.put(path, b"{}")
    make_old(folder_of(store))
    assert f"broken reference record: KeyError('host') (delete {store.uri}/{path})" in reasons(clone)


def test_a_live_claim_keeps_it(clone: Clone, store: Store) -> None:
    owner = Owner.this_process(processor="toy")
    claim(store, DOOMED, owner, left_s=60)
    assert reasons(clone) == f"in use by process {os.getpid()} on {owner.host}"


def test_a_claim_of_another_host_keeps_it_for_its_lease(clone: Clone, store: Store) -> None:
    far = Owner("far", "far 1", 4, "5", "toy")
    claim(store, DOOMED, far, left_s=60)
    assert reasons(clone) == "in use by process 4 on far"
    claim(store, DOOMED, far, left_s=-1)
    assert doomed(clone) == [DOOMED]


def test_a_dead_process_keeps_nothing(clone: Clone, store: Store) -> None:
    here = Owner.this_process(processor="toy")
    claim(store, DOOMED, Owner(here.host, here.machine, here.pid, "another start", "toy"), left_s=60)
    assert doomed(clone) == [DOOMED]


def test_a_broken_claim_keeps_it(clone: Clone, store: Store) -> None:
    store.put(f"records/{DOOMED}/claims/000000.json", b"{")
    make_old(folder_of(store))
    assert "broken claim record" in reasons(clone)


@pytest.mark.parametrize("path", [f"{DOOMED}/input_ids/c/0", f"records/{DOOMED}/commits/000000.json"])
def test_one_young_object_or_record_keeps_it(clone: Clone, store: Store, path: str) -> None:
    then = time.time() - 6.9 * DAY_S
    os.utime(folder_of(store) / path, (then, then))
    assert reasons(clone) == "younger than 7 d"
    assert doomed(clone, older_than_s=6.8 * DAY_S) == [DOOMED]


def test_half_written_caches_and_lone_records_are_garbage_too(clone: Clone, store: Store) -> None:
    store.put("cache/half-00000001/zarr.json", b"{}")
    store.put("records/cache/lone-00000001/commits/000000.json", b"{}")
    make_old(folder_of(store))
    plan = gc.find(clone.workspace, older_than_s=WEEK_S)
    assert [entry.prefix for entry in plan.doomed] == ["cache/half-00000001", "cache/lone-00000001", DOOMED]
    assert "cache/lone-00000001: only 1 records, 30 d old" in plan.text
    gc.delete(clone.workspace, plan)
    assert paths(store) == []


def test_what_a_dead_streaming_run_left(clone: Clone, store: Store) -> None:
    prefix = "stream/key-00000001"
    store.put(f"{prefix}/e0/context/c/0", b"x" * 10)
    owner = Owner.this_process(processor="toy")
    body = {"owner": asdict(owner), "token": "t", "renewed_s": time.time(), "lease_s": 60}
    store.put(f"records/{prefix}/claim.json", json.dumps(body).encode())
    make_old(folder_of(store))
    assert "in use by process" in reasons(clone, prefix)
    (folder_of(store) / f"records/{prefix}/claim.json").unlink()
    claim(store, f"{prefix}/e0", owner, left_s=60)
    assert "in use by process" in reasons(clone, prefix)
    claim(store, f"{prefix}/e0", owner, left_s=-1)
    assert doomed(clone) == [DOOMED, prefix]


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


def test_an_exported_tree_is_refused(clone: Clone, store: Store) -> None:
    shutil.rmtree(clone.folder / ".git")
    with pytest.raises(CacheError, match="no git repository"):
        gc.find(clone.workspace, older_than_s=WEEK_S)


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


@pytest.mark.parametrize(
    ("text", "seconds"), [("90m", 5400), ("12h", 43200), ("7d", 604800), ("0d", 0), ("1.5d", 129600), ("2w", 1209600)]
)
def test_ages(text: str, seconds: float) -> None:
    assert gc.parse_age(text) == seconds


@pytest.mark.parametrize("text", ["", "7", "d", "-1d", "7 days", "7D", "nan", "1e3s", "7d7h"])
def test_no_ages(text: str) -> None:
    with pytest.raises(ParamsError, match=r"--older-than cannot be read: got .* expected a number"):
        gc.parse_age(text)


def test_figures_are_told_in_units_of_their_size() -> None:
    assert [gc.size_text(value) for value in (0, 999, 1000, 123_456, 38.1e12, 1.5e15)] == [
        "0 B", "999 B", "1 kB", "123 kB", "38.1 TB", "1,500 TB",
    ]  # fmt: skip
    assert [gc.age_text(value) for value in (0, 119, 120, 7199, 7200, 172799, 172800, 30 * DAY_S)] == [
        "0 s", "119 s", "2 min", "120 min", "2 h", "48 h", "2 d", "30 d",
    ]  # fmt: skip


def test_no_torch_is_loaded() -> None:
    code = "import sys; import draftsmith.jobs.gc; print([n for n in ('torch', 'transformers') if n in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
