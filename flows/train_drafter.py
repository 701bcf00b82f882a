"""The flow `train-drafter`: everything from prompts to an evaluated drafter."""

from __future__ import annotations

from prefect import flow

from draftsmith.params import load_params
from draftsmith.paths import Workspace
from flows.stage import run_stages, stages_of_run


@flow(name="train-drafter")
def train_drafter(key: str | None = None) -> None:
    """Build, calibrate and evaluate the drafter `key` (default: the first run of params.yaml).

    A wrong key fails at once with the keys there are.
    """
    params = load_params(Workspace.find().params)
    chosen = key if key is not None else next(iter(params.runs))
    run_stages(stages_of_run(chosen, params.run(chosen).target))
