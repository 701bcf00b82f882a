"""Claims: held, renewed, lost, taken over; and which process is dead."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from draftsmith.cache import claims
from draftsmith.cache.claims import Claim, Owner
from draftsmith.errors import CacheError, ShardClaimedError, StoreError
from draftsmith.storage import LocalStore, ObjectInfo
from tests.unit.cache.toy import PREFIX, DyingStore, elsewhere

CLAIM = f"records/{PREFIX}/claims/000000.json"


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def test_a_lease_is_renewed_while_its_process_works(store: LocalStore) -> None:
    with Claim.hold(store, CLAIM, owner=elsewhere(), lease_s=0.6) as claim:
        for _ in range(6):
            time.sleep(0.2)
            claim.check()
        second = Claim.hold(store, CLAIM, owner=Owner.this_process(processor="toy"), lease_s=0.6)
        with pytest.raises(ShardClaimedError, match="process 4242 on other-host"):
            second.__enter__()
    assert store.head(CLAIM) is None


def test_an_expired_claim_is_taken_over(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old owner finds out at its next look, writes nothing more, and leaves the new claim alone."""
    monkeypatch.setattr(Claim, "_renew_until_stopped", lambda self: None)
    old = Claim.hold(store, CLAIM, owner=elsewhere(), lease_s=0.2)
    stalled = old.__enter__()
    time.sleep(0.3)
    with Claim.hold(store, CLAIM, owner=Owner.this_process(processor="toy"), lease_s=60.0) as claim:
        with pytest.raises(ShardClaimedError, match="ran out"):
            stalled.check()
        old.__exit__(None, None, None)
        claim.check()
        assert store.head(CLAIM) is not None
    assert store.head(CLAIM) is None


def test_a_lost_claim_is_noticed_by_the_renewal(store: LocalStore) -> None:
    with Claim.hold(store, CLAIM, owner=elsewhere(), lease_s=3.0) as claim:
        body = json.loads(store.get(CLAIM))
        body["token"], body["owner"]["host"] = "another", "third-host"
        store.put(CLAIM, json.dumps(body).encode())
        claim.check()
        claim._thread.join(20)
        with pytest.raises(ShardClaimedError, match="taken over by process 4242 on third-host"):
            claim.check()


def test_a_dead_process_of_this_machine_holds_nothing(store: LocalStore) -> None:
    child = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    dead = dataclasses.replace(Owner.this_process(processor="toy"), pid=int(child.stdout), started="1")
    assert dead.is_dead()
    assert not Owner.this_process(processor="toy").is_dead()
    assert not elsewhere().is_dead()
    reused = dataclasses.replace(Owner.this_process(processor="toy"), started="1")
    assert reused.is_dead()


def test_a_zombie_is_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    started = str(claims._process_start(child.pid))
    owner = dataclasses.replace(Owner.this_process(processor="toy"), pid=child.pid, started=started)
    deadline = time.monotonic() + 20
    while not owner.is_dead() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert owner.is_dead()
    child.wait()


def test_a_store_that_is_gone_for_a_moment_does_not_end_the_claim(store: LocalStore) -> None:
    class Flaky(DyingStore):
        def put_if_match(self, path: str, data: bytes, *, etag: str) -> ObjectInfo:
            self._left += 1
            if self._left % 2:
                raise StoreError("gone for a moment")
            return self._store.put_if_match(path, data, etag=etag)

    with Claim.hold(Flaky(store, die_after=0), CLAIM, owner=elsewhere(), lease_s=0.9) as claim:
        for _ in range(15):
            time.sleep(0.1)
            claim.check()


def test_a_broken_record_is_told_with_its_place(store: LocalStore) -> None:
    for data in (b"", b"[]", b"\xff"):
        store.put(CLAIM, data)
        with pytest.raises(CacheError, match=f"broken claim record: .*delete {store.uri}/{CLAIM}"):
            claims.live_holder(store, CLAIM)
