"""Stage `verify@TARGET`: the store still holds what the cache manifest names."""

from __future__ import annotations

from draftsmith.cache.verify import VerifyReport, verify_cache
from draftsmith.errors import CacheError
from draftsmith.jobs.stores import cache_manifest, workspace_store
from draftsmith.manifest import write_json
from draftsmith.params import Params
from draftsmith.paths import Workspace


def run(workspace: Workspace, params: Params, name: str, *, deep: bool, sample_bytes: int | None) -> VerifyReport:
    """Check the sizes of all objects, and the sha256 of all, or of a random sample if there are many bytes.

    `deep` hashes all in any case; `sample_bytes` is how many bytes are many (default 2 GiB), and so many are read.
    Raises CacheError that lists the problems.
    """
    params.target(name)
    manifest = cache_manifest(workspace, name)
    report = verify_cache(workspace_store(workspace), manifest, deep=deep, sample_bytes=sample_bytes)
    if not report.ok:
        raise CacheError(report.text)
    write_json(workspace.verify_receipt(name), {"prefix": manifest.prefix, "digest": manifest.digest})
    return report
