"""The profile job on tiny models, and what it understands of profiles and tables from elsewhere."""

from __future__ import annotations

import contextlib
import csv
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from draftsmith import cli_profile
from draftsmith.errors import DraftsmithError
from draftsmith.jobs import profile as job
from draftsmith.jobs.parts import OpenTarget, TargetFolder
from draftsmith.params import Params, parse_params
from draftsmith.paths import Workspace
from draftsmith.serving.profile import read_profile
from draftsmith.serving.sidecars import check_sps
from tests.tiny_models import random_ids, target_row, tiny_drafter, tiny_folders, tiny_target

__all__ = ["tiny_folders"]
REPOSITORY = Path(__file__).resolve().parents[3]
KEY = "dspark_b7_2l-smollm2_135m"
SMALL = {"num_requests": [1, 3], "context_tokens": [8, 24], "repeats": 3, "warmup": 1}
TABLE = {"sample_batch_tokens": [1, 2, 4], "sample_steps_per_sec": [2.0, 1.0, 1.5]}


class Tracked:
    """What an MLflow run would have got."""

    def __init__(self) -> None:
        self.artifacts: list[str] = []
        self.metrics: dict[tuple[str, int], float] = {}

    def log_metrics(self, values: dict[str, float], *, step: int) -> None:
        self.metrics |= {(name, step): value for name, value in values.items()}

    def log_json(self, value: object, path: str) -> None:
        self.artifacts.append(path)

    log_text = log_figure = log_json


def params_with(**profile: Any) -> Params:
    raw = yaml.safe_load((REPOSITORY / "params.yaml").read_text())
    return parse_params({**raw, "profile": {**SMALL, **profile}})


