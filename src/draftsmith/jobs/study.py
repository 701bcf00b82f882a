"""`draftsmith study`: drafters of one target trained and measured on equal data and equal steps, side by side.

The study works in a copy of its own (see `study_copy`), in which DVC builds what is stale: the target's answers and
cache once, then training and evaluation of one drafter after the other. It can be stopped at any time; called again,
it goes on where it was. A drafter that fails is named, the others go on, and the command fails in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from draftsmith.drafters.contract import Contract
from draftsmith.drafters.weights import WEIGHTS_NAME
from draftsmith.errors import DraftsmithError, ParamsError
from draftsmith.evaluation.study import Missing, StudyRun, study_body, study_page
from draftsmith.evaluation.study_figure import study_figure
from draftsmith.evaluation.summary import load_reports
from draftsmith.figures import png_bytes
from draftsmith.jobs.forecast import forecast
from draftsmith.jobs.study_copy import StudyCopy, study_copy, study_key
from draftsmith.manifest import Manifest, write_bytes, write_json
from draftsmith.params import Params, Study, load_params
from draftsmith.paths import Workspace
from draftsmith.provenance import read_provenance
from draftsmith.tracking import StageRun, stage_run

NAME = "study"
FIGURE = "conditional_acceptance.png"


def run(workspace: Workspace, params: Params, *, say: Callable[[str], None]) -> None:
    """Build what is stale of the study of params.yaml, write reports/study and tell the table through `say`.

    Raises ParamsError without a `study` in params.yaml, DraftsmithError if a drafter failed (its reports say which).
    """
    if params.study is None:
        raise ParamsError("params.yaml has no study", expected="a section `study`", where="params.yaml: study")
    study = params.study
    with study_copy(workspace, params, study) as copy:
        own, provenance = load_params(copy.workspace.params), _provenance(workspace)
        recipe = own.train_of(study_key(study, study.drafters[0])).model_dump()
        knobs = {"study": study.model_dump(mode="json"), "train": recipe}
        say(_forecast(copy, own, study))
        with stage_run(NAME, NAME, workspace=workspace, params=knobs, tags={"target": study.target}) as tracked:
            build_data(copy, study)
            missing = [item for name in study.drafters if (item := build_drafter(copy, study, name)) is not None]
            failed = {item.drafter for item in missing}
            runs = read_runs(copy, own, study, drafters=[name for name in study.drafters if name not in failed])
            if runs:
                body = study_body(
                    runs, baseline=study.drafters[0], missing=missing, data=_data(copy, study), recipe=recipe,
                    provenance=provenance, seed=own.evaluate.seed,
                )  # fmt: skip
                say(_publish(body, workspace, tracked))
            if missing:
                told = ", ".join(f"{item.stage}@{study_key(study, item.drafter)}" for item in missing)
                raise DraftsmithError(
                    f"{len(missing)} of {len(study.drafters)} drafters failed: {told}",
                    expected="see the messages above; the next `draftsmith study` tries them again",
                )


def build_data(copy: StudyCopy, study: Study) -> None:
    """Prompts, answers and cache of the target, verified; what the store holds already is adopted.

    DVC may take a manifest from its cache of runs whose objects the store has lost, so the store is looked at after
    each stage.
    """
    for stage in ("prompts", f"answers@{study.target}", f"cache@{study.target}"):
        copy.must_run("dvc", "repro", "-s", stage)
        copy.must_run("draftsmith.cli", "store", "check", "--mend")
    copy.must_run("dvc", "repro", "-s", f"verify@{study.target}")


def build_drafter(copy: StudyCopy, study: Study, drafter: str) -> Missing | None:
    """Train and evaluate one drafter, if it is not up to date; what failed, if something did."""
    key = study_key(study, drafter)
    if copy.run("dvc", "repro", "-s", f"train@{key}", f"evaluate@{key}") == 0:
        return None
    # DVC takes a drafter away before it is trained, and its weights are the last that training writes.
    trained = (copy.workspace.drafter_dir(key) / WEIGHTS_NAME).is_file()
    return Missing(drafter, "evaluate" if trained else "train")


def read_runs(copy: StudyCopy, own: Params, study: Study, *, drafters: Sequence[str]) -> list[StudyRun]:
    """The reports of the copy. Raises DraftsmithError if two drafters were trained from different caches or answers."""
    runs = []
    expected: dict[str, Any] | None = None
    for name in drafters:
        key = study_key(study, name)
        contract = Contract.read(copy.workspace.drafter_dir(key))
        found = {"data_digest": contract.data_digest, "cache_digest": contract.cache_digest}
        expected = expected or found
        if found != expected:
            raise DraftsmithError(
                f"{name} was trained from other data than {drafters[0]}", got=found, expected=expected, where=key
            )
        [reports] = load_reports(copy.workspace, keys=[key])
        if reports.train is None or reports.evaluate is None:
            raise DraftsmithError("a report is missing", got=key, where=str(copy.workspace.report_dir(key)))
        runs.append(StudyRun(name, key, own.drafters[name].kind, reports.train, reports.evaluate))
    return runs


def _publish(body: Mapping[str, Any], workspace: Workspace, tracked: StageRun) -> str:
    """Write reports/study, study.json last, and log the same to MLflow; returns the page."""
    page, figure, folder = study_page(body), study_figure(body), workspace.report_dir(NAME)
    _log(tracked, body)
    tracked.log_json(body, "study.json")
    tracked.log_text(page, "study.md")
    tracked.log_figure(figure, FIGURE)
    write_bytes(folder / FIGURE, png_bytes(figure))
    write_bytes(folder / "study.md", page.encode())
    write_json(folder / "study.json", body)
    return page


def _data(copy: StudyCopy, study: Study) -> dict[str, Any]:
    manifest = Manifest.read(copy.workspace.cache_manifest(study.target), "cache")
    return {
        "target": study.target,
        "cache": manifest.prefix,
        "cache_digest": manifest.digest,
        "data_digest": manifest.facts["data_digest"],
    }


def _provenance(workspace: Workspace) -> dict[str, Any]:
    """Of the working copy whose sources the study copies, when it copies them."""
    found = read_provenance(workspace.root)
    return {**found.as_dict(), "changed_files": list(found.source.changed)}


def _forecast(copy: StudyCopy, own: Params, study: Study) -> str:
    """What is ahead, in a few words."""
    seconds = forecast(copy.workspace, own).seconds
    parts = {name: value for name, value in seconds.items() if name != "calibration"}
    told = ", ".join(f"{name} {max(1, round(value / 60))}" for name, value in parts.items())
    return (
        f"{len(study.drafters)} drafters on {study.target}: about {sum(parts.values()) / 60:.0f} minutes on two idle "
        f"cores ({told} minutes; what is up to date is not built again).\nThe study works in {copy.workspace.root}. It "
        "can be stopped at any time; the next one goes on where it was."
    )


def _log(tracked: StageRun, body: Mapping[str, Any]) -> None:
    for row in body["rows"]:
        stem = f"{row['drafter']}/{row['benchmark']}_t{row['temperature']:g}"
        values = {f"{stem}_accepted_length": row["accepted_length"]}
        if row["difference"] is not None:
            values[f"{stem}_difference"] = row["difference"]
        tracked.log_metrics(values, step=0)
        for position, share in enumerate(row["conditional_acceptance"], start=1):
            if share is not None:
                tracked.log_metrics({f"{stem}_conditional_acceptance": share}, step=position)
    for row in body["means"]:
        stem = f"{row['drafter']}/mean_t{row['temperature']:g}"
        tracked.log_metrics({f"{stem}_accepted_length": row["accepted_length"]}, step=0)
    for row in body["training"]:
        values = {name: row[name] for name in ("seconds", "expected_accepted_length", "num_parameters")}
        tracked.log_metrics({f"{row['drafter']}/{name}": value for name, value in values.items()}, step=0)
