"""The parts of the flows that need no server."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import yaml

from draftsmith.deployment_names import full_name
from flows.stage import CommandError, artifact_key, stages_of_run, stages_of_target


def test_the_line_in_dvc_names() -> None:
    names = [stage.dvc_name for stage in stages_of_run("dspark_b7-tiny", "tiny")]
    assert names == [
        "prompts",
        "answers@tiny",
        "cache@tiny",
        "verify@tiny",
        "train@dspark_b7-tiny",
        "calibrate@dspark_b7-tiny",
        "evaluate@dspark_b7-tiny",
    ]
    assert [stage.dvc_name for stage in stages_of_target("tiny")] == names[:4]


@pytest.mark.parametrize(
    ("status", "line", "user_error"),
    [
        (255, "ERROR: failed to reproduce 'train@k': failed to run: draftsmith train --key k, exited with 2", True),
        (255, "ERROR: failed to reproduce 'train@k': failed to run: draftsmith train --key k, exited with 1", False),
        (255, "ERROR: failed to reproduce 'train@k': failed to run: draftsmith train --key k, exited with -9", False),
        (2, "draftsmith: error: no params.yaml here or above", True),
        (255, "ERROR: unable to get the lock", False),
    ],
)
def test_what_the_user_has_to_mend_is_told_apart(status: int, line: str, user_error: bool) -> None:
    error = CommandError("dvc repro -s train@k", status=status, lines=["noise", line])
    assert error.user_error is user_error
    assert line in str(error)


def test_an_error_keeps_the_end_of_the_output() -> None:
    error = CommandError("dvc", status=1, lines=[*(f"line {number}" for number in range(100)), "", ""])
    assert "line 99" in str(error)
    assert "line 9\n" not in str(error)
    assert len(error.lines) == 102


@pytest.mark.parametrize(
    ("parts", "key"),
    [(("mlflow", "train", "dspark_b7-qwen3_4b"), "mlflow-train-dspark-b7-qwen3-4b"), (("A__b",), "a-b")],
)
def test_artifact_keys_are_what_prefect_takes(parts: tuple[str, ...], key: str) -> None:
    assert artifact_key(*parts) == key


def test_bare_deployment_names() -> None:
    assert full_name("train-drafter") == "train-drafter/train-drafter"
    assert full_name("a/b") == "a/b"


def test_every_deployment_is_a_flow_of_its_name() -> None:
    root = Path(__file__).resolve().parents[2]
    deployments = yaml.safe_load((root / "prefect.yaml").read_text())["deployments"]
    assert {item["name"] for item in deployments} == {"train-drafter", "build-cache", "study-drafter"}
    for item in deployments:
        file, _, name = item["entrypoint"].partition(":")
        flow = getattr(importlib.import_module(file.removesuffix(".py").replace("/", ".")), name)
        assert flow.name == item["name"]
        assert item["concurrency_limit"]["limit"] == 1
