"""Runs, curves and artifacts in MLflow; the only module that imports mlflow, and it does so when a run opens."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sqlite3
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from draftsmith.errors import MachineError
from draftsmith.manifest import write_json
from draftsmith.paths import Workspace
from draftsmith.provenance import read_provenance
from draftsmith.termination import Terminated, sigterm_raises
from draftsmith.tracking_database import alone_at, follow_moved_copy

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from mlflow import MlflowClient

DEFAULT_UI_PORT = 5000
PROBE_TIMEOUT_S = 5.0
FLUSH_POINTS = 200
FLUSH_INTERVAL_S = 5.0
BATCH_POINTS = 1000  # the most that MLflow takes in one log_batch
BATCH_TAGS = 100  # the most params or tags in one log_batch
DIGEST_CHARS = 32  # MLflow stores at most 36 characters of a data set's digest
PROCESS_TAG = "process"
QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


class StageRun:
    """An open MLflow run. Metrics are buffered and sent in batches; everything else is sent at once.

    Each method raises MachineError if the tracking store refuses or cannot be reached.
    """

    def __init__(self, client: MlflowClient, *, run_id: str, url: str, last_steps: Mapping[str, int]) -> None:
        self.run_id = run_id
        self.url = url
        self._client = client
        self._last_steps = dict(last_steps)
        self._points: list[Any] = []
        self._flushed_s = time.monotonic()

    def log_metrics(self, values: Mapping[str, float], *, step: int) -> None:
        """Buffer one point a metric. A point that a resumed run has already (same metric, step) is left out."""
        from mlflow.entities import Metric

        now_ms = time.time_ns() // 1_000_000
        for key, value in values.items():
            if step > self._last_steps.get(key, -1):
                self._points.append(Metric(key, float(value), now_ms, step))
        if len(self._points) >= FLUSH_POINTS or time.monotonic() - self._flushed_s >= FLUSH_INTERVAL_S:
            self.flush()

    def flush(self) -> None:
        """Send the buffered points."""
        with _clear_errors("cannot log metrics to MLflow"):
            while self._points:
                self._client.log_batch(self.run_id, metrics=self._points[:BATCH_POINTS])
                del self._points[:BATCH_POINTS]
        self._flushed_s = time.monotonic()

    def log_figure(self, figure: Figure, path: str) -> None:
        """Store a matplotlib figure under `path` (relative, with its suffix) among the run's artifacts."""
        with _clear_errors(f"cannot store {path} in MLflow"):
            self._client.log_figure(self.run_id, figure, path)

    def log_text(self, text: str, path: str) -> None:
        """Store a text under `path` among the run's artifacts."""
        with _clear_errors(f"cannot store {path} in MLflow"):
            self._client.log_text(self.run_id, text, path)

    def log_json(self, value: object, path: str) -> None:
        """Store a JSON value under `path` among the run's artifacts."""
        self.log_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", path)

    def log_file(self, file: Path, *, folder: str | None = None) -> None:
        """Store a small local file among the run's artifacts, in `folder` if it is given."""
        with _clear_errors(f"cannot store {file.name} in MLflow"):
            self._client.log_artifact(self.run_id, str(file), folder)

    def log_dataset(self, *, uri: str, digest: str, name: str, context: str) -> None:
        """Link a data set (a prefix of the store) to the run without reading it.

        The digest is cut to MLflow's length; the whole one stands in the link's tags. `context` says what it was
        used for, such as `training`.
        """
        with _clear_errors(f"cannot link the data set {name} to the run"), _foreign_warnings_off():
            from mlflow.data.dataset_source_registry import resolve_dataset_source
            from mlflow.data.meta_dataset import MetaDataset
            from mlflow.entities import DatasetInput, InputTag

            # MLflow's own class leaves an abstract property open, which only a type checker minds.
            dataset = MetaDataset(  # type: ignore[abstract]
                source=resolve_dataset_source(uri), name=name, digest=digest[:DIGEST_CHARS]
            )
            tags = [InputTag("mlflow.data.context", context), InputTag("digest", digest)]
            link = DatasetInput(dataset=dataset._to_mlflow_entity(), tags=tags)
            self._client.log_inputs(self.run_id, datasets=[link])

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Add tags that were not known when the run opened."""
        with _clear_errors("cannot tag the MLflow run"):
            _describe(self._client, self.run_id, params={}, tags=tags)

    def close(self, status: str) -> None:
        """Send what is buffered and end the run with FINISHED, FAILED or KILLED."""
        self.flush()
        with _clear_errors("cannot end the MLflow run"):
            self._client.set_terminated(self.run_id, status=status)


@contextlib.contextmanager
def stage_run(
    stage: str, name: str, *, workspace: Workspace, params: Mapping[str, Any], tags: Mapping[str, str],
    system_metrics: bool = False, resume_run_id: str | None = None,
) -> Iterator[StageRun]:  # fmt: skip
    """Open the run `name` in the experiment `draftsmith/<stage>`; close it with the right status, whatever happens.

    `name` is the key or target, `params` may be nested (logged with dotted names), `tags` add to those of
    `provenance`. A run that ends well leaves a receipt in the workspace. `resume_run_id` goes on with an earlier run
    of the same stage, name and params; if there is none any more, a new run starts. The receipt's `wall_s` is of this
    attempt alone, `finished` is in UTC.
    A run that is interrupted (SIGINT, SIGTERM) is marked KILLED, one that raises FAILED, and the error goes on.
    Raises MachineError, within seconds, if the tracking store is missing.
    """
    started_s = time.monotonic()
    uri = tracking_uri(workspace)
    client = open_client(uri)
    flat = flatten_params(params)
    facts = read_provenance(workspace.root).as_tags()
    with _clear_errors("cannot open a run in MLflow", where=_uri_place(uri)):
        experiment_id = _experiment_id(client, stage, workspace=workspace, uri=uri)
        _close_abandoned(client, experiment_id, name)
        resumed = _resumable(client, experiment_id, name, flat, resume_run_id)
        if resumed is None:
            run_id = client.create_run(experiment_id, run_name=name).info.run_id
        else:
            run_id = resumed.info.run_id
            client.update_run(run_id, status="RUNNING")
        _describe(client, run_id, params=flat if resumed is None else {}, tags=_all_tags(stage, facts, tags))
    last_steps = {} if resumed is None else {metric.key: metric.step for metric in resumed.data._metric_objs}
    run = StageRun(client, run_id=run_id, url=run_url(workspace, uri, experiment_id, run_id), last_steps=last_steps)
    monitor = _system_monitor(run_id, uri, resumed is not None) if system_metrics else contextlib.nullcontext()
    with sigterm_raises():
        try:
            with monitor:
                yield run
        except BaseException as error:
            _close_broken(run, error)
            raise
        run.close("FINISHED")
    wall_s, finished = round(time.monotonic() - started_s, 3), datetime.now(UTC).isoformat(timespec="seconds")
    receipt = {"stage": stage, "name": name, "run_id": run_id, "url": run.url, "wall_s": wall_s, "finished": finished}
    write_json(workspace.receipt(stage, name), receipt)


def _close_broken(run: StageRun, error: BaseException) -> None:
    """Close a run that `error` ends; trouble in doing so is noted on `error`, which matters more."""
    status = "KILLED" if isinstance(error, (KeyboardInterrupt, Terminated)) else "FAILED"
    try:
        run.set_tags({"error": f"{type(error).__name__}: {error}"[:1000]})
        run.close(status)
    except MachineError as second:
        error.add_note(f"besides: {second}")


def tracking_uri(workspace: Workspace) -> str:
    """MLFLOW_TRACKING_URI, or the database `mlflow.db` of this working copy."""
    return os.environ.get("MLFLOW_TRACKING_URI") or default_tracking_uri(workspace)


def default_tracking_uri(workspace: Workspace) -> str:
    """The database that `make up` serves too."""
    return f"sqlite:///{workspace.root.resolve() / 'mlflow.db'}"


def artifact_root(workspace: Workspace, *, uri: str) -> Path:
    """Where artifacts belong: beside a database that is a file, else in this working copy."""
    folder = Path(uri.removeprefix("sqlite:///")).parent if uri.startswith("sqlite:///") else workspace.root
    return folder.resolve() / "mlartifacts"


def run_url(workspace: Workspace, uri: str, experiment_id: str, run_id: str) -> str:
    """The run's page: on the server of MLFLOW_TRACKING_URI, or on the one that `make up` starts."""
    base = uri.rstrip("/") if uri.startswith(("http://", "https://")) else f"http://127.0.0.1:{_ui_port(workspace)}"
    return f"{base}/#/experiments/{experiment_id}/runs/{run_id}"


