"""`draftsmith plan`: what the cache of a target will take, before a GPU is touched. No torch, no weights."""

from __future__ import annotations

import itertools
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from draftsmith.cache.commits import ShardCommit, read_commit
from draftsmith.cache.estimate import (
    CacheEstimate,
    Sourced,
    planned_extent,
    scaled_extent,
    spread_lengths,
)
from draftsmith.cache.layout import CacheSpec, Codec, SampleLength, array_layouts
from draftsmith.cache.plan import plan_cache
from draftsmith.errors import CacheError, ObjectMissingError, ParamsError
from draftsmith.jobs.stores import workspace_store
from draftsmith.manifest import Manifest
from draftsmith.params import Params
from draftsmith.paths import Workspace
from draftsmith.storage import Store

# Measured on the hidden states of SmolLM2-135M-Instruct (16,341 tokens of its own answers, 5 layers and the last).
SHIPPED_RATIOS: dict[Codec, float] = {"bf16": 1.49, "int8": 2.27}
SHIPPED = "shipped, measured on SmolLM2-135M"
# Open-PerfectBlend answered by Qwen3: 1.24 G tokens in 1.3 M samples (METHOD 12); a prompt is about a seventh of that.
DEFAULT_MEAN_LENGTH = 954
DEFAULT_LABEL_SHARE = 0.85

# What an option may be: from, to. Beyond that a figure says nothing, and infinity or nan would run through all others.
RANGES: dict[str, tuple[float, float]] = {
    "--tokens": (1, 1e15),
    "--mean-length": (2, 1e9),
    "--label-share": (0, 1),
    "--tokens-per-s": (1e-3, 1e12),
    "--price-per-tb-month": (0, 1e12),
    "--ratio": (1e-2, 1e4),
}

LIKE_ANSWERS = 2_000  # whose lengths a plan for a number of tokens follows
SAMPLED_SHARDS = 32  # of each cache of the target
LISTED_COMMITS = 5_000
READERS = 8


def run(
    workspace: Workspace, params: Params, name: str, *, tokens: int | None, answers: Path | None,
    mean_length: float | None, label_share: float | None, tokens_per_s: float | None,
    price_per_tb_month: float | None, ratio: float | None,
) -> CacheEstimate:  # fmt: skip
    """Plan the cache of target `name` from its answers, or for a number of `tokens`.

    Ratio and rate are those given, else measured on what the store holds of this target's caches, else what is shipped
    (ratio) or not known (rate). Raises ParamsError for options that do not go together or answers that are not there,
    CacheError for answers that cannot be planned, and errors of the store.
    """
    row = params.target(name)
    _check_ranges({
        "--tokens": tokens, "--mean-length": mean_length, "--label-share": label_share, "--tokens-per-s": tokens_per_s,
        "--price-per-tb-month": price_per_tb_month, "--ratio": ratio,
    })  # fmt: skip
    if tokens is None and (mean_length is not None or label_share is not None):
        raise ParamsError("--mean-length and --label-share describe samples that are not there yet",
                          expected="--tokens N with them")  # fmt: skip
    if ratio is not None and row.codec == "plain":
        raise ParamsError("--ratio is of a codec that compresses", got=f"targets.{name}.codec plain")
    spec = CacheSpec(
        num_layers=len(row.capture_layers), hidden_size=row.hidden_size, codec=row.codec,
        last_hidden=row.last_hidden, shard_tokens=params.cache.shard_tokens, chunk_tokens=params.cache.chunk_tokens,
        batch_tokens=params.cache.batch_tokens, seed=params.cache.seed,
    )  # fmt: skip
    known = _Answers(workspace, name, params.cache.max_length, path=answers)
    if tokens is None:
        plan, basis = plan_cache(known.lengths(), spec=spec), known.basis
        extent = planned_extent(plan)
    else:
        lengths, basis = _like(known, mean_length, label_share)
        extent = scaled_extent(tokens, lengths=lengths, spec=spec)
    sampled = Sampled({}, None)
    if (ratio is None and row.codec != "plain") or tokens_per_s is None:
        sampled = sample_shards(workspace_store(workspace), name, spec=spec)
    ratios = {codec: Sourced(value, SHIPPED) for codec, value in SHIPPED_RATIOS.items()} | dict(sampled.ratios)
    if ratio is not None:
        ratios[row.codec] = Sourced(ratio, "given")
    rate = sampled.rate if tokens_per_s is None else Sourced(tokens_per_s, "given")
    return CacheEstimate(name, spec, extent, basis(), ratios, rate, price_per_tb_month)


