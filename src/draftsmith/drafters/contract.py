"""The contract between a drafter and what it was made for; checked wherever a drafter meets a target or a cache."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from draftsmith.errors import ContractError
from draftsmith.manifest import write_json

CONTRACT_NAME = "contract.json"
CAPTURE_CONVENTION = "output of decoder layer, -1 embedding"


@dataclass(frozen=True)
class Contract:
    """What must agree: the target and its text, what was captured, how blocks are read, what is shared."""

    target: str
    target_digest: str
    tokenizer_digest: str
    capture_convention: str
    capture_layers: tuple[int, ...]
    block_size: int
    sample_from_anchor: bool
    mask_token_id: int
    rope: dict[str, Any]
    logit_softcap: float | None
    embedding_scale: float
    shared: tuple[str, ...]
    data_digest: str
    cache_digest: str
    params_digest: str

    def write(self, folder: Path) -> None:
        write_json(folder / CONTRACT_NAME, asdict(self))

    @classmethod
    def read(cls, folder: Path) -> Contract:
        """Raises ContractError if the file is missing or of another form."""
        path = folder / CONTRACT_NAME
        try:
            body = json.loads(path.read_text())
            body["capture_layers"], body["shared"] = tuple(body["capture_layers"]), tuple(body["shared"])
            return cls(**body)
        except FileNotFoundError:
            raise ContractError(
                f"no trained drafter in {folder}", expected=f"`draftsmith train --key {folder.name}` first"
            ) from None
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ContractError(f"contract cannot be read: {error}", where=str(path)) from None

    def check(self, expected: dict[str, Any], *, meets: str) -> None:
        """Compare the fields in `expected` in order; raises ContractError that names the first to differ."""
        own = asdict(self)
        for field in fields(self):
            if field.name in expected and own[field.name] != expected[field.name]:
                raise ContractError(
                    f"the drafter was made for another {field.name} than {meets} has",
                    got=str(own[field.name]),
                    expected=str(expected[field.name]),
                    where=CONTRACT_NAME,
                )
