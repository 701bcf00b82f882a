"""The working copy of a study: a clone under data/study whose params.yaml holds the study's runs.

It has the sources of this working copy as they are now (committed or not), a dvc.lock and manifests of its own, and
shares what is big or worth keeping: the store, fetched targets, DVC's cache and the MLflow database. So nothing that a
study does touches the state of this copy, and what was made once is not made again.
"""

from __future__ import annotations

import contextlib
import fcntl
import filecmp
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
import yaml
from dvc.config import Config

from draftsmith.errors import DraftsmithError, MachineError
from draftsmith.jobs.history import dvc_cache
from draftsmith.manifest import write_bytes
from draftsmith.params import Params, Study
from draftsmith.paths import Workspace
from draftsmith.provenance import GIT_OVERRIDES
from draftsmith.tracking import tracking_uri

VARIANT = "study"
# What a working copy makes itself, and what is written anew for the copy.
OWN_FILES = ("dvc.lock", "params.yaml")
OWN_FOLDER = "reports/"
# A new file elsewhere may be anything, such as a target's weights.
READ_FOLDERS = ("src", "prompts")
BUILT = "src/**/*.so"  # ignored by git, and the sources use them
STOP_GRACE_S = 20.0
SQLITE = "sqlite:///"


@dataclass(frozen=True)
class StudyCopy:
    """The working copy and the environment that commands in it run in. `lock` is an open file that marks it as used."""

    workspace: Workspace
    environment: Mapping[str, str]
    lock: int

    def run(self, *words: str) -> int:
        """Run `python -m WORDS` in the copy and return its status. If we are stopped, its whole family ends first."""
        process = subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd=self.workspace.root,
            env=dict(self.environment),
            # Held for as long as the command lives: were this process killed, the copy would still be in use.
            pass_fds=(self.lock,),
        )
        try:
            return process.wait()
        except BaseException as error:
            # On Ctrl-C a terminal has told the whole family already, and its records are being closed.
            _end_family(process, patience_s=STOP_GRACE_S if isinstance(error, KeyboardInterrupt) else 0.0)
            raise

    def must_run(self, *words: str) -> None:
        """Run `python -m WORDS`; raises DraftsmithError if it fails."""
        status = self.run(*words)
        if status != 0:
            raise DraftsmithError(
                f"`{' '.join(words)}` ended with status {status} in {self.workspace.root}",
                expected="see the message above",
            )


def study_key(study: Study, drafter: str) -> str:
    """The key of one drafter of a study."""
    return f"{drafter}-{study.target}-{VARIANT}"


def study_params(raw: Mapping[str, Any], params: Params, study: Study) -> dict[str, Any]:
    """params.yaml of the study's copy, from the parsed document and its checked form.

    The study's runs take the place of all runs, its overrides are laid over the common rows. If a drafter of the study
    reads every token's last hidden state, the target's row says `last_hidden: all`, and all drafters read that cache.
    """
    body = {name: value for name, value in raw.items() if name != "study"}
    body["runs"] = {
        study_key(study, name): {
            "drafter": name,
            "target": study.target,
            **({"train": dict(study.train)} if study.train else {}),
        }
        for name in study.drafters
    }
    body["active_targets"] = [study.target]
    if any(params.drafters[name].reads_last_hidden for name in study.drafters):
        body["targets"] = {**raw["targets"], study.target: {**raw["targets"][study.target], "last_hidden": "all"}}
    body["evaluate"] = {**raw["evaluate"], **study.evaluate}
    return body


@contextlib.contextmanager
def study_copy(workspace: Workspace, params: Params, study: Study) -> Iterator[StudyCopy]:
    """The copy, made or brought up to date, for this process alone.

    Raises MachineError outside of a git repository with DVC, or while another process works in the copy.
    """
    folder = workspace.data / "study"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise MachineError(
                "another study works in this working copy", expected="to run again when it has ended", where=str(folder)
            ) from None
        copy = Workspace(_make_clone(workspace, folder / "copy"))
        _copy_sources(workspace, copy)
        raw = yaml.safe_load(workspace.params.read_text())
        body = with_absolute_places(study_params(raw, params, study), workspace=workspace, copy=copy)
        _write_if_changed(copy.params, yaml.safe_dump(body, sort_keys=False, allow_unicode=True).encode())
        _share(workspace, copy)
        yield StudyCopy(copy, study_environment(workspace, copy), lock.fileno())


def study_environment(workspace: Workspace, copy: Workspace) -> dict[str, str]:
    """The environment of commands in the copy: its own sources, the store and the MLflow database of `workspace`."""
    own = {name: value for name, value in os.environ.items() if name not in GIT_OVERRIDES}
    store, tracking = workspace.store_uri, tracking_uri(workspace)
    if "://" not in store:
        store = str(Path(store).expanduser().resolve())
    if tracking.startswith(SQLITE):
        tracking = SQLITE + str(Path(tracking.removeprefix(SQLITE)).resolve())
    return own | {
        "DRAFTSMITH_STORE": store,
        "MLFLOW_TRACKING_URI": tracking,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), own.get("PATH", os.defpath)]),
        "PYTHONPATH": os.pathsep.join([str(copy.root / "src"), *filter(None, [own.get("PYTHONPATH")])]),
    }


