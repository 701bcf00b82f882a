"""A study: drafters of one target side by side, by benchmark, as JSON and as a page of tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.errors import DraftsmithError
from draftsmith.evaluation.bootstrap import Estimate
from draftsmith.evaluation.compare import SETTINGS
from draftsmith.evaluation.grid import MISSING, Grid, markdown
from draftsmith.evaluation.paired import PromptCounts, mean_difference, mean_length

SCHEMA_VERSION = 1
MARK = "*"


@dataclass(frozen=True)
class StudyRun:
    """One trained and evaluated drafter: bodies of its train.json and evaluate.json."""

    drafter: str
    key: str
    kind: str
    train: Mapping[str, Any]
    evaluate: Mapping[str, Any]


@dataclass(frozen=True)
class Missing:
    """A drafter that could not be trained or evaluated, and at which stage it failed."""

    drafter: str
    stage: str


def study_body(
    runs: Sequence[StudyRun],
    *,
    baseline: str,
    missing: Sequence[Missing],
    data: Mapping[str, Any],
    recipe: Mapping[str, Any],
    provenance: Mapping[str, Any],
    seed: int,
) -> dict[str, Any]:
    """The body of study.json.

    Differences are to the drafter `baseline`, null if that is missing. `data` says what all were trained from (with
    `target` and `cache`), `recipe` is the common training row.
    Raises DraftsmithError if there is no run, or two differ in steps, data or what they were evaluated on.
    """
    _check_equal(runs)
    base = next((run for run in runs if run.drafter == baseline), None)
    counts = {name: runs[0].train[name] for name in ("num_samples", "num_supervised_tokens")}
    epochs = recipe["steps"] * recipe["global_batch"] / counts["num_samples"]
    return {
        "schema_version": SCHEMA_VERSION,
        "baseline": baseline,
        "data": {**data, **counts},
        "recipe": dict(recipe),
        "provenance": dict(provenance),
        "missing": [{"drafter": item.drafter, "stage": item.stage} for item in missing],
        "training": [_training_row(run, epochs=epochs) for run in runs],
        "rows": [row for run in runs for row in _benchmark_rows(run, base, seed=seed)],
        "means": [row for run in runs for row in _mean_rows(run, base, seed=seed)],
    }


def study_page(body: Mapping[str, Any]) -> str:
    """study.md."""
    data, source = body["data"], body["provenance"]
    dirty = "" if source["git_dirty"] == "no" else f", changed since in {len(source['changed_files'])} files"
    benchmarks = len({row["benchmark"] for row in body["rows"]})
    parts = [
        f"# Drafters of {data['target']} side by side",
        "",
        f"Equal data and equal steps: every drafter is trained on {data['num_samples']} answers of the target "
        f"({data['num_supervised_tokens']} supervised tokens, cache `{data['cache']}`) for {body['recipe']['steps']} "
        f"steps of {body['recipe']['global_batch']} samples, with one recipe and one seed.",
        "",
        "Accepted length: tokens committed a round, bonus token included; plain decoding commits 1. K: tokens drafted "
        "a round, so K + 1 bounds the accepted length (2 for MTP-1, which drafts one token). ±: half of the 95 % "
        "interval by bootstrap over prompts; another training seed is not in it. Exact ends: `study.json`.",
        "",
    ]
    for temperature in dict.fromkeys(row["temperature"] for row in body["rows"]):
        parts += [f"## Accepted length at temperature {temperature:g}", "", markdown(length_grid(body, temperature))]
        grid = difference_grid(body, temperature)
        if grid is not None:
            parts += [
                f"Less that of {body['baseline']} on the same prompts. {MARK}: the interval excludes 0; "
                "of twenty differences that are none, one is marked by chance.",
                "",
                markdown(grid),
            ]
    parts += [
        "## Conditional acceptance by position",
        "",
        f"Of the rounds in which all earlier tokens were accepted, the share in which this one was; rounds of "
        f"{'all ' if benchmarks > 1 else ''}{benchmarks} benchmark{'s' if benchmarks > 1 else ''} together. "
        "Few rounds get to the last positions: their numbers are in `study.json`.",
        "",
        markdown(position_grid(body)),
        "## Training",
        "",
        "Parameters: the drafter's own, without the target's embedding and head. Expected length: what training "
        "expects at temperature 1 on held-out answers.",
        "",
        markdown(training_grid(body)),
    ]
    if body["missing"]:
        failed = ", ".join(f"{item['drafter']} ({item['stage']} failed)" for item in body["missing"])
        parts += [f"**Not in these tables:** {failed}", ""]
    parts += [f"Measured on {source['hardware']}, commit {source['git_commit'][:10]}{dirty}.", ""]
    return "\n".join(parts)


def length_grid(body: Mapping[str, Any], temperature: float) -> Grid:
    """Accepted length: a row a drafter, a column a benchmark, their mean, and the mean without the bonus token."""
    rows = []
    for drafter, found in _by_drafter(body["rows"], temperature).items():
        [mean] = _by_drafter(body["means"], temperature)[drafter]
        cells = [_length(row) for row in found]
        bare = _cell(mean["accepted_length_without_bonus"], mean["accepted_length_without_bonus_interval"])
        rows.append((drafter, str(_block_size(body, drafter)), *cells, _length(mean), bare))
    return Grid(("drafter", "K", *_benchmark_heads(body, temperature), "mean", "mean without bonus"), tuple(rows))


def difference_grid(body: Mapping[str, Any], temperature: float) -> Grid | None:
    """Paired differences to the baseline, marked where the interval excludes 0; None if the baseline is missing."""
    if all(row["difference"] is None for row in body["rows"]):
        return None
    rows = []
    for drafter, found in _by_drafter(body["rows"], temperature).items():
        if drafter == body["baseline"]:
            continue
        cells = [_difference(row) for row in (*found, *_by_drafter(body["means"], temperature)[drafter])]
        rows.append((drafter, *cells))
    return Grid(("drafter", *_benchmark_heads(body, temperature), "mean"), tuple(rows))


def position_grid(body: Mapping[str, Any]) -> Grid:
    """Conditional acceptance by position, a row a drafter and temperature."""
    width = max(len(row["conditional_acceptance"]) for row in body["means"])
    rows = []
    for row in body["means"]:
        shares = [MISSING if share is None else f"{share:.3f}" for share in row["conditional_acceptance"]]
        shares += [""] * (width - len(shares))
        rows.append((row["drafter"], f"{row['temperature']:g}", str(row["num_rounds"]), *shares))
    return Grid(("drafter", "T", "rounds", *(str(position) for position in range(1, width + 1))), tuple(rows))


def training_grid(body: Mapping[str, Any]) -> Grid:
    """What training took and what it expects, a row a drafter."""
    rows = [
        (
            row["drafter"],
            str(row["block_size"]),
            f"{row['num_parameters'] / 1e6:.1f} M",
            str(row["steps"]),
            f"{row['epochs']:.1f}",
            f"{row['seconds']:.0f}",
            f"{row['expected_accepted_length']:.3f}",
        )
        for row in body["training"]
    ]
    return Grid(("drafter", "K", "parameters", "steps", "epochs", "seconds", "expected length"), tuple(rows))


def _check_equal(runs: Sequence[StudyRun]) -> None:
    """Raises DraftsmithError where runs cannot stand in one table."""
    if not runs:
        raise DraftsmithError("a study without any finished run")
    for name, values in (
        *((name, [run.train[name] for run in runs]) for name in ("steps", "num_samples", "num_supervised_tokens")),
        *((name, [run.evaluate[name] for run in runs]) for name in SETTINGS),
        ("benchmarks", [_settings(run) for run in runs]),
    ):
        different = next((index for index, value in enumerate(values) if value != values[0]), None)
        if different is not None:
            raise DraftsmithError(
                f"{runs[different].drafter} and {runs[0].drafter} differ in {name}, so they cannot be compared",
                got=values[different],
                expected=values[0],
            )


def _settings(run: StudyRun) -> list[tuple[str, float]]:
    return [(row["benchmark"], row["temperature"]) for row in run.evaluate["rows"]]


def _training_row(run: StudyRun, *, epochs: float) -> dict[str, Any]:
    return {
        "drafter": run.drafter,
        "key": run.key,
        "kind": run.kind,
        "block_size": run.evaluate["block_size"],
        "num_parameters": run.train["num_parameters"],
        "steps": run.train["steps"],
        "epochs": epochs,
        "num_supervised_tokens": run.train["num_supervised_tokens"],
        "seconds": run.train["seconds"],
        "expected_accepted_length": run.train["expected_accepted_length"],
    }


def _benchmark_rows(run: StudyRun, base: StudyRun | None, *, seed: int) -> list[dict[str, Any]]:
    rows = []
    for place, row in enumerate(run.evaluate["rows"]):
        other = None if base is None else [base.evaluate["rows"][place]]
        rows.append(
            {
                "drafter": run.drafter,
                "benchmark": row["benchmark"],
                "domain": row["domain"],
                "temperature": row["temperature"],
                "num_prompts": row["num_prompts"],
                "num_rounds": row["num_rounds"],
                **_compared([row], other, seed=seed),
                "conditional_acceptance": row["conditional_acceptance"],
                "conditional_acceptance_interval": row["conditional_acceptance_interval"],
                "num_conditional": row["num_conditional"],
                "tokens_per_s": row["tokens_per_s"],
                "plain_tokens_per_s": row["plain_tokens_per_s"],
                "identical_to_plain": row["identical_to_plain"],
            }
        )
    return rows


def _mean_rows(run: StudyRun, base: StudyRun | None, *, seed: int) -> list[dict[str, Any]]:
    rows = []
    for temperature in dict.fromkeys(row["temperature"] for row in run.evaluate["rows"]):
        found, other = _at(run, temperature), None if base is None else _at(base, temperature)
        shares, counts = _pooled_acceptance(found)
        rows.append(
            {
                "drafter": run.drafter,
                "temperature": temperature,
                "num_benchmarks": len(found),
                "num_prompts": sum(row["num_prompts"] for row in found),
                "num_rounds": sum(row["num_rounds"] for row in found),
                **_compared(found, other, seed=seed),
                "conditional_acceptance": shares,
                "num_conditional": counts,
            }
        )
    return rows


def _at(run: StudyRun, temperature: float) -> list[Mapping[str, Any]]:
    return [row for row in run.evaluate["rows"] if row["temperature"] == temperature]


def _compared(
    rows: Sequence[Mapping[str, Any]], base: Sequence[Mapping[str, Any]] | None, *, seed: int
) -> dict[str, Any]:
    """Accepted length with and without bonus of the mean over `rows`, and its difference to that over `base`."""
    counts = [PromptCounts.from_json(row["prompts"]) for row in rows]
    with_bonus, without = mean_length(counts, seed=seed), mean_length(counts, seed=seed, bonus="without")
    difference: Estimate | None = None
    if base is not None:
        baseline = [PromptCounts.from_json(row["prompts"]) for row in base]
        difference = mean_difference(counts, baseline=baseline, seed=seed)
    return {
        "accepted_length": with_bonus.value,
        "accepted_length_interval": _pair(with_bonus),
        "accepted_length_without_bonus": without.value,
        "accepted_length_without_bonus_interval": _pair(without),
        "difference": None if difference is None else difference.value,
        "difference_interval": None if difference is None else _pair(difference),
        "difference_excludes_zero": None if difference is None else difference.excludes_zero,
    }


def _pooled_acceptance(rows: Sequence[Mapping[str, Any]]) -> tuple[list[float | None], list[int]]:
    """Conditional acceptance [K] over the rounds of all rows, and the rounds [K] behind it."""
    shares: list[float | None] = []
    counts = []
    for slot in range(len(rows[0]["num_conditional"])):
        seen = [(row["num_conditional"][slot], row["conditional_acceptance"][slot]) for row in rows]
        count = sum(number for number, _ in seen)
        accepted = sum(number * share for number, share in seen if share is not None)
        shares.append(accepted / count if count else None)
        counts.append(count)
    return shares, counts


def _pair(estimate: Estimate) -> list[float] | None:
    return None if estimate.interval is None else list(estimate.interval)


def _by_drafter(rows: Sequence[Mapping[str, Any]], temperature: float) -> dict[str, list[Mapping[str, Any]]]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["temperature"] == temperature:
            found.setdefault(row["drafter"], []).append(row)
    return found


def _benchmark_heads(body: Mapping[str, Any], temperature: float) -> list[str]:
    found = next(iter(_by_drafter(body["rows"], temperature).values()))
    return [f"{row['benchmark']} ({row['domain']}, {row['num_prompts']})" for row in found]


def _block_size(body: Mapping[str, Any], drafter: str) -> int:
    return next(row["block_size"] for row in body["training"] if row["drafter"] == drafter)


def _length(row: Mapping[str, Any]) -> str:
    return _cell(row["accepted_length"], row["accepted_length_interval"])


def _difference(row: Mapping[str, Any]) -> str:
    mark = f" {MARK}" if row["difference_excludes_zero"] else "  "
    return _cell(row["difference"], row["difference_interval"], sign="+") + mark


def _cell(value: float, interval: Sequence[float] | None, *, sign: str = "") -> str:
    text = f"{value:{sign}.2f}"
    return text if interval is None else f"{text} ± {(interval[1] - interval[0]) / 2:.2f}"
