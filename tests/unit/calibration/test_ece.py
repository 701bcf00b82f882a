"""ECE, Brier, AUC and the null against sums by hand, brute force and SciPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import mannwhitneyu, rankdata

from draftsmith.calibration import ece

probabilities = st.one_of(
    st.floats(0, 1, allow_subnormal=False), st.integers(0, 20).map(lambda i: i / 20), st.sampled_from([0.0, 0.5, 1.0])
)


@st.composite
def predictions(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    size = draw(st.integers(1, 40))
    return draw(arrays(np.float64, size, elements=probabilities)), draw(arrays(np.bool_, size))


def brute_force_ece(confidence: np.ndarray, outcome: np.ndarray, num_bins: int) -> float:
    """The definition, bin by bin."""
    total = 0.0
    for index in range(num_bins):
        inside = [
            i
            for i, c in enumerate(confidence)
            if index <= c * num_bins < index + 1 or (c == 1 and index == num_bins - 1)
        ]
        if inside:
            gap = math.fsum(confidence[i] for i in inside) / len(inside) - sum(bool(outcome[i]) for i in inside) / len(
                inside
            )
            total += len(inside) / len(confidence) * abs(gap)
    return total


def test_ece_by_hand() -> None:
    # Two bins: means .1 and .95, shares .5 and .5, half of the rounds each.
    value = ece.expected_calibration_error([0.05, 0.15, 0.95, 0.95], outcome=[0, 1, 1, 0], num_bins=2)
    assert value == pytest.approx(0.5 * 0.4 + 0.5 * 0.45, abs=1e-15)


@given(predictions(), st.integers(2, 25))
def test_ece_is_the_sum_over_bins(pair: tuple[np.ndarray, np.ndarray], num_bins: int) -> None:
    confidence, outcome = pair
    value = ece.expected_calibration_error(confidence, outcome=outcome, num_bins=num_bins)
    assert value == pytest.approx(brute_force_ece(confidence, outcome, num_bins), abs=1e-12)


def test_bin_edges_belong_to_the_upper_bin_and_one_to_the_last() -> None:
    assert ece.equal_width_bins([0.0, 0.249, 0.25, 0.5, 0.999, 1.0], num_bins=4).tolist() == [0, 0, 1, 2, 3, 3]


def test_equal_mass_bins_hold_equal_counts() -> None:
    confidence = np.random.default_rng(1).beta(0.3, 3.0, size=1000)
    assert np.bincount(ece.equal_mass_bins(confidence, num_bins=20)).tolist() == [50] * 20


def test_equal_mass_ece_by_hand() -> None:
    # Sorted: (.1, 0) (.2, 1) | (.3, 1) (.9, 1): gaps |.15 - .5| and |.6 - 1|.
    value = ece.expected_calibration_error([0.9, 0.2, 0.3, 0.1], outcome=[1, 1, 1, 0], num_bins=2, binning="equal_mass")
    assert value == pytest.approx(0.5 * 0.35 + 0.5 * 0.4, abs=1e-15)


@given(predictions(), st.integers(2, 20), st.integers(0, 2**32 - 1))
def test_ece_does_not_depend_on_the_order_of_rounds(
    pair: tuple[np.ndarray, np.ndarray], num_bins: int, seed: int
) -> None:
    confidence, outcome = pair
    order = np.random.default_rng(seed).permutation(len(confidence))
    for binning in ("equal_width", "equal_mass"):
        first = ece.expected_calibration_error(confidence, outcome=outcome, num_bins=num_bins, binning=binning)
        second = ece.expected_calibration_error(
            confidence[order], outcome=outcome[order], num_bins=num_bins, binning=binning
        )
        assert first == pytest.approx(second, abs=1e-12)


def test_reliability_bins_by_hand() -> None:
    bins = ece.reliability_bins([0.1, 0.3, 0.8], outcome=[0, 1, 1], num_bins=4)
    assert [(item.low, item.high, item.count) for item in bins] == [
        (0.0, 0.25, 1),
        (0.25, 0.5, 1),
        (0.5, 0.75, 0),
        (0.75, 1.0, 1),
    ]
    assert [(item.mean_confidence, item.share_accepted) for item in bins] == [
        (0.1, 0.0),
        (0.3, 1.0),
        (None, None),
        (0.8, 1.0),
    ]


@given(predictions())
def test_reliability_bins_add_up_to_the_ece(pair: tuple[np.ndarray, np.ndarray]) -> None:
    confidence, outcome = pair
    bins = ece.reliability_bins(confidence, outcome=outcome, num_bins=20)
    total = sum(item.count * abs(item.mean_confidence - item.share_accepted) for item in bins if item.count)
    value = ece.expected_calibration_error(confidence, outcome=outcome, num_bins=20)
    assert total / len(confidence) == pytest.approx(value, abs=1e-12)


def test_brier_by_hand() -> None:
    assert ece.brier_score([0.25, 1.0], outcome=[1, 0]) == (0.75**2 + 1) / 2


@given(predictions())
def test_auc_is_the_share_of_ordered_pairs(pair: tuple[np.ndarray, np.ndarray]) -> None:
    score, outcome = pair
    area = ece.roc_auc(score, outcome=outcome)
    pairs = [(a > b) + 0.5 * (a == b) for a in score[outcome] for b in score[~outcome]]
    if pairs:
        assert area == pytest.approx(sum(pairs) / len(pairs), abs=1e-12)
    else:
        assert area is None


def test_auc_with_ties_equals_scipys_u_statistic() -> None:
    rng = np.random.default_rng(0)
    score, outcome = rng.integers(0, 12, size=500) / 7, rng.random(500) < 0.3
    statistic = mannwhitneyu(score[outcome], score[~outcome]).statistic
    assert ece.roc_auc(score, outcome=outcome) == pytest.approx(
        statistic / (outcome.sum() * (~outcome).sum()), abs=1e-12
    )


@given(arrays(np.float64, st.integers(1, 50), elements=st.integers(-3, 3).map(float)))
def test_ranks_equal_scipys(values: np.ndarray) -> None:
    assert ece.average_ranks(values).tolist() == rankdata(values).tolist()


def test_auc_of_equal_scores_is_a_half_and_of_one_class_none() -> None:
    assert ece.roc_auc([2.0, 2.0, 2.0], outcome=[1, 0, 1]) == 0.5
    assert ece.roc_auc([1.0, 2.0], outcome=[1, 1]) is None
    assert ece.roc_auc([1.0, 2.0], outcome=[0, 0]) is None


def test_null_of_one_round_by_hand() -> None:
    # Accepted with probability .3: the error is .7 then, else .3; mean .42.
    null = ece.null_ece([0.3], num_bins=20, seed=0, num_draws=40_000)
    assert null.mean == pytest.approx(0.42, abs=4 * 0.4 * math.sqrt(0.21 / 40_000))
    assert null.quantile_95 == pytest.approx(0.7)


def test_null_mean_agrees_with_the_normal_approximation() -> None:
    # In a bin of many rounds the gap is about normal, so its mean absolute value is sqrt(2 / pi) standard deviations.
    confidence = np.random.default_rng(3).random(20_000)
    bins = np.minimum((confidence * 20).astype(int), 19)
    variances = np.bincount(bins, weights=confidence * (1 - confidence))
    expected = np.sqrt(2 / np.pi * variances).sum() / len(confidence)
    assert ece.null_ece(confidence, num_bins=20, seed=1, num_draws=400).mean == pytest.approx(expected, rel=0.02)


def test_a_calibrated_predictor_stays_below_the_null_quantile_19_times_in_20() -> None:
    rng = np.random.default_rng(4)
    confidence = rng.random(500)
    quantile = ece.null_ece(confidence, num_bins=20, seed=5, num_draws=4000).quantile_95
    below = [
        ece.expected_calibration_error(confidence, outcome=rng.random(500) < confidence, num_bins=20) <= quantile
        for _ in range(2000)
    ]
    assert np.mean(below) == pytest.approx(0.95, abs=4 * math.sqrt(0.95 * 0.05 / 2000) + 0.005)


def test_null_is_reproducible_and_independent_of_the_chunk_size(monkeypatch: pytest.MonkeyPatch) -> None:
    confidence = np.random.default_rng(6).random(37)
    whole = ece.null_ece(confidence, num_bins=5, seed=7, num_draws=50)
    monkeypatch.setattr(ece, "CHUNK_ELEMENTS", 100)
    assert ece.null_ece(confidence, num_bins=5, seed=7, num_draws=50) == whole
    assert ece.null_ece(confidence, num_bins=5, seed=8, num_draws=50) != whole


@settings(max_examples=25)
@given(st.integers(1, 30), st.integers(0, 1000))
def test_null_draws_over_some_rows_use_the_same_numbers(num_rounds: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    confidence, rows = rng.random(num_rounds), rng.random(num_rounds) < 0.5
    rows[0] = True
    numbers = np.random.default_rng(9).random((3, num_rounds))
    expected = [brute_force_ece(confidence[rows], (draw < confidence)[rows], 4) for draw in numbers]
    draws = ece.null_ece_draws(confidence, rows=rows, num_bins=4, seed=9, num_draws=3)
    assert draws.tolist() == pytest.approx(expected, abs=1e-12)
