"""Credentials that run out, are replaced or are mended while a process uses the store, on a real S3 server."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from draftsmith.errors import StoreError
from draftsmith.storage import open_store
from tests.s3 import S3Bucket
from tests.s3_proxy import Fault, FaultProxy, direct, proxy

__all__ = ["direct", "proxy"]

pytestmark = pytest.mark.s3

DATA = b"bytes" * 1000


class Keys:
    """A shared credentials file that the store reads, at first with the server's first pair of keys."""

    def __init__(self, s3_env: S3Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server, self.path = s3_env.server, tmp_path / "credentials"
        for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(variable)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(self.path))
        self.write(self.server.access_key, self.server.secret_key)

    def write(self, access_key: str, secret_key: str) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(f"[default]\naws_access_key_id = {access_key}\naws_secret_access_key = {secret_key}\n")
        new.replace(self.path)

    def replace(self) -> None:
        self.write(self.server.second_access_key, self.server.second_secret_key)


@pytest.fixture
def keys(s3_env: S3Bucket, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Keys:
    return Keys(s3_env, tmp_path, monkeypatch)


def test_credentials_are_replaced_in_mid_run(s3_env: S3Bucket, proxy: FaultProxy, keys: Keys) -> None:
    """From some moment on the first key is expired; four threads at work go on when the file has been replaced."""
    store = open_store(s3_env.uri)
    store.put("object", DATA)
    expired = Fault("answer", times=-1, key=keys.server.access_key, status=400, code="ExpiredToken")
    proxy.faults.append(expired)

    def replace_soon() -> None:
        while proxy.num_faults < 8:
            time.sleep(0.01)
        keys.replace()

    replacing = threading.Thread(target=replace_soon, daemon=True)
    replacing.start()
    with ThreadPoolExecutor(4) as pool:
        writing = [pool.submit(store.put_if_absent, f"objects/{number}", DATA) for number in range(12)]
        assert all(future.result().size == len(DATA) for future in writing)
    replacing.join()
    assert len(list(store.list("objects"))) == 12
    assert store.retries == {"expired credentials": proxy.num_faults}
    assert proxy.num_faults >= 8


def test_a_head_with_expired_credentials(s3_env: S3Bucket, proxy: FaultProxy, keys: Keys) -> None:
    """Its answer has no body: why it was refused is asked by another request."""
    store = open_store(s3_env.uri)
    there = store.put("object", DATA)
    proxy.faults.append(Fault("answer", times=-1, key=keys.server.access_key, status=400, code="ExpiredToken"))
    keys.replace()
    found = store.head("object")
    assert found is not None
    assert (found.etag, found.sha256) == (there.etag, there.sha256)
    assert store.retries == {"expired credentials": 1}
    # The one in between is botocore's own: another region would also answer with 400.
    refused = [(seen.method, seen.target.partition("?")[2][:11]) for seen in proxy.seen if seen.kind is not None]
    assert refused == [("HEAD", ""), ("HEAD", ""), ("GET", "list-type=2")]


def test_credentials_that_were_wrong_and_are_mended(s3_env: S3Bucket, proxy: FaultProxy, keys: Keys) -> None:
    """Four threads have sent their requests with the wrong key when the first hears of it."""
    keys.write("old", "old")
    store = open_store(s3_env.uri)
    keys.replace()
    proxy.faults.append(Fault("delay", "PUT", times=4, key="old", seconds=1.0))
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda path: store.put(path, DATA).size, "abcd")) == [len(DATA)] * 4
    assert proxy.num_faults == 4
    assert store.retries == {"replaced credentials": 4}


def test_expired_credentials_that_nobody_replaces(
    s3_env: S3Bucket, proxy: FaultProxy, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTSMITH_S3_TIMEOUT_S", "1")
    store = open_store(s3_env.uri)
    proxy.faults.append(Fault("answer", "GET", times=-1, status=400, code="ExpiredToken"))
    with pytest.raises(StoreError, match=r"\d expired credentials\); the last: ExpiredToken \(400\)"):
        store.get("object")


def test_a_program_for_credentials_that_fails(
    s3_env: S3Bucket, tmp_path: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys.path.unlink()
    config = tmp_path / "config"
    config.write_text("[default]\ncredential_process = sh -c 'echo no luck >&2; exit 3'\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    with pytest.raises(StoreError, match=r"cannot open store .*no luck.*AWS_PROFILE") as caught:
        open_store(s3_env.uri)
    assert "\n" not in str(caught.value)
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(StoreError, match=r"cannot open store .*nobody.*AWS_PROFILE"):
        open_store(s3_env.uri)
