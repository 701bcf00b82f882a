"""The channel RMS that codec int8 divides by: fitted on the first samples of a plan, settled once for a prefix.

A few channels of hidden states are hundreds of times larger than the rest, and those of a sample's first token larger
still; the fit leaves first tokens out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from draftsmith.cache.arrays import Compute, SampleArrays, check_arrays
from draftsmith.cache.plan import CachePlan, CacheSpec, PlannedSample, array_layouts
from draftsmith.errors import CacheError, ObjectExistsError, ObjectMissingError
from draftsmith.storage import Store, records_prefix

FIT_TOKENS = 8192
SMALLEST = 2.0**-40

Scales = Mapping[str, NDArray[np.float32]]


def fit_batches(plan: CachePlan) -> list[tuple[PlannedSample, ...]]:
    """The samples to fit on: the first ones by index, until they have FIT_TOKENS tokens; in batches for the target."""
    batches: list[list[PlannedSample]] = []
    total = filled = 0
    for sample in plan.samples:
        if total >= FIT_TOKENS:
            break
        if batches and filled + sample.num_tokens <= plan.spec.batch_tokens:
            batches[-1].append(sample)
            filled += sample.num_tokens
        else:
            batches.append([sample])
            filled = sample.num_tokens
        total += sample.num_tokens
    return [tuple(batch) for batch in batches]


def fit_plan(plan: CachePlan, compute: Compute) -> dict[str, NDArray[np.float32]]:
    """The scales of a plan, from arrays that `compute` makes now. Raises as `fit_scales`."""
    batches = fit_batches(plan)
    computed = zip(batches, compute(batches), strict=True)
    pairs = (pair for batch, arrays in computed for pair in zip(batch, arrays, strict=True))
    return fit_scales(pairs, spec=plan.spec)


def fit_scales(
    samples: Iterable[tuple[PlannedSample, SampleArrays]], *, spec: CacheSpec
) -> dict[str, NDArray[np.float32]]:
    """Root mean square by channel of each array of hidden states, over the samples up to FIT_TOKENS tokens: context
    [L*D], last_hidden [D]. The first token of each sample does not count.

    Sums are in float64 and the result is rounded to bfloat16's eight bits, so that it is the same on most machines. A
    channel without values is given 1. Raises CacheError for arrays with NaN or infinity or of a wrong shape.
    """
    layouts = array_layouts(spec)
    sums = {item.name: np.zeros(item.row_shape, np.float64).ravel() for item in layouts if item.dtype == "uint16"}
    counts = dict.fromkeys(sums, 0)
    total = 0
    for sample, computed in samples:
        for layout, values in check_arrays(sample, computed, layouts=layouts):
            if layout.name not in sums:
                continue
            rows = values[_first_rows(sample, computed, whole=layout.rows == "tokens" or spec.last_hidden == "all") :]
            wide = (
                (rows.astype(np.uint32) << 16)
                .view(np.float32)
                .astype(np.float64)
                .reshape(len(rows), sums[layout.name].size)
            )
            sums[layout.name] += np.square(wide).sum(axis=0)
            counts[layout.name] += len(rows)
        total += sample.num_tokens
        if total >= FIT_TOKENS:
            break
    return {name: _rounded(np.sqrt(sums[name] / max(counts[name], 1))) for name in sums}


def settle_scales(
    store: Store, prefix: str, *, known: Scales | None, fit: Callable[[], Scales] | None
) -> dict[str, NDArray[np.float32]]:
    """The scales of the cache at `prefix`: those of its metadata (`known`), those that a writer has settled, or else
    those of `fit`, which are settled herewith; of several writers the first wins.

    Raises CacheError if there are none and `fit` is None, or for a broken record.
    """
    if known is not None:
        return dict(known)
    path = f"{records_prefix(prefix)}/scales.json"
    try:
        return _parse(store.get(path), path)
    except ObjectMissingError:
        pass
    if fit is None:
        raise CacheError(f"cache {prefix} has codec int8, and no scales yet", expected="a function that fits them")
    body = {name: [float(value) for value in values] for name, values in fit().items()}
    data = json.dumps(body, sort_keys=True).encode()
    try:
        store.put_if_absent(path, data)
    except ObjectExistsError:
        data = store.get(path)
    return _parse(data, path)


def _parse(data: bytes, path: str) -> dict[str, NDArray[np.float32]]:
    try:
        scales = {str(name): np.array(values, dtype=np.float32) for name, values in json.loads(data).items()}
        if any(
            values.ndim != 1 or not np.isfinite(values).all() or not (values > 0).all() for values in scales.values()
        ):
            raise ValueError("scales must be lists of finite numbers > 0")
    except (ValueError, TypeError, AttributeError) as error:
        raise CacheError(f"broken record of scales: {error!r}", where=f"delete {path}") from None
    return scales


def _first_rows(sample: PlannedSample, computed: SampleArrays, *, whole: bool) -> int:
    """How many leading rows are the first token's: 1, or 0 where only rows of labels are kept and it is none."""
    if whole:
        return 1
    return int(sample.num_tokens > 1 and computed.supervised[0] == 1 and computed.supervised[1] == 1)


def _rounded(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """To the nearest bfloat16, ties to even; what is (almost) 0 becomes 1."""
    bits = values.astype(np.float32).view(np.uint32)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    rounded = bits.view(np.float32)
    return np.where(rounded < SMALLEST, np.float32(1), rounded)
