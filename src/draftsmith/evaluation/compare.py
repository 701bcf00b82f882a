"""Two evaluations against each other on the same prompts: better, worse, within noise; and when that is a regression.

The difference is of accepted length, bonus included, candidate less baseline, on the prompts that both have, with the
paired interval of `evaluation.paired`. One verdict a benchmark and temperature, and one for the mean over benchmarks:

- better, worse: the interval lies above, below 0;
- regression: worse, and the difference itself is below -margin: a loss that is no chance and not small either;
- cannot tell: the interval holds 0 and reaches past the margin on both sides (or there is none, below two prompts), so
  the prompts are too few for a loss of that size to show;
- within noise: the interval holds 0 otherwise.

No verdict but the interval's lower end says that a loss beyond the margin is excluded; see `Compared.loss`.

Of many benchmarks one in forty is worse by chance, so the gate counts a benchmark's regression only if it remains after
Holm's correction over all benchmarks and temperatures compared. The mean over benchmarks is one question a temperature
and is taken as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from draftsmith.errors import DraftsmithError, ParamsError
from draftsmith.evaluation.bootstrap import COVERAGE, Estimate
from draftsmith.evaluation.grid import Grid, markdown, number, with_interval
from draftsmith.evaluation.paired import Bonus, PromptCounts, mean_difference, mean_length

SETTINGS = ("target", "dtype", "max_new_tokens")
DIGESTS = ("target_digest", "text_digest")
"""Of `provenance`: the target's weights, its tokenizer and template. Compared where both evaluations name them."""
BENCHMARK_SETTINGS = ("source", "revision", "split", "prompt_form", "turns")
"""Facts of a benchmark that decide which text a prompt's id stands for."""

Verdict = Literal["better", "worse", "regression", "cannot tell", "within noise"]
Loss = Literal["shown", "possible", "excluded"]


@dataclass(frozen=True)
class Pairing:
    """One benchmark of two evaluations at one temperature: the prompts that both have and that have rounds in both."""

    candidate: PromptCounts
    baseline: PromptCounts
    num_only_candidate: int
    num_only_baseline: int
    num_without_rounds: int

    @property
    def left_out(self) -> str:
        """What was left out, in words; empty if nothing was."""
        parts = (
            (self.num_only_baseline, "only in A"),
            (self.num_only_candidate, "only in B"),
            (self.num_without_rounds, "without a round"),
        )
        return ", ".join(f"{count} {words}" for count, words in parts if count)


@dataclass(frozen=True)
class Compared:
    """Candidate against baseline on one benchmark, or over all (`average`), at one temperature.

    `adjusted_p` is Holm's over all benchmarks compared; None for the average and where there is no interval. `needed`
    is about how many prompts would narrow the interval to the margin, given if the verdict is `cannot tell`.
    """

    scope: str
    temperature: float
    baseline: float
    candidate: float
    difference: Estimate
    verdict: Verdict
    loss: Loss
    adjusted_p: float | None
    needed: int | None


@dataclass(frozen=True)
class Comparison:
    """What came of comparing a candidate (B) with a baseline (A)."""

    baseline: str
    candidate: str
    margin: float
    averages: tuple[Compared, ...]
    benchmarks: tuple[Compared, ...]
    notes: tuple[str, ...]

    @property
    def regressions(self) -> tuple[Compared, ...]:
        """What the gate counts: regressed averages, and benchmarks whose regression remains after Holm's correction."""
        kept = [item for item in self.benchmarks if item.adjusted_p is not None and item.adjusted_p < 1 - COVERAGE]
        return tuple(item for item in (*self.averages, *kept) if item.verdict == "regression")

    @property
    def regressed(self) -> bool:
        return bool(self.regressions)

    @property
    def text(self) -> str:
        """The comparison for people: a table, what was left out, and the gate's answer in the last line."""
        return "\n".join(
            [
                f"A, the baseline: {self.baseline}",
                f"B, the candidate: {self.candidate}",
                "",
                "Accepted length, bonus included, of B less that of A on the same prompts, with its 95 % interval by "
                f"bootstrap over prompts. Margin: {self.margin:g} tokens a round.",
                "",
                markdown(comparison_grid(self)),
                "Loss: whether B loses more than the margin (excluded: the interval lies above -margin). p: of no "
                "difference, after Holm's correction over the benchmarks; the gate counts a benchmark below "
                f"{1 - COVERAGE:.2f} only, since of many benchmarks some are worse by chance.",
                *self.notes,
                "",
                self._answer(),
            ]
        )

    def _answer(self) -> str:
        if self.regressed:
            found = ", ".join(_place(item) for item in self.regressions)
            return f"Regression: B is worse than A by more than {self.margin:g}: {found}."
        doubtful = [item for item in self.averages if item.loss != "excluded"]
        if not doubtful:
            return f"No regression: over the benchmarks a loss of more than {self.margin:g} is excluded."
        told = []
        for item in doubtful:
            needed = "" if item.needed is None else f"; about {item.needed} prompts would tell"
            told.append(f"{_place(item)} is {item.verdict}{needed}")
        return f"No regression shown, but a loss of more than {self.margin:g} is not excluded: {', '.join(told)}."


