"""Ranks that train a tiny drafter under DeepSpeed, in processes of their own: its state is global to a process.

`python -m tests.unit.training.engine_process FOLDER` runs as one rank or under torchrun and writes what it found to
FOLDER/found-<ranks>-<rank>.json. FOLDER/llama is the tiny target; an update has texts of different lengths.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from draftsmith.cache.reader import CachedSample
from draftsmith.drafters.dflash import DFlash
from draftsmith.errors import TrainingError
from draftsmith.nn.block import BlockBatch
from draftsmith.params import Dtype, Train
from draftsmith.training.batches import make_block_batch
from draftsmith.training.engine import StepResult, TrainEngine, prepare_process
from draftsmith.training.launch import remove_shared_memory
from draftsmith.training.loader import Planned, micro_batches
from tests.tiny_models import WEIGHTS, batch_shape, make_sample, random_ids, reference, tiny_drafter

SIZE, LR = 4, 1e-2
LENGTHS = (9, 31, 14, 22, 6, 40)
ONE_RANK = {"plain-6": (0, 6), "plain-4": (0, 4), "zero-6": (1, 6), "zero-1": (1, 1)}
"""Name of an update -> ZeRO stage and size of a micro-batch."""
NARROW = {f"bfloat16-{stage}": stage for stage in (0, 1, 2)}
"""Name of an update in bfloat16 -> ZeRO stage."""


def recipe(zero_stage: Literal[0, 1, 2], *, dtype: Dtype) -> Train:
    return Train(
        steps=10, global_batch=len(LENGTHS), micro_batch=len(LENGTHS), anchors=64, lr=LR, clip_norm=1e9,
        dtype=dtype, zero_stage=zero_stage, checkpoint_every=10, validate_every=10,
    )  # fmt: skip


def drafter_on(folder: Path, *, seed: int = 3) -> DFlash:
    return tiny_drafter("dspark", folder / "llama", seed=seed, block_size=SIZE)


def texts(folder: Path, *, first: int = 0) -> list[CachedSample]:
    """The samples of one update; `first` picks other texts of the same lengths."""
    model = reference(folder / "llama")
    return [
        make_sample(model, random_ids(num, seed=first + place), supervised=[0, 0] + [1] * (num - 2), name=f"s{place}")
        for place, num in enumerate(LENGTHS)
    ]


def share(samples: list[CachedSample], *, micro_batch: int, dtype: Dtype = "float32") -> list[BlockBatch]:
    """This rank's micro-batches of one update, by the loader's own cut."""
    cuts = micro_batches(
        [Planned(place, 0) for place in range(len(samples))],
        rank=int(os.environ["RANK"]), num_ranks=int(os.environ["WORLD_SIZE"]), micro_batch=micro_batch,
    )  # fmt: skip
    shape = batch_shape(block_size=SIZE, dtype=getattr(torch, dtype))
    return [make_block_batch([(samples[item.sample], 0) for item in cut], shape=shape, seed=1) for cut in cuts]


class Recorder:
    """Sums the gradients of an update: what autograd hands each parameter, over the micro-steps of this rank."""

    def __init__(self, drafter: DFlash) -> None:
        self.sums = {name: torch.zeros_like(value) for name, value in drafter.named_parameters()}
        for name, value in drafter.named_parameters():
            value.register_hook(partial(self._add, name))

    def _add(self, name: str, gradient: Tensor) -> None:
        """Returns nothing: what a hook returns would take the gradient's place."""
        self.sums[name] += gradient


def engine_for(
    drafter: DFlash, *, zero_stage: Literal[0, 1, 2], num_micro: int, folder: Path, dtype: Dtype = "float32"
) -> TrainEngine:
    """The first engine of a process joins the process group, the others find it."""
    rendezvous = f"file://{folder}/rendezvous-{os.environ['WORLD_SIZE']}"
    return TrainEngine(
        drafter,
        recipe=recipe(zero_stage, dtype=dtype),
        loss=WEIGHTS["dspark"],
        num_micro=num_micro,
        init_method=rendezvous,
    )


def one_update(folder: Path, samples: list[CachedSample], *, zero_stage: Any, micro_batch: int) -> dict[str, Any]:
    """One update from the same start: its result, the parameters behind it, and this rank's gradients."""
    batches, drafter = share(samples, micro_batch=micro_batch), drafter_on(folder)
    recorder = Recorder(drafter)
    engine = engine_for(drafter, zero_stage=zero_stage, num_micro=len(batches), folder=folder)
    result: StepResult = engine.update(batches, lr=LR, where="step 1")
    return {
        "result": vars(result),
        "slots": [batch.num_slots for batch in batches],
        "parameters": {name: value.detach().flatten().tolist() for name, value in drafter.named_parameters()},
        "gradients": {name: value.flatten().tolist() for name, value in recorder.sums.items()},
    }


