"""The training loop; everything that only watches it is a hook."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from draftsmith.drafters.base import Drafter
from draftsmith.nn.block import BlockBatch
from draftsmith.params import Train
from draftsmith.training.engine import StepResult, TrainEngine
from draftsmith.training.loader import StepLoader
from draftsmith.training.schedule import learning_rate
from draftsmith.training.validation import Validation, validate


@dataclass(frozen=True)
class StepReport:
    """One finished update: `step` counts updates done; times in seconds."""

    step: int
    lr: float
    result: StepResult
    step_s: float
    data_wait_s: float


@dataclass(frozen=True)
class Hooks:
    """What watches the loop: after every update, after every validation, and when a checkpoint is due."""

    on_step: Callable[[StepReport], None]
    on_validation: Callable[[int, Validation], None]
    on_checkpoint: Callable[[int], None]


def train(
    drafter: Drafter,
    *,
    engine: TrainEngine,
    loader: StepLoader,
    held_out: Sequence[BlockBatch],
    recipe: Train,
    first_step: int,
    hooks: Hooks,
) -> Validation:
    """Run updates first_step..steps-1, validating and checkpointing on the way; returns the last validation."""
    drafter.train()
    last = time.perf_counter()
    validation = None
    for step, batches in loader.steps(first_step, stop=recipe.steps):
        ready = time.perf_counter()
        lr = learning_rate(step, steps=recipe.steps, peak=recipe.lr, warmup_share=recipe.warmup_share)
        result = engine.update(batches, lr=lr, where=f"step {step + 1}")
        now = time.perf_counter()
        hooks.on_step(StepReport(step + 1, lr, result, step_s=now - last, data_wait_s=ready - last))
        done = step + 1
        if done % recipe.validate_every == 0 or done == recipe.steps:
            validation = validate(drafter, batches=held_out, engine=engine)
            hooks.on_validation(done, validation)
        if done % recipe.checkpoint_every == 0 or done == recipe.steps:
            hooks.on_checkpoint(done)
        last = time.perf_counter()
    return validation or validate(drafter, batches=held_out, engine=engine)
