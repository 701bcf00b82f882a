"""Where a training run's ranks start: in this process, or by torchrun on this machine. Changes no result."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from draftsmith.errors import MachineError, TrainingError
from draftsmith.termination import sigterm_raises

VARIABLE = "DRAFTSMITH_LAUNCH"
SHM = Path("/dev/shm")
STOP_GRACE_S = 15.0  # Prefect's flows give a stopped stage 20 s


def num_local_ranks() -> int:
    """Ranks on this machine: `DRAFTSMITH_LAUNCH=local:N`, by default one a GPU, or one process on the CPU."""
    choice = os.environ.get(VARIABLE, "local")
    kind, _, count = choice.partition(":")
    if kind != "local" or (count and not (count.isdigit() and int(count) > 0)):
        raise MachineError(f"{VARIABLE} cannot be read", got=choice, expected="local or local:N")
    return int(count) if count else max(1, torch.cuda.device_count())


def launch_ranks(module: str, *, arguments: Sequence[str], num_ranks: int, cwd: Path) -> None:
    """Run `python -m module arguments` as `num_ranks` ranks through torchrun, in a session of its own.

    Raises TrainingError if a rank failed; torchrun ends the others.
    """
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}",
        "-m", module, *arguments,
    ]  # fmt: skip
    threads = max(1, (os.cpu_count() or 1) // num_ranks)
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
    process = subprocess.Popen(command, cwd=cwd, env=environment, start_new_session=True)
    with sigterm_raises():
        try:
            status = process.wait()
        except BaseException:
            _end_family(process)
            raise
    if status != 0:
        raise TrainingError(f"training ended with status {status}", expected="see the first rank's message above")


def _end_family(process: subprocess.Popen[bytes]) -> None:
    """Ask torchrun to end, which asks its ranks (each in a session of its own); kill what is left after a while."""
    head = psutil.Process(process.pid)
    family = [head, *head.children(recursive=True)]
    process.terminate()
    _, alive = psutil.wait_procs(family, timeout=STOP_GRACE_S)
    for member in alive:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()


def remove_shared_memory(*, own: bool) -> None:
    """Remove DeepSpeed's all-reduce buffers from shared memory: our own at exit, or those of dead processes."""
    if not SHM.is_dir():
        return
    for buffer in SHM.glob("deepspeed_allreduce_buffer_*"):
        used = any(_maps(process, buffer) for process in Path("/proc").glob("[0-9]*") if not own)
        if own or not used:
            buffer.unlink(missing_ok=True)


def _maps(process: Path, buffer: Path) -> bool:
    try:
        return buffer.name in (process / "maps").read_text()
    except OSError:
        return False
