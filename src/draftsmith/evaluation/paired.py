"""Accepted length from sums by prompt: means over benchmarks and differences between drafters, with intervals.

Several benchmarks are strata: prompts are drawn with replacement within each, and the statistic is the plain mean over
benchmarks of committed tokens a round. A difference draws the same prompts for both drafters, so what makes a prompt
easy or hard for both cancels.

Intervals are 95 % by bootstrap over prompts, with percentiles moved out for few prompts (the expanded percentile
interval of Hesterberg 2015, "What Teachers Should Know About the Bootstrap"): a plain percentile interval of P prompts
is too narrow by sqrt((P - 1) / P) and by the normal quantile over Student's. Over strata the degrees of freedom are
Satterthwaite's. What intervals cover is the draw of the prompts; another training seed is not in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from draftsmith.errors import DraftsmithError

Bonus = Literal["with", "without"]
Floats = NDArray[np.float64]
Interval = tuple[float, float]

COVERAGE = 0.95
NUM_RESAMPLES = 10_000
ROUNDING = 1e-9


@dataclass(frozen=True)
class PromptCounts:
    """Of each of P prompts: decoding rounds, tokens that they committed, and those of them that the drafter proposed.

    All turns of a prompt count together. A prompt without rounds was answered by the prefill token alone.
    """

    ids: tuple[str, ...]  # [P]
    rounds: tuple[int, ...]  # [P]
    committed: tuple[int, ...]  # [P]
    committed_draft: tuple[int, ...]  # [P]

    def __post_init__(self) -> None:
        sizes = {len(self.ids), len(self.rounds), len(self.committed), len(self.committed_draft)}
        if len(sizes) != 1 or len(set(self.ids)) != len(self.ids):
            raise DraftsmithError("counts by prompt do not fit together", got=f"columns of {sorted(sizes)} rows")

    def to_json(self) -> dict[str, list[Any]]:
        """One list a column."""
        return {
            "ids": list(self.ids),
            "rounds": list(self.rounds),
            "committed": list(self.committed),
            "committed_draft": list(self.committed_draft),
        }

    @classmethod
    def from_json(cls, body: dict[str, list[Any]]) -> PromptCounts:
        """The inverse of `to_json`."""
        return cls(**{name: tuple(values) for name, values in body.items()})


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval over prompts, None where a benchmark has fewer than two prompts with rounds."""

    value: float
    interval: Interval | None
    num_prompts: int

    @property
    def excludes_zero(self) -> bool:
        """True if the interval lies on one side of 0, by more than rounding."""
        return self.interval is not None and (self.interval[0] > ROUNDING or self.interval[1] < -ROUNDING)


def mean_length(
    benchmarks: Sequence[PromptCounts], *, seed: int, bonus: Bonus = "with", num_resamples: int = NUM_RESAMPLES
) -> Estimate:
    """Committed tokens a round, averaged over `benchmarks`. Raises DraftsmithError for a benchmark without rounds."""
    strata = [_columns(item, _with_rounds(item), bonus=bonus) for item in benchmarks]
    return _estimate([(item,) for item in strata], seed=seed, num_resamples=num_resamples)


def mean_difference(
    ours: Sequence[PromptCounts],
    *,
    baseline: Sequence[PromptCounts],
    seed: int,
    bonus: Bonus = "with",
    num_resamples: int = NUM_RESAMPLES,
) -> Estimate:
    """Mean length of `ours` less that of `baseline`, benchmark by benchmark, paired by prompt.

    Prompts without a round in either are left out. Raises DraftsmithError if the two have not the same benchmarks and
    prompts, or a benchmark has no prompt with rounds in both.
    """
    if len(ours) != len(baseline):
        raise DraftsmithError(
            "a paired comparison needs the same benchmarks", got=f"{len(ours)} and {len(baseline)} benchmarks"
        )
    strata = []
    for mine, theirs in zip(ours, baseline, strict=True):
        if set(mine.ids) != set(theirs.ids):
            raise DraftsmithError(
                "a paired comparison needs the same prompts", got=f"{len(mine.ids)} and {len(theirs.ids)} prompts"
            )
        kept = _with_rounds(mine) & _with_rounds(theirs)
        strata.append((_columns(mine, kept, bonus=bonus), _columns(theirs, kept, bonus=bonus)))
    return _estimate(strata, seed=seed, num_resamples=num_resamples)


