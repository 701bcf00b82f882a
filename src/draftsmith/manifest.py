"""Manifests: small JSON files that name a prefix of the store, its objects and one root digest over them.

A prefix may have hundreds of thousands of objects, so they are kept in columns, and read and written one a line.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, overload

from draftsmith.errors import CacheError, StoreError

MANIFEST_VERSION = 2
OBJECTS = "objects"


def sha256_hex(data: bytes | memoryview) -> str:
    """Hexadecimal sha256 of `data`."""
    return hashlib.sha256(data).hexdigest()


def json_digest(value: object) -> str:
    """sha256 of a JSON value in its canonical form (sorted keys, no spaces)."""
    return sha256_hex(_canonical(value))


def hash8(value: object) -> str:
    """First eight hexadecimal digits of `json_digest`: the content address in a prefix's name."""
    return json_digest(value)[:8]


@dataclass(frozen=True, slots=True)
class ObjectRecord:
    """One object of a prefix: its path below the prefix, its size in bytes and its sha256."""

    path: str
    size: int
    sha256: str


class ObjectTable(Sequence[ObjectRecord]):
    """Many objects in path order, about fifty bytes each in memory; records are made when they are asked for."""

    def __init__(self, objects: Iterable[ObjectRecord]) -> None:
        """Raises CacheError for two objects of one path, and for what is no sha256."""
        self._paths, self._digests = bytearray(), bytearray()
        self._ends, self._sizes = array("q"), array("q")
        in_order, before = True, b""
        for item in objects:
            path = item.path.encode()
            self._add(path, item.size, _sha256_bytes(item.sha256, path=item.path))
            in_order, before = in_order and before < path, path
        if not in_order:
            self._sort()

    def _add(self, path: bytes, size: int, digest: bytes | bytearray) -> None:
        self._paths += path
        self._ends.append(len(self._paths))
        self._sizes.append(size)
        self._digests += digest

    def _sort(self) -> None:
        given = copy(self)
        order = sorted(range(len(self)), key=given._path)
        self._paths, self._digests = bytearray(), bytearray()
        self._ends, self._sizes = array("q"), array("q")
        before = None
        for place in order:
            path = given._path(place)
            if path == before:
                raise CacheError("two objects of one path", got=path.decode(), expected="unique paths")
            self._add(path, given._sizes[place], given._digests[32 * place : 32 * place + 32])
            before = path

    def __len__(self) -> int:
        return len(self._sizes)

    @overload
    def __getitem__(self, index: int) -> ObjectRecord: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[ObjectRecord, ...]: ...
    def __getitem__(self, index: int | slice) -> ObjectRecord | tuple[ObjectRecord, ...]:
        if isinstance(index, slice):
            return tuple(self[place] for place in range(len(self))[index])
        place = range(len(self))[index]
        digest = self._digests[32 * place : 32 * place + 32].hex()
        return ObjectRecord(self._path(place).decode(), self._sizes[place], digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]  # equal to tuples, whose hash is another

    @property
    def num_bytes(self) -> int:
        return sum(self._sizes)

    def find(self, path: str) -> ObjectRecord | None:
        """The object of this path, if there is one."""
        wanted = path.encode()
        place = bisect_left(range(len(self)), wanted, key=self._path)
        return self[place] if place < len(self) and self._path(place) == wanted else None

    def _path(self, place: int) -> bytes:
        return bytes(self._paths[self._ends[place - 1] if place else 0 : self._ends[place]])


def root_digest(objects: Iterable[ObjectRecord]) -> str:
    """sha256 over path, size and sha256 of all objects in path order; no times, hosts or versions.

    It is the digest of the canonical JSON [[path, size, sha256], ...].
    """
    table = objects if isinstance(objects, ObjectTable) else ObjectTable(objects)
    found = hashlib.sha256(b"[")
    for place, item in enumerate(table):
        found.update((("," if place else "") + _row(item)).encode())
    found.update(b"]")
    return found.hexdigest()


def _row(item: ObjectRecord) -> str:
    return f'[{json.dumps(item.path)},{item.size},"{item.sha256}"]'


