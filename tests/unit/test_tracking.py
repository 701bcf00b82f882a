"""Runs in a real MLflow store, read back with MLflow's own client or with sqlite, never with the code under test."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from draftsmith.errors import MachineError
from draftsmith.paths import Workspace
from draftsmith.tracking import flatten_params, open_client, run_url, stage_run, tracking_uri

KEY = "dspark_b7-tiny"


@pytest.fixture(scope="module")
def fresh_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One empty MLflow database for the module: making it takes seconds."""
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    open_client(f"sqlite:///{path}")
    return path


@pytest.fixture
def workspace(fresh_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("DRAFTSMITH_MLFLOW_PORT", raising=False)
    root = tmp_path / "a copy"
    root.mkdir()
    (root / "params.yaml").write_text("")
    shutil.copy(fresh_store, root / "mlflow.db")
    return Workspace(root)


def rows(workspace: Workspace, query: str) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(workspace.root / "mlflow.db")
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


def test_a_run_that_ends_well(workspace: Workspace) -> None:
    params = {"train": {"steps": 3, "lr": 1e-3}, "layers": (1, 2)}
    with stage_run("train", KEY, workspace=workspace, params=params, tags={"target": "tiny"}) as run:
        for step in range(2500):
            run.log_metrics({"loss": 1 / (step + 1), "lr": float(step)}, step=step)
        run.log_text("hello", "notes/a.txt")
        run.log_json({"b": 1}, "b.json")
        (workspace.root / "c.csv").write_text("x\n")
        run.log_file(workspace.root / "c.csv", folder="tables")
        run.log_dataset(uri="s3://b/cache/tiny-12345678", digest="ab" * 32, name="cache", context="training")
        assert rows(workspace, "SELECT status FROM runs") == [("RUNNING",)]
    [(run_id, name, status, artifacts)] = rows(workspace, "SELECT run_uuid, name, status, artifact_uri FROM runs")
    assert (run_id, name, status) == (run.run_id, KEY, "FINISHED")
    assert rows(workspace, "SELECT name FROM experiments WHERE name != 'Default'") == [("draftsmith/train",)]
    counts = rows(workspace, "SELECT key, COUNT(*), SUM(value), MAX(step) FROM metrics GROUP BY key ORDER BY key")
    assert [row[:2] for row in counts] == [("loss", 2500), ("lr", 2500)]
    assert counts[1][2:] == (2499 * 2500 / 2, 2499)
    assert dict(rows(workspace, "SELECT key, value FROM params")) == {
        "train.steps": "3",
        "train.lr": "0.001",
        "layers": "[1, 2]",
    }
    folder = workspace.root / "mlartifacts" / "train" / run_id / "artifacts"
    assert artifacts == folder.as_uri()
    assert (folder / "notes" / "a.txt").read_text() == "hello"
    assert json.loads((folder / "b.json").read_text()) == {"b": 1}
    assert (folder / "tables" / "c.csv").read_text() == "x\n"
    [(digest, source)] = rows(workspace, "SELECT digest, dataset_source FROM datasets")
    assert digest == "ab" * 16
    assert json.loads(source)["uri"] == "s3://b/cache/tiny-12345678"
    assert dict(rows(workspace, "SELECT name, value FROM input_tags")) == {
        "mlflow.data.context": "training",
        "digest": "ab" * 32,
    }
    tags = dict(rows(workspace, "SELECT key, value FROM tags"))
    assert {"git_commit", "git_dirty", "dvc_lock", "hardware", "version.torch", "stage"} <= set(tags)
    assert tags["target"] == "tiny"
    receipt = json.loads((workspace.root / "data" / "receipts" / f"train-{KEY}.json").read_text())
    assert set(receipt) == {"stage", "name", "run_id", "url", "wall_s", "finished"}
    assert receipt["run_id"] == run_id
    assert receipt["url"].startswith("http://127.0.0.1:5000/#/experiments/")
    assert 0 < receipt["wall_s"] < 60


def test_a_figure(workspace: Workspace) -> None:
    from matplotlib.figure import Figure

    figure = Figure()
    figure.add_subplot().plot([1, 2])
    with stage_run("calibrate", KEY, workspace=workspace, params={}, tags={}) as run:
        run.log_figure(figure, "curves/reliability.png")
    folder = workspace.root / "mlartifacts" / "calibrate" / run.run_id / "artifacts"
    assert (folder / "curves" / "reliability.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError("boom"), "FAILED"), (KeyboardInterrupt(), "KILLED"), (SystemExit(3), "FAILED")]
)
def test_a_run_that_ends_badly(workspace: Workspace, error: BaseException, status: str) -> None:
    def work() -> None:
        with stage_run("train", KEY, workspace=workspace, params={}, tags={}) as run:
            run.log_metrics({"loss": 1.5}, step=0)
            raise error

    with pytest.raises(type(error)):
        work()
    assert rows(workspace, "SELECT status FROM runs") == [(status,)]
    assert rows(workspace, "SELECT key, value, step FROM metrics") == [("loss", 1.5, 0)]
    assert not workspace.receipt("train", KEY).exists()


KILLED_JOB = """
import sys, time
from pathlib import Path
from draftsmith.paths import Workspace
from draftsmith.tracking import stage_run
with stage_run("train", "k-t", workspace=Workspace(Path(sys.argv[1])), params={}, tags={}) as run:
    run.log_metrics({"loss": 0.5}, step=7)
    print("open", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def killed_job(workspace: Workspace) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", KILLED_JOB, str(workspace.root)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "open\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_two_sigterms_still_close_the_run(workspace: Workspace, killed_job: subprocess.Popen[str]) -> None:
    killed_job.send_signal(signal.SIGTERM)
    time.sleep(0.005)
    killed_job.send_signal(signal.SIGTERM)
    assert killed_job.wait(30) == 128 + signal.SIGTERM
    assert rows(workspace, "SELECT status FROM runs") == [("KILLED",)]
    assert rows(workspace, "SELECT value, step FROM metrics") == [(0.5, 7)]


def test_a_run_killed_outright_is_closed_by_the_next(workspace: Workspace, killed_job: subprocess.Popen[str]) -> None:
    with stage_run("train", "k-t", workspace=workspace, params={}, tags={}):
        pass  # the other is alive, so it is left alone
    assert [row[0] for row in rows(workspace, "SELECT status FROM runs ORDER BY start_time")] == ["RUNNING", "FINISHED"]
    killed_job.kill()
    killed_job.wait()
    with stage_run("train", "k-t", workspace=workspace, params={}, tags={}):
        pass
    statuses = [row[0] for row in rows(workspace, "SELECT status FROM runs ORDER BY start_time")]
    assert statuses == ["KILLED", "FINISHED", "FINISHED"]


def test_a_resumed_run_goes_on_without_double_points(workspace: Workspace) -> None:
    run_ids = []

    def work(steps: range, *, resume: str | None, broken: bool) -> None:
        with stage_run("train", KEY, workspace=workspace, params={"a": 1}, tags={}, resume_run_id=resume) as run:
            run_ids.append(run.run_id)
            for step in steps:
                run.log_metrics({"loss": float(step)}, step=step)
            if broken:
                raise RuntimeError

    with pytest.raises(RuntimeError):
        work(range(6), resume=None, broken=True)
    work(range(4, 9), resume=run_ids[0], broken=False)  # from the checkpoint of step 3
    assert run_ids[0] == run_ids[1]
    assert rows(workspace, "SELECT status FROM runs") == [("FINISHED",)]
    points = rows(workspace, "SELECT step, value FROM metrics ORDER BY step")
    assert points == [(step, float(step)) for step in range(9)]


@pytest.mark.parametrize(
    ("stage", "name", "params"), [("train", KEY, {"a": 2}), ("train", "other-tiny", {"a": 1}), ("other", KEY, {"a": 1})]
)
def test_a_run_of_other_params_is_not_resumed(
    workspace: Workspace, stage: str, name: str, params: dict[str, int]
) -> None:
    with stage_run("train", KEY, workspace=workspace, params={"a": 1}, tags={}) as first:
        pass
    with stage_run(stage, name, workspace=workspace, params=params, tags={}, resume_run_id=first.run_id) as second:
        pass
    assert second.run_id != first.run_id


def test_a_run_that_is_gone_is_not_resumed(workspace: Workspace) -> None:
    with stage_run("train", KEY, workspace=workspace, params={}, tags={}, resume_run_id="f" * 32) as run:
        pass
    assert run.run_id != "f" * 32


def test_a_copied_working_copy_writes_into_its_own_artifacts(workspace: Workspace) -> None:
    with stage_run("train", KEY, workspace=workspace, params={}, tags={}) as first:
        first.log_text("old", "a.txt")
    copy = Workspace(workspace.root.parent / "the copy")
    shutil.copytree(workspace.root, copy.root)
    with stage_run("train", KEY, workspace=copy, params={}, tags={}) as second:
        second.log_text("new", "a.txt")
    folder = copy.root / "mlartifacts" / "train"
    assert (folder / second.run_id / "artifacts" / "a.txt").read_text() == "new"
    assert sorted(item.name for item in (workspace.root / "mlartifacts" / "train").iterdir()) == [first.run_id]
    uris = {row[0] for row in rows(copy, "SELECT artifact_uri FROM runs")}
    assert uris == {(folder / run.run_id / "artifacts").as_uri() for run in (first, second)}


def test_system_metrics(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.2")
    with stage_run("train", KEY, workspace=workspace, params={}, tags={}, system_metrics=True):
        deadline = time.monotonic() + 20
        while not rows(workspace, "SELECT 1 FROM metrics") and time.monotonic() < deadline:
            time.sleep(0.1)
    keys = {row[0] for row in rows(workspace, "SELECT DISTINCT key FROM metrics")}
    assert {"system/cpu_utilization_percentage", "system/system_memory_usage_megabytes"} <= keys


def test_an_unreachable_server_is_said_at_once(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
    started = time.monotonic()
    with (
        pytest.raises(MachineError, match=f"no MLflow server answers at http://127.0.0.1:{port}.*MLFLOW_TRACKING_URI"),
        stage_run("train", KEY, workspace=workspace, params={}, tags={}),
    ):
        pass
    assert time.monotonic() - started < 10


class Refusing(BaseHTTPRequestHandler):
    """A server that lets nobody in."""

    def do_GET(self) -> None:
        self.send_response(401)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_POST = do_GET

    def log_message(self, *arguments: Any) -> None:
        return


def test_a_server_that_refuses_us_is_named(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    server = HTTPServer(("127.0.0.1", 0), Refusing)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.server_port}")
    try:
        with (
            pytest.raises(MachineError, match=r"401.*MLFLOW_TRACKING_URI=http"),
            stage_run("train", KEY, workspace=workspace, params={}, tags={}),
        ):
            pass
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_store_that_is_no_database_is_said_in_one_line(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://x")
    with (
        pytest.raises(MachineError, match="MLFLOW_TRACKING_URI") as caught,
        stage_run("train", KEY, workspace=workspace, params={}, tags={}),
    ):
        pass
    assert "\n" not in str(caught.value)


def test_a_database_that_takes_nothing_is_said_in_one_line(
    workspace: Workspace, capfd: pytest.CaptureFixture[str]
) -> None:
    """As on a full disk; and nothing of the traceback that MLflow logs of its database's errors."""
    with sqlite3.connect(workspace.root / "mlflow.db") as database:
        pages = database.execute("PRAGMA page_count").fetchone()[0]
        for table in ("runs", "experiments"):
            database.execute(
                f"CREATE TRIGGER full_{table} BEFORE INSERT ON {table} "
                "BEGIN SELECT RAISE(FAIL, 'database or disk is full'); END"
            )
    assert pages > 1
    capfd.readouterr()
    with (
        pytest.raises(MachineError, match=r"cannot open a run in MLflow: got .*database or disk is full"),
        stage_run("train", KEY, workspace=workspace, params={}, tags={}),
    ):
        pass
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("content", [b"no database" * 100, None])
def test_a_damaged_database_is_said_at_once(workspace: Workspace, content: bytes | None) -> None:
    path = workspace.root / "mlflow.db"
    if content is None:
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes(content)
    started = time.monotonic()
    with pytest.raises(
        MachineError, match=r"cannot open the MLflow store: got (file is not a|unable to open) database"
    ):
        open_client(tracking_uri(workspace))
    assert time.monotonic() - started < 20


def test_where_a_run_is_seen(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    default = tracking_uri(workspace)
    assert default == f"sqlite:///{workspace.root.resolve()}/mlflow.db"
    assert run_url(workspace, default, "3", "abc") == "http://127.0.0.1:5000/#/experiments/3/runs/abc"
    (workspace.root / ".services").mkdir()
    (workspace.root / ".services" / "ports.json").write_text('{"mlflow": 5050}')
    assert run_url(workspace, default, "3", "abc") == "http://127.0.0.1:5050/#/experiments/3/runs/abc"
    monkeypatch.setenv("DRAFTSMITH_MLFLOW_PORT", "5051")
    assert run_url(workspace, default, "3", "abc").startswith("http://127.0.0.1:5051/")
    remote = "https://mlflow.example.org/"
    assert run_url(workspace, remote, "3", "abc") == "https://mlflow.example.org/#/experiments/3/runs/abc"


def test_params_are_flattened() -> None:
    nested = {"a": {"b": {"c": 1}, "d": None}, "e": [1, "x"], "f": True}
    assert flatten_params(nested) == {"a.b.c": "1", "a.d": "None", "e": '[1, "x"]', "f": "True"}


def test_nothing_is_printed_and_nothing_is_sent_home(workspace: Workspace, capfd: pytest.CaptureFixture[str]) -> None:
    code = """
import sys
from pathlib import Path
from draftsmith.paths import Workspace
from draftsmith.tracking import stage_run
with stage_run("train", "k-t", workspace=Workspace(Path(sys.argv[1])), params={}, tags={}, system_metrics=True):
    pass
from mlflow.telemetry.utils import is_telemetry_disabled
assert is_telemetry_disabled()
"""
    (workspace.root / "mlflow.db").unlink()
    environment = {name: value for name, value in os.environ.items() if name not in ("CI", "PYTEST_CURRENT_TEST")}
    subprocess.run([sys.executable, "-c", code, str(workspace.root)], check=True, env=environment)
    assert capfd.readouterr() == ("", "")


def test_processes_that_open_a_new_database_at_once(tmp_path: Path) -> None:
    code = "import sys; from draftsmith.tracking import open_client; open_client(sys.argv[1]).search_experiments()"
    command = [sys.executable, "-c", code, f"sqlite:///{tmp_path / 'mlflow.db'}"]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    for process in processes:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
