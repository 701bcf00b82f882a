"""Stage `serve@KEY`: verification policies under load, simulated with the recorded rounds of the evaluation on the
machine of a profile; and the same for a synthetic drafter and machine, marked as such."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from draftsmith.errors import DraftsmithError
from draftsmith.evaluation.decoded import Decoded
from draftsmith.figures import png_bytes
from draftsmith.jobs.evaluate_cells import load_decoded
from draftsmith.jobs.progress import progress
from draftsmith.manifest import write_bytes, write_json
from draftsmith.params import Params
from draftsmith.params_serving import Serve, WhatIf
from draftsmith.paths import Workspace
from draftsmith.serving.contenders import Machine
from draftsmith.serving.cost_table import CostTable, read_cost_table
from draftsmith.serving.page import serve_page
from draftsmith.serving.profile import EXAMPLES, Profile, example_profile, is_profile, read_profile
from draftsmith.serving.recorded import RecordedRounds, record_decoded
from draftsmith.serving.settings import recommend, settings_body, settings_markdown
from draftsmith.serving.simulator import Limits
from draftsmith.serving.step_costs import StepCosts
from draftsmith.serving.study import SCHEMA_VERSION, Study, rounds_facts
from draftsmith.serving.study_figures import study_figures
from draftsmith.serving.study_text import serve_csv, serve_markdown
from draftsmith.serving.synthetic_rounds import published_lengths, synthetic_rounds
from draftsmith.serving.trace_file import Trace, read_trace
from draftsmith.tracking import StageRun, stage_run

MEASURED = "measured"


@dataclass(frozen=True, eq=False)
class Costs:
    """What steps cost on some machine, and where that is known from."""

    costs: StepCosts  # with the table as measured
    believed: CostTable
    facts: dict[str, Any]  # `machine` and `profile` of serve.json
    synthetic: bool
    note: str
    profile: dict[str, Any] | None = None  # its body, for the page

    @classmethod
    def of_profile(cls, profile: Profile, *, source: str) -> Costs:
        body = profile.to_body()
        facts = {"source": source, "synthetic": body["synthetic"], "note": body["note"]}
        return cls(
            replace(profile.step_costs(), verification=profile.jagged),
            profile.table,
            {
                "machine": body["machine"],
                "profile": {**facts, "max_batch_tokens": profile.jagged.max_batch_tokens},
            },
            body["synthetic"],
            body["note"] or "",
            body,
        )

    @classmethod
    def of_table(cls, table: CostTable, *, source: str) -> Costs:
        """A bare SPS table: drafting, upkeep and prefill cost nothing."""
        note = "A bare SPS table: drafting, prefill and upkeep cost nothing here, which flatters every drafter."
        profile = {"source": source, "synthetic": False, "note": note, "max_batch_tokens": table.max_batch_tokens}
        return cls(StepCosts(table), table.monotone(), {"machine": {}, "profile": profile}, False, note)


@dataclass(frozen=True, eq=False)
class Part:
    """One study of a job: the measured one, or a what-if."""

    name: str
    costs: Costs
    rounds: RecordedRounds
    rounds_facts: dict[str, Any]
    temperatures: tuple[float, ...] | None
    synthetic: bool
    note: str


def run(
    workspace: Workspace, params: Params, key: str, *, profile: str | None = None, trace: Path | None = None
) -> Path:
    """Simulate, then write the reports, the JSON body last; returns where that lies.

    `profile`: an example's name, or the file of a profile or SPS table measured elsewhere, in place of this machine's;
    `trace`: requests to be replayed as well. With either the reports have another name than those of the stage.
    Raises DraftsmithError naming what is missing and the command that makes it.
    """
    plan, row = params.run(key), params.serve
    stem = "-".join(["serve", *(Path(item).stem for item in (profile, trace) if item is not None)])
    costs = _costs(workspace, key, profile)
    file = trace if trace is not None or row.trace is None else workspace.root / row.trace
    told = None if file is None else read_trace(file, domain=row.trace_domain)
    parts = [_measured(workspace, params, key, costs=costs, name=MEASURED if profile is None else Path(profile).stem)]
    if profile is None:
        parts += [_what_if(params, key, item) for item in row.what_if]
    tags = {"target": plan.target, "drafter": plan.drafter}
    with stage_run("serve", key if stem == "serve" else f"{key}-{stem}", workspace=workspace,
                   params=row.model_dump(mode="json"), tags=tags) as tracked:  # fmt: skip
        machines = [_machine(part, row) for part in parts]
        studies = [
            Study(machine, row=row, trace=told if part is parts[0] else None)
            for machine, part in zip(machines, parts, strict=True)
        ]
        with progress(f"serve@{key}", total=sum(study.num_runs for study in studies), unit="runs") as advance:
            bodies = [
                _body(params, key, part, study=study, on_run=lambda: advance(1))
                for part, study in zip(parts, studies, strict=True)
            ]
        body = bodies[0] | {"trace": _trace_facts(file, told), "what_if": bodies[1:]}
        from_anchor = params.drafters[plan.drafter].sample_from_anchor
        settings = [recommend(item, sample_from_anchor=from_anchor) for item in serve_bodies(body)]
        for item, found in zip(serve_bodies(body), settings, strict=True):
            item["engine_settings"] = settings_body(found)
        page = serve_page(
            body, title=f"Serving study: {key}", sample_from_anchor=from_anchor,
            profiles={part.name: part.costs.profile for part in parts if part.costs.profile is not None},
        )  # fmt: skip
        texts = {
            f"{stem}.md": serve_markdown(body),
            f"{stem}.html": page,
            f"{stem}-settings.md": settings_markdown(body, settings[0]),
        }
        path = _write(workspace.report_dir(key), stem, body, texts=texts, tracked=tracked)
        _log(tracked, body)
    return path


def serve_bodies(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The study of a serve.json and its what-ifs."""
    return [body, *body["what_if"]]


