"""Stage `verify@TARGET`: the store still holds what the cache manifest names."""

from __future__ import annotations

import sys

from draftsmith.cache.references import register
from draftsmith.cache.verify import VerifyReport, verify_cache
from draftsmith.errors import CacheError, StoreError
from draftsmith.jobs.stores import cache_manifest, workspace_store
from draftsmith.manifest import write_json
from draftsmith.params import Params
from draftsmith.paths import Workspace
from draftsmith.storage import Store


def run(workspace: Workspace, params: Params, name: str, *, deep: bool, sample_bytes: int | None) -> VerifyReport:
    """Check the sizes of all objects, and the sha256 of all, or of a random sample if there are many bytes.

    `deep` hashes all in any case; `sample_bytes` is how many bytes are many (default 2 GiB), and so many are read.
    Raises CacheError that lists the problems.
    """
    params.target(name)
    manifest = cache_manifest(workspace, name)
    store = workspace_store(workspace)
    report = verify_cache(store, manifest, deep=deep, sample_bytes=sample_bytes)
    if not report.ok:
        raise CacheError(report.text)
    if not manifest.is_stream:
        _register(store, manifest.prefix, workspace)
    write_json(workspace.verify_receipt(name), {"prefix": manifest.prefix, "digest": manifest.digest})
    return report


def _register(store: Store, prefix: str, workspace: Workspace) -> None:
    """Tell the store that this working copy uses the cache; one that may only read says so and goes on."""
    try:
        register(store, prefix, root=workspace.root)
    except StoreError as error:
        sys.stderr.write(f"draftsmith: `cache gc` elsewhere cannot know that {prefix} is used here: {error}\n")
