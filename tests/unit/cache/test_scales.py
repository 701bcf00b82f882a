"""The fit of the channel scales against sums made number by number, and how one set of them is settled."""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from pathlib import Path

import numpy as np
import pytest
import zarr

from draftsmith.cache import scales as scales_module
from draftsmith.cache.arrays import SampleArrays
from draftsmith.cache.plan import LastHidden, PlannedSample, SampleLength, plan_cache
from draftsmith.cache.scales import fit_batches, fit_plan, fit_scales, settle_scales
from draftsmith.cache.schema import read_metadata
from draftsmith.cache.writer import CacheWriter
from draftsmith.errors import CacheError
from draftsmith.storage import LocalStore
from tests.unit.cache.toy import (
    FACTS,
    HIDDEN_SIZE,
    NUM_LAYERS,
    PREFIX,
    Toy,
    elsewhere,
    fill,
    toy_arrays,
    toy_plan,
    toy_spec,
    toy_writer,
)

RECORD = f"records/{PREFIX}/scales.json"


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def number(bits: int) -> float:
    """bfloat16 bits as a number."""
    return float(struct.unpack(">f", struct.pack(">I", int(bits) << 16))[0])


def root_mean_square(values: list[float]) -> float:
    return math.sqrt(math.fsum(value * value for value in values) / len(values))


def is_bfloat16(value: np.float32) -> bool:
    return struct.pack(">f", float(value))[2:] == b"\0\0"


def test_root_mean_square_by_channel() -> None:
    """Of all tokens of the toy but each sample's first; within half a step of bfloat16 (8 significant bits)."""
    plan = toy_plan()
    found = fit_plan(plan, Toy(plan))
    assert {name: (values.shape, str(values.dtype)) for name, values in found.items()} == {
        "context": ((NUM_LAYERS * HIDDEN_SIZE,), "float32"),
        "last_hidden": ((HIDDEN_SIZE,), "float32"),
    }
    arrays = [toy_arrays(sample, plan.spec) for sample in plan.samples]
    for layer in range(NUM_LAYERS):
        for channel in range(HIDDEN_SIZE):
            values = [number(row[layer, channel]) for item in arrays for row in item.context[1:]]
            fitted = found["context"][layer * HIDDEN_SIZE + channel]
            assert is_bfloat16(fitted)
            assert float(fitted) == pytest.approx(root_mean_square(values), rel=2.0**-8)
    # The toy's masks begin with zeros, so no row of a label is a first token's.
    for channel in range(HIDDEN_SIZE):
        values = [number(row[channel]) for item in arrays if item.last_hidden is not None for row in item.last_hidden]
        assert float(found["last_hidden"][channel]) == pytest.approx(root_mean_square(values), rel=2.0**-8)


@pytest.mark.parametrize(("last_hidden", "mask"), [("all", [0, 0, 0, 1, 1]), ("labels", [1, 1, 1, 0, 0])])
def test_first_tokens_do_not_count(last_hidden: LastHidden, mask: list[int]) -> None:
    """Rows of the first token are a thousand times larger, in context and in last_hidden, and change nothing."""
    spec = toy_spec(last_hidden=last_hidden)
    num_labels = 1 if last_hidden == "all" else 2
    (sample,) = plan_cache([SampleLength("a", 5, num_labels)], spec=spec).samples
    one, thousand = 0x3F80, 0x447A
    context = np.full((5, NUM_LAYERS, HIDDEN_SIZE), one, np.uint16)
    hidden = np.full((sample.num_rows, HIDDEN_SIZE), one, np.uint16)
    context[0] = hidden[0] = thousand
    arrays = SampleArrays(np.arange(5, dtype=np.int32), np.array(mask, np.uint8), context, hidden)
    found = fit_scales([(sample, arrays)], spec=spec)
    assert set(found["context"].tolist()) == set(found["last_hidden"].tolist()) == {1.0}


def test_channels_without_values_divide_by_one() -> None:
    spec = toy_spec(last_hidden="none")
    (sample,) = plan_cache([SampleLength("a", 3, 0)], spec=spec).samples
    context = np.zeros((3, NUM_LAYERS, HIDDEN_SIZE), np.uint16)
    context[:, 0, 0] = 0x4000
    arrays = SampleArrays(np.arange(3, dtype=np.int32), np.zeros(3, np.uint8), context, None)
    assert fit_scales([(sample, arrays)], spec=spec)["context"].tolist() == [2.0] + [1.0] * 11
    (lone,) = plan_cache([SampleLength("a", 1, 0)], spec=spec).samples
    arrays = SampleArrays(np.zeros(1, np.int32), np.zeros(1, np.uint8), context[:1], None)
    assert set(fit_scales([(lone, arrays)], spec=spec)["context"].tolist()) == {1.0}


