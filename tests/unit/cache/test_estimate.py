"""What a cache will take: bytes, requests, hours and cost, against hand arithmetic and a store that counts."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftsmith.cache.estimate import (
    CacheEstimate,
    Sourced,
    planned_extent,
    scaled_extent,
    size_text,
    spread_lengths,
)
from draftsmith.cache.plan import CacheSpec, SampleLength, plan_cache
from draftsmith.cache.reader import CacheReader
from draftsmith.errors import CacheError
from draftsmith.storage import LocalStore, ObjectInfo
from tests.unit.cache.test_plan import big_spec, draw_samples
from tests.unit.cache.toy import FACTS, Toy, fill, toy_plan, toy_writer

RATIOS = {"bf16": Sourced(1.5, "given"), "int8": Sourced(2.0, "measured")}


def estimate(spec: CacheSpec, num_tokens: int, **changes: object) -> CacheEstimate:
    lengths = spread_lengths(900, label_share=0.5, max_length=1024)
    base = {
        "target": "qwen3_4b", "spec": spec, "extent": scaled_extent(num_tokens, lengths=lengths, spec=spec),
        "basis": ["900 tokens a sample"], "ratios": RATIOS, "rate": None, "price": None,
    }  # fmt: skip
    return CacheEstimate(**{**base, **changes})  # type: ignore[arg-type]


def test_the_reference_layout_of_qwen3_4b_is_38_tb() -> None:
    """METHOD 12: int32 id, two uint8 masks and six bfloat16 states of 2560 = 30,726 bytes for each of 1.24 G tokens."""
    found = estimate(big_spec(hidden_size=2560, codec="bf16"), 1_240_000_000)
    assert found.reference_bytes == pytest.approx(1_240_000_000 * (4 + 1 + 1 + 6 * 2560 * 2), rel=1e-6)
    assert "38.1 TB (the reference layout, 30,726 bytes a token)" in found.text
    assert found.extent.num_tokens == pytest.approx(1_240_000_000, rel=1e-6)
    assert found.extent.logical["context"] == found.extent.num_tokens * 25_600


def test_bytes_of_a_plan_by_hand() -> None:
    """See `test_bytes_by_hand` of the plan: plain exactly so, and the numbers themselves through the ratio."""
    spec = big_spec(num_layers=2, hidden_size=3, shard_tokens=160, chunk_tokens=40, codec="int8")
    plan = plan_cache([SampleLength("a", 90, 41), SampleLength("b", 10, 0)], spec=spec)
    found = CacheEstimate("t", spec, planned_extent(plan), [], RATIOS, Sourced(250.0, "given"), 20.0)
    arrays = found.to_json()["array_bytes"]
    bare = {"input_ids": 3 * 164 + 68, "supervised": 3 * 44 + 68}
    assert arrays["plain"] == {**bare, "context": 3 * 484 + 68, "last_hidden": 2 * 244 + 68}
    assert arrays["bf16"] == {**bare, "context": 1200 / 1.5, "last_hidden": 246 / 1.5}
    assert arrays["int8"] == {**bare, "context": 1200 / 2, "last_hidden": 246 / 2}
    body = found.to_json()
    totals = {codec: sum(each.values()) + body["metadata_bytes"] for codec, each in arrays.items()}
    assert body["total_bytes"] == totals
    assert body["reference_bytes"] == 100 * (6 + 2 * 3 * 3)
    assert body["device_hours"] == pytest.approx(100 / 250 / 3600)
    assert body["monthly_cost"]["int8"] == pytest.approx(totals["int8"] / 1e12 * 20)
    assert json.loads(json.dumps(body)) == body


@pytest.mark.parametrize(("shard_tokens", "longest"), [(16384, 1024), (16384, 200), (2048, 1024), (262144, 60)])
def test_a_part_speaks_for_the_whole(shard_tokens: int, longest: int) -> None:
    """The extrapolation against the plan of every single sample."""
    lengths = draw_samples(2000, seed=longest, longest=longest)
    spec = big_spec(shard_tokens=shard_tokens)
    mean = sum(item.num_tokens for item in lengths) / len(lengths)
    num_tokens = round(150_000 * mean)
    found = scaled_extent(num_tokens, lengths=lengths, spec=spec)
    everything = (
        SampleLength(str(number), lengths[number % 2000].num_tokens, lengths[number % 2000].num_labels)
        for number in range(150_000)
    )
    whole = planned_extent(plan_cache(everything, spec=spec))
    assert (found.num_samples, found.num_tokens) == (150_000, num_tokens)
    assert not found.is_exact
    assert found.num_labels == pytest.approx(whole.num_labels, rel=0.003)
    assert found.num_shards == pytest.approx(whole.num_shards, rel=0.005)
    assert found.num_objects == pytest.approx(whole.num_objects, rel=0.005)
    for name, size in whole.plain.items():
        assert found.plain[name] == pytest.approx(size, rel=0.003)
        assert found.logical[name] == pytest.approx(whole.logical[name], rel=0.003)


def test_a_few_tokens_are_planned_in_full() -> None:
    lengths = draw_samples(50)
    spec = big_spec()
    total = sum(item.num_tokens for item in lengths)
    found = scaled_extent(total, lengths=lengths, spec=spec)
    renamed = [SampleLength(str(place), item.num_tokens, item.num_labels) for place, item in enumerate(lengths)]
    whole = planned_extent(plan_cache(renamed, spec=spec))
    assert (found.num_samples, found.num_tokens, found.num_shards) == (50, total, whole.num_shards)
    assert found.plain == whole.plain


@pytest.mark.parametrize(("mean", "share"), [(900.0, 0.85), (3.0, 1.0), (1024.0, 0.0), (100.5, 0.5)])
def test_spread_lengths_have_the_mean(mean: float, share: float) -> None:
    lengths = spread_lengths(mean, label_share=share, max_length=1024)
    tokens = [item.num_tokens for item in lengths]
    assert sum(tokens) / len(tokens) == pytest.approx(mean, rel=0.001)
    assert 2 <= min(tokens) <= max(tokens) <= 1024
    # Any hundred of them speak for all.
    for start in range(0, 900, 50):
        assert sum(tokens[start : start + 100]) / 100 == pytest.approx(mean, rel=0.05)
    assert all(0 <= item.num_labels < item.num_tokens for item in lengths)
    if mean > 10:
        assert sum(item.num_labels for item in lengths) / sum(tokens) == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize("mean", [1.0, 1025.0])
def test_a_mean_that_no_sample_can_have(mean: float) -> None:
    with pytest.raises(CacheError, match=r"mean length of a sample: got .*, expected 2..1024 tokens"):
        spread_lengths(mean, label_share=0.5, max_length=1024)


class CountingStore(LocalStore):
    """Counts requests as S3 would see them."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.counts: Counter[str] = Counter()

    def get(self, path: str) -> bytes:
        self.counts["gets"] += 1
        return super().get(path)

    def head(self, path: str) -> ObjectInfo | None:
        self.counts["gets"] += 1
        return super().head(path)

    def put(self, path: str, data: bytes) -> ObjectInfo:
        self.counts["puts"] += 1
        return super().put(path, data)

    def put_if_absent(self, path: str, data: bytes) -> ObjectInfo:
        self.counts["puts"] += 1
        return super().put_if_absent(path, data)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self.counts["lists"] += 1
        return super().list(prefix)


