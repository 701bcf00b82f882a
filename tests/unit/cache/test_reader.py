"""Reading: values, order, memory, and what is said when the store is not as the manifest says."""

from __future__ import annotations

import hashlib
import shutil
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from draftsmith.cache.plan import plan_cache
from draftsmith.cache.reader import CacheReader, window_order
from draftsmith.errors import CacheError, ObjectMissingError
from draftsmith.manifest import Manifest, ObjectRecord, sha256_hex
from draftsmith.storage import LocalStore
from tests.unit.cache.toy import (
    FACTS,
    PREFIX,
    DyingStore,
    Toy,
    fill,
    toy_arrays,
    toy_mask,
    toy_plan,
    toy_samples,
    toy_spec,
)


class CountingStore(DyingStore):
    """A store that remembers which objects were read, and of ranges how many bytes."""

    def __init__(self, store: LocalStore) -> None:
        super().__init__(store, die_after=-1)
        self.reads: list[str] = []
        self.range_bytes: Counter[str] = Counter()

    def get(self, path: str) -> bytes:
        self.reads.append(path)
        return self._store.get(path)

    def get_range(self, path: str, *, start: int, length: int) -> bytes:
        self.range_bytes[path] += length
        return self._store.get_range(path, start=start, length=length)


def data_reads(store: CountingStore) -> list[str]:
    """The shards' objects that were read: no metadata."""
    arrays = ("input_ids", "supervised", "context", "last_hidden")
    data = tuple(f"{PREFIX}/{array}/c." for array in arrays)
    return [path for path in store.reads if path.startswith(data)]


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


@pytest.mark.parametrize("codec", ["plain", "bf16"])
@pytest.mark.parametrize("last_hidden", ["none", "labels", "all"])
def test_every_sample_comes_back(tmp_path: Path, codec: str, last_hidden: str) -> None:
    store = LocalStore(tmp_path)
    plan = toy_plan(codec=codec, last_hidden=last_hidden)  # type: ignore[arg-type]
    reader = CacheReader(store, fill(store, plan, Toy(plan)), max_open_shards=1)
    assert len(reader) == len(reader.samples) == 18
    assert reader.facts == FACTS
    assert reader.spec == plan.spec
    for index, sample in enumerate(reader.samples):
        got, expected = reader.read(index), toy_arrays(sample, plan.spec)
        mask = toy_mask(sample.num_tokens)
        labels = [p for p in range(sample.num_tokens - 1) if mask[p] and mask[p + 1]]
        positions = {"none": [], "labels": labels, "all": list(range(sample.num_tokens))}[last_hidden]
        assert got.id == sample.id
        assert np.array_equal(got.input_ids, expected.input_ids)
        assert np.array_equal(got.supervised, mask)
        assert np.array_equal(got.context, expected.context)
        assert (got.input_ids.dtype, got.supervised.dtype, got.context.dtype) == (np.int32, np.uint8, np.uint16)
        assert got.label_positions.dtype == np.int64
        assert got.label_positions.tolist() == positions
        assert got.last_hidden.shape == (len(positions), 6)
        if expected.last_hidden is not None:
            assert np.array_equal(got.last_hidden, expected.last_hidden)


def test_arrays_are_parts_of_the_shard_that_nobody_can_write_to(store: LocalStore, manifest: Manifest) -> None:
    reader = CacheReader(store, manifest)
    first, again = reader.read(0), reader.read(0)
    for name in ("input_ids", "supervised", "context", "last_hidden"):
        assert np.shares_memory(getattr(first, name), getattr(again, name))
        with pytest.raises(ValueError, match="read-only"):
            getattr(first, name)[...] = 0


def test_an_epoch_in_order_reads_each_object_once(store: LocalStore, manifest: Manifest) -> None:
    plan = toy_plan()
    counting = CountingStore(store)
    reader = CacheReader(counting, manifest)
    for index in reader.order(0, epoch=0):
        reader.read(index)
    data = data_reads(counting)
    assert len(data) == len(set(data)) == 4 * len(plan.shards)


def test_few_shards_are_held(store: LocalStore, manifest: Manifest) -> None:
    plan = toy_plan()
    counting = CountingStore(store)
    reader = CacheReader(counting, manifest, max_open_shards=2)
    first = [shard.samples[0].index for shard in plan.shards[:3]]
    for index in (*first, first[2], first[1], first[0]):
        reader.read(index)
    opened = [path for path in counting.reads if "/context/c." in path]
    assert [path[-7:] for path in opened] == ["c.0.0.0", "c.1.0.0", "c.2.0.0", "c.0.0.0"]


