"""A working copy with two tiny drafters of one tiny target and benchmarks of its own, to be evaluated in seconds."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftsmith.evaluation.cells import DecodedCell
from draftsmith.jobs.evaluate_cells import Decoder, decode_missing, planned_evaluation
from draftsmith.jobs.stores import workspace_store
from draftsmith.params import Params, parse_params
from draftsmith.paths import Workspace
from tests.evaluate_fixtures import CAPTURED, DEEP, LAYERS, save, with_tokenizer
from tests.tiny_models import drafter_row, save_tiny, target_row

__all__ = ["Evaluation", "evaluation", "evaluation_source"]

DSPARK, DFLASH = "dspark-tiny", "dflash-tiny"
# File of a benchmark's folder -> the user's turns of its prompts.
PROMPTS: dict[str, list[list[str]]] = {
    "gsm8k.jsonl": [[f"what is {number} + {3 * number}?"] for number in range(1, 8)],
    "mt-bench.jsonl": [
        ["name three rivers.", "and one lake?"],
        ["say abc", "again", "and once more"],
        ["why is the sky blue?", "is it at night?"],
    ],
}
EVALUATE: dict[str, Any] = {
    "benchmarks": [{"name": "gsm8k", "cap": 5}, {"name": "mt_bench", "cap": 3}],
    "temperatures": [0.0, 1.0],
    "batch_size": 4,
    "max_new_tokens": 14,
    "folder": "benchmarks",
    "cell_prompts": 2,
    "num_samples": 1,
    "seed": 6,
}
NUM_CELLS = 2 * (3 + 2)  # at two temperatures: five prompts of one benchmark and three of the other, by twos
NUM_ANSWERS = 2 * (5 + 7)
OF_THE_RUN = ("machine", "provenance", "speed")
OF_THE_CLOCK = ("batch_size", "tokens_per_s", "plain_tokens_per_s", "speedup")


@dataclass(frozen=True)
class Evaluation:
    """The working copy."""

    root: Path

    @property
    def workspace(self) -> Workspace:
        return Workspace(self.root)

    @property
    def store(self) -> Path:
        return self.root / "data" / "store"

    def params(self, **evaluate: Any) -> Params:
        """params.yaml, with fields of its `evaluate` laid over."""
        body = yaml.safe_load(self.workspace.params.read_text())
        return parse_params({**body, "evaluate": {**body["evaluate"], **evaluate}})

    def edit_params(self, change: Callable[[dict[str, Any]], object]) -> None:
        """Change params.yaml in place: `change` gets the parsed document."""
        body = yaml.safe_load(self.workspace.params.read_text())
        change(body)
        self.workspace.params.write_text(yaml.safe_dump(body, sort_keys=False))

    def report(self, key: str = DSPARK, name: str = "evaluate") -> dict[str, Any]:
        return dict(json.loads((self.workspace.report_dir(key) / f"{name}.json").read_text()))

    def cells(self, stem: str = "") -> dict[str, int]:
        """Decoded cells whose prefix begins with `stem`: path below `evaluate/` -> mtime in ns."""
        folder = self.store / "evaluate"
        found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.parquet")}
        return {name: path.stat().st_mtime_ns for name, path in sorted(found.items()) if name.startswith(stem)}


def counts(body: dict[str, Any]) -> dict[str, Any]:
    """A report without clocks, machine and provenance: what no batch size and no interruption may change."""
    kept = {name: value for name, value in copy.deepcopy(body).items() if name not in OF_THE_RUN}
    for row in (*kept["rows"], *kept["averages"]):
        for name in OF_THE_CLOCK:
            row.pop(name, None)
    return kept


def decode(evaluation: Evaluation, key: str = DSPARK, *, part: tuple[int, int] | None = None, **evaluate: Any) -> int:
    """Decode what is missing; returns how many answers were told as found or made."""
    planned, told = planned_evaluation(evaluation.workspace, evaluation.params(**evaluate), key), []
    store = workspace_store(evaluation.workspace)
    decode_missing(store, planned, part=part, decoder=Decoder(planned), on_answers=told.append)
    return sum(told)


def watch(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(mode, cell) of everything that is decoded from now on."""
    seen, real = [], Decoder.decode

    def watched(self: Decoder, cell: Any, mode: Any, **rest: Any) -> DecodedCell:
        seen.append((mode, cell.name))
        return real(self, cell, mode, **rest)

    monkeypatch.setattr(Decoder, "decode", watched)
    return seen


def make_evaluation(root: Path, *, target: Path) -> Evaluation:
    """Both drafters start as the target's own last layers; nothing is evaluated."""
    row = target_row(target, capture_layers=CAPTURED, num_layers=LAYERS, dtype="float32")
    for key, kind in ((DSPARK, "dspark"), (DFLASH, "dflash")):
        save(kind, target, root / "data" / "drafters" / key, revision=None)
    params = yaml.safe_load((Path(__file__).parents[1] / "params.yaml").read_text())
    kinds = ("dspark", "dflash")
    params |= {
        "active_targets": ["tiny"],
        "runs": {f"{kind}-tiny": {"drafter": kind, "target": "tiny"} for kind in kinds},
        "targets": {"tiny": json.loads(row.model_dump_json())},
        "drafters": {kind: json.loads(drafter_row(kind).model_dump_json()) for kind in kinds},
        "evaluate": EVALUATE,
    }
    params.pop("study", None)
    (root / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False))
    (root / "benchmarks").mkdir()
    for name, prompts in PROMPTS.items():
        lines = [json.dumps({"turns": turns}) + "\n" for turns in prompts]
        (root / "benchmarks" / name).write_text("".join(lines))
    return Evaluation(root)


@pytest.fixture(scope="session")
def evaluation_source(tmp_path_factory: pytest.TempPathFactory) -> Evaluation:
    """Made once; tests take a copy. Weights are small enough for blocks of every accepted length, 0 to K."""
    folder = tmp_path_factory.mktemp("evaluation")
    target = with_tokenizer(save_tiny(folder, family="llama", seed=5, std=0.1, **DEEP["llama"]))
    return make_evaluation(folder / "copy", target=target)


@pytest.fixture
def evaluation(
    evaluation_source: Evaluation,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Evaluation:
    """A fresh working copy; all of a test session share one MLflow database."""
    monkeypatch.delenv("DRAFTSMITH_STORE", raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path_factory.getbasetemp() / 'evaluate.db'}")
    shutil.copytree(evaluation_source.root, tmp_path / "copy")
    return Evaluation(tmp_path / "copy")
