"""What the whole line will take on this machine, said before it starts."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from draftsmith.params import Params
from draftsmith.paths import Workspace

# Measured on two cores of a 2024 server CPU with the 135 M target in bfloat16; other targets scale by their weights.
REFERENCE_WEIGHTS = 135e6
DECODE_TOKENS_PER_S = 330.0
DRAFT_TOKENS_PER_S = 230.0
PREFILL_TOKENS_PER_S = 1800.0
SECONDS_PER_SLOT = 0.0011
PROMPT_TOKENS = 90
SLOTS_PER_ANCHOR = 6.0


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
    seconds = {"answers": 0.0, "cache": 0.0, "training": 0.0, "calibration": 0.0, "evaluation": 0.0}
    disk, memory = 0.0, 0.0
    for name in params.active_targets:
        row = params.targets[name]
        weights = row.num_layers * 12 * row.hidden_size**2 + row.vocab_size * row.hidden_size
        scale = weights / REFERENCE_WEIGHTS
        tokens = num_answers * (params.answers.max_new_tokens * 0.85 + PROMPT_TOKENS)
        seconds["answers"] += scale * num_answers * params.answers.max_new_tokens * 0.85 / DECODE_TOKENS_PER_S
        seconds["cache"] += scale * tokens / PREFILL_TOKENS_PER_S
        disk += tokens * 2 * row.hidden_size * (len(row.capture_layers) + 1) / 1.45 + 2 * weights
        memory = max(memory, 2 * weights + 4e9 * min(1.0, scale))
    for key, run in params.runs.items():
        recipe, row = params.train_of(key), params.targets[run.target]
        head = row.vocab_size * row.hidden_size / (49152 * 576)
        seconds["training"] += (
            recipe.steps * recipe.global_batch * recipe.anchors * SLOTS_PER_ANCHOR * SECONDS_PER_SLOT * head
        )
        if params.drafters[run.drafter].confidence:
            made = params.prompts.num_calibration * params.calibrate.max_new_tokens * 0.85
            seconds["calibration"] += made / DRAFT_TOKENS_PER_S
        made = sum(item.cap for item in params.evaluate.benchmarks) * params.evaluate.max_new_tokens
        made *= len(params.evaluate.temperatures)
        seconds["evaluation"] += made / DRAFT_TOKENS_PER_S + made / DECODE_TOKENS_PER_S
        disk += 0.7e9 * head
    return Forecast(seconds, disk, memory, shutil.disk_usage(workspace.root).free)
