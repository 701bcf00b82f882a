"""A folder in front of a slow store, with the objects that were read last; for reading a cache again and again.

Every file is `<sha256 of store and path>`: one line of JSON (etag, size and crc32c of the object), then its bytes. A
file's time of change is when it was used last. Any number of processes may share a folder, and be killed at any moment:

- Room is taken under a lock, by making the new file at its full length under a temporary name; so what lies in the
  folder never exceeds the bound, whoever is in the middle of what. Files are then filled and renamed. Their writers
  hold a lock on them meanwhile, so that what a killed one left is seen to be nobody's.
- `lock` holds a sum of the files' sizes, never below the true one; only when that reaches the bound are the files
  counted, and those used longest ago deleted, down to nine tenths.
- A file is used only if its etag is the one that the store says now, and size and crc32c are right. Whatever is wrong
  with it, the object is fetched from the store again.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import threading
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import google_crc32c

from draftsmith.errors import ObjectMissingError, StoreError
from draftsmith.storage_base import Content, ObjectInfo, Store, is_held

TEMPORARY = ".tmp"
# How far to clear the folder when it is full, so that its files are not counted for every object.
CLEARED_TO = 0.9

DAMAGED_FILE = "damaged file in the disk cache"
NO_DISK = "disk cache cannot be written"

_LOG = logging.getLogger(__name__)


class DiskCache:
    """`store`, with whole objects that `get` read kept in `folder`, at most `max_bytes` in all. Thread-safe.

    Each `get` asks the store for the object's etag, which is one small request, so that an object that was replaced is
    never served from the folder. Ranges and writes go straight to the store. A folder that cannot be written, such as
    on a full disk, is said once by a warning, and reading goes on without.
    """

    def __init__(self, store: Store, *, folder: Path, max_bytes: int) -> None:
        """Nothing is touched yet. Raises StoreError if `max_bytes` is not > 0."""
        if max_bytes <= 0:
            raise StoreError("the size of a disk cache must be > 0 bytes", got=max_bytes)
        self._store, self._folder, self._max_bytes = store, folder.absolute(), max_bytes
        self._own: Counter[str] = Counter()
        self._count_lock = threading.Lock()
        self._writable = True

    @property
    def uri(self) -> str:
        return self._store.uri

    @property
    def retries(self) -> Mapping[str, int]:
        """Those of the store, and objects that were fetched again, or not kept, because of the folder."""
        with self._count_lock:
            return {**self._store.retries, **self._own}

    def get(self, path: str) -> bytes:
        info = self._store.head(path)
        if info is None:
            raise ObjectMissingError(f"no object {path} in store {self.uri}")
        kept = self._read(path, info)
        if kept is not None:
            return kept
        data = self._store.get(path)
        # If it was replaced between the two requests, the etag is already wrong, and is found so the next time.
        if len(data) == info.size:
            self._keep(path, data, etag=info.etag)
        return data

    def get_range(self, path: str, *, start: int, length: int) -> bytes:
        return self._store.get_range(path, start=start, length=length)

    def head(self, path: str) -> ObjectInfo | None:
        return self._store.head(path)

    def put(self, path: str, data: Content) -> ObjectInfo:
        return self._store.put(path, data)

    def put_if_absent(self, path: str, data: Content) -> ObjectInfo:
        return self._store.put_if_absent(path, data)

    def put_if_match(self, path: str, data: Content, *, etag: str) -> ObjectInfo:
        return self._store.put_if_match(path, data, etag=etag)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return self._store.list(prefix)

    def delete(self, path: str, *, version_id: str | None = None) -> None:
        self._store.delete(path, version_id=version_id)
        with suppress(OSError):
            self._place(path).unlink()

    def _place(self, path: str) -> Path:
        return self._folder / hashlib.sha256(f"{self.uri}\0{path}".encode()).hexdigest()

    def _read(self, path: str, info: ObjectInfo) -> bytes | None:
        """The object from its file, or None: there is none, it is of another etag, damaged or cannot be read."""
        place = self._place(path)
        try:
            with open(place, "rb") as stream:
                header = _parse(stream.readline(4096))
                if header is not None and header[:2] != (info.etag, info.size):
                    return None
                data = stream.read(info.size + 1)
        except FileNotFoundError:
            return None
        except OSError:
            header, data = None, b""
        if header is None or len(data) != info.size or google_crc32c.value(data) != header[2]:
            self._count(DAMAGED_FILE)
            with suppress(OSError):
                place.unlink()
            return None
        with suppress(OSError):
            os.utime(place)
        return data

    def _keep(self, path: str, data: bytes, *, etag: str) -> None:
        """Write the object's file, if there is room to be had for it."""
        header = json.dumps({"etag": etag, "size": len(data), "crc32c": google_crc32c.value(data)}).encode() + b"\n"
        num_bytes = len(header) + len(data)
        if not self._writable or num_bytes > self._max_bytes:
            return
        temporary = self._folder / f"{uuid.uuid4().hex}{TEMPORARY}"
        try:
            handle = self._take_room(temporary, num_bytes)
            if handle is None:
                return
            with open(handle, "wb") as new:
                new.write(header)
                new.write(data)
                new.flush()
                # Under the folder's lock as well: a file that changes its name may be missed by who counts them.
                with self._lock():
                    os.replace(temporary, self._place(path))
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Keep nothing more in this process, and say so once."""
        with self._count_lock:
            self._own[NO_DISK] += 1
            is_first, self._writable = self._writable, False
        if is_first:
            reason = "is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else f"cannot be written: {error}"
            _LOG.warning("the disk cache %s %s; objects of %s are not kept any more", self._folder, reason, self.uri)

    def _take_room(self, temporary: Path, num_bytes: int) -> int | None:
        """Make a file of the full length, after deleting those used longest ago as far as needed; returns its handle,
        which holds a lock on it. None if files that others are writing take up the room. Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with self._lock() as stream:
            known = _number(stream)
            if known is None or known + num_bytes > self._max_bytes:
                known = self._clear(num_bytes)
                if known + num_bytes > self._max_bytes:
                    return None
            # The sum first: if this process is killed in between, it is too large, and put right by the next count.
            stream.seek(0)
            stream.write(f"{known + num_bytes:020d}".encode())
            stream.flush()
            handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
            fcntl.flock(handle, fcntl.LOCK_EX)
            os.ftruncate(handle, num_bytes)
            return handle

    def _clear(self, num_bytes: int) -> int:
        """Delete files until `num_bytes` more are within the bound, or only what others write is left; returns the
        bytes that are left."""
        files = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    if entry.name != "lock":
                        stat = entry.stat()
                        files.append((stat.st_mtime_ns, stat.st_size, Path(entry.path)))
        total, room = sum(size for _, size, _ in files), self._max_bytes - num_bytes
        if total <= room:
            return total
        room = min(room, int(self._max_bytes * CLEARED_TO))
        for _, size, place in sorted(files):
            if total <= room:
                break
            if place.suffix != TEMPORARY or not is_held(place):
                with suppress(FileNotFoundError):
                    place.unlink()
                    total -= size
        return total

    @contextmanager
    def _lock(self) -> Iterator[IO[bytes]]:
        """Hold the folder's lock file; flock is per open file, so it parts threads as well as processes."""
        handle = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        with open(handle, "r+b") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            yield stream

    def _count(self, reason: str) -> None:
        with self._count_lock:
            self._own[reason] += 1


def _parse(line: bytes) -> tuple[str, int, int] | None:
    """etag, size and crc32c of a file's first line; None if it is none."""
    try:
        body = json.loads(line)
        return str(body["etag"]), int(body["size"]), int(body["crc32c"])
    except (ValueError, KeyError, TypeError):
        return None


def _number(stream: IO[bytes]) -> int | None:
    text = stream.read(32)
    return int(text) if len(text) == 20 and text.isdigit() else None
