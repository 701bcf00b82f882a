"""A real S3 server behind a proxy that makes the faults of real networks and services: what passes is sent again and
counted, what does not is told at once, and a cache comes out the same."""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import boto3
import numpy as np
import pytest
from botocore.config import Config

from draftsmith.cache.reader import CacheReader
from draftsmith.errors import ObjectChangedError, ObjectExistsError, ObjectMissingError, StoreError
from draftsmith.storage import LocalStore, ObjectInfo, Store, describe_retries, open_store
from tests.s3 import S3Bucket
from tests.s3_proxy import Fault, FaultProxy, Kind, Request, direct, proxy, store
from tests.unit.cache.toy import Toy, fill, toy_plan

__all__ = ["direct", "proxy", "store"]

pytestmark = pytest.mark.s3

DATA = bytes(range(256)) * 1000
NEW = DATA[::-1]
OBJECT = "/store/object"


def get(store: Store, there: ObjectInfo) -> None:
    assert store.get("object") == DATA


def get_range(store: Store, there: ObjectInfo) -> None:
    assert store.get_range("object", start=1000, length=5000) == DATA[1000:6000]


def head(store: Store, there: ObjectInfo) -> None:
    found = store.head("object")
    assert found is not None
    assert (found.size, found.etag, found.sha256) == (len(DATA), there.etag, hashlib.sha256(DATA).hexdigest())


def list_all(store: Store, there: ObjectInfo) -> None:
    assert [(item.path, item.size) for item in store.list("")] == [("object", len(DATA))]


def put(store: Store, there: ObjectInfo) -> None:
    store.put("object", NEW)
    assert store.get("object") == NEW


def put_if_match(store: Store, there: ObjectInfo) -> None:
    info = store.put_if_match("object", NEW, etag=there.etag)
    found = store.head("object")
    assert found is not None
    assert (info.etag, info.sha256, info.size) == (found.etag, hashlib.sha256(NEW).hexdigest(), len(NEW))
    assert store.get("object") == NEW


def put_if_absent(store: Store, there: ObjectInfo) -> None:
    info = store.put_if_absent("object-2", NEW)
    found = store.head("object-2")
    assert found is not None
    assert (info.etag, info.sha256, info.size) == (found.etag, hashlib.sha256(NEW).hexdigest(), len(NEW))
    assert store.get("object-2") == NEW


def delete(store: Store, there: ObjectInfo) -> None:
    store.delete("object")
    assert store.head("object") is None


# Operation -> method and path of its request.
READS = {get: ("GET", OBJECT), get_range: ("GET", OBJECT), head: ("HEAD", OBJECT), list_all: ("GET", "list-type=2")}
WRITES = {put: ("PUT", OBJECT), put_if_match: ("PUT", OBJECT), put_if_absent: ("PUT", OBJECT)}
ALL = {**READS, **WRITES, delete: ("DELETE", OBJECT)}
Operation = Callable[[Store, ObjectInfo], None]

CASES: list[tuple[Fault, str, dict[Operation, tuple[str, str]]]] = [
    (Fault("refuse"), "connection", ALL),
    (Fault("lose answer"), "connection", ALL),
    (Fault("answer", status=503, code="SlowDown"), "slow down", ALL),
    (Fault("answer", status=500, code="InternalError"), "server error", ALL),
    (Fault("answer", status=429, code="TooManyRequests"), "slow down", {get: ALL[get]}),
    (Fault("answer", status=400, code="RequestTimeout"), "timeout", {put: ALL[put]}),
    (Fault("answer", status=400, code="IncompleteBody"), "truncated body", WRITES),
    (Fault("answer", status=409, code="ConditionalRequestConflict"), "conflict", WRITES),
    (Fault("delay", seconds=1.5), "timeout", {use: ALL[use] for use in (get, head, put_if_absent)}),
    (Fault("cut request"), "connection", WRITES),
    (Fault("flip request"), "checksum mismatch", WRITES),
    (Fault("cut answer"), "truncated body", {use: ALL[use] for use in (get, get_range)}),
    # botocore takes an answer that is no XML for a 500.
    (Fault("cut answer"), "server error", {list_all: ALL[list_all]}),
    (Fault("not S3"), "server error", {list_all: ALL[list_all], **WRITES}),
    (Fault("flip answer"), "checksum mismatch", {get: ALL[get]}),
    (Fault("not S3"), "damaged answer", {use: ALL[use] for use in (get, get_range)}),
]


