"""The flow `build-cache`: everything from prompts to a verified target cache."""

from __future__ import annotations

from prefect import flow

from draftsmith.errors import ParamsError
from draftsmith.params import load_params
from draftsmith.paths import Workspace
from flows.stage import run_stages, stages_of_target


@flow(name="build-cache")
def build_cache(target: str | None = None) -> None:
    """Build and verify the cache of `target` (default: the first active target of params.yaml).

    A wrong or inactive target fails at once with the targets there are.
    """
    params = load_params(Workspace.find().params)
    chosen = target if target is not None else params.active_targets[0]
    params.target(chosen)
    if chosen not in params.active_targets:
        active = ", ".join(params.active_targets)
        raise ParamsError(f"target {chosen!r} is not active", expected=f"one of {active}", where="params.yaml: runs")
    run_stages(stages_of_target(chosen))
