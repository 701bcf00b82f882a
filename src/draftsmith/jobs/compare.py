"""`draftsmith compare A B`: a candidate's evaluation against a baseline's, and whether it regressed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftsmith.errors import DraftsmithError
from draftsmith.evaluation.compare import Comparison, compare
from draftsmith.evaluation.summary import read_report
from draftsmith.paths import Workspace

REPORT = "evaluate.json"


def run(a: str, b: str, *, margin: float, temperature: float | None, workspace: Workspace | None) -> Comparison:
    """Compare the candidate `b` with the baseline `a` on the prompts that both have; see `evaluation.compare`.

    Each is a path of an evaluate.json, a folder that holds one, or a key whose report lies in the workspace.
    `margin` is in tokens a round; `temperature` None compares at every temperature that both have.
    Raises DraftsmithError for a report that cannot be found or read, or if the two cannot be compared.
    """
    paths = [find_report(name, workspace=workspace) for name in (a, b)]
    bodies = [_read(path) for path in paths]
    names = [f"{body['key']} ({path})" for body, path in zip(bodies, paths, strict=True)]
    return compare(bodies[0], candidate=bodies[1], margin=margin, temperature=temperature, names=(names[0], names[1]))


def find_report(name: str, *, workspace: Workspace | None) -> Path:
    """Where the evaluate.json lies that `name` stands for. Raises DraftsmithError that says where it was looked for.

    A key comes before a file or folder of the same name; write ./name for that.
    """
    places = [] if workspace is None or Path(name).name != name else [workspace.report_dir(name) / REPORT]
    places += [Path(name) / REPORT, Path(name)]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise DraftsmithError(
            f"no evaluation {name!r}",
            got=f"no file at {', '.join(str(place) for place in places)}",
            expected="the key of a run that was evaluated, a folder with an evaluate.json, or the path of one"
            + (" (no params.yaml here or above, so a key means nothing)" if workspace is None else ""),
        )
    return found


def _read(path: Path) -> Mapping[str, Any]:
    body = read_report(path, stage="evaluate")
    assert body is not None, "the file was there"
    return body
