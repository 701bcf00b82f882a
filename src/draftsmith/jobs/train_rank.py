"""One rank of a training run: `python -m draftsmith.jobs.train_rank --key KEY` under torchrun, or called in process."""

from __future__ import annotations

import argparse
import csv
import io
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

import draftsmith
from draftsmith.cache.reader import CacheReader
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.contract import CAPTURE_CONVENTION, Contract
from draftsmith.drafters.dspark import DSpark
from draftsmith.drafters.registry import build_drafter, drafter_config, save_drafter, start_from_target
from draftsmith.drafters.start import start_markov_head
from draftsmith.errors import ContractError, DraftsmithError, TrainingError
from draftsmith.evaluation.figures import Curve, loss_figure
from draftsmith.jobs.parts import TargetFolder, device_name, target_folder
from draftsmith.jobs.progress import progress
from draftsmith.jobs.stores import cache_manifest, workspace_store
from draftsmith.manifest import Manifest, hash8, json_digest, sha256_hex, write_bytes, write_json
from draftsmith.nn.block import BlockBatch, candidate_anchors
from draftsmith.params import Params, Train, load_params
from draftsmith.paths import Workspace
from draftsmith.storage import Store
from draftsmith.targets.base import load_shared
from draftsmith.targets.families import FAMILIES
from draftsmith.tracking import StageRun, stage_run
from draftsmith.training.batches import BatchShape, bf16_tensor, make_block_batch
from draftsmith.training.checkpoint import CheckpointStore, tag_of
from draftsmith.training.engine import TrainEngine, prepare_process
from draftsmith.training.launch import remove_shared_memory
from draftsmith.training.loader import StepLoader, num_micro_batches
from draftsmith.training.loop import Hooks, StepReport, train
from draftsmith.training.validation import Validation

CODE = ("nn", "drafters", "training")
CURVE_FIELDS = ("step", "loss", "ce", "tv", "bce", "lr", "grad_norm", "acceptance_1")


def run_rank(workspace: Workspace, params: Params, key: str, *, rank: int, num_ranks: int, init_method: str) -> None:
    """Train as one of `num_ranks` ranks; rank 0 writes checkpoints, reports and the drafter."""
    prepare_process(rank=rank, num_ranks=num_ranks)
    run = params.run(key)
    recipe, row = params.train_of(key), params.drafters[run.drafter]
    store, manifest = workspace_store(workspace), cache_manifest(workspace, run.target)
    reader = CacheReader(store, manifest)
    place = target_folder(workspace, params, run.target)
    _check_cache(manifest, place)
    config = drafter_config(row, target=place.row, target_folder=place.folder)
    dtype = getattr(torch, recipe.dtype)
    shared = load_shared(place.folder, family=FAMILIES[place.row.family]).to(
        dtype=dtype, device=torch.device(device_name())
    )
    drafter = build_drafter(config, target_folder=place.folder, shared=shared)
    drafter.reset(seed=recipe.seed)
    members, held_out = _members(reader, recipe)
    if recipe.init == "target_layers":
        _start_from_target(drafter, reader, members, place=place)
    shape = BatchShape(
        config.block_size, recipe.anchors, recipe.gamma_w, dtype, torch.device(device_name()),
        (len(config.capture_layers), config.geometry.hidden_size), recipe.row_tokens, drafter.reads_last_hidden,
    )  # fmt: skip
    num_micro = num_micro_batches(recipe.global_batch, num_ranks=num_ranks, micro_batch=recipe.micro_batch)
    engine = TrainEngine(drafter, recipe=recipe, loss=row.loss, num_micro=num_micro, init_method=init_method)
    loader = StepLoader(
        reader, members=members, shape=shape, size=recipe.global_batch, micro_batch=recipe.micro_batch,
        seed=recipe.seed, rank=rank, num_ranks=num_ranks,
    )  # fmt: skip
    batches = _held_out(reader, held_out, recipe=recipe, shape=shape, rank=rank, num_ranks=num_ranks)
    identity = {
        "code": code_digest(),
        "drafter": row.model_dump(),
        "train": recipe.model_dump(exclude={"checkpoint_every", "keep_checkpoints", "validate_every"}),
        "target": place.digest,
        "cache": manifest.digest,
        "num_ranks": num_ranks,
    }
    checkpoints = CheckpointStore(store, f"train/{key}-{hash8(identity)}")
    session = _Session(workspace, params, key, recipe, place, manifest, engine, checkpoints, store)
    session.run(drafter, loader=loader, held_out=batches)
    engine.close()
    if rank == 0:
        remove_shared_memory(own=True)


