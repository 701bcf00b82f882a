"""What a repository names, in real git repositories; and DVC's files as the real DVC writes them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from draftsmith.errors import CacheError
from draftsmith.jobs.history import History, dvc_cache, parse_lock
from tests.unit.jobs.clones import Clone

OLD, NEW = "cache/toy-00000001", "cache/toy-00000002"


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone.make(tmp_path / "clone")


def named(clone: Clone) -> dict[str, list[str]]:
    return dict(History(clone.folder).read())


def test_a_repository_without_caches_names_none(clone: Clone) -> None:
    assert named(clone) == {}


def test_every_commit_that_brought_a_manifest_in_is_told(clone: Clone) -> None:
    first = clone.commit_cache(OLD)
    second = clone.commit_cache(NEW)
    clone.commit("says the same")
    assert named(clone) == {
        OLD: [f"commit {first[:10]} (data/cache/toy.json)"],
        NEW: ["this working copy (data/cache/toy.json)", f"commit {second[:10]} (data/cache/toy.json)"],
    }


def _branch(clone: Clone) -> None:
    clone.git("checkout", "-q", "-b", "side")
    clone.commit_cache(OLD)
    clone.git("checkout", "-q", "main")


def _tag(clone: Clone) -> None:
    _branch(clone)
    clone.git("tag", "v1", "side")
    clone.git("branch", "-q", "-D", "side")
    clone.git("reflog", "expire", "--expire=all", "--all")


def _remote_branch(clone: Clone) -> None:
    other = clone.clone_to(clone.folder.parent / "other")
    other.commit_cache(OLD)
    clone.git("fetch", "-q", str(other.folder), "main:refs/remotes/other/main")
    shutil.copytree(other.folder / ".dvc" / "cache", clone.folder / ".dvc" / "cache")


def _older_stash(clone: Clone) -> None:
    clone.commit_cache(NEW)
    clone.write_manifest(OLD)
    clone.pin("toy")
    clone.git("stash", "push", "-q")
    (clone.folder / "params.yaml").write_text("a: 1\n")
    clone.git("stash", "push", "-q")


def _reset(clone: Clone) -> None:
    clone.commit_cache(OLD)
    clone.git("reset", "-q", "--hard", "HEAD~1")


def _detached_worktree(clone: Clone) -> None:
    tree = clone.folder.parent / "tree"
    clone.git("worktree", "add", "-q", "--detach", str(tree))
    Clone(tree).commit_cache(OLD)
    shutil.rmtree(tree / "data")


def _merge_of_its_own(clone: Clone) -> None:
    clone.commit_cache(NEW)
    clone.git("checkout", "-q", "-b", "side", "HEAD~1")
    clone.commit("something else")
    clone.git("merge", "-q", "--no-ff", "--no-commit", "main")
    clone.commit_cache(OLD)
    clone.commit_cache(NEW)


def _index(clone: Clone) -> None:
    clone.write_manifest(OLD)
    clone.pin("toy")
    clone.git("add", "dvc.lock")
    (clone.folder / "dvc.lock").unlink()


def _lock_on_disk(clone: Clone) -> None:
    """What `dvc repro` leaves while it runs: it takes the manifest away first."""
    clone.write_manifest(OLD)
    clone.pin("toy")


def _manifest_on_disk(clone: Clone) -> None:
    clone.write_manifest(OLD)


def _worktree_on_disk(clone: Clone) -> None:
    tree = clone.folder.parent / "tree"
    clone.git("worktree", "add", "-q", str(tree))
    Clone(tree).write_manifest(OLD)


def _elsewhere_in_the_tree(clone: Clone) -> None:
    """The project lay in a folder once."""
    clone.write_manifest(OLD)
    clone.pin("toy")
    (clone.folder / "sub").mkdir()
    (clone.folder / "dvc.lock").rename(clone.folder / "sub" / "dvc.lock")
    clone.commit("in a folder")
    (clone.folder / "sub" / "dvc.lock").unlink()
    clone.commit_cache(NEW)


def _by_dvc_two(clone: Clone) -> None:
    """DVC 2 kept files straight in the cache and wrote no `hash` into dvc.lock."""
    clone.commit_cache(OLD)
    cache = clone.folder / ".dvc" / "cache"
    for folder in (cache / "files" / "md5").iterdir():
        folder.rename(cache / folder.name)
    lock = (clone.folder / "dvc.lock").read_text()
    (clone.folder / "dvc.lock").write_text("".join(x for x in lock.splitlines(True) if "hash: md5" not in x))
    clone.git("commit", "-q", "-a", "--amend", "-m", "DVC 2")


WAYS = [
    _branch, _tag, _remote_branch, _older_stash, _reset, _detached_worktree, _merge_of_its_own, _index, _lock_on_disk,
    _manifest_on_disk, _worktree_on_disk, _elsewhere_in_the_tree, _by_dvc_two,
]  # fmt: skip
UNCOMMITTED = {_index, _lock_on_disk, _manifest_on_disk, _worktree_on_disk}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__.strip("_"))
def test_a_prefix_is_named(clone: Clone, way: Callable[[Clone], None]) -> None:
    way(clone)
    if way not in UNCOMMITTED:
        clone.forget()
    if way in (_lock_on_disk, _index):
        shutil.rmtree(clone.folder / "data")
    assert OLD in named(clone)


def test_the_project_may_lie_in_a_folder_of_the_repository(tmp_path: Path) -> None:
    outer = tmp_path / "outer"
    clone = Clone.make(outer / "project")
    shutil.move(clone.folder / ".git", outer / ".git")
    clone.commit("moved")
    Clone(outer).git("worktree", "add", "-q", str(tmp_path / "tree"))
    clone.commit_cache(OLD)
    Clone(tmp_path / "tree" / "project").write_manifest(NEW)
    assert set(named(clone)) == {OLD, NEW}


def test_what_only_a_forgotten_commit_named_is_not_named(clone: Clone) -> None:
    _reset(clone)
    shutil.rmtree(clone.folder / "data")
    history = History(clone.folder)
    assert OLD in history.read()
    clone.git("reflog", "expire", "--expire-unreachable=now", "--all")
    assert named(clone) == {}


def test_a_second_look_sees_what_is_new(clone: Clone) -> None:
    history = History(clone.folder)
    assert dict(history.read()) == {}
    clone.commit_cache(OLD)
    clone.forget()
    assert list(history.read()) == [OLD]


def test_replaced_commits_are_read_as_they_are(clone: Clone) -> None:
    """`git replace` makes git show another commit in a commit's place; the old one comes back when it is deleted."""
    commit = clone.commit_cache(OLD)
    clone.commit_cache(NEW)
    clone.git("replace", commit, clone.git("rev-parse", f"{commit}~1"))
    clone.forget()
    assert OLD in named(clone)


