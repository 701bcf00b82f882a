"""Stage `answers@TARGET`: the target answers the training and validation prompts; the text that drafters learn."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from draftsmith.decoding.engine import Engine, Request
from draftsmith.jobs.parts import OpenTarget, open_target
from draftsmith.jobs.progress import progress
from draftsmith.jobs.stores import stored, workspace_store
from draftsmith.manifest import Manifest, hash8
from draftsmith.params import Answers, Params
from draftsmith.paths import Workspace
from draftsmith.text.answers import (
    AnswerBatch,
    AnswerRow,
    Split,
    answer_requests,
    plan_answer_batches,
    run_answer_batches,
    sample_seed,
)
from draftsmith.text.rows import decode_prompts
from draftsmith.tracking import stage_run

SPLITS: tuple[Split, ...] = ("train", "validation")
FORMAT_VERSION = 1


def run(workspace: Workspace, params: Params, name: str) -> None:
    """Answer every prompt once; a restart keeps whole batches and redoes the one that was broken off."""
    store = workspace_store(workspace)
    prompts = Manifest.read(workspace.prompts_manifest, "prompts")
    splits = {split: decode_prompts(stored(store, prompts, f"{split}.parquet", stage="prompts")) for split in SPLITS}
    opened = open_target(workspace, params, name)
    row, served = params.answers, opened.place.row.sampling
    batches = plan_answer_batches(answer_requests(splits), batch_size=row.batch_size, seed=row.seed)
    identity = {
        "format": FORMAT_VERSION,
        "answers": row.model_dump(),
        "prompts": prompts.digest,
        "target": opened.place.digest,
        "tokenizer": opened.chat.digest(),
        "sampling": served.model_dump(
            exclude=None if served.min_p else {"min_p"}
        ),  # off: named as before there was one
        "system_prompt": opened.place.row.system_prompt,
        "dtype": opened.place.row.dtype,
    }
    prefix = f"answers/{name}-{hash8(identity)}"
    counts = {"answers": 0, "tokens": 0, "ended": 0, "at_length_limit": 0, "made": 0}
    tags = {"target": name, "data_digest": prompts.digest}
    with stage_run("answers", name, workspace=workspace, params=row.model_dump(), tags=tags) as tracked:
        started = time.monotonic()
        with progress(
            f"answers@{name}", total=sum(len(batch.requests) for batch in batches), unit="answers"
        ) as advance:

            def generate(batch: AnswerBatch, earlier: Mapping[str, AnswerRow]) -> Sequence[AnswerRow]:
                rows = answer_batch(batch, earlier, opened=opened, row=row)
                counts["made"] += sum(len(item.answer_ids) for item in rows)
                return rows

            def count(_: AnswerBatch, rows: Sequence[AnswerRow]) -> None:
                counts["answers"] += len(rows)
                counts["tokens"] += sum(len(item.answer_ids) for item in rows)
                counts["ended"] += sum(item.finish == "end_of_text" for item in rows)
                counts["at_length_limit"] += sum(item.finish == "length" for item in rows)
                advance(len(rows))

            records = run_answer_batches(store, prefix=prefix, batches=batches, generate=generate, on_batch=count)
        rate = counts.pop("made") / (time.monotonic() - started)
        manifest = Manifest(
            "answers",
            prefix,
            tuple(records),
            {**counts, "target": name, "target_digest": opened.place.digest, "tokenizer_digest": opened.chat.digest()},
        )
        tracked.log_metrics({**counts, "tokens_per_s": rate}, step=0)
    manifest.write(workspace.answers_manifest(name))


def answer_batch(
    batch: AnswerBatch, earlier: Mapping[str, AnswerRow], *, opened: OpenTarget, row: Answers
) -> list[AnswerRow]:
    """Answer one planned batch by plain decoding, each request with a seed of its own."""
    requests = []
    for item in batch.requests:
        said = [opened.chat.decode(earlier[identity].answer_ids) for identity in item.earlier_ids]
        ids = opened.chat.prompt_ids(item.turns[: item.turn + 1], said, system_prompt=opened.place.row.system_prompt)
        seed = sample_seed(row.seed, item.id)
        requests.append(Request(item.id, tuple(ids), row.max_new_tokens, opened.place.row.sampling, seed))
    engine = Engine(opened.target, drafter=None, end_ids=opened.chat.end_ids, batch_size=len(requests))
    return [
        AnswerRow(
            id=item.id,
            split=item.split,
            domain=item.domain,
            turn=item.turn,
            prompt_ids=request.prompt_ids,
            answer_ids=generation.token_ids,
            finish=generation.finish,
        )
        for item, request, generation in zip(batch.requests, requests, engine.generate(requests), strict=True)
    ]