def compare(
    baseline: Mapping[str, Any],
    *,
    candidate: Mapping[str, Any],
    margin: float,
    temperature: float | None = None,
    names: tuple[str, str] | None = None,
) -> Comparison:
    """Compare two bodies of evaluate.json, at one temperature or at all that both have.

    `margin` is in tokens a round, `names` are those of baseline and candidate in the text (default: their keys).
    Raises ParamsError for a margin below 0, DraftsmithError that names the field if target, dtype, max_new_tokens or
    what a benchmark's prompts are differ, and if they have no temperature, benchmark or prompt in common.
    """
    if not (margin >= 0 and math.isfinite(margin)):
        raise ParamsError("the margin must be a number of tokens >= 0", got=margin, where="--margin")
    labels = names or (baseline["key"], candidate["key"])
    check_settings(baseline, candidate, names=labels)
    temperatures, notes = _temperatures(baseline, candidate, temperature, names=labels)
    if baseline["seed"] != candidate["seed"] and any(temperatures):
        notes.append(f"Note: sampled with different seeds ({baseline['seed']} and {candidate['seed']}).")
    averages, benchmarks = [], []
    for value in temperatures:
        pairings = pair_prompts(baseline, candidate, temperature=value, names=labels)
        for name, item in pairings.items():
            if item.left_out:
                notes.append(f"Left out of {name} at temperature {value:g}: {item.left_out}.")
            benchmarks.append(_compared(name, value, [item], margin=margin, seed=baseline["seed"]))
        averages.append(_compared("average", value, [*pairings.values()], margin=margin, seed=baseline["seed"]))
    notes += _only_in_one(baseline, candidate, temperatures)
    adjusted = holm([item.difference.p_value for item in benchmarks])
    return Comparison(
        baseline=labels[0],
        candidate=labels[1],
        margin=margin,
        averages=tuple(averages),
        benchmarks=tuple(replace(item, adjusted_p=p_value) for item, p_value in zip(benchmarks, adjusted, strict=True)),
        notes=tuple(notes),
    )


def check_settings(baseline: Mapping[str, Any], candidate: Mapping[str, Any], *, names: tuple[str, str]) -> None:
    """Raises DraftsmithError that names the first field in which the two were evaluated differently."""
    unequal = unequal_field(baseline, candidate)
    if unequal is not None:
        field, first, second = unequal
        raise DraftsmithError(
            f"evaluations that differ in {field} cannot be compared",
            got=f"{second} ({names[1]})",
            expected=f"{first} ({names[0]})",
        )


