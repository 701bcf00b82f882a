"""The local servers: which ports they take, how each is started, and how one sees that it is ready.

All listen on the loopback address only and keep what they write in `.services/`, besides MLflow's own store.
"""

from __future__ import annotations

import http
import http.client
import json
import os
import secrets
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STATE = ROOT / ".services"
BIN = Path(sys.executable).parent
HOST = "127.0.0.1"
MARK = "DRAFTSMITH_SERVICES"  # in the environment of all that is started here, so that nothing can hide from `down`
BUCKET = "draftsmith"
REGION = "us-east-1"
POOL = "local"
PREFECT_DEFAULT_PORT = 4200


class ServiceError(Exception):
    """Something that the user can mend; its text is all that is printed."""


@dataclass(frozen=True)
class Port:
    """A port that the user may choose: `service` listens on it, `variable` names it."""

    service: str
    variable: str
    number: int


@dataclass(frozen=True)
class Service:
    """A program that keeps running: its command, what is added to its environment, and a probe."""

    name: str
    command: list[str]
    environment: dict[str, str]
    is_ready: Callable[[], bool]


def chosen_ports() -> dict[str, Port]:
    """The ports of the environment. Raises ServiceError for one that is no port, or that two services share."""
    ports = {}
    for service, variable, default in (
        ("prefect", "DRAFTSMITH_PREFECT_PORT", PREFECT_DEFAULT_PORT),
        ("mlflow", "DRAFTSMITH_MLFLOW_PORT", 5000),
        ("s3", "DRAFTSMITH_S3_PORT", 8333),
    ):
        text = os.environ.get(variable) or str(default)
        if not text.isdecimal() or not 1 <= int(text) <= 65535:
            raise ServiceError(f"{variable} must be a port from 1 to 65535, got {text!r}")
        ports[service] = Port(service, variable, int(text))
    numbers = [port.number for port in ports.values()]
    if len(set(numbers)) < len(numbers):
        shared = ", ".join(f"{port.variable}={port.number}" for port in ports.values())
        raise ServiceError(f"each service needs a port of its own, got {shared}")
    return ports


def is_free(number: int) -> bool:
    """Whether a server could listen on the loopback port, and nobody else answers there."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        if probe.connect_ex((HOST, number)) == 0:
            return False
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, number))
        except OSError:
            return False
    return True


def free_ports(count: int) -> list[int]:
    """Ports that are free now, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for item in sockets:
            item.bind((HOST, 0))
        return [item.getsockname()[1] for item in sockets]
    finally:
        for item in sockets:
            item.close()


def fetch(
    url: str, *, method: str = "GET", body: bytes | None = None, headers: Mapping[str, str] | None = None
) -> bytes:
    """Body of a loopback answer, past the user's proxy. Raises OSError if there is none or its status is an error."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(url, body, dict(headers or {}), method=method), timeout=5) as answer:
        try:
            return bytes(answer.read())
        except http.client.HTTPException as error:
            raise OSError(f"cut short: {error!r}") from error


def answers(url: str) -> bool:
    try:
        fetch(url)
    except OSError:
        return False
    return True


def program(name: str) -> str:
    path = BIN / name
    if not path.exists():
        raise ServiceError(f"{name} is not installed beside {sys.executable}: run `make setup`")
    return str(path)


def child_environment(extra: dict[str, str]) -> dict[str, str]:
    """The caller's environment without its Prefect settings, which would point at another server."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    path = os.pathsep.join([str(BIN), own.get("PATH", os.defpath)])
    return (
        own | {"PATH": path, "PWD": str(ROOT), "PYTHONUNBUFFERED": "1", "DO_NOT_TRACK": "1", MARK: str(STATE)} | extra
    )


def prefect_environment(port: int) -> dict[str, str]:
    return {
        "PREFECT_HOME": str(STATE / "prefect"),
        "PREFECT_API_URL": f"http://{HOST}:{port}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_CLI_PROMPT": "false",
        "PREFECT_WORKER_QUERY_SECONDS": "2",  # a run starts soon: one worker cannot burden its own server
        "PREFECT_PLUGINS_ENABLED": "false",  # the repository's own is for the user's client
    }


def prefect_server(port: int) -> Service:
    command = [program("prefect"), "server", "start", "--host", HOST, "--port", str(port)]
    return Service("prefect", command, prefect_environment(port), lambda: answers(f"http://{HOST}:{port}/api/health"))


