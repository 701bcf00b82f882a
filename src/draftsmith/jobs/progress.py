"""Progress bars with rate and ETA on a terminal; silence elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text


class RateColumn(ProgressColumn):
    """Units a second since the start of the bar."""

    def render(self, task: Task) -> Text:
        unit = task.fields["unit"]
        return Text(f"{task.speed:.1f} {unit}/s" if task.speed else f"- {unit}/s")


@contextmanager
def progress(description: str, *, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """A bar of `total` units on stderr; the yielded function advances it."""
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        RateColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not sys.stderr.isatty(),
    )
    with bar:
        task = bar.add_task(description, total=total, unit=unit)
        yield lambda count: bar.advance(task, count)
