"""Streaming mode, a worker's part: compute every n-th slot in order, as far as the control record grants."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from typing import Any

from draftsmith.cache.claims import Owner
from draftsmith.cache.layout import ShardPlan
from draftsmith.cache.plan import CachePlan
from draftsmith.cache.scales import fit_plan, settle_scales
from draftsmith.cache.stream_keeper import Control, StreamPlace, read_control
from draftsmith.cache.stream_plan import Slots
from draftsmith.cache.writer import CacheWriter, Compute
from draftsmith.errors import CacheError, ShardClaimedError
from draftsmith.storage import Store

POLL_S = 0.1


def work(
    store: Store, place: StreamPlace, *, plan: CachePlan, facts: dict[str, Any], slots: Slots, part: tuple[int, int],
    run: str, owner: Owner, lease_s: float, compute: Compute,
) -> None:  # fmt: skip
    """Write the shards of slots i, i+n, ... (`part` is (i, n)) of the run named `run`, each when it is granted.

    Raises CacheError if the trainer has another sequence of slots, or says that the run ended.
    """
    mine = range(part[0], len(slots), part[1])
    for epoch, group in itertools.groupby(mine, key=lambda slot: int(slots.epoch[slot])):
        writer = CacheWriter(
            store, prefix=place.epoch_prefix(epoch), plan=plan, facts=facts, owner=owner, lease_s=lease_s,
            contents="shards",
            scales=lambda: settle_scales(store, place.prefix, known=None, fit=lambda: fit_plan(plan, compute)),
        )  # fmt: skip
        report = writer.write_shards(_granted(store, place, plan=plan, slots=slots, run=run, mine=group), compute)
        if report.claimed:
            raise ShardClaimedError(f"another process works for {place.prefix}", got="; ".join(report.claimed))


def _granted(
    store: Store, place: StreamPlace, *, plan: CachePlan, slots: Slots, run: str, mine: Iterable[int]
) -> Iterator[ShardPlan | None]:
    """The shards of these slots, each as soon as it may be computed; None while one has to wait."""
    control: Control | None = None
    for slot in mine:
        while control is None or slot >= control.granted:
            control = read_own_control(store, place, slots=slots, run=run)
            if control is None or slot >= control.granted:
                time.sleep(POLL_S)
                yield None
        if slot not in control.found:
            yield plan.shard(int(slots.shard[slot]))


def read_own_control(store: Store, place: StreamPlace, *, slots: Slots, run: str) -> Control | None:
    """What the trainer says; None as long as the record is that of another start of the job.

    Raises CacheError if the trainer has another sequence of slots, or says that the run ended.
    """
    control = read_control(store, place)
    if control is None or control.run != run:
        return None
    if control.failed is not None:
        raise CacheError(f"the training that uses {place.prefix} ended", got=control.failed)
    if control.slots != slots.digest:
        raise CacheError(
            "worker and trainer have another order of shards", got=slots.digest[:12], expected=control.slots[:12],
            where="params.yaml was changed while the training started; run it again",
        )  # fmt: skip
    return control
