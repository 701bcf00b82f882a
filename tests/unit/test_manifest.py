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
import tracemalloc
from collections.abc import Iterator
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
    assert list(back.objects) == sorted(OBJECTS, key=lambda item: item.path)
    # The file does not depend on the order the objects were made in: DVC compares its bytes.
    other = tmp_path / "other.json"
    Manifest("cache", "cache/tiny-12345678", OBJECTS[::-1], manifest.facts).write(other)
    assert other.read_bytes() == path.read_bytes()
    assert not Path(json.loads(path.read_text())["prefix"]).is_absolute()


def test_the_file_by_hand(tmp_path: Path) -> None:
    """One object a line, in path order, for people and for diffs; and JSON for everyone else."""
    path = tmp_path / "cache.json"
    manifest = Manifest("cache", "cache/tiny-12345678", OBJECTS, {"target": "é"})
    manifest.write(path)
    lines = [
        "{",
        ' "version": 2,',
        ' "kind": "cache",',
        ' "prefix": "cache/tiny-12345678",',
        f' "digest": "{manifest.digest}",',
        ' "facts": {',
        '  "target": "é"',
        " },",
        ' "objects": [',
        f'  ["a/c",1,"{"1" * 64}"],',
        f'  ["b",3,"{"2" * 64}"]',
        " ]",
        "}",
    ]
    assert path.read_text().splitlines() == lines
    body = json.loads(path.read_text())
    assert body["objects"] == [["a/c", 1, "1" * 64], ["b", 3, "2" * 64]]
    # Another program may have written the same JSON in another form.
    for text in (json.dumps(body), json.dumps(body, indent=4)):
        path.write_text(text)
        assert list(Manifest.read(path, "cache").objects) == list(manifest.objects)


def test_a_manifest_of_a_plan_has_no_objects(tmp_path: Path) -> None:
    path = tmp_path / "cache.json"
    Manifest("cache", "cache/tiny-12345678", (), {"mode": "stream"}).write(path)
    back = Manifest.read(path, "cache")
    assert (back.is_stream, len(back.objects), back.num_bytes) == (True, 0, 0)
    assert back.digest == hashlib.sha256(b"[]").hexdigest()
    assert not Manifest("cache", "cache/tiny-12345678", (), {}).is_stream
    assert json.loads(path.read_text())["objects"] == []


def many(count: int) -> Iterator[ObjectRecord]:
    """Records whose paths come in no order."""
    for number in range(count):
        digest = hashlib.sha256(str(number).encode()).hexdigest()
        yield ObjectRecord(f"context/c.{number * 7919 % count}.é", number, digest)


def test_objects_by_path_and_by_place() -> None:
    manifest = Manifest("cache", "cache/x-1", many(1000))
    expected = sorted(many(1000), key=lambda item: item.path)
    assert list(manifest.objects) == expected
    assert [manifest.objects[place] for place in (0, 500, -1)] == [expected[0], expected[500], expected[-1]]
    assert manifest.objects[3:5] == tuple(expected[3:5])
    assert all(manifest.find(item.path) == item for item in expected)
    for path in ("context/c.1000.é", "context/c.5", "", "a", "z"):
        assert manifest.find(path) is None
    assert manifest.num_bytes == sum(range(1000))
    with pytest.raises(IndexError):
        manifest.objects[1000]


def test_the_digest_is_that_of_the_json(tmp_path: Path) -> None:
    """However the objects are kept, the digest is the one that any JSON library gives."""
    rows = sorted([item.path, item.size, item.sha256] for item in many(1000))
    assert Manifest("cache", "cache/x-1", many(1000)).digest == json_digest(rows)


def test_many_objects_take_little_memory(tmp_path: Path) -> None:
    """20,000 records as objects with their strings take 6 MB and as parsed JSON 8; in columns 65 bytes each."""
    path = tmp_path / "cache.json"
    Manifest("cache", "cache/x-1", many(20_000)).write(path)
    assert path.stat().st_size < 20_000 * 105
    tracemalloc.start()
    try:
        manifest = Manifest.read(path, "cache")
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(manifest.objects) == 20_000
    assert held < 20_000 * 80
    assert peak < 20_000 * 170


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ((*OBJECTS, ObjectRecord("b", 4, "3" * 64)), "two objects of one path: got b"),
        ((ObjectRecord("b", 4, "3" * 62),), "no sha256 of object b"),
        ((ObjectRecord("b", 4, "g" * 64),), "no sha256 of object b"),
    ],
)
def test_refused_objects(records: tuple[ObjectRecord, ...], expected: str) -> None:
    with pytest.raises(CacheError, match=expected):
        Manifest("cache", "cache/x-1", records)


