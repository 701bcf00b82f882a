"""A worker of streaming mode: `python -m draftsmith.jobs.stream --key KEY --worker I/N ...`, started by the trainer.

It computes shards of the target cache for one training run, as far ahead as the trainer's store may hold.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from pathlib import Path
from typing import Literal

from draftsmith.cache.claims import Owner
from draftsmith.cache.plan import CachePlan
from draftsmith.cache.reader import window_order
from draftsmith.cache.stream_keeper import StreamPlace
from draftsmith.cache.stream_plan import Slots, plan_slots
from draftsmith.cache.stream_worker import work
from draftsmith.drafters.start import MOST_ROWS
from draftsmith.errors import DraftsmithError
from draftsmith.jobs.cache import Computer, PlannedCache, lease_s, parse_slice, planned_cache
from draftsmith.jobs.parts import processor
from draftsmith.jobs.stores import workspace_store
from draftsmith.jobs.train_data import Members, find_members
from draftsmith.manifest import hash8
from draftsmith.params import Params, Train, load_params
from draftsmith.paths import Workspace

FirstPass = Literal["none", "held_out", "start"]
PARENT_GONE = 3


def stream_place(key: str, planned: PlannedCache) -> StreamPlace:
    """Where the shards of run `key` lie. What they hold depends on the plan and the facts alone, not on the recipe."""
    return StreamPlace(f"stream/{key}-{hash8({'plan': planned.plan.digest, 'facts': planned.facts})}")


def first_pass_indices(plan: CachePlan, members: Members, *, kind: FirstPass) -> list[int]:
    """The samples that are read before update one: to validate on, and (`start`) to start the sequential head from."""
    if kind == "none":
        return []
    indices, rows = set(members.held_out), 0
    for index in members.train if kind == "start" else []:
        indices.add(index)
        rows += plan.samples[index].num_rows
        if rows >= MOST_ROWS:
            break
    return sorted(indices)


def run_slots(plan: CachePlan, members: Members, *, recipe: Train, first_step: int, first_pass: FirstPass) -> Slots:
    """The sequence of shards of a training run that goes on after update `first_step`."""
    return plan_slots(
        plan,
        first_pass=first_pass_indices(plan, members, kind=first_pass),
        members=members.train,
        order=lambda epoch: window_order(plan, recipe.seed, epoch),
        first=first_step * recipe.global_batch,
        stop=recipe.steps * recipe.global_batch,
    )


def main() -> None:
    """Work until every slot is done or the trainer, which holds the other end of stdin, is gone."""
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    parser = argparse.ArgumentParser()
    for name in ("--key", "--worker", "--run", "--first-step", "--first-pass"):
        parser.add_argument(name, required=True)
    options = parser.parse_args()
    try:
        workspace = Workspace.find(Path.cwd())
        params = load_params(workspace.params)
        _work(workspace, params, options)
    except DraftsmithError as error:
        sys.stderr.write(f"draftsmith: worker {options.worker}: {error}\n")
        sys.stderr.flush()
        os._exit(2)


def _work(workspace: Workspace, params: Params, options: argparse.Namespace) -> None:
    recipe = params.train_of(options.key)
    planned = planned_cache(workspace, params, params.run(options.key).target)
    members = find_members(planned.plan.samples, planned.facts, recipe=recipe)
    part = parse_slice(options.worker)
    assert part is not None
    computer = Computer(workspace, params, planned)
    work(
        workspace_store(workspace), stream_place(options.key, planned), plan=planned.plan, facts=planned.facts,
        slots=run_slots(
            planned.plan, members, recipe=recipe, first_step=int(options.first_step), first_pass=options.first_pass
        ),
        part=part, run=options.run, owner=Owner.this_process(processor=processor()), lease_s=lease_s(),
        compute=computer,
    )  # fmt: skip


def _end_with_parent() -> None:
    """The kernel closes the pipe when the trainer ends, however it ends: a worker alone is of no use to anyone."""
    # Not through sys.stdin: a thread that waits in there makes Python abort when a worker that is done ends by itself.
    while os.read(sys.stdin.fileno(), 1 << 16):
        pass
    os._exit(PARENT_GONE)


if __name__ == "__main__":
    main()