def code_digest() -> str:
    """sha256 over the sources that a training run's result depends on: other code never resumes its checkpoints."""
    root = Path(draftsmith.__file__).parent
    files = [path for folder in CODE for path in sorted((root / folder).glob("*.py"))]
    return json_digest([[path.name, sha256_hex(path.read_bytes())] for path in files])


class _Session:
    """Resume, watch and finish one run; the loop itself is `training.loop.train`."""

    def __init__(
        self, workspace: Workspace, params: Params, key: str, recipe: Train, place: TargetFolder,
        manifest: Manifest, engine: TrainEngine, checkpoints: CheckpointStore, store: Store,
    ) -> None:  # fmt: skip
        self.workspace, self.params, self.key, self.recipe = workspace, params, key, recipe
        self.place, self.manifest, self.engine = place, manifest, engine
        self.checkpoints, self.store = checkpoints, store
        self.folder = workspace.scratch_dir("train", key) / "checkpoints"
        self.curve: list[dict[str, float]] = []
        self.trained_s = 0.0
        self.counts = {"tokens": 0, "anchors": 0, "slots": 0, "data_wait_s": 0.0}
        self.validations: list[dict[str, Any]] = []

    @property
    def is_first(self) -> bool:
        return self.engine.rank == 0

    def run(self, drafter: Drafter, *, loader: StepLoader, held_out: list[BlockBatch]) -> None:
        first_step, run_id = self._resume()
        row = self.params.drafters[self.params.run(self.key).drafter]
        tags = {
            "target": self.place.name,
            "drafter": self.params.run(self.key).drafter,
            "data_digest": self.manifest.digest,
            "resumed_from_step": str(first_step),
        }
        opened: AbstractContextManager[StageRun | None] = nullcontext()
        if self.is_first:
            opened = stage_run(
                "train", self.key, workspace=self.workspace, tags=tags, system_metrics=True, resume_run_id=run_id,
                params={**self.recipe.model_dump(), "drafter": row.model_dump()},
            )  # fmt: skip
        bar: AbstractContextManager[Callable[[int], None]] = nullcontext(lambda _: None)
        if self.is_first:
            bar = progress(f"train@{self.key}", total=self.recipe.steps, unit="steps")
        with opened as tracked, bar as advance:
            advance(first_step)
            if tracked is not None:
                uri = f"{self.store.uri}/{self.manifest.prefix}"
                tracked.log_dataset(uri=uri, digest=self.manifest.digest, name=self.manifest.prefix, context="training")

            def on_step(report: StepReport) -> None:
                self._on_step(report, tracked)
                advance(1)

            hooks = Hooks(
                on_step=on_step,
                on_validation=lambda step, found: self._on_validation(step, found, tracked),
                on_checkpoint=lambda step: self._save(step, tracked),
            )
            found = train(
                drafter, engine=self.engine, loader=loader, held_out=held_out, recipe=self.recipe,
                first_step=first_step, hooks=hooks,
            )  # fmt: skip
            if self.is_first:
                self._finish(drafter, found, tracked)

    def _resume(self) -> tuple[int, str | None]:
        """Load the newest whole checkpoint, if any; a broken one is said and the one before is taken."""
        for step in reversed(self.checkpoints.steps()):
            problem = torch.zeros(1, dtype=torch.float64)
            if self.is_first:
                try:
                    self.checkpoints.fetch(step, folder=self.folder)
                except DraftsmithError as error:
                    sys.stderr.write(f"checkpoint {tag_of(step)} is left out: {error}\n")
                    problem += 1
            if self.engine.sum(problem).item():
                continue
            state = self.engine.load(self.folder, tag=tag_of(step))
            self.curve, self.validations = state["curve"], state["validations"]
            self.counts, self.trained_s = state["counts"], state["trained_s"]
            return step, state["run_id"]
        return 0, None

    def _save(self, step: int, tracked: StageRun | None) -> None:
        if tracked is not None:
            tracked.flush()
        state = {
            "step": step,
            "run_id": None if tracked is None else tracked.run_id,
            "curve": self.curve,
            "validations": self.validations,
            "counts": self.counts,
            "trained_s": self.trained_s,
        }
        self.engine.save(self.folder, tag=tag_of(step), state=state)
        self.engine.barrier()
        if self.is_first:
            self.checkpoints.publish(self.folder, step=step, keep=self.recipe.keep_checkpoints)
        self.engine.barrier()

    def _on_step(self, report: StepReport, tracked: StageRun | None) -> None:
        result = report.result
        values = {
            "loss": result.loss, "ce": result.ce, "tv": result.tv, "bce": result.bce, "lr": report.lr,
            "grad_norm": result.grad_norm, "acceptance_1": result.acceptance[0],
        }  # fmt: skip
        self.curve.append({"step": report.step, **values})
        self.trained_s += report.step_s
        self.counts["tokens"] += result.num_tokens
        self.counts["anchors"] += result.num_anchors
        self.counts["slots"] += result.num_slots
        self.counts["data_wait_s"] += report.data_wait_s
        if tracked is not None:
            acceptance = {f"acceptance_{k + 1}": value for k, value in enumerate(result.acceptance)}
            rates = {
                "tokens_per_s": result.num_tokens / report.step_s,
                "anchors_per_s": result.num_anchors / report.step_s,
                "slots_per_s": result.num_slots / report.step_s,
                "data_wait_s": report.data_wait_s,
            }
            tracked.log_metrics({**values, **acceptance, **rates}, step=report.step)

    def _on_validation(self, step: int, found: Validation, tracked: StageRun | None) -> None:
        self.validations.append({"step": step, "expected_accepted_length": found.expected_accepted_length})
        if tracked is not None:
            values = {"validation_expected_accepted_length": found.expected_accepted_length}
            values |= {f"validation_acceptance_{k + 1}": value for k, value in enumerate(found.acceptance)}
            values |= {f"validation_confidence_bias_{k + 1}": v for k, v in enumerate(found.confidence_bias or ())}
            tracked.log_metrics(values, step=step)

    def _finish(self, drafter: Drafter, found: Validation, tracked: StageRun | None) -> None:
        """Write drafter, contract and report; the drafter's weights are written last."""
        folder, report = self.workspace.drafter_dir(self.key), self.workspace.report_dir(self.key)
        facts = self.manifest.facts
        shared, target = drafter.shared, self.place.row
        Contract(
            target=self.place.name,
            target_digest=self.place.digest,
            tokenizer_digest=facts["tokenizer_digest"],
            capture_convention=CAPTURE_CONVENTION,
            capture_layers=target.capture_layers,
            block_size=drafter.config.block_size,
            sample_from_anchor=drafter.config.sample_from_anchor,
            mask_token_id=target.mask_token_id,
            rope={"family": target.family, "head_size": drafter.config.geometry.head_size},
            logit_softcap=shared.logit_softcap,
            embedding_scale=shared.embedding_scale,
            shared=("embed_tokens", "lm_head"),
            data_digest=facts["data_digest"],
            cache_digest=self.manifest.digest,
            params_digest=json_digest(self.recipe.model_dump()),
        ).write(folder)
        body = {
            "schema_version": 1,
            "key": self.key,
            "steps": self.recipe.steps,
            "init": self.recipe.init,
            "num_ranks": self.engine.num_ranks,
            "loss": self.curve[-1]["loss"],
            "expected_accepted_length": found.expected_accepted_length,
            "acceptance": list(found.acceptance),
            "confidence_bias": None if found.confidence_bias is None else list(found.confidence_bias),
            "num_validation_blocks": found.num_blocks,
            "validations": self.validations,
            "seconds": round(self.trained_s, 1),
            "tokens_per_s": round(self.counts["tokens"] / self.trained_s, 1),
            "slots_per_s": round(self.counts["slots"] / self.trained_s, 1),
            "data_wait_share": round(self.counts["data_wait_s"] / self.trained_s, 4),
        }
        write_bytes(report / "train_curve.csv", self._curve_csv())
        if tracked is not None:
            points = {name: [line[name] for line in self.curve] for name in ("loss", "ce", "tv")}
            steps = [int(line["step"]) for line in self.curve]
            curves = [Curve(name, steps, values) for name, values in points.items()]
            tracked.log_figure(loss_figure(curves, title=f"Training of {self.key}"), "loss.png")
            tracked.log_json(body, "train.json")
        write_json(report / "train.json", body)
        save_drafter(drafter, folder=folder, dtype=torch.bfloat16)

    def _curve_csv(self) -> bytes:
        text = io.StringIO()
        writer = csv.DictWriter(text, CURVE_FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: f"{line[name]:.6g}" for name in CURVE_FIELDS} for line in self.curve)
        return text.getvalue().encode()


