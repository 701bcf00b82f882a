"""Manifests: small JSON files that name a prefix of the store, its objects and one root digest over them."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.errors import CacheError, StoreError

MANIFEST_VERSION = 1


def sha256_hex(data: bytes | memoryview) -> str:
    """Hexadecimal sha256 of `data`."""
    return hashlib.sha256(data).hexdigest()


def json_digest(value: object) -> str:
    """sha256 of a JSON value in its canonical form (sorted keys, no spaces)."""
    return sha256_hex(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode())


def hash8(value: object) -> str:
    """First eight hexadecimal digits of `json_digest`: the content address in a prefix's name."""
    return json_digest(value)[:8]


@dataclass(frozen=True)
class ObjectRecord:
    """One object of a prefix: its path below the prefix, its size in bytes and its sha256."""

    path: str
    size: int
    sha256: str


def root_digest(objects: Iterable[ObjectRecord]) -> str:
    """sha256 over path, size and sha256 of all objects in path order; no times, hosts or versions."""
    return json_digest([[item.path, item.size, item.sha256] for item in sorted(objects, key=lambda item: item.path)])


@dataclass(frozen=True)
class Manifest:
    """What a finished prefix of the store holds. `prefix` is relative to the store's root."""

    kind: str
    prefix: str
    objects: tuple[ObjectRecord, ...]
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        return root_digest(self.objects)

    def write(self, path: Path) -> None:
        """Write the manifest atomically; it is the last thing a job writes."""
        body = {
            "version": MANIFEST_VERSION,
            "kind": self.kind,
            "prefix": self.prefix,
            "digest": self.digest,
            "facts": self.facts,
            "objects": [asdict(item) for item in sorted(self.objects, key=lambda item: item.path)],
        }
        write_json(path, body)

    @classmethod
    def read(cls, path: Path, kind: str) -> Manifest:
        """Read a manifest of `kind`; raises CacheError if it is missing, of another kind or inconsistent."""
        try:
            body = json.loads(path.read_text())
        except FileNotFoundError:
            raise CacheError(
                f"no {kind} manifest at {path}", expected=f"`dvc repro` to run the {kind} stage first"
            ) from None
        except json.JSONDecodeError:
            raise CacheError(f"the {kind} manifest is not JSON", where=str(path)) from None
        if body.get("version") != MANIFEST_VERSION or body.get("kind") != kind:
            raise CacheError(
                "manifest of another version or kind",
                got=f"{body.get('kind')} v{body.get('version')}",
                expected=f"{kind} v{MANIFEST_VERSION}",
                where=str(path),
            )
        manifest = cls(kind, body["prefix"], tuple(ObjectRecord(**item) for item in body["objects"]), body["facts"])
        if manifest.digest != body["digest"]:
            raise CacheError(
                "manifest does not match its own digest", got=manifest.digest, expected=body["digest"], where=str(path)
            )
        return manifest


def write_json(path: Path, body: object) -> None:
    """Write `body` as indented JSON with a rename at the end, so that a reader never sees half a file.

    Raises StoreError if the disk refuses.
    """
    write_bytes(path, (json.dumps(body, indent=1, ensure_ascii=False) + "\n").encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Write a local file atomically (temporary file, fsync, rename). Raises StoreError if the disk refuses."""
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise StoreError(f"cannot write {path}: {error.strerror}", expected="a writable disk with room") from None
