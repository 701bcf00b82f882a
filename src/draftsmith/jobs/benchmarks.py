"""`draftsmith benchmarks`: every benchmark, where it is from, and whether it can be read here without a download."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from draftsmith.errors import PromptError
from draftsmith.evaluation.benchmark_rows import PackageFile
from draftsmith.evaluation.benchmarks import BENCHMARKS, Benchmark, folder_file, package_file
from draftsmith.params import Evaluate, Params
from draftsmith.paths import Workspace
from draftsmith.text.hub import in_hub_cache

HEAD = ("benchmark", "domain", "source", "revision", "split", "turns", "prompts", "cap", "licence", "here")
SHOWN_DIGITS = 12  # of a commit


def run(workspace: Workspace, params: Params) -> str:
    """A table of all benchmarks. `prompts` are those of the paper's evaluation, `cap` those that params.yaml evaluates.

    Nothing is downloaded, and no benchmark is read.
    """
    folder = override_folder(workspace, params.evaluate)
    caps = {item.name: str(item.cap) for item in params.evaluate.benchmarks}
    rows = [_row(item, cap=caps.get(item.name, "-"), folder=folder) for item in BENCHMARKS.values()]
    told = [] if folder is None else [f"All benchmarks are read from the folder {folder} (evaluate.folder).", ""]
    return "\n".join([*told, *_table([HEAD, *rows])])


def override_folder(workspace: Workspace, row: Evaluate) -> Path | None:
    """The folder whose files replace the benchmarks' sources, if there is one; relative to the workspace's root."""
    return None if row.folder is None else workspace.root / Path(row.folder).expanduser()


def readable_here(row: Benchmark, *, folder: Path | None) -> str:
    """Where the benchmark would be read from on this machine, or why it cannot be read without a download."""
    try:
        if folder is not None:
            return f"in the folder ({folder_file(row.name, folder=folder).name})"
        if isinstance(row.source, PackageFile):
            package_file(row.source, where=f"benchmark {row.name}")
            return "package installed"
    except PromptError as error:
        needed = f", needs {error.expected}" if error.expected is not None else ""
        return f"not available: {error.what}{needed}"
    if in_hub_cache(row.source.hf_id, revision=row.source.revision, data_file=row.source.data_file):
        return "in the hub's cache"
    return "not here: not in the hub's cache, to be downloaded"


def _row(row: Benchmark, *, cap: str, folder: Path | None) -> tuple[str, ...]:
    source = row.source
    commit = "hub's current state" if source.revision is None else source.revision[:SHOWN_DIGITS]
    prompts = "-" if row.reference_count is None else str(row.reference_count)
    return (
        row.name,
        row.domain,
        source.id,
        commit,
        source.split or "-",
        str(row.num_turns),
        prompts,
        cap,
        row.licence,
        readable_here(row, folder=folder),
    )


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns under their heads, all to the left, two spaces apart."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
