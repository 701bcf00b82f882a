"""The running estimate: what it converges to, what it forgets, what it leaves alone."""

from __future__ import annotations

import numpy as np
import pytest

from draftsmith.calibration.collect import RoundArrays, RoundSplit
from draftsmith.calibration.domains import domain_calibrations
from draftsmith.calibration.online import OnlineTemperatures, online_report
from draftsmith.calibration.sts import fit_temperatures, temperature_grid
from draftsmith.errors import CalibrationError

GRID, NUM_BINS = temperature_grid(0.2, high=5.0, num_points=60), 10


def rounds(num: int, *, heats: list[float], seed: int, prompts: int = 10, first: int = 0) -> RoundArrays:
    """Logits that are `heats` [K] times too large; prompts one after the other."""
    rng = np.random.default_rng(seed)
    truth = rng.normal(scale=1.5, size=(num, len(heats)))
    accepted = (rng.random(truth.shape) < 1 / (1 + np.exp(-truth))).cumprod(axis=1).sum(axis=1)
    prompt = np.arange(num) * prompts // num
    ids = tuple(f"p{first + place}" for place in range(prompts))
    return RoundArrays(truth * heats, accepted, np.full(num, len(heats)), prompt, ids)


def running(**how: float) -> OnlineTemperatures:
    return OnlineTemperatures(2, grid=GRID, num_bins=NUM_BINS, **{"half_life": 1e12, **how})  # type: ignore[arg-type]


def feed(estimate: OnlineTemperatures, told: RoundArrays, *, size: int = 64) -> None:
    for start in range(0, told.num_rounds, size):
        part = slice(start, start + size)
        estimate.update(told.logits[part], accepted=told.accepted[part], counted=told.counted[part])


def test_one_update_without_forgetting_is_the_offline_fit() -> None:
    """To the digit: the same sums, position by position."""
    told = rounds(3000, heats=[2.0, 0.5], seed=0)
    estimate = running()
    feed(estimate, told, size=3000)
    offline = fit_temperatures(told.logits, accepted=told.accepted, counted=told.counted, grid=GRID, num_bins=NUM_BINS)
    assert estimate.temperatures.tolist() == offline.tolist()


def test_many_updates_come_near_the_truth() -> None:
    estimate = running()
    feed(estimate, rounds(20_000, heats=[2.0, 0.5], seed=1))
    assert estimate.temperatures == pytest.approx([2.0, 0.5], rel=0.15)


def test_it_forgets_what_is_no_longer_so() -> None:
    """Overconfident by 3 for long, then right: a short memory follows, a long one does not yet."""
    before, after = rounds(12_000, heats=[3.0, 3.0], seed=2), rounds(4_000, heats=[1.0, 1.0], seed=3)
    short, long = running(half_life=500), running()
    for estimate in (short, long):
        feed(estimate, before)
        assert estimate.temperatures[0] == pytest.approx(3.0, rel=0.2)
        feed(estimate, after)
    assert short.temperatures[0] == pytest.approx(1.0, rel=0.25)
    assert long.temperatures[0] > 1.5


def test_a_position_keeps_its_start_until_it_has_seen_enough() -> None:
    told = rounds(150, heats=[3.0, 3.0], seed=4)
    estimate = running(least_rounds=200)
    feed(estimate, told)
    assert estimate.temperatures.tolist() == [1.0, 1.0]
    feed(estimate, rounds(100, heats=[3.0, 3.0], seed=5))
    assert estimate.temperatures[0] > 1.5
    started = OnlineTemperatures(2, grid=GRID, num_bins=NUM_BINS, half_life=10, start=[0.7, 0.9])
    first_slot = RoundArrays(told.logits, np.minimum(told.accepted, 1), np.ones(150, int), told.prompt, told.prompt_ids)
    for _ in range(3):
        feed(started, first_slot)
    assert started.temperatures[0] != 0.7
    assert started.temperatures[1] == 0.9, "a slot that was never verified"


