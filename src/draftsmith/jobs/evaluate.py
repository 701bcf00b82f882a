"""Stage `evaluate@KEY`: lossless speculative decoding on the benchmarks against plain decoding of the same engine.

Answers are decoded cell by cell into the store (see `evaluate_cells`), by this process or by several with a slice each,
and all figures are made from what is there. Only the speed is measured anew each time, on the machine of the last step.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from draftsmith.evaluation.benchmarks import benchmark_facts, benchmark_turns, folder_file
from draftsmith.evaluation.breakdown import turn_number
from draftsmith.evaluation.decoded import Decoded
from draftsmith.evaluation.report import DrafterFacts, evaluation_body
from draftsmith.evaluation.samples import Sample, samples_body
from draftsmith.jobs.benchmarks import override_folder
from draftsmith.jobs.evaluate_cells import (
    Decoder,
    PlannedEvaluation,
    decode_missing,
    load_decoded,
    planned_evaluation,
    read_cells,
)
from draftsmith.jobs.evaluate_reports import log_body, write_reports
from draftsmith.jobs.evaluate_speed import measure_speed, num_speed_answers, speed_prompts
from draftsmith.jobs.progress import progress
from draftsmith.jobs.stores import stored, workspace_store
from draftsmith.manifest import Manifest, write_json
from draftsmith.params import Params
from draftsmith.paths import Workspace
from draftsmith.provenance import read_hardware, read_provenance
from draftsmith.storage import Store
from draftsmith.text.contamination import contaminated
from draftsmith.text.rows import decode_prompts
from draftsmith.tracking import stage_run

__all__ = ["load_decoded", "run"]

TRAINING_SPLITS = ("train", "calibration")
MOST_TOLD = 5


def run(workspace: Workspace, params: Params, key: str, *, part: tuple[int, int] | None = None) -> None:
    """Decode what is missing, then measure and write the reports, evaluate.json last.

    With `part` (i, n) only cells i, i + n, ... are decoded, and nothing is reported. Slices may run anywhere, at once
    and twice; the run without one finds what they have decoded.
    """
    planned, store = planned_evaluation(workspace, params, key), workspace_store(workspace)
    decoder, row = Decoder(planned), planned.row
    speed_of = () if part is not None else speed_prompts(row, folder=override_folder(workspace, row))
    drafter = params.drafters[params.run(key).drafter]
    tags = {"target": planned.place.name, "drafter": params.run(key).drafter, "data_digest": planned.data_digest}
    name = key if part is None else f"{key}-slice-{part[0]}-of-{part[1]}"
    with stage_run("evaluate", name, workspace=workspace, params=row.model_dump(), tags=tags) as tracked:
        num_answers = 2 * sum(len(cell.request_ids) for cell in planned.share(part))
        if part is not None:
            with progress(f"evaluate@{key} {part[0]}/{part[1]}", total=num_answers, unit="answers") as advance:
                num_tokens = decode_missing(store, planned, part=part, decoder=decoder, on_answers=advance)
            tracked.log_metrics({"decoded_tokens": num_tokens}, step=0)
            return
        benchmarks, digest = benchmark_bodies(workspace, params, planned, store=store)
        with progress(f"evaluate@{key}", total=num_answers + num_speed_answers(row), unit="answers") as advance:
            num_tokens = decode_missing(store, planned, part=None, decoder=decoder, on_answers=advance)
            decoded = read_cells(store, planned)
            speed = measure_speed(planned, decoder=decoder, prompts=speed_of, on_answers=advance)
        tracked.log_metrics({"decoded_tokens": num_tokens}, step=0)
        body = evaluation_body(
            key=key,
            drafter=DrafterFacts(
                params.run(key).drafter, drafter.kind, block_size=drafter.block_size, confidence=drafter.confidence
            ),
            target=planned.place.name,
            dtype=planned.place.row.dtype,
            benchmarks=benchmarks,
            decoded=decoded,
            speed=speed,
            max_new_tokens=row.max_new_tokens,
            seed=row.seed,
            machine=read_hardware().description,
            provenance={
                **read_provenance(workspace.root).as_dict(),
                "cells": dict(planned.prefixes),
                "target_digest": planned.place.digest,
                "text_digest": planned.chat.digest(),
                "training_prompts": digest,
            },
        )
        samples = samples_body(key=key, samples=chosen_samples(planned, decoded), decode=planned.chat.decode)
        write_reports(body, samples, folder=workspace.report_dir(key), tracked=tracked)
        log_body(tracked, body)
    write_json(workspace.report_dir(key) / "evaluate.json", body)


def benchmark_bodies(
    workspace: Workspace, params: Params, planned: PlannedEvaluation, *, store: Store
) -> tuple[list[dict[str, Any]], str | None]:
    """What the report says of each benchmark, and the digest of the prompts manifest that it was compared with.

    Prompts that come near a training or calibration prompt are told on stderr; they stay in the figures.
    """
    row, folder = params.evaluate, override_folder(workspace, params.evaluate)
    near, digest = find_contaminated(workspace, planned, store=store)
    bodies = []
    for item in row.benchmarks:
        prompts = planned.prompts[item.name]
        ids = [prompt.id for prompt in prompts if prompt.id in near]
        if ids:
            told = ", ".join(f"{name} ({near[name]})" for name in ids[:MOST_TOLD])
            more = f" and {len(ids) - MOST_TOLD} more" if len(ids) > MOST_TOLD else ""
            sys.stderr.write(
                f"draftsmith: {len(ids)} of {len(prompts)} prompts of {item.name} come near what was trained on; they "
                f"stay in the figures: {told}{more}\n"
            )
        file = None if row.folder is None or folder is None else folder_file(item.name, folder=folder).name
        bodies.append(
            {
                **benchmark_facts(item.name, folder=folder),
                "cap": item.cap,
                "num_prompts": len(prompts),
                "replaced_by": None if file is None else f"{row.folder}/{file}",
                "contaminated": ids,
            }
        )
    return bodies, digest


def find_contaminated(
    workspace: Workspace, planned: PlannedEvaluation, *, store: Store
) -> tuple[dict[str, str], str | None]:
    """Benchmark prompts that are equal to or near a training or calibration prompt of the current prompts manifest (id
    -> which), and that manifest's digest; without a manifest nothing is compared, which is told on stderr."""
    if not workspace.prompts_manifest.is_file():
        sys.stderr.write("draftsmith: no prompts manifest here: benchmarks are not compared with training prompts\n")
        return {}, None
    manifest = Manifest.read(workspace.prompts_manifest, "prompts")
    training = (
        prompt.turns
        for split in TRAINING_SPLITS
        for prompt in decode_prompts(stored(store, manifest, f"{split}.parquet", stage="prompts"))
    )
    judged = [prompt for prompts in planned.prompts.values() for prompt in prompts]
    others = benchmark_turns(planned.prompts, folder=override_folder(workspace, planned.row))
    return contaminated(judged, training=training, others=others), manifest.digest


def chosen_samples(planned: PlannedEvaluation, decoded: Sequence[Decoded]) -> list[Sample]:
    """The answers to show: of each benchmark the first prompts in every turn, at every temperature."""
    samples = []
    for item in decoded:
        shown = {prompt.id: prompt for prompt in planned.prompts[item.benchmark][: planned.row.num_samples]}
        for answer in item.generations:
            if answer.prompt_id in shown:
                turn = shown[answer.prompt_id].turns[turn_number(answer)]
                samples.append(Sample(item.benchmark, item.temperature, turn, answer))
    return samples
