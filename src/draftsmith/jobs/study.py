"""`draftsmith study`: drafters of one target trained and measured on equal data and equal steps, side by side.

The study works in a copy of its own (see `study_copy`), in which DVC builds what is stale: the target's answers and
cache once, then training and evaluation of one drafter after the other. It can be stopped at any time; called again,
it goes on where it was. A drafter that fails is named, the others go on, and the command fails in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from draftsmith.drafters.weights import WEIGHTS_NAME
from draftsmith.errors import DraftsmithError, ParamsError
from draftsmith.evaluation.study import Missing, StudyRun, study_body, study_page
from draftsmith.evaluation.study_figure import study_figure
from draftsmith.evaluation.summary import load_reports
from draftsmith.figures import png_bytes
from draftsmith.jobs.fidelity import check_made_here
from draftsmith.jobs.forecast import forecast
from draftsmith.jobs.line import check_store
from draftsmith.jobs.study_copy import StudyCopy, study_copy, study_key
from draftsmith.manifest import Manifest, write_bytes, write_json
from draftsmith.params import Params, Study, load_params
from draftsmith.paths import Workspace
from draftsmith.provenance import read_provenance
from draftsmith.storage import open_store
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
            build_data(copy, own, study)
            missing = build_drafters(copy, study)
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


def build_data(copy: StudyCopy, own: Params, study: Study) -> None:
    """Prompts, answers and cache of the target, verified; what the store holds already is adopted.

    DVC takes manifests from its cache of runs, and may take one whose objects the store has lost; what needs them then
    fails, the objects are made again, and it goes on. Raises DraftsmithError if that does not help.
    """
    words = ("dvc", "repro", f"verify@{study.target}")
    mend_store(copy, own)
    if copy.run(*words) != 0:
        if not mend_store(copy, own):
            raise DraftsmithError(f"`{' '.join(words)}` failed in {copy.workspace.root}", expected="see above")
        copy.must_run(*words)


def mend_store(copy: StudyCopy, own: Params) -> list[str]:
    """Run the stages again whose prefixes the store lacks; returns them."""
    lost = check_store(copy.workspace, own, store=open_store(copy.environment["DRAFTSMITH_STORE"]))
    for item in lost:
        copy.must_run("dvc", "repro", "-f", "-s", item.stage)
    return [item.stage for item in lost]


def build_drafters(copy: StudyCopy, study: Study) -> list[Missing]:
    """Train and evaluate one drafter after the other, where it is not up to date; what failed, if something did.

    Raises DraftsmithError if DVC failed and left no trace at which drafter.
    """
    stages = [f"{stage}@{study_key(study, name)}" for name in study.drafters for stage in ("train", "evaluate")]
    status = copy.run("dvc", "repro", "-s", "--keep-going", *stages)
    # DVC takes away what a stage makes before it runs it, and weights and evaluate.json are written last.
    missing = []
    for name in study.drafters:
        key = study_key(study, name)
        if not (copy.workspace.drafter_dir(key) / WEIGHTS_NAME).is_file():
            missing.append(Missing(name, "train"))
        elif not (copy.workspace.report_dir(key) / "evaluate.json").is_file():
            missing.append(Missing(name, "evaluate"))
    if status < 0 or (status > 0 and not missing):
        raise DraftsmithError(f"dvc repro ended with status {status} in {copy.workspace.root}", expected="see above")
    return missing


def read_runs(copy: StudyCopy, own: Params, study: Study, *, drafters: Sequence[str]) -> list[StudyRun]:
    """The reports of the copy. Raises ContractError if a drafter was not trained from the copy's cache and params."""
    runs = []
    for name in drafters:
        key = study_key(study, name)
        check_made_here(copy.workspace, own, key)
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
