"""One rank that trains a tiny drafter under DeepSpeed, in a process of its own: its state is global to a process.

`python -m tests.unit.training.engine_process TASK FOLDER` writes FOLDER/TASK-rank.json. The samples of an update are
`NUM_SAMPLES` texts of different lengths; FOLDER/llama is the tiny target.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.drafters.dflash import DFlash
from draftsmith.errors import TrainingError
from draftsmith.nn.block import BlockBatch
from draftsmith.params import Train
from draftsmith.training.engine import StepResult, TrainEngine, prepare_process
from draftsmith.training.launch import remove_shared_memory
from draftsmith.training.loader import Planned, make_block_batch, micro_batches
from tests.tiny_models import WEIGHTS, batch_shape, make_sample, random_ids, reference, tiny_drafter

NUM_SAMPLES, SIZE = 6, 4
LENGTHS = (9, 31, 14, 22, 6, 40)
STAGE = {"plain": 0, "zero": 1, "ranks": 1, "few": 1, "resume": 1}


def recipe(task: str) -> Train:
    return Train(
        steps=10, global_batch=NUM_SAMPLES, micro_batch=NUM_SAMPLES, anchors=64, lr=1e-2, clip_norm=1e9,
        dtype="float32", zero_stage=STAGE[task], checkpoint_every=10, validate_every=10,
    )  # fmt: skip


def drafter_on(folder: Path) -> DFlash:
    return tiny_drafter("dspark", folder / "llama", seed=3, block_size=SIZE)


def texts(folder: Path, *, first: int = 0) -> list[Any]:
    """Samples with an epoch each; `first` picks other texts of the same lengths."""
    model = reference(folder / "llama")
    return [
        (make_sample(model, random_ids(num, seed=first + place), supervised=[0, 0] + [1] * (num - 2), name=f"s{place}"), 0)
        for place, num in enumerate(LENGTHS)
    ]


def share(samples: list[Any], *, rank: int, num_ranks: int, micro_batch: int) -> list[BlockBatch]:
    """This rank's micro-batches of one update, by the loader's own cut."""
    planned = [Planned(place, 0) for place in range(len(samples))]
    cuts = micro_batches(planned, rank=rank, num_ranks=num_ranks, micro_batch=micro_batch)
    shape = batch_shape(block_size=SIZE)
    return [make_block_batch([samples[item.sample] for item in cut], shape=shape, seed=1) for cut in cuts]


class Recorder:
    """Sums the gradients of an update: what autograd hands each parameter, over the micro-steps of this rank."""

    def __init__(self, drafter: DFlash) -> None:
        self.sums = {name: torch.zeros_like(value) for name, value in drafter.named_parameters()}
        for name, value in drafter.named_parameters():
            value.register_hook(lambda grad, name=name: self.sums[name].add_(grad))

    def take(self) -> dict[str, Tensor]:
        found = {name: value.clone() for name, value in self.sums.items()}
        for value in self.sums.values():
            value.zero_()
        return found


def engine_for(drafter: DFlash, *, task: str, num_micro: int, folder: Path) -> TrainEngine:
    port_file = folder / f"rendezvous-{task}"
    return TrainEngine(
        drafter, recipe=recipe(task), loss=WEIGHTS["dspark"], num_micro=num_micro, init_method=f"file://{port_file}"
    )


def one_update(task: str, folder: Path, *, micro_batch: int, samples: list[Any], state: dict[str, Any]) -> tuple[StepResult, DFlash]:  # fmt: skip
    """One update from the same start; gradients (of this rank's share) go to `state`."""
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    batches = share(samples, rank=rank, num_ranks=num_ranks, micro_batch=micro_batch)
    drafter = drafter_on(folder)
    recorder = Recorder(drafter)
    engine = engine_for(drafter, task=task, num_micro=len(batches), folder=folder)
    result = engine.update(batches, lr=1e-2, where=lambda: "step 1")
    state["gradients"] = recorder.take()
    state["engine"] = engine
    return result, drafter


def described(result: StepResult, drafter: DFlash, gradients: dict[str, Tensor]) -> dict[str, Any]:
    return {
        "result": vars(result),
        "parameters": {name: value.detach().flatten().tolist() for name, value in drafter.named_parameters()},
        "gradients": {name: value.flatten().tolist() for name, value in gradients.items()},
    }


def run_updates(task: str, folder: Path) -> dict[str, Any]:
    """One update each with micro-batches of 6, of 4 and 2, and of single samples."""
    found = {}
    for micro_batch in (6, 4, 1):
        state: dict[str, Any] = {}
        result, drafter = one_update(task, folder, micro_batch=micro_batch, samples=texts(folder), state=state)
        found[str(micro_batch)] = described(result, drafter, state["gradients"])
    engine: TrainEngine = state["engine"]
    if task == "plain":
        found["errors"] = errors_of(engine, drafter)
    engine.close()
    return found


def run_few(folder: Path) -> dict[str, Any]:
    """A global batch of one sample: with two ranks the second one has none."""
    state: dict[str, Any] = {}
    result, drafter = one_update("few", folder, micro_batch=6, samples=texts(folder)[5:], state=state)
    state["engine"].close()
    return described(result, drafter, state["gradients"])


def errors_of(engine: TrainEngine, drafter: DFlash) -> list[str]:
    """What a batch without anchors and a loss that is not finite say."""
    texts_of = []
    empty = make_block_batch([], shape=batch_shape(block_size=SIZE), seed=1)
    for batches in ([empty] * 6, None):
        if batches is None:
            with torch.no_grad():
                drafter.norm.weight.fill_(float("nan"))
            batches = [batch for batch in _LAST for _ in range(6)]
        try:
            engine.update(batches, lr=1e-2, where=lambda: "step 7")
            texts_of.append("no error")
        except TrainingError as error:
            texts_of.append(str(error))
    return texts_of


_LAST: list[BlockBatch] = []


def run_resume(folder: Path) -> dict[str, Any]:
    """Losses of five updates in one go, and of three, a checkpoint, and two more in a fresh engine."""
    steps = [share(texts(folder, first=10 * step), rank=0, num_ranks=1, micro_batch=4) for step in range(5)]

    def fresh(seed: int) -> tuple[TrainEngine, DFlash]:
        drafter = tiny_drafter("dspark", folder / "llama", seed=seed, block_size=SIZE)
        return engine_for(drafter, task="resume", num_micro=2, folder=folder), drafter

    def losses(engine: TrainEngine, first: int, stop: int) -> list[float]:
        return [engine.update(steps[step], lr=1e-2 / (step + 1), where=lambda: "").loss for step in range(first, stop)]

    engine, drafter = fresh(seed=3)
    whole = losses(engine, 0, 5)
    engine, other = fresh(seed=3)
    parts = losses(engine, 0, 3)
    engine.save(folder / "checkpoints", tag="step-000003", state={"step": 3, "run_id": "r"})
    engine, other = fresh(seed=99)  # another start, which the checkpoint must cover wholly
    state = engine.load(folder / "checkpoints", tag="step-000003")
    parts += losses(engine, 3, 5)
    try:
        engine.load(folder / "checkpoints", tag="step-000004")
        missing = "no error"
    except TrainingError as error:
        missing = str(error)
    engine.close()
    same = all(torch.equal(a, b) for a, b in zip(drafter.parameters(), other.parameters(), strict=True))
    return {"whole": whole, "parts": parts, "same": same, "state": {"step": state["step"], "run_id": state["run_id"]}, "missing": missing}  # fmt: skip


def main(task: str, folder: Path) -> None:
    prepare_process(rank=0, num_ranks=1)
    torch.set_num_threads(1)
    if task == "plain":
        _LAST.extend(share(texts(folder)[5:], rank=0, num_ranks=1, micro_batch=1))
    found = run_few(folder) if task == "few" else run_resume(folder) if task == "resume" else run_updates(task, folder)
    (folder / f"{task}-{os.environ['WORLD_SIZE']}-{os.environ['RANK']}.json").write_text(json.dumps(found))
    if os.environ["RANK"] == "0":
        remove_shared_memory(own=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
