"""Sequential temperature scaling against a slow search, known temperatures and the rules of ties and population."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.calibration import ece, sts
from draftsmith.errors import CalibrationError

GRID = sts.temperature_grid(0.2, high=5.0, num_points=200)


def first_failures(rng: np.random.Generator, confidence: np.ndarray) -> np.ndarray:
    """Accepted prefix lengths [N]: tokens pass one after the other with probability `confidence` [N, K]."""
    failed = rng.random(confidence.shape) >= confidence
    return np.where(failed.any(axis=1), failed.argmax(axis=1), confidence.shape[1])


def slow_ece(pairs: list[tuple[float, bool]], num_bins: int) -> float:
    bins: dict[int, list[tuple[float, bool]]] = {}
    for predicted, happened in pairs:
        bins.setdefault(min(int(predicted * num_bins), num_bins - 1), []).append((predicted, happened))
    return sum(abs(math.fsum(p for p, _ in group) - sum(y for _, y in group)) for group in bins.values()) / len(pairs)


def slow_fit(
    logits: np.ndarray, accepted: np.ndarray, counted: np.ndarray, grid: list[float], num_bins: int
) -> list[float]:
    """Scalar loops over the definition."""
    found: list[float] = []
    for k in range(1, logits.shape[1] + 1):
        scored = []
        for candidate in grid:
            pairs = []
            for row, num_accepted, num_counted in zip(logits, accepted, counted, strict=True):
                if num_counted < k:
                    continue
                product = math.prod(1 / (1 + math.exp(-z / t)) for z, t in zip(row, [*found, candidate], strict=False))
                pairs.append((min(max(product, 1e-8), 1 - 1e-8), num_accepted >= k))
            scored.append((slow_ece(pairs, num_bins), candidate))
        best = min(error for error, _ in scored)
        found.append(min((t for error, t in scored if error <= best + 1e-12), key=lambda t: (abs(t - 1), t)))
    return found


def test_grid_is_log_spaced_from_low_to_high_with_one_in_it() -> None:
    assert len(GRID) == 201
    assert 1.0 in GRID
    others = GRID[GRID != 1.0]
    assert (others[0], others[-1]) == pytest.approx((0.2, 5.0), rel=1e-15)
    assert np.diff(np.log(others)) == pytest.approx(np.full(199, math.log(25) / 199), rel=1e-9)


def test_grid_with_an_odd_number_of_points_holds_one_once() -> None:
    grid = sts.temperature_grid(0.25, high=4.0, num_points=5)
    assert grid == pytest.approx([0.25, 0.5, 1.0, 2.0, 4.0], rel=1e-12)
    assert grid[2] == 1.0


@pytest.mark.parametrize(
    ("low", "high", "num_points"), [(2.0, 5.0, 10), (0.2, 0.5, 10), (0.0, 5.0, 10), (1.0, 1.0, 10)]
)
def test_grid_that_does_not_enclose_one_is_refused(low: float, high: float, num_points: int) -> None:
    with pytest.raises(CalibrationError, match=r"grid_low <= 1 <= grid_high"):
        sts.temperature_grid(low, high=high, num_points=num_points)


def test_grid_of_one_point_is_refused() -> None:
    with pytest.raises(CalibrationError, match=r"too few points.*got 1, expected >= 2.*grid_points"):
        sts.temperature_grid(0.2, high=5.0, num_points=1)


def test_survival_by_hand() -> None:
    # sigmoid(ln 3) = 3/4; sigmoid(2 ln 4 / 2) = 4/5.
    values = sts.survival([[math.log(3), 2 * math.log(4)]], [1.0, 2.0])
    assert values[0] == pytest.approx([0.75, 0.6], rel=1e-14)


def test_survival_is_clamped_and_takes_extreme_logits() -> None:
    assert sts.survival([[1e6, -1e6], [-1e6, 0.0]], [0.2, 0.2]).tolist() == [[1 - 1e-8, 1e-8], [1e-8, 1e-8]]


@given(st.lists(st.floats(-50, 50), min_size=1, max_size=7), st.floats(0.2, 5))
def test_survival_never_rises_with_the_position(logits: list[float], temperature: float) -> None:
    values = sts.survival([logits], np.full(len(logits), temperature))[0]
    assert (np.diff(values) <= 0).all()
    assert values[0] == pytest.approx(min(max(1 / (1 + math.exp(-logits[0] / temperature)), 1e-8), 1 - 1e-8), rel=1e-12)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000))
def test_fit_equals_the_slow_search(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0.5, 2.0, size=(60, 3))
    accepted = first_failures(rng, 1 / (1 + np.exp(-logits / 1.7)))
    counted = np.where((accepted > 0) & (rng.random(60) < 0.2), accepted, 3)
    grid = [0.2, 0.5, 0.8, 1.0, 1.3, 1.7, 2.5, 5.0]
    fitted = sts.fit_temperatures(logits, accepted=accepted, counted=counted, grid=grid, num_bins=10)
    assert fitted.tolist() == slow_fit(logits, accepted, counted, grid, 10)


def test_fit_does_not_depend_on_the_chunk_size(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(100, 2))
    accepted = first_failures(rng, 1 / (1 + np.exp(-logits)))
    arguments = {"accepted": accepted, "counted": np.full(100, 2), "grid": GRID, "num_bins": 20}
    whole = sts.fit_temperatures(logits, **arguments)
    monkeypatch.setattr(ece, "CHUNK_ELEMENTS", 700)
    assert sts.fit_temperatures(logits, **arguments).tolist() == whole.tolist()


def test_a_miscalibrated_predictor_gets_its_temperatures_back() -> None:
    # Real acceptance probabilities 1/4, 1/2, 3/4 at each of three slots: 64 rounds of each of the 27 combinations hold
    # every prefix in exact proportion, so the true temperatures have no calibration error at all.
    true, rounds = np.array([2.0, 0.5, 3.0]), []
    for quarters in itertools.product((1, 2, 3), repeat=3):
        honest = [math.log(part / (4 - part)) for part in quarters]
        reached = [64, *(64 * math.prod(quarters[:k]) // 4**k for k in (1, 2, 3)), 0]
        for length in range(4):
            rounds += [(honest, length)] * (reached[length] - reached[length + 1])
    logits = np.array([honest for honest, _ in rounds]) * true
    fitted = sts.fit_temperatures(
        logits,
        accepted=[length for _, length in rounds],
        counted=[3] * len(rounds),
        grid=np.unique(np.append(GRID, true)),
        num_bins=20,
    )
    assert fitted.tolist() == true.tolist()


def test_fit_lowers_the_error_on_other_rounds() -> None:
    rng = np.random.default_rng(3)
    honest = rng.normal(0.5, 1.5, size=(20_000, 5))
    accepted = first_failures(rng, 1 / (1 + np.exp(-honest)))
    logits, half = 2.2 * honest, slice(0, 10_000)
    fitted = sts.fit_temperatures(
        logits[half], accepted=accepted[half], counted=np.full(10_000, 5), grid=GRID, num_bins=20
    )
    for slot in range(5):
        before, after = (
            slow_ece(list(zip(sts.survival(logits[10_000:], t)[:, slot], accepted[10_000:] > slot, strict=True)), 20)
            for t in (np.ones(5), fitted)
        )
        assert after < before / 2


def test_where_every_temperature_is_as_good_the_result_is_one() -> None:
    # Logit 0 stays 1/2 at every temperature; huge logits stay at the clamp.
    logits = np.array([[0.0, 1e4]] * 6)
    fitted = sts.fit_temperatures(logits, accepted=[0, 2, 2, 0, 2, 1], counted=[2] * 6, grid=GRID, num_bins=20)
    assert fitted.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("grid", "nearest"), [([0.5, 0.9, 1.2, 2.0], 0.9), ([0.3, 1.6, 3.0], 1.6), ([0.75, 1.25], 0.75)]
)
def test_ties_go_to_the_temperature_nearest_one_then_to_the_smaller(grid: list[float], nearest: float) -> None:
    fitted = sts.fit_temperatures(np.zeros((4, 1)), accepted=[0, 1, 1, 1], counted=[1] * 4, grid=grid, num_bins=20)
    assert fitted.tolist() == [nearest]


def test_slots_past_an_accepted_end_of_text_are_no_evidence() -> None:
    # 40 rounds say that a logit of 2 at slot 2 is honest at T = 1 (88 % survive); 40 more end on an accepted
    # end-of-text at slot 1. Taken as rejections at slot 2, these would halve the share and pull T far up.
    logits = np.array([[50.0, 2.0]] * 80)
    accepted = np.array([2] * 35 + [1] * 5 + [1] * 40)
    grid = [0.5, 1.0, 2.0, 5.0]
    ended = sts.fit_temperatures(logits, accepted=accepted, counted=[2] * 40 + [1] * 40, grid=grid, num_bins=20)
    rejected = sts.fit_temperatures(logits, accepted=accepted, counted=[2] * 80, grid=grid, num_bins=20)
    assert ended.tolist() == [1.0, 1.0]
    assert rejected.tolist() == [1.0, 5.0]


def test_later_slots_of_rounds_that_end_early_change_nothing() -> None:
    rng = np.random.default_rng(5)
    logits = rng.normal(size=(300, 3))
    accepted = first_failures(rng, 1 / (1 + np.exp(-logits)))
    ended = (accepted == 1) & (rng.random(300) < 0.5)
    counted = np.where(ended, 1, 3)
    other = logits.copy()
    other[ended, 1:] = 9.0
    first, second = (
        sts.fit_temperatures(values, accepted=accepted, counted=counted, grid=GRID, num_bins=20)
        for values in (logits, other)
    )
    assert first.tolist() == second.tolist()


@given(st.integers(0, 10_000), st.floats(0.2, 5))
def test_scaling_leaves_the_auc_of_a_position_as_it_is(seed: int, temperature: float) -> None:
    rng = np.random.default_rng(seed)
    logits, outcome = rng.normal(0, 3, size=40).clip(-6, 6).round(1), rng.random(40) < 0.5  # further out all are 1.0
    scaled = sts.confidence(logits, temperatures=temperature)
    assert ece.roc_auc(scaled, outcome=outcome) == ece.roc_auc(logits, outcome=outcome)


def test_logits_that_are_not_finite_are_refused() -> None:
    with pytest.raises(CalibrationError, match="must be finite: got 1 that are not"):
        sts.fit_temperatures([[math.nan, 0.0]], accepted=[0], counted=[2], grid=GRID, num_bins=20)


def test_a_slot_without_rounds_is_refused() -> None:
    with pytest.raises(CalibrationError, match="got none that counts at slot 2"):
        sts.fit_temperatures([[0.0, 0.0]], accepted=[1], counted=[1], grid=GRID, num_bins=20)
