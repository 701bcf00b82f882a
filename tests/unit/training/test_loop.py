"""The loop's calendar with an engine that only counts: what is called when, and with which learning rate."""

from __future__ import annotations

from typing import Any

import pytest

from draftsmith.params import Train
from draftsmith.training import loop
from draftsmith.training.loop import Hooks, StepReport, train


class Calendar:
    """Stands for loader, engine and drafter, and notes what the loop asks of them."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.places: list[str] = []
        self.events: list[tuple[str, int]] = []

    def steps(self, first: int, *, stop: int) -> Any:
        return ((step, [step]) for step in range(first, stop))

    def update(self, batches: list[int], *, lr: float, where: str) -> str:
        self.rates.append(lr)
        self.places.append(where)
        return f"result {batches[0]}"

    def train(self) -> None:
        pass

    @property
    def hooks(self) -> Hooks:
        def on_step(report: StepReport) -> None:
            assert report.result == f"result {report.step - 1}"
            assert 0 <= report.data_wait_s <= report.step_s
            self.events.append(("step", report.step))

        return Hooks(
            on_step=on_step,
            on_validation=lambda step, found: self.events.append((str(found), step)),
            on_checkpoint=lambda step: self.events.append(("checkpoint", step)),
        )


@pytest.fixture
def validated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []

    def validate(drafter: Any, *, batches: list[str], engine: Any) -> str:
        calls.append(batches[0])
        return f"validation {len(calls)}"

    monkeypatch.setattr(loop, "validate", validate)
    return calls


def run(calendar: Calendar, *, first_step: int) -> Any:
    recipe = Train(
        steps=7,
        global_batch=1,
        micro_batch=1,
        anchors=1,
        lr=2.0,
        warmup_share=0.25,
        checkpoint_every=3,
        validate_every=2,
    )
    stand_in: Any = calendar
    return train(
        stand_in,
        engine=stand_in,
        loader=stand_in,
        held_out=["held out"],
        recipe=recipe,
        first_step=first_step,  # type: ignore[list-item]
        hooks=calendar.hooks,
    )


def test_the_calendar_of_seven_updates(validated: list[str]) -> None:
    """Validation every second, checkpoint every third, both at the end; validation before the checkpoint."""
    calendar = Calendar()
    assert run(calendar, first_step=0) == "validation 4"
    assert calendar.events == [
        ("step", 1),
        ("step", 2), ("validation 1", 2),
        ("step", 3), ("checkpoint", 3),
        ("step", 4), ("validation 2", 4),
        ("step", 5),
        ("step", 6), ("validation 3", 6), ("checkpoint", 6),
        ("step", 7), ("validation 4", 7), ("checkpoint", 7),
    ]  # fmt: skip
    assert calendar.rates[:2] == [1.0, 2.0]  # a warm-up of two updates
    assert calendar.places[-1] == "step 7"
    assert validated == ["held out"] * 4


def test_a_resumed_run_keeps_to_the_calendar(validated: list[str]) -> None:
    whole, rest = Calendar(), Calendar()
    run(whole, first_step=0)
    run(rest, first_step=3)
    assert rest.rates == whole.rates[3:]
    assert [event[1] for event in rest.events if event[0] == "checkpoint"] == [6, 7]


def test_a_run_that_was_finished_is_validated_alone(validated: list[str]) -> None:
    calendar = Calendar()
    assert run(calendar, first_step=7) == "validation 1"
    assert calendar.events == []
