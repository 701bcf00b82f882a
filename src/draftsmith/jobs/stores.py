"""The store of a working copy and what lies in it. No torch here, so that looking at a store takes no seconds."""

from __future__ import annotations

import os

from draftsmith.cache.stream_plan import parse_bytes
from draftsmith.errors import ObjectMissingError
from draftsmith.manifest import Manifest
from draftsmith.paths import Workspace
from draftsmith.storage import Store, open_store

DISK_CACHE_VARIABLE = "DRAFTSMITH_DISK_CACHE_BYTES"


def workspace_store(workspace: Workspace) -> Store:
    return open_store(workspace.store_uri)


def reading_store(workspace: Workspace) -> Store:
    """The store to read a cache from again and again: behind a folder of this working copy if it is S3 and the
    environment gives room for that (DRAFTSMITH_DISK_CACHE_BYTES, such as 200GB).

    Raises MachineError if the number of bytes cannot be read.
    """
    store, text = workspace_store(workspace), os.environ.get(DISK_CACHE_VARIABLE, "")
    if not text or not store.uri.startswith("s3://"):
        return store
    from draftsmith.storage_disk import DiskCache

    folder = workspace.data / "scratch" / "disk-cache"
    return DiskCache(store, folder=folder, max_bytes=parse_bytes(text, where=DISK_CACHE_VARIABLE))


def cache_manifest(workspace: Workspace, target: str) -> Manifest:
    return Manifest.read(workspace.cache_manifest(target), "cache")


def stored(store: Store, manifest: Manifest, path: str, *, stage: str) -> bytes:
    """An object of a finished prefix. Raises ObjectMissingError with the command that makes the prefix again."""
    try:
        return store.get(f"{manifest.prefix}/{path}")
    except ObjectMissingError:
        raise ObjectMissingError(
            f"store {store.uri} lacks {manifest.prefix}/{path}",
            expected=f"what the {manifest.kind} manifest names; `dvc repro -f -s {stage}` makes it again",
            where="or DRAFTSMITH_STORE is another store's",
        ) from None
