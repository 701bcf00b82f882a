"""`draftsmith cache show ID --target T`: one sample of a target cache for people, read by byte ranges."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from draftsmith.cache.fidelity import bf16_values
from draftsmith.cache.reader import CacheReader, FoundSample
from draftsmith.errors import CacheError
from draftsmith.jobs.stores import cache_manifest, workspace_store
from draftsmith.params import Params
from draftsmith.params import Target as TargetRow
from draftsmith.paths import Workspace

TOKENIZER = "tokenizer.json"
# Without a tokenizer the ids themselves are shown, so many of a run's first ones.
SHOWN_IDS = 24


def run(workspace: Workspace, params: Params, name: str, sample_id: str) -> str:
    """Text by runs of the mask, shapes, norms by layer, and where the bytes lie.

    Raises CacheError for an unknown id (naming near ones), and if the cache is planned only.
    """
    row, manifest = params.target(name), cache_manifest(workspace, name)
    if manifest.is_stream:
        raise CacheError(
            f"the cache {manifest.prefix} is planned only", got="no stored samples", expected="a cache that was built"
        )
    reader = CacheReader(workspace_store(workspace), manifest)
    found = reader.read_one(sample_id)
    tokenizer = _tokenizer(workspace, row, name)
    split = "validation" if sample_id in reader.facts.get("validation_ids", ()) else "training"
    layers = [f"layer {layer}" for layer in reader.facts["capture_layers"]]
    return "\n".join(
        [
            f"sample {sample_id} ({split}) of {manifest.prefix} in {reader.uri}",
            f"{found.planned.num_tokens} tokens, {int(found.sample.supervised.sum())} supervised, "
            f"{found.planned.num_labels} labels",
            *_text(found, tokenizer),
            "",
            *_table(["array", "shape", "median norm", "first row", "largest", "at row"], _norms(found, layers)),
            "",
            *_table(["object", "rows", "bytes read", "of"], _places(found)),
        ]
    )


def _tokenizer(workspace: Workspace, row: TargetRow, name: str) -> Tokenizer | None:
    """The target's tokenizer if it is on this machine; nothing is fetched or converted for it."""
    path: Path | None
    if row.package is not None:
        path = workspace.target_dir(name) / TOKENIZER
    elif row.folder is not None:
        path = Path(row.folder).expanduser() / TOKENIZER
    else:
        path = _in_hub_cache(row)
    return Tokenizer.from_file(str(path)) if path is not None and path.is_file() else None


def _in_hub_cache(row: TargetRow) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    assert row.hf_id is not None
    found = try_to_load_from_cache(row.hf_id, TOKENIZER, revision=row.revision)
    return Path(found) if isinstance(found, str | os.PathLike) else None


def _text(found: FoundSample, tokenizer: Tokenizer | None) -> Iterator[str]:
    """Each run of equal mask values with its text, or its first ids if there is no tokenizer."""
    ids = found.sample.input_ids
    for start, end, supervised in mask_runs(found.sample.supervised):
        yield ""
        yield f"{start}..{end - 1} {'supervised' if supervised else 'not supervised'} ({end - start} tokens)"
        run_ids = ids[start:end].tolist()
        if tokenizer is None:
            more = " ..." if len(run_ids) > SHOWN_IDS else ""
            yield f"    ids {' '.join(map(str, run_ids[:SHOWN_IDS]))}{more} (the target's tokenizer is not here)"
        else:
            yield from (f"    {line}" for line in tokenizer.decode(run_ids, skip_special_tokens=False).split("\n"))


def mask_runs(mask: NDArray[np.uint8]) -> list[tuple[int, int, bool]]:
    """Runs of equal values of a mask [T], as (start, end, value); end is past the run."""
    edges = [0, *(np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist(), len(mask)]
    return [(start, end, bool(mask[start])) for start, end in itertools.pairwise(edges)]


def _norms(found: FoundSample, layers: list[str]) -> Iterator[list[str]]:
    """Euclidean norms of the states over D: one line a captured layer, and one for the last hidden states."""
    sample = found.sample
    yield ["input_ids", _shape(sample.input_ids), *[""] * 4]
    yield ["supervised", _shape(sample.supervised), *[""] * 4]
    for number, layer in enumerate(layers):
        yield [f"context, {layer}", _shape(sample.context[:, number]), *_measured(sample.context[:, number])]
    yield ["last_hidden", _shape(sample.last_hidden), *_measured(sample.last_hidden)]


def _shape(values: NDArray[np.generic]) -> str:
    kind = "bf16" if values.dtype == np.uint16 else str(values.dtype)
    return f"{kind} [{', '.join(map(str, values.shape))}]"


def _measured(bits: NDArray[np.uint16]) -> list[str]:
    if not len(bits):
        return [""] * 4
    norms = np.linalg.norm(bf16_values(bits).astype(np.float64), axis=1)
    return [f"{np.median(norms):.4g}", f"{norms[0]:.4g}", f"{norms.max():.4g}", str(int(norms.argmax()))]


def _places(found: FoundSample) -> Iterator[list[str]]:
    for item in found.objects:
        rows = f"{item.first_row}..{item.first_row + item.num_rows - 1}"
        yield [item.path, rows, str(item.num_bytes), str(item.size)]
    total = [sum(item.num_bytes for item in found.objects), sum(item.size for item in found.objects)]
    yield [f"shard {found.planned.shard}", "", str(total[0]), str(total[1])]


def _table(head: list[str], lines: Iterator[list[str]]) -> Iterator[str]:
    """Columns under their heads: the first one to the left, the others to the right."""
    rows = [head, *lines]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        yield "  ".join(cells).rstrip()
