"""The one task: a DVC stage in a subprocess. Only this layer retries; success is the exit code and nothing else."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from uuid import UUID

import psutil
from prefect import get_run_logger, task
from prefect.artifacts import create_link_artifact, create_progress_artifact, update_progress_artifact

from draftsmith.errors import DraftsmithError
from draftsmith.paths import Workspace

RETRIES = 2
RETRY_DELAY_S = 10
STOP_GRACE_S = 20  # Prefect allows a cancelled flow run 30 s before it kills it
TAIL_LINES = 12  # of the output in an error
USER_ERROR_STATUS = 2  # what `draftsmith` leaves with when the user has to mend something


class CommandError(DraftsmithError):
    """A subprocess of a flow failed; `lines` is its output, `user_error` says that doing the same again cannot help."""

    def __init__(self, command: str, *, status: int, lines: Sequence[str]) -> None:
        tail = "\n".join([line for line in lines if line][-TAIL_LINES:]) or "no output"
        super().__init__(f"`{command}` left with status {status}:\n{tail}")
        self.lines = tuple(lines)
        # DVC has one status for every failure and tells the command's own in its text.
        inner = re.findall(r"exited with (\d+)", tail)
        self.user_error = status == USER_ERROR_STATUS or inner[-1:] == [str(USER_ERROR_STATUS)]


@dataclass(frozen=True)
class Stage:
    """A stage of dvc.yaml: `stage` alone or `stage@name`, where `name` is a target or a key."""

    stage: str
    name: str

    @property
    def dvc_name(self) -> str:
        return self.stage if self.stage == "prompts" else f"{self.stage}@{self.name}"


def stages_of_target(target: str) -> tuple[Stage, ...]:
    """From prompts to the verified target cache, in order."""
    return Stage("prompts", "prompts"), *(Stage(stage, target) for stage in ("answers", "cache", "verify"))


def stages_of_run(key: str, target: str) -> tuple[Stage, ...]:
    """From prompts to the evaluated drafter `key`, in order."""
    return *stages_of_target(target), *(Stage(stage, key) for stage in ("train", "calibrate", "evaluate"))


def run_stages(stages: tuple[Stage, ...]) -> None:
    """Check the store, then run `stages` one after the other in this working copy; a progress artifact follows them.

    Raises CommandError with the end of the output of the stage that failed.
    """
    workspace = Workspace.find()
    forced = stages_to_force(workspace, stages)
    key = artifact_key("progress", stages[-1].name)
    progress = cast(UUID, create_progress_artifact(0.0, key=key, description=_plan(stages, 0)))
    for number, stage in enumerate(stages):
        run_stage.with_options(name=stage.stage, task_run_name=stage.dvc_name)(
            stage.stage, stage.name, force=stage.dvc_name in forced
        )
        done = number + 1
        update_progress_artifact(progress, 100.0 * done / len(stages), description=_plan(stages, done))


def stages_to_force(workspace: Workspace, stages: tuple[Stage, ...]) -> set[str]:
    """Stages whose manifest names a prefix that the store lacks; DVC cannot see that.

    `draftsmith store check` begins a line with the name of each such stage, and then leaves with status 1.
    Raises CommandError if the store cannot be checked.
    """
    get_run_logger().info("draftsmith store check")
    try:
        run_command([sys.executable, "-m", "draftsmith.cli", "store", "check"], workspace.root)
    except CommandError as error:
        heads = {line.partition(": store ")[0] for line in error.lines if ": store " in line}
        if not heads:
            raise
        return heads & {stage.dvc_name for stage in stages}
    return set()


def _may_help(_task: Any, _run: Any, state: Any) -> bool:
    """Retry what may pass the second time (a lost machine, a full disk), not what the user has to mend."""
    error = state.result(raise_on_failure=False)
    return not (isinstance(error, CommandError) and error.user_error)


@task(retries=RETRIES, retry_delay_seconds=RETRY_DELAY_S, retry_condition_fn=_may_help, persist_result=False)
def run_stage(stage: str, name: str, *, force: bool = False) -> None:
    """`dvc repro -s` of one stage in this working copy, its output in the task's log, its MLflow run linked.

    Raises CommandError if the exit status is not 0.
    """
    workspace = Workspace.find()
    spec = Stage(stage, name)
    receipt = workspace.receipt(stage, name)
    before = _modified_ns(receipt)
    command = [sys.executable, "-m", "dvc", "repro", "-s", *(["-f"] if force else []), spec.dvc_name]
    get_run_logger().info("dvc repro -s %s%s", "-f " if force else "", spec.dvc_name)
    run_command(command, workspace.root)
    if _modified_ns(receipt) is not None:
        age = "this run" if _modified_ns(receipt) != before else "an earlier run, still up to date"
        _link_tracking(spec, json.loads(receipt.read_text()), age)


def run_command(command: list[str], folder: Path) -> None:
    """Run `python -m ...` in `folder`, each line of output into the log; if we are stopped, its whole family ends.

    Raises CommandError with the last lines if the exit status is not 0.
    """
    logger = get_run_logger()
    bin_folder = str(Path(sys.executable).parent)
    environment = os.environ | {
        "PATH": os.pathsep.join([bin_folder, os.environ.get("PATH", os.defpath)]),
        "PYTHONUNBUFFERED": "1",
        "DVC_NO_ANALYTICS": "1",
    }
    lines: list[str] = []
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    with _ended_with_family(process):
        assert process.stdout is not None  # asked for just above
        for line in process.stdout:
            lines.append(line.rstrip())
            if lines[-1]:
                logger.info("%s", lines[-1])
        status = process.wait()
    if status != 0:
        raise CommandError(" ".join(command[2:]), status=status, lines=lines)


@contextmanager
def _ended_with_family(process: subprocess.Popen[str]) -> Iterator[None]:
    """If the block is left by an error or a cancellation, stop the process and all its descendants: TERM, then KILL."""
    try:
        yield
    except BaseException:
        try:
            head = psutil.Process(process.pid)
            family = [*head.children(recursive=True), head]
        except psutil.NoSuchProcess:
            family = []
        for member in family:
            with _already_gone_is_fine():
                member.terminate()
        _, alive = psutil.wait_procs(family, timeout=STOP_GRACE_S)
        for member in alive:
            with _already_gone_is_fine():
                member.kill()
        process.wait()
        raise


@contextmanager
def _already_gone_is_fine() -> Iterator[None]:
    try:
        yield
    except psutil.NoSuchProcess:
        return


def artifact_key(*parts: str) -> str:
    """A key as Prefect wants it: lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")


def _link_tracking(stage: Stage, receipt: dict[str, Any], age: str) -> None:
    create_link_artifact(
        link=receipt["url"],
        link_text=f"MLflow run of {stage.dvc_name}",
        key=artifact_key("mlflow", stage.stage, stage.name),
        description=f"{stage.dvc_name}: {receipt['wall_s']:.0f} s, finished {receipt['finished']} ({age})",
    )


def _modified_ns(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def _plan(stages: tuple[Stage, ...], done: int) -> str:
    """The stages as a list of ticks, for the progress artifact."""
    return "\n".join(f"- [{'x' if number < done else ' '}] {stage.dvc_name}" for number, stage in enumerate(stages))
