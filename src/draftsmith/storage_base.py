"""What every store is: the protocol, what it says of an object, and which paths it takes. No store is opened here."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from draftsmith.errors import StoreError

STORE_VARIABLE = "DRAFTSMITH_STORE"
PRIVATE_FOLDER = ".draftsmith"

# What is written: bytes, or a view of a buffer (of bytes, without gaps) that may be used again after the call.
Content = bytes | memoryview


@dataclass(frozen=True)
class ObjectInfo:
    """What a store says about one object. `path` is relative to the store, `size` in bytes, `modified_s` in Unix time.

    `etag` is what put_if_match takes; it is "" in the listing of a local folder, where it would cost reading every
    file. `sha256` is None where the store does not say it (listings; S3 objects that other programs wrote).
    """

    path: str
    size: int
    etag: str
    sha256: str | None
    version_id: str | None
    modified_s: float


class Store(Protocol):
    """A flat space of objects under relative, '/'-separated paths. Every write of an object is whole or not at all."""

    @property
    def uri(self) -> str:
        """The store's address as the user wrote it in DRAFTSMITH_STORE (no secrets in it)."""
        ...

    def get(self, path: str) -> bytes:
        """The whole object. Raises ObjectMissingError."""
        ...

    def get_range(self, path: str, *, start: int, length: int) -> bytes:
        """Bytes start..start+length-1. Raises ObjectMissingError, and StoreError if the object ends before."""
        ...

    def head(self, path: str) -> ObjectInfo | None:
        """What is known about the object, or None if there is none."""
        ...

    def put(self, path: str, data: Content) -> ObjectInfo:
        """Write the object, whatever was there."""
        ...

    def put_if_absent(self, path: str, data: Content) -> ObjectInfo:
        """Write the object if there is none; of several writers exactly one wins. Raises ObjectExistsError."""
        ...

    def put_if_match(self, path: str, data: Content, *, etag: str) -> ObjectInfo:
        """Replace the object if it is still the one that `etag` names. Raises ObjectChangedError (also if gone)."""
        ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects below the folder `prefix` ("" is the whole store; a closing '/' changes nothing), sorted by path."""
        ...

    def delete(self, path: str, *, version_id: str | None = None) -> None:
        """Remove the object; nothing happens if there is none.

        In a bucket with versions the object's bytes stay as an old version, unless `version_id` names the one to remove
        for good. A folder keeps no versions: there, naming one is a StoreError and nothing is removed.
        """
        ...

    @property
    def retries(self) -> Mapping[str, int]:
        """How often something was done again since this store was opened, by reason; empty if never (a folder)."""
        ...


def check_path(path: str) -> str:
    """`path` if it may name an object: relative, '/'-separated, no empty, '.' or '..' part. Raises StoreError."""
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\\" in path or "\0" in path or parts[0] == PRIVATE_FOLDER:
        raise StoreError("not a path of an object", got=repr(path), expected="relative, parted by '/', without '..'")
    return path


def check_prefix(prefix: str) -> str:
    """`prefix` without its closing '/'; "" names the whole store. Raises StoreError as `check_path` does."""
    bare = prefix.rstrip("/")
    return check_path(bare) if bare else ""


def records_prefix(prefix: str) -> str:
    """Where the records about `prefix` lie: `records/<prefix>`."""
    return f"records/{check_prefix(prefix)}"


def is_held(place: Path) -> bool:
    """True if a process, on any machine that shares the folder, has the file open and locked."""
    try:
        with open(place, "r+b") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        # Locked, or another user's, or of a file system that cannot tell.
        return True
    return False


def describe_retries(retries: Mapping[str, int]) -> str:
    """Such as `9 slow down, 3 timeout`, the most frequent first; "" if there were none."""
    ordered = sorted(retries.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count} {reason}" for reason, count in ordered if count)
