"""What a simulation yields: arrays by request, by step and by prefill pass. `serving.figures` reads figures off them.

Letters: n requests, S steps, P prefill passes, R requests of a step, K block size, N batch tokens of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draftsmith.serving.requests import Bools, Floats, Ints, Requests


@dataclass(frozen=True, eq=False)
class Steps:
    """Draft-verify steps, in their order; each column [S]."""

    start_s: Floats
    draft_s: Floats
    verify_s: Floats
    upkeep_s: Floats
    num_requests: Ints  # R
    num_drafting: Ints  # requests that drafted at least one token
    drafted: Ints  # draft tokens
    verified: Ints  # of them, verified
    accepted: Ints  # of them, accepted
    committed: Ints  # tokens that the step added to answers
    kv_tokens: Ints  # key-value tokens that the verification pass held
    kv_reserved: Ints  # key-value tokens that were set aside
    num_waiting: Ints  # requests that had arrived and were not admitted

    @classmethod
    def of(cls, rows: Sequence[tuple[float, ...]]) -> Steps:
        """One tuple a step, in the order of the columns."""
        columns = np.array(rows, np.float64).reshape(len(rows), 13).T
        return cls(*columns[:4], *columns[4:].astype(np.int64))

    @property
    def seconds(self) -> Floats:
        return self.draft_s + self.verify_s + self.upkeep_s

    @property
    def end_s(self) -> Floats:
        return self.start_s + self.seconds

    @property
    def batch_tokens(self) -> Ints:
        """N: anchors and verified draft tokens."""
        return self.num_requests + self.verified


@dataclass(frozen=True, eq=False)
class Prefills:
    """Prefill passes, in their order; each column [P]."""

    start_s: Floats
    seconds: Floats
    num_requests: Ints
    num_tokens: Ints

    @classmethod
    def of(cls, rows: Sequence[tuple[float, ...]]) -> Prefills:
        """One tuple a pass, in the order of the columns."""
        columns = np.array(rows, np.float64).reshape(len(rows), 4).T
        return cls(*columns[:2], *columns[2:].astype(np.int64))


@dataclass(frozen=True, eq=False)
class Outcome:
    """A simulation to its end. Rows by request are those of `requests`; times are seconds of the simulated clock."""

    requests: Requests
    arrival_s: Floats  # [n]
    admitted_s: Floats  # [n] begin of the prefill
    first_token_s: Floats  # [n] end of the prefill
    finish_s: Floats  # [n]
    num_rounds: Ints  # [n]
    drafted: Ints  # [n] draft tokens
    verified: Ints  # [n] of them, verified
    accepted: Ints  # [n] of them, accepted
    steps: Steps
    prefills: Prefills

    @property
    def in_time(self) -> Bools:
        """[n]: finished by its deadline, if it has one."""
        return self.finish_s - self.arrival_s <= self.requests.deadline_s