def parse_tokens(text: str) -> int:
    """`1240000000`, `1.24G`, `1e9` -> tokens. Raises ParamsError."""
    match = re.fullmatch(r"([0-9]{1,24}(?:\.[0-9]{1,24})?)(?:([kMGT])|[eE]([0-9]{1,2}))?", text.strip())
    if match is not None:
        exponent = {"k": 3, "M": 6, "G": 9, "T": 12}[match[2]] if match[2] else int(match[3] or 0)
        number = Decimal(match[1]).scaleb(exponent)
        if number >= 1 and number == int(number):
            return int(number)
    expected = "a whole number of 1 or more, such as 1240000000, 1.24G or 1e9"
    raise ParamsError("--tokens cannot be read", got=repr(text), expected=expected)


def _check_ranges(options: Mapping[str, float | None]) -> None:
    for option, value in options.items():
        low, high = RANGES[option]
        if value is not None and not low <= value <= high:
            raise ParamsError(f"{option} is out of its range", got=value, expected=f"{low:g}..{high:g}")


class _Answers:
    """The answers to plan from: those of the manifest at `path`, or (None) the target's own, which may not be there."""

    def __init__(self, workspace: Workspace, name: str, max_length: int, *, path: Path | None) -> None:
        self._workspace, self._name, self.max_length = workspace, name, max_length
        self._path = workspace.answers_manifest(name) if path is None else path
        self.are_there = path is not None or self._path.exists()
        self._counts: dict[str, int] = {}
        self.prefix = ""

    def lengths(self) -> Iterator[SampleLength]:
        """The length of every answer. Raises ParamsError if there are none, and what reading them raises."""
        if not self.are_there:
            raise ParamsError(
                f"no answers of {self._name} to plan from",
                got=f"no file {self._path}",
                expected=f"--tokens N for a number of tokens, or `dvc repro answers@{self._name}` first",
            )
        # Imported here: pyarrow takes half a second, and a plan for a number of tokens may not need it.
        from draftsmith.jobs.sequences import new_counts, read_lengths

        manifest = Manifest.read(self._path, "answers")
        self.prefix, self._counts = manifest.prefix, new_counts()
        store = workspace_store(self._workspace)
        yield from read_lengths(store, manifest, name=self._name, max_length=self.max_length, counts=self._counts)

    def basis(self) -> list[str]:
        """What was read, in words."""
        counted = ", ".join(f"{count:,} {reason.replace('_', ' ')}" for reason, count in self._counts.items() if count)
        return [f"the lengths of all answers in {self.prefix}" + (f" ({counted})" if counted else "")]


def _like(
    known: _Answers, mean_length: float | None, label_share: float | None
) -> tuple[Sequence[SampleLength], Callable[[], list[str]]]:
    """Lengths to plan like, and where they come from: the options, else the answers that are there, else assumed."""
    like: list[SampleLength] = []
    if known.are_there and (mean_length is None or label_share is None):
        like = list(itertools.islice(known.lengths(), LIKE_ANSWERS))
    source = f"as in {len(like):,} answers of {known.prefix}" if like else "assumed"
    num_tokens = sum(item.num_tokens for item in like)
    mean, share = float(min(DEFAULT_MEAN_LENGTH, known.max_length)), DEFAULT_LABEL_SHARE
    if like:
        mean, share = num_tokens / len(like), sum(item.num_labels for item in like) / num_tokens
    sources = [source if given is None else "given" for given in (mean_length, label_share)]
    mean, share = (found if given is None else given for found, given in ((mean, mean_length), (share, label_share)))
    told = [f"{mean:,.4g} tokens a sample ({sources[0]})", f"{share:.1%} of the tokens with a label ({sources[1]})"]
    is_like = bool(like) and mean_length is None and label_share is None
    lengths = like if is_like else spread_lengths(mean, label_share=share, max_length=known.max_length)
    return lengths, lambda: told


