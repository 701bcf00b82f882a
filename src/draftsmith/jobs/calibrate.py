"""Stage `calibrate@KEY`: sequential temperature scaling from rounds of real speculative decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from draftsmith.calibration.collect import split_rounds
from draftsmith.calibration.domains import domain_calibrations
from draftsmith.calibration.online import online_report
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
from draftsmith.serving.sidecars import check_sts
from draftsmith.text.rows import Prompt, decode_prompts
from draftsmith.tracking import StageRun, stage_run

SIDES = ("raw", "common", "own")


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
            domain_of = {item.id: item.domain for item in split}
            body = fit(generations, block_size=drafter_row.block_size, row=row, domain_of=domain_of)
            figure = reliability_figure(body, title=f"Reliability of {key}")
            write_bytes(report / "reliability.png", png_bytes(figure))
            tracked.log_figure(figure, "reliability.png")
            sidecar = sts_sidecar(body, dataset=_dataset(body, split, row=row, digest=prompts.digest))
            check_sts(sidecar, block_size=drafter_row.block_size, where="sts.json")
            write_json(report / "sts.json", sidecar)
            tracked.log_json(sidecar, "sts.json")
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


def fit(
    generations: tuple[Generation, ...], *, block_size: int, row: Calibrate, domain_of: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Temperatures from one part of the prompts, every measure from the other; `domain_of`: prompt id -> domain."""
    split = split_rounds(
        generations,
        block_size=block_size,
        holdout_share=row.holdout_share,
        min_rounds=row.min_rounds,
        seed=row.seed,
    )
    grid = temperature_grid(row.grid_low, high=row.grid_high, num_points=row.grid_points)
    temperatures = fit_temperatures(
        split.fit.logits,
        accepted=split.fit.accepted,
        counted=split.fit.counted,
        grid=grid,
        num_bins=row.num_bins,
    )
    body = calibration_body(split, temperatures=temperatures, num_bins=row.num_bins, seed=row.seed)
    domains = domain_of or {}
    if row.by_domain and domain_of is not None:
        body["by_domain"] = domain_calibrations(
            split, domain_of=domains, common=temperatures, grid=grid, num_bins=row.num_bins,
            min_rounds=row.min_rounds, seed=row.seed,
        )  # fmt: skip
    body["online"] = online_report(
        split.fit, holdout=split.holdout, offline=temperatures, grid=grid, num_bins=row.num_bins,
        half_life=row.online_half_life, seed=row.seed,
        domains=[domains.get(prompt_id, "all") for prompt_id in split.holdout.prompt_ids],
    )  # fmt: skip
    return body


def _dataset(body: Mapping[str, Any], split: Sequence[Prompt], *, row: Calibrate, digest: str) -> str:
    """What the temperatures were fitted on, for people."""
    domains = ", ".join(sorted({item.domain for item in split}))
    return (
        f"calibration prompts {digest[:12]} ({body['num_fit_prompts']} of {domains}), answers sampled at temperature "
        f"{row.temperature:g}, whole blocks verified"
    )


def _log(tracked: StageRun, body: dict[str, Any]) -> None:
    for position, values in enumerate(
        zip(body["temperatures"], body["ece_before"], body["ece_after"], body["auc"], strict=True), start=1
    ):
        named = dict(zip(("temperature", "ece_before", "ece_after", "auc"), values, strict=True))
        tracked.log_metrics({name: value for name, value in named.items() if value is not None}, step=position)
    for name, intervals in body["intervals"].items():
        for position, ends in enumerate(intervals, start=1):
            if ends is not None:
                tracked.log_metrics({f"{name}_low": ends[0], f"{name}_high": ends[1]}, step=position)
    for kind in ("stationary", "drift"):
        found = body["online"][kind]
        tracked.log_metrics(
            {f"online_{kind}_{side}": found[f"mean_ece_{side}"] for side in ("raw", "offline", "online")}, step=0
        )
    for name, found in (body["by_domain"] or {}).items():
        tracked.log_metrics({f"{name}_mean_ece_{side}": found[f"mean_ece_{side}"] for side in SIDES}, step=0)
    tracked.log_metrics({"mean_ece_before": body["mean_ece_before"], "mean_ece_after": body["mean_ece_after"]}, step=0)
