"""A cache build that is killed, then finished by two slices at once: the same bytes as an uninterrupted one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from draftsmith.storage import records_prefix
from tests.line_fixtures import TARGET, Line, files_below, kill_when, line, must_end, prepared_line, tiny_target

__all__ = ["line", "prepared_line", "tiny_target"]


def committed(folder: Path) -> dict[int, list[str]]:
    """Shard number -> the objects that its commit record names."""
    bodies = [json.loads(path.read_text()) for path in (folder / "commits").glob("*.json")]
    return {body["shard"]: [item["path"] for item in body["objects"]] for body in bodies}


def test_killed_cache_is_finished_by_slices(line: Line) -> None:
    whole = line.manifest("cache")
    folder, records = line.store / whole.prefix, line.store / records_prefix(whole.prefix)
    num_shards = whole.facts["totals"]["num_shards"]
    assert num_shards >= 6
    shutil.rmtree(folder)
    shutil.rmtree(records)
    line.workspace.cache_manifest(TARGET).unlink()

    build = ("cache", "build", "--target", TARGET)
    kill_when(line.start(*build), lambda: any((records / "commits").glob("*.json")))
    done = committed(records)
    assert 0 < len(done) < num_shards
    assert not line.workspace.cache_manifest(TARGET).exists()
    finished = {path for paths in done.values() for path in paths}
    before = {path: mtime for path, mtime in files_below(folder, "*").items() if path in finished}
    assert before.keys() == finished

    slices = [line.start(*build, "--slice", f"{index}/2") for index in range(2)]
    for process in slices:
        must_end(process)
    assert committed(records).keys() == set(range(num_shards))
    assert not line.workspace.cache_manifest(TARGET).exists(), "a slice must not say that the cache is whole"

    computed = files_below(folder, "*")
    line.run(*build)
    manifest = line.manifest("cache")
    assert manifest.digest == whole.digest
    assert manifest == whole
    assert files_below(folder, "*") == computed, "the last build only writes the manifest"
    assert {path: computed[path] for path in finished} == before, "finished shards must not be written again"
    assert not list((records / "claims").glob("*")), "claims of dead processes must not stay"
    report = line.run("cache", "verify", "--target", TARGET, "--deep").stdout
    assert f"{len(whole.objects)} objects" in report