def test_the_report_tells_when_the_offline_fit_is_stale() -> None:
    """Held-out rounds are of two domains with other heats than the fit: the running estimate is nearer."""
    fit = rounds(6000, heats=[2.0, 2.0], seed=6)
    parts = [rounds(6000, heats=[0.5, 0.5], seed=7), rounds(6000, heats=[2.0, 2.0], seed=8, first=10)]
    held = RoundArrays(
        np.concatenate([part.logits for part in parts]), np.concatenate([part.accepted for part in parts]),
        np.concatenate([part.counted for part in parts]), np.concatenate([parts[0].prompt, parts[1].prompt + 10]),
        parts[0].prompt_ids + parts[1].prompt_ids,
    )  # fmt: skip
    report = online_report(
        fit, holdout=held, offline=[2.0, 2.0], grid=GRID, num_bins=NUM_BINS, half_life=500,
        domains=["code"] * 10 + ["chat"] * 10, seed=0,
    )  # fmt: skip
    assert report["drift"]["order"] == ["chat", "code"]
    assert report["drift"]["mean_ece_online"] < 0.6 * report["drift"]["mean_ece_offline"]
    same = online_report(
        fit, holdout=parts[1], offline=[2.0, 2.0], grid=GRID, num_bins=NUM_BINS, half_life=3000,
        domains=["chat"] * 10, seed=0,
    )["stationary"]  # fmt: skip
    assert same["mean_ece_online"] < same["mean_ece_offline"] + 0.01 < same["mean_ece_raw"]


@pytest.mark.parametrize("half_life", [0.0, -1.0, float("nan"), float("inf")])
def test_a_half_life_that_cannot_be(half_life: float) -> None:
    with pytest.raises(CalibrationError, match="the half-life of a running calibration"):
        OnlineTemperatures(2, grid=GRID, num_bins=NUM_BINS, half_life=half_life)


def test_a_start_of_another_size() -> None:
    with pytest.raises(CalibrationError, match="temperatures to start from"):
        OnlineTemperatures(3, grid=GRID, num_bins=NUM_BINS, half_life=10, start=[1.0, 1.0])


# By domain


def test_each_domain_is_fitted_on_its_own_rounds() -> None:
    """Code is overconfident by 3, chat underconfident: their own temperatures beat the common ones."""
    hot, cold = (
        [rounds(3000, heats=[heat] * 2, seed=seed, first=first) for seed, first in ((9, place), (10, place + 100))]
        for heat, place in ((3.0, 0), (0.5, 1000))
    )

    def both(part: int) -> RoundArrays:
        one, two = hot[part], cold[part]
        return RoundArrays(
            np.concatenate([one.logits, two.logits]), np.concatenate([one.accepted, two.accepted]),
            np.concatenate([one.counted, two.counted]), np.concatenate([one.prompt, two.prompt + 10]),
            one.prompt_ids + two.prompt_ids,
        )  # fmt: skip

    split = RoundSplit(both(0), both(1))
    domain_of = {name: "code" if int(name[1:]) < 1000 else "chat" for part in (0, 1) for name in both(part).prompt_ids}
    how = {"common": [1.2, 1.2], "grid": GRID, "num_bins": NUM_BINS, "seed": 0}
    found = domain_calibrations(split, domain_of=domain_of, min_rounds=100, **how)  # type: ignore[arg-type]
    assert list(found) == ["chat", "code"]
    assert found["code"]["temperatures"][0] == pytest.approx(3.0, rel=0.2)
    assert found["chat"]["temperatures"][0] == pytest.approx(0.5, rel=0.2)
    for item in found.values():
        assert item["mean_ece_own"] < 0.5 * item["mean_ece_common"]
        assert (item["num_rounds"], item["num_prompts"]) == (3000, 10)
    with pytest.raises(CalibrationError, match=r"too few fitting chat rounds .* about \d+ calibration prompts"):
        domain_calibrations(split, domain_of=domain_of, min_rounds=5000, **how)  # type: ignore[arg-type]
