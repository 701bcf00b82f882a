"""SIGTERM as an exception, so that a job that is told to stop closes its records first."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Terminated(SystemExit):
    """Raised in the main thread on SIGTERM; left alone, it ends the process with status 128 + 15."""


@contextlib.contextmanager
def sigterm_raises() -> Iterator[None]:
    """Let SIGTERM raise Terminated inside; a handler of the program itself stays, and so do threads other than main."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        # A second one (a group and its parent both signal) must not break into the closing of records.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated(128 + number)

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
