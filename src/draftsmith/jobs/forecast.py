"""What the whole line will take on this machine, said before it starts."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from draftsmith.cache.stream_plan import storage_limit
from draftsmith.params import Params
from draftsmith.paths import Workspace

# Measured on two cores of a server CPU with the 135 M target in bfloat16; other targets scale by their weights.
REFERENCE_WEIGHTS = 135e6
ANSWER_TOKENS_PER_S = 280.0  # batches of 96
PLAIN_TOKENS_PER_S = 130.0  # batches of up to 16
DRAFT_TOKENS_PER_S = 65.0
CACHE_TOKENS_PER_S = 1000.0
SECONDS_PER_SLOT = {"dspark": 0.0019, "dflash": 0.0012, "eagle3": 0.0025, "mtp1": 0.0025}
UNKNOWN_SECONDS_PER_SLOT = max(SECONDS_PER_SLOT.values())
STAGE_START_S = 12.0
PROMPT_TOKENS = 70
SLOTS_PER_ANCHOR = 6.7  # of a block of 7
CHECKPOINT_BYTES = 0.6e9  # of a drafter with a sequential head
MEMORY_BYTES = 5e9  # of a training
NUM_TURNS = {"mt_bench": 2}


@dataclass(frozen=True)
class Forecast:
    """Seconds by stage, bytes on disk, bytes of memory."""

    seconds: dict[str, float]
    disk_bytes: float
    memory_bytes: float
    free_bytes: int

    @property
    def text(self) -> str:
        stages = ", ".join(f"{stage} {max(1, round(value / 60))}" for stage, value in self.seconds.items())
        total = sum(self.seconds.values()) / 60
        lines = [
            f"Building everything takes about {total:.0f} minutes on two idle cores ({stages} minutes; "
            "what is up to date is not built again),",
            f"about {self.disk_bytes / 1e9:.1f} GB of disk ({self.free_bytes / 1e9:.0f} GB free) and "
            f"{self.memory_bytes / 1e9:.0f} GB of memory. It can be stopped at any time and goes on where it was.",
        ]
        return "\n".join(lines)


def forecast(workspace: Workspace, params: Params) -> Forecast:
    """Sums from params.yaml and the rates above."""
    num_answers = params.prompts.num_train + params.prompts.num_validation
    limit = storage_limit()
    streamed: dict[str, float] = {}  # seconds of one pass over a cache that is too large to be there as a whole
    seconds = {"answers": 0.0, "cache": 0.0, "training": 0.0, "calibration": 0.0, "evaluation": 0.0}
    disk, memory = 0.0, 0.0
    for name in params.active_targets:
        row = params.targets[name]
        weights = row.num_layers * 12 * row.hidden_size**2 + row.vocab_size * row.hidden_size
        scale = weights / REFERENCE_WEIGHTS
        written = num_answers * params.answers.max_new_tokens * 0.87
        tokens = written + num_answers * PROMPT_TOKENS
        seconds["answers"] += STAGE_START_S + scale * written / ANSWER_TOKENS_PER_S
        cache_bytes = tokens * 2 * row.hidden_size * (len(row.capture_layers) + 1) / 1.45
        if limit is not None and cache_bytes > limit:
            cache_bytes, streamed[name] = limit, scale * tokens / CACHE_TOKENS_PER_S
        else:
            seconds["cache"] += STAGE_START_S + scale * tokens / CACHE_TOKENS_PER_S
        disk += cache_bytes + 2 * weights
        memory = max(memory, 2 * weights + MEMORY_BYTES * min(1.0, scale))
    for key, run in params.runs.items():
        recipe, row, drafter = params.train_of(key), params.targets[run.target], params.drafters[run.drafter]
        head = row.vocab_size * row.hidden_size / (49152 * 576)
        slots = recipe.steps * recipe.global_batch * recipe.anchors * SLOTS_PER_ANCHOR * drafter.block_size / 7
        seconds["training"] += (
            STAGE_START_S + slots * SECONDS_PER_SLOT.get(drafter.kind, UNKNOWN_SECONDS_PER_SLOT) * head
        )
        # Each epoch makes the shards that it reads; the pass before the first makes all of them.
        passes = 1 + recipe.steps * recipe.global_batch / params.prompts.num_train
        seconds["training"] += passes * streamed.get(run.target, 0.0)
        if drafter.confidence:
            made = params.prompts.num_calibration * params.calibrate.max_new_tokens * 0.9
            seconds["calibration"] += STAGE_START_S + made / DRAFT_TOKENS_PER_S
        turns = sum(item.cap * NUM_TURNS.get(item.name, 1) for item in params.evaluate.benchmarks)
        made = turns * params.evaluate.max_new_tokens * len(params.evaluate.temperatures) * 0.9
        seconds["evaluation"] += STAGE_START_S + made / DRAFT_TOKENS_PER_S + made / PLAIN_TOKENS_PER_S
        disk += CHECKPOINT_BYTES * head
    return Forecast(seconds, disk, memory, shutil.disk_usage(workspace.root).free)
