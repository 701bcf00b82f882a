"""Checkpoints in a store: whole or not there, broken ones named, old ones removed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftsmith.errors import ObjectMissingError, StoreError, TrainingError
from draftsmith.storage import ObjectInfo, Store, open_store
from draftsmith.training.checkpoint import MARKER, CheckpointStore, tag_of

FILES = {"mp_rank_00_model_states.pt": b"model", "zero/rank_0.pt": b"optimiser" * 1000, "empty": b""}


class WatchedStore:
    """A store that notes what is written and deleted, in order, and may fail at the n-th write."""

    def __init__(self, store: Store, *, fail_at: int = 0) -> None:
        self.inner, self.log, self.left = store, list[str](), fail_at
        self.uri = store.uri

    def put(self, path: str, data: bytes) -> ObjectInfo:
        self.left -= 1
        if self.left == 0:
            raise StoreError("disk full")
        self.log.append(f"put {path}")
        return self.inner.put(path, data)

    def delete(self, path: str) -> None:
        self.log.append(f"delete {path}")
        self.inner.delete(path)

    def get(self, path: str) -> bytes:
        return self.inner.get(path)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return self.inner.list(prefix)


@pytest.fixture
def store(tmp_path: Path) -> WatchedStore:
    return WatchedStore(open_store(str(tmp_path / "store")))


def checkpoints(store: WatchedStore) -> CheckpointStore:
    return CheckpointStore(store, "train/key-0123abcd")  # type: ignore[arg-type]


def local(tmp_path: Path, step: int) -> Path:
    """A folder that holds the checkpoint of `step`, as DeepSpeed leaves it."""
    folder = tmp_path / "local"
    for name, data in FILES.items():
        file = folder / tag_of(step) / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data + str(step).encode())
    return folder


def test_the_marker_is_written_last_with_every_digest(store: WatchedStore, tmp_path: Path) -> None:
    folder = local(tmp_path, 50)
    checkpoints(store).publish(folder, step=50, keep=1)
    prefix = "train/key-0123abcd/step-000050/"
    assert store.log == [f"put {prefix}{name}" for name in (*sorted(FILES), MARKER)]
    marker = json.loads(store.get(prefix + MARKER))
    assert marker["step"] == 50
    for name, data in FILES.items():
        whole = data + b"50"
        entry = next(item for item in marker["objects"] if item["path"] == f"step-000050/{name}")
        assert (entry["size"], entry["sha256"]) == (len(whole), hashlib.sha256(whole).hexdigest())
    assert not (folder / tag_of(50)).exists()  # nothing is left on the local disk


def test_what_was_published_is_fetched_byte_by_byte(store: WatchedStore, tmp_path: Path) -> None:
    checkpoints(store).publish(local(tmp_path, 50), step=50, keep=1)
    checkpoints(store).fetch(50, folder=tmp_path / "fetched")
    for name, data in FILES.items():
        assert (tmp_path / "fetched" / "step-000050" / name).read_bytes() == data + b"50"


@pytest.mark.parametrize("fail_at", [1, 2, 4])
def test_an_upload_that_breaks_off_is_no_checkpoint(fail_at: int, tmp_path: Path) -> None:
    """Also when it is the marker that fails; the one before stays whole."""
    inner = open_store(str(tmp_path / "store"))
    checkpoints(WatchedStore(inner)).publish(local(tmp_path, 50), step=50, keep=1)
    with pytest.raises(StoreError, match="disk full"):
        checkpoints(WatchedStore(inner, fail_at=fail_at)).publish(local(tmp_path, 100), step=100, keep=1)
    after = checkpoints(WatchedStore(inner))
    assert after.steps() == [50]
    after.fetch(50, folder=tmp_path / "fetched")
    assert (tmp_path / "local" / tag_of(100)).is_dir()  # the local copy is kept


def test_only_the_newest_are_kept(store: WatchedStore, tmp_path: Path) -> None:
    for step in (50, 100, 1000050, 150):
        checkpoints(store).publish(local(tmp_path, step), step=step, keep=2)
    assert checkpoints(store).steps() == [150, 1000050]
    assert {item.path.split("/")[2] for item in store.list("train/")} == {"step-000150", "step-1000050"}


def test_a_checkpoint_is_unmarked_before_it_is_removed(store: WatchedStore, tmp_path: Path) -> None:
    for step in (50, 100):
        checkpoints(store).publish(local(tmp_path, step), step=step, keep=1)
    deleted = [line for line in store.log if line.startswith("delete")]
    assert deleted[0] == f"delete train/key-0123abcd/step-000050/{MARKER}"
    assert len(deleted) == len(FILES) + 1
    assert store.log.index(deleted[0]) > store.log.index(f"put train/key-0123abcd/step-000100/{MARKER}")


def test_a_broken_file_is_named(store: WatchedStore, tmp_path: Path) -> None:
    checkpoints(store).publish(local(tmp_path, 50), step=50, keep=1)
    store.put("train/key-0123abcd/step-000050/zero/rank_0.pt", b"cut off")
    with pytest.raises(TrainingError, match=r"checkpoint file step-000050/zero/rank_0\.pt is broken"):
        checkpoints(store).fetch(50, folder=tmp_path / "fetched")


def test_a_lost_file_is_named(store: WatchedStore, tmp_path: Path) -> None:
    checkpoints(store).publish(local(tmp_path, 50), step=50, keep=1)
    store.delete("train/key-0123abcd/step-000050/zero/rank_0.pt")
    with pytest.raises(ObjectMissingError, match=r"step-000050/zero/rank_0\.pt"):
        checkpoints(store).fetch(50, folder=tmp_path / "fetched")


def test_other_runs_and_strangers_are_left_alone(store: WatchedStore, tmp_path: Path) -> None:
    other = CheckpointStore(store, "train/key-ffffffff")  # type: ignore[arg-type]
    other.publish(local(tmp_path, 10), step=10, keep=1)
    store.put("train/key-0123abcd/step-000005/half.pt", b"an upload without a marker")
    checkpoints(store).publish(local(tmp_path, 50), step=50, keep=1)
    assert checkpoints(store).steps() == [50]
    assert other.steps() == [10]
