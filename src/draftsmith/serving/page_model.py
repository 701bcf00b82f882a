"""What the page of a serving study shows: its scenarios, measured or made up, and how each policy is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from draftsmith.errors import DraftsmithError
from draftsmith.evaluation.page_html import plot_text
from draftsmith.evaluation.page_plot import DASHES, SYMBOLS, Trace, colour

Body = Mapping[str, Any]

SCHEMA_VERSION = 1
MEASURED = "measured"
FAMILIES = {"fixed": 0, "exit": 1, "synchronous": 2, "asynchronous": 3, "threshold": 4, "none": 5}
"""Colour of a policy by its kind; an early exit counts as one of its own."""


@dataclass(frozen=True)
class Style:
    """How a policy is drawn: `slot` chooses the colour; the place in its family the marker and the dash."""

    slot: int
    place: int

    @property
    def shade(self) -> str:
        return colour(self.slot)

    @property
    def marker(self) -> str:
        return SYMBOLS[self.place % len(SYMBOLS)]

    @property
    def dash(self) -> str:
        return DASHES[self.place % len(DASHES)]


@dataclass(frozen=True, eq=False)
class Scenario:
    """One study. `profile`: the body of the profile that it ran on, if it is at hand."""

    study: Body
    profile: Body | None

    @property
    def name(self) -> str:
        return str(self.study["name"])

    @property
    def synthetic(self) -> bool:
        return bool(self.study["synthetic"])

    @property
    def label(self) -> str:
        """As the selector shows it."""
        if self.name == MEASURED:
            return "measured (synthetic)" if self.synthetic else "measured"
        return f"{'what if' if self.synthetic else 'elsewhere'}: {self.name}{' (synthetic)' if self.synthetic else ''}"

    @property
    def policies(self) -> Sequence[Body]:
        found: Sequence[Body] = self.study["policies"]
        return found

    @cached_property
    def labels(self) -> dict[str, str]:
        """Label of each policy by its name."""
        return {str(item["name"]): str(item["label"]) for item in self.policies}

    @cached_property
    def styles(self) -> dict[str, Style]:
        """How each policy is drawn, by its name."""
        counts = dict.fromkeys(FAMILIES, 0)
        found = {}
        for item in self.policies:
            family = "exit" if item["early_exit"] is not None else str(item["kind"])
            found[str(item["name"])] = Style(FAMILIES[family], counts[family])
            counts[family] += 1
        return found

    @cached_property
    def points(self) -> dict[str, Sequence[Body]]:
        """The closed loop: points of each policy, ascending users."""
        return {str(entry["policy"]): entry["points"] for entry in self.study["pareto"]}

    @property
    def loads(self) -> list[int]:
        """Users of the closed loop, ascending."""
        return [int(point["concurrency"]) for point in next(iter(self.points.values()))]

    @cached_property
    def first_shown(self) -> frozenset[str]:
        """Policies that figures open with: plain decoding, whole blocks, schedulers, and the best at some load."""
        whole = self.study["drafter"]["block_size"]
        kept = {
            str(item["name"])
            for item in self.policies
            if item["early_exit"] is None
            and (item["kind"] not in ("fixed", "threshold") or (item["parameter"] == whole and item["kind"] == "fixed"))
        }
        return frozenset(kept | {str(row["policy"]) for row in self.study["best_by_concurrency"]})

    def line(self, policy: str, *, x: Sequence[Any], y: Sequence[float | None], hover: Sequence[str]) -> Trace:
        """A line of a policy; one that a figure does not open with waits in the legend."""
        style = self.styles[policy]
        return {
            "type": "scatter",
            "mode": "lines+markers",
            "name": plot_text(self.labels[policy]),
            "visible": True if policy in self.first_shown else "legendonly",
            "x": list(x),
            "y": rounded(y),
            "line": {"color": style.shade, "width": 2, "dash": style.dash},
            "marker": {"color": style.shade, "size": 7, "symbol": style.marker},
            **hovering(hover),
        }


def scenarios_of(body: Body, *, profiles: Mapping[str, Body]) -> tuple[Scenario, ...]:
    """The study itself and its what-ifs; `profiles` by the name of the scenario.

    Raises DraftsmithError for another schema version, or two scenarios of one name.
    """
    version = body.get("schema_version")
    if version != SCHEMA_VERSION:
        raise DraftsmithError(
            "serve.json is of another schema version",
            got=version,
            expected=f"{SCHEMA_VERSION}; run the serve stage again",
            where=f"serve.json of {body.get('key', 'an unnamed key')}",
        )
    studies = [body, *body["what_if"]]
    names = [str(study["name"]) for study in studies]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DraftsmithError("two scenarios of one name", got=twice, where=f"serve.json of {body['key']}")
    return tuple(Scenario(study, profiles.get(name)) for name, study in zip(names, studies, strict=True))


def rounded(values: Sequence[float | None]) -> list[float | None]:
    """Six digits, which is more than a screen shows, to keep the page small."""
    return [None if value is None else float(f"{value:.6g}") for value in values]


def hovering(texts: Sequence[str]) -> Trace:
    """One text a point, of one line or several."""
    return {"customdata": [hover_text(text) for text in texts], "hovertemplate": "%{customdata}<extra></extra>"}


def hover_text(text: str) -> str:
    """Text for the pointer: Plotly breaks lines by a tag."""
    return plot_text(text).replace("\n", "<br>")


def short(value: float) -> str:
    """Four digits that mean something, no exponent: `13,160`, `0.0412`."""
    return f"{float(f'{value:.4g}'):,.12g}"


def users(number: float) -> str:
    """`1 user`, `2.5 users`."""
    return f"{number:.3g} user{'' if number == 1 else 's'}"


def signed(share: float | None) -> str:
    """A gain for people: `+51.0 %`."""
    return "-" if share is None else f"{100 * share:+.1f} %"