def test_a_walk_is_read_ahead(store: LocalStore, manifest: Manifest) -> None:
    """Nothing is asked for, and yet the objects of the first two shards of the walk are read, and no others."""
    plan, counting = toy_plan(), CountingStore(store)
    reader = CacheReader(counting, manifest, max_open_shards=1)
    walk = [sample.index for shard in (2, 0, 1) for sample in plan.shards[shard].samples]
    reader.follow(walk)
    deadline = time.monotonic() + 10
    while len(data_reads(counting)) < 8 and time.monotonic() < deadline:
        time.sleep(0.01)
    reader.close()
    data = [path.removeprefix(f"{PREFIX}/") for path in data_reads(counting)]
    names = ("input_ids/c.{}", "supervised/c.{}", "context/c.{}.0.0", "last_hidden/c.{}.0")
    assert sorted(data) == sorted(name.format(shard) for name in names for shard in (2, 0))


def test_epochs_that_were_told_beforehand_are_read_as_any_other(store: LocalStore, manifest: Manifest) -> None:
    plan, reader = toy_plan(), CacheReader(store, manifest, max_open_shards=2)
    walk = [int(index) for epoch in range(3) for index in reader.order(1, epoch=epoch)]
    reader.follow(iter(walk))
    for index in walk:
        assert np.array_equal(reader.read(index).context, toy_arrays(reader.samples[index], plan.spec).context)


def test_the_order_is_the_one_it_always_was() -> None:
    """A run that is resumed with a later version goes on with the samples it would have read."""
    orders = {
        (0, 0): [0, 12, 4, 13, 9, 10, 5, 17, 3, 8, 11, 6, 1, 2, 7, 16, 14, 15],
        (7, 3): [4, 15, 3, 17, 0, 2, 1, 11, 16, 9, 10, 13, 12, 14, 6, 7, 8, 5],
    }
    for (seed, epoch), expected in orders.items():
        assert window_order(toy_plan(), seed, epoch).tolist() == expected


def test_the_order_by_its_definition() -> None:
    """Shards by sha256 of their number, then the samples of each four shards by sha256 of their id."""
    plan = plan_cache(toy_samples(300), spec=toy_spec())

    def place(name: str) -> str:
        return hashlib.sha256(f"5:2:{name}".encode()).hexdigest()

    shards = sorted(range(len(plan.shards)), key=lambda shard: place(f"shard {shard}"))
    expected = []
    for start in range(0, len(shards), 4):
        window = [sample for shard in shards[start : start + 4] for sample in plan.shards[shard].samples]
        expected += [sample.index for sample in sorted(window, key=lambda sample: place(f"sample {sample.id}"))]
    found = window_order(plan, 5, 2)
    assert found.dtype == np.int64
    assert found.tolist() == expected


def test_order_hangs_on_seed_and_epoch_alone(store: LocalStore, manifest: Manifest) -> None:
    reader, second = CacheReader(store, manifest), CacheReader(store, manifest, max_open_shards=1)
    reader.read(3)
    orders = {(seed, epoch): tuple(reader.order(seed, epoch=epoch)) for seed in range(3) for epoch in range(3)}
    assert all(sorted(order) == list(range(18)) for order in orders.values())
    assert len(set(orders.values())) == 9
    assert all(tuple(second.order(seed, epoch=epoch)) == order for (seed, epoch), order in orders.items())


def test_order_mixes_evenly(store: LocalStore, manifest: Manifest) -> None:
    """Over many epochs of a window, each sample comes first about equally often (5 standard deviations)."""
    reader = CacheReader(store, manifest)
    places = np.array([np.argsort(reader.order(0, epoch=epoch)) for epoch in range(400)])
    assert abs(places.mean(axis=0) - 8.5).max() < 5 * np.sqrt((18**2 - 1) / 12 / 400)


def test_threads_share_a_reader(store: LocalStore, manifest: Manifest) -> None:
    plan = toy_plan()
    reader = CacheReader(store, manifest, max_open_shards=1)
    start = threading.Barrier(4)

    def read_all(number: int) -> bool:
        start.wait()
        return all(
            np.array_equal(reader.read(index).context, toy_arrays(reader.samples[index], plan.spec).context)
            for index in reader.order(number, epoch=0)
        )

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read_all, range(4)))