def unequal_field(baseline: Mapping[str, Any], candidate: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """The first field in which two evaluations differ so that they cannot be compared, and its two values."""
    for name in SETTINGS:
        if baseline[name] != candidate[name]:
            return name, baseline[name], candidate[name]
    for name in DIGESTS:
        first, second = (body["provenance"].get(name) for body in (baseline, candidate))
        if None not in (first, second) and first != second:
            return f"provenance.{name}", first, second
    facts = {item["name"]: item for item in baseline["benchmarks"]}
    for item in candidate["benchmarks"]:
        own = facts.get(item["name"])
        for name in BENCHMARK_SETTINGS if own is not None else ():
            assert own is not None
            if own.get(name) != item.get(name):
                return f"benchmarks.{item['name']}.{name}", own.get(name), item.get(name)
    return None


def pair_prompts(
    baseline: Mapping[str, Any], candidate: Mapping[str, Any], *, temperature: float, names: tuple[str, str]
) -> dict[str, Pairing]:
    """The benchmarks that both have at a temperature, by name in the baseline's order.

    Raises DraftsmithError if there is none, or no prompt of a benchmark has rounds in both.
    """
    sides = [
        {row["benchmark"]: row for row in body["rows"] if row["temperature"] == temperature}
        for body in (baseline, candidate)
    ]
    found = {}
    for name in (name for name in sides[0] if name in sides[1]):
        first, second = (PromptCounts.from_json(side[name]["prompts"]) for side in sides)
        common = set(first.ids) & set(second.ids)
        kept = common & first.with_rounds & second.with_rounds
        if not kept:
            raise DraftsmithError(
                f"no prompt of {name} at temperature {temperature:g} is in both evaluations",
                got=f"{len(second.ids)} prompts ({names[1]})",
                expected=f"some of the {len(first.ids)} ({names[0]})",
            )
        found[name] = Pairing(
            candidate=second.only(kept),
            baseline=first.only(kept),
            num_only_candidate=len(second.ids) - len(common),
            num_only_baseline=len(first.ids) - len(common),
            num_without_rounds=len(common) - len(kept),
        )
    if not found:
        raise DraftsmithError(
            f"no benchmark at temperature {temperature:g} in both evaluations",
            got=f"{', '.join(sides[1]) or 'none'} ({names[1]})",
            expected=f"{', '.join(sides[0]) or 'none'} ({names[0]})",
        )
    return found


def paired_difference(pairings: Sequence[Pairing], *, seed: int, bonus: Bonus = "with") -> Estimate:
    """Candidate less baseline, averaged over benchmarks."""
    return mean_difference(
        [item.candidate for item in pairings],
        baseline=[item.baseline for item in pairings],
        seed=seed,
        bonus=bonus,
    )


def judge(difference: Estimate, *, margin: float) -> tuple[Verdict, Loss]:
    """The verdict on a difference, and what is known about a loss beyond the margin; see the module's head."""
    if difference.interval is None:
        return "cannot tell", "possible"
    low, high = difference.interval
    loss: Loss = "shown" if high < -margin else "excluded" if low >= -margin else "possible"
    if difference.excludes_zero:
        if low > 0:
            return "better", loss
        return ("regression" if difference.value < -margin else "worse"), loss
    wide = low < -margin and high > margin
    return ("cannot tell" if wide and margin > 0 else "within noise"), loss


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's adjusted p-values, in the order given; None stays None and is no test."""
    order = sorted((value, index) for index, value in enumerate(p_values) if value is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (value, index) in enumerate(order):
        largest = max(largest, min(1.0, value * (len(order) - rank)))
        adjusted[index] = largest
    return adjusted


def comparison_grid(comparison: Comparison) -> Grid:
    """One row a benchmark and temperature, the averages last."""
    rows = []
    for item in (*comparison.benchmarks, *comparison.averages):
        needed = "" if item.needed is None else f" (needs about {item.needed} prompts)"
        rows.append(
            (
                item.scope,
                f"{item.temperature:g}",
                str(item.difference.num_prompts),
                f"{item.baseline:.3f}",
                f"{item.candidate:.3f}",
                with_interval(item.difference.value, item.difference.interval, digits=3),
                item.loss,
                _p_value(item.adjusted_p),
                item.verdict + needed,
            )
        )
    return Grid(
        ("benchmark", "T", "prompts", "A", "B", "B - A", f"loss > {comparison.margin:g}", "p", "verdict"), tuple(rows)
    )


def _compared(scope: str, temperature: float, pairings: Sequence[Pairing], *, margin: float, seed: int) -> Compared:
    difference = paired_difference(pairings, seed=seed)
    verdict, loss = judge(difference, margin=margin)
    needed = None
    if verdict == "cannot tell" and difference.interval is not None:
        half = (difference.interval[1] - difference.interval[0]) / 2
        needed = math.ceil(difference.num_prompts * (half / margin) ** 2)
    return Compared(
        scope=scope,
        temperature=temperature,
        baseline=mean_length([item.baseline for item in pairings], seed=seed, num_resamples=1).value,
        candidate=mean_length([item.candidate for item in pairings], seed=seed, num_resamples=1).value,
        difference=difference,
        verdict=verdict,
        loss=loss,
        adjusted_p=None,
        needed=needed,
    )


def _temperatures(
    baseline: Mapping[str, Any], candidate: Mapping[str, Any], wanted: float | None, *, names: tuple[str, str]
) -> tuple[list[float], list[str]]:
    """The temperatures to compare at, and what is to be said about others."""
    first, second = (list(dict.fromkeys(row["temperature"] for row in body["rows"])) for body in (baseline, candidate))
    common = [value for value in first if value in second]
    if wanted is not None and wanted in common:
        return [wanted], []
    if wanted is not None or not common:
        told = [", ".join(f"{value:g}" for value in values) for values in (first, second)]
        asked = "in common" if wanted is None else f"{wanted:g} in both"
        raise DraftsmithError(
            f"no temperature {asked}", got=f"{told[1]} ({names[1]})", expected=f"{told[0]} ({names[0]})",
            where=None if wanted is None else "--temperature",
        )  # fmt: skip
    lonely = [value for value in (*first, *second) if value not in common]
    return common, [f"Left out: temperature {value:g} is in one of them only." for value in lonely]


def _only_in_one(baseline: Mapping[str, Any], candidate: Mapping[str, Any], temperatures: Sequence[float]) -> list[str]:
    notes = []
    for temperature in temperatures:
        first, second = (
            [row["benchmark"] for row in body["rows"] if row["temperature"] == temperature]
            for body in (baseline, candidate)
        )
        for names, others, place in ((first, second, "A"), (second, first, "B")):
            notes += [
                f"Left out: {name} at temperature {temperature:g} is only in {place}."
                for name in names
                if name not in others
            ]
    return notes


def _p_value(value: float | None) -> str:
    return "< 0.001" if value is not None and value < 0.001 else number(value, digits=3)


def _place(item: Compared) -> str:
    return f"{item.scope} (T {item.temperature:g})"