def _ui_port(workspace: Workspace) -> str:
    """DRAFTSMITH_MLFLOW_PORT, else the port that `make up` wrote down, else MLflow's own."""
    named = os.environ.get("DRAFTSMITH_MLFLOW_PORT")
    if named:
        return named
    try:
        return str(json.loads((workspace.root / ".services" / "ports.json").read_text())["mlflow"])
    except (OSError, ValueError, KeyError):
        return str(DEFAULT_UI_PORT)


def open_client(uri: str) -> MlflowClient:
    """An MLflow client for `uri`, quiet and without telemetry. Raises MachineError if a server does not answer."""
    if uri.startswith(("http://", "https://")):
        _probe(uri)
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    # What the database layer logs of an error, a whole traceback, is told in one line by _clear_errors.
    for name, level in (("alembic", "WARNING"), ("mlflow.system_metrics", "WARNING"), ("mlflow.store.db", "CRITICAL")):
        logging.getLogger(name).setLevel(level)
    with _foreign_warnings_off():
        from mlflow import MlflowClient

        with _clear_errors("cannot open the MLflow store", where=_uri_place(uri)), alone_at(uri):
            return MlflowClient(uri)


def _probe(uri: str) -> None:
    try:
        with urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=PROBE_TIMEOUT_S):
            return
    except urllib.error.HTTPError:
        return  # it answers; whether it lets us in shows at the first call
    except (OSError, ValueError) as error:
        raise MachineError(
            f"no MLflow server answers at {uri}",
            got=str(error),
            expected="a running server (`make up`), or MLFLOW_TRACKING_URI unset for the local mlflow.db",
            where="environment: MLFLOW_TRACKING_URI",
        ) from None