def _refuses(clone: Clone, *words: str) -> None:
    with pytest.raises(CacheError) as caught:
        History(clone.folder).read()
    missing = [word for word in words if word not in str(caught.value)]
    assert missing == [], str(caught.value)


def test_a_manifest_that_is_in_no_cache_is_refused_with_its_commit(clone: Clone) -> None:
    commit = clone.commit_cache(OLD)
    clone.commit_cache(NEW)
    shutil.rmtree(clone.folder / ".dvc" / "cache")
    _refuses(clone, f"commit {commit[:10]}", "data/cache/toy.json", "dvc fetch --all-commits", "dvc push")


def test_a_lost_manifest_of_a_commit_that_only_a_reflog_holds(clone: Clone) -> None:
    _reset(clone)
    shutil.rmtree(clone.folder / "data")
    shutil.rmtree(clone.folder / ".dvc" / "cache")
    _refuses(clone, "git reflog expire --expire-unreachable=now --all")


def test_the_working_copys_own_manifest_stands_in_for_a_lost_one(clone: Clone) -> None:
    clone.commit_cache(OLD)
    shutil.rmtree(clone.folder / ".dvc" / "cache")
    assert list(named(clone)) == [OLD]


def test_another_worktrees_cache_is_searched(clone: Clone) -> None:
    _detached_worktree(clone)
    assert not (clone.folder / ".dvc" / "cache").exists()
    assert OLD in named(clone)


def test_a_changed_manifest_in_dvcs_cache_is_refused(clone: Clone) -> None:
    clone.commit_cache(OLD)
    clone.commit_cache(NEW)
    for path in (clone.folder / ".dvc" / "cache").rglob("*"):
        if path.is_file():
            path.write_text(path.read_text().replace(OLD, NEW))
    _refuses(clone, "has changed in DVC's cache", "data/cache/toy.json")


BROKEN_LOCKS = {
    "a merge nobody settled": "schema: '2.0'\nstages:\n<<<<<<< ours\n  a: {}\n=======\n",
    "no stages": "schema: '2.0'\n",
    "a list": "- 1\n- 2\n",
    "not text": "\x00\x01",
    "no md5": "schema: '2.0'\nstages:\n  cache@toy:\n    outs:\n    - {path: data/cache/toy.json, size: 3}\n",
    "no real md5": "schema: '2.0'\nstages:\n  c:\n    outs:\n    - {path: data/cache/toy.json, md5: ../../../../etc}\n",
}


@pytest.mark.parametrize("text", BROKEN_LOCKS.values(), ids=BROKEN_LOCKS.keys())
def test_a_broken_lock_of_an_old_commit_is_refused(clone: Clone, text: str) -> None:
    (clone.folder / "dvc.lock").write_text(text)
    commit = clone.commit("broken")
    clone.commit_cache(NEW)
    _refuses(clone, f"dvc.lock of commit {commit[:10]}")


