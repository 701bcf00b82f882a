"""An evaluation that is killed, and several of one at once: the same figures, nothing decoded twice."""

from __future__ import annotations

import os
import subprocess
from typing import Any

from draftsmith.jobs import evaluate as job
from tests.evaluate_job import DSPARK, NUM_CELLS, Evaluation, counts, evaluation, evaluation_source
from tests.line_fixtures import PROGRAMS, REPOSITORY, kill_when, must_end

__all__ = ["evaluation", "evaluation_source"]


def start(evaluation: Evaluation, *part: str) -> subprocess.Popen[str]:
    """The evaluation, or a slice of it, in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY / "src")}
    options = ["--key", DSPARK, *(["--slice", *part] if part else [])]
    return subprocess.Popen(
        [str(PROGRAMS / "draftsmith"), "evaluate", *options], cwd=evaluation.root, env=environment,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def whole(evaluation: Evaluation) -> dict[str, Any]:
    """The report of an evaluation that nothing interrupted, in this process; then nothing is left of it."""
    job.run(evaluation.workspace, evaluation.params(), DSPARK)
    body = evaluation.report()
    for name in evaluation.cells():
        (evaluation.store / "evaluate" / name).unlink()
    (evaluation.workspace.report_dir(DSPARK) / "evaluate.json").unlink()
    return body


def test_a_killed_evaluation_goes_on_where_it_was(evaluation: Evaluation) -> None:
    wanted = whole(evaluation)
    kill_when(start(evaluation), lambda: len(evaluation.cells()) >= 3)
    left = evaluation.cells()
    assert 3 <= len(left) < 2 * NUM_CELLS
    assert not (evaluation.workspace.report_dir(DSPARK) / "evaluate.json").exists()

    must_end(start(evaluation))
    after = evaluation.cells()
    assert len(after) == 2 * NUM_CELLS
    assert {name: after[name] for name in left} == left, "finished cells must not be decoded again"
    found = evaluation.report()
    assert counts(found) == counts(wanted)
    # All at one batch size on one machine, before and after the kill: the rates are there.
    assert all(row["speedup"] > 0 for row in found["rows"])


def test_slices_and_rivals_at_once(evaluation: Evaluation) -> None:
    """Two slices in two processes, a third process that does all of it at the same time."""
    wanted = whole(evaluation)
    running = [start(evaluation, "0/2"), start(evaluation, "1/2"), start(evaluation)]
    try:
        for process in running:
            must_end(process)
    finally:
        for process in running:
            process.kill()
            process.communicate()
    assert len(evaluation.cells()) == 2 * NUM_CELLS
    assert counts(evaluation.report()) == counts(wanted)
