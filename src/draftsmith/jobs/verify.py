"""Stage `verify@TARGET`: the store still holds what the cache manifest names."""

from __future__ import annotations

from draftsmith.cache.verify import VerifyReport, verify_cache
from draftsmith.errors import CacheError
from draftsmith.jobs.stores import cache_manifest, workspace_store
from draftsmith.manifest import write_json
from draftsmith.params import Params
from draftsmith.paths import Workspace


def run(workspace: Workspace, params: Params, name: str, *, deep: bool, sample_bytes: int | None) -> VerifyReport:
    """Check sizes of all objects and sha256 of a sample (all with `deep`). Raises CacheError that lists problems."""
    params.target(name)
    manifest = cache_manifest(workspace, name)
    report = verify_cache(workspace_store(workspace), manifest, deep=deep)
    if not report.ok:
        raise CacheError(report.text)
    write_json(workspace.verify_receipt(name), {"prefix": manifest.prefix, "digest": manifest.digest})
    return report
