"""Stage `calibrate@KEY`: sequential temperature scaling from rounds of real speculative decoding."""

from __future__ import annotations

from typing import Any

from draftsmith.calibration.collect import split_rounds
from draftsmith.calibration.report import (
    calibration_body,
    not_applicable_body,
    reliability_csv,
    reliability_figure,
    sts_sidecar,
)
from draftsmith.calibration.sts import fit_temperatures, temperature_grid
from draftsmith.decoding.engine import Engine
from draftsmith.decoding.rounds import Generation
from draftsmith.evaluation.conversations import Conversation, answer_conversations
from draftsmith.figures import png_bytes
from draftsmith.jobs.parts import open_drafter, open_target
from draftsmith.jobs.progress import progress
from draftsmith.jobs.stores import stored, workspace_store
from draftsmith.manifest import Manifest, write_bytes, write_json
from draftsmith.params import Calibrate, Params, Sampling
from draftsmith.paths import Workspace
from draftsmith.text.rows import Prompt, decode_prompts
from draftsmith.tracking import StageRun, stage_run


def run(workspace: Workspace, params: Params, key: str) -> None:
    """Fit temperatures on the calibration split and report on rounds of held-out prompts; temperatures are the out."""
    plan = params.run(key)
    row, drafter_row = params.calibrate, params.drafters[plan.drafter]
    prompts = Manifest.read(workspace.prompts_manifest, "prompts")
    tags = {"target": plan.target, "drafter": plan.drafter, "data_digest": prompts.digest}
    report = workspace.report_dir(key)
    with stage_run("calibrate", key, workspace=workspace, params=row.model_dump(), tags=tags) as tracked:
        if not drafter_row.confidence:
            body = not_applicable_body(drafter_row.block_size, reason="the drafter has no confidence head")
        else:
            store = workspace_store(workspace)
            split = decode_prompts(stored(store, prompts, "calibration.parquet", stage="prompts"))
            generations = decode_rounds(workspace, params, key, prompts=split)
            body = fit(generations, block_size=drafter_row.block_size, row=row)
            figure = reliability_figure(body, title=f"Reliability of {key}")
            write_bytes(report / "reliability.png", png_bytes(figure))
            tracked.log_figure(figure, "reliability.png")
            write_json(report / "sts.json", sts_sidecar(body, dataset=f"prompts {prompts.digest[:12]}"))
            _log(tracked, body)
        write_bytes(report / "reliability.csv", reliability_csv(body).encode())
        tracked.log_json(body, "calibrate.json")
    write_json(report / "calibrate.json", body)


def decode_rounds(
    workspace: Workspace, params: Params, key: str, *, prompts: tuple[Prompt, ...]
) -> tuple[Generation, ...]:
    """Answer prompts with full-length verification; first turns only."""
    row = params.calibrate
    opened = open_target(workspace, params, params.run(key).target)
    drafter = open_drafter(workspace, params, key, opened=opened)
    engine = Engine(opened.target, drafter=drafter, end_ids=opened.chat.end_ids, batch_size=row.batch_size)
    generations: list[Generation] = []
    with progress(f"calibrate@{key}", total=len(prompts), unit="answers") as advance:
        for start in range(0, len(prompts), row.batch_size):
            part = prompts[start : start + row.batch_size]
            generations += answer_conversations(
                engine,
                [Conversation(item.id, item.turns[:1]) for item in part],
                chat=opened.chat,
                system_prompt=opened.place.row.system_prompt,
                sampling=Sampling(temperature=row.temperature),
                max_new_tokens=row.max_new_tokens,
                seed=row.seed,
            ).generations
            advance(len(part))
    return tuple(generations)


def fit(generations: tuple[Generation, ...], *, block_size: int, row: Calibrate) -> dict[str, Any]:
    """Temperatures from one part of the prompts, every measure from the other."""
    split = split_rounds(
        generations,
        block_size=block_size,
        holdout_share=row.holdout_share,
        min_rounds=row.min_rounds,
        seed=row.seed,
    )
    temperatures = fit_temperatures(
        split.fit.logits,
        accepted=split.fit.accepted,
        counted=split.fit.counted,
        grid=temperature_grid(row.grid_low, high=row.grid_high, num_points=row.grid_points),
        num_bins=row.num_bins,
    )
    return calibration_body(split, temperatures=temperatures, num_bins=row.num_bins, seed=row.seed)


def _log(tracked: StageRun, body: dict[str, Any]) -> None:
    for position, values in enumerate(
        zip(body["temperatures"], body["ece_before"], body["ece_after"], body["auc"], strict=True), start=1
    ):
        named = dict(zip(("temperature", "ece_before", "ece_after", "auc"), values, strict=True))
        tracked.log_metrics({name: value for name, value in named.items() if value is not None}, step=position)
    tracked.log_metrics({"mean_ece_before": body["mean_ece_before"], "mean_ece_after": body["mean_ece_after"]}, step=0)
