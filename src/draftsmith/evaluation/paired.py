"""Accepted length from sums by prompt: means over benchmarks and differences between drafters, with intervals.

Several benchmarks are strata: prompts are drawn with replacement within each, and the statistic is the plain mean over
benchmarks of committed tokens a round. A difference draws the same prompts for both drafters, so what makes a prompt
easy or hard for both cancels. See `evaluation.bootstrap` for the intervals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from draftsmith.errors import DraftsmithError
from draftsmith.evaluation.bootstrap import NUM_RESAMPLES, Estimate, Ratio, estimate

Bonus = Literal["with", "without"]
Mean = Literal["micro", "macro"]
"""Within a benchmark: tokens over rounds of all prompts together, or the mean over prompts of each one's own ratio."""
BONUSES: tuple[Bonus, ...] = ("with", "without")
MEANS: tuple[Mean, ...] = ("micro", "macro")


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

    @property
    def with_rounds(self) -> set[str]:
        """The ids of prompts with at least one round: those that count in means."""
        return {name for name, rounds in zip(self.ids, self.rounds, strict=True) if rounds}

    def only(self, names: set[str]) -> PromptCounts:
        """The prompts that are named, in their order here."""
        rows = [index for index, name in enumerate(self.ids) if name in names]
        return PromptCounts(
            ids=tuple(self.ids[row] for row in rows),
            rounds=tuple(self.rounds[row] for row in rows),
            committed=tuple(self.committed[row] for row in rows),
            committed_draft=tuple(self.committed_draft[row] for row in rows),
        )


def mean_length(
    benchmarks: Sequence[PromptCounts],
    *,
    seed: int,
    bonus: Bonus = "with",
    mean: Mean = "micro",
    num_resamples: int = NUM_RESAMPLES,
) -> Estimate:
    """Committed tokens a round, averaged over `benchmarks`. Raises DraftsmithError for a benchmark without rounds."""
    strata = [[_ratio(item, item.with_rounds, bonus=bonus, mean=mean)] for item in benchmarks]
    return estimate(strata, seed=seed, num_resamples=num_resamples)


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
        kept = mine.with_rounds & theirs.with_rounds
        strata.append([_ratio(side, kept, bonus=bonus, mean="micro") for side in (mine, theirs)])
    return estimate(strata, seed=seed, num_resamples=num_resamples)


def _ratio(counts: PromptCounts, kept: set[str], *, bonus: Bonus, mean: Mean) -> Ratio:
    """Of the prompts that are kept, by id: two sides that keep the same ones have them at the same places."""
    if not kept:
        raise DraftsmithError("no prompt with decoding rounds", got=f"{len(counts.ids)} prompts")
    place = {name: index for index, name in enumerate(counts.ids)}
    rows = [place[name] for name in sorted(kept)]
    column = counts.committed if bonus == "with" else counts.committed_draft
    tokens, rounds = np.array(column, np.float64)[rows], np.array(counts.rounds, np.float64)[rows]
    return Ratio(tokens, rounds) if mean == "micro" else Ratio(tokens / rounds, np.ones(len(rows)))
