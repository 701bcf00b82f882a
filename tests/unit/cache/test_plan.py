"""The layout: permutation, packing, batches, bytes."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
    assert toy_plan().digest == "aca7a340163118c6e235c3d916caf7588f924201f362ac74c9f917177eaf7d7d"


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
    assert CachePlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


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
    ],
)
def test_refused_samples(samples: list[SampleLength], expected: str) -> None:
    with pytest.raises(CacheError, match=expected):
        plan_cache(samples, spec=big_spec())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"shard_tokens": 100, "chunk_tokens": 33}, "a multiple of chunk_tokens 33"),
        ({"batch_tokens": 0}, "batch_tokens must be >= 1"),
        ({"codec": "int8"}, "unknown codec: got int8"),
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


def test_broken_json_is_refused() -> None:
    body = toy_plan().to_json()
    for broken in ({}, [], {**body, "version": 2}, {**body, "spec": {}}, {**body, "samples": {"id": []}}):
        with pytest.raises(CacheError):
            CachePlan.from_json(broken)
    shuffled = {**body, "samples": {**body["samples"], "shard": body["samples"]["shard"][::-1]}}
    with pytest.raises(CacheError, match="out of order"):
        CachePlan.from_json(shuffled)


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
