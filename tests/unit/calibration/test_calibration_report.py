"""The body of calibrate.json against sums by hand, and its series, figure and sidecar."""

from __future__ import annotations

import csv
import io
import json
import math
from typing import Any

import numpy as np
import pytest
from matplotlib.collections import LineCollection

from draftsmith.calibration.collect import RoundArrays, RoundSplit
from draftsmith.calibration.report import (
    calibration_body,
    not_applicable_body,
    reliability_csv,
    reliability_figure,
    share_interval,
    sts_sidecar,
)
from draftsmith.errors import CalibrationError
from draftsmith.figures import png_bytes


def logit(probability: float) -> float:
    return math.log(probability / (1 - probability))


def make_rounds(rows: list[tuple[float, float, int, int]]) -> RoundArrays:
    """Rows of (confidence 1, confidence 2, accepted, counted)."""
    return RoundArrays(
        logits=np.array([[logit(first), logit(second)] for first, second, _, _ in rows]),
        accepted=np.array([accepted for _, _, accepted, _ in rows]),
        counted=np.array([counted for _, _, _, counted in rows]),
        prompt=np.arange(len(rows)),
        prompt_ids=tuple(map(str, range(len(rows)))),
    )


HOLDOUT = make_rounds(
    [
        (0.9, 0.8, 2, 2),  # survivals .9, .72
        (0.9, 0.5, 1, 2),  # .9, .45
        (0.6, 0.8, 0, 2),  # .6, .48
        (0.6, 0.5, 1, 1),  # ended at slot 1
    ]
)
FIT = make_rounds([(0.5, 0.5, 1, 2)] * 3)


@pytest.fixture(scope="module")
def body() -> dict[str, Any]:
    return calibration_body(RoundSplit(FIT, HOLDOUT), temperatures=[2.0, 1.0], num_bins=2, seed=0)


def test_counts_name_both_parts(body: dict[str, Any]) -> None:
    assert (body["schema_version"], body["applicable"], body["block_size"]) == (1, True, 2)
    assert (body["num_rounds"], body["num_prompts"], body["num_fit_rounds"], body["num_fit_prompts"]) == (4, 4, 3, 3)
    assert body["num_counted"] == [4, 3]
    assert body["temperatures"] == [2.0, 1.0]


def test_before_by_hand(body: dict[str, Any]) -> None:
    # Slot 1, one bin: mean .75 against 3/4. Slot 2: (.72, 1) and (.45, 0) (.48, 0).
    assert body["ece_before"] == pytest.approx([0.0, (0.28 + 0.93) / 3], abs=1e-12)
    assert body["mean_ece_before"] == pytest.approx((0.28 + 0.93) / 6, abs=1e-12)
    brier = [(0.01 + 0.01 + 0.36 + 0.16) / 4, (0.28**2 + 0.45**2 + 0.48**2) / 3]
    assert body["brier_before"] == pytest.approx(brier, abs=1e-12)
    # Slot 1: accepted .9 .9 .6 against rejected .6: two of three pairs and a tie. Slot 2: .72 above both.
    assert body["auc_survival_before"] == pytest.approx([2.5 / 3, 1.0])


def test_after_by_hand(body: dict[str, Any]) -> None:
    # sigmoid(logit / 2) = sqrt(odds) / (1 + sqrt(odds)): odds 9 give 3/4, odds 3/2 give s.
    s = math.sqrt(1.5) / (1 + math.sqrt(1.5))
    assert body["ece_after"] == pytest.approx(
        [abs(2 * 0.75 + 2 * s - 3) / 4, (abs(0.75 * 0.8 - 1) + 0.75 * 0.5 + s * 0.8) / 3], abs=1e-12
    )


def test_auc_is_of_the_own_confidence_among_rounds_whose_prefix_survived(body: dict[str, Any]) -> None:
    # Slot 2 counts and slot 1 was accepted in the first two rounds only: .8 accepted above .5 rejected.
    assert body["auc"] == pytest.approx([2.5 / 3, 1.0])


def test_reliability_bins_by_hand(body: dict[str, Any]) -> None:
    low, high = body["reliability_before"][1]
    assert (low["count"], low["mean_confidence"], low["share_accepted"]) == (2, pytest.approx(0.465), 0.0)
    assert (high["count"], high["mean_confidence"], high["share_accepted"]) == (1, pytest.approx(0.72), 1.0)
    assert (low["low"], low["high"], high["high"]) == (0.0, 0.5, 1.0)


def test_null_by_enumeration(body: dict[str, Any]) -> None:
    # Slot 2: all outcomes of three rounds with survivals .72 | .45, .48, weighted by their probability.
    mean = 0.0
    for first in (0, 1):
        for second in (0, 1):
            for third in (0, 1):
                chance = math.prod(
                    p if happened else 1 - p for p, happened in ((0.72, first), (0.45, second), (0.48, third))
                )
                mean += chance * (abs(0.72 - first) + abs(0.93 - second - third)) / 3
    assert body["null_ece_before"][1] == pytest.approx(mean, abs=0.02)  # 1000 draws of deviation 0.15: 4 sigma
    assert body["null_ece_quantile_95_before"][1] >= body["null_ece_before"][1]


def test_null_of_the_mean_over_positions_follows_nested_prefixes() -> None:
    # Confidence 1 at slot 2 makes both prefixes the same event, so their errors move together and averaging does not
    # narrow them: the quantile of the mean is that of one position.
    rounds = make_rounds([(0.5, 1 - 1e-12, 1, 2)] * 50)
    body = calibration_body(RoundSplit(rounds, rounds), temperatures=[1.0, 1.0], num_bins=10, seed=0)
    assert body["null_mean_ece_quantile_95_before"] == pytest.approx(body["null_ece_quantile_95_before"][0], abs=1e-9)
    assert body["null_mean_ece_before"] == pytest.approx(np.mean(body["null_ece_before"]), abs=1e-12)


