"""The local folder as a store: objects are plain files at their paths, so that Zarr, DVC and people read them."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from draftsmith.errors import ObjectChangedError, ObjectExistsError, ObjectMissingError, StoreError
from draftsmith.storage_base import (
    PRIVATE_FOLDER,
    STORE_VARIABLE,
    Content,
    ObjectInfo,
    check_path,
    check_prefix,
    is_held,
)

# A temporary file so old is a killed writer's: if nobody has it open, and where that cannot be told in any case.
UNHELD_TEMPORARY_S = 60.0
STALE_TEMPORARY_S = 24 * 3600.0


class LocalStore:
    """A folder. Writes go to a temporary file in `.draftsmith/tmp`, are flushed to disk, then linked or renamed."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    @property
    def uri(self) -> str:
        return str(self._root)

    @property
    def retries(self) -> Mapping[str, int]:
        return {}

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

    def put(self, path: str, data: Content) -> ObjectInfo:
        with self._writing(path, data) as (temporary, place), self._lock():
            os.replace(temporary, place)
        return self._written(path, data)

    def put_if_absent(self, path: str, data: Content) -> ObjectInfo:
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

    def put_if_match(self, path: str, data: Content, *, etag: str) -> ObjectInfo:
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

    def delete(self, path: str, *, version_id: str | None = None) -> None:
        place = self._place(path)
        if version_id is not None:
            # An id can only come from another store; to remove the one file that is here would not be what was asked.
            raise StoreError(
                f"cannot delete a version of {path} in store {self.uri}",
                got=f"version id {version_id}",
                expected="none: a folder keeps no versions",
            )
        try:
            place.unlink()
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise self._refused("delete", path, error) from None

    def _place(self, path: str) -> Path:
        return self._root / check_path(path)

    def _written(self, path: str, data: Content) -> ObjectInfo:
        digest = hashlib.sha256(data).hexdigest()
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
    def _writing(self, path: str, data: Content) -> Iterator[tuple[Path, Path]]:
        """Yield a temporary file that holds `data` safely on disk, and the place to move it to."""
        place = self._place(path)
        temporary = self._root / PRIVATE_FOLDER / "tmp" / uuid.uuid4().hex
        try:
            self._prepare_private_folder(temporary.parent)
            place.parent.mkdir(parents=True, exist_ok=True)
            with open(temporary, "xb") as stream:
                with suppress(OSError):
                    fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
        """Make the folder of temporary files; sweep what killed writers left there."""
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    age_s = now - entry.stat().st_mtime
                except FileNotFoundError:
                    continue
                if age_s > STALE_TEMPORARY_S or (age_s > UNHELD_TEMPORARY_S and not is_held(Path(entry.path))):
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
