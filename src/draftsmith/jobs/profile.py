"""Stage `profile@KEY`: what a step of the engine costs on this machine, by batch tokens, requests and context."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch

from draftsmith.errors import DraftsmithError
from draftsmith.figures import png_bytes
from draftsmith.jobs.parts import OpenTarget, open_drafter, open_target
from draftsmith.jobs.progress import progress
from draftsmith.jobs.stores import stored, workspace_store
from draftsmith.manifest import Manifest, write_bytes, write_json
from draftsmith.params import Params
from draftsmith.paths import Workspace
from draftsmith.provenance import read_hardware
from draftsmith.serving.cost_table import read_cost_table
from draftsmith.serving.profile import EXAMPLES, Origin, Profile, example_profile, is_profile, read_profile
from draftsmith.serving.profile_points import prefill_points, step_points
from draftsmith.serving.profile_report import num_rises, profile_csv, profile_figure, profile_lines, table_lines
from draftsmith.serving.profile_tables import monotone_table
from draftsmith.serving.profiling import Timings, most_context, num_steps, time_engine
from draftsmith.serving.sidecars import check_sps
from draftsmith.targets.base import read_config
from draftsmith.targets.families import FAMILIES
from draftsmith.text.rows import decode_prompts
from draftsmith.tracking import StageRun, stage_run


def run(workspace: Workspace, params: Params, key: str) -> Path:
    """Measure, then write points, SGLang's table, a figure, and the profile last; returns where that lies.

    Raises DraftsmithError where the contexts exceed the target's positions, MachineError where its memory is exceeded.
    """
    plan, row = params.run(key), params.profile
    prompts = Manifest.read(workspace.prompts_manifest, "prompts")
    tags = {"target": plan.target, "drafter": plan.drafter, "data_digest": prompts.digest}
    with stage_run("profile", key, workspace=workspace, params=row.model_dump(mode="json"), tags=tags) as tracked:
        split = decode_prompts(stored(workspace_store(workspace), prompts, "calibration.parquet", stage="prompts"))
        opened = open_target(workspace, params, plan.target)
        drafter = open_drafter(workspace, params, key, opened=opened)
        block_size = drafter.config.block_size
        _check_positions(opened, reached=most_context(row, block_size=block_size))
        system = opened.place.row.system_prompt
        ids = [opened.chat.prompt_ids(item.turns[:1], (), system_prompt=system) for item in split]
        with progress(f"profile@{key}", total=num_steps(row, block_size=block_size), unit="steps") as advance:
            timings = time_engine(
                opened.target, drafter=drafter, prompts=ids, row=row, on_step=lambda: advance(1)
            )  # fmt: skip
        origin = Origin(
            key=key,
            target=plan.target,
            drafter=plan.drafter,
            block_size=block_size,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            machine={
                "hardware": read_hardware().description,
                "threads": torch.get_num_threads(),
                "dtype": opened.place.row.dtype,
                "torch": metadata.version("torch"),
            },
            note=_note(timings, budget_s=row.budget_s),
        )
        profile = Profile.of_points(origin, points=step_points(timings.steps), prefill=prefill_points(timings.passes))
        path = _write(workspace.report_dir(key), profile, tracked=tracked)
        _log(tracked, profile)
    return path


def describe(name: str, *, out: Path | None = None) -> Iterator[str]:
    """What is understood of an example, a profile or an SPS table (JSON or CSV), a line each.

    `out`: also write SGLang's form of it, with every N and rates that do not rise. Raises DraftsmithError.
    """
    path = Path(name)
    if name in EXAMPLES or is_profile(path):
        profile = example_profile(name) if name in EXAMPLES else read_profile(path)
        lines, sidecar = profile_lines(profile), profile.sidecar()
    else:
        table = read_cost_table(path)
        lines, sidecar = table_lines(table, monotone=monotone_table(table)), monotone_table(table).to_sidecar()
    yield from lines
    if out is not None:
        check_sps(sidecar, where=name)
        write_json(out, sidecar)
        yield f"written: {out}"


def _check_positions(opened: OpenTarget, *, reached: int) -> None:
    place = opened.place
    most = FAMILIES[place.row.family].text_config(read_config(place.folder)).max_position_embeddings
    if reached > most:
        raise DraftsmithError(
            f"the profile goes beyond the positions of target {place.name}", got=reached, expected=f"<= {most}",
            where="params.yaml: profile.context_tokens, profile.repeats",
        )  # fmt: skip


def _note(timings: Timings, *, budget_s: float) -> str:
    if timings.num_rounds == timings.rounds_asked:
        return ""
    return (
        f"{timings.num_rounds} of {timings.rounds_asked} rounds were measured: the next one would have gone beyond "
        f"profile.budget_s, {budget_s:g} s."
    )


def _write(folder: Path, profile: Profile, *, tracked: StageRun) -> Path:
    figure, text, sidecar, body = profile_figure(profile), profile_csv(profile), profile.sidecar(), profile.to_body()
    check_sps(sidecar, where="sps.json")
    write_bytes(folder / "profile.csv", text.encode())
    write_bytes(folder / "profile.png", png_bytes(figure))
    write_json(folder / "sps.json", sidecar)
    tracked.log_text(text, "profile.csv")
    tracked.log_figure(figure, "profile.png")
    tracked.log_json(sidecar, "sps.json")
    tracked.log_json(body, "profile.json")
    write_json(folder / "profile.json", body)
    return folder / "profile.json"


def _log(tracked: StageRun, profile: Profile) -> None:
    """Curves over batch tokens and over requests, and the single numbers."""
    for name, table in (("jagged", profile.jagged), ("monotone", profile.table)):
        for number, rate in zip(table.batch_tokens.tolist(), table.steps_per_s.tolist(), strict=True):
            tracked.log_metrics({f"verify_ms/{name}": 1e3 / rate}, step=number)
    for name, cost in (("draft_ms", profile.drafting), ("upkeep_ms", profile.upkeep)):
        if cost is not None:
            for number, seconds in zip(cost.num_requests, cost.seconds, strict=True):
                tracked.log_metrics({name: 1e3 * seconds}, step=number)
    numbers: dict[str, float] = {"rises": num_rises(profile.jagged)}
    if profile.prefill_cost is not None:
        numbers["prefill_tokens_per_s"] = profile.prefill_cost.tokens_per_s
        numbers["prefill_s_per_pass"] = profile.prefill_cost.seconds_per_pass
    if profile.context_cost is not None:
        numbers["context_s_per_token"] = profile.context_cost.seconds_per_token
    tracked.log_metrics(numbers, step=0)