@dataclass(frozen=True)
class Sampled:
    """What the shards of a target's caches in a store tell: a codec's ratio, the tokens/s of a device."""

    ratios: Mapping[Codec, Sourced]
    rate: Sourced | None


def sample_shards(store: Store, name: str, *, spec: CacheSpec) -> Sampled:
    """Read commit records of the caches of target `name` that hold the layers of `spec`, up to SAMPLED_SHARDS each.

    The ratio is that of the hidden states. The rate is the median of the shards that the kind of processor computed
    which computed most of them. Records of before they told tokens and seconds are left out.
    """
    shards = _list_shards(store, name)
    found: dict[Codec, list[ShardCommit]] = defaultdict(list)
    with ThreadPoolExecutor(READERS) as pool:
        for prefix, numbers in shards.items():
            codec = _codec_of(store, prefix, spec=spec)
            if codec is None:
                continue
            step = -(-len(numbers) // SAMPLED_SHARDS)
            read = pool.map(lambda number, prefix=prefix: _read_commit(store, prefix, number), numbers[::step])
            found[codec] += [record for record in read if record is not None]
    ratios: dict[Codec, Sourced] = {}
    for codec, records in found.items():
        ratio = _ratio(records, spec)
        if codec != "plain" and ratio is not None:
            ratios[codec] = Sourced(ratio, f"measured on {_shards(len(records))} in the store")
    return Sampled(ratios, _rate([record for records in found.values() for record in records]))


def _list_shards(store: Store, name: str) -> dict[str, list[int]]:
    """Prefix -> numbers of the committed shards of the target's caches, up to LISTED_COMMITS in all."""
    pattern = re.compile(rf"records/(cache/{re.escape(name)}-[0-9a-f]{{8}})/commits/(\d+)\.json")
    matches = (pattern.fullmatch(item.path) for item in store.list("records/cache"))
    found: dict[str, list[int]] = defaultdict(list)
    for match in itertools.islice(filter(None, matches), LISTED_COMMITS):
        found[match[1]].append(int(match[2]))
    return found


def _codec_of(store: Store, prefix: str, *, spec: CacheSpec) -> Codec | None:
    """The codec of a cache of the same layers; None for another, or one that cannot tell."""
    try:
        told = json.loads(store.get(f"{prefix}/zarr.json"))["attributes"]["draftsmith"]["spec"]
        same = (told["num_layers"], told["hidden_size"]) == (spec.num_layers, spec.hidden_size)
        return told["codec"] if same else None
    except (ObjectMissingError, ValueError, KeyError, TypeError):
        return None


def _read_commit(store: Store, prefix: str, shard: int) -> ShardCommit | None:
    try:
        return read_commit(store, prefix, shard)
    except CacheError:
        return None


def _ratio(records: Sequence[ShardCommit], spec: CacheSpec) -> float | None:
    """Bytes of the hidden states themselves by bytes stored of them."""
    coded = {layout.name for layout in array_layouts(spec) if layout.dtype == "uint16"}
    bare = sum(layout.row_bytes for layout in array_layouts(spec) if layout.name not in coded)
    logical = sum(record.logical_bytes - bare * record.num_tokens for record in records)
    stored = sum(item.size for record in records for item in record.objects if item.path.partition("/")[0] in coded)
    return logical / stored if stored else None


def _rate(records: Sequence[ShardCommit]) -> Sourced | None:
    by_processor: dict[str, list[float]] = defaultdict(list)
    for record in records:
        if record.compute_s > 0:
            by_processor[record.processor].append(record.num_tokens / record.compute_s)
    if not by_processor:
        return None
    processor, rates = max(by_processor.items(), key=lambda item: len(item[1]))
    # The median, because the first shard of a process also waits for the target to be opened.
    return Sourced(statistics.median(rates), f"measured on {processor}, {_shards(len(rates))}")


def _shards(count: int) -> str:
    return f"{count:,} shard" + "s" * (count != 1)
