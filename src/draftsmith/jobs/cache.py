"""Stage `cache@TARGET`: captured hidden states of every answer, planned to the byte and written shard by shard."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from draftsmith.cache.claims import Owner
from draftsmith.cache.plan import CachePlan, CacheSpec, PlannedSample, SampleLength, plan_cache
from draftsmith.cache.writer import CacheWriter, SampleArrays
from draftsmith.drafters.contract import CAPTURE_CONVENTION
from draftsmith.errors import CacheError, ParamsError
from draftsmith.jobs.parts import OpenTarget, open_target, processor
from draftsmith.jobs.progress import progress
from draftsmith.jobs.stores import stored, workspace_store
from draftsmith.manifest import Manifest, hash8
from draftsmith.nn.kv import FlatBatch
from draftsmith.params import Params
from draftsmith.paths import Workspace
from draftsmith.storage import Store
from draftsmith.text.answers import decode_answers
from draftsmith.tracking import stage_run

FORMAT_VERSION = 1
DEFAULT_LEASE_S = 120.0


@dataclass(frozen=True)
class Sequence:
    """One training sequence: ids [T] and the mask of the target's own tokens [T]."""

    id: str
    split: str
    input_ids: NDArray[np.int32]
    supervised: NDArray[np.uint8]

    @property
    def label_positions(self) -> NDArray[np.int64]:
        """Positions whose own token and next token are supervised."""
        return np.flatnonzero(self.supervised[:-1] & self.supervised[1:]).astype(np.int64)


@dataclass(frozen=True)
class Sequences:
    """All sequences that fit, and what was cut or left out, counted by reason."""

    items: tuple[Sequence, ...]
    counts: dict[str, int]


def read_sequences(store: Store, manifest: Manifest, *, name: str, max_length: int) -> Sequences:
    """Prompt and answer ids of every answer of target `name`; longer ones are cut at `max_length` and counted."""
    items, counts = [], {"cut_at_max_length": 0, "prompt_fills_max_length": 0, "answer_too_short": 0}
    for record in manifest.objects:
        for row in decode_answers(stored(store, manifest, record.path, stage=f"answers@{name}")):
            ids = [*row.prompt_ids, *row.answer_ids]
            if len(row.prompt_ids) + 2 > max_length:
                counts["prompt_fills_max_length"] += 1
                continue
            if len(row.answer_ids) < 2:
                counts["answer_too_short"] += 1
                continue
            counts["cut_at_max_length"] += len(ids) > max_length
            supervised = np.zeros(len(ids), dtype=np.uint8)
            supervised[len(row.prompt_ids) :] = 1
            items.append(
                Sequence(row.id, row.split, np.array(ids[:max_length], dtype=np.int32), supervised[:max_length])
            )
    if not items:
        raise CacheError(
            "no answer is long enough to cache", got=counts, where="params.yaml: answers, cache.max_length"
        )
    return Sequences(tuple(items), counts)


