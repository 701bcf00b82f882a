"""Temperatures by domain: whether code, math and chat are worth a calibration of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from draftsmith.calibration.collect import RoundArrays, RoundSplit, require_rounds
from draftsmith.calibration.ece import NullEce, null_ece_draws
from draftsmith.calibration.online import mean_ece
from draftsmith.calibration.sts import fit_temperatures, survival

NULL_DRAWS = 1000


def domain_calibrations(
    split: RoundSplit, *, domain_of: Mapping[str, str], common: ArrayLike, grid: ArrayLike, num_bins: int,
    min_rounds: int, seed: int,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """By domain: temperatures [K] fitted on its own rounds, and held-out mean ECE with none, the common and its own.

    `domain_of`: prompt id -> domain; `common` [K] are fitted on all. `null_mean_ece_quantile_95` is what perfect
    calibration would show of the same rounds at its own temperatures.
    Raises CalibrationError naming a domain with too few rounds of either part, and how many prompts would do.
    """
    found = {}
    for name in sorted(set(domain_of.values())):
        fit, holdout = (_of_domain(part, name, domain_of) for part in (split.fit, split.holdout))
        for what, part in (("fitting", fit), ("held-out", holdout)):
            require_rounds(
                part, name=f"{what} {name}", min_rounds=min_rounds, total_prompts=fit.num_prompts + holdout.num_prompts
            )
        own = fit_temperatures(
            fit.logits, accepted=fit.accepted, counted=fit.counted, grid=grid, num_bins=num_bins
        )  # fmt: skip
        errors = {
            side: mean_ece(holdout, survivals=survival(holdout.logits, temperatures), num_bins=num_bins)
            for side, temperatures in (("raw", np.ones(len(own))), ("common", common), ("own", own))
        }
        found[name] = {
            "temperatures": own.tolist(),
            "num_fit_rounds": fit.num_rounds,
            "num_rounds": holdout.num_rounds,
            "num_prompts": holdout.num_prompts,
            "share_accepted_1": float((holdout.accepted > 0).mean()),
            **{f"mean_ece_{side}": error for side, error in errors.items()},
            "null_mean_ece_quantile_95": _null(holdout, own, num_bins=num_bins, seed=seed),
        }
    return found


def _of_domain(part: RoundArrays, name: str, domain_of: Mapping[str, str]) -> RoundArrays:
    mine = np.array([domain_of[prompt_id] == name for prompt_id in part.prompt_ids], np.bool_)
    return part.chosen(mine[part.prompt])


def _null(rounds: RoundArrays, temperatures: ArrayLike, *, num_bins: int, seed: int) -> float:
    survivals = survival(rounds.logits, temperatures)
    draws = [
        null_ece_draws(
            survivals[:, slot], rows=rounds.counted > slot, num_bins=num_bins, seed=seed, num_draws=NULL_DRAWS
        )
        for slot in range(rounds.num_slots)
    ]
    return NullEce.of(np.mean(draws, axis=0)).quantile_95
