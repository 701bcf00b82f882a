"""What the target computed for a sample, checked against the plan and put where the plan says in its shard's rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from draftsmith.cache.plan import ArrayLayout, PlannedSample, ShardPlan
from draftsmith.cache.planes import are_finite
from draftsmith.cache.recycled import RecycledMemory
from draftsmith.errors import CacheError

BF16_EXPONENT = 0x7F80


@dataclass(frozen=True)
class SampleArrays:
    """What the target computed for one sample of T tokens, n label rows; bfloat16 bits as uint16.

    input_ids int32 [T], supervised uint8 [T] of 0 and 1, context uint16 [T, L, D], last_hidden uint16 [n, D] (None if
    the plan keeps none).
    """

    input_ids: np.ndarray
    supervised: np.ndarray
    context: np.ndarray
    last_hidden: np.ndarray | None


# Batches in, for each in order the arrays of its samples out; it may look ahead in what comes in.
Compute = Callable[[Iterable[tuple[PlannedSample, ...]]], Iterator[Sequence[SampleArrays]]]


class ShardRows:
    """The rows of one shard: array name -> [used rows, ...], filled sample by sample, then taken array by array.

    `memory` by array name is where they lie.
    """

    def __init__(
        self, shard: ShardPlan, *, layouts: Sequence[ArrayLayout], memory: Mapping[str, RecycledMemory]
    ) -> None:
        self._layouts = tuple(layouts)
        self._rows = {
            layout.name: memory[layout.name].empty((layout.used_rows(shard), *layout.row_shape), dtype=layout.dtype)
            for layout in self._layouts
        }

    def place(self, sample: PlannedSample, computed: SampleArrays) -> None:
        """Copy a sample's arrays to its rows. Raises CacheError as `check_arrays` does."""
        for layout, values in check_arrays(sample, computed, layouts=self._layouts):
            start = sample.offset if layout.rows == "tokens" else sample.label_offset
            self._rows[layout.name][start : start + len(values)] = values

    def take(self, name: str) -> np.ndarray:
        """The rows of an array, which are forgotten here."""
        return self._rows.pop(name)


def check_arrays(
    sample: PlannedSample, computed: SampleArrays, *, layouts: Sequence[ArrayLayout]
) -> list[tuple[ArrayLayout, np.ndarray]]:
    """The arrays that the layouts want of a sample. Raises CacheError, naming the sample, if they do not fit the plan
    or hold NaN or infinity."""
    given = {
        "input_ids": computed.input_ids,
        "supervised": computed.supervised,
        "context": computed.context,
        "last_hidden": computed.last_hidden,
    }
    checked = []
    for layout in layouts:
        num_rows = sample.num_tokens if layout.rows == "tokens" else sample.num_rows
        checked.append((layout, _checked(given[layout.name], layout, sample, num_rows)))
    _check_labels(computed.supervised, sample)
    return checked


def _checked(values: np.ndarray | None, layout: ArrayLayout, sample: PlannedSample, num_rows: int) -> np.ndarray:
    """`values`, if they are what the layout wants for this sample, and finite. Raises CacheError otherwise."""
    shape = (num_rows, *layout.row_shape)
    if values is None or values.dtype != np.dtype(layout.dtype) or values.shape != shape:
        got = "none" if values is None else f"{values.dtype} {list(values.shape)}"
        raise CacheError(f"sample {sample.id}: {layout.name}", got=got, expected=f"{layout.dtype} {list(shape)}")
    if layout.dtype == "uint16" and not are_finite(values):
        broken = (values & BF16_EXPONENT) == BF16_EXPONENT
        first = [int(part) for part in np.argwhere(broken)[0]]
        got = f"{int(broken.sum())} values, the first at {first}"
        raise CacheError(
            f"sample {sample.id}: NaN or infinity in {layout.name}", got=got, expected="finite hidden states"
        )
    if layout.name == "supervised" and values.max() > 1:
        raise CacheError(f"sample {sample.id}: supervised", got=int(values.max()), expected="0 or 1")
    if layout.name == "input_ids" and values.min() < 0:
        raise CacheError(f"sample {sample.id}: input_ids", got=int(values.min()), expected="token ids >= 0")
    return values


def _check_labels(supervised: np.ndarray, sample: PlannedSample) -> None:
    """Raises CacheError unless the mask has as many label positions as the plan counted."""
    num_labels = int((supervised[:-1] & supervised[1:]).sum())
    if num_labels != sample.num_labels:
        expected = f"{sample.num_labels} as planned"
        raise CacheError(f"sample {sample.id}: label positions of its mask", got=num_labels, expected=expected)
