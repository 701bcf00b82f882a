"""The rows of params.yaml about serving: what `profile` measures on a machine, and what `serve` studies with it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from draftsmith.params_models import Row

Count = Annotated[int, Field(gt=0)]


class Profile(Row):
    """Steps of the real engine, timed on this machine: three sweeps, over batch tokens, requests and context."""

    num_requests: tuple[Count, ...] = Field((1, 2, 4, 8, 16), min_length=1)
    context_tokens: tuple[Count, ...] = Field((128, 512), min_length=1)
    repeats: int = Field(5, gt=0)
    warmup: int = Field(2, ge=0)
    seed: int = 0


class Serve(Row):
    """Verification policies under load, simulated on the profiled machine with recorded rounds.

    `temperature` is that of the evaluation whose rounds are replayed.
    """

    temperature: float = Field(1.0, ge=0)
    seed: int = 0
