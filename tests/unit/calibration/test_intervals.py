"""Bootstrap over prompts against the measures themselves on resampled rounds."""

from __future__ import annotations

import numpy as np
import pytest

from draftsmith.calibration.collect import RoundArrays
from draftsmith.calibration.ece import (
    brier_score,
    equal_width_bins,
    expected_calibration_error,
    roc_auc,
)
from draftsmith.calibration.intervals import (
    auc_draws,
    brier_draws,
    calibration_intervals,
    ece_draws,
    interval,
    resampled_prompts,
)

NUM_PROMPTS, NUM_BINS = 6, 5


def sample(num: int, *, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Confidences with ties, outcomes, prompts [num]."""
    rng = np.random.default_rng(seed)
    confidence = rng.integers(1, 10, num) / 10
    return confidence, rng.random(num) < confidence**2, rng.integers(0, NUM_PROMPTS, num)


@pytest.mark.parametrize("seed", range(4))
def test_draws_are_the_measures_of_rounds_drawn_with_their_prompts(seed: int) -> None:
    confidence, outcome, prompt = sample(60, seed=seed)
    weights = resampled_prompts(NUM_PROMPTS, seed=seed, num_resamples=20)
    assert (weights.sum(axis=1) == NUM_PROMPTS).all()
    bins = equal_width_bins(confidence, num_bins=NUM_BINS)
    found = (
        ece_draws(confidence, outcome=outcome, bins=bins, prompt=prompt, weights=weights),
        brier_draws(confidence, outcome=outcome, prompt=prompt, weights=weights),
        auc_draws(confidence, outcome=outcome, prompt=prompt, weights=weights),
    )
    for row, ece, brier, auc in zip(weights.astype(int), *found, strict=True):
        drawn = np.repeat(np.arange(60), row[prompt])
        own, happened = confidence[drawn], outcome[drawn]
        assert ece == pytest.approx(expected_calibration_error(own, outcome=happened, num_bins=NUM_BINS))
        assert brier == pytest.approx(brier_score(own, outcome=happened))
        assert auc == pytest.approx(roc_auc(own, outcome=happened))


def test_one_outcome_alone_has_no_area() -> None:
    draws = auc_draws([0.5, 0.6], outcome=[True, False], prompt=np.array([0, 1]), weights=np.array([[2.0, 0], [1, 1]]))
    assert np.isnan(draws[0])
    assert draws[1] == 0.0


def test_the_middle_of_the_draws() -> None:
    assert interval(np.arange(0.0, 101.0)) == [2.5, 97.5]
    assert interval(np.array([np.nan, np.nan, 1.0])) is None


def rounds(num: int, *, seed: int) -> RoundArrays:
    """Two slots; each prompt is of its own difficulty, so that rounds of one prompt go together."""
    rng = np.random.default_rng(seed)
    prompt = np.sort(rng.integers(0, NUM_PROMPTS, num))
    logits = rng.normal(size=(num, 2))
    chance = 1 / (1 + np.exp(-logits - np.linspace(-1, 1, NUM_PROMPTS)[prompt][:, None]))
    accepted = (rng.random((num, 2)) < chance).cumprod(axis=1).sum(axis=1)
    return RoundArrays(logits, accepted, np.full(num, 2), prompt, tuple("abcdef"))


def test_intervals_hold_the_measures_and_widen_with_fewer_rounds() -> None:
    sides = {"before": [1.0, 1.0], "after": [2.0, 0.5]}
    found = [calibration_intervals(rounds(num, seed=1), temperatures=sides, num_bins=10, seed=0) for num in (4000, 60)]
    assert set(found[0]) == {"auc"} | {
        f"{name}_{side}" for name in ("ece", "ece_equal_mass", "brier", "auc_survival") for side in sides
    }
    many = rounds(4000, seed=1)
    chance = 1 / (1 + np.exp(-many.logits[:, 0]))
    low, high = found[0]["brier_before"][0]
    assert low < brier_score(chance, outcome=many.accepted > 0) < high
    widths = [ends["brier_before"][0][1] - ends["brier_before"][0][0] for ends in found]
    assert widths[0] < widths[1]


def test_a_slot_that_never_counts_has_none() -> None:
    some = rounds(50, seed=2)
    some = RoundArrays(some.logits, np.minimum(some.accepted, 1), np.ones(50, int), some.prompt, some.prompt_ids)
    found = calibration_intervals(some, temperatures={"before": [1.0, 1.0]}, num_bins=5, seed=0)
    assert found["ece_before"][0] is not None
    assert found["ece_before"][1] is None
    assert found["auc"][1] is None
