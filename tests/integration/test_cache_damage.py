"""A damaged cache in a working copy: `dvc repro` stops in the verify stage, names every object, and trains nothing."""

from __future__ import annotations

import re

import pytest

from tests.line_fixtures import DSPARK, TARGET, Line, line, prepared_line, tiny_target

__all__ = ["line", "prepared_line", "tiny_target"]


def flip(line: Line, path: str, *, offset: int) -> None:
    place = line.store / path
    data = bytearray(place.read_bytes())
    data[offset] ^= 4
    place.write_bytes(bytes(data))


def test_all_kinds_of_damage_at_once(line: Line) -> None:
    """By one `dvc repro` of training: verification comes before it, whatever else is up to date."""
    prefix = line.manifest("cache").prefix
    shards = sorted(item.path for item in line.manifest("cache").objects if item.path.startswith("context/c."))
    assert len(shards) > 3
    flip(line, f"{prefix}/{shards[0]}", offset=200)
    flip(line, f"{prefix}/sample_offset/c.0", offset=-1)
    first, second = (line.store / prefix / path for path in shards[1:3])
    swapped = first.read_bytes(), second.read_bytes()
    first.write_bytes(swapped[1])
    second.write_bytes(swapped[0])
    (line.store / prefix / shards[3]).unlink()
    cut = line.store / prefix / "input_ids" / "c.0"
    size = len(cut.read_bytes())
    cut.write_bytes(cut.read_bytes()[:-7])
    (line.store / prefix / "context" / "c.9999.0.0").write_bytes(b"")
    failed = line.tried_dvc("repro", f"train@{DSPARK}")
    assert failed.returncode != 0
    assert re.findall(r"^Running stage '([^']+)'", failed.stdout, flags=re.MULTILINE) == [f"verify@{TARGET}"]
    assert "7 problems in store" in failed.stderr
    for told in (
        f"sha256: {prefix}/{shards[0]} (got ",
        f"sha256: {prefix}/sample_offset/c.0 (got ",
        f"swapped: {prefix}/{shards[1]} (has changed places with {shards[2]})",
        f"swapped: {prefix}/{shards[2]} (has changed places with {shards[1]})",
        f"missing: {prefix}/{shards[3]} (",
        f"size: {prefix}/input_ids/c.0 (truncated: got {size - 7} bytes, expected {size})",
        f"extra: {prefix}/context/c.9999.0.0 (0 bytes that the manifest does not name)",
    ):
        assert told in failed.stderr
    assert "Traceback" not in failed.stderr
    assert not line.workspace.drafter_dir(DSPARK).exists()


@pytest.mark.parametrize("options", [(), ("--deep",), ("--sample-bytes", "100000")])
def test_what_verify_says_of_a_whole_cache(line: Line, options: tuple[str, ...]) -> None:
    manifest = line.manifest("cache")
    text = line.run("cache", "verify", "--target", TARGET, *options).stdout
    num_bytes = sum(item.size for item in manifest.objects)
    assert f"{manifest.prefix}: {len(manifest.objects)} objects, {num_bytes} bytes; all sizes compared, " in text
    assert "all as the manifest says" in text
    read = re.search(r"(all|\d+, drawn anew each time,) read and hashed \((\d+) bytes\) in [\d.]+ s", text)
    assert read is not None
    if options[:1] == ("--sample-bytes",):
        assert read[1] != "all"
        assert int(read[2]) <= 100_000 < num_bytes
    else:
        assert read[1] == "all"
        assert int(read[2]) == num_bytes


def test_show_prints_a_sample_of_a_real_cache(line: Line) -> None:
    """Its text is what the target was asked and what it answered."""
    sample_id = line.manifest("cache").facts["validation_ids"][0]
    text = line.run("cache", "show", sample_id, "--target", TARGET).stdout
    assert text.startswith(f"sample {sample_id} (validation) of {line.manifest('cache').prefix} in ")
    shown = "\n".join(part[4:] for part in text.splitlines() if part.startswith("    "))
    assert shown.startswith("<|user|>")
    assert "<|end|><|assistant|>" in shown
    for layer in (0, 2):
        assert f"context, layer {layer}" in text