def test_only_held_out_rounds_are_measured(body: dict[str, Any]) -> None:
    other = calibration_body(
        RoundSplit(make_rounds([(0.1, 0.9, 0, 2)] * 9), HOLDOUT), temperatures=[2.0, 1.0], num_bins=2, seed=0
    )
    differing = {name for name in body if body[name] != other[name]}
    assert differing == {"num_fit_rounds", "num_fit_prompts"}


def test_one_class_and_no_data_are_null_in_json() -> None:
    rounds = make_rounds([(0.9, 0.5, 1, 1), (0.8, 0.5, 1, 1)])
    body = json.loads(
        json.dumps(calibration_body(RoundSplit(FIT, rounds), temperatures=[1.0, 1.0], num_bins=4, seed=0))
    )
    assert body["auc"] == [None, None]
    assert body["ece_before"] == [pytest.approx(0.15), None]
    assert body["reliability_after"][1] is None
    assert body["mean_ece_before"] == pytest.approx(0.15)


def test_not_applicable_has_the_same_fields_and_nulls(body: dict[str, Any]) -> None:
    other = not_applicable_body(7, reason="a dflash drafter has no confidence head")
    assert list(other) == list(body)
    filled = {name: value for name, value in other.items() if value is not None}
    assert filled == {
        "schema_version": 1,
        "applicable": False,
        "reason": "a dflash drafter has no confidence head",
        "block_size": 7,
    }


def test_sidecar_has_the_fields_that_sglang_reads(body: dict[str, Any]) -> None:
    assert sts_sidecar(body, dataset="calibration") == {
        "temperatures": [2.0, 1.0],
        "dataset": "calibration",
        "num_samples": 3,
        "ece_before": body["ece_before"],
        "ece_after": body["ece_after"],
    }


@pytest.mark.parametrize("broken", [0.0, -1.0, math.inf, math.nan])
def test_sidecar_refuses_temperatures_that_are_not_positive(body: dict[str, Any], broken: float) -> None:
    with pytest.raises(CalibrationError, match="temperatures must be positive"):
        sts_sidecar({**body, "temperatures": [1.0, broken]}, dataset="calibration")


def test_sidecar_without_a_confidence_head_is_refused() -> None:
    with pytest.raises(CalibrationError, match="no temperatures to export: got no head"):
        sts_sidecar(not_applicable_body(7, reason="no head"), dataset="calibration")


def test_series_hold_every_bin_with_rounds(body: dict[str, Any]) -> None:
    rows = list(csv.DictReader(io.StringIO(reliability_csv(body))))
    counts: dict[tuple[str, str], int] = {}
    for row in rows:
        place = row["position"], row["side"]
        counts[place] = counts.get(place, 0) + int(row["count"])
    assert counts == {("1", "before"): 4, ("1", "after"): 4, ("2", "before"): 3, ("2", "after"): 3}
    assert {(row["mean_confidence"], row["share_accepted"]) for row in rows if row["position"] == "1"} >= {
        ("0.75", "0.75")
    }


def test_series_without_a_confidence_head_are_a_header() -> None:
    assert reliability_csv(not_applicable_body(7, reason="no head")).count("\n") == 1


def test_figure_has_a_panel_a_position_and_equal_bytes(body: dict[str, Any]) -> None:
    figure = reliability_figure(body, title="Reliability")
    titles = [panel.get_title() for panel in figure.axes if panel.axison]
    assert titles == ["position 1: ECE 0.0 % to 10.0 %", "position 2: ECE 40.3 % to 40.5 %"]
    before = figure.axes[1].lines[1]
    assert before.get_xydata().tolist() == [[pytest.approx(0.465), 0.0], [pytest.approx(0.72), 1.0]]
    data = png_bytes(figure)
    assert data.startswith(b"\x89PNG")
    assert data == png_bytes(reliability_figure(body, title="Reliability"))


def test_bins_have_bars_of_their_interval(body: dict[str, Any]) -> None:
    panel = reliability_figure(body, title="Reliability").axes[1]
    bars = next(item for item in panel.collections if isinstance(item, LineCollection))
    before = bars.get_segments()
    low, high = share_interval(0.0, count=2)
    np.testing.assert_allclose(before[0], [[0.465, low], [0.465, high]], atol=1e-12)
    assert len(before) == 2


@pytest.mark.parametrize(("share", "count"), [(0.25, 8), (0.5, 100), (0.9, 30)])
def test_share_interval_ends_where_the_share_is_just_not_rejected(share: float, count: int) -> None:
    """Wilson's ends p solve |share - p| = 1.96 sqrt(p (1 - p) / n)."""
    for end in share_interval(share, count=count):
        assert abs(share - end) == pytest.approx(1.959963984540054 * math.sqrt(end * (1 - end) / count), rel=1e-9)


@pytest.mark.parametrize("count", [1, 5, 1000])
def test_share_interval_stays_within_0_and_1(count: int) -> None:
    spread = 1.959963984540054**2 / count
    ends = [*share_interval(0.0, count=count), *share_interval(1.0, count=count)]
    assert ends == pytest.approx([0.0, spread / (1 + spread), 1 / (1 + spread), 1.0], abs=1e-12)
    assert min(ends) >= 0
    assert max(ends) <= 1
