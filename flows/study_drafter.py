"""The flow `study-drafter`: the drafters of `study` in params.yaml side by side."""

from __future__ import annotations

import sys

from prefect import flow

from draftsmith.errors import ParamsError
from draftsmith.params import load_params
from draftsmith.paths import Workspace
from flows.stage import run_command


@flow(name="study-drafter")
def study_drafter() -> None:
    """Train and measure every drafter of the study in a working copy of its own, and write reports/study.

    A study that is not there fails at once. One that was stopped goes on where it was.
    """
    workspace = Workspace.find()
    if load_params(workspace.params).study is None:
        raise ParamsError("params.yaml has no study", expected="a section `study`", where="params.yaml: study")
    run_command([sys.executable, "-m", "draftsmith.cli", "study"], workspace.root)
