"""The profile of an engine on a machine: what its steps cost, as measured and as schedulers use it.

`profile.json` has one; the examples that ship are synthetic. A profile may be written by hand or elsewhere: only
`schema_version` and `jagged` (or `table`) are needed, whatever else is missing costs nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from draftsmith.errors import DraftsmithError
from draftsmith.serving.cost_table import CostTable
from draftsmith.serving.profile_points import Point, PrefillPoint
from draftsmith.serving.profile_tables import (
    context_cost,
    every_number,
    monotone_table,
    prefill_cost,
    requests_costs,
    verification_by_requests,
    verification_tables,
    whole_step_table,
)
from draftsmith.serving.step_costs import ContextCost, DraftingCost, PrefillCost, StepCosts, UpkeepCost

SCHEMA_VERSION = 1
Cost = TypeVar("Cost", DraftingCost, UpkeepCost)
EXAMPLES: tuple[str, ...] = ("smooth", "tiles", "graph_limit")
"""Synthetic profiles of the shapes that are published for GPUs; nothing in them was measured."""


@dataclass(frozen=True)
class Origin:
    """What was profiled, and where. `machine` is for people; `synthetic`: nothing of it was measured."""

    key: str | None = None
    target: str | None = None
    drafter: str | None = None
    block_size: int | None = None
    created: str | None = None
    machine: Mapping[str, Any] = field(default_factory=dict)
    synthetic: bool = False
    note: str = ""


@dataclass(frozen=True, eq=False)
class Profile:
    """Costs of a step, and the points that they were made of.

    Both tables are of verification alone and have every N: `jagged` the medians as measured with straight lines of
    seconds between them, `table` with seconds that do not fall (`profile_tables`). What verification takes longer for
    more requests at equal N is in `upkeep`, beside the time outside of drafter and target.
    """

    origin: Origin
    jagged: CostTable
    table: CostTable
    points: tuple[Point, ...] = ()
    prefill: tuple[PrefillPoint, ...] = ()
    drafting: DraftingCost | None = None
    upkeep: UpkeepCost | None = None
    prefill_cost: PrefillCost | None = None
    context_cost: ContextCost | None = None

    @classmethod
    def of_points(cls, origin: Origin, *, points: Sequence[Point], prefill: Sequence[PrefillPoint]) -> Profile:
        """Raises DraftsmithError without a point of the sweep over tokens."""
        by_requests = verification_by_requests(points)
        jagged, table = verification_tables(points, by_requests=by_requests)
        drafting, upkeep = requests_costs(points, block_size=origin.block_size, by_requests=by_requests)
        return cls(
            origin,
            jagged,
            table,
            tuple(points),
            tuple(prefill),
            drafting=drafting,
            upkeep=upkeep,
            prefill_cost=prefill_cost(prefill),
            context_cost=context_cost(points),
        )

    def step_costs(self) -> StepCosts:
        """What steps cost, verification by the monotone table."""
        return StepCosts(self.table, self.drafting, self.prefill_cost, self.context_cost, self.upkeep)

    def sidecar(self) -> dict[str, Any]:
        """The table of whole steps in SGLang's form; of verification alone where there are no points."""
        return (whole_step_table(self.points) if self.points else self.table).to_sidecar()

    def to_body(self) -> dict[str, Any]:
        """JSON-ready form (schema_version 1)."""
        return {
            "schema_version": SCHEMA_VERSION,
            **asdict(self.origin),
            "points": [point.to_body() for point in self.points],
            "prefill": [point.to_body() for point in self.prefill],
            "jagged": self.jagged.to_sidecar(),
            "table": self.table.to_sidecar(),
            "drafting": None if self.drafting is None else asdict(self.drafting),
            "upkeep": None if self.upkeep is None else asdict(self.upkeep),
            "prefill_cost": None if self.prefill_cost is None else asdict(self.prefill_cost),
            "context_cost": None if self.context_cost is None else asdict(self.context_cost),
        }

    @classmethod
    def from_body(cls, body: Any, *, where: str) -> Profile:
        """A profile from its JSON form; a table that is missing is made of the other one.

        Raises DraftsmithError naming `where` for a body of another version or form.
        """
        if not isinstance(body, dict) or body.get("schema_version") != SCHEMA_VERSION:
            got = body.get("schema_version") if isinstance(body, dict) else type(body).__name__
            raise DraftsmithError(
                "not a profile of this version", got=f"schema_version {got}", expected=SCHEMA_VERSION, where=where
            )
        if body.get("jagged") is None and body.get("table") is None:
            raise DraftsmithError("a profile without a table", expected="jagged, table or both", where=where)
        try:
            given = [
                CostTable.from_sidecar(body[name], where=f"{where}: {name}")
                for name in ("jagged", "table")
                if body.get(name) is not None
            ]
            jagged = every_number(given[0])
            return cls(
                Origin(**{name: body[name] for name in Origin.__dataclass_fields__ if body.get(name) is not None}),
                jagged,
                monotone_table(jagged if body.get("table") is None else given[-1]),
                tuple(Point.from_body(item) for item in body.get("points") or ()),
                tuple(PrefillPoint.from_body(item) for item in body.get("prefill") or ()),
                drafting=_by_requests(DraftingCost, body.get("drafting")),
                upkeep=_by_requests(UpkeepCost, body.get("upkeep")),
                prefill_cost=None if body.get("prefill_cost") is None else PrefillCost(**body["prefill_cost"]),
                context_cost=None if body.get("context_cost") is None else ContextCost(**body["context_cost"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DraftsmithError("the profile cannot be read", got=repr(error), where=where) from error


def read_profile(path: Path) -> Profile:
    """A profile.json. Raises DraftsmithError naming the file if it is missing or none."""
    return Profile.from_body(_read_json(path), where=str(path))


def is_profile(path: Path) -> bool:
    """The file is a profile's, of whatever version, and no bare SPS table. Raises DraftsmithError as `read_profile`."""
    if path.suffix != ".json":
        return False
    body = _read_json(path)
    return isinstance(body, dict) and not body.keys().isdisjoint(("schema_version", "jagged", "table"))


def example_profile(name: str) -> Profile:
    """One of EXAMPLES. Raises DraftsmithError for another name."""
    if name not in EXAMPLES:
        raise DraftsmithError("no such example profile", got=name, expected=", ".join(EXAMPLES))
    file = resources.files("draftsmith.serving").joinpath("examples", f"{name}.json")
    return Profile.from_body(json.loads(file.read_text(encoding="utf-8")), where=f"example {name}")


def _by_requests(kind: type[Cost], body: Mapping[str, Any] | None) -> Cost | None:
    if body is None:
        return None
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in body.items()}
    return kind(**fields)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise DraftsmithError("the profile cannot be read", got=error.strerror, where=str(path)) from error
    except ValueError as error:
        raise DraftsmithError("the profile is not JSON", got=str(error), where=str(path)) from error