def _costs(workspace: Workspace, key: str, profile: str | None) -> Costs:
    if profile is None:
        path = workspace.report_dir(key) / "profile.json"
        if not path.is_file():
            raise DraftsmithError(
                f"no profile of this machine for {key}", got=f"no {path}",
                expected=f"`draftsmith profile --key {key}` first, or --profile {'|'.join(EXAMPLES)}|FILE",
            )  # fmt: skip
        return Costs.of_profile(read_profile(path), source=path.relative_to(workspace.root).as_posix())
    if profile in EXAMPLES:
        return Costs.of_profile(example_profile(profile), source=f"example {profile}")
    path = Path(profile)
    if not path.is_file():
        raise DraftsmithError("no such profile", got=profile, expected=f"{', '.join(EXAMPLES)}, or a file")
    if is_profile(path):
        return Costs.of_profile(read_profile(path), source=path.name)
    return Costs.of_table(read_cost_table(path), source=path.name)


def _measured(workspace: Workspace, params: Params, key: str, *, costs: Costs, name: str) -> Part:
    """The key's own rounds on the machine of `costs`."""
    drafter, temperature = params.drafters[params.run(key).drafter], params.serve.temperature
    decoded = _at_temperature(load_decoded(workspace, params, key), temperature)
    rounds = record_decoded(decoded, block_size=drafter.block_size)
    facts = rounds_facts(rounds, source="evaluation", temperature=temperature)
    temperatures = _temperatures(workspace, key) if drafter.confidence else None
    note = (
        f"Simulated with the {rounds.num_rounds} rounds that the evaluation recorded at temperature {temperature:g}, at"
        f" the cost of steps of {costs.facts['profile']['source']}."
    )
    if costs.synthetic:
        note += " That profile is an example: nothing was measured on such a machine."
    return Part(name, costs, rounds, facts, temperatures, costs.synthetic, f"{note} {costs.note}".strip())


def _at_temperature(decoded: Sequence[Decoded], temperature: float) -> list[Decoded]:
    found = [item for item in decoded if item.temperature == temperature]
    if not found:
        raise DraftsmithError(
            "no rounds of the evaluation at this temperature", got=temperature,
            expected=f"one of {sorted({item.temperature for item in decoded})}",
            where="params.yaml: serve.temperature, evaluate.temperatures",
        )  # fmt: skip
    return found


def _temperatures(workspace: Workspace, key: str) -> tuple[float, ...]:
    path = workspace.report_dir(key) / "calibrate.json"
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DraftsmithError(
            f"no calibration of {key}", got=f"no {path}", expected=f"`draftsmith calibrate --key {key}` first"
        ) from None
    except (OSError, ValueError) as error:
        raise DraftsmithError("the calibration cannot be read", got=str(error), where=str(path)) from error
    found = body.get("temperatures") if isinstance(body, dict) else None
    if found is None:
        raise DraftsmithError(
            f"no temperatures in the calibration of {key}", where=str(path),
            expected=f"`draftsmith calibrate --key {key}` with its confidence head",
        )  # fmt: skip
    return tuple(map(float, found))


