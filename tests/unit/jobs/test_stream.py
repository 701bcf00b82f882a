"""A worker of streaming mode as a process: how it ends."""

from __future__ import annotations

import subprocess
import sys

from draftsmith.jobs.stream import PARENT_GONE

# All of the worker but its work.
CODE = """
import sys, time
from draftsmith.jobs import stream
stream._work = lambda workspace, params, options: time.sleep({work_s})
stream.load_params = lambda path: None
stream.Workspace.find = classmethod(lambda cls, start: cls(start))
sys.argv = "stream --key k --worker 0/1 --run r --first-step 0 --first-pass none".split()
stream.main()
"""


def start(work_s: float) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", CODE.format(work_s=work_s)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def test_a_worker_that_is_done_ends_well() -> None:
    """While the trainer lives on: another worker may not be done yet, and any other status would end the training."""
    process = start(0)
    assert process.stdout is not None
    assert process.stdout.read() == b""
    assert process.wait() == 0
    assert process.stdin is not None
    process.stdin.close()
    process.stdout.close()


def test_a_worker_ends_with_its_trainer() -> None:
    process = start(60)
    assert process.communicate(timeout=60) == (b"", None)
    assert process.returncode == PARENT_GONE
