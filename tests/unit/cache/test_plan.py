"""The layout: permutation, packing, batches, bytes."""

from __future__ import annotations

import hashlib
import math
import random
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.cache import plan as module
from draftsmith.cache.plan import CachePlan, CacheSpec, SampleLength, array_layouts, plan_cache
from draftsmith.errors import CacheError
from tests.unit.cache.toy import toy_plan, toy_samples, toy_spec


def big_spec(**changes: object) -> CacheSpec:
    base = {
        "num_layers": 5, "hidden_size": 576, "codec": "plain", "last_hidden": "labels", "shard_tokens": 16384,
        "chunk_tokens": 1024, "batch_tokens": 4096, "seed": 3,
    }  # fmt: skip
    return CacheSpec(**{**base, **changes})  # type: ignore[arg-type]


def draw_samples(count: int, *, seed: int = 0, longest: int = 1024) -> list[SampleLength]:
    draw = random.Random(seed)
    lengths = [draw.randint(20, longest) for _ in range(count)]
    return [SampleLength(f"{number:05d}", length, draw.randint(0, length - 1)) for number, length in enumerate(lengths)]


def test_same_plan_in_whatever_order_the_samples_come() -> None:
    samples = draw_samples(300)
    plan = plan_cache(samples, spec=big_spec())
    random.Random(1).shuffle(samples)
    again = plan_cache(samples, spec=big_spec())
    assert again == plan
    assert again.digest == plan.digest


def test_the_order_hangs_on_the_seed_and_is_no_input_order() -> None:
    samples = draw_samples(300)
    orders = [[s.id for s in plan_cache(samples, spec=big_spec(seed=seed)).samples] for seed in (0, 1)]
    assert orders[0] != orders[1]
    assert all(sorted(order) == [s.id for s in samples] for order in orders)
    # A random permutation of n leaves about n/2 ascents; the input order would leave n - 1.
    ascents = sum(a < b for a, b in zip(orders[0], orders[0][1:], strict=False))
    assert 110 < ascents < 190