@pytest.fixture
def opened(request: pytest.FixtureRequest, tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Tracked:
    """A tiny target and a drafter of the kind asked for, in place of those of a working copy."""
    folder, tracked = tiny_folders["llama"], Tracked()
    drafter = tiny_drafter(getattr(request, "param", "dspark"), folder, seed=3, block_size=3)
    prompts = [SimpleNamespace(turns=("ask",), ids=random_ids(length, seed=length)) for length in (5, 30)]
    chat: Any = SimpleNamespace(prompt_ids=lambda turns, _, **__: random_ids(len(turns) + 9, seed=1))
    place = TargetFolder("tiny", target_row(folder, dtype="float32"), folder, "0")

    @contextlib.contextmanager
    def stage_run(*_: Any, **__: Any) -> Iterator[Tracked]:
        yield tracked

    for name, value in {
        "Manifest": SimpleNamespace(read=lambda *_: SimpleNamespace(digest="d" * 64)),
        "workspace_store": lambda _: None,
        "stored": lambda *_, **__: b"",
        "decode_prompts": lambda _: prompts,
        "open_target": lambda *_: OpenTarget(place, tiny_target(folder), chat),
        "open_drafter": lambda *_, **__: drafter,
        "stage_run": stage_run,
    }.items():
        monkeypatch.setattr(job, name, value)
    return tracked


@pytest.mark.parametrize("opened", ["dspark", "dflash"], indirect=True)
def test_everything_is_written_of_the_real_engine(opened: Tracked, tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    path = job.run(workspace, params_with(), KEY)
    assert path == workspace.report_dir(KEY) / "profile.json"
    found = read_profile(path)
    assert (found.origin.key, found.origin.block_size, found.origin.synthetic) == (KEY, 3, False)
    assert found.origin.machine["dtype"] == "float32"
    assert found.origin.note == ""
    assert found.table.batch_tokens.tolist() == list(range(1, 13))
    assert (found.table.steps_per_s[1:] <= found.table.steps_per_s[:-1]).all()
    assert {point.num_steps for point in found.points if point.sweep == "tokens"} == {3}
    costs = found.step_costs()
    assert costs.drafting is not None
    assert costs.drafting.num_requests == (1, 3)
    assert costs.prefill is not None
    assert costs.context is not None
    assert 8 < costs.context.profiled_tokens < 24
    sidecar = json.loads((path.parent / "sps.json").read_text())
    check_sps(sidecar, where="sps.json")
    assert len(sidecar) == 3
    with (path.parent / "profile.csv").open() as stream:
        assert len(list(csv.DictReader(stream))) == len(found.points)
    assert (path.parent / "profile.png").read_bytes().startswith(b"\x89PNG")
    assert opened.artifacts == ["profile.csv", "profile.png", "sps.json", "profile.json"]
    assert opened.metrics["verify_ms/monotone", 12] == pytest.approx(1e3 / found.table.steps_per_s[-1])
    assert {name for name, _ in opened.metrics} >= {"draft_ms", "upkeep_ms", "prefill_tokens_per_s", "rises"}


def test_contexts_beyond_the_targets_positions_are_refused(opened: Tracked, tmp_path: Path) -> None:
    """Behind 480: blocks of 4 tokens in 3 steps of each of 3 rounds, in a warm-up and in the step of the prefill."""
    with pytest.raises(DraftsmithError, match=r"positions of target tiny: got 524, expected <= 512.*context_tokens"):
        job.run(Workspace(tmp_path), params_with(context_tokens=[8, 480]), KEY)


@pytest.mark.usefixtures("opened")
def test_a_spent_budget_stands_in_the_note(tmp_path: Path) -> None:
    path = job.run(Workspace(tmp_path), params_with(repeats=5, budget_s=1e-6), KEY)
    assert read_profile(path).origin.note.startswith("3 of 5 rounds were measured")


def test_an_example_is_described() -> None:
    text = "\n".join(job.describe("tiles"))
    assert "(synthetic)" in text
    assert "Synthetic: nothing of this was measured." in text
    assert "verification: 2048 points up to 2048 tokens" in text


def test_a_csv_table_becomes_sglangs(tmp_path: Path) -> None:
    """Rates 2, 1, 1.5 at 1, 2, 4: seconds of 1 and 2/3 are a pool of 5/6 from 2 on."""
    table = tmp_path / "a100.csv"
    table.write_text("batch_tokens,steps_per_s,note\n1,2,\n2,1,\n4,1.5,odd\n")
    lines = list(job.describe(str(table), out=tmp_path / "sps.json"))
    assert lines[0] == "verification: 3 points up to 4 tokens, meant for 4"
    assert lines[-1] == f"written: {tmp_path / 'sps.json'}"
    found = json.loads((tmp_path / "sps.json").read_text())
    assert found["sample_batch_tokens"] == [1, 2, 3, 4]
    assert found["sample_steps_per_sec"] == pytest.approx([2, 1.2, 1.2, 1.2])


def test_a_profile_of_another_version_is_no_table(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps({"schema_version": 9, "jagged": TABLE}))
    with pytest.raises(DraftsmithError, match="not a profile of this version"):
        list(job.describe(str(path)))


def test_a_table_that_sglang_takes_for_none_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps({"sample_batch_tokens": [1], "sample_steps_per_sec": [1.0]}))
    with pytest.raises(DraftsmithError, match="SGLang takes a table of so few probes for none"):
        list(job.describe(str(path), out=tmp_path / "sps.json"))
    assert not (tmp_path / "sps.json").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "either --key or --check"),
        (["--key", KEY, "--check", "tiles"], "either --key or --check"),
        (["--key", KEY, "--out", "x.json"], "--out goes with --check"),
    ],
)
def test_usage(arguments: list[str], told: str) -> None:
    found = CliRunner().invoke(cli_profile.profile, arguments)
    assert found.exit_code == 2
    assert told in found.output


def test_check_prints_what_was_understood(tmp_path: Path) -> None:
    path = tmp_path / "sps.json"
    path.write_text(json.dumps(TABLE))
    found = CliRunner().invoke(cli_profile.profile, ["--check", str(path)])
    assert found.exit_code == 0
    assert found.output == "\n".join(job.describe(str(path))) + "\n"
