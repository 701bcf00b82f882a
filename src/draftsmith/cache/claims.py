"""Claims: which process works on a shard. A small record in the store, held for a lease and renewed in a thread.

Expiry is judged by the clocks of the machines, so `lease_s` must be far longer than they differ. A claim is a courtesy
that saves double work; what keeps a cache whole is that objects and commit records are written conditionally.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from draftsmith.errors import (
    CacheError,
    ObjectChangedError,
    ObjectExistsError,
    ObjectMissingError,
    ShardClaimedError,
    StoreError,
)
from draftsmith.storage import ObjectInfo, Store

ATTEMPTS = 8


@dataclass(frozen=True)
class Owner:
    """A process that fills a cache. `machine` tells boots and process namespaces apart, `started` reused pids.

    `processor` is the kind of processor that computes (`NVIDIA H200`, `cpu x86_64`); commit records carry it.
    """

    host: str
    machine: str
    pid: int
    started: str
    processor: str

    @classmethod
    def this_process(cls, *, processor: str) -> Owner:
        """The running process; `processor` is the kind of processor that will compute the shards."""
        return cls(socket.gethostname(), _machine(), os.getpid(), _process_start(os.getpid()) or "", processor)

    @property
    def name(self) -> str:
        return f"process {self.pid} on {self.host}"

    def is_dead(self) -> bool:
        """True if the process ran on this very machine and is gone; False if it lives or cannot be seen from here."""
        return self.machine == _machine() and _process_start(self.pid) != self.started


class Claim:
    """A held claim. `check` before every write; the thread renews it three times a lease."""

    def __init__(self, store: Store, path: str, *, owner: Owner, lease_s: float) -> None:
        self._store, self._path, self._owner, self._lease_s = store, path, owner, lease_s
        self._place = f"{store.uri}/{path}"
        self._token = uuid.uuid4().hex
        self._etag = ""
        self._version_id: str | None = None
        self._renewed_s = (0.0, 0.0)
        self._lost_to: str | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew_until_stopped, name=f"claim {path}", daemon=True)

    @classmethod
    @contextmanager
    def hold(cls, store: Store, path: str, *, owner: Owner, lease_s: float) -> Iterator[Claim]:
        """Claim `path` for the body of a with statement; the record is removed at its end.

        Raises ShardClaimedError with the owner's name if a live process holds it.
        """
        claim = cls(store, path, owner=owner, lease_s=lease_s)
        claim._take()
        claim._thread.start()
        try:
            yield claim
        finally:
            claim._stop.set()
            claim._thread.join()
            claim._remove()

    def check(self) -> None:
        """Raises ShardClaimedError if another process took the claim over, or if it ran out and could have been."""
        if self._lost_to is not None:
            raise ShardClaimedError(f"claim {self._path} was lost", got=f"taken over by {self._lost_to}")
        if self._age_s() > self._lease_s:
            got = f"not renewed for {self._age_s():.0f} s"
            raise ShardClaimedError(
                f"claim {self._path} ran out", got=got, expected=f"a renewal within {self._lease_s:.0f} s"
            )

    def _take(self) -> None:
        for _ in range(ATTEMPTS):
            now, data = self._now(), self._record()
            try:
                self._held(self._store.put_if_absent(self._path, data), now)
                return
            except ObjectExistsError:
                pass
            try:
                there = self._store.head(self._path)
                if there is None:
                    continue
                token, owner, left_s = _parse(self._store.get(self._path), self._place)
            except ObjectMissingError:
                continue
            if token == self._token:
                # Our own write, whose answer was lost on the way.
                self._held(there, now)
                return
            if left_s > 0 and not owner.is_dead():
                raise ShardClaimedError(
                    f"{self._path} is claimed by {owner.name}",
                    got=f"a lease with {left_s:.0f} s left",
                    expected="to wait for it to end, or to stop that process",
                )
            try:
                taken = self._store.put_if_match(self._path, data, etag=there.etag)
                self._version_id = there.version_id
                self._held(taken, now)
                return
            except ObjectChangedError:
                continue
        raise ShardClaimedError(f"{self._path} changes hands all the time", expected="to run again")

    def _renew_until_stopped(self) -> None:
        while not self._stop.wait(self._lease_s / 3):
            now = self._now()
            try:
                self._held(self._store.put_if_match(self._path, self._record(), etag=self._etag), now)
            except ObjectChangedError:
                self._settle(now)
            except StoreError:
                # The store may come back before the lease ends; `check` refuses to write once it has ended.
                continue

    def _settle(self, now: tuple[float, float]) -> None:
        """A renewal met another record: ours with its answer lost, or that of a process that took over."""
        try:
            there = self._store.head(self._path)
            token, owner, _ = _parse(self._store.get(self._path), self._place)
        except (StoreError, CacheError):
            return
        if token != self._token:
            self._lost_to = owner.name
            self._stop.set()
        elif there is not None:
            self._held(there, now)

    def _remove(self) -> None:
        try:
            if self._lost_to is None and _parse(self._store.get(self._path), self._place)[0] == self._token:
                self._store.delete(self._path, version_id=self._version_id)
        except (StoreError, CacheError):
            # What is left behind ends with its lease, or with this process.
            return

    def _record(self) -> bytes:
        body = {"owner": asdict(self._owner), "token": self._token, "renewed_s": time.time(), "lease_s": self._lease_s}
        return json.dumps(body, sort_keys=True).encode()

    def _held(self, written: ObjectInfo, now: tuple[float, float]) -> None:
        """The claim is ours as `written`; in a versioned bucket the record before it goes for good."""
        before, self._version_id = self._version_id, written.version_id
        self._etag, self._renewed_s = written.etag, now
        if before is not None and before != written.version_id:
            # An old version that stays does no harm but the room it takes.
            with suppress(StoreError):
                self._store.delete(self._path, version_id=before)

    def _now(self) -> tuple[float, float]:
        return time.time(), time.monotonic()

    def _age_s(self) -> float:
        """Seconds since the last renewal by the clock that says more: one stands still in sleep, one may be set."""
        return max(now - then for now, then in zip(self._now(), self._renewed_s, strict=True))


def live_holder(store: Store, path: str) -> str | None:
    """The name of the live process that holds the claim at `path`, or None: no claim, its lease over, its process gone.

    Raises CacheError for a record that is no claim.
    """
    try:
        _, owner, left_s = _parse(store.get(path), f"{store.uri}/{path}")
    except ObjectMissingError:
        return None
    return owner.name if left_s > 0 and not owner.is_dead() else None


def _parse(data: bytes, place: str) -> tuple[str, Owner, float]:
    """Token, owner and seconds left of a claim record. Raises CacheError, naming its place, if it is none."""
    try:
        body = json.loads(data)
        return body["token"], Owner(**body["owner"]), body["renewed_s"] + body["lease_s"] - time.time()
    except (ValueError, KeyError, TypeError) as error:
        raise CacheError(f"broken claim record: {error!r}", where=f"delete {place}") from None


def _machine() -> str:
    """This boot of this machine, and on Linux this process namespace: within it a pid means one process."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if boot.exists():
        return f"{boot.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return f"{socket.gethostname()} {psutil.boot_time():.0f}"


def _process_start(pid: int) -> str | None:
    """When the process started, as a mark to compare; None if there is none, or only a zombie.

    On Linux in ticks since boot, because psutil's time of day moves when the clock is set.
    """
    if Path("/proc/self/stat").exists():
        try:
            # The name in parentheses may hold blanks; the state is field 3 and the start time field 22.
            parts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        return None if parts[0] in ("Z", "X") else parts[19]
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else f"{process.create_time():.2f}"
    except psutil.NoSuchProcess:
        return None