def test_stages_of_others_and_empty_locks_name_nothing() -> None:
    text = b"schema: '2.0'\nstages:\n  a:\n    outs:\n    - {path: data/cache/x.npz, md5: 1}\n  b: {cmd: x}\n"
    assert parse_lock(text, where="here") == ()
    assert parse_lock(b"", where="here") == ()


@pytest.mark.parametrize("text", ["{", "[]", '{"kind": "answers", "prefix": "answers/a"}', '{"kind": "cache"}'])
def test_a_manifest_that_is_none_is_refused(clone: Clone, text: str) -> None:
    clone.write_manifest(OLD).write_text(text)
    _refuses(clone, "toy.json", "not the manifest of a cache")


def test_manifests_of_other_versions_are_read(clone: Clone) -> None:
    """An old commit's manifest counts, though no other command would read it any more."""
    clone.write_manifest(OLD).write_text(f'{{"version": 0, "kind": "cache", "prefix": "{OLD}"}}')
    assert list(named(clone)) == [OLD]


def test_an_exported_tree_is_refused(clone: Clone) -> None:
    shutil.rmtree(clone.folder / ".git")
    _refuses(clone, "no git repository", str(clone.folder))


def test_a_shallow_clone_is_refused(clone: Clone, tmp_path: Path) -> None:
    clone.commit_cache(OLD)
    clone.git("clone", "-q", "--depth=1", f"file://{clone.folder}", str(tmp_path / "shallow"))
    _refuses(Clone(tmp_path / "shallow"), "git fetch --unshallow")


def test_a_locked_worktree_on_a_disk_that_is_not_there_is_refused(clone: Clone) -> None:
    _worktree_on_disk(clone)
    tree = clone.folder.parent / "tree"
    clone.git("worktree", "lock", str(tree))
    tree.rename(clone.folder.parent / "unplugged")
    _refuses(clone, str(tree), "locked", "mounted")


def test_a_worktree_that_was_thrown_away_is_passed_over(clone: Clone) -> None:
    _worktree_on_disk(clone)
    shutil.rmtree(clone.folder.parent / "tree")
    assert named(clone) == {}


def test_a_damaged_repository_is_refused(clone: Clone) -> None:
    clone.commit_cache(OLD)
    clone.commit_cache(NEW)
    blob = clone.git("rev-parse", "HEAD~1:dvc.lock")
    (clone.folder / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    _refuses(clone, "dvc.lock of commit", "missing")


def test_a_missing_commit_is_refused(clone: Clone) -> None:
    commit = clone.commit_cache(OLD)
    clone.commit_cache(NEW)
    (clone.folder / ".git" / "objects" / commit[:2] / commit[2:]).unlink()
    _refuses(clone, "git rev-list failed")


def test_dvcs_cache_folder_is_read_from_its_configuration(clone: Clone, tmp_path: Path) -> None:
    assert dvc_cache(clone.folder) == clone.folder / ".dvc" / "cache"
    (clone.folder / ".dvc" / "config.local").write_text("[cache]\n    dir = ../../shared\n")
    assert dvc_cache(clone.folder) == tmp_path / "shared"
    (clone.folder / ".dvc" / "config.local").write_text("[cache\n")
    with pytest.raises(CacheError, match="DVC's configuration"):
        dvc_cache(clone.folder)
    shutil.rmtree(clone.folder / ".dvc")
    assert dvc_cache(clone.folder) is None


def test_what_the_real_dvc_writes(clone: Clone, tmp_path: Path) -> None:
    """`dvc repro` with a cache folder of its own: dvc.lock, the copy in the cache, and the commit that names them."""
    made = clone.write_manifest(OLD).rename(tmp_path / "made.json")
    (clone.folder / "dvc.yaml").write_text(
        "stages:\n  cache:\n    foreach: [toy]\n    do:\n"
        f"      cmd: mkdir -p data/cache && cp {made} data/cache/${{item}}.json\n"
        "      outs:\n      - data/cache/${item}.json\n"
    )
    (clone.folder / ".dvc" / "config").write_text("[core]\n    analytics = false\n[cache]\n    dir = ../elsewhere\n")
    environment = {**os.environ, "DVC_SITE_CACHE_DIR": str(tmp_path / "site"), "DVC_NO_ANALYTICS": "1"}
    subprocess.run(
        [sys.executable, "-m", "dvc", "repro", "-q"], cwd=clone.folder, env=environment, check=True, timeout=120
    )
    commit = clone.commit("by DVC")
    shutil.rmtree(clone.folder / "data")
    (clone.folder / "dvc.lock").unlink()
    clone.git("rm", "-q", "--cached", "dvc.lock")
    assert named(clone) == {OLD: [f"commit {commit[:10]} (data/cache/toy.json)"]}