@pytest.mark.parametrize("codec", ["plain", "bf16", "int8"])
@pytest.mark.parametrize("last_hidden", ["none", "labels", "all"])
def test_one_sample_by_its_id(tmp_path: Path, codec: str, last_hidden: str) -> None:
    """The same arrays as from whole shards, from the chunks (16 rows of 128) that hold them and the index alone."""
    counting = CountingStore(LocalStore(tmp_path))
    plan = toy_plan(codec=codec, last_hidden=last_hidden)  # type: ignore[arg-type]
    reader = CacheReader(counting, manifest := fill(counting, plan, Toy(plan)))
    whole = [reader.read(index) for index in range(len(reader))]
    counting.reads.clear()
    for sample, expected in zip(reader.samples, whole, strict=True):
        counting.range_bytes.clear()
        found = reader.read_one(sample.id)
        assert found.planned == sample
        for name in ("id", "input_ids", "supervised", "context", "last_hidden", "label_positions"):
            assert np.array_equal(getattr(found.sample, name), getattr(expected, name)), name
        assert {f"{PREFIX}/{item.path}": item.num_bytes for item in found.objects} == dict(counting.range_bytes)
        for item in found.objects:
            assert item.size == len(counting._store.get(f"{PREFIX}/{item.path}"))
            assert item.path.split(".")[1] == str(sample.shard)
            is_label = item.path.startswith("last_hidden")
            assert item.first_row == (sample.label_offset if is_label else sample.offset)
            assert item.num_rows == (sample.num_rows if is_label else sample.num_tokens)
            chunks = (item.first_row + item.num_rows - 1) // 16 - item.first_row // 16 + 1
            if codec == "plain":
                row_bytes = {"input_ids": 4, "supervised": 1, "context": 24, "last_hidden": 12}[item.path.split("/")[0]]
                assert item.num_bytes == 8 * 16 + 4 + chunks * (16 * row_bytes + 4)
        assert len(found.objects) == {"none": 3, "labels": 4, "all": 4}[last_hidden]
    assert counting.reads == []
    assert manifest.facts["capture_layers"] == [1, 3]


def test_an_unknown_id_gives_near_ones(store: LocalStore, manifest: Manifest) -> None:
    with pytest.raises(
        CacheError, match=r"no sample 'sample-111' in the cache: expected one of 18, such as .*sample-11"
    ):
        CacheReader(store, manifest).read_one("sample-111")


def test_damage_to_one_sample_is_its_own(store: LocalStore, manifest: Manifest) -> None:
    """The crc of the chunk that holds it says so; a sample in other chunks of the same object is read all the same."""
    reader, (first, *_, last) = CacheReader(store, manifest), toy_plan().shards[0].samples
    place = f"{PREFIX}/context/c.0.0.0"
    data = bytearray(store.get(place))
    data[0] ^= 1
    store.put(place, bytes(data))
    assert reader.read_one(last.id).sample.id == last.id
    with pytest.raises(CacheError, match=f"{place} .*chunk 0 is damaged"):
        reader.read_one(first.id)
    store.delete(place)
    with pytest.raises(ObjectMissingError, match=r"no object context/c\.0\.0\.0.*dvc repro -f -s cache@toy_target"):
        reader.read_one(last.id)


@pytest.mark.parametrize("path", ["context/c.0.0.0", "supervised/c.0", "last_hidden/c.0.0", "zarr.json"])
def test_a_flipped_byte_is_named(store: LocalStore, manifest: Manifest, path: str) -> None:
    data = bytearray(store.get(f"{PREFIX}/{path}"))
    data[len(data) // 2] ^= 1
    store.put(f"{PREFIX}/{path}", bytes(data))
    with pytest.raises(
        CacheError, match=f"{PREFIX}/{path} .*not what the manifest names.*dvc repro -f -s cache@toy_target"
    ):
        CacheReader(store, manifest).read(0)


def test_damage_after_the_first_read_is_caught_by_the_chunks_checksums(store: LocalStore, manifest: Manifest) -> None:
    plan = toy_plan()
    reader = CacheReader(store, manifest, max_open_shards=1)
    reader.read(0)
    data = bytearray(store.get(f"{PREFIX}/context/c.0.0.0"))
    data[10] ^= 1
    store.put(f"{PREFIX}/context/c.0.0.0", bytes(data))
    reader.read(plan.shards[1].samples[0].index)
    with pytest.raises(CacheError, match=f"{PREFIX}/context/c.0.0.0 .*chunk 0 is damaged: its crc32c does not agree"):
        reader.read(0)


@pytest.mark.parametrize("gone", ["", "context/c.0.0.0"])
def test_an_empty_store_says_what_to_do(store: LocalStore, manifest: Manifest, gone: str) -> None:
    """Which prefix, which store, which command."""
    for item in list(store.list(PREFIX)):
        if item.path.startswith(f"{PREFIX}/{gone}"):
            store.delete(item.path)
    with pytest.raises(ObjectMissingError) as caught:
        CacheReader(store, manifest).read(0)
    for part in (PREFIX, store.uri, "dvc repro -f -s cache@toy_target", "DRAFTSMITH_STORE"):
        assert part in str(caught.value)


def test_not_a_cache(store: LocalStore) -> None:
    data = b'{"attributes": {}}'
    store.put("cache/x-1/zarr.json", data)
    record = ObjectRecord("zarr.json", len(data), sha256_hex(data))
    with pytest.raises(CacheError, match="not the metadata of a target cache"):
        CacheReader(store, Manifest("cache", "cache/x-1", (record,)))
    with pytest.raises(CacheError, match=r"does not name zarr\.json"):
        CacheReader(store, Manifest("cache", "cache/x-1", ()))
    with pytest.raises(CacheError, match="max_open_shards must be >= 1"):
        CacheReader(store, Manifest("cache", "cache/x-1", ()), max_open_shards=0)