def student_quantile(level: float, *, degrees: float) -> float:
    """Quantile of Student's t, by Fisher and Cornish's expansion (Abramowitz and Stegun 26.7.5).

    At level 0.975 it is right to 1 % from two degrees of freedom on, to 0.1 % from four.
    """
    z = NormalDist().inv_cdf(level)
    return float(
        z
        + (z**3 + z) / (4 * degrees)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * degrees**4)
    )


@dataclass(frozen=True)
class _Columns:
    """Of the P prompts of one stratum that count: tokens and rounds."""

    tokens: Floats  # [P]
    rounds: Floats  # [P]


def _with_rounds(counts: PromptCounts) -> set[str]:
    return {name for name, rounds in zip(counts.ids, counts.rounds, strict=True) if rounds}


def _columns(counts: PromptCounts, kept: set[str], *, bonus: Bonus) -> _Columns:
    """Of the prompts that are kept, by id: two sides that keep the same ones have them at the same places."""
    if not kept:
        raise DraftsmithError("no prompt with decoding rounds", got=f"{len(counts.ids)} prompts")
    place = {name: index for index, name in enumerate(counts.ids)}
    rows = [place[name] for name in sorted(kept)]
    tokens = counts.committed if bonus == "with" else counts.committed_draft
    return _Columns(np.array(tokens, np.float64)[rows], np.array(counts.rounds, np.float64)[rows])


def _estimate(strata: Sequence[tuple[_Columns, ...]], *, seed: int, num_resamples: int) -> Estimate:
    """The mean over strata of a ratio, or of the first ratio less the second."""
    sizes = np.array([len(sides[0].rounds) for sides in strata], np.float64)
    value = float(np.mean([_ratios(sides, np.ones((1, len(sides[0].rounds))))[0] for sides in strata]))
    if sizes.min() < 2:
        return Estimate(value, None, int(sizes.sum()))
    rng = np.random.default_rng(seed)
    drawn = np.stack([_ratios(sides, _weights(rng, len(sides[0].rounds), num_resamples)) for sides in strata])
    level = _expanded_level(drawn.var(axis=1), sizes)
    low, high = np.quantile(drawn.mean(axis=0), [1 - level, level])
    return Estimate(value, (float(low), float(high)), int(sizes.sum()))


def _weights(rng: np.random.Generator, num_prompts: int, num_resamples: int) -> Floats:
    """How often each bootstrap sample draws each prompt, [num_resamples, P]."""
    return rng.multinomial(num_prompts, np.full(num_prompts, 1 / num_prompts), size=num_resamples).astype(np.float64)


def _ratios(sides: tuple[_Columns, ...], weights: Floats) -> Floats:
    """Tokens over rounds of each resample [R], the second side's taken from the first's."""
    ratios = [(weights @ side.tokens) / (weights @ side.rounds) for side in sides]
    return ratios[0] - ratios[1] if len(ratios) == 2 else ratios[0]


def _expanded_level(variances: Floats, sizes: Floats) -> float:
    """The upper percentile to read, from each stratum's bootstrap variance and number of prompts [S]."""
    unbiased = variances * sizes / (sizes - 1)
    if unbiased.sum() == 0:
        return (1 + COVERAGE) / 2
    degrees = unbiased.sum() ** 2 / (unbiased**2 / (sizes - 1)).sum()
    spread = student_quantile((1 + COVERAGE) / 2, degrees=float(degrees)) * np.sqrt(unbiased.sum() / variances.sum())
    return NormalDist().cdf(float(spread))
