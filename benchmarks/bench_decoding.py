"""Speed of decoding: evaluation against a loop over prompts, plain decoding against Hugging Face's `generate`, the
loop's own share of a round, and how near a round comes to its matrix products alone.

Needs the trained drafter of `make run`; for machines without a GPU. Both sides of a figure are measured in one process.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rows import write_row
from usual_decoding import OneByOne, generate_padded, load_model, load_plain_drafter

from draftsmith.decoding.engine import Engine, EngineTimes, Request, StepTime
from draftsmith.drafters.base import Drafter
from draftsmith.evaluation.benchmarks import load_benchmark
from draftsmith.jobs.parts import OpenTarget, open_drafter, open_target
from draftsmith.nn.packed import PackedMatrix
from draftsmith.params import Params, Sampling, load_params
from draftsmith.paths import Workspace
from draftsmith.targets.families import FAMILIES

KEY = "dspark_b7_2l-smollm2_135m"
COMMAND = "make run && .venv/bin/python benchmarks/bench_decoding.py"
NUM_PROMPTS, NUM_TOKENS, NUM_BASELINE_PROMPTS = 64, 128, 8
EVALUATION_BATCH, BATCH = 32, 16
REPEATS = 3
STEP_TOKENS = 32  # of the runs whose steps are looked at
SAMPLINGS = {"t0": Sampling(temperature=0.0), "t1": Sampling(temperature=1.0)}


@dataclass(frozen=True)
class Opened:
    """What every figure starts from; prompts [64] as token ids."""

    target: OpenTarget
    drafter: Drafter
    prompts: list[list[int]]

    def engine(self, *, batch_size: int, speculative: bool = True, ends: bool = True) -> Engine:
        drafter = self.drafter if speculative else None
        end_ids = self.target.chat.end_ids if ends else ()
        return Engine(self.target.target, drafter=drafter, end_ids=end_ids, batch_size=batch_size)

    def requests(self, count: int, *, num_tokens: int, sampling: Sampling) -> list[Request]:
        return [
            Request(str(place), tuple(prompt), num_tokens, sampling, seed=place)
            for place, prompt in enumerate(self.prompts[:count])
        ]


def open_all(workspace: Workspace, params: Params) -> Opened:
    opened = open_target(workspace, params, params.run(KEY).target)
    system_prompt = opened.place.row.system_prompt
    prompts = [
        list(opened.chat.prompt_ids(item.turns[:1], [], system_prompt=system_prompt))
        for item in load_benchmark("humaneval", cap=NUM_PROMPTS)
    ]
    return Opened(opened, open_drafter(workspace, params, KEY, opened=opened), prompts)


def against_one_by_one(workspace: Workspace, opened: Opened, model: Any) -> None:
    """Ours on all 64 prompts, the loop on every eighth of them; the rate counts every token written."""
    place = opened.target.place
    drafter = load_plain_drafter(
        workspace.drafter_dir(KEY), target_folder=place.folder, family=FAMILIES[place.row.family], dtype=model.dtype
    )
    loop = OneByOne(model, drafter=drafter, end_ids=opened.target.chat.end_ids)
    loop.write(opened.prompts[:1], max_new_tokens=8)
    usual = loop.write(opened.prompts[:: NUM_PROMPTS // NUM_BASELINE_PROMPTS], max_new_tokens=NUM_TOKENS)
    engine = opened.engine(batch_size=EVALUATION_BATCH)
    engine.generate(opened.requests(2, num_tokens=8, sampling=SAMPLINGS["t0"]))
    started = time.perf_counter()
    found = engine.generate(opened.requests(NUM_PROMPTS, num_tokens=NUM_TOKENS, sampling=SAMPLINGS["t0"]))
    rate = sum(len(item.token_ids) for item in found) / (time.perf_counter() - started)
    lengths = [
        (usual.num_tokens - len(usual.answers)) / usual.num_rounds,
        sum(one.committed for item in found for one in item.rounds) / sum(len(item.rounds) for item in found),
    ]
    write_row(
        "decoding_against_one_by_one", ours=rate, baseline=usual.tokens_per_s, unit="tokens/s", bound=">= 4.0",
        command=COMMAND, note=f"{NUM_PROMPTS} HumanEval prompts to {NUM_TOKENS} tokens, temperature 0, batch "
        f"{EVALUATION_BATCH}; baseline: Hugging Face caches, batch 1, same drafter, {NUM_BASELINE_PROMPTS} of the "
        f"prompts; accepted length {lengths[1]:.3f} against {lengths[0]:.3f}",
    )  # fmt: skip


def against_generate(opened: Opened, model: Any) -> None:
    """Plain greedy decoding of 16 prompts to exactly 128 tokens each, three times in turn; medians."""
    requests = opened.requests(BATCH, num_tokens=NUM_TOKENS, sampling=SAMPLINGS["t0"])
    engine = opened.engine(batch_size=BATCH, speculative=False, ends=False)
    generate_padded(model, opened.prompts[:2], num_tokens=4)
    engine.generate(requests[:1])
    ours, usual = [], []
    for _ in range(REPEATS):
        usual.append(generate_padded(model, opened.prompts[:BATCH], num_tokens=NUM_TOKENS).tokens_per_s)
        started = time.perf_counter()
        found = engine.generate(requests)
        ours.append(sum(len(item.token_ids) for item in found) / (time.perf_counter() - started))
    write_row(
        "plain_decoding_against_generate", ours=statistics.median(ours), baseline=statistics.median(usual),
        unit="tokens/s", bound=">= 1.0", command=COMMAND,
        note=f"batch {BATCH}, {NUM_TOKENS} tokens each, temperature 0, prefill included; medians of {REPEATS}",
    )  # fmt: skip


def full_steps(opened: Opened, *, batch_size: int, sampling: Sampling) -> list[StepTime]:
    """Steps with `batch_size` requests in flight, past the first ones."""
    engine = opened.engine(batch_size=batch_size, ends=False)
    requests = opened.requests(batch_size, num_tokens=STEP_TOKENS, sampling=sampling)
    engine.generate(requests[:1])
    engine.times = EngineTimes()
    engine.generate(requests)
    return [step for step in engine.times.steps[2:] if step.num_requests == batch_size]


def loop_overhead(opened: Opened) -> None:
    """What of a round is spent outside the forward passes of target and drafter."""
    for name, sampling in SAMPLINGS.items():
        steps = full_steps(opened, batch_size=BATCH, sampling=sampling)
        write_row(
            f"decoding_overhead_{name}", ours=statistics.median(step.sample_s for step in steps) * 1e3,
            baseline=statistics.median(step.total_s for step in steps) * 1e3, unit="ms a round", bound="<= 0.15",
            command=COMMAND,
            note=f"batch {BATCH}, medians of {len(steps)} rounds; sampling, acceptance, upkeep of rows, Python",
        )  # fmt: skip


class Products:
    """Records the matrix products of what runs inside, to run them alone afterwards."""

    def __init__(self) -> None:
        self.made: list[tuple[PackedMatrix, torch.Tensor]] = []
        self._multiply: Callable[..., torch.Tensor] = PackedMatrix.multiply

    def __enter__(self) -> Products:
        products = self

        def recorded(matrix: PackedMatrix, rows: torch.Tensor, *, bias: torch.Tensor | None = None) -> torch.Tensor:
            products.made.append((matrix, rows))
            return products._multiply(matrix, rows, bias=bias)

        PackedMatrix.multiply = recorded  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *_: object) -> None:
        PackedMatrix.multiply = self._multiply  # type: ignore[method-assign]

    def seconds(self, made: Sequence[tuple[PackedMatrix, torch.Tensor]]) -> float:
        with torch.inference_mode():
            started = time.perf_counter()
            for matrix, rows in made:
                self._multiply(matrix, rows)
            return time.perf_counter() - started


def share_of_ideal(opened: Opened) -> None:
    """The matrix products of a round alone, over the whole round; medians, at temperature 0."""
    for batch_size in (1, BATCH):
        engine = opened.engine(batch_size=batch_size, ends=False)
        session = engine.session()
        for request in opened.requests(batch_size, num_tokens=STEP_TOKENS, sampling=SAMPLINGS["t0"]):
            session.submit(request)
        for _ in range(3):
            session.step()
        whole, alone = [], []
        while not session.is_idle and session.num_live == batch_size:
            with Products() as products:
                session.step()
            whole.append(engine.times.steps[-1].total_s)
            alone.append(products.seconds(products.made))
        write_row(
            f"decoding_share_of_ideal_batch_{batch_size}", ours=statistics.median(alone) * 1e3,
            baseline=statistics.median(whole) * 1e3, unit="ms a round", bound=">= 0.0", command=COMMAND,
            note=f"matrix products of target and drafter alone over the whole round; {len(whole)} rounds, no bound set",
        )  # fmt: skip


def main() -> None:
    workspace = Workspace.find()
    params = load_params(workspace.params)
    opened = open_all(workspace, params)
    model = load_model(opened.target.place.folder, dtype=opened.target.target.dtype)
    loop_overhead(opened)
    share_of_ideal(opened)
    against_generate(opened, model)
    against_one_by_one(workspace, opened, model)


if __name__ == "__main__":
    main()
