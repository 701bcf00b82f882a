"""Where everything of one working copy lies; the only place that composes these paths."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from draftsmith.errors import ParamsError


@dataclass(frozen=True)
class Workspace:
    """The folder that holds params.yaml, with the places of what the stages read and write."""

    root: Path

    @classmethod
    def find(cls, start: Path | None = None) -> Workspace:
        """Walk up from `start` (default: the current folder) to the first folder with a params.yaml.

        Raises ParamsError if there is none.
        """
        here = (start or Path.cwd()).resolve()
        for folder in (here, *here.parents):
            if (folder / "params.yaml").is_file():
                return cls(folder)
        raise ParamsError("no params.yaml here or above", got=here, expected="to be run inside a draftsmith repository")

    @property
    def params(self) -> Path:
        return self.root / "params.yaml"

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def store_uri(self) -> str:
        """DRAFTSMITH_STORE, or the folder `data/store` of this working copy."""
        return os.environ.get("DRAFTSMITH_STORE") or str(self.data / "store")

    @property
    def prompts_manifest(self) -> Path:
        return self.data / "prompts.json"

    def answers_manifest(self, target: str) -> Path:
        return self.data / "answers" / f"{target}.json"

    def cache_manifest(self, target: str) -> Path:
        return self.data / "cache" / f"{target}.json"

    def verify_receipt(self, target: str) -> Path:
        return self.data / "verify" / f"{target}.json"

    def target_dir(self, target: str) -> Path:
        """The Hugging Face folder of a target that was converted here."""
        return self.data / "targets" / target

    def drafter_dir(self, key: str) -> Path:
        return self.data / "drafters" / key

    def scratch_dir(self, stage: str, name: str) -> Path:
        """Working files of a running job; nothing in it counts as done."""
        return self.data / "scratch" / stage / name

    def report_dir(self, key: str) -> Path:
        return self.root / "reports" / key

    def receipt(self, stage: str, name: str) -> Path:
        """The small file in which a finished job leaves its MLflow URL and wall time for the flow that started it."""
        return self.data / "receipts" / f"{stage}-{name}.json"