@dataclass(frozen=True)
class Manifest:
    """What a finished prefix of the store holds. `prefix` is relative to the store's root.

    A manifest of mode "stream" is a plan: it names no objects, for the prefix is made and deleted as it is used.
    """

    kind: str
    prefix: str
    objects: Sequence[ObjectRecord]
    facts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.objects, ObjectTable):
            object.__setattr__(self, "objects", ObjectTable(self.objects))

    @cached_property
    def digest(self) -> str:
        return root_digest(self.objects)

    @property
    def num_bytes(self) -> int:
        """Size of all objects."""
        return self._table.num_bytes

    @property
    def is_stream(self) -> bool:
        return self.facts.get("mode") == "stream"

    def find(self, path: str) -> ObjectRecord | None:
        """The object at `path` below the prefix, if the manifest names one."""
        return self._table.find(path)

    def write(self, path: Path) -> None:
        """Write the manifest atomically, an object a line; it is the last thing a job writes."""
        body = {
            "version": MANIFEST_VERSION,
            "kind": self.kind,
            "prefix": self.prefix,
            "digest": self.digest,
            "facts": self.facts,
            OBJECTS: [],
        }
        head, tail = json.dumps(body, indent=1, ensure_ascii=False).rsplit("[]", 1)
        last = len(self.objects) - 1
        rows = (f"  {_row(item)}{',' if place < last else ''}\n" for place, item in enumerate(self.objects))
        write_lines(path, chain([f"{head}[\n"], rows, [f" ]{tail}\n"]))

    @classmethod
    def read(cls, path: Path, kind: str) -> Manifest:
        """Read a manifest of `kind`; raises CacheError if it is missing, of another kind or inconsistent."""
        try:
            with path.open(encoding="utf-8") as stream:
                return cls.parse(stream, kind, where=str(path))
        except (FileNotFoundError, NotADirectoryError):
            raise CacheError(
                f"no {kind} manifest at {path}", expected=f"`dvc repro` to run the {kind} stage first"
            ) from None
        except OSError as error:
            what = f"the {kind} manifest cannot be read"
            raise CacheError(what, got=error.strerror, expected="a file", where=str(path)) from None

    @classmethod
    def parse(cls, lines: Iterable[str], kind: str, *, where: str) -> Manifest:
        """A manifest of `kind` from the lines of its file. Raises CacheError, naming `where`, as `read` does."""
        stream = iter(lines)
        head = []
        try:
            for line in stream:
                head.append(line)
                if line == f' "{OBJECTS}": [\n':
                    break
            whole = head[-1:] != [f' "{OBJECTS}": [\n']
            body = json.loads("".join(head) + ("" if whole else "]}"))
            if not isinstance(body, dict) or body.get("version") != MANIFEST_VERSION or body.get("kind") != kind:
                got = f"{body.get('kind')} v{body.get('version')}" if isinstance(body, dict) else type(body).__name__
                raise CacheError(
                    "manifest of another version or kind", got=got, expected=f"{kind} v{MANIFEST_VERSION}", where=where
                )
            rows = iter(body[OBJECTS]) if whole else _rows(stream)
            prefix, digest, facts = body["prefix"], body["digest"], body["facts"]
            if not isinstance(prefix, str) or not isinstance(facts, dict):
                raise TypeError(f"prefix {prefix!r} and facts of {type(facts).__name__}")
            manifest = cls(kind, prefix, ObjectTable(ObjectRecord(*row) for row in rows), facts)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise CacheError(f"the {kind} manifest cannot be read: {error!r}", where=where) from None
        if manifest.digest != digest:
            raise CacheError(
                "manifest does not match its own digest", got=manifest.digest, expected=digest, where=where
            )
        return manifest

    @property
    def _table(self) -> ObjectTable:
        assert isinstance(self.objects, ObjectTable)
        return self.objects


def _rows(lines: Iterator[str]) -> Iterator[list[Any]]:
    """The rows of objects, a line each, up to the line that ends them. Raises ValueError if the file is cut."""
    for line in lines:
        if line == " ]\n":
            json.loads("{" + "".join(lines))
            return
        yield json.loads(line.rstrip("\n").removesuffix(","))
    raise ValueError("it ends in the middle")


def _sha256_bytes(text: str, *, path: str) -> bytes:
    """The 32 bytes of a hexadecimal sha256. Raises CacheError, naming the object's `path`, if it is none."""
    try:
        digest = bytes.fromhex(text)
    except ValueError:
        digest = b""
    if len(digest) != 32:
        raise CacheError(f"no sha256 of object {path}", got=repr(text), expected="64 hexadecimal digits")
    return digest


def write_json(path: Path, body: object) -> None:
    """Write `body` as indented JSON with a rename at the end, so that a reader never sees half a file.

    Raises StoreError if the disk refuses.
    """
    write_bytes(path, (json.dumps(body, indent=1, ensure_ascii=False) + "\n").encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Write a local file atomically (temporary file, fsync, rename). Raises StoreError if the disk refuses."""
    _write(path, [data])


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """The same for text that is made as it is written."""
    _write(path, (line.encode() for line in lines))


def _write(path: Path, parts: Iterable[bytes]) -> None:
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as stream:
            stream.writelines(parts)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise StoreError(f"cannot write {path}: {error.strerror}", expected="a writable disk with room") from None


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
