"""The local services behind `make up`, `make down` and `make status`: Prefect server and worker, MLflow, an S3 server.

Each runs in a session of its own, with its log and a pid file in `.services/`. Needs Python, psutil and the programs
beside this interpreter; nothing is written outside the working copy.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
import urllib.error
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path

import psutil
from servers import (
    BUCKET,
    HOST,
    MARK,
    POOL,
    PREFECT_DEFAULT_PORT,
    ROOT,
    STATE,
    Port,
    Service,
    ServiceError,
    child_environment,
    chosen_ports,
    fetch,
    is_free,
    mlflow_server,
    prefect_environment,
    prefect_server,
    prefect_worker,
    program,
    s3_lines,
    s3_server,
)

READY_TIMEOUT_S = 180.0
BUSY_TIMEOUT_S, BUSY_PAUSE_S = 60.0, 0.5
STOP_TIMEOUT_S = 45.0  # the S3 server takes about 16 s
SERVICES = ("worker", "prefect", "mlflow", "s3")  # the worker stops before the server that it reports to


def pid_file(name: str) -> Path:
    return STATE / f"{name}.pid"


def log_file(name: str) -> Path:
    return STATE / f"{name}.log"


def running(name: str) -> psutil.Process | None:
    """The process of a service if the one that was started still runs (a reused pid does not count)."""
    try:
        noted = json.loads(pid_file(name).read_text())
        process = psutil.Process(noted["pid"])
        alive = abs(process.create_time() - noted["started"]) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except (OSError, ValueError, psutil.NoSuchProcess):
        return None
    return process if alive else None


def start(service: Service) -> None:
    with log_file(service.name).open("ab") as log:
        process = subprocess.Popen(
            service.command,
            cwd=ROOT,
            env=child_environment(service.environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    started = psutil.Process(process.pid).create_time()
    pid_file(service.name).write_text(json.dumps({"pid": process.pid, "started": started}))


def wait_ready(service: Service) -> None:
    """Raises ServiceError with the end of the log if the service ends or is not ready in time."""
    end = time.monotonic() + READY_TIMEOUT_S
    while not service.is_ready():
        if running(service.name) is None or time.monotonic() > end:
            tail = "\n".join(log_file(service.name).read_text(errors="replace").splitlines()[-15:])
            raise ServiceError(f"{service.name} did not come up; the end of {log_file(service.name)}:\n{tail}")
        time.sleep(0.3)


def run_prefect(port: int, *arguments: str) -> None:
    """One command of the Prefect client against our server. Raises ServiceError with its output if it fails."""
    environment = child_environment(prefect_environment(port))
    command = [program("prefect"), "--no-prompt", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise ServiceError(f"`prefect {' '.join(arguments)}` failed:\n{(done.stdout + done.stderr).strip()}")


def up() -> None:
    """Start what does not run yet, in an order in which each finds what it needs, and wait until all are ready."""
    ports = chosen_ports()
    noted = noted_ports()
    for port in ports.values():
        if running(port.service) is None:
            if not is_free(port.number):
                raise ServiceError(f"port {port.number} for {port.service} is taken: set {port.variable} to a free one")
        elif noted.get(port.service) != port.number:
            raise ServiceError(
                f"{port.service} runs on port {noted.get(port.service)}: `make down` before another port"
            )
    STATE.mkdir(exist_ok=True)
    prefect, mlflow, s3 = (ports[name].number for name in ("prefect", "mlflow", "s3"))
    makers = {"prefect": prefect_server, "mlflow": mlflow_server, "s3": s3_server}
    missing = [makers[name](port.number) for name, port in ports.items() if running(name) is None]
    write_ports(ports)
    try:
        for service in missing:
            start(service)
        for service in missing:
            wait_ready(service)
        worker = prefect_worker(prefect)
        if running(worker.name) is None:
            end_all(strays())
            crash_abandoned_runs(prefect)
            start(worker)
        wait_ready(worker)  # it has made its pool by then
        call_prefect(prefect, f"work_pools/{POOL}", {"concurrency_limit": 1}, method="PATCH")
        run_prefect(prefect, "deploy", "--all")
    except BaseException:
        down()
        raise
    say(f"Prefect  http://{HOST}:{prefect}   deployments train-drafter, build-cache, study-drafter; work pool {POOL}")
    say(f"MLflow   http://{HOST}:{mlflow}")
    say(f"S3       http://{HOST}:{s3}   bucket {BUCKET}")
    if prefect != PREFECT_DEFAULT_PORT:
        say("Prefect's port is not the usual one, so in each terminal:")
        say(f"  export PREFECT_API_URL=http://{HOST}:{prefect}/api")
    if not os.environ.get("DRAFTSMITH_STORE"):
        say("The store stays the local folder. To have it on the S3 server, `make down`, then `make up` after these:")
        for line in s3_lines(s3):
            say(f"  {line}")


def call_prefect(port: int, path: str, body: Mapping[str, object], *, method: str = "POST") -> bytes:
    """One call of the Prefect server's own interface. Raises ServiceError if it fails.

    While its database is locked the server answers 503; that passes.
    """
    url, headers = f"http://{HOST}:{port}/api/{path}", {"Content-Type": "application/json"}
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            return fetch(url, method=method, body=json.dumps(body).encode(), headers=headers)
        except OSError as error:
            busy = isinstance(error, urllib.error.HTTPError) and error.code == HTTPStatus.SERVICE_UNAVAILABLE
            if not busy or time.monotonic() > deadline:
                raise ServiceError(f"the Prefect server refused {method} {path}: {error}") from error
        time.sleep(BUSY_PAUSE_S)


def crash_abandoned_runs(port: int) -> None:
    """Close the flow runs of a worker that is gone: they would keep the one place in the queue for ever."""
    states = {"type": {"any_": ["PENDING", "RUNNING", "CANCELLING"]}}
    wanted = {"flow_runs": {"state": states}, "work_pools": {"name": {"any_": [POOL]}}}
    crashed = {"state": {"type": "CRASHED", "message": "its worker was stopped"}, "force": True}
    for run in json.loads(call_prefect(port, "flow_runs/filter", wanted)):
        call_prefect(port, f"flow_runs/{run['id']}/set_state", crashed)


def noted_ports() -> dict[str, int]:
    try:
        return dict(json.loads((STATE / "ports.json").read_text()))
    except (OSError, ValueError):
        return {}


def write_ports(ports: Mapping[str, Port]) -> None:
    (STATE / "ports.json").write_text(json.dumps({name: port.number for name, port in ports.items()}))


def families(names: Iterable[str]) -> list[psutil.Process]:
    """The processes of these services with all their descendants, heads first."""
    members = []
    for name in names:
        with suppress(psutil.NoSuchProcess):
            if (head := running(name)) is not None:
                members += [head, *head.children(recursive=True)]
    return members


def stop(names: Iterable[str]) -> None:
    """Tell services to end and see that their descendants do too."""
    names = list(names)
    members = families(names)
    for name in names:
        with suppress(psutil.NoSuchProcess):
            if (head := running(name)) is not None:
                head.terminate()
    wait_ended(members)


def end_all(members: list[psutil.Process]) -> None:
    for process in members:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    wait_ended(members)


def wait_ended(members: list[psutil.Process]) -> None:
    """Give processes time to end, then kill those that did not."""
    _, alive = psutil.wait_procs(members, timeout=STOP_TIMEOUT_S)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=5)


def left_over() -> list[psutil.Process]:
    """Every process, however it was started, that descends from a service of this working copy."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == str(STATE) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return [process for process in found if process.pid != os.getpid()]


