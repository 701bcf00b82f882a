"""Stores: a local folder or an S3 bucket behind one small protocol. Nothing else in the package opens a store.

Layout of a store: content lies under immutable, content-addressed prefixes (`cache/<target>-<hash8>/...`); records
about a prefix (claims and commits of the processes that fill it) lie beside it under `records/<prefix>/`, so that a
prefix holds its content and nothing else.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from draftsmith.errors import ObjectChangedError, ObjectExistsError, ObjectMissingError, StoreError
from draftsmith.manifest import sha256_hex

STORE_VARIABLE = "DRAFTSMITH_STORE"
PRIVATE_FOLDER = ".draftsmith"
STALE_TEMPORARY_S = 24 * 3600.0


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

    def put(self, path: str, data: bytes) -> ObjectInfo:
        """Write the object, whatever was there."""
        ...

    def put_if_absent(self, path: str, data: bytes) -> ObjectInfo:
        """Write the object if there is none; of several writers exactly one wins. Raises ObjectExistsError."""
        ...

    def put_if_match(self, path: str, data: bytes, *, etag: str) -> ObjectInfo:
        """Replace the object if it is still the one that `etag` names. Raises ObjectChangedError (also if gone)."""
        ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects below the folder `prefix` ("" is the whole store; a closing '/' changes nothing), sorted by path."""
        ...

    def delete(self, path: str) -> None:
        """Remove the object; nothing happens if there is none."""
        ...


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


class LocalStore:
    """A folder. Writes go to a temporary file in `.draftsmith/tmp`, are flushed to disk, then linked or renamed."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    @property
    def uri(self) -> str:
        return str(self._root)

    def get(self, path: str) -> bytes:
        with self._reading(path):
            return self._place(path).read_bytes()

    def get_range(self, path: str, *, start: int, length: int) -> bytes:
        with self._reading(path), open(self._place(path), "rb") as stream:
            stream.seek(start)
            data = stream.read(length)
        if len(data) != length:
            raise StoreError(
                f"{path} ends early", got=f"{len(data)} bytes at {start}", expected=f"{length}", where=self.uri
            )
        return data

    def head(self, path: str) -> ObjectInfo | None:
        try:
            with self._reading(path), open(self._place(path), "rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
                stat = os.fstat(stream.fileno())
        except ObjectMissingError:
            return None
        return ObjectInfo(path, stat.st_size, digest, digest, None, stat.st_mtime)

    def put(self, path: str, data: bytes) -> ObjectInfo:
        with self._writing(path, data) as (temporary, place), self._lock():
            os.replace(temporary, place)
        return self._written(path, data)

    def put_if_absent(self, path: str, data: bytes) -> ObjectInfo:
        with self._writing(path, data) as (temporary, place), self._lock():
            try:
                os.link(temporary, place)
            except FileExistsError:
                raise ObjectExistsError(f"{path} is in {self.uri} already") from None
            except OSError as error:
                # Some file systems have no hard links; among processes of this store the lock does as well.
                if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS):
                    raise
                if place.exists():
                    raise ObjectExistsError(f"{path} is in {self.uri} already") from None
                os.replace(temporary, place)
        return self._written(path, data)

    def put_if_match(self, path: str, data: bytes, *, etag: str) -> ObjectInfo:
        with self._writing(path, data) as (temporary, place), self._lock():
            there = self.head(path)
            if there is None or there.etag != etag:
                got = "no object" if there is None else there.etag
                raise ObjectChangedError(f"{path} in {self.uri} has changed", got=got, expected=etag)
            os.replace(temporary, place)
        return self._written(path, data)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        folder = self._root / check_prefix(prefix)
        found = []
        for parent, names, files in os.walk(folder, onerror=self._refuse_listing):
            if parent == str(self._root) and PRIVATE_FOLDER in names:
                names.remove(PRIVATE_FOLDER)
            found += [os.path.join(parent, name) for name in files]
        paths = sorted((os.path.relpath(name, self._root).replace(os.sep, "/"), name) for name in found)
        for path, name in paths:
            try:
                stat = os.stat(name)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise self._refused("read", path, error) from None
            yield ObjectInfo(path, stat.st_size, "", None, None, stat.st_mtime)

    def delete(self, path: str) -> None:
        place = self._place(path)
        try:
            place.unlink()
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise self._refused("delete", path, error) from None

    def _place(self, path: str) -> Path:
        return self._root / check_path(path)

    def _written(self, path: str, data: bytes) -> ObjectInfo:
        digest = sha256_hex(data)
        return ObjectInfo(path, len(data), digest, digest, None, time.time())

    @contextmanager
    def _reading(self, path: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            if self._root.is_file():
                raise self._refused("read", path, error) from None
            raise ObjectMissingError(f"no object {path} in store {self.uri}") from None
        except OSError as error:
            raise self._refused("read", path, error) from None

    @contextmanager
    def _writing(self, path: str, data: bytes) -> Iterator[tuple[Path, Path]]:
        """Yield a temporary file that holds `data` safely on disk, and the place to move it to."""
        place = self._place(path)
        temporary = self._root / PRIVATE_FOLDER / "tmp" / uuid.uuid4().hex
        try:
            self._prepare_private_folder(temporary.parent)
            place.parent.mkdir(parents=True, exist_ok=True)
            with open(temporary, "xb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            yield temporary, place
            _sync_folder(place.parent)
        except OSError as error:
            raise self._refused("write", path, error) from None
        finally:
            _unlink_quietly(temporary)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Hold the store's lock file; flock is per open file, so it parts threads as well as processes."""
        with open(self._root / PRIVATE_FOLDER / "lock", "ab") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            yield

    def _prepare_private_folder(self, folder: Path) -> None:
        """Make the folder of temporary files; sweep what killed writers left there more than a day ago."""
        folder.mkdir(parents=True, exist_ok=True)
        oldest = time.time() - STALE_TEMPORARY_S
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    stale = entry.stat().st_mtime < oldest
                except FileNotFoundError:
                    continue
                if stale:
                    _unlink_quietly(Path(entry.path))

    def _refuse_listing(self, error: OSError) -> None:
        if not isinstance(error, FileNotFoundError | NotADirectoryError) or self._root.is_file():
            raise self._refused("list", str(error.filename), error)

    def _refused(self, action: str, path: str, error: OSError) -> StoreError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return StoreError(
                f"the disk of store {self.uri} is full: cannot {action} {path}", where=f"free room, or {STORE_VARIABLE}"
            )
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            reason = "a folder that this user may read and write"
            return StoreError(
                f"cannot {action} {path} in store {self.uri}", got=error.strerror, expected=reason, where=STORE_VARIABLE
            )
        return StoreError(
            f"cannot {action} {path} in store {self.uri}", got=error.strerror, expected="a folder", where=STORE_VARIABLE
        )


def _unlink_quietly(place: Path) -> None:
    """Remove a temporary file; the sweep gets what cannot be removed now."""
    try:
        place.unlink(missing_ok=True)
    except OSError:
        return


def _sync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
