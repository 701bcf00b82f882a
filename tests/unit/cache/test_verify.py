"""Verification finds every kind of damage and names the object."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest

from draftsmith.cache import verify
from draftsmith.cache.verify import verify_cache
from draftsmith.errors import ObjectMissingError
from draftsmith.manifest import Manifest
from draftsmith.storage import LocalStore
from tests.unit.cache.test_reader import CountingStore
from tests.unit.cache.toy import PREFIX, Toy, fill, toy_plan

OBJECTS = ["context/c.1.0.0", "input_ids/c.0", "last_hidden/c.2.0", "supervised/zarr.json", "zarr.json"]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Manifest]:
    """A store with the toy cache, to be copied."""
    folder, plan = tmp_path_factory.mktemp("filled"), toy_plan()
    return folder, fill(LocalStore(folder), plan, Toy(plan))


@pytest.fixture
def store(tmp_path: Path, filled: tuple[Path, Manifest]) -> LocalStore:
    shutil.copytree(filled[0], tmp_path / "store")
    return LocalStore(tmp_path / "store")


@pytest.fixture
def manifest(filled: tuple[Path, Manifest]) -> Manifest:
    return filled[1]


def test_a_whole_cache(store: LocalStore, manifest: Manifest) -> None:
    """Small enough to be hashed whole, asked for or not."""
    sizes = [item.size for item in store.list(PREFIX)]
    for deep in (True, False):
        report = verify_cache(store, manifest, deep=deep)
        assert report.ok
        assert report.num_objects == report.num_hashed == len(sizes)
        assert report.num_bytes == report.hashed_bytes == sum(sizes)
        assert f"{len(sizes)} objects, {sum(sizes)} bytes; all sizes compared, all read and hashed" in report.text
        assert report.text.endswith("all as the manifest says")


def test_a_sample_within_a_budget(store: LocalStore, manifest: Manifest) -> None:
    """All metadata, and of the rest as much as fits, another choice each time; with `deep` everything all the same."""
    drawn, counting = set(), CountingStore(store)
    for _ in range(20):
        counting.reads.clear()
        report = verify_cache(counting, manifest, deep=False, sample_bytes=20_000)
        assert report.ok
        assert 10_000 < report.hashed_bytes <= 20_000
        assert report.hashed_bytes == sum(len(store.get(path)) for path in counting.reads)
        assert report.num_hashed == len(counting.reads) < report.num_objects
        assert f"{report.num_hashed}, drawn anew each time, read and hashed" in report.text
        always = {"zarr.json", "context/zarr.json", "sample_id/c.0", "sample_offset/c.0"}
        assert {f"{PREFIX}/{path}" for path in always} <= set(counting.reads)
        drawn.add(frozenset(counting.reads))
    assert len(drawn) > 10
    assert frozenset.union(*drawn) == {item.path for item in store.list(PREFIX)}
    deep = verify_cache(store, manifest, deep=True, sample_bytes=20_000)
    assert deep.num_hashed == len(manifest.objects)


def test_a_tiny_budget_still_looks_at_one_shard(store: LocalStore, manifest: Manifest) -> None:
    counting = CountingStore(store)
    verify_cache(counting, manifest, deep=False, sample_bytes=1)
    assert len([path for path in counting.reads if "/c." in path and "/sample_" not in path]) == 1


def test_large_objects_are_read_in_parts(
    store: LocalStore, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory does not grow with the shards: no read is longer than a part, and the sums are the same."""
    monkeypatch.setattr(verify, "PART_BYTES", 100)
    lengths = []

    class Ranges(CountingStore):
        def get_range(self, path: str, *, start: int, length: int) -> bytes:
            lengths.append(length)
            return self._store.get_range(path, start=start, length=length)

        def get(self, path: str) -> bytes:
            data = super().get(path)
            lengths.append(len(data))
            return data

    assert verify_cache(Ranges(store), manifest, deep=True).ok
    assert max(lengths) == 100
    assert sum(lengths) == sum(item.size for item in manifest.objects)
    path = f"{PREFIX}/context/c.1.0.0"
    data = bytearray(store.get(path))
    data[len(data) // 2] ^= 1
    store.put(path, bytes(data))
    assert [item.path for item in verify_cache(store, manifest, deep=True).problems] == ["context/c.1.0.0"]


def test_a_plan_without_objects_is_nothing_to_verify(tmp_path: Path, manifest: Manifest) -> None:
    """Streaming mode: the store may be empty."""
    planned = Manifest("cache", manifest.prefix, (), {**manifest.facts, "mode": "stream"})
    report = verify_cache(LocalStore(tmp_path / "empty"), planned, deep=True)
    assert report.ok
    assert "planned only" in report.text
    assert "nothing to verify" in report.text


@pytest.mark.parametrize("path", OBJECTS)
def test_a_report_names_the_object_and_the_remedy(store: LocalStore, manifest: Manifest, path: str) -> None:
    data = bytearray(store.get(f"{PREFIX}/{path}"))
    data[-1] ^= 0x10
    store.put(f"{PREFIX}/{path}", bytes(data))
    report = verify_cache(store, manifest, deep=False)
    assert [(item.kind, item.path) for item in report.problems] == [("sha256", path)]
    expected = next(item.sha256 for item in manifest.objects if item.path == path)
    got = hashlib.sha256(data).hexdigest()
    assert f"sha256: {PREFIX}/{path} (got {got}, expected {expected})" in report.text
    assert "dvc repro -f -s cache@toy_target" in report.text


def test_damage_that_sizes_show_is_found_by_the_smallest_sample(store: LocalStore, manifest: Manifest) -> None:
    data = store.get(f"{PREFIX}/supervised/c.2")
    store.put(f"{PREFIX}/supervised/c.2", data[:-3])
    store.delete(f"{PREFIX}/context/c.1.0.0")
    store.put(f"{PREFIX}/input_ids/c.0.bak", b"")
    report = verify_cache(store, manifest, deep=False, sample_bytes=1)
    assert [(item.kind, item.path) for item in report.problems] == [
        ("missing", "context/c.1.0.0"), ("extra", "input_ids/c.0.bak"), ("size", "supervised/c.2"),
    ]  # fmt: skip
    assert f"truncated: got {len(data) - 3} bytes, expected {len(data)}" in report.text


def test_a_sample_that_meets_half_of_an_exchange_names_both(tmp_path: Path) -> None:
    """Codec plain: two full chunks' worth of input_ids of one size, so that no size gives the exchange away."""
    store, plan = LocalStore(tmp_path), toy_plan(codec="plain")
    manifest = fill(store, plan, Toy(plan))
    same_size: dict[int, list[str]] = {}
    for item in manifest.objects:
        if item.path.startswith("input_ids/c."):
            same_size.setdefault(item.size, []).append(item.path)
    first, second = next(paths for paths in same_size.values() if len(paths) > 1)[:2]
    bytes_first, bytes_second = store.get(f"{PREFIX}/{first}"), store.get(f"{PREFIX}/{second}")
    store.put(f"{PREFIX}/{first}", bytes_second)
    store.put(f"{PREFIX}/{second}", bytes_first)
    reports = [verify_cache(store, manifest, deep=False, sample_bytes=1) for _ in range(200)]
    bad = [report for report in reports if not report.ok]
    assert bad
    for report in bad:
        assert [(item.kind, item.path, item.detail) for item in report.problems] == [
            ("swapped", first, f"has changed places with {second}"),
            ("swapped", second, f"has changed places with {first}"),
        ]


def test_an_object_that_holds_anothers_bytes(store: LocalStore, manifest: Manifest) -> None:
    """A copy to the wrong place: the source is as it should be."""
    store.put(f"{PREFIX}/context/c.0.0.0", store.get(f"{PREFIX}/context/c.2.0.0"))
    (problem,) = verify_cache(store, manifest, deep=True).problems
    assert (problem.kind, problem.path) == ("swapped", "context/c.0.0.0")
    assert problem.detail == "holds the bytes of context/c.2.0.0"


def test_three_objects_that_changed_places(store: LocalStore, manifest: Manifest) -> None:
    paths = [f"context/c.{shard}.0.0" for shard in range(3)]
    data = [store.get(f"{PREFIX}/{path}") for path in paths]
    for path, other in zip(paths, [*data[1:], data[0]], strict=True):
        store.put(f"{PREFIX}/{path}", other)
    report = verify_cache(store, manifest, deep=True)
    assert [(item.kind, item.detail) for item in report.problems] == [
        ("swapped", f"holds the bytes of {other}") for other in [*paths[1:], paths[0]]
    ]


def test_several_at_once_are_all_named(store: LocalStore, manifest: Manifest) -> None:
    store.delete(f"{PREFIX}/context/c.0.0.0")
    store.put(f"{PREFIX}/input_ids/c.1", b"short")
    store.put(f"{PREFIX}/new", b"")
    report = verify_cache(store, manifest, deep=False)
    assert [item.kind for item in report.problems] == ["missing", "size", "extra"]


def test_the_sample_finds_a_flip_in_the_end(store: LocalStore, manifest: Manifest) -> None:
    """A new sample each time: damage that one run overlooks does not stay overlooked."""
    path = f"{PREFIX}/context/c.1.0.0"
    data = bytearray(store.get(path))
    data[0] ^= 1
    store.put(path, bytes(data))
    found = [not verify_cache(store, manifest, deep=False, sample_bytes=20_000).ok for _ in range(200)]
    assert 0 < sum(found) < 200


def test_many_problems_are_cut_short(store: LocalStore, manifest: Manifest) -> None:
    for number in range(30):
        store.put(f"{PREFIX}/extra/{number}", b"")
    report = verify_cache(store, manifest, deep=False)
    assert len(report.problems) == 30
    assert "and 10 more" in report.text
    assert len(report.text.splitlines()) == 1 + 20 + 1 + 1


def test_an_empty_store_is_one_error(tmp_path: Path, manifest: Manifest) -> None:
    with pytest.raises(
        ObjectMissingError, match=r"lacks cache cache/toy_target-0123abcd.*dvc repro -f -s cache@toy_target"
    ):
        verify_cache(LocalStore(tmp_path / "empty"), manifest, deep=False)


def test_a_mended_cache_is_whole_again(store: LocalStore, manifest: Manifest) -> None:
    """The remedy that the report names: delete what is named, run the stage; only that shard is computed."""
    path = f"{PREFIX}/context/c.1.0.0"
    data = bytearray(store.get(path))
    data[5] ^= 1
    store.put(path, bytes(data))
    for item in verify_cache(store, manifest, deep=True).problems:
        store.delete(f"{PREFIX}/{item.path}")
    plan = toy_plan()
    toy = Toy(plan)
    assert fill(store, plan, toy).digest == manifest.digest
    assert set(toy.computed) == {sample.id for sample in plan.shards[1].samples}
    assert verify_cache(store, manifest, deep=True).ok
