"""A shard's object: byte for byte what Zarr writes, and nothing that is damaged is taken for whole."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import zarr
from zarr.core.buffer import Buffer, cpu
from zarr.storage import MemoryStore

from draftsmith.cache.plan import ArrayLayout, CacheSpec, array_layouts, plan_cache
from draftsmith.cache.schema import metadata_objects
from draftsmith.cache.shard import ShardCodec
from draftsmith.errors import CacheError
from tests.unit.cache.toy import bf16_bits, toy_samples, toy_spec

CODECS = ("plain", "bf16", "int8")
ARRAYS = ("input_ids", "supervised", "context", "last_hidden")


def scales_of(spec: CacheSpec) -> dict[str, np.ndarray]:
    if spec.codec != "int8":
        return {}
    return {
        item.name: np.linspace(0.5, 2.0, int(np.prod(item.row_shape)), dtype=np.float32)
        for item in array_layouts(spec)
        if item.dtype == "uint16"
    }


def make(name: str, codec: str, *, threads: int = 1) -> tuple[ShardCodec, ArrayLayout, CacheSpec]:
    spec = replace(toy_spec(), codec=codec)  # type: ignore[arg-type]
    (layout,) = (item for item in array_layouts(spec) if item.name == name)
    return ShardCodec(layout, spec=spec, scales=scales_of(spec).get(name), threads=threads), layout, spec


def draw(layout: ArrayLayout, rows: int) -> np.ndarray:
    generator = np.random.default_rng(rows)
    shape = (rows, *layout.row_shape)
    if layout.dtype == "uint16":
        return bf16_bits(generator.standard_normal(shape))
    return generator.integers(0, 2, shape).astype(layout.dtype)


def zarrs_own(rows: np.ndarray, layout: ArrayLayout, spec: CacheSpec) -> tuple[bytes | None, np.ndarray]:
    """The object that Zarr writes for these rows through the group's metadata, and what it reads from it."""
    plan = plan_cache(toy_samples(), spec=spec)
    objects: dict[str, Buffer] = {
        path: cpu.Buffer.from_bytes(data) for path, data in metadata_objects(plan, {}, scales=scales_of(spec)).items()
    }
    array = zarr.open_group(MemoryStore(objects), mode="r+")[layout.name]
    assert isinstance(array, zarr.Array)
    array[: len(rows)] = rows
    found = objects.get(layout.object_path(0))
    return None if found is None else found.to_bytes(), np.asarray(array[: len(rows)])


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 100, 128])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", ARRAYS)
def test_bytes_are_zarrs(name: str, codec: str, rows: int, threads: int) -> None:
    coder, layout, spec = make(name, codec, threads=threads)
    values = draw(layout, rows)
    data = coder.encode(values)
    expected, read = zarrs_own(values, layout, spec)
    assert data == expected
    assert data is not None
    back = coder.decode(data, num_rows=rows, where="there")
    assert back.dtype == layout.dtype
    assert np.array_equal(back, read)
    if codec != "int8" or layout.dtype != "uint16":
        assert np.array_equal(back, values)


def test_objects_that_are_held_keep_their_bytes() -> None:
    """The memory of an object is used again when it is gone, and not before."""
    coder, layout, _ = make("context", "bf16", threads=2)
    values = [draw(layout, rows) for rows in (100, 101, 102, 103)]
    held = [coder.encode(item) for item in values]
    del held[1]
    for _ in range(3):
        coder.encode(draw(layout, 128))
    for rows, data in zip((100, 102, 103), held, strict=True):
        assert data is not None
        assert bytes(data) == zarrs_own(draw(layout, rows), *make("context", "bf16")[1:])[0]


def test_no_rows_make_no_object() -> None:
    coder, layout, _ = make("context", "bf16")
    assert coder.encode(draw(layout, 0)) is None


@pytest.mark.parametrize("codec", CODECS)
def test_single_rows_by_ranges(codec: str) -> None:
    """Every span of rows, from the chunks that its index names and no other byte."""
    coder, layout, _ = make("context", codec)
    data = coder.encode(draw(layout, 75))
    assert data is not None
    whole = coder.decode(data, num_rows=75, where="there")
    start, length = coder.index_range(len(data), where="there")
    assert start + length == len(data)
    for first in (0, 5, 15, 16, 40):
        for num in (0, 1, 11, 33):
            ranges = coder.chunk_ranges(data[start:], first_row=first, num_rows=num, where="there")
            assert [item.chunk for item in ranges] == sorted({row // 16 for row in range(first, first + num)})
            chunks = [(item, data[item.start : item.start + item.length]) for item in ranges]
            rows = coder.decode_rows(chunks, first_row=first, num_rows=num, where="there")
            assert np.array_equal(rows, whole[first : first + num])


@pytest.mark.parametrize("codec", CODECS)
def test_every_flipped_byte_is_found(codec: str) -> None:
    coder, layout, _ = make("context", codec)
    data = coder.encode(draw(layout, 40))
    assert data is not None
    for place in range(0, len(data), 7):
        broken = bytearray(data)
        broken[place] ^= 0x10
        with pytest.raises(CacheError, match=r"there.*(damaged|cannot be decoded)"):
            coder.decode(bytes(broken), num_rows=40, where="there")


def test_cut_objects_are_found() -> None:
    coder, layout, _ = make("supervised", "plain")
    data = coder.encode(draw(layout, 40))
    assert data is not None
    for length in (0, 10, len(data) - 1, len(data) // 2):
        with pytest.raises(CacheError, match="there"):
            coder.decode(data[:length], num_rows=40, where="there")


def test_rows_that_are_not_there_are_told() -> None:
    coder, layout, _ = make("input_ids", "plain")
    data = coder.encode(draw(layout, 30))
    assert data is not None
    with pytest.raises(CacheError, match="its index names no chunk 2"):
        coder.decode(data, num_rows=33, where="there")
    index = data[coder.index_range(len(data), where="there")[0] :]
    with pytest.raises(CacheError, match="its index names no chunk 8"):
        coder.chunk_ranges(index, first_row=128, num_rows=1, where="there")


@pytest.mark.parametrize("wrong", ["dtype", "shape", "rows"])
def test_rows_of_another_form_are_refused(wrong: str) -> None:
    coder, layout, _ = make("context", "bf16")
    values = draw(layout, 10)
    values = {"dtype": values.astype(np.float32), "shape": values[:, :1], "rows": draw(layout, 129)}[wrong]
    with pytest.raises(CacheError, match=r"rows of context: got .*, expected uint16 \[<= 128, 2, 6\]"):
        coder.encode(values)


def test_scales_belong_to_int8_alone() -> None:
    _, layout, spec = make("context", "bf16")
    with pytest.raises(CacheError, match="scales for codec int8 alone"):
        ShardCodec(layout, spec=spec, scales=np.ones(12, np.float32))
    with pytest.raises(CacheError, match="got no scales"):
        ShardCodec(layout, spec=replace(spec, codec="int8"))
    with pytest.raises(CacheError, match="got 5, expected 12 channels"):
        ShardCodec(layout, spec=replace(spec, codec="int8"), scales=np.ones(5, np.float32))