def strays() -> list[psutil.Process]:
    """What is left over of services that run no more."""
    known = set(families(SERVICES))
    return [process for process in left_over() if process not in known]


def down() -> None:
    """Stop the worker, then the rest; then make sure that nothing is left, whatever became of its parent."""
    stop(SERVICES[:1])
    stop(SERVICES[1:])
    end_all(left_over())
    for name in SERVICES:
        pid_file(name).unlink(missing_ok=True)
    (STATE / "ports.json").unlink(missing_ok=True)
    if left := left_over():
        raise ServiceError(f"still running: {', '.join(f'{process.pid} {process.name()}' for process in left)}")


def status() -> None:
    ports = noted_ports()
    for name in SERVICES:
        process = running(name)
        place = f"http://{HOST}:{ports[name]}" if name in ports else ""
        say(f"{name:8} {'down' if process is None else f'up, pid {process.pid}':16} {place}".rstrip())


def say(line: str) -> None:
    print(line, flush=True)


def main(arguments: list[str]) -> int:
    commands: dict[str, Callable[[], None]] = {"up": up, "down": down, "status": status}
    if len(arguments) != 1 or arguments[0] not in commands:
        say("usage: services.py up | down | status")
        return 2
    if platform.system() not in ("Linux", "Darwin"):
        say(f"draftsmith runs on Linux and macOS, got {platform.system()}")
        return 1
    try:
        commands[arguments[0]]()
    except ServiceError as error:
        say(str(error))
        return 1
    if arguments[0] == "down":
        say("all services are down; nothing is left running")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
