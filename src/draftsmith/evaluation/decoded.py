"""What an evaluation has decoded, before anything is measured from it."""

from __future__ import annotations

from dataclasses import dataclass

from draftsmith.decoding.rounds import Generation
from draftsmith.params import Domain


@dataclass(frozen=True)
class Decoded:
    """One benchmark at one temperature: each answer by speculative decoding, and by plain decoding of the same requests.

    Both tuples hold the same request ids (`<benchmark>/<row>/t<turn>`), in the order of prompts, then turns. Wall times
    are seconds of the engine at `batch_size`, prefill included.
    """

    benchmark: str
    domain: Domain
    temperature: float
    batch_size: int
    generations: tuple[Generation, ...]
    plain: tuple[Generation, ...]
    wall_s: float
    plain_wall_s: float


@dataclass(frozen=True)
class SpeedPoint:
    """Speculative against plain decoding of the same requests by the same engine, one after the other in one run.

    Rates count seconds of the engine's decoding steps (prefill is apart). A step is one draft-verify round of all
    requests in flight; `rounds_per_s` counts rounds of single requests. Step times are medians over the steps in which
    `batch_size` requests were in flight, in milliseconds; `step_ms` are all of those steps, for a histogram.
    """

    batch_size: int
    temperature: float
    num_tokens: int
    num_rounds: int
    num_steps: int
    tokens_per_s: float
    rounds_per_s: float
    steps_per_s: float
    plain_tokens_per_s: float
    plain_steps_per_s: float
    draft_ms: float
    verify_ms: float
    sample_ms: float  # sampling, acceptance, cache upkeep and bookkeeping: the step less both forward passes
    plain_verify_ms: float
    plain_sample_ms: float
    step_ms: tuple[float, ...]

    @property
    def speedup(self) -> float:
        """Tokens per second over those of plain decoding."""
        return self.tokens_per_s / self.plain_tokens_per_s

    @property
    def overhead_share(self) -> float:
        """Share of a step spent outside the forward passes of target and drafter."""
        return self.sample_ms / (self.draft_ms + self.verify_ms + self.sample_ms)
