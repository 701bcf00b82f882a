"""Manifests: digests that anyone can compute again, files that are whole or not there."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from draftsmith import manifest as module
from draftsmith.errors import CacheError, StoreError
from draftsmith.manifest import (
    Manifest,
    ObjectRecord,
    hash8,
    json_digest,
    root_digest,
    sha256_hex,
    write_bytes,
    write_json,
)

EMPTY_SHA256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
OBJECTS = (ObjectRecord("b", 3, "2" * 64), ObjectRecord("a/c", 1, "1" * 64))


def test_digests_by_hand() -> None:
    assert sha256_hex(b"") == EMPTY_SHA256
    assert sha256_hex(memoryview(b"abc")) == hashlib.sha256(b"abc").hexdigest()
    # Sorted keys, no blanks, ASCII alone.
    text = '{"a":[1,2.5,null],"b":"\\u00e9"}'
    assert json_digest({"b": "é", "a": [1, 2.5, None]}) == hashlib.sha256(text.encode()).hexdigest()
    assert hash8({"a": 1}) == hashlib.sha256(b'{"a":1}').hexdigest()[:8]
    ordered = f'[["a/c",1,"{"1" * 64}"],["b",3,"{"2" * 64}"]]'
    assert root_digest(OBJECTS) == hashlib.sha256(ordered.encode()).hexdigest()


def test_the_root_digest_sees_every_part_and_no_order() -> None:
    assert root_digest(OBJECTS) == root_digest(OBJECTS[::-1]) == root_digest(iter(OBJECTS))
    first, second = OBJECTS
    others = (
        ObjectRecord("b2", first.size, first.sha256),
        ObjectRecord(first.path, 4, first.sha256),
        ObjectRecord(first.path, first.size, "3" * 64),
    )
    digests = {root_digest(OBJECTS), root_digest([first]), *(root_digest([other, second]) for other in others)}
    assert len(digests) == 5


def test_a_manifest_comes_back_as_it_went(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "cache.json"
    manifest = Manifest("cache", "cache/tiny-12345678", OBJECTS, {"target": "tiny", "counts": {"é": 1}})
    manifest.write(path)
    back = Manifest.read(path, "cache")
    assert (back.kind, back.prefix, back.facts, back.digest) == (
        "cache",
        "cache/tiny-12345678",
        manifest.facts,
        manifest.digest,
    )
    assert back.objects == tuple(sorted(OBJECTS, key=lambda item: item.path))
    # The file does not depend on the order the objects were made in: DVC compares its bytes.
    other = tmp_path / "other.json"
    Manifest("cache", "cache/tiny-12345678", OBJECTS[::-1], manifest.facts).write(other)
    assert other.read_bytes() == path.read_bytes()
    body = json.loads(path.read_text())
    assert body["digest"] == manifest.digest
    assert body["objects"][0] == {"path": "a/c", "size": 1, "sha256": "1" * 64}
    assert not Path(body["prefix"]).is_absolute()


def test_manifests_that_are_not_what_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with pytest.raises(CacheError, match=f"no cache manifest at {path}"):
        Manifest.read(path, "cache")
    path.write_text('{"version": 1,')
    with pytest.raises(CacheError, match="the cache manifest is not JSON"):
        Manifest.read(path, "cache")
    Manifest("answers", "answers/x-1", OBJECTS).write(path)
    with pytest.raises(CacheError, match="another version or kind: got answers v1, expected cache v1"):
        Manifest.read(path, "cache")
    body = json.loads(path.read_text())
    path.write_text(json.dumps({**body, "version": 2}))
    with pytest.raises(CacheError, match="got answers v2, expected answers v1"):
        Manifest.read(path, "answers")
    body["objects"][0]["size"] += 1
    path.write_text(json.dumps(body))
    with pytest.raises(CacheError, match="does not match its own digest") as caught:
        Manifest.read(path, "answers")
    assert str(path) in str(caught.value)


def test_writing_leaves_one_file(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.json"
    write_json(path, {"x": "é"})
    assert path.read_text() == '{\n "x": "é"\n}\n'
    write_bytes(path, b"second")
    assert path.read_bytes() == b"second"
    assert [item.name for item in path.parent.iterdir()] == ["b.json"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_refused_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "b.json"
    write_bytes(path, b"old")

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module.os, "fsync", full)
    with pytest.raises(StoreError) as caught:
        write_bytes(path, b"new")
    assert str(caught.value) == f"cannot write {path}: No space left on device: expected a writable disk with room"
    assert path.read_bytes() == b"old"
    assert [item.name for item in tmp_path.iterdir()] == ["b.json"]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot write .*/file/b\.json: "):
        write_bytes(tmp_path / "file" / "b.json", b"")


def test_a_killed_writer_leaves_the_whole_file(tmp_path: Path) -> None:
    """Killed at any moment, a reader finds one of the two contents and never a part."""
    path = tmp_path / "b"
    code = textwrap.dedent("""
        import sys
        from pathlib import Path
        from draftsmith.manifest import write_bytes
        while True:
            for letter in (b"a", b"b"):
                write_bytes(Path(sys.argv[1]), letter * 1_000_000)
    """)
    process = subprocess.Popen([sys.executable, "-c", code, str(path)])
    deadline = time.monotonic() + 60
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.001)
    for _ in range(20):
        data = path.read_bytes()
        assert len(data) == 1_000_000
        assert len(set(data)) == 1
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    data = path.read_bytes()
    assert len(data) == 1_000_000
    assert len(set(data)) == 1
