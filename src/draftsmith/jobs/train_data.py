"""What a training run reads: which samples train and which validate, the drafter's start, the validation batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from draftsmith.cache.plan import CacheSpec, PlannedSample
from draftsmith.cache.reader import CachedSample, CacheReader, SampleSource
from draftsmith.drafters.base import Drafter, DrafterConfig
from draftsmith.drafters.dspark import DSpark
from draftsmith.drafters.registry import start_from_target
from draftsmith.drafters.start import start_markov_head
from draftsmith.errors import ContractError, TrainingError
from draftsmith.jobs.parts import TargetFolder
from draftsmith.manifest import Manifest, json_digest
from draftsmith.nn.block import BlockBatch, candidate_anchors
from draftsmith.params import Train
from draftsmith.storage import Store
from draftsmith.text.chat import ChatFormat
from draftsmith.training.batches import BatchShape, bf16_tensor, make_block_batch


@dataclass(frozen=True)
class Members:
    """Cache indices of the samples that train and of those that validate, each ascending."""

    train: list[int]
    held_out: list[int]


class Feed(Protocol):
    """Where a training run's samples come from. `digest`, `prefix`, `uri` name the cache in checkpoints and MLflow."""

    digest: str
    prefix: str
    uri: str
    source: SampleSource
    members: Members

    def start_samples(self) -> Iterator[CachedSample]:
        """Training samples, in index order, for the drafter's start on rank 0; the caller may stop early."""
        ...

    def settle(self) -> None:
        """Called by every rank after the start: from here on the validation samples can be read."""
        ...

    def passed(self, step: int) -> None:
        """Called by every rank after update `step`: every rank has read all that it needs up to there."""
        ...

    def figures(self) -> dict[str, float]:
        """What there is to tell of the reading beside the loader's own figures."""
        ...

    def finish(self) -> None:
        """Called once the drafter is written."""
        ...

    def close(self) -> None:
        """Called at the end, however it ends."""
        ...


class CacheFeed:
    """A cache that lies whole in the store."""

    def __init__(self, store: Store, manifest: Manifest, *, recipe: Train) -> None:
        self.digest, self.prefix, self.uri = cache_digest(manifest), manifest.prefix, f"{store.uri}/{manifest.prefix}"
        self._reader = CacheReader(store, manifest)
        self.source: SampleSource = self._reader
        self.members = find_members(self.source.samples, self.source.facts, recipe=recipe)

    def start_samples(self) -> Iterator[CachedSample]:
        self.source.follow(self.members.train)
        return (self.source.read(index, epoch=-1) for index in self.members.train)

    def settle(self) -> None:
        return

    def passed(self, step: int) -> None:
        return

    def figures(self) -> dict[str, float]:
        return {}

    def finish(self) -> None:
        return

    def close(self) -> None:
        self._reader.close()


def cache_digest(manifest: Manifest) -> str:
    """What a drafter was trained from: the digest of the cache's objects, in streaming mode that of plan and facts.

    A cache that streams has no objects to digest; the same plan and facts make the same shards each time.
    """
    return json_digest(manifest.facts) if manifest.is_stream else manifest.digest


def check_cache(manifest: Manifest, place: TargetFolder, *, chat: ChatFormat, made_for: Mapping[str, Any]) -> None:
    """Raises ContractError that names the first field in which the cache was made for another target or text than the
    drafter will be, as its contract's facts `made_for` say.

    A cache has one digest for tokenizer, template and end-of-text ids together.
    """
    expected = {
        "target": place.name,
        "target_digest": made_for["target_digest"],
        "tokenizer_digest": chat.digest(),
        "capture_convention": made_for["capture_convention"],
        "capture_layers": list(made_for["capture_layers"]),
        "dtype": place.row.dtype,
    }
    told = {"tokenizer_digest": "tokenizer_digest (of tokenizer, template and end-of-text ids)"}
    for name, value in expected.items():
        if manifest.facts.get(name) != value:
            raise _other_cache(manifest.prefix, told.get(name, name), manifest.facts.get(name), value, place.name)


def check_arrays(spec: CacheSpec, config: DrafterConfig, *, reads_last_hidden: bool, prefix: str, target: str) -> None:
    """Raises ContractError that names the first of the cache's sizes with which this drafter cannot be trained."""
    expected = {
        "hidden_size": (spec.hidden_size, config.geometry.hidden_size),
        "number of capture_layers": (spec.num_layers, len(config.capture_layers)),
        "last_hidden": (spec.last_hidden, "all" if reads_last_hidden else spec.last_hidden),
    }
    for name, (got, wanted) in expected.items():
        if got != wanted:
            raise _other_cache(prefix, name, got, wanted, target)


def _other_cache(prefix: str, field: str, got: object, expected: object, target: str) -> ContractError:
    return ContractError(
        f"the cache {prefix} was made with another {field}", got=got, expected=expected,
        where=f"dvc repro cache@{target}",
    )  # fmt: skip


def find_members(samples: Iterable[PlannedSample], facts: dict[str, Any], *, recipe: Train) -> Members:
    """Training and validation samples with enough supervised tokens (labels + 1).

    With `max_supervised_tokens` training takes the first samples that fit. Raises TrainingError if none validates.
    """
    held = frozenset(facts["validation_ids"])
    members: list[int] = []
    held_out: list[int] = []
    left = recipe.max_supervised_tokens
    for index, sample in enumerate(samples):
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
    return Members(members, held_out)


def start_backbone(drafter: Drafter, *, place: TargetFolder) -> None:
    """The backbone from the target's last layers."""
    start_from_target(drafter, target_folder=place.folder)


def start_head(drafter: Drafter, samples: Iterator[CachedSample]) -> None:
    """The sequential head, if there is one, from the target's label states on training samples."""
    if isinstance(drafter, DSpark):
        rows = (
            (torch.from_numpy(item.input_ids[item.label_positions].astype("int64")), bf16_tensor(item.last_hidden))
            for item in samples
        )
        start_markov_head(drafter, rows=rows)


def held_out_batches(feed: Feed, *, recipe: Train, shape: BatchShape, rank: int, num_ranks: int) -> list[BlockBatch]:
    """This rank's validation micro-batches; anchors are drawn once, the same at every validation."""
    batches: list[BlockBatch] = []
    samples: list[tuple[CachedSample, int]] = []
    mine = feed.members.held_out[rank::num_ranks]
    # Made as they fill up: a sample that is kept keeps its whole shard in memory.
    for index in mine:
        sample = feed.source.read(index, epoch=-1)
        if len(candidate_anchors(sample.supervised)):
            samples.append((sample, -1))
        if samples and (len(samples) == recipe.micro_batch or index == mine[-1]):
            batches.append(make_block_batch(samples, shape=shape, seed=recipe.seed))
            samples = []
    return batches