@pytest.mark.parametrize(("fault", "reason", "operations"), CASES)
def test_a_fault_that_passes(
    proxy: FaultProxy, direct: Store, s3_env: S3Bucket, monkeypatch: pytest.MonkeyPatch,
    fault: Fault, reason: str, operations: dict[Operation, tuple[str, str]],
) -> None:  # fmt: skip
    """Each operation does what it does without the fault, and the one retry is counted under its reason."""
    if fault.kind == "delay":
        # A request may hang for a quarter of the limit.
        monkeypatch.setenv("DRAFTSMITH_S3_TIMEOUT_S", "4")
    store = open_store(s3_env.uri)
    assert store.retries == {}
    for number, (operation, (method, path)) in enumerate(operations.items(), start=1):
        direct.delete("object-2")
        there = direct.put("object", DATA)
        proxy.faults.append(Fault(**{**vars(fault), "method": method, "path": path}))
        operation(store, there)
        assert proxy.faults.pop().times == 0, operation
        assert store.retries == {reason: number}, operation


def test_many_faults_in_a_row(store: Store, proxy: FaultProxy, direct: Store) -> None:
    there = direct.put("object", DATA)
    kinds: list[Kind] = ["refuse", "answer", "cut answer", "flip answer", "answer", "lose answer"]
    proxy.faults += [Fault(kind, "GET", OBJECT) for kind in kinds]
    assert store.get("object") == DATA
    assert store.retries == {"connection": 2, "slow down": 2, "truncated body": 1, "checksum mismatch": 1}
    assert describe_retries(store.retries) == "2 connection, 2 slow down, 1 checksum mismatch, 1 truncated body"
    # Equal refusals of a damaged body do not mean that it is damaged here.
    proxy.faults += [Fault("flip request", "PUT", OBJECT, times=3)]
    put(store, there)
    assert store.retries["checksum mismatch"] == 4


def test_a_lost_answer_leaves_one_version(store: Store, proxy: FaultProxy, s3_env: S3Bucket) -> None:
    """The answer that is told is that of the write that took place, so that it can be deleted by its version."""
    client = s3_env.server.client()
    client.put_bucket_versioning(Bucket=s3_env.bucket, VersioningConfiguration={"Status": "Enabled"})
    proxy.faults.append(Fault("lose answer", "PUT", OBJECT))
    info = store.put_if_absent("object", DATA)
    (version,) = client.list_object_versions(Bucket=s3_env.bucket)["Versions"]
    assert info.version_id == version["VersionId"]
    proxy.faults.append(Fault("lose answer", "DELETE", OBJECT))
    store.delete("object", version_id=info.version_id)
    left = client.list_object_versions(Bucket=s3_env.bucket)
    assert "Versions" not in left
    assert "DeleteMarkers" not in left
    assert store.retries == {"connection": 2}


def test_the_object_of_another_writer_is_not_ours(store: Store, proxy: FaultProxy, direct: Store) -> None:
    """An answer was lost, and somebody else was faster, or came after."""
    etag = direct.put("changed", DATA).etag

    def be_faster(number: int, request: Request) -> Fault | None:
        if request.method == "PUT" and not proxy.requests("PUT"):
            direct.put("object", b"theirs")
            return Fault("refuse")
        return None

    proxy.choose = be_faster
    with pytest.raises(ObjectExistsError):
        store.put_if_absent("object", DATA)
    assert direct.get("object") == b"theirs"

    def come_after(number: int, request: Request) -> Fault | None:
        if request.method == "PUT" and len(proxy.requests("PUT", "changed")) == 1:
            # The first has been carried out, its answer lost.
            assert direct.get("changed") == NEW
            direct.put("changed", b"theirs")
        return None

    proxy.choose = come_after
    proxy.faults.append(Fault("lose answer", "PUT", "changed"))
    with pytest.raises(ObjectChangedError):
        store.put_if_match("changed", NEW, etag=etag)
    assert direct.get("changed") == b"theirs"


def test_equal_bytes_that_were_there_before_are_not_ours(store: Store, proxy: FaultProxy, direct: Store) -> None:
    """No answer was lost, so somebody else wrote them."""
    direct.put("object", DATA)
    with pytest.raises(ObjectExistsError):
        store.put_if_absent("object", DATA)
    proxy.faults.append(Fault("answer", "PUT", OBJECT, status=409, code="ConditionalRequestConflict"))
    with pytest.raises(ObjectExistsError):
        store.put_if_absent("object", DATA)