def narrow_update(folder: Path, samples: list[CachedSample], *, zero_stage: Any) -> dict[str, list[float]]:
    """How far one update in bfloat16 moves each parameter."""
    batches, drafter = share(samples, micro_batch=4, dtype="bfloat16"), drafter_on(folder)
    drafter.shared = drafter.shared.to(dtype=torch.bfloat16, device=torch.device("cpu"))
    engine = engine_for(drafter, zero_stage=zero_stage, num_micro=2, folder=folder, dtype="bfloat16")
    before = {name: value.detach().float() for name, value in drafter.named_parameters()}
    engine.update(batches, lr=LR, where="step 1")
    return {
        name: (value.detach().float() - before[name]).flatten().tolist() for name, value in drafter.named_parameters()
    }


def errors(folder: Path) -> list[str]:
    """What a batch without anchors and a loss that is not finite say."""
    drafter, found = drafter_on(folder), list[str]()
    engine = engine_for(drafter, zero_stage=1, num_micro=1, folder=folder)
    empty, full = share([], micro_batch=1), share(texts(folder), micro_batch=6)
    for batches in (empty or [make_block_batch([], shape=batch_shape(block_size=SIZE), seed=1)], full):
        try:
            engine.update(batches, lr=LR, where="step 7")
            found.append("no error")
        except TrainingError as error:
            found.append(str(error))
        with torch.no_grad():
            drafter.norm.weight.fill_(float("nan"))
    return found


def resumed(folder: Path) -> dict[str, Any]:
    """Losses of five updates in one go; and of three, a checkpoint, and two more in an engine with another start."""
    steps = [share(texts(folder, first=10 * step), micro_batch=4) for step in range(5)]

    def fresh(seed: int) -> tuple[TrainEngine, DFlash]:
        drafter = drafter_on(folder, seed=seed)
        return engine_for(drafter, zero_stage=1, num_micro=2, folder=folder), drafter

    def losses(engine: TrainEngine, first: int, stop: int) -> list[float]:
        return [engine.update(steps[step], lr=LR / (step + 1), where="").loss for step in range(first, stop)]

    engine, drafter = fresh(seed=3)
    whole = losses(engine, 0, 5)
    engine, _ = fresh(seed=3)
    parts = losses(engine, 0, 3)
    engine.save(folder / "checkpoints", tag="step-000003", state={"step": 3, "run_id": "r"})
    engine, other = fresh(seed=99)
    state = engine.load(folder / "checkpoints", tag="step-000003")
    parts += losses(engine, 3, 5)
    try:
        engine.load(folder / "checkpoints", tag="step-000004")
        missing = "no error"
    except TrainingError as error:
        missing = str(error)
    same = all(torch.equal(a, b) for a, b in zip(drafter.parameters(), other.parameters(), strict=True))
    engine.close()
    kept = {name: state[name] for name in ("step", "run_id")}
    return {"whole": whole, "parts": parts, "same": same, "state": kept, "missing": missing}


def main(folder: Path) -> None:
    prepare_process(rank=0, num_ranks=1)
    torch.set_num_threads(1)
    samples = texts(folder)
    if os.environ["WORLD_SIZE"] == "1":
        found = {
            name: one_update(folder, samples, zero_stage=stage, micro_batch=size)
            for name, (stage, size) in ONE_RANK.items()
        }
        found |= {name: narrow_update(folder, samples, zero_stage=stage) for name, stage in NARROW.items()}
        found |= {"errors": errors(folder), "resumed": resumed(folder)}  # type: ignore[dict-item]
    else:
        found = {
            "zero-2": one_update(folder, samples, zero_stage=1, micro_batch=2),
            "few": one_update(folder, samples[5:], zero_stage=1, micro_batch=2),
            "plain-2": one_update(folder, samples, zero_stage=0, micro_batch=2),
        }
        torch.distributed.barrier()
    (folder / f"found-{os.environ['WORLD_SIZE']}-{os.environ['RANK']}.json").write_text(json.dumps(found))
    if os.environ["RANK"] == "0":
        remove_shared_memory(own=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
