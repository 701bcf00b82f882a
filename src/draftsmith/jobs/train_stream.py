"""Streaming mode, the trainer's side: workers are started, shards consumed and deleted, the first pass made."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from draftsmith.cache.claims import Claim, Owner
from draftsmith.cache.plan import CachePlan
from draftsmith.cache.reader import CachedSample, SampleSource
from draftsmith.cache.stream import HeldOut, StreamReader, kept_bytes
from draftsmith.cache.stream_keeper import StreamKeeper, read_control, sweep_others
from draftsmith.cache.stream_plan import (
    LIMIT_VARIABLE,
    Slots,
    check_room,
    most_bytes,
    needed_bytes,
    record_bytes,
    storage_limit,
)
from draftsmith.errors import CacheError, MachineError, TrainingError
from draftsmith.jobs.cache import PlannedCache, lease_s, planned_cache, stream_manifest
from draftsmith.jobs.parts import processor
from draftsmith.jobs.stream import FirstPass, first_pass_indices, run_slots, stream_place
from draftsmith.jobs.train_data import Members, find_members
from draftsmith.manifest import Manifest
from draftsmith.params import Params, Train
from draftsmith.paths import Workspace
from draftsmith.storage import Store

WORKERS_VARIABLE = "DRAFTSMITH_STREAM_WORKERS"
STEPS_AHEAD = 2  # the loader reads a step while the one before it is trained
TOLD_LINES = 12
POLL_S = 0.2


def planned_stream(workspace: Workspace, params: Params, manifest: Manifest, target: str) -> PlannedCache:
    """Plan the cache again. Raises CacheError if it is not the one that the manifest names."""
    planned = planned_cache(workspace, params, target)
    if stream_manifest(planned).facts != manifest.facts:
        raise CacheError(
            f"the plan of cache {manifest.prefix} is not that of the answers, target and params that are here",
            got=planned.prefix,
            expected=manifest.prefix,
            where=f"dvc repro cache@{target}",
        )
    return planned


class Workers:
    """The slice workers of one run, each in a session of its own; what they say goes to this process's stderr.

    They end when this process does: each reads a pipe that only this process holds open. `on_failure` is called, from
    a thread, with the last output of one that died.
    """

    def __init__(
        self, arguments: Sequence[str], *, num_workers: int, cwd: Path, on_failure: Callable[[str], None]
    ) -> None:
        self._on_failure, self._ending = on_failure, False
        self._processes = []
        command = [sys.executable, "-m", "draftsmith.jobs.stream", *arguments]
        for number in range(num_workers):
            process = subprocess.Popen(
                [*command, "--worker", f"{number}/{num_workers}"], cwd=cwd, text=True, start_new_session=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                env=worker_environment(os.environ, number, num_gpus=torch.cuda.device_count()),
            )  # fmt: skip
            self._processes.append(process)
        self._threads = [threading.Thread(target=self._relay, args=(item,), daemon=True) for item in self._processes]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End them; those that are done have ended by themselves."""
        self._ending = True
        for process in self._processes:
            process.kill()
        for process, thread in zip(self._processes, self._threads, strict=True):
            process.wait()
            thread.join()
            if process.stdin is not None:
                process.stdin.close()

    def _relay(self, process: subprocess.Popen[str]) -> None:
        last: deque[str] = deque(maxlen=TOLD_LINES)
        assert process.stdout is not None
        for line in process.stdout:
            last.append(line)
            sys.stderr.write(line)
        status = process.wait()
        if status != 0 and not self._ending:
            said = "".join(last).strip() or "it said nothing"
            self._on_failure(f"a worker of the stream ended with status {status}: {said}")


