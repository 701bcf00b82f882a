"""Where a result comes from: the commit, the lock file, the machine and the versions. Imports no torch."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

UNKNOWN = "unknown"
COMMAND_TIMEOUT_S = 20.0
PACKAGES = ("draftsmith", "torch", "deepspeed", "transformers", "datasets", "zarr", "dvc", "mlflow", "prefect")

# Written by the pipeline itself, so a change in them does not change what the source says.
GENERATED_FILES = ("dvc.lock",)
GENERATED_FOLDERS = ("reports/",)

# Set inside git hooks; they would point git at another repository than the folder asked about.
GIT_OVERRIDES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")


@dataclass(frozen=True)
class Source:
    """The state of a working copy. Each value is `unknown` outside a git repository or without git.

    `dirty` is `yes`, `no` or `unknown`: changed or new files other than dvc.lock and reports/ (`changed`).
    `dvc_lock` is the sha256 of dvc.lock, or `none` before the first stage ran.
    """

    commit: str
    branch: str
    dirty: str
    changed: tuple[str, ...]
    dvc_lock: str


@dataclass(frozen=True)
class Hardware:
    """One machine. `num_cores` counts logical cores open to this process; memory is in bytes."""

    system: str
    cpu_model: str
    num_cores: int
    memory_bytes: int
    gpus: tuple[str, ...]

    @property
    def description(self) -> str:
        """One line for tags and reports, such as `2 x Intel Xeon, 8 GiB, no GPU, Linux x86_64`."""
        gpus = ", ".join(self.gpus) if self.gpus else "no GPU"
        return f"{self.num_cores} x {self.cpu_model}, {round(self.memory_bytes / 2**30)} GiB, {gpus}, {self.system}"


@dataclass(frozen=True)
class Provenance:
    """Source, hardware and package versions of one run."""

    source: Source
    hardware: Hardware
    versions: dict[str, str]

    def as_dict(self) -> dict[str, object]:
        """JSON-ready form, for reports."""
        return {
            "git_commit": self.source.commit,
            "git_branch": self.source.branch,
            "git_dirty": self.source.dirty,
            "dvc_lock": self.source.dvc_lock,
            "hardware": self.hardware.description,
            "versions": dict(self.versions),
        }

    def as_tags(self) -> dict[str, str]:
        """Flat text form, for MLflow: one `version.<package>` a package."""
        tags = {name: str(value) for name, value in self.as_dict().items() if name != "versions"}
        return tags | {f"version.{package}": version for package, version in self.versions.items()}


def read_provenance(root: Path) -> Provenance:
    """Everything about the working copy at `root`, this machine and its packages; never raises for a missing part."""
    return Provenance(read_source(root), read_hardware(), read_versions())


def read_source(root: Path) -> Source:
    """Commit, branch, dirtiness and dvc.lock digest of the working copy at `root`."""
    changed = changed_files(root)
    dirty = UNKNOWN if changed is None else ("yes" if changed else "no")
    in_repository = changed is not None
    branch = _git(root, "symbolic-ref", "--short", "-q", "HEAD") or ("detached" if in_repository else UNKNOWN)
    return Source(
        commit=_git(root, "rev-parse", "--verify", "-q", "HEAD") or UNKNOWN,
        branch=branch,
        dirty=dirty,
        changed=changed or (),
        dvc_lock=_lock_digest(root / "dvc.lock"),
    )


def changed_files(root: Path) -> tuple[str, ...] | None:
    """Changed and new files, relative to `root`, generated ones left out; None outside a repository."""
    prefix = _git(root, "rev-parse", "--show-prefix")
    listing = _git(root, "status", "--porcelain=v1", "-z", "--untracked-files=all", "--no-renames")
    if prefix is None or listing is None:
        return None
    # An entry is two status letters, a space and a path relative to the repository's top folder.
    paths = [entry[3:].removeprefix(prefix) for entry in listing.split("\0") if entry]
    return tuple(sorted(path for path in paths if not _is_generated(path)))


def _is_generated(path: str) -> bool:
    return path in GENERATED_FILES or path.startswith(GENERATED_FOLDERS)


def _lock_digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except FileNotFoundError:
        return "none"
    except OSError:
        return UNKNOWN


def _git(root: Path, *arguments: str) -> str | None:
    """Output of a git command in `root` without the last line end, or None if it failed or there is no git."""
    environment = {name: value for name, value in os.environ.items() if name not in GIT_OVERRIDES}
    # A reader must not take the index lock from a git command of the user.
    environment["GIT_OPTIONAL_LOCKS"] = "0"
    output = _run(["git", "-C", str(root), *arguments], environment)
    return None if output is None else output.rstrip("\n")


def _run(command: list[str], environment: dict[str, str] | None = None) -> str | None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=COMMAND_TIMEOUT_S, env=environment
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


@functools.cache
def read_hardware() -> Hardware:
    """This machine, read once a process: processor, open cores, memory and the GPUs that nvidia-smi lists."""
    return Hardware(
        system=f"{platform.system()} {platform.machine()}",
        cpu_model=_cpu_model(),
        num_cores=_num_cores(),
        memory_bytes=psutil.virtual_memory().total,
        gpus=_gpu_names(),
    )


def _num_cores() -> int:
    # macOS has no affinity call; there every core is open.
    if platform.system() == "Linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_model() -> str:
    if platform.system() == "Darwin":
        return (_run(["sysctl", "-n", "machdep.cpu.brand_string"]) or "").strip() or UNKNOWN
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or UNKNOWN
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine() or UNKNOWN


def _gpu_names() -> tuple[str, ...]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    listing = _run([program, "--query-gpu=name", "--format=csv,noheader"]) or ""
    return tuple(line.strip() for line in listing.splitlines() if line.strip())


def read_versions() -> dict[str, str]:
    """Versions of Python and of the packages that results depend on, read without importing them; `none` if missing."""
    return {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"
