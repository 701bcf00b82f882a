"""What is special to a local folder, and to opening a store; what every store must do is in tests/contract."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from draftsmith.errors import ObjectExistsError, StoreError
from draftsmith.manifest import sha256_hex
from draftsmith.storage import LocalStore, ObjectInfo, check_store, open_store, records_prefix
from draftsmith.storage_base import is_held

TEMPORARY = Path(".draftsmith") / "tmp"


def test_addresses() -> None:
    assert open_store("relative/folder").uri == str(Path.cwd() / "relative/folder")
    assert open_store("~/folder").uri == str(Path.home() / "folder")
    assert open_store("s3://bucket/deep/prefix/").uri == "s3://bucket/deep/prefix"
    for wrong in ("", "gs://bucket", "http://host/x", "s3://", "s3:///prefix", "s3://bucket/../x"):
        with pytest.raises(StoreError):
            open_store(wrong)


def test_opening_makes_nothing(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    assert list(store.list("")) == []
    assert store.head("a") is None
    store.delete("a")
    assert list(tmp_path.iterdir()) == []


def test_local_store_needs_no_boto3(tmp_path: Path) -> None:
    code = textwrap.dedent("""
        import sys
        from draftsmith.storage import open_store
        open_store(sys.argv[1]).put("a", b"")
        sys.exit("boto3" in sys.modules)
    """)
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 0


def test_records_lie_beside_the_prefix() -> None:
    assert records_prefix("cache/x-12345678/") == "records/cache/x-12345678"


def test_objects_are_plain_files(tmp_path: Path) -> None:
    """So that Zarr, DVC and people read the folder as it is; and no temporary file stays."""
    store = LocalStore(tmp_path)
    store.put("a/b", b"one")
    store.put_if_absent("a/c", b"two")
    store.put_if_match("a/c", b"three", etag=sha256_hex(b"two"))
    with pytest.raises(ObjectExistsError):
        store.put_if_absent("a/c", b"four")
    assert (tmp_path / "a/b").read_bytes() == b"one"
    assert (tmp_path / "a/c").read_bytes() == b"three"
    assert list((tmp_path / TEMPORARY).iterdir()) == []


def test_killed_writers_leave_no_half_object(tmp_path: Path) -> None:
    """SIGKILL at any moment: every object that is there is whole, and what was lying about is swept."""
    code = textwrap.dedent("""
        import sys
        from draftsmith.storage import LocalStore
        store, number = LocalStore(__import__("pathlib").Path(sys.argv[1])), 0
        while True:
            store.put("same", bytes([number % 256]) * 3_000_000)
            store.put_if_absent(f"new/{number}", bytes([number % 256]) * 3_000_000)
            number += 1
    """)
    store = LocalStore(tmp_path)
    for _ in range(2):
        child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 30
        while len(list(store.list("new"))) < 3 and child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        child.send_signal(signal.SIGKILL)
        child.wait()
        objects = list(store.list(""))
        assert len(objects) >= 4
        for item in objects:
            data = store.get(item.path)
            assert len(data) == 3_000_000
            assert data == data[:1] * 3_000_000
            store.delete(item.path)
    (tmp_path / TEMPORARY).mkdir(parents=True, exist_ok=True)
    places = {name: tmp_path / TEMPORARY / name for name in ("fresh", "left", "held", "stale")}
    for name, age_s in {"fresh": 0, "left": 120, "held": 120, "stale": 90_000}.items():
        places[name].write_bytes(b"")
        os.utime(places[name], (time.time() - age_s, time.time() - age_s))
    with places["held"].open("r+b") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        store.put("a", b"")
    assert {name for name, place in places.items() if place.exists()} == {"fresh", "held"}


def test_a_writer_holds_its_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long its disk takes, nobody sweeps it away."""
    real, seen = os.fsync, []

    def slow(handle: int) -> None:
        seen.extend(is_held(place) for place in (tmp_path / TEMPORARY).iterdir())
        real(handle)

    monkeypatch.setattr(os, "fsync", slow)
    LocalStore(tmp_path).put("a", b"data")
    assert seen == [True]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (errno.ENOSPC, r"the disk of store .* is full: cannot write a .*DRAFTSMITH_STORE"),
        (errno.EDQUOT, r"the disk of store .* is full"),
        (errno.EACCES, r"cannot write a in store .*Permission denied.*DRAFTSMITH_STORE"),
        (errno.EROFS, r"cannot write a in store .*Read-only file system.*DRAFTSMITH_STORE"),
        (errno.EIO, r"cannot write a in store .*Input/output error"),
    ],
)
def test_a_disk_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, expected: str) -> None:
    """The message is one line, the old object is still whole, and no temporary file stays."""
    store = LocalStore(tmp_path)
    store.put("a", b"old")

    def refuse(handle: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", refuse)
    for write in (lambda: store.put("a", b"new"), lambda: store.put_if_match("a", b"new", etag=sha256_hex(b"old"))):
        with pytest.raises(StoreError, match=expected) as caught:
            write()
        assert "\n" not in str(caught.value)
    assert store.get("a") == b"old"
    assert list((tmp_path / TEMPORARY).iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_a_folder_of_another_user(tmp_path: Path) -> None:
    LocalStore(tmp_path / "s").put("a/b", b"1")
    (tmp_path / "s/a").chmod(0)
    try:
        for use in (
            lambda s: s.get("a/b"),
            lambda s: s.put("a/c", b""),
            lambda s: list(s.list("")),
            lambda s: s.head("a/b"),
        ):
            with pytest.raises(StoreError, match=r"Permission denied.*DRAFTSMITH_STORE"):
                use(LocalStore(tmp_path / "s"))
    finally:
        (tmp_path / "s/a").chmod(0o755)


def test_unreadable_files_are_an_error_and_not_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    store.put("a", b"1")

    def refuse(*arguments: object, **named: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("draftsmith.storage_local.open", refuse, raising=False)
    with pytest.raises(StoreError, match="cannot read a in store") as caught:
        store.head("a")
    assert type(caught.value) is StoreError
    monkeypatch.undo()
    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(StoreError, match="cannot list"):
        list(store.list(""))


def test_a_store_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    store = LocalStore(tmp_path / "file")
    with pytest.raises(StoreError, match=r"cannot write a/b in store .*file.*expected a folder.*DRAFTSMITH_STORE"):
        store.put("a/b", b"")
    with pytest.raises(StoreError, match="cannot list"):
        list(store.list(""))


class IgnoresNoneMatch(LocalStore):
    def put_if_absent(self, path: str, data: bytes) -> ObjectInfo:
        return self.put(path, data)


class IgnoresMatch(LocalStore):
    def put_if_match(self, path: str, data: bytes, *, etag: str) -> ObjectInfo:
        return self.put(path, data)


@pytest.mark.parametrize(("kind", "name"), [(IgnoresNoneMatch, "If-None-Match"), (IgnoresMatch, "If-Match")])
def test_a_server_that_ignores_conditions_is_refused(tmp_path: Path, kind: type[LocalStore], name: str) -> None:
    store = kind(tmp_path)
    with pytest.raises(StoreError, match=f"a server that ignores {name}"):
        check_store(store)
    assert list(store.list("")) == []


def test_file_systems_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: object, destination: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    store = LocalStore(tmp_path)
    store.put_if_absent("a", b"one")
    with pytest.raises(ObjectExistsError):
        store.put_if_absent("a", b"two")
    assert store.get("a") == b"one"
