"""The store of a working copy and what lies in it. No torch here, so that looking at a store takes no seconds."""

from __future__ import annotations

import os

from draftsmith.cache.stream_plan import parse_bytes
from draftsmith.errors import CacheError, ObjectMissingError
from draftsmith.manifest import Manifest, sha256_hex
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
    """An object of a finished prefix, checked against its manifest. Raises ObjectMissingError with the command that
    makes the prefix again, and CacheError if the object is not the one that the manifest names."""
    place, record = f"{manifest.prefix}/{path}", manifest.find(path)
    try:
        data = store.get(place)
    except ObjectMissingError:
        raise ObjectMissingError(
            f"store {store.uri} lacks {manifest.prefix}/{path}",
            expected=f"what the {manifest.kind} manifest names; `dvc repro -f -s {stage}` makes it again",
            where="or DRAFTSMITH_STORE is another store's",
        ) from None
    digest = sha256_hex(data)
    if record is None or digest != record.sha256:
        raise CacheError(
            f"{place} in {store.uri} is not what the {manifest.kind} manifest names",
            got=f"{len(data)} bytes, sha256 {digest}",
            expected="no such object" if record is None else f"{record.size} bytes, sha256 {record.sha256}",
            where=f"delete it, then dvc repro -f -s {stage}",
        )
    return data