def test_manifests_that_are_not_what_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with pytest.raises(CacheError, match=f"no cache manifest at {path}"):
        Manifest.read(path, "cache")
    path.write_text('{"version": 2,')
    with pytest.raises(CacheError, match="the cache manifest cannot be read"):
        Manifest.read(path, "cache")
    path.write_text("[2]")
    with pytest.raises(CacheError, match="another version or kind: got list"):
        Manifest.read(path, "cache")
    Manifest("answers", "answers/x-1", OBJECTS).write(path)
    with pytest.raises(CacheError, match="another version or kind: got answers v2, expected cache v2"):
        Manifest.read(path, "cache")
    text = path.read_text()
    path.write_text(text.replace('"version": 2', '"version": 1'))
    with pytest.raises(CacheError, match="got answers v1, expected answers v2"):
        Manifest.read(path, "answers")
    path.write_text(text.replace('["b",3,', '["b",4,'))
    with pytest.raises(CacheError, match="does not match its own digest") as caught:
        Manifest.read(path, "answers")
    assert str(path) in str(caught.value)
    for broken in ('["b","3",', '["b",3.5,', '["b",', '["b",3,4,', '["a/c",1,'):
        path.write_text(text.replace('["b",3,', broken))
        with pytest.raises(CacheError):
            Manifest.read(path, "answers")


def test_every_cut_is_seen(tmp_path: Path) -> None:
    """Not one file that ends early, or goes on after its end, passes for a manifest."""
    path = tmp_path / "x.json"
    Manifest("answers", "answers/x-1", OBJECTS).write(path)
    text = path.read_text()
    for end in range(len(text) - len("\n")):
        path.write_text(text[:end])
        with pytest.raises(CacheError, match="cannot be read"):
            Manifest.read(path, "answers")
    path.write_text(text + "{}")
    with pytest.raises(CacheError, match="cannot be read"):
        Manifest.read(path, "answers")


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


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"facts": []}, "facts of list"),
        ({"prefix": 3}, "prefix 3"),
        ({"digest": None}, "does not match its own digest"),
        ({"objects": [[1, 1, "0" * 64]]}, "AttributeError"),
        ({"objects": [["a", 10**30, "0" * 64]]}, "OverflowError"),
        ({"objects": [["a", "1", "0" * 64]]}, "TypeError"),
    ],
)
def test_a_manifest_with_a_strange_field(tmp_path: Path, change: dict[str, object], told: str) -> None:
    path = tmp_path / "m.json"
    Manifest("cache", "cache/a-01234567", OBJECTS).write(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(CacheError, match=told) as caught:
        Manifest.read(path, "cache")
    assert str(path) in str(caught.value)


def test_a_manifest_without_a_digest(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    Manifest("cache", "cache/a-01234567", OBJECTS).write(path)
    body = json.loads(path.read_text())
    del body["digest"]
    path.write_text(json.dumps(body))
    with pytest.raises(CacheError, match=r"KeyError.*digest"):
        Manifest.read(path, "cache")


@pytest.mark.parametrize("data", [b"\xff\xfe", b'{\n "kind": "\xff"', b"[" * 100_000])
def test_a_file_that_is_no_text_or_no_end(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "m.json"
    path.write_bytes(data)
    with pytest.raises(CacheError, match=r"the cache manifest cannot be read: .*m\.json"):
        Manifest.read(path, "cache")


def test_a_manifest_that_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="the answers manifest cannot be read: got Is a directory"):
        Manifest.read(tmp_path, "answers")
    (tmp_path / "file").touch()
    with pytest.raises(CacheError, match="no answers manifest at"):
        Manifest.read(tmp_path / "file" / "m.json", "answers")
