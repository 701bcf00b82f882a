"""A repository and a store with one cache that nothing names, for the tests of `draftsmith cache gc`."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from draftsmith.cache.claims import Owner
from draftsmith.cache.references import register
from draftsmith.jobs import gc
from draftsmith.storage import LocalStore, Store
from tests.unit.jobs.clones import DAY_S, Clone, fill_prefix, make_old

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
