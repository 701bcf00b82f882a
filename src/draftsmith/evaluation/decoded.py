"""What an evaluation has decoded, before anything is measured from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draftsmith.decoding.rounds import Generation
from draftsmith.params import Domain


@dataclass(frozen=True)
class Decoded:
    """One benchmark at one temperature: each answer by speculative and by plain decoding of the same request.

    Both tuples hold the same request ids (`<benchmark>/<row>/t<turn>`), in the order of prompts, then turns. Wall times
    are seconds of the engine on this machine at `batch_size`, prefill included. Both are None if some of the answers,
    of either tuple, were decoded on another machine or at another batch size.
    """

    benchmark: str
    domain: Domain
    temperature: float
    batch_size: int
    generations: tuple[Generation, ...]
    plain: tuple[Generation, ...]
    wall_s: float | None
    plain_wall_s: float | None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of all answers over the wall time of speculative decoding."""
        return _rate(self.generations, self.wall_s)

    @property
    def plain_tokens_per_s(self) -> float | None:
        """Tokens of all answers over the wall time of plain decoding."""
        return _rate(self.plain, self.plain_wall_s)

    @property
    def speedup(self) -> float | None:
        """Tokens per second over those of plain decoding."""
        own, plain = self.tokens_per_s, self.plain_tokens_per_s
        return None if own is None or plain is None else own / plain


@dataclass(frozen=True)
class SpeedPoint:
    """Speculative against plain decoding of the same requests by the same engine, one after the other in one run.

    Rates count seconds of the engine's decoding steps (prefill is apart). A step is one draft-verify round of all
    requests in flight; `rounds_per_s` counts rounds of single requests. Step times are medians over the steps in which
    `batch_size` requests were in flight (or, if so many never were, the most that were), in milliseconds; `step_ms` are
    all of those steps, for a histogram.
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


def _rate(generations: Sequence[Generation], wall_s: float | None) -> float | None:
    return None if wall_s is None else sum(len(item.token_ids) for item in generations) / wall_s
