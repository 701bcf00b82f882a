"""One training run from its newest checkpoint to the finished drafter: what watches the loop and what it leaves."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from draftsmith.drafters.base import Drafter
from draftsmith.drafters.contract import Contract
from draftsmith.drafters.registry import save_drafter
from draftsmith.errors import DraftsmithError
from draftsmith.evaluation.figures import Curve, loss_figure
from draftsmith.jobs.progress import progress
from draftsmith.jobs.train_data import Feed
from draftsmith.manifest import write_bytes, write_json
from draftsmith.nn.block import BlockBatch
from draftsmith.params import Params, Train
from draftsmith.paths import Workspace
from draftsmith.tracking import StageRun, stage_run
from draftsmith.training.checkpoint import CheckpointStore, tag_of
from draftsmith.training.confidence_fit import ConfidenceFit, fit_confidence
from draftsmith.training.engine import TrainEngine
from draftsmith.training.loader import StepLoader
from draftsmith.training.loop import Hooks, StepReport, train
from draftsmith.training.validation import Validation

CURVE_FIELDS = ("step", "loss", "ce", "tv", "bce", "lr", "grad_norm", "acceptance_1")


def newest_whole(checkpoints: CheckpointStore, *, folder: Path) -> int:
    """Fetch the newest whole checkpoint into `folder` and return its step; a broken one is said and left out.

    0 says that there is none.
    """
    for step in reversed(checkpoints.steps()):
        try:
            checkpoints.fetch(step, folder=folder)
        except DraftsmithError as error:
            sys.stderr.write(f"checkpoint {tag_of(step)} is left out: {error}\n")
            continue
        return step
    return 0


class Session:
    """Resume, watch and finish one run; the loop itself is `training.loop.train`.

    `fetched` is the step of the checkpoint that rank 0 has fetched into `folder`, 0 if none; other ranks give 0.
    """

    def __init__(
        self, workspace: Workspace, params: Params, key: str, *, recipe: Train, contract: Contract, feed: Feed,
        engine: TrainEngine, checkpoints: CheckpointStore, folder: Path, fetched: int,
    ) -> None:  # fmt: skip
        self.workspace, self.params, self.key, self.recipe = workspace, params, key, recipe
        self.contract, self.feed, self.engine = contract, feed, engine
        self.checkpoints, self.folder, self.fetched = checkpoints, folder, fetched
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
            "target": self.params.run(self.key).target,
            "drafter": self.params.run(self.key).drafter,
            "data_digest": self.feed.digest,
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
                feed = self.feed
                tracked.log_dataset(uri=feed.uri, digest=feed.digest, name=feed.prefix, context="training")

            def on_step(report: StepReport) -> None:
                self.feed.passed(report.step)
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
            fitted = (
                fit_confidence(drafter, batches=held_out, engine=self.engine) if drafter.config.confidence else None
            )
            if self.is_first:
                self._finish(drafter, found, tracked, confidence_fit=fitted)

    def _resume(self) -> tuple[int, str | None]:
        """Load the checkpoint that rank 0 fetched, on every rank.

        Raises ContractError that names the first field in which it is of another run.
        """
        step = int(self.engine.sum(torch.tensor([float(self.fetched)], dtype=torch.float64)).item())
        if step == 0:
            return 0, None
        state = self.engine.load(self.folder, tag=tag_of(step))
        where = f"checkpoint {tag_of(step)} in {self.checkpoints.prefix}"
        Contract.parse(state["contract"], where=where).check(self.contract.body(), meets="this run", where=where)
        self.curve, self.validations = state["curve"], state["validations"]
        self.counts, self.trained_s = state["counts"], state["trained_s"]
        return step, state["run_id"]

    def _save(self, step: int, tracked: StageRun | None) -> None:
        if tracked is not None:
            tracked.flush()
        state = {
            "step": step,
            "contract": self.contract.body(),
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
            told = {f"stream_{name}": value for name, value in self.feed.figures().items()}
            tracked.log_metrics({**values, **acceptance, **rates, **told}, step=report.step)

    def _on_validation(self, step: int, found: Validation, tracked: StageRun | None) -> None:
        self.validations.append({"step": step, "expected_accepted_length": found.expected_accepted_length})
        if tracked is not None:
            values = {"validation_expected_accepted_length": found.expected_accepted_length}
            values |= {f"validation_acceptance_{k + 1}": value for k, value in enumerate(found.acceptance)}
            values |= {f"validation_confidence_bias_{k + 1}": v for k, v in enumerate(found.confidence_bias or ())}
            tracked.log_metrics(values, step=step)

    def _finish(
        self, drafter: Drafter, found: Validation, tracked: StageRun | None, *, confidence_fit: ConfidenceFit | None
    ) -> None:
        """Write drafter, contract and report; the drafter's weights are written last."""
        folder, report = self.workspace.drafter_dir(self.key), self.workspace.report_dir(self.key)
        samples = self.feed.source.samples
        self.contract.write(folder)
        body = {
            "schema_version": 1,
            "key": self.key,
            "steps": self.recipe.steps,
            "init": self.recipe.init,
            "num_parameters": sum(value.numel() for value in drafter.state_dict().values()),
            "num_samples": len(self.feed.members.train),
            "num_supervised_tokens": sum(samples[index].num_labels + 1 for index in self.feed.members.train),
            "num_ranks": self.engine.num_ranks,
            "loss": self.curve[-1]["loss"],
            "expected_accepted_length": found.expected_accepted_length,
            "acceptance": list(found.acceptance),
            "confidence_bias": None if found.confidence_bias is None else list(found.confidence_bias),
            "confidence_fit": None if confidence_fit is None else asdict(confidence_fit),
            "num_validation_blocks": found.num_blocks,
            "validations": self.validations,
            "seconds": round(self.trained_s, 1),
            "tokens_per_s": round(self.counts["tokens"] / self.trained_s, 1),
            "slots_per_s": round(self.counts["slots"] / self.trained_s, 1),
            "data_wait_share": round(self.counts["data_wait_s"] / self.trained_s, 4),
        }
        if figures := self.feed.figures():
            body["stream"] = figures
        write_bytes(report / "train_curve.csv", self._curve_csv())
        if tracked is not None:
            points = {name: [line[name] for line in self.curve] for name in ("loss", "ce", "tv")}
            steps = [int(line["step"]) for line in self.curve]
            curves = [Curve(name, steps, values) for name, values in points.items()]
            tracked.log_figure(loss_figure(curves, title=f"Training of {self.key}"), "loss.png")
            if confidence_fit is not None:
                told = {f"confidence_fit_{name}": value for name, value in asdict(confidence_fit).items()}
                tracked.log_metrics({name: v for name, v in told.items() if v is not None}, step=self.recipe.steps)
            tracked.log_json(body, "train.json")
        write_json(report / "train.json", body)
        save_drafter(drafter, folder=folder, dtype=torch.bfloat16, num_anchors=self.recipe.anchors)

    def _curve_csv(self) -> bytes:
        text = io.StringIO()
        writer = csv.DictWriter(text, CURVE_FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: f"{line[name]:.6g}" for name in CURVE_FIELDS} for line in self.curve)
        return text.getvalue().encode()
