"""The rows of params.yaml about serving: what `profile` measures on a machine, and what `serve` studies with it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from draftsmith.params_models import Domain, Row

Count = Annotated[int, Field(gt=0)]


class Profile(Row):
    """Steps of the real engine, timed on this machine: sweeps over batch tokens, requests and context.

    Each shape of a step is timed `repeats` times, fewer (but 3) if that took longer than about `budget_s`; `warmup`
    steps before each batch are not kept. The shortest of `context_tokens` is that of the sweep over tokens.
    `temperature` is that of drafting and acceptance, on which it depends how much of the LM head a step needs.
    """

    num_requests: tuple[Count, ...] = Field((1, 2, 4, 8, 16), min_length=1)
    context_tokens: tuple[Count, ...] = Field((128, 512), min_length=1)
    repeats: int = Field(7, gt=0)
    warmup: int = Field(2, ge=0)
    budget_s: float = Field(120.0, gt=0)
    temperature: float = Field(1.0, ge=0)
    seed: int = 0


class TokenNumbers(Row):
    """Numbers of tokens, log-normal: their median, the standard deviation of their logarithm, their ends."""

    median: float = Field(ge=1)
    spread: float = Field(ge=0)
    low: Count = 1
    high: Count

    @model_validator(mode="after")
    def _consistent(self) -> TokenNumbers:
        if not self.low <= self.median <= self.high:
            raise ValueError(f"median must lie from low to high, got {self.low}, {self.median}, {self.high}")
        return self


class DeadlineRow(Row):
    """By when a request must be finished: seconds to its first token, and for each of its tokens."""

    first_token_s: float = Field(ge=0)
    per_token_s: float = Field(gt=0)


class WhatIf(Row):
    """A synthetic study beside the measured one: an example profile, and rounds drawn to accepted lengths by domain.

    Without `accepted_length` those that the DSpark paper gives for the drafter's kind.
    """

    name: str = Field(pattern=r"^[a-z0-9_]+$")
    profile: str
    accepted_length: dict[Domain, Annotated[float, Field(gt=1)]] | None = Field(None, min_length=1)


class Serve(Row):
    """Verification policies under load, simulated on the profiled machine with recorded rounds.

    `temperature` is that of the evaluation whose rounds are replayed. Concurrencies are powers of two up to
    `max_concurrency` and to what the profile's table holds (null: that alone). A point of the closed loop has
    `closed_requests` requests times the root of its users, and six a user at least; an open load at least
    `open_requests`.
    `loads` are shares of the best throughput in the closed loop; the anchors of speed, and the deadline if there is
    none of its own, are shares of plain decoding's tokens per second for one user.
    `trace`, relative to the working copy, is a file of requests to be replayed as well, its first `trace_requests`.
    """

    temperature: float = Field(1.0, ge=0)
    max_concurrency: Count | None = None
    kv_tokens: Count | None = None
    prefill_tokens: Count | None = 4096
    prompt_tokens: TokenNumbers = TokenNumbers(median=128, spread=0.6, low=8, high=1024)
    output_tokens: TokenNumbers = TokenNumbers(median=96, spread=0.5, low=8, high=512)
    domains: dict[Domain, Annotated[float, Field(gt=0)]] | None = Field(None, min_length=1)
    closed_requests: Count = 96
    open_requests: Count = 240
    thresholds: tuple[Annotated[float, Field(ge=0, le=1)], ...] = (0.3, 0.5, 0.7)
    loads: tuple[Annotated[float, Field(gt=0)], ...] = Field((0.3, 0.6, 0.9), min_length=1)
    irregular_load: float = Field(0.6, gt=0)
    burst_factors: tuple[Annotated[float, Field(ge=1)], ...] = Field((1.0, 4.0, 16.0), min_length=1)
    burst_share: float = Field(0.1, gt=0, lt=1)
    staleness: tuple[Annotated[int, Field(gt=0)], ...] = Field((1, 2, 4, 8), min_length=1)
    anchor_shares: tuple[Annotated[float, Field(gt=0)], ...] = (0.25, 0.5, 0.75)
    anchor_tokens_per_s: tuple[Annotated[float, Field(gt=0)], ...] = ()
    deadline_share: float = Field(0.5, gt=0)
    deadline: DeadlineRow | None = None
    exit_floor: float = Field(0.5, ge=0, le=1)
    probe_every: int = Field(32, ge=2)
    trace: str | None = None
    trace_domain: Domain = "chat"
    trace_requests: Count = 1000
    what_if: tuple[WhatIf, ...] = (WhatIf(name="tiles", profile="tiles"),)
    seed: int = 0

    @model_validator(mode="after")
    def _consistent(self) -> Serve:
        for name in ("thresholds", "loads", "burst_factors", "staleness", "anchor_shares", "anchor_tokens_per_s"):
            values = getattr(self, name)
            if len(set(values)) != len(values):
                raise ValueError(f"{name} must differ, got {list(values)}")
        names = [item.name for item in self.what_if]
        if len(set(names)) != len(names):
            raise ValueError(f"what_if must have different names, got {names}")
        return self
