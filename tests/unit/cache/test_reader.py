"""Reading: values, order, memory, and what is said when the store is not as the manifest says."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from draftsmith.cache.reader import CacheReader
from draftsmith.errors import CacheError, ObjectMissingError
from draftsmith.manifest import Manifest, ObjectRecord, sha256_hex
from draftsmith.storage import LocalStore
from tests.unit.cache.toy import FACTS, PREFIX, DyingStore, Toy, fill, toy_arrays, toy_mask, toy_plan


class CountingStore(DyingStore):
    """A store that remembers which objects were read."""

    def __init__(self, store: LocalStore) -> None:
        super().__init__(store, die_after=-1)
        self.reads: list[str] = []

    def get(self, path: str) -> bytes:
        self.reads.append(path)
        return self._store.get(path)


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


def test_arrays_belong_to_the_caller(store: LocalStore, manifest: Manifest) -> None:
    """torch.from_numpy wants them writable, and writing to them changes no later read."""
    plan = toy_plan()
    reader = CacheReader(store, manifest)
    first = reader.read(0)
    for values in (first.input_ids, first.supervised, first.context, first.last_hidden, first.label_positions):
        values[...] = 0
    assert np.array_equal(reader.read(0).context, toy_arrays(reader.samples[0], plan.spec).context)


def test_an_epoch_in_order_reads_each_object_once(store: LocalStore, manifest: Manifest) -> None:
    plan = toy_plan()
    counting = CountingStore(store)
    reader = CacheReader(counting, manifest)
    for index in reader.order(0, 0):
        reader.read(index)
    data = [path for path in counting.reads if not path.endswith("zarr.json")]
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


def test_order_hangs_on_seed_and_epoch_alone(store: LocalStore, manifest: Manifest) -> None:
    reader, second = CacheReader(store, manifest), CacheReader(store, manifest, max_open_shards=1)
    reader.read(3)
    orders = {(seed, epoch): tuple(reader.order(seed, epoch)) for seed in range(3) for epoch in range(3)}
    assert all(sorted(order) == list(range(18)) for order in orders.values())
    assert len(set(orders.values())) == 9
    assert all(tuple(second.order(seed, epoch)) == order for (seed, epoch), order in orders.items())


def test_order_mixes_evenly(store: LocalStore, manifest: Manifest) -> None:
    """Over many epochs of a window, each sample comes first about equally often (5 standard deviations)."""
    reader = CacheReader(store, manifest)
    places = np.array([np.argsort(reader.order(0, epoch)) for epoch in range(400)])
    assert abs(places.mean(axis=0) - 8.5).max() < 5 * np.sqrt((18**2 - 1) / 12 / 400)


def test_threads_share_a_reader(store: LocalStore, manifest: Manifest) -> None:
    plan = toy_plan()
    reader = CacheReader(store, manifest, max_open_shards=1)
    start = threading.Barrier(4)

    def read_all(number: int) -> bool:
        start.wait()
        return all(
            np.array_equal(reader.read(index).context, toy_arrays(reader.samples[index], plan.spec).context)
            for index in reader.order(number, 0)
        )

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read_all, range(4)))


@pytest.mark.parametrize("path", ["context/c.0.0.0", "supervised/c.0", "last_hidden/c.0.0", "zarr.json"])
def test_a_flipped_byte_is_named(store: LocalStore, manifest: Manifest, path: str) -> None:
    data = bytearray(store.get(f"{PREFIX}/{path}"))
    data[len(data) // 2] ^= 1
    store.put(f"{PREFIX}/{path}", bytes(data))
    with pytest.raises(
        CacheError, match=f"{PREFIX}/{path} .*not what the manifest names.*dvc repro -f -s cache@toy_target"
    ):
        CacheReader(store, manifest).read(0)


def test_damage_after_the_first_read_is_caught_by_zarrs_checksums(store: LocalStore, manifest: Manifest) -> None:
    plan = toy_plan()
    reader = CacheReader(store, manifest, max_open_shards=1)
    reader.read(0)
    data = bytearray(store.get(f"{PREFIX}/context/c.0.0.0"))
    data[10] ^= 1
    store.put(f"{PREFIX}/context/c.0.0.0", bytes(data))
    reader.read(plan.shards[1].samples[0].index)
    with pytest.raises(CacheError, match=f"{PREFIX}/context/c.0.0.0 .*cannot be decoded.*checksum"):
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
