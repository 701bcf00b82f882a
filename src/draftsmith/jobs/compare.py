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
    Raises DraftsmithError for a report that cannot be found or read, if the two cannot be compared, or if the candidate
    was not measured on all that the baseline was: what is missing could hide a regression.
    """
    paths = [find_report(name, workspace=workspace) for name in (a, b)]
    bodies = [_read(path) for path in paths]
    try:
        _check_whole(bodies[0], candidate=bodies[1], temperature=temperature, where=str(paths[1]))
        names = [f"{body['key']} ({path})" for body, path in zip(bodies, paths, strict=True)]
        return compare(
            bodies[0], candidate=bodies[1], margin=margin, temperature=temperature, names=(names[0], names[1])
        )
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise DraftsmithError(
            "an evaluate.json lacks what a comparison needs",
            got=f"{type(error).__name__}: {error}",
            expected="two reports as the evaluate stage writes them; run it again",
            where=f"{paths[0]}, {paths[1]}",
        ) from None


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


def _check_whole(
    baseline: Mapping[str, Any], *, candidate: Mapping[str, Any], temperature: float | None, where: str
) -> None:
    """Raises DraftsmithError that names what the baseline was measured on and the candidate was not."""
    measured = [
        {(row["benchmark"], row["temperature"]) for row in body["rows"] if temperature in (None, row["temperature"])}
        for body in (baseline, candidate)
    ]
    missing = sorted(measured[0] - measured[1])
    if missing and measured[1]:
        raise DraftsmithError(
            "the candidate was not measured on all that the baseline was",
            got="no " + ", ".join(f"{name} at temperature {value:g}" for name, value in missing),
            expected="every benchmark and temperature of the baseline (params.yaml: evaluate), or --temperature",
            where=where,
        )


def _read(path: Path) -> Mapping[str, Any]:
    body = read_report(path, stage="evaluate")
    assert body is not None, "the file was there"
    return body