def _what_if(params: Params, key: str, item: WhatIf) -> Part:
    """A drafter of the key's kind and block whose acceptance is a published one, on an example's machine."""
    drafter = params.drafters[params.run(key).drafter]
    if item.profile not in EXAMPLES:
        raise DraftsmithError(
            "no such example profile", got=item.profile, expected=", ".join(EXAMPLES),
            where=f"params.yaml: serve.what_if.{item.name}.profile",
        )  # fmt: skip
    given = item.accepted_length
    lengths = (
        published_lengths(drafter.kind, block_size=drafter.block_size)
        if given is None
        else {str(name): length for name, length in given.items()}
    )
    rounds = synthetic_rounds(
        lengths, block_size=drafter.block_size, confident=drafter.confidence, seed=params.serve.seed
    )
    whence = _whence(drafter.kind, drafter.block_size) if given is None else "as params.yaml has them"
    told = ", ".join(f"{name} {length:g}" for name, length in lengths.items())
    note = (
        f"Synthetic: the example profile `{item.profile}`, and rounds drawn to accepted lengths of {told}"
        f" ({whence}), with confidences"
        " that are calibrated by construction. Nothing here was measured; it shows the shape that a drafter of that"
        " quality would have."
    )
    facts = rounds_facts(rounds, source="synthetic", temperature=None)
    costs = Costs.of_profile(example_profile(item.profile), source=f"example {item.profile}")
    return Part(item.name, costs, rounds, facts, None, True, note)


def _whence(kind: str, block_size: int) -> str:
    """Where the lengths of `published_lengths` are from."""
    if kind == "mtp1":
        return "assumed: no paper gives them for this kind"
    published = f"as the DSpark paper gives them for {kind} at 7 draft tokens"
    return published if block_size == 7 else f"{published}, carried over to {block_size}"


def _machine(part: Part, row: Serve) -> Machine:
    """Concurrency goes as far as the table holds whole blocks of all requests."""
    most = max(1, part.costs.costs.verification.max_batch_tokens // (part.rounds.block_size + 1))
    return Machine(
        rounds=part.rounds,
        costs=part.costs.costs,
        believed=part.costs.believed,
        limits=Limits(
            most if row.max_concurrency is None else min(most, row.max_concurrency), row.kv_tokens, row.prefill_tokens
        ),
        temperatures=part.temperatures,
        exit_floor=row.exit_floor,
        probe_every=row.probe_every,
        seed=row.seed,
    )


def _body(params: Params, key: str, part: Part, *, study: Study, on_run: Callable[[], None]) -> dict[str, Any]:
    name = params.run(key).drafter
    drafter = params.drafters[name]
    return {
        "schema_version": SCHEMA_VERSION,
        "key": key,
        "name": part.name,
        "synthetic": part.synthetic,
        "note": part.note,
        "drafter": {
            "name": name,
            "kind": drafter.kind,
            "block_size": drafter.block_size,
            "confidence": drafter.confidence,
        },
        **part.costs.facts,
        "rounds": part.rounds_facts,
        "temperatures": part.temperatures,
        "settings": params.serve.model_dump(mode="json", exclude={"what_if"}),
        **study.body(on_run=on_run),
    }


def _trace_facts(path: Path | None, trace: Trace | None) -> dict[str, Any] | None:
    if path is None or trace is None:
        return None
    return {"file": path.name, "num_requests": len(trace.requests), "num_left_out": trace.num_left_out}


def _write(folder: Path, stem: str, body: dict[str, Any], *, texts: Mapping[str, str], tracked: StageRun) -> Path:
    """All reports of a job under one stem; those of a what-if carry its name."""
    for item in serve_bodies(body):
        part = stem if item is body else f"{stem}-what_if-{item['name']}"
        for name, figure in study_figures(item).items():
            write_bytes(folder / f"{part}-{name}.png", png_bytes(figure))
            tracked.log_figure(figure, f"{part}-{name}.png")
    for name, text in texts.items():
        write_bytes(folder / name, text.encode())
        tracked.log_text(text, name)
    write_bytes(folder / f"{stem}.csv", serve_csv(serve_bodies(body)).encode())
    tracked.log_json(body, f"{stem}.json")
    write_json(folder / f"{stem}.json", body)
    return folder / f"{stem}.json"


def _log(tracked: StageRun, body: dict[str, Any]) -> None:
    """Curves by concurrency, those of what-ifs under their name."""
    for item in serve_bodies(body):
        stem = "" if item is body else f"what_if/{item['name']}/"
        for policy in item["pareto"]:
            name = policy["policy"].replace("+", "-")  # which MLflow does not take
            for point in policy["points"]:
                named = {
                    "tokens_per_s": point["tokens_per_s"],
                    "user_tokens_per_s": point["user_tokens_per_s"]["p50"],
                    "speedup": point["speedup"],
                    "budget": point["budget"],
                }
                tracked.log_metrics(
                    {f"{stem}{what}/{name}": value for what, value in named.items()}, step=point["concurrency"]
                )
