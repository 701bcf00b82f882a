"""What `draftsmith cache gc` keeps, and why, on real repositories."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from draftsmith.cache.claims import Owner
from draftsmith.cache.references import register
from draftsmith.errors import CacheError, ParamsError
from draftsmith.jobs import gc
from draftsmith.storage import Store
from tests.unit.jobs.clones import DAY_S, Clone, make_old
from tests.unit.jobs.gc_fixtures import (
    DOOMED,
    USED,
    WEEK_S,
    claim,
    clone,
    doomed,
    folder_of,
    paths,
    reasons,
    reference,
    store,
)

__all__ = ["clone", "store"]


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


def test_an_exported_tree_is_refused(clone: Clone, store: Store) -> None:
    shutil.rmtree(clone.folder / ".git")
    with pytest.raises(CacheError, match="no git repository"):
        gc.find(clone.workspace, older_than_s=WEEK_S)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90m", 5400), ("12h", 43200), ("7d", 604800), ("0d", 0), ("1.5d", 129600), ("2w", 1209600)]
)
def test_ages(text: str, seconds: float) -> None:
    assert gc.parse_age(text) == seconds


@pytest.mark.parametrize("text", ["", "7", "d", "-1d", "7 days", "7D", "nan", "1e3s", "7d7h"])
def test_no_ages(text: str) -> None:
    with pytest.raises(ParamsError, match=r"--older-than cannot be read: got .* expected a number"):
        gc.parse_age(text)


def test_ages_are_told_in_units_of_their_size() -> None:
    assert [gc.age_text(value) for value in (0, 119, 120, 7199, 7200, 172799, 172800, 30 * DAY_S)] == [
        "0 s", "119 s", "2 min", "120 min", "2 h", "48 h", "2 d", "30 d",
    ]  # fmt: skip


def test_no_torch_is_loaded() -> None:
    code = "import sys; import draftsmith.jobs.gc; print([n for n in ('torch', 'transformers') if n in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
