"""Verification finds every kind of damage and names the object."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from draftsmith.cache.verify import SAMPLE_OBJECTS, verify_cache
from draftsmith.errors import ObjectMissingError
from draftsmith.manifest import Manifest
from draftsmith.storage import LocalStore
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
    deep, shallow = verify_cache(store, manifest, deep=True), verify_cache(store, manifest, deep=False)
    assert deep.ok
    assert shallow.ok
    assert deep.num_objects == shallow.num_objects == deep.num_hashed == len(manifest.objects)
    assert shallow.num_hashed == 5 + SAMPLE_OBJECTS
    assert deep.num_bytes == sum(item.size for item in store.list(PREFIX))
    assert deep.text.endswith("all as the manifest says")


@pytest.mark.parametrize("path", OBJECTS)
@pytest.mark.parametrize("place", [0, -1])
def test_a_flipped_byte(store: LocalStore, manifest: Manifest, path: str, place: int) -> None:
    data = bytearray(store.get(f"{PREFIX}/{path}"))
    data[place] ^= 0x10
    store.put(f"{PREFIX}/{path}", bytes(data))
    report = verify_cache(store, manifest, deep=True)
    assert [(item.kind, item.path) for item in report.problems] == [("sha256", path)]
    assert f"sha256: {PREFIX}/{path}" in report.text
    assert "dvc repro -f -s cache@toy_target" in report.text


@pytest.mark.parametrize("deep", [True, False])
@pytest.mark.parametrize("path", OBJECTS)
@pytest.mark.parametrize("damage", ["missing", "size", "extra"])
def test_other_damage(store: LocalStore, manifest: Manifest, path: str, damage: str, deep: bool) -> None:
    """Sizes, missing and extra objects are found without reading anything."""
    place = f"{PREFIX}/{path}"
    if damage == "missing":
        store.delete(place)
    elif damage == "size":
        store.put(place, store.get(place)[:-1])
    else:
        path = path + ".bak"
        store.put(f"{PREFIX}/{path}", b"")
    report = verify_cache(store, manifest, deep=deep)
    assert [(item.kind, item.path) for item in report.problems] == [(damage, path)]
    assert not report.ok


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
    assert any(not verify_cache(store, manifest, deep=False).ok for _ in range(200))


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
