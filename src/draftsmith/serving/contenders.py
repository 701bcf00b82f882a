"""The policies that a study compares, by name, and what is needed to make each of them anew for every simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from draftsmith.decoding.drafting import DraftPolicy
from draftsmith.decoding.policies import LengthPolicy
from draftsmith.serving.cost_table import CostTable
from draftsmith.serving.early_exit import DraftFirst, EarlyExit, Memory, Shape, WorthDrafting
from draftsmith.serving.policies import (
    AsynchronousPolicy,
    FixedLength,
    NoSpeculation,
    StaticThreshold,
    SynchronousPolicy,
)
from draftsmith.serving.recorded import RecordedRounds, plain_rounds
from draftsmith.serving.requests import Floats
from draftsmith.serving.simulator import Limits
from draftsmith.serving.step_costs import StepCosts

Kind = Literal["none", "fixed", "threshold", "synchronous", "asynchronous"]
Exit = Literal["recent", "worth"]
PLAIN = "none"


@dataclass(frozen=True, eq=False)
class Machine:
    """What a study simulates: rounds to replay, what steps cost, and what policies believe that they cost."""

    rounds: RecordedRounds
    costs: StepCosts  # the truth, with the table as measured
    believed: CostTable  # the policies' own: the monotone one
    limits: Limits
    temperatures: tuple[float, ...] | None  # [K]
    exit_floor: float
    probe_every: int
    seed: int

    @property
    def block_size(self) -> int:
        return self.rounds.block_size

    @property
    def confident(self) -> bool:
        """Whether the drafter has a confidence head."""
        return self.rounds.logits is not None

    @property
    def believed_costs(self) -> StepCosts:
        return replace(self.costs, verification=self.believed)

    @property
    def fixed_s(self) -> Floats:
        """[R + 1], for the policies."""
        return self.costs.fixed_s(self.limits.max_requests)

    @property
    def plain(self) -> RecordedRounds:
        return plain_rounds(self.rounds.domains)

    @property
    def plain_costs(self) -> StepCosts:
        """Of an engine without a drafter."""
        return replace(self.costs, drafting=None)


@dataclass(frozen=True)
class Contender:
    """A policy: how far blocks are verified, and whether requests draft. `parameter` is k, a threshold or a staleness.

    `none` is plain decoding by an engine that has no drafter; a fixed length drafts no more than it verifies.
    """

    kind: Kind
    parameter: float | None = None
    early_exit: Exit | None = None

    @property
    def name(self) -> str:
        stem = {"synchronous": "sync", "asynchronous": "async"}.get(self.kind, self.kind)
        told = "" if self.parameter is None else f"_{self.parameter:g}"
        return stem + told + (f"+{self.early_exit}" if self.early_exit else "")

    @property
    def label(self) -> str:
        told = f"{self.parameter:g}" if self.parameter is not None else ""
        base = {
            "none": "no drafter",
            "fixed": f"fixed, {told} token{'' if told == '1' else 's'}",
            "threshold": f"confidence >= {told}",
            "synchronous": "scheduler, synchronous",
            "asynchronous": f"scheduler, asynchronous, {told} step{'' if told == '1' else 's'} stale",
        }[self.kind]
        extra = {None: "", "recent": ", early exit", "worth": ", drafts where it pays"}[self.early_exit]
        return base + extra

    def policy(self, machine: Machine, *, table: CostTable | None = None) -> LengthPolicy:
        """A new one, which believes in `table`, by default in what the machine's policies believe."""
        believed = machine.believed if table is None else table
        parameter = 0.0 if self.parameter is None else self.parameter
        match self.kind:
            case "none":
                return NoSpeculation()
            case "fixed":
                return FixedLength(int(parameter))
            case "threshold":
                return StaticThreshold(parameter)
            case "synchronous":
                return SynchronousPolicy(believed, fixed_s=machine.fixed_s)
            case "asynchronous":
                return AsynchronousPolicy(believed, fixed_s=machine.fixed_s, staleness=int(parameter))

    def drafting(self, machine: Machine) -> DraftPolicy | None:
        """A new one; None if every request drafts whole blocks.

        What schedules by confidence exits early by it, too, and leaves the lengths to the scheduler; what has a fixed
        length shortens it.
        """
        if self.early_exit is None:
            fixed = self.kind == "fixed" and self.parameter is not None and self.parameter < machine.block_size
            return DraftFirst(int(self.parameter or 0)) if fixed else None
        scheduled = self.kind in ("synchronous", "asynchronous")
        memory = Memory(evidence="confidence" if scheduled else "acceptance")
        shape: Shape = "whole" if scheduled else "shortened"
        if self.early_exit == "recent":
            return EarlyExit(machine.exit_floor, memory=memory, shape=shape, probe_every=machine.probe_every)
        return WorthDrafting(
            machine.believed_costs,
            max_requests=machine.limits.max_requests,
            memory=memory,
            shape=shape,
            probe_every=machine.probe_every,
        )


def contenders(*, block_size: int, confident: bool, thresholds: Sequence[float]) -> tuple[Contender, ...]:
    """All that a drafter allows, plain decoding first; early exits come with whole blocks and the asynchronous one."""
    whole = Contender("fixed", block_size)
    found = [Contender("none"), *(Contender("fixed", length) for length in range(1, block_size + 1))]
    if confident:
        found += [Contender("threshold", threshold) for threshold in thresholds]
        found += [Contender("synchronous"), ASYNCHRONOUS]
    for base in (whole, ASYNCHRONOUS) if confident else (whole,):
        found += [replace(base, early_exit="recent"), replace(base, early_exit="worth")]
    return tuple(found)


def principal(*, block_size: int, confident: bool) -> tuple[Contender, ...]:
    """The few that are looked at under open loads."""
    whole, plain = Contender("fixed", block_size), Contender("none")
    if confident:
        return plain, whole, Contender("synchronous"), ASYNCHRONOUS, replace(ASYNCHRONOUS, early_exit="worth")
    return plain, Contender("fixed", max(1, block_size // 2)), whole, replace(whole, early_exit="worth")


ASYNCHRONOUS = Contender("asynchronous", 2)
"""As the paper serves: budgets from two steps before."""


def scheduler_of(staleness: int) -> Contender:
    """The prefix scheduler; 0 is the synchronous one."""
    return Contender("synchronous") if staleness == 0 else Contender("asynchronous", staleness)
