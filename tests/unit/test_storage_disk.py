"""The folder in front of a slow store: what it keeps, for how long, and what happens when something goes wrong."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from draftsmith.errors import ObjectMissingError, StoreError
from draftsmith.storage import LocalStore
from draftsmith.storage_disk import DiskCache

SIZE = 10_000
ROOT = Path(__file__).parents[2]


class CountingStore(LocalStore):
    """A store that counts how often each object was read from it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads: Counter[str] = Counter()

    def get(self, path: str) -> bytes:
        self.reads[path] += 1
        return super().get(path)


@pytest.fixture
def store(tmp_path: Path) -> CountingStore:
    """Ten objects of SIZE bytes."""
    store = CountingStore(tmp_path / "store")
    for number in range(10):
        store.put(str(number), content(number))
    return store


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "disk"


def content(number: int) -> bytes:
    return random.Random(number).randbytes(SIZE)


def kept_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name != "lock")


def bytes_in(folder: Path) -> int:
    """Bytes of all files but `lock`, counted while nobody changes the folder."""
    with open(folder / "lock", "rb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        return sum(path.stat().st_size for path in kept_files(folder))


def read(disk: DiskCache, *numbers: int) -> None:
    for number in numbers:
        assert disk.get(str(number)) == content(number)
        # So that no two files are used in the same tick of the clock.
        time.sleep(0.005)


def test_an_object_is_fetched_once(store: CountingStore, folder: Path) -> None:
    disk = DiskCache(store, folder=folder, max_bytes=1_000_000)
    read(disk, 1, 2, 1, 1, 2)
    read(DiskCache(store, folder=folder, max_bytes=1_000_000), 1, 2)
    assert store.reads == {"1": 1, "2": 1}
    assert dict(disk.retries) == {}


def test_folders_are_shared_by_stores(store: CountingStore, folder: Path, tmp_path: Path) -> None:
    """The same path and bytes of another store are another object."""
    other = CountingStore(tmp_path / "other")
    other.put("1", content(1))
    for each in (store, other):
        read(DiskCache(each, folder=folder, max_bytes=1_000_000), 1)
        assert each.reads == {"1": 1}


def test_those_used_longest_ago_go(store: CountingStore, folder: Path) -> None:
    """Room for four: a fifth makes room for itself by what was used longest ago, not by what was fetched first."""
    disk = DiskCache(store, folder=folder, max_bytes=4 * SIZE + 2000)
    read(disk, 0, 1, 2, 3, 0, 1)
    read(disk, 4)
    store.reads.clear()
    read(disk, 0, 1, 4)
    assert store.reads == {}
    read(disk, 2)
    assert store.reads == {"2": 1}


def test_the_bound_holds_at_every_moment(store: CountingStore, folder: Path) -> None:
    disk, most = DiskCache(store, folder=folder, max_bytes=5 * SIZE), 0
    for number in random.Random(0).choices(range(10), k=60):
        read(disk, number)
        most = max(most, bytes_in(folder))
    assert 3 * SIZE < most <= 5 * SIZE
    assert 0 < sum(store.reads.values()) - 10 < 50


def test_what_does_not_fit_is_not_kept(store: CountingStore, folder: Path) -> None:
    disk = DiskCache(store, folder=folder, max_bytes=SIZE)
    read(disk, 1, 1)
    assert store.reads == {"1": 2}
    assert dict(disk.retries) == {}
    with pytest.raises(StoreError, match=r"must be > 0 bytes, got 0|> 0 bytes: got 0"):
        DiskCache(store, folder=folder, max_bytes=0)


@pytest.mark.parametrize("damage", ["flip", "flip in the header", "cut", "longer", "empty", "folder"])
def test_a_damaged_file_is_fetched_again(store: CountingStore, folder: Path, damage: str) -> None:
    disk = DiskCache(store, folder=folder, max_bytes=1_000_000)
    read(disk, 1)
    (file,) = kept_files(folder)
    data = bytearray(file.read_bytes())
    if damage == "flip":
        data[-SIZE // 2] ^= 1
    elif damage == "flip in the header":
        data[3] ^= 0x80
    elif damage == "longer":
        data += b"x"
    else:
        del data[{"cut": -1, "empty": 0, "folder": 0}[damage] :]
    file.write_bytes(data)
    if damage == "folder":
        file.unlink()
        file.mkdir()
    read(disk, 1)
    assert store.reads == {"1": 2}
    assert disk.retries["damaged file in the disk cache"] == 1
    if damage != "folder":
        read(disk, 1)
        assert store.reads == {"1": 2}
        assert dict(disk.retries) == {"damaged file in the disk cache": 1}


def test_a_replaced_object_is_fetched_again(store: CountingStore, folder: Path) -> None:
    """Without a word: nothing is damaged. Its old file is replaced."""
    disk = DiskCache(store, folder=folder, max_bytes=1_000_000)
    read(disk, 1)
    store.put("1", content(7))
    assert disk.get("1") == disk.get("1") == content(7)
    assert store.reads == {"1": 2}
    assert dict(disk.retries) == {}
    assert len(kept_files(folder)) == 1
    disk.delete("1")
    assert kept_files(folder) == []
    with pytest.raises(ObjectMissingError, match="no object 1 in store"):
        disk.get("1")


@pytest.mark.parametrize(
    ("name", "code", "told"),
    [("ftruncate", errno.ENOSPC, "is full"), ("replace", errno.EDQUOT, "is full"), ("ftruncate", errno.EROFS, "EROFS")],
)
def test_a_disk_that_refuses(
    store: CountingStore, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    name: str, code: int, told: str,
) -> None:  # fmt: skip
    """Reading goes on, what is kept already serves, and one line says so."""
    disk = DiskCache(store, folder=folder, max_bytes=1_000_000)
    read(disk, 1)

    def refuse(*arguments: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, name, refuse)
    with caplog.at_level(logging.WARNING):
        read(disk, 2, 2, 3, 1)
    assert store.reads == {"1": 1, "2": 2, "3": 1}
    (record,) = caplog.records
    assert f"the disk cache {folder}" in record.getMessage()
    assert told.replace("EROFS", os.strerror(errno.EROFS)) in record.getMessage()
    assert store.uri in record.getMessage()
    assert dict(disk.retries) == {"disk cache cannot be written": 1}
    assert len(kept_files(folder)) == 1


def test_threads_share_it(store: CountingStore, folder: Path) -> None:
    disk = DiskCache(store, folder=folder, max_bytes=5 * SIZE)
    with ThreadPoolExecutor(8) as pool:
        numbers = random.Random(1).choices(range(10), k=200)
        assert all(pool.map(lambda number: disk.get(str(number)) == content(number), numbers))
    assert dict(disk.retries) == {}
    assert bytes_in(folder) <= 5 * SIZE


def test_a_writer_that_was_killed_leaves_room(store: CountingStore, folder: Path) -> None:
    """A file that nobody fills any more goes first come, first gone; one that is being filled stays."""
    read(DiskCache(store, folder=folder, max_bytes=3 * SIZE), 1)
    dead, alive = folder / "dead.tmp", folder / "alive.tmp"
    dead.write_bytes(bytes(SIZE))
    alive.write_bytes(bytes(SIZE))
    for file in (dead, alive):
        os.utime(file, (1, 1))
    # The sum that a killed process left may be anything from the true one up, or broken.
    (folder / "lock").write_bytes(b"nonsense")
    with open(alive, "rb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        read(DiskCache(store, folder=folder, max_bytes=3 * SIZE), 2)
        assert alive.exists()
        assert not dead.exists()
        assert bytes_in(folder) <= 3 * SIZE
        big = DiskCache(store, folder=folder, max_bytes=int(1.5 * SIZE))
        read(big, 3, 3)
        assert store.reads["3"] == 2
        assert dict(big.retries) == {}
    assert alive.exists()


PROCESS = """
import random, sys
from pathlib import Path
from draftsmith.storage import LocalStore
from draftsmith.storage_disk import DiskCache
store, folder, max_bytes = LocalStore(Path(sys.argv[1])), Path(sys.argv[2]), int(sys.argv[3])
disk, draw = DiskCache(store, folder=folder, max_bytes=max_bytes), random.Random()
print("reading", flush=True)
while True:
    number = draw.randrange(10)
    if disk.get(str(number)) != random.Random(number).randbytes(10_000):
        sys.exit("wrong bytes")
    if disk.retries:
        sys.exit(str(disk.retries))
"""


def test_processes_share_it_and_are_killed(store: CountingStore, folder: Path) -> None:
    """Three read as fast as they can and are killed, twice: at no moment is there more than the bound, no process
    meets a damaged file, and those that come after have the room that the killed ones held."""
    command = [sys.executable, "-c", PROCESS, store.uri, str(folder), str(5 * SIZE)]
    most = 0
    for _ in range(2):
        processes = [
            subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            for _ in range(3)
        ]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "reading\n"
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            if (folder / "lock").exists():
                most = max(most, bytes_in(folder))
        assert [process.poll() for process in processes] == [None] * 3
        for process in processes:
            process.send_signal(signal.SIGKILL)
        for process in processes:
            assert process.communicate()[1] == ""
    assert 3 * SIZE < most <= 5 * SIZE
    disk = DiskCache(store, folder=folder, max_bytes=5 * SIZE)
    read(disk, *range(10))
    store.reads.clear()
    read(disk, 9, 8, 7)
    assert store.reads == {}
    assert dict(disk.retries) == {}
