"""Answers that are killed and begun again: the same objects, the same ids, nothing answered twice."""

from __future__ import annotations

import io
import shutil

import pyarrow.parquet as pq

from tests.line_fixtures import TARGET, Line, files_below, kill_when, line, prepared_line, tiny_target

__all__ = ["line", "prepared_line", "tiny_target"]


def test_killed_answers_go_on_where_they_were(line: Line) -> None:
    whole = line.manifest("answers")
    folder = line.store / whole.prefix
    wanted = {record.path: (folder / record.path).read_bytes() for record in whole.objects}
    assert len(wanted) > 8
    shutil.rmtree(folder)
    line.workspace.answers_manifest(TARGET).unlink()

    kill_when(line.start("answers", "--target", TARGET), lambda: any(folder.glob("batch-*.parquet")))
    left = files_below(folder, "batch-*.parquet")
    assert 0 < len(left) < len(wanted)
    assert not line.workspace.answers_manifest(TARGET).exists(), "a killed job must leave nothing that counts as done"

    line.run("answers", "--target", TARGET)
    assert line.manifest("answers") == whole
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == wanted
    after = files_below(folder, "batch-*.parquet")
    assert {name: after[name] for name in left} == left, "finished batches must not be written again"

    # The ids asked for, straight from the prompts' tables: one a turn of every training and validation prompt.
    prompts = line.manifest("prompts")
    asked = [
        f"{row['id']}/t{turn}"
        for split in ("train", "validation")
        for row in pq.ParquetFile(line.store / prompts.prefix / f"{split}.parquet").read(use_threads=False).to_pylist()
        for turn in range(len(row["turns"]))
    ]
    answered = [
        identity
        for data in wanted.values()
        for identity in pq.ParquetFile(io.BytesIO(data)).read(use_threads=False).column("id").to_pylist()
    ]
    assert sorted(answered) == sorted(asked)

    # The session's first run, the killed one, which the next one closes, and the one that ended well.
    assert [status for _, _, status in line.tracked_runs("answers")] == ["FINISHED", "KILLED", "FINISHED"]
