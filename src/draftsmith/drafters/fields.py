"""The fields of a drafter's config.json, each asked for by name and kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draftsmith.errors import ContractError


@dataclass(frozen=True)
class Fields:
    """A config's fields; `where` names the file. Each getter raises ContractError for a field that is missing (unless
    it has a default) or of another kind."""

    body: Mapping[str, Any]
    where: str

    def given(self, name: str) -> Any:
        """The field, of any kind but null."""
        value = self.body.get(name)
        if value is None:
            got = "null" if name in self.body else "nothing"
            raise ContractError(f"drafter config without {name}", got=got, where=self.where)
        return value

    def integer(self, name: str, *, least: int, default: int | None = None) -> int:
        value = default if default is not None and name not in self.body else self.given(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self._refusal(name, value, f"an integer >= {least}")
        return value

    def number(self, name: str, *, above: float) -> float:
        value = self.given(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= above:
            raise self._refusal(name, value, f"a number > {above}")
        return float(value)

    def flag(self, name: str, *, default: bool | None = None) -> bool:
        value = default if default is not None and name not in self.body else self.given(name)
        if not isinstance(value, bool):
            raise self._refusal(name, value, "true or false")
        return value

    def choice(self, name: str, names: tuple[str, ...]) -> str:
        value = self.given(name)
        if value not in names:
            raise self._refusal(name, value, " or ".join(names))
        return str(value)

    def integers(self, name: str) -> tuple[int, ...]:
        value = self.given(name)
        if not isinstance(value, list) or any(not isinstance(item, int) or isinstance(item, bool) for item in value):
            raise self._refusal(name, value, "a list of integers")
        return tuple(value)

    def only(self, name: str) -> str:
        """The one string of a list."""
        value = self.given(name)
        if not isinstance(value, list) or len(value) != 1 or not isinstance(value[0], str):
            raise self._refusal(name, value, "a list of one name")
        return value[0]

    def _refusal(self, name: str, value: Any, expected: str) -> ContractError:
        return ContractError(name, got=repr(value), expected=expected, where=self.where)
