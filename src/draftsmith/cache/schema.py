"""The cache as a Zarr v3 group: metadata objects, and one shard of an array to and from the bytes of its object.

Every array has rows on its first axis; shard s holds rows s*shard_tokens..(s+1)*shard_tokens-1 as one object, cut
into inner chunks of chunk_tokens rows with a crc32c each. `context` and `last_hidden` hold bfloat16 bits as uint16.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import zarr
from zarr.codecs import Crc32cCodec
from zarr.core.buffer import Buffer, cpu
from zarr.core.common import JSON
from zarr.storage import MemoryStore

from draftsmith.cache.codec import Bf16Planes
from draftsmith.cache.plan import ArrayLayout, CachePlan, CacheSpec, array_layouts
from draftsmith.errors import CacheError

SCHEMA_VERSION = 1
GROUP_OBJECT = "zarr.json"
GROUP_KEY = "draftsmith"

_AXES = {"input_ids": (), "supervised": (), "context": ("layer", "hidden"), "last_hidden": ("hidden",)}


def metadata_object(layout: ArrayLayout) -> str:
    """Path of an array's metadata below the cache's prefix."""
    return f"{layout.name}/zarr.json"


def metadata_objects(plan: CachePlan, facts: dict[str, Any]) -> dict[str, bytes]:
    """Path below the prefix -> bytes of every zarr.json. The group's attributes hold the facts and the whole plan."""
    objects: dict[str, Buffer] = {}
    described = {"version": SCHEMA_VERSION, "facts": facts, "plan": plan.to_json()}
    group = zarr.create_group(MemoryStore(objects), attributes={GROUP_KEY: described}, zarr_format=3)
    num_rows = len(plan.shards) * plan.spec.shard_tokens
    for layout in array_layouts(plan.spec):
        _create(group, layout, plan.spec, num_rows)
    paths = [GROUP_OBJECT, *(metadata_object(layout) for layout in array_layouts(plan.spec))]
    return {path: _compact(objects[path].to_bytes()) for path in paths}


def read_metadata(data: bytes, *, where: str) -> tuple[CachePlan, dict[str, Any]]:
    """The plan and the facts from the bytes of the group's zarr.json. Raises CacheError that names `where`."""
    try:
        described = json.loads(data)["attributes"][GROUP_KEY]
        version, facts, plan = described["version"], described["facts"], described["plan"]
    except (ValueError, KeyError, TypeError) as error:
        raise CacheError(f"not the metadata of a target cache: {error!r}", where=where) from None
    if version != SCHEMA_VERSION:
        raise CacheError("target cache of another version", got=version, expected=SCHEMA_VERSION, where=where)
    return CachePlan.from_json(plan), facts


def empty_shard(layout: ArrayLayout, spec: CacheSpec) -> np.ndarray:
    """An array [shard_tokens, ...] of fill, to be filled with a shard's rows."""
    return np.full((spec.shard_tokens, *layout.row_shape), layout.fill_value, dtype=layout.dtype)


def encode_shard(rows: np.ndarray, *, layout: ArrayLayout, spec: CacheSpec) -> bytes | None:
    """The bytes of the object that holds `rows` [shard_tokens, ...], made by Zarr itself; None if all is fill.

    The bytes depend on nothing but the rows and the spec (and the versions of zarr and zstd).
    """
    objects: dict[str, Buffer] = {}
    array = _create(zarr.create_group(MemoryStore(objects), zarr_format=3), layout, spec, spec.shard_tokens)
    array[:] = rows
    encoded = objects.get(layout.object_path(0))
    return None if encoded is None else encoded.to_bytes()


def decode_shard(data: bytes, *, layout: ArrayLayout, spec: CacheSpec, num_rows: int, where: str) -> np.ndarray:
    """The first `num_rows` rows [num_rows, ...] of a shard's object. Raises CacheError if the bytes are damaged."""
    objects: dict[str, Buffer] = {}
    array = _create(zarr.create_group(MemoryStore(objects), zarr_format=3), layout, spec, spec.shard_tokens)
    objects[layout.object_path(0)] = cpu.Buffer.from_bytes(data)
    try:
        return np.asarray(array[:num_rows])
    except ValueError as error:
        raise CacheError(f"{where} cannot be decoded: {error}") from None


def _create(group: zarr.Group, layout: ArrayLayout, spec: CacheSpec, num_rows: int) -> zarr.Array:
    planes = [Bf16Planes()] if spec.codec == "bf16" and layout.dtype == "uint16" else []
    attributes: dict[str, JSON] = {"stored_as": "uint16", "holds": "bfloat16"} if layout.dtype == "uint16" else {}
    return group.create_array(
        layout.name,
        shape=(num_rows, *layout.row_shape),
        shards=(spec.shard_tokens, *layout.row_shape),
        chunks=(spec.chunk_tokens, *layout.row_shape),
        dtype=layout.dtype,
        fill_value=layout.fill_value,
        filters=None,
        compressors=[*planes, Crc32cCodec()],
        chunk_key_encoding={"name": "default", "separator": "."},
        dimension_names=("token" if layout.rows == "tokens" else "label", *_AXES[layout.name]),
        attributes=attributes,
        config={"write_empty_chunks": False},
    )


def _compact(data: bytes) -> bytes:
    """The same JSON in one canonical form, whatever indent Zarr is set to."""
    return json.dumps(json.loads(data), sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