def test_digest_is_pinned() -> None:
    """The layout is part of a cache's name: a change of the algorithm must be a change of PLAN_VERSION."""
    assert toy_plan().digest == "4ee98c9bcd6f59303a630ffb16df2f548f30a2000e7953f02dda383511f01d2f"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 64), min_size=1, max_size=80), st.integers(0, 3), st.sampled_from(["none", "labels", "all"])
)
def test_every_sample_lies_whole_in_one_shard(lengths: list[int], seed: int, last_hidden: str) -> None:
    spec = big_spec(shard_tokens=64, chunk_tokens=16, batch_tokens=50, seed=seed, last_hidden=last_hidden)
    samples = [SampleLength(str(number), length, length // 2) for number, length in enumerate(lengths)]
    plan = plan_cache(samples, spec=spec)
    assert {(s.id, s.num_tokens, s.num_labels) for s in plan.samples} == {
        (s.id, s.num_tokens, s.num_labels) for s in samples
    }
    assert [s.index for s in plan.samples] == list(range(len(samples)))
    for number, shard in enumerate(plan.shards):
        taken: set[int] = set()
        rows: set[int] = set()
        for sample in shard.samples:
            span = set(range(sample.offset, sample.offset + sample.num_tokens))
            kept = {"none": 0, "labels": sample.num_labels, "all": sample.num_tokens}[last_hidden]
            label_span = set(range(sample.label_offset, sample.label_offset + kept))
            assert sample.shard == shard.index == number
            assert not span & taken
            assert not label_span & rows
            taken |= span
            rows |= label_span
        assert taken == set(range(shard.num_tokens))
        assert rows == set(range(shard.num_rows))
        assert shard.num_tokens <= 64
        placed = sorted(place for batch in shard.batches for place in batch)
        assert placed == list(range(len(shard.samples)))
        for batch in shard.batches:
            assert len(batch) == 1 or sum(shard.samples[place].num_tokens for place in batch) <= 50
    assert [shard.index for shard in plan.shards] == list(range(plan.num_shards)) == list(range(len(plan.shards)))
    assert [sample for shard in plan.shards for sample in shard.samples] == list(plan.samples)
    assert CachePlan.from_columns(spec, plan.columns()) == plan


@pytest.mark.parametrize("count", [3, 700])
def test_the_rules_of_packing(count: int) -> None:
    """Written down once more, in the plainest way: the order of the digests, then first fit over eight open shards."""
    samples = draw_samples(count, seed=count)
    plan = plan_cache(samples, spec=big_spec(shard_tokens=2048))
    ordered = sorted(samples, key=lambda sample: hashlib.sha256(f"3:{sample.id}".encode()).hexdigest())
    shards: list[list[str]] = []
    filled: list[int] = []
    is_open: list[int] = []
    for sample in ordered:
        fitting = [shard for shard in is_open if filled[shard] + sample.num_tokens <= 2048]
        if not fitting:
            if len(is_open) == 8:
                is_open.remove(max(is_open, key=lambda shard: (filled[shard], -shard)))
            fitting = [len(shards)]
            is_open.append(len(shards))
            shards.append([])
            filled.append(0)
        shards[fitting[0]].append(sample.id)
        filled[fitting[0]] += sample.num_tokens
    assert [[sample.id for sample in shard.samples] for shard in plan.shards] == shards


def test_samples_of_one_key_are_in_the_order_of_their_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two digests that begin alike do not come by; without a digest all samples are of one key."""
    monkeypatch.setattr(module, "KEY_BYTES", 0)
    samples = draw_samples(40)
    plan = plan_cache(samples[::-1], spec=big_spec(shard_tokens=65536))
    assert [sample.id for sample in plan.samples] == [sample.id for sample in samples]


def test_samples_by_index_and_by_id() -> None:
    plan = plan_cache(draw_samples(300), spec=big_spec())
    everything = list(plan.samples)
    assert len(plan.samples) == plan.num_samples == 300
    assert (plan.samples[0], plan.samples[-1], plan.samples[7:9]) == (everything[0], everything[299], everything[7:9])
    assert [plan.find(sample.id) for sample in everything] == everything
    assert plan.shards[-1] == plan.shard(plan.num_shards - 1) == list(plan.shards)[-1]
    assert plan.shard_of.tolist() == [sample.shard for sample in everything]
    assert list(plan.sample_ids()) == [sample.id.encode() for sample in everything]
    assert (plan.num_tokens, plan.num_labels) == (
        sum(sample.num_tokens for sample in everything),
        sum(sample.num_labels for sample in everything),
    )
    with pytest.raises(IndexError):
        plan.samples[300]
    with pytest.raises(CacheError, match=r"no sample '00150x' in the cache: expected one of 300, such as 00150, "):
        plan.find("00150x")


def test_columns_by_hand() -> None:
    """Little-endian int32 and UTF-8 whatever the machine: their bytes are in the digest, and in the store."""
    columns = plan_cache([SampleLength("ä", 9, 4), SampleLength("b", 8, 3)], spec=big_spec(seed=0)).columns()
    # sha256("0:ä") = e4..., sha256("0:b") = e0...
    assert columns.pop("sample_id").tobytes() == "b\nä\n".encode()
    assert {name: values.tolist() for name, values in columns.items()} == {
        "num_tokens": [8, 9], "num_labels": [3, 4], "shard": [0, 0], "offset": [0, 8], "label_offset": [0, 3],
    }  # fmt: skip
    assert {values.dtype.str for values in columns.values()} == {"<i4"}


def test_planning_takes_little_memory() -> None:
    """As objects a planned sample with its id takes 280 bytes; in columns 24 and its id, while planning twice that."""
    samples = [SampleLength(f"{number:016x}/t0", 900, 700) for number in range(40_000)]
    tracemalloc.start()
    try:
        plan = plan_cache(samples, spec=big_spec())
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert plan.num_samples == 40_000
    assert held < 40_000 * 60
    assert peak < 40_000 * 120


def test_shards_are_full() -> None:
    """No more than one shard above the least possible number in a hundred."""
    samples = draw_samples(4000)
    least = math.ceil(sum(sample.num_tokens for sample in samples) / 16384)
    assert len(plan_cache(samples, spec=big_spec()).shards) <= math.ceil(least * 1.01) + 1


def test_batches_are_full_and_of_like_lengths() -> None:
    """A shard of 16,384 tokens is about five batches of 4,096; no batch is shorter inside than the next one."""
    plan = plan_cache(draw_samples(2000), spec=big_spec())
    num_batches = sum(len(shard.batches) for shard in plan.shards)
    assert num_batches <= 5.5 * len(plan.shards)
    for shard in plan.shards:
        lengths = [sample.num_tokens for number in range(len(shard.batches)) for sample in shard.batch(number)]
        assert lengths == sorted(lengths, reverse=True)


def test_a_sample_over_the_batch_budget_is_its_own_batch() -> None:
    samples = [SampleLength("long", 60, 5), SampleLength("a", 10, 5), SampleLength("b", 9, 5)]
    plan = plan_cache(samples, spec=big_spec(shard_tokens=128, chunk_tokens=16, batch_tokens=40))
    (shard,) = plan.shards
    assert [[sample.id for sample in shard.batch(number)] for number in range(2)] == [["long"], ["a", "b"]]


def test_bytes_by_hand() -> None:
    """100 rows in chunks of 40: three used chunks of four, each with 4 bytes of crc, and 4 * 16 + 4 bytes of index."""
    spec = big_spec(num_layers=2, hidden_size=3, shard_tokens=160, chunk_tokens=40)
    plan = plan_cache([SampleLength("a", 90, 41), SampleLength("b", 10, 0)], spec=spec)
    assert plan.stored_bytes == {
        "input_ids": 3 * (40 * 4 + 4) + 68,
        "supervised": 3 * (40 + 4) + 68,
        "context": 3 * (40 * 2 * 3 * 2 + 4) + 68,
        "last_hidden": 2 * (40 * 3 * 2 + 4) + 68,
    }
    assert plan.logical_bytes == {"input_ids": 400, "supervised": 100, "context": 1200, "last_hidden": 41 * 6}


def test_no_object_for_no_labels() -> None:
    plan = plan_cache([SampleLength("a", 90, 0)], spec=big_spec())
    assert plan.stored_bytes["last_hidden"] == 0
    assert plan_cache([SampleLength("a", 90, 5)], spec=big_spec(last_hidden="none")).stored_bytes.keys() == {
        "input_ids",
        "supervised",
        "context",
    }


def test_full_size_arithmetic() -> None:
    """Qwen3-4B: 25,600 bytes of context a token, so a shard of 16,384 tokens is 419 MB and fits one S3 put."""
    (context,) = [item for item in array_layouts(big_spec(hidden_size=2560)) if item.name == "context"]
    assert context.row_bytes == 25_600
    assert context.object_path(12) == "context/c.12.0.0"


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([], "no samples"),
        ([SampleLength("a", 9, 1), SampleLength("a", 8, 1)], "two samples of one id: got a"),
        ([SampleLength("fine", 9, 1), SampleLength("too-long", 16385, 1)], "too-long does not fit a shard: got 16385"),
        ([SampleLength("empty", 0, 0)], "empty does not fit a shard"),
        ([SampleLength("many", 5, 5)], "many: number of labels: got 5"),
        ([SampleLength("few", 5, -1)], "few: number of labels: got -1"),
        ([SampleLength("", 5, 1)], "an id of a sample: got ''"),
        ([SampleLength("a\nb", 5, 1)], "an id of a sample: got"),
    ],
)
def test_refused_samples(samples: list[SampleLength], expected: str) -> None:
    with pytest.raises(CacheError, match=expected):
        plan_cache(samples, spec=big_spec())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"shard_tokens": 100, "chunk_tokens": 33}, "a multiple of chunk_tokens 33"),
        ({"shard_tokens": 2**70, "chunk_tokens": 2**69}, r"shard_tokens must be in 1\.\.2147483647"),
        ({"batch_tokens": 0}, r"batch_tokens must be in 1\.\.2147483647: got 0"),
        ({"codec": "fp8"}, "unknown codec: got fp8, expected plain, bf16, int8"),
        ({"last_hidden": "some"}, "unknown choice of last_hidden"),
    ],
)
def test_refused_specs(changes: dict[str, object], expected: str) -> None:
    with pytest.raises(CacheError, match=expected):
        big_spec(**changes)


def test_shards_too_large_for_one_put() -> None:
    spec = big_spec(hidden_size=5120, shard_tokens=1 << 20)
    with pytest.raises(CacheError, match=r"shards are too large.*params.yaml: cache.shard_tokens"):
        plan_cache([SampleLength("a", 1 << 20, 1)], spec=spec)


def test_broken_columns_are_refused() -> None:
    plan = toy_plan()
    good = plan.columns()

    def broken(name: str, place: int, change: int) -> dict[str, np.ndarray]:
        values = good[name].copy()
        values[place] += change
        return {**good, name: values}

    shorter = {**good, "num_labels": good["num_labels"][:-1]}
    without = {name: values for name, values in good.items() if name != "shard"}
    cut_ids = {**good, "sample_id": good["sample_id"][:-1]}
    no_id = {**good, "sample_id": np.append(good["sample_id"], np.uint8(10))}
    for columns, expected in (
        (shorter, "columns of different lengths"),
        (without, "no column shard"),
        (cut_ids, "ids of samples"),
        (no_id, "ids of samples"),
        (broken("shard", 0, 1), "shards out of order"),
        (broken("shard", -1, 2), "shards out of order"),
        (broken("num_tokens", 0, -1000), "numbers of tokens and labels"),
        (broken("num_labels", 0, 1000), "numbers of tokens and labels"),
        (broken("num_labels", 0, -1000), "numbers of tokens and labels"),
        (broken("num_tokens", 0, 1), "column offset does not follow"),
        (broken("num_labels", 0, -1), "column label_offset does not follow"),
        (broken("offset", 1, 1), "column offset does not follow"),
        (broken("num_tokens", -1, 128), "a shard holds too much"),
    ):
        with pytest.raises(CacheError, match=expected):
            CachePlan.from_columns(plan.spec, columns)
    assert CachePlan.from_columns(plan.spec, good).digest == plan.digest


def test_the_digest_sees_every_column() -> None:
    """Of two plans that differ anywhere the digests differ; the seed is in the spec."""
    samples = [SampleLength("a", 9, 4), SampleLength("b", 8, 3)]
    others = [
        [SampleLength("c", 9, 4), samples[1]], [SampleLength("a", 10, 4), samples[1]],
        [SampleLength("a", 9, 5), samples[1]], samples[:1],
    ]  # fmt: skip
    plans = [plan_cache(each, spec=big_spec()) for each in (samples, *others)]
    plans.append(plan_cache(samples, spec=big_spec(seed=4)))
    assert len({plan.digest for plan in plans}) == 6
    assert len(set(plans)) == 6


def test_planning_needs_no_torch_and_no_zarr() -> None:
    code = "import sys, draftsmith.cache.plan; sys.exit(bool({'torch', 'zarr', 'numcodecs'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_rest_of_the_cache_needs_no_torch() -> None:
    code = "import sys; from draftsmith.cache import reader, verify, writer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_toy_is_more_than_one_shard() -> None:
    """The other tests of the cache rest on this."""
    assert 3 <= len(toy_plan().shards) <= 8
    assert len(toy_samples()) == 18
    assert toy_spec().shard_tokens == 128