def _check_cache(manifest: Manifest, place: TargetFolder) -> None:
    expected = {
        "target_digest": place.digest,
        "capture_convention": CAPTURE_CONVENTION,
        "capture_layers": list(place.row.capture_layers),
    }
    for name, value in expected.items():
        if manifest.facts.get(name) != value:
            raise ContractError(
                f"the cache {manifest.prefix} was made with another {name}",
                got=manifest.facts.get(name),
                expected=value,
                where=f"dvc repro cache@{place.name}",
            )


def _members(reader: CacheReader, recipe: Train) -> tuple[list[int], list[int]]:
    """Cache indices of training and validation samples with enough supervised tokens (labels + 1)."""
    held = frozenset(reader.facts["validation_ids"])
    members: list[int] = []
    held_out: list[int] = []
    left = recipe.max_supervised_tokens
    for index, sample in enumerate(reader.samples):
        if sample.num_labels + 1 < recipe.min_supervised:
            continue
        if sample.id in held:
            held_out.append(index)
        elif left is None:
            members.append(index)
        elif left > sample.num_labels:
            members.append(index)
            left -= sample.num_labels + 1
    if not held_out:
        raise TrainingError(
            "no validation sample has enough supervised tokens", where="params.yaml: train.min_supervised"
        )
    return members, held_out


