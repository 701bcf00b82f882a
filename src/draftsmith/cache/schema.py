"""The cache as a Zarr v3 group: its metadata, and where each sample lies.

Every array has rows on its first axis; shard s holds rows s*shard_tokens..(s+1)*shard_tokens-1 as one object, cut
into inner chunks of chunk_tokens rows with a crc32c each (`cache/shard.py` writes and reads those). `context` and
`last_hidden` hold bfloat16 bits as uint16. The arrays `sample_*` are the columns of the plan: for sample i,
`sample_shard[i]`, its first row in the shard `sample_offset[i]`, and so on; `sample_id` holds the ids as UTF-8, one a
line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.abc.codec import BytesBytesCodec
from zarr.codecs import Crc32cCodec, ZstdCodec
from zarr.core.buffer import Buffer, cpu
from zarr.core.common import JSON
from zarr.storage import MemoryStore

from draftsmith.cache.codec_bf16 import Bf16Planes
from draftsmith.cache.codec_int8 import Int8Rows
from draftsmith.cache.plan import ArrayLayout, CachePlan, CacheSpec, array_layouts
from draftsmith.errors import CacheError

SCHEMA_VERSION = 3
GROUP_OBJECT = "zarr.json"
GROUP_KEY = "draftsmith"
COLUMN_ARRAYS = ("sample_id", "sample_num_tokens", "sample_num_labels", "sample_shard", "sample_offset",
                 "sample_label_offset")  # fmt: skip

_AXES = {"input_ids": (), "supervised": (), "context": ("layer", "hidden"), "last_hidden": ("hidden",)}

Scales = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Metadata:
    """What the group says of a cache. `scales`: array name -> channel RMS (codec int8, else empty)."""

    plan: CachePlan
    facts: dict[str, Any]
    scales: dict[str, NDArray[np.float32]]


def metadata_object(layout: ArrayLayout) -> str:
    """Path of an array's metadata below the cache's prefix."""
    return f"{layout.name}/zarr.json"


def metadata_objects(plan: CachePlan, facts: dict[str, Any], *, scales: Scales | None = None) -> dict[str, bytes]:
    """Path below the prefix -> bytes of every small object: each zarr.json, and the columns of the samples.

    The group's attributes hold the facts, the spec and the plan's digest. `scales`: channel RMS by array, for codec
    int8 alone. Raises CacheError if they do not fit the spec.
    """
    objects: dict[str, Buffer] = {}
    described = {
        "version": SCHEMA_VERSION,
        "facts": facts,
        "spec": asdict(plan.spec),
        "plan_digest": plan.digest,
        "num_samples": plan.num_samples,
        "num_shards": plan.num_shards,
    }
    group = zarr.create_group(MemoryStore(objects), attributes={GROUP_KEY: described}, zarr_format=3)
    paths = [GROUP_OBJECT]
    for layout in array_layouts(plan.spec):
        _create(group, layout, plan.spec, plan.num_shards * plan.spec.shard_tokens, scales or {})
        paths.append(metadata_object(layout))
    for name, values in _column_arrays(plan).items():
        array = group.create_array(
            name,
            shape=values.shape,
            chunks=values.shape,
            dtype=values.dtype,
            filters=None,
            compressors=[ZstdCodec(level=3), Crc32cCodec()],
            chunk_key_encoding={"name": "default", "separator": "."},
            dimension_names=("byte" if name == "sample_id" else "sample",),
            config={"write_empty_chunks": True},
        )
        array[:] = values
        paths += [f"{name}/zarr.json", f"{name}/c.0"]
    return {path: _compact(path, objects[path].to_bytes()) for path in paths}


def read_metadata(get: Callable[[str], bytes], *, where: str) -> Metadata:
    """The metadata of the cache whose small objects `get` fetches by their path below the prefix.

    Raises CacheError, naming `where`, if they are of another version or do not agree, and whatever `get` raises.
    """
    try:
        described = json.loads(get(GROUP_OBJECT))["attributes"][GROUP_KEY]
        version = described["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise CacheError(f"not the metadata of a target cache: {error!r}", where=where) from None
    if version != SCHEMA_VERSION:
        raise CacheError("target cache of another version", got=version, expected=SCHEMA_VERSION, where=where)
    try:
        spec = CacheSpec(**{item.name: described["spec"][item.name] for item in fields(CacheSpec)})
        columns = {name.removeprefix("sample_"): _column(get, name) for name in COLUMN_ARRAYS}
        plan = CachePlan.from_columns(spec, {**columns, "sample_id": columns["id"]})
        scales = _read_scales(get, spec)
        facts, digest = described["facts"], described["plan_digest"]
    except (ValueError, KeyError, TypeError) as error:
        raise CacheError(f"the metadata of the target cache cannot be read: {error!r}", where=where) from None
    if plan.digest != digest:
        raise CacheError("the samples of the cache are not those of its plan", got=plan.digest, expected=digest,
                         where=where)  # fmt: skip
    return Metadata(plan, facts, scales)


def _column_arrays(plan: CachePlan) -> dict[str, NDArray[Any]]:
    columns = plan.columns()
    return {name: columns[name if name == "sample_id" else name.removeprefix("sample_")] for name in COLUMN_ARRAYS}


def _column(get: Callable[[str], bytes], name: str) -> NDArray[Any]:
    objects: dict[str, Buffer] = {
        f"{name}/{part}": cpu.Buffer.from_bytes(get(f"{name}/{part}")) for part in ("zarr.json", "c.0")
    }
    return np.asarray(zarr.open_array(MemoryStore(objects), path=name, mode="r")[:])


def _read_scales(get: Callable[[str], bytes], spec: CacheSpec) -> dict[str, NDArray[np.float32]]:
    found = {}
    for layout in array_layouts(spec):
        if spec.codec == "int8" and layout.dtype == "uint16":
            codecs = json.loads(get(metadata_object(layout)))["codecs"][0]["configuration"]["codecs"]
            (own,) = (codec for codec in codecs if codec["name"] == "draftsmith.int8_rows")
            found[layout.name] = Int8Rows.from_dict(own).channel_scales().rms
    return found


def _create(group: zarr.Group, layout: ArrayLayout, spec: CacheSpec, num_rows: int, scales: Scales) -> None:
    attributes: dict[str, JSON] = {"stored_as": "uint16", "holds": "bfloat16"} if layout.dtype == "uint16" else {}
    group.create_array(
        layout.name,
        shape=(num_rows, *layout.row_shape),
        shards=(spec.shard_tokens, *layout.row_shape),
        chunks=(spec.chunk_tokens, *layout.row_shape),
        dtype=layout.dtype,
        fill_value=layout.fill_value,
        filters=None,
        compressors=[*array_codecs(layout, spec=spec, scales=scales), Crc32cCodec()],
        chunk_key_encoding={"name": "default", "separator": "."},
        dimension_names=("token" if layout.rows == "tokens" else "label", *_AXES[layout.name]),
        attributes=attributes,
        config={"write_empty_chunks": False},
    )


def array_codecs(layout: ArrayLayout, *, spec: CacheSpec, scales: Scales) -> list[BytesBytesCodec]:
    """The codec of an array's inner chunks, as Zarr knows it. Raises CacheError if scales are missing."""
    if layout.dtype != "uint16" or spec.codec == "plain":
        return []
    if spec.codec == "bf16":
        return [Bf16Planes(channels=int(np.prod(layout.row_shape)))]
    if layout.name not in scales:
        raise CacheError(f"codec int8 has no scales for {layout.name}", expected="channel RMS by array")
    return [Int8Rows.of(scales[layout.name], group=layout.row_shape[-1])]


def _compact(path: str, data: bytes) -> bytes:
    """JSON in one canonical form, whatever indent Zarr is set to; chunks as they are."""
    if not path.endswith("zarr.json"):
        return data
    return json.dumps(json.loads(data), sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