def test_the_fit_takes_the_first_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as have the tokens wanted, whoever gives more; in batches that the target can take."""
    plan = toy_plan()
    monkeypatch.setattr(scales_module, "FIT_TOKENS", 150)
    batches = fit_batches(plan)
    taken = [sample for batch in batches for sample in batch]
    assert taken == list(plan.samples[: len(taken)])
    tokens = [sample.num_tokens for sample in taken]
    assert sum(tokens[:-1]) < 150 <= sum(tokens)
    assert all(sum(sample.num_tokens for sample in batch) <= plan.spec.batch_tokens for batch in batches)
    assert len(batches) < len(taken)
    some = fit_plan(plan, Toy(plan))
    more = fit_scales([(sample, toy_arrays(sample, plan.spec)) for sample in plan.samples], spec=plan.spec)
    assert {name: values.tolist() for name, values in some.items()} == {
        name: values.tolist() for name, values in more.items()
    }


def test_broken_states_are_named() -> None:
    """A scale of NaN would spoil the whole cache."""
    plan = toy_plan()

    def arrays(sample: PlannedSample) -> SampleArrays:
        made = toy_arrays(sample, plan.spec)
        return dataclasses.replace(made, context=made.context | np.uint16(0x7F80)) if sample.index == 2 else made

    with pytest.raises(CacheError, match=f"sample {plan.samples[2].id}: NaN or infinity in context"):
        fit_scales([(sample, arrays(sample)) for sample in plan.samples], spec=plan.spec)


def test_the_first_scales_of_a_prefix_win(store: LocalStore) -> None:
    first = {"context": np.array([0.5, 1.1], np.float32)}
    second = {"context": np.array([7.0, 8.0], np.float32)}
    settled = settle_scales(store, PREFIX, known=None, fit=lambda: first)
    assert settled["context"].tolist() == first["context"].tolist()
    assert settled["context"].dtype == np.float32
    called = []
    again = settle_scales(store, PREFIX, known=None, fit=lambda: called.append(1) or second)  # type: ignore[func-returns-value]
    assert (again["context"].tolist(), called) == (settled["context"].tolist(), [])
    assert json.loads(store.get(RECORD))["context"][0] == 0.5


def test_of_two_writers_that_fit_at_once_one_wins(store: LocalStore) -> None:
    def fit() -> dict[str, np.ndarray]:
        store.put(RECORD, b'{"context": [0.25]}')
        return {"context": np.array([0.5], np.float32)}

    assert settle_scales(store, PREFIX, known=None, fit=fit)["context"].tolist() == [0.25]


def test_scales_of_the_metadata_need_no_record(store: LocalStore) -> None:
    known = {"context": np.array([0.5], np.float32)}
    assert settle_scales(store, PREFIX, known=known, fit=None)["context"].tolist() == [0.5]
    assert list(store.list("")) == []


def test_no_scales(store: LocalStore) -> None:
    with pytest.raises(CacheError, match="has codec int8, and no scales yet"):
        settle_scales(store, PREFIX, known=None, fit=None)


@pytest.mark.parametrize("data", [b"{", b"[]", b'{"context": [0.0]}', b'{"context": [[1.0]]}', b'{"context": [NaN]}'])
def test_broken_records_are_named(store: LocalStore, data: bytes) -> None:
    store.put(RECORD, data)
    with pytest.raises(CacheError, match=f"broken record of scales.*delete {RECORD}"):
        settle_scales(store, PREFIX, known=None, fit=None)


def test_int8_is_within_half_a_step(store: LocalStore) -> None:
    """Each number within max|x / rms| / 254 of its row, in units of its channel's RMS; and a plain Zarr reader agrees.

    That is half a step of the row's scale, which is kept in 16 bits and rounded up: 1 part in 256 is allowed for.
    """
    plan = toy_plan(codec="int8")
    fill(store, plan, Toy(plan))
    rms = json.loads(store.get(RECORD))
    group = zarr.open_group(Path(store.uri) / PREFIX, mode="r")
    for sample in plan.samples:
        start = sample.shard * plan.spec.shard_tokens + sample.offset
        stored = group["context"][start : start + sample.num_tokens]
        exact = toy_arrays(sample, plan.spec).context
        stored, exact = ((bits.astype(np.uint32) << 16).view(np.float32) for bits in (stored, exact))
        channels = np.array(rms["context"]).reshape(exact.shape[1:])
        step = np.abs(exact / channels).max(axis=-1, keepdims=True) / 127
        # The decoded number is rounded to bfloat16 once more.
        assert (np.abs(stored - exact) <= (step * (1 + 1 / 256) / 2) * channels + np.abs(exact) / 128).all()
        assert not np.array_equal(stored, exact)


def test_writers_of_int8_share_one_fit(store: LocalStore, tmp_path: Path) -> None:
    """Whoever comes later takes what is there: from the record of the first, or from the metadata."""
    plan = toy_plan(codec="int8")
    expected = fill(LocalStore(tmp_path / "whole"), plan, Toy(plan))

    def writer(fit: object) -> CacheWriter:
        return CacheWriter(
            store, prefix=PREFIX, plan=plan, facts=FACTS, owner=elsewhere(), lease_s=60.0, scales=fit  # type: ignore[arg-type]
        )  # fmt: skip

    def refused() -> dict[str, np.ndarray]:
        raise AssertionError("fitted once more")

    with pytest.raises(CacheError, match="has codec int8, and no scales yet"):
        writer(None).prepare()
    assert list(store.list("")) == []
    toy_writer(store, plan).prepare()
    store.delete(f"{PREFIX}/last_hidden/zarr.json")
    writer(refused).write_shards(plan.shards[:1], Toy(plan))
    store.delete(RECORD)
    second = writer(refused)
    second.write_shards(plan.shards, Toy(plan))
    assert second.finish().digest == expected.digest


def test_scales_of_another_fit_are_kept(store: LocalStore) -> None:
    """A processor with other roundings fits other scales, and then writes with those of the first."""
    plan = toy_plan(codec="int8")
    doubled = {name: 2 * values for name, values in fit_plan(plan, Toy(plan)).items()}
    first = CacheWriter(
        store, prefix=PREFIX, plan=plan, facts=FACTS, owner=elsewhere(), lease_s=60.0, scales=lambda: doubled
    )
    first.prepare()
    fill(store, plan, Toy(plan))
    found = read_metadata(lambda path: store.get(f"{PREFIX}/{path}"), where="here").scales
    assert {name: values.tolist() for name, values in found.items()} == {
        name: values.tolist() for name, values in doubled.items()
    }
