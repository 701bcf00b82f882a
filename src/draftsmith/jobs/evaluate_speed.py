"""What speculative decoding gains on this machine: plain and speculative decoding alternate, size by size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from draftsmith.decoding.engine import EngineTimes, Request, StepTime
from draftsmith.errors import DraftsmithError
from draftsmith.evaluation.benchmarks import BenchmarkPrompt, load_benchmark
from draftsmith.evaluation.cells import MODES, Mode
from draftsmith.evaluation.decoded import SpeedPoint
from draftsmith.jobs.evaluate_cells import WARM_UP_TOKENS, Decoder, PlannedEvaluation
from draftsmith.params import Evaluate, Sampling
from draftsmith.text.answers import answer_id, sample_seed
from draftsmith.text.chat import ChatFormat


def speed_prompts(row: Evaluate, *, folder: Path | None) -> tuple[BenchmarkPrompt, ...]:
    """The prompts of the sweep, of which only first turns are asked; none without one. Raises PromptError."""
    if row.speed is None:
        return ()
    return tuple(load_benchmark(row.speed.benchmark, cap=row.speed.num_prompts, folder=folder))


def num_speed_answers(row: Evaluate) -> int:
    """How many answers the sweep decodes, the few tokens of its warm-ups not counted."""
    sizes = () if row.speed is None else row.speed.batch_sizes
    return sum(len(MODES) * len(row.temperatures) * _num_requests(row, size) for size in sizes)


def measure_speed(
    planned: PlannedEvaluation, *, decoder: Decoder, prompts: Sequence[BenchmarkPrompt],
    on_answers: Callable[[int], None],
) -> tuple[SpeedPoint, ...]:  # fmt: skip
    """A point for each temperature and batch size of the sweep; none without one.

    Plain and speculative decoding of the same requests follow each other, each after a few tokens of them that are not
    measured. `on_answers` is called with numbers of answers.
    """
    row, points = planned.row, []
    if row.speed is None:
        return ()
    for temperature in row.temperatures:
        for batch_size in row.speed.batch_sizes:
            requests = speed_requests(
                prompts, num=_num_requests(row, batch_size), chat=planned.chat,
                system_prompt=planned.place.row.system_prompt, temperature=temperature,
                max_new_tokens=row.speed.max_new_tokens, seed=row.seed,
            )  # fmt: skip
            few = min(WARM_UP_TOKENS, row.speed.max_new_tokens)
            times: dict[Mode, EngineTimes] = {}
            for mode in MODES:
                engine = decoder.engine(mode, batch_size=batch_size)
                engine.generate([replace(request, max_new_tokens=few) for request in requests[:batch_size]])
                engine.times = times[mode] = EngineTimes()
                engine.generate(requests, on_finish=lambda _: on_answers(1))
            points.append(
                speed_point(
                    times["speculative"].steps, plain=times["plain"].steps, batch_size=batch_size,
                    temperature=temperature,
                )
            )  # fmt: skip
    return tuple(points)


def speed_requests(
    prompts: Sequence[BenchmarkPrompt], *, num: int, chat: ChatFormat, system_prompt: str | None, temperature: float,
    max_new_tokens: int, seed: int,
) -> list[Request]:  # fmt: skip
    """`num` first turns; once the prompts are used up they come again, under other ids and so with other seeds."""
    sampling, requests = Sampling(temperature=temperature), []
    for index in range(num):
        prompt = prompts[index % len(prompts)]
        name = answer_id(f"{prompt.id}/{index // len(prompts)}", 0)
        ids = chat.prompt_ids(prompt.turns[:1], (), system_prompt=system_prompt)
        requests.append(Request(name, tuple(ids), max_new_tokens, sampling, sample_seed(seed, name)))
    return requests


def speed_point(
    steps: Sequence[StepTime], *, plain: Sequence[StepTime], batch_size: int, temperature: float
) -> SpeedPoint:
    """Rates over all steps, medians over those in which most requests were in flight.

    Raises DraftsmithError if the answers are too short to have a step.
    """
    if not steps or not plain:
        raise DraftsmithError(
            f"no step to measure at batch size {batch_size}, temperature {temperature:g}",
            got="answers of one token",
            expected="longer answers",
            where="params.yaml: evaluate.speed",
        )
    own_s, plain_s = (sum(step.total_s for step in run) for run in (steps, plain))
    full, plain_full = _fullest(steps), _fullest(plain)
    num_tokens, num_rounds = sum(step.num_committed for step in steps), sum(step.num_requests for step in steps)
    return SpeedPoint(
        batch_size=batch_size,
        temperature=temperature,
        num_tokens=num_tokens,
        num_rounds=num_rounds,
        num_steps=len(steps),
        tokens_per_s=num_tokens / own_s,
        rounds_per_s=num_rounds / own_s,
        steps_per_s=len(steps) / own_s,
        plain_tokens_per_s=sum(step.num_committed for step in plain) / plain_s,
        plain_steps_per_s=len(plain) / plain_s,
        draft_ms=1e3 * median(step.draft_s for step in full),
        verify_ms=1e3 * median(step.verify_s for step in full),
        sample_ms=1e3 * median(step.sample_s for step in full),
        plain_verify_ms=1e3 * median(step.verify_s for step in plain_full),
        plain_sample_ms=1e3 * median(step.sample_s for step in plain_full),
        step_ms=tuple(1e3 * step.total_s for step in full),
    )


def _fullest(steps: Sequence[StepTime]) -> list[StepTime]:
    most = max(step.num_requests for step in steps)
    return [step for step in steps if step.num_requests == most]


def _num_requests(row: Evaluate, batch_size: int) -> int:
    assert row.speed is not None
    return max(row.speed.num_prompts, batch_size)
