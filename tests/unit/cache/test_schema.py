"""The group's small objects: the same bytes every time, all that a plain Zarr reader needs, and what they refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zarr

from draftsmith.cache.plan import CachePlan, array_layouts, plan_cache
from draftsmith.cache.schema import metadata_objects, read_metadata
from draftsmith.errors import CacheError, ObjectMissingError
from tests.unit.cache.toy import FACTS, HIDDEN_SIZE, NUM_LAYERS, toy_plan, toy_samples, toy_spec

SCALES = {
    "context": np.linspace(0.5, 9.0, NUM_LAYERS * HIDDEN_SIZE, dtype=np.float32),
    "last_hidden": np.full(HIDDEN_SIZE, 2.5, np.float32),
}


def int8_plan() -> CachePlan:
    return plan_cache(toy_samples(), spec=replace(toy_spec(), codec="int8"))


def getter(objects: dict[str, bytes]) -> Callable[[str], bytes]:
    def get(path: str) -> bytes:
        if path not in objects:
            raise ObjectMissingError(f"no object {path}")
        return objects[path]

    return get


def test_what_was_written_is_read() -> None:
    plan = toy_plan()
    objects = metadata_objects(plan, FACTS)
    assert objects == metadata_objects(toy_plan(), FACTS)
    found = read_metadata(getter(objects), where="there")
    assert found.plan == plan
    assert list(found.plan.samples) == list(plan.samples)
    assert (found.facts, found.scales) == (FACTS, {})


def test_scales_lie_in_the_codec() -> None:
    objects = metadata_objects(int8_plan(), FACTS, scales=SCALES)
    found = read_metadata(getter(objects), where="there").scales
    assert found.keys() == SCALES.keys()
    assert all(np.array_equal(found[name], SCALES[name]) for name in SCALES)
    with pytest.raises(CacheError, match="codec int8 has no scales for context"):
        metadata_objects(int8_plan(), FACTS)


def test_a_plain_zarr_reader_finds_every_sample(tmp_path: Path) -> None:
    plan = toy_plan()
    for path, data in metadata_objects(plan, FACTS).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(data)
    group = zarr.open_group(tmp_path, mode="r")

    def column(name: str) -> np.ndarray:
        array = group[name]
        assert isinstance(array, zarr.Array)
        return np.asarray(array[:])

    assert bytes(column("sample_id")).decode().splitlines() == [sample.id for sample in plan.samples]
    for name in ("shard", "offset", "num_tokens", "num_labels", "label_offset"):
        assert column(f"sample_{name}").tolist() == [getattr(sample, name) for sample in plan.samples]
    for layout in array_layouts(plan.spec):
        array = group[layout.name]
        assert isinstance(array, zarr.Array)
        assert array.shape == (len(plan.shards) * 128, *layout.row_shape)
        assert array.shards == (128, *layout.row_shape)
    assert dict(group.attrs)["draftsmith"]["plan_digest"] == plan.digest  # type: ignore[index,call-overload]


def test_metadata_that_does_not_agree_is_refused() -> None:
    objects = metadata_objects(toy_plan(), FACTS)
    other = metadata_objects(plan_cache(toy_samples(17), spec=toy_spec()), FACTS)
    swapped = {**objects, **{path: data for path, data in other.items() if path.startswith("sample_")}}
    with pytest.raises(CacheError, match=r"samples of the cache are not those of its plan.*there"):
        read_metadata(getter(swapped), where="there")

    def with_body(change: Callable[[dict[str, object]], object]) -> dict[str, bytes]:
        body = json.loads(objects["zarr.json"])
        change(body["attributes"]["draftsmith"])
        return {**objects, "zarr.json": json.dumps(body).encode()}

    with pytest.raises(CacheError, match="another version: got 1, expected 3"):
        read_metadata(getter(with_body(lambda body: body.update(version=1))), where="there")
    with pytest.raises(CacheError, match=r"cannot be read.*there"):
        read_metadata(getter(with_body(lambda body: body.pop("spec"))), where="there")
    with pytest.raises(CacheError, match="not the metadata of a target cache"):
        read_metadata(getter({**objects, "zarr.json": b"{}"}), where="there")
    with pytest.raises(ObjectMissingError, match=r"no object sample_shard/c\.0"):
        read_metadata(getter({k: v for k, v in objects.items() if k != "sample_shard/c.0"}), where="there")


def test_a_damaged_column_is_found() -> None:
    objects = metadata_objects(toy_plan(), FACTS)
    for name in ("sample_id", "sample_offset"):
        data = bytearray(objects[f"{name}/c.0"])
        data[len(data) // 2] ^= 1
        with pytest.raises(CacheError, match="there"):
            read_metadata(getter({**objects, f"{name}/c.0": bytes(data)}), where="there")