def run(workspace: Workspace, params: Params, name: str, *, part: tuple[int, int] | None) -> None:
    """Write all shards (or slice i of n: `part`) and, when all are there and no slice was asked for, the manifest."""
    store = workspace_store(workspace)
    answers = Manifest.read(workspace.answers_manifest(name), "answers")
    sequences = read_sequences(store, answers, name=name, max_length=params.cache.max_length)
    opened = open_target(workspace, params, name)
    row = opened.place.row
    spec = CacheSpec(
        num_layers=len(row.capture_layers),
        hidden_size=row.hidden_size,
        codec=row.codec,
        last_hidden=row.last_hidden,
        shard_tokens=params.cache.shard_tokens,
        chunk_tokens=params.cache.chunk_tokens,
        batch_tokens=params.cache.batch_tokens,
        seed=params.cache.seed,
    )
    lengths = [SampleLength(item.id, len(item.input_ids), len(item.label_positions)) for item in sequences.items]
    plan = plan_cache(lengths, spec=spec)
    facts = {
        "target": name,
        "target_digest": opened.place.digest,
        "tokenizer_digest": opened.chat.digest(),
        "capture_convention": CAPTURE_CONVENTION,
        "capture_layers": list(row.capture_layers),
        "dtype": row.dtype,
        "data_digest": answers.digest,
        "validation_ids": sorted(item.id for item in sequences.items if item.split == "validation"),
        "counts": sequences.counts,
    }
    identity = {"format": FORMAT_VERSION, "plan": plan.digest, "facts": facts}
    prefix = f"cache/{name}-{hash8(identity)}"
    lease_s = float(os.environ.get("DRAFTSMITH_LEASE_S", DEFAULT_LEASE_S))
    writer = CacheWriter(
        store, prefix=prefix, plan=plan, facts=facts, owner=Owner.this_process(processor=processor()), lease_s=lease_s
    )
    tags = {"target": name, "data_digest": answers.digest}
    run_name = name if part is None else f"{name}-slice-{part[0]}-of-{part[1]}"
    with stage_run("cache", run_name, workspace=workspace, params=params.cache.model_dump(), tags=tags) as tracked:
        started = time.monotonic()
        num_computed = _write(writer, plan, sequences, opened, part=part)
        rate = num_computed / (time.monotonic() - started)
        if part is not None:
            tracked.log_metrics({"tokens_per_s": rate}, step=0)
            return
        manifest = writer.finish()
        tracked.log_metrics(
            {
                "tokens_per_s": rate,
                "num_tokens": plan.num_tokens,
                "num_shards": len(plan.shards),
                "logical_bytes": sum(plan.logical_bytes.values()),
                "stored_bytes": sum(item.size for item in manifest.objects),
            },
            step=0,
        )
        uri = f"{store.uri}/{prefix}"
        tracked.log_dataset(uri=uri, digest=manifest.digest, name=prefix, context="target cache")
    manifest.write(workspace.cache_manifest(name))


def parse_slice(text: str | None) -> tuple[int, int] | None:
    """`i/n` with 0 <= i < n."""
    if text is None:
        return None
    index, _, count = text.partition("/")
    if not (index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise ParamsError("--slice cannot be read", got=text, expected="i/n with 0 <= i < n")
    return int(index), int(count)


def _write(
    writer: CacheWriter, plan: CachePlan, sequences: Sequences, opened: OpenTarget, *, part: tuple[int, int] | None
) -> int:
    """Write this slice's shards; returns the tokens that were computed now."""
    by_id = {item.id: item for item in sequences.items}
    mine = [shard for shard in plan.shards if part is None or shard.index % part[1] == part[0]]
    computed = 0
    with progress(
        f"cache@{opened.place.name}", total=sum(shard.num_tokens for shard in mine), unit="tokens"
    ) as advance:
        for shard in mine:
            if writer.is_done(shard):
                advance(shard.num_tokens)
                continue

            def compute(batch: tuple[PlannedSample, ...]) -> Iterator[SampleArrays]:
                nonlocal computed
                members = [by_id[sample.id] for sample in batch]
                yield from compute_batch(members, opened=opened)
                computed += sum(len(item.input_ids) for item in members)
                advance(sum(len(item.input_ids) for item in members))

            writer.write_shard(shard, compute)
    return computed


def compute_batch(members: list[Sequence], *, opened: OpenTarget) -> Iterator[SampleArrays]:
    """One forward pass over whole sequences, flat: no padding, attention sequence by sequence."""
    target = opened.target
    counts = [len(item.input_ids) for item in members]
    batch = FlatBatch.make([0] * len(members), counts=counts, slots=range(len(members)), device=target.device)
    ids = torch.from_numpy(np.concatenate([item.input_ids for item in members]).astype(np.int64))
    output = target.forward(ids.to(target.device), batch=batch, rows=target.new_rows())
    context, hidden = bf16_bits(output.captured), bf16_bits(output.last_hidden)
    ends = np.cumsum(counts)
    for item, end in zip(members, ends, strict=True):
        start = end - len(item.input_ids)
        rows = start + item.label_positions if opened.place.row.last_hidden == "labels" else slice(start, end)
        yield SampleArrays(item.input_ids, item.supervised, context[start:end], hidden[rows])


def bf16_bits(values: torch.Tensor) -> NDArray[np.uint16]:
    """A tensor as bfloat16 bits on the host."""
    return values.to(torch.bfloat16).cpu().contiguous().view(torch.int16).numpy().view(np.uint16)
