"""What the page of an evaluation shows: each drafter's report under a short name, and what all of them share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from draftsmith.errors import DraftsmithError
from draftsmith.evaluation import report, samples
from draftsmith.evaluation.benchmarks import BENCHMARKS
from draftsmith.evaluation.compare import DIGESTS, SETTINGS

PREFERRED_TEMPERATURE = 1.0
"""What is shown first: the paper's Table 1 is at temperature 1."""

Body = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Shown:
    """One drafter on the page: `label` is its name there, `slot` (from 0) chooses its colour and marker."""

    label: str
    slot: int
    evaluate: Body
    samples: Body | None

    @property
    def key(self) -> str:
        """The key of the run."""
        return str(self.evaluate["key"])

    @property
    def block_size(self) -> int:
        """K, the tokens drafted a round."""
        return int(self.evaluate["block_size"])

    @property
    def has_confidence(self) -> bool:
        """True if the drafter has a confidence head."""
        return bool(self.evaluate["drafter"]["confidence"])

    def at(self, part: str, temperature: float) -> list[Body]:
        """The entries of one list of the body (`rows`, `domains`, ...) at a temperature."""
        return [item for item in self.evaluate[part] if item["temperature"] == temperature]

    def rows(self, temperature: float) -> dict[str, Body]:
        """The rows at a temperature, by benchmark."""
        return {row["benchmark"]: row for row in self.at("rows", temperature)}

    def average(self, temperature: float) -> Body | None:
        """The average over benchmarks at a temperature; None if nothing was decoded at it."""
        return next(iter(self.at("averages", temperature)), None)

    def speed(self, temperature: float) -> dict[int, Body]:
        """The measurements of speed at a temperature, by batch size; empty without a speed run."""
        points = self.evaluate.get("speed") or []
        return {point["batch_size"]: point for point in points if point["temperature"] == temperature}


@dataclass(frozen=True)
class Benchmark:
    """A column of the page: one benchmark, as the first report that has it describes it."""

    name: str
    domain: str


@dataclass(frozen=True)
class Page:
    """All drafters of a page, in the order in which they were given."""

    drafters: tuple[Shown, ...]

    @cached_property
    def temperatures(self) -> tuple[float, ...]:
        """Every temperature at which any of them was evaluated, ascending."""
        return tuple(sorted({row["temperature"] for item in self.drafters for row in item.evaluate["rows"]}))

    @property
    def first_temperature(self) -> float:
        """The temperature that the page opens with."""
        return PREFERRED_TEMPERATURE if PREFERRED_TEMPERATURE in self.temperatures else self.temperatures[0]

    @cached_property
    def benchmarks(self) -> tuple[Benchmark, ...]:
        """Every benchmark of any of them: by domain, in the order of the paper; what it has not comes last."""
        found = {row["name"]: row["domain"] for item in self.drafters for row in item.evaluate["benchmarks"]}
        known = list(BENCHMARKS)

        def place(name: str) -> tuple[int, int]:
            return report.DOMAINS.index(found[name]), known.index(name) if name in known else len(known)

        return tuple(Benchmark(name, found[name]) for name in sorted(found, key=place))

    @property
    def block_size(self) -> int:
        """The largest K."""
        return max(item.block_size for item in self.drafters)

    def evaluated(self, temperature: float) -> list[Shown]:
        """The drafters that have rows at a temperature."""
        return [item for item in self.drafters if item.at("rows", temperature)]


def different_settings(one: Shown, other: Shown) -> list[str]:
    """What keeps two drafters from being compared at all; see `evaluation.compare`."""
    digests = [(name, *(item.evaluate["provenance"].get(name) for item in (one, other))) for name in DIGESTS]
    return [
        *(name for name in SETTINGS if one.evaluate[name] != other.evaluate[name]),
        *(name for name, mine, theirs in digests if None not in (mine, theirs) and mine != theirs),
    ]


def page_of(bodies: Sequence[tuple[Body, Body | None]]) -> Page:
    """Pairs of an evaluate.json and a samples.json (or None), checked and named.

    A drafter goes by its name, or by its key where two reports share a name. Raises DraftsmithError if there is
    nothing to show, a key comes twice, a pair is of two keys, or a body is of another schema version.
    """
    if not bodies:
        raise DraftsmithError("no evaluation to show", expected="at least one evaluate.json")
    for evaluate, answers in bodies:
        _check_version(evaluate, "evaluate.json", expected=report.SCHEMA_VERSION)
        if not evaluate["rows"]:
            raise DraftsmithError("an evaluation without rows", where=f"evaluate.json of {evaluate['key']}")
        if answers is not None:
            _check_version(answers, "samples.json", expected=samples.SCHEMA_VERSION)
            if answers["key"] != evaluate["key"]:
                raise DraftsmithError("samples of another key", got=answers["key"], expected=evaluate["key"])
    keys = [str(evaluate["key"]) for evaluate, _ in bodies]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise DraftsmithError("a key is to be shown twice", got=twice)
    names = [str(evaluate["drafter"]["name"]) for evaluate, _ in bodies]
    labels = names if len(set(names)) == len(names) else keys
    return Page(
        tuple(
            Shown(label, slot, evaluate, answers)
            for slot, (label, (evaluate, answers)) in enumerate(zip(labels, bodies, strict=True))
        )
    )


def _check_version(body: Body, name: str, *, expected: int) -> None:
    version = body.get("schema_version")
    if version != expected:
        raise DraftsmithError(
            f"{name} is of another schema version",
            got=version,
            expected=f"{expected}; run the evaluate stage again",
            where=f"{name} of {body.get('key', 'an unnamed key')}",
        )
