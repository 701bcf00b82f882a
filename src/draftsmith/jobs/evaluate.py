"""Stage `evaluate@KEY`: lossless speculative decoding on the benchmarks against plain decoding of the same engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftsmith.decoding.engine import Engine
from draftsmith.evaluation.accepted_length import measure_accepted_length, share_identical
from draftsmith.evaluation.benchmarks import BENCHMARKS, load_benchmark
from draftsmith.evaluation.conversations import Answered, Conversation, answer_conversations
from draftsmith.evaluation.figures import accepted_length_figure, conditional_acceptance_figure
from draftsmith.evaluation.report import conditional_acceptance_csv, evaluation_body, evaluation_row
from draftsmith.evaluation.summary import KeyReports
from draftsmith.figures import png_bytes
from draftsmith.jobs.parts import OpenTarget, open_drafter, open_target
from draftsmith.jobs.progress import progress
from draftsmith.manifest import json_digest, write_bytes, write_json
from draftsmith.params import Evaluate, Params, Sampling
from draftsmith.paths import Workspace
from draftsmith.provenance import read_hardware
from draftsmith.tracking import StageRun, stage_run


def run(workspace: Workspace, params: Params, key: str) -> None:
    """Evaluate every benchmark at every temperature, with and without the drafter; evaluate.json is written last."""
    plan, row = params.run(key), params.evaluate
    prompts = {item.name: load_benchmark(item.name, cap=item.cap) for item in row.benchmarks}
    conversations = {
        name: [Conversation(prompt.id, prompt.turns) for prompt in found] for name, found in prompts.items()
    }
    digest = json_digest({name: [list(item.turns) for item in found] for name, found in prompts.items()})
    tags = {"target": plan.target, "drafter": plan.drafter, "data_digest": digest}
    report = workspace.report_dir(key)
    opened = open_target(workspace, params, plan.target)
    drafter = open_drafter(workspace, params, key, opened=opened)
    engines = {
        name: Engine(opened.target, drafter=choice, end_ids=opened.chat.end_ids, batch_size=row.batch_size)
        for name, choice in (("plain", None), ("drafter", drafter))
    }
    with stage_run("evaluate", key, workspace=workspace, params=row.model_dump(), tags=tags) as tracked:
        rows = []
        total = sum(len(item.turns) for found in conversations.values() for item in found)
        with progress(f"evaluate@{key}", total=2 * total * len(row.temperatures), unit="answers") as advance:
            for temperature in row.temperatures:
                for item in row.benchmarks:
                    found = conversations[item.name]
                    plain, drafted = (
                        answer(engines[name], found, opened=opened, temperature=temperature, row=row)
                        for name in ("plain", "drafter")
                    )
                    rows.append(
                        evaluation_row(
                            measure_accepted_length(
                                drafted.generations, block_size=drafter.config.block_size, seed=row.seed
                            ),
                            benchmark=item.name,
                            domain=BENCHMARKS[item.name].domain,
                            temperature=temperature,
                            batch_size=row.batch_size,
                            cap=item.cap,
                            reference_count=BENCHMARKS[item.name].reference_count,
                            tokens_per_s=drafted.tokens_per_s,
                            plain_tokens_per_s=plain.tokens_per_s,
                            identical_to_plain=share_identical(drafted.generations, plain=plain.generations)
                            if temperature == 0
                            else None,
                        )
                    )
                    advance(len(plain.generations) + len(drafted.generations))
        body = evaluation_body(
            rows,
            key=key,
            block_size=drafter.config.block_size,
            max_new_tokens=row.max_new_tokens,
            seed=row.seed,
            machine=read_hardware().description,
        )
        _log(tracked, rows, engines["drafter"])
        figures = [KeyReports(key, None, None, body)]
        for temperature in row.temperatures:
            name = f"acceptance_t{temperature:g}.png"
            figure = conditional_acceptance_figure(figures, temperature=temperature)
            write_bytes(report / name, png_bytes(figure))
            tracked.log_figure(figure, name)
            tracked.log_figure(
                accepted_length_figure(figures, temperature=temperature), f"accepted_length_t{temperature:g}.png"
            )
        write_bytes(report / "conditional_acceptance.csv", conditional_acceptance_csv(body).encode())
        tracked.log_json(body, "evaluate.json")
    write_json(report / "evaluate.json", body)


def answer(
    engine: Engine, conversations: Sequence[Conversation], *, opened: OpenTarget, temperature: float, row: Evaluate
) -> Answered:
    """Decode one benchmark at one temperature, without the target's own filters (the paper's setting)."""
    return answer_conversations(
        engine,
        conversations,
        chat=opened.chat,
        system_prompt=opened.place.row.system_prompt,
        sampling=Sampling(temperature=temperature),
        max_new_tokens=row.max_new_tokens,
        seed=row.seed,
    )


def _log(tracked: StageRun, rows: Sequence[dict[str, Any]], engine: Engine) -> None:
    for row in rows:
        stem = f"{row['benchmark']}_t{row['temperature']:g}"
        tracked.log_metrics(
            {
                f"{stem}_accepted_length": row["accepted_length"],
                f"{stem}_accepted_length_without_bonus": row["accepted_length_without_bonus"],
                f"{stem}_tokens_per_s": row["tokens_per_s"],
                f"{stem}_plain_tokens_per_s": row["plain_tokens_per_s"],
            },
            step=0,
        )
        for position, value in enumerate(row["conditional_acceptance"], start=1):
            if value is not None:
                tracked.log_metrics({f"{stem}_conditional_acceptance": value}, step=position)
    times = engine.times
    tracked.log_metrics(
        {
            "draft_share": times.draft_s / times.total_s,
            "verify_share": times.verify_s / times.total_s,
            "sample_share": times.sample_s / times.total_s,
        },
        step=0,
    )
