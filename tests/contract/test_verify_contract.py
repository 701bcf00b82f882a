"""Damage to a cache on every store: whatever happens to whichever object, verification names it, and reading refuses.

A test damages a toy cache, looks, and puts the bytes back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from draftsmith.cache.reader import CacheReader
from draftsmith.cache.verify import verify_cache
from draftsmith.errors import CacheError, ObjectMissingError
from draftsmith.manifest import Manifest
from draftsmith.storage import Store, open_store
from tests.s3 import S3Bucket
from tests.unit.cache.toy import PREFIX, Toy, fill, toy_plan

CHUNKS_A_SHARD = 8
INDEX_BYTES = 16 * CHUNKS_A_SHARD + 4


@dataclass(frozen=True)
class Filled:
    """A store with the toy cache in it."""

    store: Store
    manifest: Manifest

    @classmethod
    def at(cls, uri: str) -> Filled:
        store, plan = open_store(uri), toy_plan()
        return cls(store, fill(store, plan, Toy(plan)))

    @contextmanager
    def damaged(self, objects: dict[str, bytes | None]) -> Iterator[None]:
        """The store with other bytes in some objects, by path; None stands for an object that is gone."""
        places = {path: f"{PREFIX}/{path}" for path in objects}
        before = {path: self.store.get(place) if self.store.head(place) else None for path, place in places.items()}
        self._write(objects)
        try:
            yield
        finally:
            self._write(before)

    def _write(self, objects: dict[str, bytes | None]) -> None:
        for path, data in objects.items():
            if data is None:
                self.store.delete(f"{PREFIX}/{path}")
            else:
                self.store.put(f"{PREFIX}/{path}", data)

    def get(self, path: str) -> bytes:
        return self.store.get(f"{PREFIX}/{path}")

    def problems(self) -> list[tuple[str, str]]:
        report = verify_cache(self.store, self.manifest, deep=True)
        assert report.num_objects == len(self.manifest.objects)
        return [(item.kind, item.path) for item in report.problems]

    def one_of_each(self) -> list[str]:
        """The second object of every array (the first if there is one only), and every zarr.json."""
        found: dict[str, str] = {}
        for item in self.manifest.objects:
            if item.path.endswith("zarr.json"):
                found[item.path] = item.path
                continue
            array = item.path.rpartition("/")[0]
            if array not in found or "/c.1" in item.path:
                found[array] = item.path
        return list(found.values())


def regions(data: bytes, path: str) -> dict[str, int]:
    """Offsets into an object: a byte of its head, its body and its end; of a shard, by Zarr's sharding format."""
    if path.endswith("zarr.json") or len(data) <= INDEX_BYTES or path.startswith("sample_"):
        return {"head": 0, "body": len(data) // 2, "end": len(data) - 1}
    index = np.frombuffer(data[-INDEX_BYTES:-4], dtype="<u8").reshape(CHUNKS_A_SHARD, 2)
    start, length = (int(value) for value in index[0])
    assert start + length <= len(data) - INDEX_BYTES
    return {
        "chunk's head": start,
        "chunk's body": start + length // 2,
        "chunk's crc": start + length - 2,
        "last chunk": len(data) - INDEX_BYTES - 5,
        "index": len(data) - INDEX_BYTES + 9,
        "index's crc": len(data) - 1,
    }


def flipped(data: bytes, offset: int, *, bit: int = 1) -> bytes:
    return data[:offset] + bytes([data[offset] ^ bit]) + data[offset + 1 :]


class VerifyContract:
    """The suite; a store gives `filled`."""

    def test_nothing_is_wrong(self, filled: Filled) -> None:
        assert filled.problems() == []

    def test_a_flipped_byte_anywhere(self, filled: Filled) -> None:
        """In one object of each kind at a time, region by region."""
        places = {path: regions(filled.get(path), path) for path in filled.one_of_each()}
        assert {"zarr.json", "context/zarr.json", "sample_id/c.0", "sample_offset/c.0", "context/c.1.0.0"} < set(places)
        for region in sorted({region for offsets in places.values() for region in offsets}):
            flips: dict[str, bytes | None] = {
                path: flipped(filled.get(path), offsets[region])
                for path, offsets in places.items()
                if region in offsets
            }
            with filled.damaged(flips):
                assert filled.problems() == [("sha256", path) for path in sorted(flips)], region

    def test_other_damage_to_each_object(self, filled: Filled) -> None:
        data = {path: filled.get(path) for path in filled.one_of_each()}
        with filled.damaged(dict.fromkeys(data)):
            assert filled.problems() == [("missing", path) for path in sorted(data)]
        for cut in (lambda whole: b"", lambda whole: whole[:-1], lambda whole: whole + b"\0"):
            with filled.damaged({path: cut(whole) for path, whole in data.items()}):
                assert filled.problems() == [("size", path) for path in sorted(data)]
        with filled.damaged({f"{path}.bak": whole for path, whole in data.items()}):
            assert filled.problems() == [("extra", f"{path}.bak") for path in sorted(data)]
        assert filled.problems() == []

    def test_objects_that_changed_places(self, filled: Filled) -> None:
        """Of one array, of one size or not, and of two arrays: both are named, with each other's names."""
        paths = [item.path for item in filled.manifest.objects if not item.path.endswith("zarr.json")]
        same_array = [path for path in paths if path.startswith("context/")][:2]
        across = [same_array[0], next(path for path in paths if path.startswith("supervised/"))]
        for first, second in (same_array, across):
            with filled.damaged({first: filled.get(second), second: filled.get(first)}):
                report = verify_cache(filled.store, filled.manifest, deep=True)
                assert {(item.kind, item.path, item.detail) for item in report.problems} == {
                    ("swapped", first, f"has changed places with {second}"),
                    ("swapped", second, f"has changed places with {first}"),
                }

    def test_reading_refuses_each_damaged_array(self, filled: Filled) -> None:
        """The first read of a shard is checked against the manifest, so nobody trains on it."""
        sample = toy_plan().shards[1].samples[0]
        for path in filled.one_of_each():
            array = path.partition("/")[0]
            if array not in ("input_ids", "supervised", "context", "last_hidden") or path.endswith("zarr.json"):
                continue
            data = filled.get(path)
            for other in (flipped(data, len(data) // 2), data[:-1], None):
                with filled.damaged({path: other}), pytest.raises((CacheError, ObjectMissingError), match=path):
                    CacheReader(filled.store, filled.manifest).read(sample.index)


class TestVerifyLocal(VerifyContract):
    @pytest.fixture
    def filled(self, tmp_path: Path) -> Filled:
        return Filled.at(str(tmp_path / "store"))

    def test_bytes_all_along_a_shard(self, filled: Filled) -> None:
        """Every 11th byte of one shard's objects, one after the other, one of its bits flipped."""
        for path in ("context/c.1.0.0", "supervised/c.1"):
            data, place = filled.get(path), Path(filled.store.uri) / PREFIX / path
            for offset in range(0, len(data), 11):
                place.write_bytes(flipped(data, offset, bit=1 << offset % 8))
                assert filled.problems() == [("sha256", path)], offset
            place.write_bytes(data)


@pytest.mark.s3
class TestVerifyS3(VerifyContract):
    @pytest.fixture
    def filled(self, s3_env: S3Bucket) -> Filled:
        return Filled.at(s3_env.uri)
