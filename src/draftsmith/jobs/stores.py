"""The store of a working copy and what lies in it. No torch here, so that looking at a store takes no seconds."""

from __future__ import annotations

from draftsmith.errors import ObjectMissingError
from draftsmith.manifest import Manifest
from draftsmith.paths import Workspace
from draftsmith.storage import Store, open_store


def workspace_store(workspace: Workspace) -> Store:
    return open_store(workspace.store_uri)


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
