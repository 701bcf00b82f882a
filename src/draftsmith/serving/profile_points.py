"""Timed steps and passes of an engine, and what is kept of them: medians and spread by shape.

Letters: R requests of a step, N batch tokens (anchors and verified draft tokens).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

import numpy as np

Sweep = Literal["tokens", "requests", "blocks", "context"]
"""Over N; over R, whatever N; over shorter blocks, all of which are verified, so that N = R (1 + their length); over
the length of contexts. Blocks are whole where nothing else is said."""
Item = TypeVar("Item")


@dataclass(frozen=True)
class StepSample:
    """One timed step: seconds of the drafter, of the target, and of all else (`StepTime.sample_s`).

    `context_tokens` a request on average, anchor included; `nominal_context` is the length that its sweep asked for.
    """

    sweep: Sweep
    num_requests: int
    batch_tokens: int
    nominal_context: int
    context_tokens: float
    draft_s: float
    verify_s: float
    upkeep_s: float


@dataclass(frozen=True)
class PassSample:
    """One timed prefill pass over the prompts of `num_requests`, `num_tokens` together."""

    num_requests: int
    num_tokens: int
    seconds: float


@dataclass(frozen=True)
class Spread:
    """Median and outer deciles; a quantile between two values lies on the line between them."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        p10, median, p90 = np.quantile(np.asarray(values, np.float64), (0.1, 0.5, 0.9)).tolist()
        return cls(median, p10, p90)


@dataclass(frozen=True)
class Point:
    """The steps of one shape. Those of sweep "requests" are all of one R, whatever their N: they tell what a step takes
    outside verification, so that `batch_tokens` and `verify_s` are None."""

    sweep: Sweep
    num_requests: int
    batch_tokens: int | None
    context_tokens: float
    num_steps: int
    draft_s: Spread
    verify_s: Spread | None
    upkeep_s: Spread

    @property
    def step_s(self) -> float | None:
        """Seconds of a whole step, by the medians of its parts."""
        if self.verify_s is None:
            return None
        return self.draft_s.median + self.verify_s.median + self.upkeep_s.median

    def to_body(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_body(cls, body: dict[str, Any]) -> Point:
        """Raises KeyError or TypeError for a body of another form."""
        verify = body["verify_s"]
        return cls(
            body["sweep"], body["num_requests"], body["batch_tokens"], body["context_tokens"], body["num_steps"],
            Spread(**body["draft_s"]), None if verify is None else Spread(**verify), Spread(**body["upkeep_s"]),
        )  # fmt: skip


@dataclass(frozen=True)
class PrefillPoint:
    """The prefill passes of one shape."""

    num_requests: int
    num_tokens: int
    seconds: Spread
    num_passes: int

    def to_body(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_body(cls, body: dict[str, Any]) -> PrefillPoint:
        """Raises KeyError or TypeError for a body of another form."""
        return cls(body["num_requests"], body["num_tokens"], Spread(**body["seconds"]), body["num_passes"])


def step_points(samples: Sequence[StepSample]) -> tuple[Point, ...]:
    """A point a shape of the sweeps that are measured, and one of sweep "requests" for each R of that over tokens."""
    tokens, blocks, context = (
        [item for item in samples if item.sweep == sweep] for sweep in ("tokens", "blocks", "context")
    )
    return (
        *(_point("tokens", part) for part in _grouped(tokens, by=lambda item: (item.num_requests, item.batch_tokens))),
        *(_point("requests", part) for part in _grouped(tokens, by=lambda item: (item.num_requests,))),
        *(_point("blocks", part) for part in _grouped(blocks, by=lambda item: (item.num_requests, item.batch_tokens))),
        *(_point("context", part) for part in _grouped(
            context, by=lambda item: (item.num_requests, item.batch_tokens, item.nominal_context))),
    )  # fmt: skip


def prefill_points(samples: Sequence[PassSample]) -> tuple[PrefillPoint, ...]:
    """A point a shape."""
    return tuple(
        PrefillPoint(part[0].num_requests, part[0].num_tokens, Spread.of([item.seconds for item in part]), len(part))
        for part in _grouped(samples, by=lambda item: (item.num_tokens, item.num_requests))
    )


def _point(sweep: Sweep, samples: Sequence[StepSample]) -> Point:
    first, is_shape = samples[0], sweep != "requests"
    return Point(
        sweep,
        first.num_requests,
        first.batch_tokens if is_shape else None,
        float(np.mean([item.context_tokens for item in samples])),
        len(samples),
        draft_s=Spread.of([item.draft_s for item in samples]),
        verify_s=Spread.of([item.verify_s for item in samples]) if is_shape else None,
        upkeep_s=Spread.of([item.upkeep_s for item in samples]),
    )


def _grouped(samples: Iterable[Item], *, by: Callable[[Item], tuple[int, ...]]) -> list[list[Item]]:
    """The samples of each key, in the order of the keys."""
    parts: dict[tuple[int, ...], list[Item]] = {}
    for item in samples:
        parts.setdefault(by(item), []).append(item)
    return [parts[key] for key in sorted(parts)]
