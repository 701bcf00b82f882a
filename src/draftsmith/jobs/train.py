"""Stage `train@KEY`: target cache -> trained drafter, its contract and its report. One process or several ranks."""

from __future__ import annotations

import shutil
import time
import uuid

from draftsmith.drafters.registry import CONFIG_NAME
from draftsmith.drafters.weights import WEIGHTS_NAME
from draftsmith.errors import TrainingError
from draftsmith.jobs import train_rank
from draftsmith.params import Params
from draftsmith.paths import Workspace
from draftsmith.training.launch import launch_ranks, num_local_ranks, remove_shared_memory


def run(workspace: Workspace, params: Params, key: str) -> None:
    """Train the drafter of `key`, resuming from its newest checkpoint; done when its folder is written."""
    params.run(key)
    remove_shared_memory(own=False)
    started = time.time()
    num_ranks, start_id = num_local_ranks(), uuid.uuid4().hex
    if num_ranks == 1:
        scratch = workspace.scratch_dir("train", key)
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        rendezvous = scratch / "rendezvous"
        train_rank.run_rank(
            workspace, params, key, rank=0, num_ranks=1, init_method=f"file://{rendezvous}", start_id=start_id
        )
    else:
        arguments = ["--key", key, "--start-id", start_id]
        launch_ranks("draftsmith.jobs.train_rank", arguments=arguments, num_ranks=num_ranks, cwd=workspace.root)
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        path = workspace.drafter_dir(key) / name
        if not path.is_file() or path.stat().st_mtime < started - 1:
            raise TrainingError("training ended without its drafter", got=f"no new {path}")