def test_requests_are_those_of_a_build_and_of_an_epoch(tmp_path: Path) -> None:
    plan = toy_plan()
    expected = CacheEstimate("toy", plan.spec, planned_extent(plan), [], RATIOS, None, None).requests
    store = CountingStore(tmp_path)
    writer = toy_writer(store, plan)
    writer.write_shards(writer.pending(plan.shards), Toy(plan))
    manifest = writer.finish()
    assert store.counts == {"puts": expected.puts, "gets": expected.gets, "lists": expected.lists}
    store.counts.clear()
    reader = CacheReader(store, manifest)
    for index in reader.order(0, epoch=0):
        reader.read(int(index))
    reader.close()
    assert store.counts == {"gets": expected.epoch_gets}


def test_pages_of_a_long_listing() -> None:
    """S3 lists a thousand keys at a time: 4 arrays of 1,001 shards are 4 * 2 pages, and 4 + 2 with nothing in them."""
    plan = plan_cache([SampleLength(str(number), 1024, 9) for number in range(1001)], spec=big_spec(shard_tokens=1024))
    requests = CacheEstimate("t", plan.spec, planned_extent(plan), [], RATIOS, None, None).requests
    assert requests.lists == 4 * 2 + 4 + 2
    assert requests.puts == 4 * 1001 + 2 * 1001 + 17


def test_metadata_is_about_what_it_is(tmp_path: Path) -> None:
    """The small objects and the commit records of 18 samples; bytes that grow are tested on larger caches."""
    plan, store = toy_plan(), LocalStore(tmp_path)
    manifest = fill(store, plan, Toy(plan))
    assert manifest.facts.keys() == {*FACTS, "totals"}
    small = sum(item.size for item in manifest.objects if "/c." not in item.path or item.path.startswith("sample_"))
    records = sum(item.size for item in store.list("records"))
    found = CacheEstimate("toy", plan.spec, planned_extent(plan), [], RATIOS, None, None)
    assert found.metadata_bytes == pytest.approx(small + records, rel=0.3)


def test_the_text_for_people() -> None:
    spec = big_spec(hidden_size=2560, codec="bf16")
    text = estimate(spec, 1_240_000_000, rate=Sourced(20_000.0, "measured on NVIDIA H200, 32 shards"), price=23.0).text
    lines = text.splitlines()
    assert lines[0].startswith("Target cache of qwen3_4b: 1,240,000,000 tokens in about 1,377,778 samples")
    (head,) = (line for line in lines if line.startswith("array "))
    assert re.split(r" {2,}", head) == ["array", "numbers", "plain", "bf16 *", "int8"]
    table = {
        line.split("  ")[0]: line.split()[-3:] for line in lines if line.startswith(("context", "in all", "a mon"))
    }
    assert len({len(line) for line in lines if line.startswith(("array", "input_ids", "context", "in all"))}) == 1
    # 1.24e9 tokens * 25,600 bytes / 1.5 and / 2.
    assert lines[lines.index(head) + 3].split()[-4:] == ["21.2", "TB", "15.9", "TB"]
    assert len(table["a month, at 23 a TB"]) == 3
    assert "  Hours      17.2 of one device at 20,000 tokens/s (measured on NVIDIA H200, 32 shards)" in lines
    assert any("bf16: 1 byte for 1.5 (given)" in line for line in lines)
    assert max(map(len, lines)) <= 120
    unknown = estimate(spec, 1000).text
    assert "--tokens-per-s gives one" in unknown
    assert "DRAFTSMITH_PRICE_PER_TB_MONTH gives the price" in unknown
    assert "a month, at" not in unknown


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (999_400, "999 kB"), (999_600, "1.00 MB"),
        (38_100_240_000_000, "38.1 TB"), (1_234_000_000_000_000, "1,234 TB"), (-13_200_000_000_000, "-13.2 TB"),
    ],
)  # fmt: skip
def test_sizes_in_words(num_bytes: float, expected: str) -> None:
    assert size_text(num_bytes) == expected
