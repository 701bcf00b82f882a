"""`cache show`: every figure in it by hand, from a toy cache whose two samples are known."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml

from draftsmith.cache.arrays import SampleArrays
from draftsmith.cache.claims import Owner
from draftsmith.cache.plan import PlannedSample, SampleLength, plan_cache
from draftsmith.cache.writer import CacheWriter
from draftsmith.errors import CacheError
from draftsmith.jobs import show
from draftsmith.manifest import Manifest
from draftsmith.params import Params, load_params
from draftsmith.paths import Workspace
from draftsmith.storage import open_store
from tests.line_fixtures import PARAMS, TARGET
from tests.line_target import tiny_tokenizer
from tests.unit.cache.toy import bf16_bits, toy_spec

PREFIX = f"cache/{TARGET}-0123abcd"
MASK = [0, 0, 0, 1, 1, 1, 0, 1, 1]
SAMPLES = ("first/t0", "second/t0")
TEXT = "Name three rivers.\nThe Nile."


def token_ids(text: str) -> list[int]:
    return list(tiny_tokenizer().encode(text).ids)


def compute(batches: Iterable[tuple[PlannedSample, ...]]) -> Iterator[list[SampleArrays]]:
    """Context of token t: (3, 4, 0, ...) * 2^t in the first layer, twice that in the second; last hidden: 3, 2, 1."""
    for batch in batches:
        arrays = []
        for sample in batch:
            ids = np.array((token_ids(TEXT) * 2)[: sample.num_tokens], dtype=np.int32)
            context = np.zeros((sample.num_tokens, 2, 6), dtype=np.float32)
            powers = 2.0 ** np.arange(sample.num_tokens)
            context[:, 0, 0], context[:, 0, 1] = 3 * powers, 4 * powers
            context[:, 1] = 2 * context[:, 0]
            hidden = np.zeros((sample.num_labels, 6), dtype=np.float32)
            hidden[:, 2] = 1 + np.arange(sample.num_labels)[::-1]
            mask = np.array(MASK, dtype=np.uint8)
            arrays.append(SampleArrays(ids, mask, bf16_bits(context), bf16_bits(hidden)))
        yield arrays


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """A working copy with the cache of two samples of nine tokens, and a target of which only the tokenizer is here."""
    monkeypatch.delenv("DRAFTSMITH_STORE", raising=False)
    body = {**PARAMS, "targets": {TARGET: {**PARAMS["targets"][TARGET], "folder": str(tmp_path / "target")}}}
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(body))
    (tmp_path / "target").mkdir()
    tiny_tokenizer().save(str(tmp_path / "target" / "tokenizer.json"))
    found = Workspace(tmp_path)
    plan = plan_cache([SampleLength(name, len(MASK), 3) for name in SAMPLES], spec=toy_spec(codec="plain"))
    facts = {"target": TARGET, "capture_layers": [1, 3], "validation_ids": ["second/t0"]}
    writer = CacheWriter(
        open_store(found.store_uri), prefix=PREFIX, plan=plan, facts=facts,
        owner=Owner.this_process(processor="toy"), lease_s=60.0,
    )  # fmt: skip
    writer.write_shards(plan.shards, compute)
    writer.finish().write(found.cache_manifest(TARGET))
    return found


@pytest.fixture
def params(workspace: Workspace) -> Params:
    return load_params(workspace.params)


def test_what_is_shown(workspace: Workspace, params: Params) -> None:
    text = show.run(workspace, params, TARGET, "first/t0")
    lines = [re.sub(r" {2,}", "  ", line) for line in text.splitlines()]
    assert lines[0] == f"sample first/t0 (training) of {PREFIX} in {workspace.store_uri}"
    assert lines[1] == "9 tokens, 5 supervised, 3 labels"
    # Runs of the mask, with the tokens' own text.
    ids = token_ids(TEXT)
    for start, end, name in (
        (0, 3, "not supervised"),
        (3, 6, "supervised"),
        (6, 7, "not supervised"),
        (7, 9, "supervised"),
    ):
        assert f"{start}..{end - 1} {name} ({end - start} tokens)" in lines
    shown = "\n".join(line[4:] for line in text.splitlines() if line.startswith("    "))
    assert shown.replace("\n", "") == tiny_tokenizer().decode(ids[:9]).replace("\n", "")
    # Norms: 5 * 2^t in layer 1, so the median of nine is 5 * 2^4 and the largest 5 * 2^8, at token 8; twice in layer 3.
    assert "input_ids  int32 [9]" in lines
    assert "context, layer 1  bf16 [9, 6]  80  5  1280  8" in lines
    assert "context, layer 3  bf16 [9, 6]  160  10  2560  8" in lines
    assert "last_hidden  bf16 [3, 6]  2  3  3  0" in lines
    # One chunk of 16 rows with its crc, and the index of eight chunks with its own, of objects of two chunks.
    first = [item.id for item in sorted(plan_rows(workspace), key=lambda item: item.offset)].index("first/t0") * 9
    index = 8 * 16 + 4
    for array, row_bytes, start, num_rows in (
        ("input_ids", 4, first, 9), ("supervised", 1, first, 9), ("context", 24, first, 9),
        ("last_hidden", 12, first // 3, 3),
    ):  # fmt: skip
        chunks = (start + num_rows - 1) // 16 - start // 16 + 1
        held = 2 if array != "last_hidden" else 1
        path = {"context": "context/c.0.0.0", "last_hidden": "last_hidden/c.0.0"}.get(array, f"{array}/c.0")
        read, whole = (index + n * (16 * row_bytes + 4) for n in (chunks, held))
        assert f"{path}  {start}..{start + num_rows - 1}  {read}  {whole}" in lines
    assert lines[-1].startswith("shard 0  ")


def plan_rows(workspace: Workspace) -> list[PlannedSample]:
    from draftsmith.cache.reader import CacheReader

    manifest = Manifest.read(workspace.cache_manifest(TARGET), "cache")
    return list(CacheReader(open_store(workspace.store_uri), manifest).samples)


def test_a_validation_sample_says_so(workspace: Workspace, params: Params) -> None:
    assert show.run(workspace, params, TARGET, "second/t0").startswith("sample second/t0 (validation) of ")


def test_without_the_targets_tokenizer_ids_are_shown(workspace: Workspace, params: Params) -> None:
    (workspace.root / "target" / "tokenizer.json").unlink()
    text = show.run(workspace, params, TARGET, "first/t0")
    ids = token_ids(TEXT)
    assert f"    ids {ids[3]} {ids[4]} {ids[5]} (the target's tokenizer is not here)" in text.splitlines()


def test_an_unknown_id_names_near_ones(workspace: Workspace, params: Params) -> None:
    with pytest.raises(CacheError, match=r"no sample 'frist/t0'.*first/t0"):
        show.run(workspace, params, TARGET, "frist/t0")


def test_a_planned_cache_has_no_samples(workspace: Workspace, params: Params) -> None:
    Manifest("cache", PREFIX, (), {"mode": "stream"}).write(workspace.cache_manifest(TARGET))
    with pytest.raises(CacheError, match=f"{PREFIX} is planned only"):
        show.run(workspace, params, TARGET, "first/t0")


def test_runs_of_a_mask() -> None:
    runs = {
        "1": [(0, 1, True)],
        "001": [(0, 2, False), (2, 3, True)],
        "1101": [(0, 2, True), (2, 3, False), (3, 4, True)],
    }
    for mask, expected in runs.items():
        assert show.mask_runs(np.array([int(letter) for letter in mask], dtype=np.uint8)) == expected


def test_no_torch_is_loaded() -> None:
    heavy = "any(name in sys.modules for name in ('torch', 'transformers'))"
    code = f"import sys; from draftsmith.jobs import show; sys.exit({heavy})"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
