"""Stage `cache@TARGET`: captured hidden states of every answer, planned to the byte and written shard by shard."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from draftsmith.cache.arrays import SampleArrays
from draftsmith.cache.claims import Owner
from draftsmith.cache.plan import CachePlan, CacheSpec, PlannedSample, SampleLength, plan_cache
from draftsmith.cache.references import register
from draftsmith.cache.scales import fit_plan
from draftsmith.cache.stream_plan import storage_limit
from draftsmith.cache.writer import MANIFEST_KIND, CacheWriter, WriteReport, plan_totals
from draftsmith.drafters.contract import CAPTURE_CONVENTION
from draftsmith.errors import ParamsError, ShardClaimedError
from draftsmith.jobs.parts import TargetFolder, load_placed, processor, target_folder
from draftsmith.jobs.progress import progress
from draftsmith.jobs.sequences import Sequence, Sequences, read_sequences
from draftsmith.jobs.stores import workspace_store
from draftsmith.manifest import Manifest, hash8
from draftsmith.nn.kv import FlatBatch
from draftsmith.params import Params
from draftsmith.paths import Workspace
from draftsmith.storage import Store, describe_retries
from draftsmith.targets.base import Target
from draftsmith.targets.fetch import load_chat_format
from draftsmith.targets.host_copy import HostCopy
from draftsmith.tracking import StageRun, stage_run

FORMAT_VERSION = 3
DEFAULT_LEASE_S = 120.0
LONGEST_LEASE_S = 365 * 86400.0
LEASE_VARIABLE = "DRAFTSMITH_LEASE_S"


@dataclass(frozen=True)
class PlannedCache:
    """The cache of target `name` before anything of it is computed: what it will hold, and where (`prefix`)."""

    name: str
    plan: CachePlan
    facts: dict[str, Any]
    prefix: str
    sequences: Sequences
    place: TargetFolder


def planned_cache(workspace: Workspace, params: Params, name: str) -> PlannedCache:
    """Plan the cache of a target from its answers. Loads no weights and writes nothing."""
    answers = Manifest.read(workspace.answers_manifest(name), "answers")
    sequences = read_sequences(workspace_store(workspace), answers, name=name, max_length=params.cache.max_length)
    place = target_folder(workspace, params, name)
    row = place.row
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
        "target_digest": place.digest,
        "tokenizer_digest": load_chat_format(place.folder).digest(),
        "capture_convention": CAPTURE_CONVENTION,
        "capture_layers": list(row.capture_layers),
        "dtype": row.dtype,
        "data_digest": answers.digest,
        "validation_ids": sorted(item.id for item in sequences.items if item.split == "validation"),
        "counts": sequences.counts,
    }
    identity = {"format": FORMAT_VERSION, "plan": plan.digest, "facts": facts}
    return PlannedCache(name, plan, facts, f"cache/{name}-{hash8(identity)}", sequences, place)


class Computer:
    """The target at work on planned batches (a Compute of the writer); it is opened by the first batch.

    One batch is in flight: while the device computes it, the host takes over the one before.
    """

    def __init__(self, workspace: Workspace, params: Params, planned: PlannedCache) -> None:
        self._place = planned.place
        self._by_id = {item.id: item for item in planned.sequences.items}
        self._target: Target | None = None

    def __call__(self, batches: Iterable[tuple[PlannedSample, ...]]) -> Iterator[list[SampleArrays]]:
        """For each batch, in order, the arrays of its samples."""
        in_flight: tuple[list[Sequence], HostCopy] | None = None
        for batch in batches:
            members = [self._by_id[sample.id] for sample in batch]
            launched = members, self._launch(members)
            if in_flight is not None:
                yield list(self._land(*in_flight))
            in_flight = launched
        if in_flight is not None:
            yield list(self._land(*in_flight))

    def _launch(self, members: list[Sequence]) -> HostCopy:
        """One forward pass over whole sequences, flat: no padding, attention sequence by sequence."""
        if self._target is None:
            self._target = load_placed(self._place)
        target, counts = self._target, [len(item.input_ids) for item in members]
        batch = FlatBatch.make([0] * len(members), counts=counts, slots=range(len(members)), device=target.device)
        ids = torch.from_numpy(np.concatenate([item.input_ids for item in members]).astype(np.int64))
        output = target.forward(ids.to(target.device), batch=batch, rows=target.new_rows())
        if self._place.row.last_hidden == "all":
            return HostCopy([output.captured, output.last_hidden])
        starts = np.cumsum(counts) - counts
        kept = [start + item.label_positions for start, item in zip(starts, members, strict=True)]
        rows = torch.from_numpy(np.concatenate(kept)).to(target.device)
        return HostCopy([output.captured, output.last_hidden[rows]])

    def _land(self, members: list[Sequence], copy: HostCopy) -> Iterator[SampleArrays]:
        context, hidden = copy.wait()
        start = hidden_start = 0
        for item in members:
            num_rows = len(item.input_ids if self._place.row.last_hidden == "all" else item.label_positions)
            end, hidden_end = start + len(item.input_ids), hidden_start + num_rows
            yield SampleArrays(item.input_ids, item.supervised, context[start:end], hidden[hidden_start:hidden_end])
            start, hidden_start = end, hidden_end


def run(workspace: Workspace, params: Params, name: str, *, part: tuple[int, int] | None) -> None:
    """Write all shards (or slice i of n: `part`) and, when all are there and no slice was asked for, the manifest.

    A cache that is planned larger than DRAFTSMITH_CACHE_MAX_BYTES is only planned: its manifest has mode "stream" and
    no objects, and training makes the shards as it needs them.
    Raises ShardClaimedError, when everything else is done, if live processes hold some of the shards.
    """
    planned = planned_cache(workspace, params, name)
    limit = storage_limit()
    if limit is not None and sum(planned.plan.stored_bytes.values()) > limit:
        if part is None:
            stream_manifest(planned).write(workspace.cache_manifest(name))
        return
    store, plan, prefix = workspace_store(workspace), planned.plan, planned.prefix
    computer = Computer(workspace, params, planned)
    writer = CacheWriter(
        store, prefix=prefix, plan=plan, facts=planned.facts, owner=Owner.this_process(processor=processor()),
        lease_s=lease_s(), scales=lambda: fit_plan(plan, computer),
    )  # fmt: skip
    tags = {"target": name, "data_digest": planned.facts["data_digest"]}
    run_name = name if part is None else f"{name}-slice-{part[0]}-of-{part[1]}"
    with stage_run("cache", run_name, workspace=workspace, params=params.cache.model_dump(), tags=tags) as tracked:
        try:
            if part is None:
                # Before the first object, so that no collector takes what is begun for abandoned. A slice's machine may
                # be gone tomorrow, and nobody could tell.
                register(store, prefix, root=workspace.root)
            started = time.monotonic()
            report = _write(writer, planned, computer, part=part)
            rate = report.num_tokens / (time.monotonic() - started)
            tracked.log_metrics({"tokens_per_s": rate}, step=0)
            if report.claimed:
                raise ShardClaimedError(
                    f"{len(report.claimed)} shards of {prefix} are held by other processes, all others are done",
                    got="; ".join(report.claimed),
                    expected="to run again when they have ended",
                )
            if part is not None:
                return
            manifest = writer.finish()
            tracked.log_metrics(
                {
                    "num_tokens": plan.num_tokens,
                    "num_shards": plan.num_shards,
                    "logical_bytes": sum(plan.logical_bytes.values()),
                    "stored_bytes": manifest.num_bytes,
                },
                step=0,
            )
            uri = f"{store.uri}/{prefix}"
            tracked.log_dataset(uri=uri, digest=manifest.digest, name=prefix, context="target cache")
        finally:
            _tell_retries(store, tracked)
    manifest.write(workspace.cache_manifest(name))
    register(store, prefix, root=workspace.root)


def stream_manifest(planned: PlannedCache) -> Manifest:
    """The manifest of a cache that is only planned."""
    facts = {**planned.facts, "mode": "stream", "totals": plan_totals(planned.plan)}
    return Manifest(MANIFEST_KIND, planned.prefix, (), facts)


def lease_s() -> float:
    """Seconds that a claim lasts without being renewed. Raises ParamsError if DRAFTSMITH_LEASE_S is no such number."""
    text = os.environ.get(LEASE_VARIABLE, "")
    try:
        seconds = float(text) if text else DEFAULT_LEASE_S
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= LONGEST_LEASE_S:
        expected = f"seconds > 0, {LONGEST_LEASE_S:.0f} (a year) at most"
        raise ParamsError("the lease of a claim cannot be read", got=text, expected=expected, where=LEASE_VARIABLE)
    return seconds


def parse_slice(text: str | None) -> tuple[int, int] | None:
    """`i/n` with 0 <= i < n."""
    if text is None:
        return None
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise ParamsError("--slice cannot be read", got=text, expected="i/n with 0 <= i < n")
    return int(match[1]), int(match[2])


def _tell_retries(store: Store, tracked: StageRun) -> None:
    """Say on stderr and in MLflow what the store had to do again."""
    told = describe_retries(store.retries)
    if told:
        sys.stderr.write(f"draftsmith: requests to {store.uri} that were repeated: {told}\n")
    tracked.log_metrics({f"store_retries/{reason}": count for reason, count in store.retries.items()}, step=0)


def _write(
    writer: CacheWriter, planned: PlannedCache, computer: Computer, *, part: tuple[int, int] | None
) -> WriteReport:
    """Write those shards of this slice that are not done."""
    mine = [shard for shard in planned.plan.shards if part is None or shard.index % part[1] == part[0]]
    pending = writer.pending(mine)
    with progress(f"cache@{planned.name}", total=sum(shard.num_tokens for shard in pending), unit="tokens") as advance:

        def compute(batches: Iterable[tuple[PlannedSample, ...]]) -> Iterator[list[SampleArrays]]:
            for arrays in computer(batches):
                yield arrays
                advance(sum(len(item.input_ids) for item in arrays))

        return writer.write_shards(pending, compute)