class StreamFeed:
    """A cache of which only the shards that training reads just now lie in the store.

    Rank 0 starts the workers, makes the first pass and deletes what is passed; the other ranks follow its record.
    """

    def __init__(
        self, workspace: Workspace, store: Store, key: str, *, planned: PlannedCache, digest: str, recipe: Train,
        first_step: int, wants_head_start: bool, rank: int, start_id: str,
    ) -> None:  # fmt: skip
        """`start_id` names this start of the job on all ranks; `first_step` and `wants_head_start` count on rank 0."""
        plan, place = planned.plan, stream_place(key, planned)
        self._store, self._place, self._start_id, self._size = store, place, start_id, recipe.global_batch
        self.digest, self.prefix, self.uri = digest, place.prefix, f"{store.uri}/{place.prefix}"
        self.members = find_members(plan.samples, planned.facts, recipe=recipe)
        self._held_out = HeldOut(store, place, indices=self.members.held_out)
        self._keeper: StreamKeeper | None = None
        self._closing = ExitStack()
        with ExitStack() as opening:
            first_pass: FirstPass = "none"
            if rank == 0:
                owner = Owner.this_process(processor=processor())
                self._claim = opening.enter_context(Claim.hold(store, place.claim, owner=owner, lease_s=lease_s()))
                sweep_others(store, place, owner=owner, lease_s=lease_s())
                self._is_kept = self._held_out.load()
                first_pass = "start" if wants_head_start else "none" if self._is_kept else "held_out"
            slots = run_slots(plan, self.members, recipe=recipe, first_step=first_step, first_pass=first_pass)
            self._first = first_pass_indices(plan, self.members, kind=first_pass)
            self._first_tick = slots.first - len(self._first)
            if rank == 0:
                # One without a slot would only take memory.
                num_workers = min(_num_workers(), len(slots))
                room = _room(plan, slots, self.members, recipe=recipe)
                self._keeper = StreamKeeper(store, place, plan=plan, slots=slots, room=room, run=start_id)
                self._keeper.begin(keep=self._held_out.paths)
                arguments = ["--key", key, "--run", start_id, "--first-step", str(first_step)]
                arguments += ["--first-pass", first_pass]
                workers = Workers(arguments, num_workers=num_workers, cwd=workspace.root, on_failure=self._keeper.fail)
                opening.callback(workers.close)
            self._reader = StreamReader(
                store, place, plan=plan, facts=planned.facts, slots=slots, held_out=self._held_out,
                watch=self._watch,
            )  # fmt: skip
            self.source: SampleSource = self._reader
            opening.callback(self._reader.close)
            self._closing = opening.pop_all()
        self._pass = self._first_pass()

    def close(self) -> None:
        """Stop the workers; what lies in the store stays for the next start."""
        self._closing.close()

    def finish(self) -> None:
        """Training is done: nothing of the stream is left in the store."""
        if self._keeper is not None:
            self._keeper.clear()

    def start_samples(self) -> Iterator[CachedSample]:
        return self._pass

    def settle(self) -> None:
        if self._keeper is not None:
            for _ in self._pass:
                pass
            if not self._is_kept:
                self._held_out.close()
            self._keeper.set_ready()
            return
        while not self._is_ready():
            self._watch()
            time.sleep(POLL_S)
        if not self._held_out.load():
            raise TrainingError(f"the validation samples of {self.prefix} are not those of this run")

    def passed(self, step: int) -> None:
        if self._keeper is not None:
            self._watch()
            self._keeper.passed(step * self._size)

    def figures(self) -> dict[str, float]:
        if self._keeper is None:
            return {}
        return {
            "num_tokens": self._keeper.num_tokens,
            "high_water_bytes": self._keeper.high_water_bytes + self._held_out.num_bytes,
            "wait_s": round(self._reader.wait_s, 3),
        }

    def _first_pass(self) -> Iterator[CachedSample]:
        """Read every sample of the first pass once: keep those to validate on, yield the others."""
        assert self._keeper is not None
        held_out = frozenset(self.members.held_out)
        for tick, index in enumerate(self._first, start=self._first_tick):
            self._keeper.passed(tick)
            sample = self._reader.read_first(index)
            if index not in held_out:
                yield sample
            elif not self._is_kept:
                self._held_out.add(index, sample)
        self._keeper.passed(self._first_tick + len(self._first))

    def _watch(self) -> None:
        """Called while something is waited for. Raises TrainingError if it will not come."""
        if self._keeper is not None:
            self._claim.check()
            self._keeper.refresh()
            failed = self._keeper.failed
        else:
            control = read_control(self._store, self._place)
            failed = control.failed if control is not None and control.run == self._start_id else None
        if failed is not None:
            raise TrainingError(failed, expected="to run the training again: it goes on from its newest checkpoint")

    def _is_ready(self) -> bool:
        control = read_control(self._store, self._place)
        return control is not None and control.run == self._start_id and control.ready


def _room(plan: CachePlan, slots: Slots, members: Members, *, recipe: Train) -> int:
    """Bytes that shards may take. Raises CacheError if the limit is too little, MachineError if there is none."""
    limit = storage_limit()
    if limit is None:
        raise MachineError(
            "the target cache is planned only, to be made bit by bit while training",
            expected="the room that it may take in the store",
            where=f"set {LIMIT_VARIABLE}, or build the whole cache without it: dvc repro -f -s cache@TARGET",
        )
    ahead = STEPS_AHEAD * recipe.global_batch - 1
    needed = needed_bytes(slots, sizes=lambda shard: most_bytes(plan, shard), ahead=ahead)
    return check_room(limit, needed=needed, kept=kept_bytes(plan, members.held_out) + record_bytes(plan))


def worker_environment(environment: Mapping[str, str], number: int, *, num_gpus: int) -> dict[str, str]:
    """What worker `number` runs in: it sees one GPU of this process's, by turns; there may be none."""
    if num_gpus == 0:
        return dict(environment)
    seen = environment.get("CUDA_VISIBLE_DEVICES", "")
    names = seen.split(",") if seen else [str(gpu) for gpu in range(num_gpus)]
    return {**environment, "CUDA_VISIBLE_DEVICES": names[number % num_gpus]}


def _num_workers() -> int:
    text = os.environ.get(WORKERS_VARIABLE) or "1"
    if re.fullmatch(r"0*[1-9][0-9]{0,3}", text) is None:
        raise MachineError(f"{WORKERS_VARIABLE} cannot be read", got=text, expected="a number of processes, 1 to 9999")
    return int(text)