def _start_from_target(drafter: Drafter, reader: CacheReader, members: list[int], *, place: TargetFolder) -> None:
    """The backbone from the target's last layers, the sequential head from its label states on training samples."""
    start_from_target(drafter, target_folder=place.folder)
    if isinstance(drafter, DSpark):
        samples = (reader.read(index) for index in members)
        rows = (
            (torch.from_numpy(item.input_ids[item.label_positions].astype("int64")), bf16_tensor(item.last_hidden))
            for item in samples
        )
        start_markov_head(drafter, rows=rows)


def _held_out(
    reader: CacheReader, indices: list[int], *, recipe: Train, shape: BatchShape, rank: int, num_ranks: int
) -> list[BlockBatch]:
    """This rank's validation micro-batches; anchors are drawn once, the same at every validation."""
    samples = [(reader.read(index), -1) for index in indices[rank::num_ranks]]
    samples = [(sample, epoch) for sample, epoch in samples if len(candidate_anchors(sample.supervised))]
    size = recipe.micro_batch
    return [
        make_block_batch(samples[start : start + size], shape=shape, seed=recipe.seed)
        for start in range(0, len(samples), size)
    ]


def main() -> None:
    """Entry of a rank under torchrun."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--key", required=True)
    key = parser.parse_args().key
    workspace = Workspace.find(Path.cwd())
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        run_rank(workspace, load_params(workspace.params), key, rank=rank, num_ranks=num_ranks, init_method="env://")
    except DraftsmithError as error:
        sys.stderr.write(f"draftsmith: rank {rank}: {error}\n")
        sys.stderr.flush()
        os._exit(2)


if __name__ == "__main__":
    main()
