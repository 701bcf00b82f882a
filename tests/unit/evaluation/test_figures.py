"""What figures draw, read back from matplotlib's artists."""

from __future__ import annotations

from typing import Any

import pytest

from draftsmith.errors import DraftsmithError
from draftsmith.evaluation.figures import (
    Curve,
    accepted_length_figure,
    conditional_acceptance_figure,
    loss_figure,
    output_position_figure,
    speed_figure,
    threshold_figure,
)
from draftsmith.evaluation.summary import KeyReports
from draftsmith.figures import png_bytes
from tests.unit.evaluation.evaluations import body_of, body_of_lengths, make_decoded, make_point

DSPARK, DFLASH = "dspark-tiny", "dflash-tiny"
SWEEP = [
    {"temperature": 0.0, "threshold": 0.0, "num_rounds": 4, "verified": 8, "accepted": 4, "rejected": 4,
     "acceptance_rate": 0.5, "accepted_length": 2.0},
    {"temperature": 0.0, "threshold": 0.5, "num_rounds": 4, "verified": 4, "accepted": 3, "rejected": 1,
     "acceptance_rate": 0.75, "accepted_length": 1.75},
    {"temperature": 0.0, "threshold": 0.95, "num_rounds": 4, "verified": 0, "accepted": 0, "rejected": 0,
     "acceptance_rate": None, "accepted_length": 1.0},
]  # fmt: skip


@pytest.fixture
def reports() -> list[KeyReports]:
    ours = body_of(
        DSPARK,
        [make_decoded("humaneval", [[2, 2], [2, 2]]), make_decoded("gsm8k", [[2, 1], [1, 0]])],
        speed=[make_point(4, tokens_per_s=100.0), make_point(1)],
    )
    theirs = body_of_lengths(DFLASH, {"gsm8k": [[0, 1], [1, 0]]})
    return [
        KeyReports(DSPARK, None, None, {**ours, "thresholds": SWEEP}),
        KeyReports(DFLASH, None, None, theirs),
        KeyReports("mtp1-tiny", None, None, None),
    ]


def lines(panel: Any) -> dict[str, Any]:
    return {line.get_label(): line for line in panel.get_lines() if not line.get_label().startswith("_")}


def test_accepted_length_draws_each_key_at_each_benchmark(reports: list[KeyReports]) -> None:
    figure = accepted_length_figure(reports, temperature=0.0)
    panel = figure.axes[0]
    assert [label.get_text() for label in panel.get_xticklabels()] == ["gsm8k", "humaneval"]
    assert [bar.get_height() for bar in panel.patches] == [2.0, 3.0, 1.5]
    assert set(panel.get_legend_handles_labels()[1]) == {DSPARK, DFLASH, "plain decoding"}
    assert png_bytes(figure).startswith(b"\x89PNG")


def test_conditional_acceptance_draws_a_panel_a_benchmark(reports: list[KeyReports]) -> None:
    figure = conditional_acceptance_figure(reports, temperature=0.0)
    assert [panel.get_title() for panel in figure.axes] == ["gsm8k", "humaneval"]
    drawn = lines(figure.axes[0])
    assert drawn[DSPARK].get_ydata().tolist() == pytest.approx([0.75, 1 / 3])
    assert drawn[DFLASH].get_ydata().tolist() == pytest.approx([0.5, 0.0])
    assert png_bytes(figure).startswith(b"\x89PNG")


def test_output_positions_stand_in_the_middle_of_their_bins(reports: list[KeyReports]) -> None:
    long = body_of_lengths("long", {"gsm8k": [[2] * 12, [0] * 20]})
    figure = output_position_figure([KeyReports("long", None, None, long), *reports], temperature=0.0)
    panel = figure.axes[0]
    assert [label.get_text() for label in panel.get_xticklabels()] == ["0-15", "16-31", "32-63"]
    assert panel.get_xticks().tolist() == [8.0, 24.0, 48.0]
    drawn = lines(panel)
    assert list(drawn["long"].get_xdata()) == [8.0, 24.0, 48.0]
    # Six rounds of 3 and sixteen of 1 begin before token 16, five and four before 32, one after.
    assert list(drawn["long"].get_ydata()) == pytest.approx([(6 * 3 + 16) / 22, (5 * 3 + 4) / 9, 3.0])
    assert list(drawn[DFLASH].get_ydata()) == [1.5]
    assert png_bytes(figure).startswith(b"\x89PNG")


def test_thresholds_draw_tokens_a_round_and_rates(reports: list[KeyReports]) -> None:
    figure = threshold_figure(reports, temperature=0.0)
    counts, rates = figure.axes
    drawn = lines(counts)
    assert drawn.keys() == {f"{DSPARK}: accepted", f"{DSPARK}: rejected"}
    assert list(drawn[f"{DSPARK}: accepted"].get_ydata()) == [1.0, 0.75, 0.0]
    assert list(drawn[f"{DSPARK}: rejected"].get_ydata()) == [1.0, 0.25, 0.0]
    assert list(lines(rates)[DSPARK].get_xdata()) == [0.0, 0.5]  # at 0.95 nothing was verified
    assert list(lines(rates)[DSPARK].get_ydata()) == [0.5, 0.75]
    assert png_bytes(figure).startswith(b"\x89PNG")


def test_speed_draws_batch_sizes_in_order(reports: list[KeyReports]) -> None:
    figure = speed_figure(reports)
    [panel] = figure.axes
    assert panel.get_title() == "temperature 0"
    assert [label.get_text() for label in panel.get_xticklabels()] == ["1", "4"]
    assert list(lines(panel)[DSPARK].get_xdata()) == [1, 4]
    assert list(lines(panel)[DSPARK].get_ydata()) == [60.0, 100.0]
    [plain] = [line for line in panel.get_lines() if line.get_label() == "_plain"]
    assert list(plain.get_ydata()) == [40.0, 40.0]
    assert png_bytes(figure).startswith(b"\x89PNG")


def test_what_was_not_measured_is_not_drawn(reports: list[KeyReports]) -> None:
    for draw in (accepted_length_figure, conditional_acceptance_figure, output_position_figure, threshold_figure):
        with pytest.raises(DraftsmithError, match=r"nothing was evaluated at this temperature: got 0.5"):
            draw(reports, temperature=0.5)
    with pytest.raises(DraftsmithError, match="no speed was measured"):
        speed_figure(reports[1:])


def test_equal_figures_are_equal_files(reports: list[KeyReports]) -> None:
    first, second = (png_bytes(accepted_length_figure(reports, temperature=0.0)) for _ in range(2))
    assert first == second


def test_loss_draws_every_curve() -> None:
    figure = loss_figure(
        [Curve("loss", [1, 2, 3], [3.0, 2.0, 1.5]), Curve("validation", [2], [2.5])], title="Training of a key"
    )
    drawn = {line.get_label(): line.get_ydata().tolist() for line in figure.axes[0].lines}
    assert drawn == {"loss": [3.0, 2.0, 1.5], "validation": [2.5]}