def prefect_worker(port: int) -> Service:
    command = [
        program("prefect"),
        "worker",
        "start",
        "--pool",
        POOL,
        "--type",
        "process",
        "--name",
        POOL,
        "--limit",
        "1",
    ]
    url = f"http://{HOST}:{port}/api/work_pools/{POOL}/workers/filter"

    def is_online() -> bool:
        try:
            listed = json.loads(fetch(url, method="POST", body=b"{}", headers={"Content-Type": "application/json"}))
        except OSError:
            return False
        return any(worker["status"] == "ONLINE" for worker in listed)

    return Service("worker", command, prefect_environment(port), is_online)


def mlflow_server(port: int) -> Service:
    """MLflow's page over the same database and artifact folder that runs use without a server."""
    command = [program("mlflow"), "server", "--host", HOST, "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{ROOT / 'mlflow.db'}", "--no-serve-artifacts"]
    command += ["--default-artifact-root", (ROOT / "mlartifacts").as_uri()]
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    return Service("mlflow", command, quiet, lambda: answers(f"http://{HOST}:{port}/health"))


def s3_server(port: int) -> Service:
    """SeaweedFS with credentials of its own; the ports of its parts are any free ones."""
    names = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc")
    inner = inner_ports((*names, "s3.port.grpc"))
    folder = STATE / "s3"
    folder.mkdir(exist_ok=True)
    options = {
        "ip": HOST,
        "ip.bind": HOST,
        "dir": folder,
        "volume.max": 0,  # as many as the disk holds: a small number breaks later buckets
        "volume.minFreeSpace": 1,
        "volume.preStopSeconds": 0,
        "master.volumeSizeLimitMB": 512,
        "master.telemetry": "false",
        "filer": "true",
        "s3": "true",
        "s3.port": port,
        "s3.config": s3_credentials(),
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        "s3.allowDeleteBucketNotEmpty": "false",
        **inner,
    }
    command = [program("weed"), "server", *(f"-{name}={value}" for name, value in options.items())]
    small = {"WEED_MASTER_VOLUME_GROWTH_COPY_1": "1", "GOMEMLIMIT": "300MiB"}
    bucket = f"http://{HOST}:{inner['filer.port']}/buckets/{BUCKET}/"

    def takes_objects() -> bool:
        """Put and delete a small object below the S3 gateway: the server is up long before it can store anything."""
        try:
            make_folder(bucket)
            fetch(bucket + ".ready", method="PUT", body=b"ready")
            fetch(bucket + ".ready", method="DELETE")
            fetch(f"http://{HOST}:{port}/healthz")
        except OSError:
            return False
        return True

    return Service("s3", command, small, takes_objects)


def make_folder(url: str) -> None:
    """Make a folder of the filer; one that is there already is as good. A folder below /buckets is a bucket."""
    try:
        fetch(url, method="POST")
    except urllib.error.HTTPError as error:
        if error.code != http.HTTPStatus.CONFLICT:
            raise


def inner_ports(names: tuple[str, ...]) -> dict[str, int]:
    """Ports of the S3 server's parts: those of the last start if they are free, since its state names them."""
    path = STATE / "s3-ports.json"
    try:
        last = dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        last = {}
    if set(last) == set(names) and all(is_free(number) for number in last.values()):
        return last
    chosen = dict(zip(names, free_ports(len(names)), strict=True))
    path.write_text(json.dumps(chosen))
    return chosen


def s3_credentials() -> Path:
    """The credentials' file, made at the first start and readable by its owner alone."""
    path = STATE / "s3.json"
    if not path.exists():
        pair = {"accessKey": secrets.token_hex(10), "secretKey": secrets.token_hex(20)}
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
            json.dump({"identities": [{"name": "admin", "credentials": [pair], "actions": actions}]}, stream)
    return path


def s3_lines(port: int) -> Iterable[str]:
    """What to export to use the S3 server as the store."""
    pair = json.loads(s3_credentials().read_text())["identities"][0]["credentials"][0]
    yield f"export DRAFTSMITH_STORE=s3://{BUCKET} AWS_ENDPOINT_URL_S3=http://{HOST}:{port} AWS_DEFAULT_REGION={REGION}"
    yield f"export AWS_ACCESS_KEY_ID={pair['accessKey']} AWS_SECRET_ACCESS_KEY={pair['secretKey']}"