def with_absolute_places(body: Mapping[str, Any], *, workspace: Workspace, copy: Workspace) -> dict[str, Any]:
    """`body` with relative paths that do not lead to a file of the copy replaced by those of `workspace`."""
    done = dict(body)

    def place(text: str) -> str:
        path = Path(text).expanduser()
        return text if path.is_absolute() or (copy.root / path).exists() else str((workspace.root / path).resolve())

    done["targets"] = {
        name: {**row, "folder": place(row["folder"])} if row.get("folder") else row
        for name, row in body["targets"].items()
    }
    files = body["prompts"].get("files") or []
    done["prompts"] = {**body["prompts"], "files": [{**row, "path": place(row["path"])} for row in files]}
    return done


def _make_clone(workspace: Workspace, folder: Path) -> Path:
    """A clone whose HEAD and index are those of the last commit of `workspace`; returns the folder of params.yaml.

    Files are not touched: with those of `workspace` in it, git tells of the copy what it tells of `workspace`.
    """
    top, below = (
        _git(workspace.root, "rev-parse", "--show-toplevel"),
        _git(workspace.root, "rev-parse", "--show-prefix"),
    )
    if not (folder / ".git").is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        _git(folder, "init", "-q")
    _git(folder, "fetch", "-q", "--no-tags", "--update-shallow", top, "HEAD")
    _git(folder, "update-ref", "--no-deref", "HEAD", "FETCH_HEAD")
    _git(folder, "read-tree", "HEAD")
    return folder / below


def _copy_sources(workspace: Workspace, copy: Workspace) -> None:
    """Make the sources in `copy` those of `workspace`, and delete there what is none any more."""
    wanted = {name for name in _files(workspace.root) if (workspace.root / name).is_file()}
    wanted |= {str(path.relative_to(workspace.root)) for path in workspace.root.glob(BUILT)}
    for name in wanted:
        source, twin = workspace.root / name, copy.root / name
        if not twin.is_file() or not filecmp.cmp(source, twin, shallow=False):
            twin.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, twin)
    for name in _files(copy.root) - wanted:
        (copy.root / name).unlink(missing_ok=True)


def _files(root: Path) -> set[str]:
    """Files that git tracks, and new ones that stages read, relative to `root`; without what a copy makes itself."""
    listing = _git(root, "ls-files", "-z", "--cached")
    listing += _git(root, "ls-files", "-z", "--others", "--exclude-standard", "--", *READ_FOLDERS)
    return {name for name in listing.split("\0") if name and name not in OWN_FILES and not name.startswith(OWN_FOLDER)}


def _share(workspace: Workspace, copy: Workspace) -> None:
    """Point the copy at the DVC cache and the fetched targets of `workspace`."""
    cache = dvc_cache(workspace.root)
    if cache is None or not (copy.root / ".dvc").is_dir():
        raise MachineError(
            "a study needs DVC", got=f"{workspace.root} without .dvc", expected="a clone of the repository"
        )
    with Config(str(copy.root / ".dvc"), validate=False).edit("local") as local:
        local.setdefault("cache", {})["dir"] = str(cache.resolve())
    targets, twin = (workspace.data / "targets").resolve(), copy.data / "targets"
    targets.mkdir(parents=True, exist_ok=True)
    if not twin.exists():
        twin.parent.mkdir(parents=True, exist_ok=True)
        twin.symlink_to(targets)


def _write_if_changed(path: Path, data: bytes) -> None:
    if not path.is_file() or path.read_bytes() != data:
        write_bytes(path, data)


def _git(folder: Path, *arguments: str) -> str:
    """Output of a git command without its last line end. Raises MachineError with git's own words if it fails."""
    environment = {name: value for name, value in os.environ.items() if name not in GIT_OVERRIDES}
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, env=environment)
    except FileNotFoundError:
        raise MachineError("no program git", expected="git on the PATH: a study works in a clone") from None
    if done.returncode != 0:
        told = " ".join(done.stderr.split())
        raise MachineError(
            f"git {arguments[0]} failed in {folder}", got=told, expected="a git repository with at least one commit"
        )
    return done.stdout.rstrip("\n")


def _end_family(process: subprocess.Popen[bytes], *, patience_s: float) -> None:
    """Stop the process, which would start its next stage, and after `patience_s` its descendants: TERM, then KILL."""
    try:
        head = psutil.Process(process.pid)
        family = head.children(recursive=True)
    except psutil.NoSuchProcess:
        return
    _signal([head], "terminate")
    _, alive = psutil.wait_procs([head, *family], timeout=patience_s)
    _signal(alive, "terminate")
    _, alive = psutil.wait_procs(alive, timeout=STOP_GRACE_S)
    _signal(alive, "kill")
    psutil.wait_procs(alive, timeout=1.0)
    process.wait()


def _signal(processes: Iterable[psutil.Process], name: Literal["terminate", "kill"]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            getattr(process, name)()
