"""Where the time of decoding goes: one record a step."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class StepTime:
    """One draft-verify step: R requests, N tokens of the verification pass, tokens committed, and seconds of its parts.

    `sample_s` is all that is outside the forward passes of drafter and target: acceptance, sampling of what follows,
    upkeep of the rows, bookkeeping. Sampling of draft tokens happens inside the drafter's loop and is in `draft_s`.
    """

    num_requests: int
    num_tokens: int
    num_committed: int
    draft_s: float
    verify_s: float
    sample_s: float

    @property
    def total_s(self) -> float:
        return self.draft_s + self.verify_s + self.sample_s


@dataclass
class EngineTimes:
    """Seconds of prefill and of each step, and what came of them. `total_s` is wall time from first to last."""

    prefill_s: float = 0.0
    total_s: float = 0.0
    num_tokens: int = 0
    steps: list[StepTime] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        return len(self.steps)

    @property
    def draft_s(self) -> float:
        return sum(step.draft_s for step in self.steps)

    @property
    def verify_s(self) -> float:
        return sum(step.verify_s for step in self.steps)

    @property
    def sample_s(self) -> float:
        return sum(step.sample_s for step in self.steps)


class Laps:
    """Seconds by part of a step; on a GPU each lap waits for it, so that parts are charged with their own work."""

    def __init__(self, device: torch.device) -> None:
        self._waits = device.type == "cuda"
        self.seconds = {"draft": 0.0, "verify": 0.0, "sample": 0.0}
        self._since = time.perf_counter()

    def lap(self, part: str) -> None:
        if self._waits:
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[part] += now - self._since
        self._since = now
