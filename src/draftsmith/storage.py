"""Stores: a local folder or an S3 bucket behind one small protocol. Nothing else in the package opens a store.

Layout of a store: content lies under immutable, content-addressed prefixes (`cache/<target>-<hash8>/...`); records
about a prefix (claims and commits of the processes that fill it) lie beside it under `records/<prefix>/`, so that a
prefix holds its content and nothing else.
"""

from __future__ import annotations

import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from draftsmith.errors import ObjectChangedError, ObjectExistsError, ObjectMissingError, StoreError
from draftsmith.storage_base import (
    STORE_VARIABLE,
    ObjectInfo,
    Store,
    check_path,
    check_prefix,
    describe_retries,
    records_prefix,
)
from draftsmith.storage_local import LocalStore

__all__ = [
    "STORE_VARIABLE", "CopyReport", "LocalStore", "ObjectInfo", "Store", "check_path", "check_prefix", "check_store",
    "copy_prefix", "describe_retries", "open_store", "records_prefix",
]  # fmt: skip


def open_store(uri: str) -> Store:
    """Open `s3://bucket/prefix` (credentials and endpoint from AWS's own environment names) or a local folder.

    Opening touches nothing; a folder is made by the first write. Raises StoreError for an address of another kind.
    """
    if uri.startswith("s3://"):
        # Imported here: boto3 takes a third of a second, and most commands on a laptop never need it.
        from draftsmith.storage_s3 import S3Store

        return S3Store.open(uri)
    if not uri or "://" in uri:
        raise StoreError(
            "not an address of a store", got=repr(uri), expected="a folder or s3://bucket/prefix", where=STORE_VARIABLE
        )
    return LocalStore(Path(uri).expanduser())


@dataclass(frozen=True)
class CopyReport:
    """What `copy_prefix` did: objects copied and found there already, and bytes copied; commit records not counted."""

    num_copied: int
    num_present: int
    num_bytes: int


def copy_prefix(source: Store, destination: Store, *, prefix: str) -> CopyReport:
    """Copy everything below `prefix`, and its commit records last, from one store to another; safe to run again.

    An object that is already there with the same sha256 is left alone. Raises ObjectMissingError if the source has
    nothing there, ObjectExistsError if the destination holds other bytes under one of the paths.
    """
    # The whole store is listed with its records; those are copied below, and claims not at all.
    contents = [item for item in source.list(prefix) if not item.path.startswith(records_prefix(""))]
    if not contents:
        raise ObjectMissingError(
            f"store {source.uri} holds nothing" + (f" under {prefix}" if prefix else ""),
            expected="a store with objects",
            where="draftsmith store copy FROM TO",
        )
    copied = present = copied_bytes = 0
    for item in contents:
        there = destination.head(item.path)
        known = source.head(item.path) if there is not None and there.size == item.size else None
        if there is not None and known is not None and known.sha256 is not None and known.sha256 == there.sha256:
            present += 1
            continue
        data = source.get(item.path)
        try:
            destination.put_if_absent(item.path, data)
        except ObjectExistsError:
            if destination.get(item.path) != data:
                raise ObjectExistsError(
                    f"{item.path} differs between the two stores",
                    got=f"other bytes in {destination.uri}",
                    expected=f"those of {source.uri}",
                    where="delete the wrong one, then copy again",
                ) from None
            present += 1
            continue
        copied, copied_bytes = copied + 1, copied_bytes + len(data)
    for item in source.list(records_prefix(prefix)):
        if "/commits/" not in item.path:
            continue
        # Its objects are equal by now, so a record that is there already says the same; only its time and host differ.
        with suppress(ObjectExistsError):
            destination.put_if_absent(item.path, source.get(item.path))
    return CopyReport(copied, present, copied_bytes)


def check_store(store: Store) -> None:
    """Write, read and delete a small object, and see that the store keeps its conditions.

    Everything rests on them, and some S3 servers accept If-None-Match and If-Match and ignore them. Raises StoreError
    for a store that cannot be used or does so.
    """
    path = f"records/probe/{uuid.uuid4().hex}"
    first = store.put_if_absent(path, b"first")
    try:
        with suppress(ObjectExistsError):
            store.put_if_absent(path, b"second")
            raise StoreError(
                f"store {store.uri} cannot be used", got="a server that ignores If-None-Match", where=STORE_VARIABLE
            )
        store.put_if_match(path, b"third", etag=first.etag)
        with suppress(ObjectChangedError):
            store.put_if_match(path, b"fourth", etag=first.etag)
            raise StoreError(
                f"store {store.uri} cannot be used", got="a server that ignores If-Match", where=STORE_VARIABLE
            )
        if store.get(path) != b"third":
            raise StoreError(
                f"store {store.uri} cannot be used", got="other bytes than were written", where=STORE_VARIABLE
            )
    finally:
        store.delete(path)