def _uri_place(uri: str) -> str:
    return f"environment: MLFLOW_TRACKING_URI={uri}" if os.environ.get("MLFLOW_TRACKING_URI") else uri


@contextlib.contextmanager
def _clear_errors(what: str, where: str | None = None) -> Iterator[None]:
    """Turn the errors of MLflow, its database and its files into a MachineError of one line."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except (MlflowException, OSError, sqlite3.Error) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        # Before the database's own words may come what the layers above were at.
        told = next((line for line in lines if line.startswith("(sqlite3.")), lines[0])
        raise MachineError(what, got=told[:500], where=where) from error


@contextlib.contextmanager
def _foreign_warnings_off() -> Iterator[None]:
    """Hide the deprecation warnings that MLflow and its database layer raise about themselves while they load."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def flatten_params(params: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested params as dotted names with text values; lists become JSON."""
    flat: dict[str, str] = {}
    for key, value in params.items():
        if isinstance(value, Mapping):
            flat |= flatten_params(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = json.dumps(value) if isinstance(value, (list, tuple)) else str(value)
    return flat


def _batches(items: list[Any]) -> Iterator[list[Any]]:
    for start in range(0, len(items), BATCH_TAGS):
        yield items[start : start + BATCH_TAGS]


def _all_tags(stage: str, facts: Mapping[str, str], tags: Mapping[str, str]) -> dict[str, str]:
    process = psutil.Process()
    owner = {"host": socket.gethostname(), "pid": process.pid, "started": process.create_time()}
    own = {"stage": stage, "mlflow.source.name": f"draftsmith {stage}", PROCESS_TAG: json.dumps(owner)}
    return own | {"mlflow.source.git.commit": facts["git_commit"]} | dict(facts) | dict(tags)


def _describe(client: MlflowClient, run_id: str, *, params: Mapping[str, str], tags: Mapping[str, str]) -> None:
    from mlflow.entities import Param, RunTag

    for batch in _batches([Param(key, value) for key, value in params.items()]):
        client.log_batch(run_id, params=batch)
    for batch in _batches([RunTag(key, str(value)) for key, value in tags.items()]):
        client.log_batch(run_id, tags=batch)


def _experiment_id(client: MlflowClient, stage: str, *, workspace: Workspace, uri: str) -> str:
    """The experiment of `stage`, made if need be. A server chooses the artifact place itself; a database cannot."""
    from mlflow.exceptions import MlflowException

    name, root = f"draftsmith/{stage}", artifact_root(workspace, uri=uri)
    if uri == default_tracking_uri(workspace):
        follow_moved_copy(workspace.root.resolve() / "mlflow.db", root.as_uri())
    found = client.get_experiment_by_name(name)
    if found is not None:
        if found.lifecycle_stage == "deleted":
            client.restore_experiment(found.experiment_id)
        return found.experiment_id
    served = uri.startswith(("http://", "https://"))
    try:
        return client.create_experiment(name, artifact_location=None if served else f"{root.as_uri()}/{stage}")
    except MlflowException:
        # Another process may have made it since; if not, the first error stands.
        found = client.get_experiment_by_name(name)
        if found is None:
            raise
        return found.experiment_id


def _close_abandoned(client: MlflowClient, experiment_id: str, name: str) -> None:
    """Mark as KILLED the running runs of this name whose process on this machine is gone (kill -9, power cut)."""
    running = client.search_runs(
        [experiment_id], f"attributes.status = 'RUNNING' AND attributes.run_name = '{name}'", max_results=100
    )
    for run in running:
        owner = json.loads(run.data.tags.get(PROCESS_TAG, "{}"))
        if owner.get("host") == socket.gethostname() and not _is_alive(owner["pid"], owner["started"]):
            client.set_terminated(run.info.run_id, status="KILLED")


def _is_alive(pid: int, started: float) -> bool:
    try:
        return abs(psutil.Process(pid).create_time() - started) < 1.0
    except psutil.NoSuchProcess:
        return False


def _resumable(
    client: MlflowClient, experiment_id: str, name: str, params: Mapping[str, str], run_id: str | None
) -> Any | None:
    """The run `run_id` if it is still there and is of this experiment, name and params."""
    from mlflow.exceptions import MlflowException

    if run_id is None:
        return None
    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise
    same = run.info.experiment_id == experiment_id and run.info.run_name == name and run.data.params == dict(params)
    return run if same and run.info.lifecycle_stage == "active" else None


@contextlib.contextmanager
def _system_monitor(run_id: str, uri: str, resumed: bool) -> Iterator[None]:
    """MLflow's own thread that logs processor, memory, disk, network and GPU use every ten seconds."""
    with _foreign_warnings_off():
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        monitor = SystemMetricsMonitor(run_id, resume_logging=resumed, tracking_uri=uri)
    monitor.start()
    try:
        yield
    finally:
        monitor.finish()
