"""What a target cache will take before any of it is computed: bytes by array and codec, requests, hours, cost.

Under codec `plain` bytes are exact; under the others the hidden states shrink by a ratio that was measured or given.
Imports neither torch nor zarr. Letters: D hidden size, L captured layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, get_args

import numpy as np

from draftsmith.cache.layout import ArrayLayout, CacheSpec, Codec, SampleLength, array_layouts
from draftsmith.cache.plan import OPEN_SHARDS, CachePlan, plan_cache
from draftsmith.errors import CacheError

CODECS: tuple[Codec, ...] = get_args(Codec)

# Metadata: a zarr.json for each array with what else does not grow, the columns of a sample, the commit of a shard.
FIXED_BYTES = 7_000
BYTES_PER_SAMPLE = 18
BYTES_PER_COMMIT = 1_250
# zarr.json of the group and of each array, and of each column of the samples that and its values.
GROUP_OBJECTS, COLUMN_OBJECTS = 1, 12

# What a writer asks for each shard beside its objects. Puts: the claim, the commit record. Gets: the commit record
# before and after the claim, and for the manifest; its head; the claim before it is deleted.
PUTS_PER_SHARD = 2
GETS_PER_SHARD = 5
KEYS_PER_LIST = 1000

# How much is planned in full if only a number of tokens is known.
LEAST_SHARDS = 256
LEAST_SAMPLES, MOST_SAMPLES = 2_000, 60_000
SECONDS_PER_HOUR = 3600
TB = 1e12


@dataclass(frozen=True)
class Sourced:
    """A number, and where it comes from in words (`given`, `measured on 32 shards in STORE`)."""

    value: float
    source: str


@dataclass(frozen=True)
class Extent:
    """How much is to be cached. `logical` and `plain`: bytes by array, of the numbers and as codec `plain` stores."""

    num_samples: int
    num_tokens: int
    num_labels: int
    num_shards: int
    num_objects: int
    logical: Mapping[str, int]
    plain: Mapping[str, int]
    is_exact: bool


def planned_extent(plan: CachePlan) -> Extent:
    """That of a plan: exact."""
    return Extent(
        plan.num_samples, plan.num_tokens, plan.num_labels, plan.num_shards, plan.num_objects,
        plan.logical_bytes, plan.stored_bytes, is_exact=True,
    )  # fmt: skip


def scaled_extent(num_tokens: int, *, lengths: Sequence[SampleLength], spec: CacheSpec) -> Extent:
    """That of so many tokens in samples like `lengths`: all planned in full if they are few, else a part of them, whose
    shards tell how full those of the whole get.

    Raises CacheError for lengths that cannot be planned.
    """
    mean = sum(item.num_tokens for item in lengths) / len(lengths)
    num_samples = max(1, round(num_tokens / mean))
    enough = max(LEAST_SAMPLES, min(MOST_SAMPLES, round(LEAST_SHARDS * spec.shard_tokens / mean)))
    plan = plan_cache(_repeat(lengths, min(num_samples, enough)), spec=spec)
    if num_samples <= enough:
        return replace(planned_extent(plan), is_exact=False)
    # The last shards of a plan are not full yet.
    full = plan.shards[: max(plan.num_shards - OPEN_SHARDS, 1)]
    num_shards = num_tokens / (sum(shard.num_tokens for shard in full) / len(full))
    num_labels = round(num_tokens / mean * sum(item.num_labels for item in lengths) / len(lengths))
    num_rows = {"none": 0, "labels": num_labels, "all": num_tokens}[spec.last_hidden]
    num_objects, logical, plain = 0.0, {}, {}
    for layout in array_layouts(spec):
        sizes = [plan.object_bytes(layout, shard) for shard in full]
        bare = sum(layout.used_rows(shard) for shard in full) * layout.row_bytes
        logical[layout.name] = layout.row_bytes * (num_tokens if layout.rows == "tokens" else num_rows)
        plain[layout.name] = logical[layout.name] + round(num_shards * (sum(sizes) - bare) / len(full))
        num_objects += ceil(num_shards) * np.count_nonzero(sizes) / len(full)
    return Extent(
        num_samples, num_tokens, num_labels, ceil(num_shards), round(num_objects), logical, plain, is_exact=False
    )


def spread_lengths(mean_length: float, *, label_share: float, max_length: int) -> list[SampleLength]:
    """Lengths spread evenly around a mean as far as 2..`max_length` lets them, labels on a share of the tokens.

    Raises CacheError for a mean outside of 2..max_length.
    """
    if not 2 <= mean_length <= max_length:
        raise CacheError("mean length of a sample", got=mean_length, expected=f"2..{max_length} tokens (max_length)")
    reach = min(mean_length - 2, max_length - mean_length)
    lengths = np.rint(mean_length + reach * np.linspace(-1, 1, 1001)).astype(int)
    # Neighbours come far apart, so that any run of them has the mean of all.
    order = np.arange(len(lengths)) * 618 % len(lengths)
    return [
        SampleLength(str(place), length, min(length - 1, round(length * label_share)))
        for place, length in enumerate(lengths[order].tolist())
    ]


def _repeat(lengths: Sequence[SampleLength], count: int) -> Iterator[SampleLength]:
    for number in range(count):
        item = lengths[number % len(lengths)]
        yield SampleLength(str(number), item.num_tokens, item.num_labels)


@dataclass(frozen=True)
class Requests:
    """Requests to an S3 store. To build: `puts`, `gets` (heads among them), `lists`; `epoch_gets`: to read it once.

    Renewed claims (three a lease), retries and part uploads (there are none: one put an object) are not counted.
    """

    puts: int
    gets: int
    lists: int
    epoch_gets: int


@dataclass(frozen=True)
class CacheEstimate:
    """The cache of a target as it is planned. `basis` says in words what was known of its samples.

    `ratios`: what each codec that compresses shrinks hidden states by. `rate`: tokens/s of one device, if known;
    `price`: of a TB for a month, if given.
    """

    target: str
    spec: CacheSpec
    extent: Extent
    basis: Sequence[str]
    ratios: Mapping[Codec, Sourced]
    rate: Sourced | None
    price: float | None

    @property
    def layouts(self) -> tuple[ArrayLayout, ...]:
        return array_layouts(self.spec)

    @property
    def metadata_bytes(self) -> int:
        """Metadata and commit records, about."""
        extent = self.extent
        return FIXED_BYTES + BYTES_PER_SAMPLE * extent.num_samples + BYTES_PER_COMMIT * extent.num_shards

    def array_bytes(self, layout: ArrayLayout, codec: Codec) -> int:
        """Stored bytes of an array: exact if it is not compressed."""
        if codec == "plain" or layout.dtype != "uint16":
            return self.extent.plain[layout.name]
        return round(self.extent.logical[layout.name] / self.ratios[codec].value)

    def total_bytes(self, codec: Codec) -> int:
        """Everything that the cache takes in the store."""
        return sum(self.array_bytes(layout, codec) for layout in self.layouts) + self.metadata_bytes

    @property
    def reference_bytes(self) -> int:
        """What the reference implementation stores: 6 + 2 D (L + 1) bytes a token (METHOD 12)."""
        return self.extent.num_tokens * (6 + 2 * self.spec.hidden_size * (self.spec.num_layers + 1))

    @property
    def requests(self) -> Requests:
        """Of a build by one process without interruptions, and of one pass over the finished cache."""
        extent, num_arrays = self.extent, len(self.layouts)
        read = GROUP_OBJECTS + COLUMN_OBJECTS
        # The scales of int8 lie in the arrays' own metadata.
        scales = sum(layout.dtype == "uint16" for layout in self.layouts) if self.spec.codec == "int8" else 0
        pages = -(-extent.num_shards // KEYS_PER_LIST)
        # Each array before the first shard and for the manifest; commit records before, claims after.
        lists = num_arrays * (1 + pages) + 2
        return Requests(
            puts=extent.num_objects + PUTS_PER_SHARD * extent.num_shards + read + num_arrays,
            gets=GETS_PER_SHARD * extent.num_shards,
            lists=lists,
            epoch_gets=extent.num_objects + read + scales,
        )

    @property
    def device_hours(self) -> float | None:
        """Hours of one device, None if its rate is not known."""
        return None if self.rate is None else self.extent.num_tokens / self.rate.value / SECONDS_PER_HOUR

    def monthly_cost(self, codec: Codec) -> float | None:
        """Of the storage, in the currency of the price; None without a price."""
        return None if self.price is None else self.total_bytes(codec) / TB * self.price

    def to_json(self) -> dict[str, Any]:
        """Every figure, in bytes, hours and the currency of the price."""
        extent, requests = self.extent, self.requests
        return {
            "target": self.target,
            "codec": self.spec.codec,
            "exact": extent.is_exact,
            "basis": list(self.basis),
            "num_samples": extent.num_samples,
            "num_tokens": extent.num_tokens,
            "num_labels": extent.num_labels,
            "num_shards": extent.num_shards,
            "num_objects": extent.num_objects,
            "logical_bytes": dict(extent.logical),
            "array_bytes": {
                codec: {layout.name: self.array_bytes(layout, codec) for layout in self.layouts} for codec in CODECS
            },
            "metadata_bytes": self.metadata_bytes,
            "total_bytes": {codec: self.total_bytes(codec) for codec in CODECS},
            "ratios": {codec: {"value": item.value, "source": item.source} for codec, item in self.ratios.items()},
            "reference_bytes": self.reference_bytes,
            "requests": {
                "puts": requests.puts, "gets": requests.gets, "lists": requests.lists,
                "gets_an_epoch": requests.epoch_gets,
            },
            "tokens_per_s": None if self.rate is None else self.rate.value,
            "device_hours": self.device_hours,
            "price_per_tb_month": self.price,
            "monthly_cost": {codec: self.monthly_cost(codec) for codec in CODECS},
        }  # fmt: skip

    @property
    def text(self) -> str:
        """The figures for people: a table of arrays and codecs, then a line each for what else it takes."""
        return "\n".join([*self._head(), "", *self._table(), "", *self._lines()])

    def _head(self) -> Iterator[str]:
        extent, spec = self.extent, self.spec
        about = "" if extent.is_exact else "about "
        yield f"Target cache of {self.target}: {extent.num_tokens:,} tokens in {about}{extent.num_samples:,} samples"
        yield from (f"  {line}" for line in self.basis)
        kept = {"labels": "of label positions", "all": "of all positions", "none": "not kept"}[spec.last_hidden]
        yield f"  {spec.num_layers} captured layers of {spec.hidden_size} in bfloat16; last hidden states {kept}"

    def _table(self) -> Iterator[str]:
        heads = ["array", "numbers", *(f"{codec} *" if codec == self.spec.codec else codec for codec in CODECS)]
        rows = [
            [layout.name, size_text(self.extent.logical[layout.name])]
            + [size_text(self.array_bytes(layout, codec)) for codec in CODECS]
            for layout in self.layouts
        ]
        rows.append(["metadata, records", "", *[size_text(self.metadata_bytes)] * len(CODECS)])
        totals = [size_text(self.total_bytes(codec)) for codec in CODECS]
        rows.append(["in all", size_text(sum(self.extent.logical.values())), *totals])
        shares = [f"{self.total_bytes(codec) / self.reference_bytes:.1%}" for codec in CODECS]
        rows.append([f"of the {size_text(self.reference_bytes)} of the reference", "", *shares])
        if self.price is not None:
            costs = [f"{self.total_bytes(codec) / TB * self.price:,.2f}" for codec in CODECS]
            rows.append([f"a month, at {self.price:g} a TB", "", *costs])
        widths = [max(len(row[place]) for row in [heads, *rows]) for place in range(len(heads))]
        for row in [heads, *rows]:
            first, *others = (f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
            yield "  ".join([row[0].ljust(len(first)), *others]).rstrip()

    def _lines(self) -> Iterator[str]:
        extent, requests, codec = self.extent, self.requests, self.spec.codec
        total, about = self.total_bytes(codec), "" if extent.is_exact else "about "
        yield f"* Codec      {codec} (params.yaml): {size_text(total)}"
        plain = "exact" if extent.is_exact else "exact for the samples assumed"
        yield f"  Ratios     plain is {plain}; of the numbers that are hidden states, the others store"
        yield from (
            f"             {name}: 1 byte for {item.value:.3g} ({item.source})" for name, item in self.ratios.items()
        )
        per_shard = f"up to {self.spec.shard_tokens:,} tokens each"
        yield f"  Shards     {about}{extent.num_shards:,}, {per_shard}, in {about}{extent.num_objects:,} objects"
        build = f"{requests.puts:,} puts, {requests.gets:,} gets, {requests.lists:,} lists to build it on S3"
        yield f"  Requests   {build}; {requests.epoch_gets:,} gets an epoch"
        if self.rate is None or self.device_hours is None:
            yield "  Hours      not known, for no rate was measured here yet: --tokens-per-s gives one"
        else:
            rate = f"{self.rate.value:,.0f} tokens/s ({self.rate.source})"
            yield f"  Hours      {_three_digits(self.device_hours)} of one device at {rate}"
        cost = self.monthly_cost(codec)
        if cost is None:
            yield "  Cost       not known: --price-per-tb-month or DRAFTSMITH_PRICE_PER_TB_MONTH gives the price"
        else:
            yield f"  Cost       {cost:,.2f} a month at {self.price:g} a TB"
        reference = f"the reference layout, {self.reference_bytes // extent.num_tokens:,} bytes a token"
        saving = size_text(self.reference_bytes - total)
        yield f"  Saving     {saving} of {size_text(self.reference_bytes)} ({reference})"


def size_text(num_bytes: float) -> str:
    """Bytes in decimal units, three digits: 38.1 TB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(num_bytes) < 999.5:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{_three_digits(num_bytes)} {unit}"
        num_bytes /= 1000
    return f"{_three_digits(num_bytes)} TB"


def _three_digits(value: float) -> str:
    """At least three digits, in front of the point all there are: 0.123, 12.3, 1,234."""
    return f"{value:,.{max(0, 3 - len(str(int(abs(value)))))}f}"
