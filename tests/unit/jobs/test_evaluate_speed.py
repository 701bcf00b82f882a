"""The speed sweep: what is measured of which steps, in which order. Where figures are checked, clocks are made up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from draftsmith.decoding.engine import EngineTimes, Request, StepTime
from draftsmith.decoding.rounds import Generation
from draftsmith.errors import DraftsmithError
from draftsmith.evaluation.cells import Mode
from draftsmith.jobs.evaluate_cells import Decoder, planned_evaluation
from draftsmith.jobs.evaluate_speed import (
    measure_speed,
    num_speed_answers,
    speed_point,
    speed_prompts,
    speed_requests,
)
from tests.evaluate_job import DSPARK, Evaluation, evaluation, evaluation_source

__all__ = ["evaluation", "evaluation_source"]

SPEED = {"benchmark": "mt_bench", "batch_sizes": [1, 2, 5], "num_prompts": 2, "max_new_tokens": 12}
# Requests, tokens of the pass, committed tokens, seconds of draft, verification, the rest: by hand.
STEPS = [
    StepTime(2, 10, 7, 0.010, 0.030, 0.002),
    StepTime(2, 10, 4, 0.014, 0.032, 0.004),
    StepTime(2, 10, 3, 0.011, 0.040, 0.003),
    StepTime(1, 5, 2, 0.005, 0.020, 0.001),
]
PLAIN = [StepTime(2, 2, 2, 0.0, 0.025, 0.001)] * 6 + [StepTime(1, 1, 1, 0.0, 0.015, 0.001)] * 5


def test_rates_are_of_all_steps_and_medians_of_the_full_ones() -> None:
    point = speed_point(STEPS, plain=PLAIN, batch_size=2, temperature=1.0)
    own_s = 0.042 + 0.050 + 0.054 + 0.026
    assert (point.num_tokens, point.num_rounds, point.num_steps) == (16, 7, 4)
    assert point.tokens_per_s == pytest.approx(16 / own_s)
    assert point.rounds_per_s == pytest.approx(7 / own_s)
    assert point.steps_per_s == pytest.approx(4 / own_s)
    plain_s = 6 * 0.026 + 5 * 0.016
    assert point.plain_tokens_per_s == pytest.approx(17 / plain_s)
    assert point.plain_steps_per_s == pytest.approx(11 / plain_s)
    assert (point.draft_ms, point.verify_ms, point.sample_ms) == pytest.approx((11.0, 32.0, 3.0))
    assert (point.plain_verify_ms, point.plain_sample_ms) == pytest.approx((25.0, 1.0))
    assert point.step_ms == pytest.approx((42.0, 50.0, 54.0))
    assert point.speedup == pytest.approx((16 / own_s) / (17 / plain_s))
    assert point.overhead_share == pytest.approx(3 / 46)
    assert (point.batch_size, point.temperature) == (2, 1.0)


def test_where_the_batch_was_never_full_the_fullest_steps_count() -> None:
    point = speed_point(STEPS, plain=PLAIN, batch_size=4, temperature=0.0)
    assert point.step_ms == pytest.approx((42.0, 50.0, 54.0))
    assert speed_point(STEPS[3:], plain=PLAIN, batch_size=4, temperature=0.0).verify_ms == pytest.approx(20.0)


@pytest.mark.parametrize(("steps", "plain"), [([], PLAIN), (STEPS, [])])
def test_answers_of_one_token_have_no_speed(steps: list[StepTime], plain: list[StepTime]) -> None:
    with pytest.raises(
        DraftsmithError, match=r"batch size 3, temperature 0\.5: got answers of one token.*evaluate\.speed"
    ):
        speed_point(steps, plain=plain, batch_size=3, temperature=0.5)


def test_prompts_come_again_under_other_ids_and_seeds(evaluation: Evaluation) -> None:
    params = evaluation.params(speed=SPEED)
    planned = planned_evaluation(evaluation.workspace, params, DSPARK)
    prompts = speed_prompts(params.evaluate, folder=evaluation.root / "benchmarks")
    assert [prompt.id for prompt in prompts] == ["mt_bench/0", "mt_bench/1"]
    found = speed_requests(
        prompts, num=5, chat=planned.chat, system_prompt=None, temperature=0.5, max_new_tokens=12, seed=6
    )
    assert len({item.request_id for item in found}) == len({item.seed for item in found}) == 5
    first, second = (
        tuple(planned.chat.prompt_ids([text], (), system_prompt=None)) for text in ("name three rivers.", "say abc")
    )
    assert [item.prompt_ids for item in found] == [first, second, first, second, first]
    assert {(item.max_new_tokens, item.sampling.temperature, item.sampling.top_p) for item in found} == {(12, 0.5, 1.0)}
    again = speed_requests(
        prompts, num=2, chat=planned.chat, system_prompt=None, temperature=0.5, max_new_tokens=12, seed=6
    )
    assert again == found[:2]
    other = speed_requests(
        prompts, num=2, chat=planned.chat, system_prompt=None, temperature=0.5, max_new_tokens=12, seed=7
    )
    assert {item.seed for item in other}.isdisjoint(item.seed for item in again)


@dataclass
class FakeEngine:
    """Writes down what it is asked; its clock says how many tokens each request may have."""

    mode: Mode
    batch_size: int
    log: list[Any]
    times: EngineTimes = field(default_factory=EngineTimes)

    def generate(self, requests: Sequence[Request], *, on_finish: Any = None) -> list[Generation]:
        self.log.append((self.mode, self.batch_size, len(requests), requests[0].max_new_tokens,
                         requests[0].sampling.temperature))  # fmt: skip
        num = len(requests) * requests[0].max_new_tokens
        seconds = 1.0 if self.mode == "plain" else 0.25
        self.times.steps.append(StepTime(self.batch_size, num, num, 0.0, seconds, 0.0))
        found = [Generation(item.request_id, (1,), (False,), "length", ()) for item in requests]
        for item in found:
            if on_finish is not None:
                on_finish(item)
        return found


def test_plain_and_speculative_decoding_alternate_after_a_warm_up(evaluation: Evaluation) -> None:
    params = evaluation.params(speed=SPEED)
    planned = planned_evaluation(evaluation.workspace, params, DSPARK)
    log: list[Any] = []

    class Fake(Decoder):
        def engine(self, mode: Mode, *, batch_size: int) -> Any:
            return FakeEngine(mode, batch_size, log)

    told: list[int] = []
    prompts = speed_prompts(params.evaluate, folder=evaluation.root / "benchmarks")
    points = measure_speed(planned, decoder=Fake(planned), prompts=prompts, on_answers=told.append)
    assert log == [
        asked
        for temperature in (0.0, 1.0)
        for batch_size, warm, num in ((1, 1, 2), (2, 2, 2), (5, 5, 5))
        for mode in ("plain", "speculative")
        for asked in ((mode, batch_size, warm, 8, temperature), (mode, batch_size, num, 12, temperature))
    ]
    assert [(point.temperature, point.batch_size) for point in points] == [
        (0.0, 1), (0.0, 2), (0.0, 5), (1.0, 1), (1.0, 2), (1.0, 5),
    ]  # fmt: skip
    # The warm-up's tokens and seconds are in no figure.
    assert [point.num_tokens for point in points] == [2 * 12, 2 * 12, 5 * 12] * 2
    assert {point.speedup for point in points} == {4.0}
    assert sum(told) == num_speed_answers(params.evaluate) == 2 * 2 * (2 + 2 + 5)


def test_the_real_engine_is_measured(evaluation: Evaluation) -> None:
    params = evaluation.params(speed={**SPEED, "batch_sizes": [1, 3]}, temperatures=[1.0])
    planned = planned_evaluation(evaluation.workspace, params, DSPARK)
    prompts = speed_prompts(params.evaluate, folder=evaluation.root / "benchmarks")
    one, three = measure_speed(planned, decoder=Decoder(planned), prompts=prompts, on_answers=lambda _: None)
    for point, num in ((one, 2), (three, 3)):
        # Every token but that of the prefill, none of the warm-up's.
        assert num <= point.num_tokens <= num * 11
        assert point.num_rounds <= point.num_tokens <= 5 * point.num_rounds
        assert point.num_steps <= point.num_rounds <= point.batch_size * point.num_steps
        assert 0 < point.draft_ms < sum(point.step_ms)
        assert point.plain_verify_ms > 0
        assert point.plain_tokens_per_s > 0
        assert len(point.step_ms) <= point.num_steps
    assert one.num_rounds == one.num_steps == len(one.step_ms)


def test_without_a_sweep_nothing_is_measured(evaluation: Evaluation) -> None:
    params = evaluation.params()
    planned = planned_evaluation(evaluation.workspace, params, DSPARK)
    assert speed_prompts(params.evaluate, folder=None) == ()
    assert num_speed_answers(params.evaluate) == 0
    assert measure_speed(planned, decoder=Decoder(planned), prompts=(), on_answers=lambda _: None) == ()