@pytest.mark.parametrize(
    ("status", "code", "kind", "told"),
    [
        (403, "AccessDenied", StoreError, "access denied"),
        (403, "RequestTimeTooSkewed", StoreError, "a clock that is right"),
        (404, "NoSuchKey", ObjectMissingError, "no object object"),
        (404, "NoSuchBucket", StoreError, "no bucket"),
        (412, "PreconditionFailed", StoreError, "object in s3"),
        (400, "InvalidRequest", StoreError, "InvalidRequest"),
        (400, "ExpiredToken", StoreError, "ExpiredToken.*valid credentials"),
        (501, "NotImplemented", StoreError, "NotImplemented"),
        (507, "InsufficientStorage", StoreError, "a store with room"),
    ],
)
def test_what_lasts_is_told_at_once(
    store: Store, proxy: FaultProxy, status: int, code: str, kind: type[StoreError], told: str
) -> None:
    """Also expired credentials that came from the environment: no repetition changes those."""
    proxy.faults.append(Fault("answer", "GET", OBJECT, times=-1, status=status, code=code))
    with pytest.raises(kind, match=told):
        store.get("object")
    assert len(proxy.seen) == 1
    assert store.retries == {}


def test_the_limit_on_time(proxy: FaultProxy, s3_env: S3Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_S3_TIMEOUT_S", "1.5")
    store = open_store(s3_env.uri)
    proxy.faults += [Fault("refuse", "GET", OBJECT), Fault("answer", "GET", OBJECT, times=-1)]
    started = time.monotonic()
    with pytest.raises(StoreError) as caught:
        store.get("object")
    assert 1.5 <= time.monotonic() - started < 4
    pattern = (
        r"cannot read object in store s3://\S+: got (\d+) failures in (\S+) s \((\d+) slow down, 1 connection\); the "
        r"last: SlowDown \(503\), expected an answer within 1\.5 s \(DRAFTSMITH_S3_TIMEOUT_S\)"
    )
    match = re.fullmatch(pattern, str(caught.value))
    assert match is not None, str(caught.value)
    assert int(match[1]) == proxy.num_faults == int(match[3]) + 1 > 2
    assert 1.5 <= float(match[2]) < 4
    assert store.retries == {"slow down": int(match[3]) - 1, "connection": 1}
    assert caught.value.__suppress_context__


@pytest.mark.parametrize("text", ["0", "-1", "soon", "inf", "nan"])
def test_a_limit_that_is_none(s3_env: S3Bucket, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("DRAFTSMITH_S3_TIMEOUT_S", text)
    with pytest.raises(StoreError, match=rf"time limit: got '{text}', expected seconds > 0 \(DRAFTSMITH_S3_TIMEOUT_S"):
        open_store(s3_env.uri)


def test_what_the_server_asks_to_wait(store: Store, proxy: FaultProxy, direct: Store) -> None:
    direct.put("object", DATA)
    proxy.faults.append(Fault("answer", "GET", OBJECT, headers={"Retry-After": "0.8"}))
    started = time.monotonic()
    assert store.get("object") == DATA
    assert time.monotonic() - started >= 0.8
    then = int(time.time()) + 3
    date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(then))
    proxy.faults.append(Fault("answer", "GET", OBJECT, headers={"Retry-After": date}))
    assert store.get("object") == DATA
    assert then <= time.time() < then + 10
    proxy.faults.append(Fault("answer", "GET", OBJECT, headers={"Retry-After": "100"}))
    started = time.monotonic()
    with pytest.raises(StoreError, match=r"got 1 failures in 0\.0 s .*the server asks to wait 100 s"):
        store.get("object")
    assert time.monotonic() - started < 2


def lying_object(s3_env: S3Bucket, *, sha256: str) -> None:
    """An object with sha256 metadata for which the server keeps no checksum of its own."""
    client = boto3.client(
        "s3",
        region_name="us-east-1",
        endpoint_url=s3_env.server.endpoint,
        config=Config(request_checksum_calculation="when_required"),
    )
    client.put_object(Bucket=s3_env.bucket, Key="store/object", Body=DATA, Metadata={"sha256": sha256})
    answer = client.get_object(Bucket=s3_env.bucket, Key="store/object", ChecksumMode="ENABLED")
    assert not [field for field in answer if field.startswith("Checksum")]


def test_the_metadata_tell_where_the_server_keeps_no_checksum(
    store: Store, proxy: FaultProxy, s3_env: S3Bucket
) -> None:
    lying_object(s3_env, sha256=hashlib.sha256(DATA).hexdigest())
    proxy.faults.append(Fault("flip answer", "GET", OBJECT))
    assert store.get("object") == DATA
    assert store.retries == {"checksum mismatch": 1}


def test_damage_that_lies_in_the_store(store: Store, proxy: FaultProxy, s3_env: S3Bucket) -> None:
    """Read twice and equally wrong: repetitions would only hide for minutes what is so."""
    lying_object(s3_env, sha256=hashlib.sha256(NEW).hexdigest())
    found, named = (hashlib.sha256(data).hexdigest() for data in (DATA, NEW))
    with pytest.raises(StoreError, match=f"object in store .* is damaged: got .*sha256 {found}, not {named}"):
        store.get("object")
    assert len(proxy.requests("GET", OBJECT)) == 2


def test_the_server_keeps_a_crc32c(store: Store, s3_env: S3Bucket) -> None:
    """What the check of a GET rests on; computed here bit by bit."""
    crc = 0xFFFFFFFF
    for byte in b"one":
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    store.put("object", b"one")
    answer = s3_env.server.client().get_object(Bucket=s3_env.bucket, Key="store/object", ChecksumMode="ENABLED")
    assert base64.b64decode(answer["ChecksumCRC32C"]) == (crc ^ 0xFFFFFFFF).to_bytes(4, "big")


def test_a_body_is_hashed_once(store: Store, proxy: FaultProxy) -> None:
    """For the metadata. The signature covers the body's crc32c, not a second sha256 of it."""
    heads: list[dict[str, str]] = []

    def look(number: int, request: Request) -> Fault | None:
        if request.method == "PUT":
            heads.append(request.headers)
        return None

    proxy.choose = look
    store.put_if_absent("object", DATA)
    (headers,) = heads
    assert headers["x-amz-meta-sha256"] == hashlib.sha256(DATA).hexdigest()
    assert headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
    signed = re.search("SignedHeaders=([^,]*)", headers["authorization"])
    assert signed is not None
    assert {"x-amz-checksum-crc32c", "x-amz-meta-sha256", "if-none-match"} <= set(signed[1].split(";"))


REASONS = {
    "refuse": "connection", "lose answer": "connection", "answer": "slow down", "cut request": "connection",
    "flip request": "checksum mismatch", "cut answer": "truncated body", "flip answer": "checksum mismatch",
}  # fmt: skip


def every(number_of: int) -> Callable[[int, Request], Fault | None]:
    """A fault in every n-th request, of all kinds in turn that its method knows."""
    kinds: dict[str, list[Kind]] = {
        "GET": ["refuse", "cut answer", "flip answer", "answer", "lose answer"],
        "PUT": ["lose answer", "cut request", "flip request", "answer", "refuse"],
    }

    def choose(number: int, request: Request) -> Fault | None:
        if number % number_of:
            return None
        known: list[Kind] = ["refuse", "answer", "lose answer"]
        if "list-type" not in request.target and (request.method == "PUT" or "range" not in request.headers):
            known = kinds.get(request.method, known)
        return Fault(known[number // number_of % len(known)])

    return choose


@pytest.mark.parametrize("number_of", [3, 4])
def test_a_cache_comes_out_the_same(
    store: Store, proxy: FaultProxy, direct: Store, tmp_path: Path, number_of: int
) -> None:
    """Written and read whole while every third or fourth request fails: the digest, the objects and the samples are
    those of an undisturbed run, nothing was computed twice, and every fault is in the count."""
    plan = toy_plan()
    expected = fill(LocalStore(tmp_path), plan, Toy(plan))
    proxy.choose, toy = every(number_of), Toy(plan)
    manifest = fill(store, plan, toy)
    assert manifest == expected
    assert manifest.digest == expected.digest
    assert sorted(toy.computed) == sorted(sample.id for sample in plan.samples)
    assert {item.path for item in direct.list("")} == {item.path for item in LocalStore(tmp_path).list("")}

    reader, whole = CacheReader(store, manifest), CacheReader(LocalStore(tmp_path), expected)
    for index in range(plan.num_samples):
        ours, theirs = reader.read(index), whole.read(index)
        for field in ("input_ids", "supervised", "context", "last_hidden"):
            np.testing.assert_array_equal(getattr(ours, field), getattr(theirs, field))
    reader.close()
    whole.close()
    # A put that is refused by its condition (it was there already, its answer lost) is refused whatever its body is.
    faults = [seen for seen in proxy.seen if (seen.kind, seen.status) != ("flip request", 412)]
    counted = Counter(REASONS[seen.kind] for seen in faults if seen.kind is not None)
    assert store.retries == counted
    assert len(counted) == 4
    # Fewer than every n-th: the body of a refusal is neither cut nor flipped.
    assert counted.total() > len(proxy.seen) // (number_of + 1)
