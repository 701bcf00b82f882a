"""What a user gets wrong with `draftsmith evaluate --drafter`: one message that names it, and no report."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from draftsmith.cli import cli
from draftsmith.errors import ContractError, ParamsError, PromptError, StoreError, TargetError
from draftsmith.jobs.parts import weights_digest
from tests.evaluate_fixtures import (
    DEEP,
    LAYERS,
    TEMPLATE,
    arguments,
    contract_of,
    deep_drafter,
    letter_tokenizer,
    refused,
    targets,
    with_tokenizer,
    words,
)
from tests.tiny_models import (
    VOCAB,
    save_tiny,
)

__all__ = ["arguments", "targets"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "prompts file is empty"),
        ("\n  \n", "prompts file is empty"),
        ('{"turns": ["a"]}\n{"turns": \n', r"prompts file is not JSON lines: .*prompts.jsonl:2\)"),
        ('{"turns": ["a"]}\n\n{"turns": []}\n', r"got no turns, .*prompts.jsonl:3\)"),
        ('{"id": "a"}\n', r"got needs exactly one of turns and messages.*prompts.jsonl:1\)"),
        ('{"turns": "a"}\n', r"got turns is not a list.*prompts.jsonl:1\)"),
        ('{"turns": ["a", " "]}\n', r"got a turn is empty.*prompts.jsonl:1\)"),
        ('["a"]\n', r"got not a JSON object.*prompts.jsonl:1\)"),
        ('{"turns": ["a"], "id": "x"}\n{"turns": ["b"], "id": "x"}\n', r"two prompts of one id: got 'x' on line 1 too"),
        ('{"turns": ["a"], "id": 2}\n{"turns": ["b"]}\n', r"two prompts of one id: got '2' on line 1 too"),
        ('{"turns": ["a"], "id": null}\n', r"the id of a prompt cannot be used: got None"),
        ('{"turns": ["a"], "id": "\\ud800"}\n', r"the id of a prompt cannot be used"),
    ],
)
def test_prompts_that_cannot_be_used(text: str, message: str, arguments: dict[str, str]) -> None:
    Path(arguments["prompts"]).write_text(text)
    found = refused(arguments, PromptError)
    assert re.search(message, found), found
    assert arguments["prompts"] in found


def test_prompts_that_cannot_be_read(arguments: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    given = {**arguments, "prompts": str(path)}
    assert refused(given, PromptError) == f"prompts file is missing: got {path}, expected a JSON lines file (--prompts)"
    path.write_bytes(b'{"turns": ["a\xff"]}\n')
    assert refused(given, PromptError) == f"prompts file is not UTF-8: got byte 13 of {path} (--prompts)"
    path.unlink()
    path.mkdir()
    assert refused(given, PromptError).startswith("prompts file cannot be read: Is a directory")


def test_a_report_that_cannot_be_written(arguments: dict[str, str], tmp_path: Path) -> None:
    """Told before anything is read: the drafter is not even there."""
    given = {**arguments, "drafter": str(tmp_path / "nowhere"), "out": str(tmp_path / "no" / "out.json")}
    message = (
        f"the report cannot be written: got no folder {tmp_path / 'no'}, expected a file in a folder that is there"
    )
    assert refused(given, StoreError) == f"{message} (--out)"
    with pytest.raises(StoreError, match="is a folder"):
        CliRunner().invoke(cli, words({**given, "out": str(tmp_path)}), catch_exceptions=False)


def test_folders_that_hold_no_drafter(arguments: dict[str, str], tmp_path: Path) -> None:
    message = refused({**arguments, "drafter": str(tmp_path / "nowhere")}, ContractError)
    assert message.startswith(f"the drafter's folder is missing: got {tmp_path / 'nowhere'}, expected a folder with ")
    empty = tmp_path / "empty"
    empty.mkdir()
    message = refused({**arguments, "drafter": str(empty)}, ContractError)
    assert message.startswith(f"no trained drafter in {empty}: got no config.json, expected a config.json and ")
    folder = Path(arguments["drafter"])
    (folder / "model.safetensors").unlink()
    assert str(folder) in refused(arguments, ContractError)
    (folder / "contract.json").write_text("{")
    assert refused(arguments, ContractError).startswith("contract cannot be read: ")


def other_model_type(folder: Path) -> None:
    body = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**body, "model_type": "gpt2"}))


TARGET_DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (lambda folder: folder.rename(folder.parent / "moved"), "the target's folder is missing: got "),
    "no config": (lambda folder: (folder / "config.json").unlink(), "the target's folder is incomplete: got "),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "the target's folder is incomplete: got "),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "the target's folder is incomplete: got "),
    "broken config": (lambda folder: (folder / "config.json").write_text("{"), "the target's config cannot be read: "),
    "config of nothing": (lambda folder: (folder / "config.json").write_text("{}"), "the target's config cannot be "),
    "other model type": (other_model_type, "no such target family: got a model of type gpt2, expected one of llama"),
}


@pytest.mark.parametrize("damage", TARGET_DAMAGES)
def test_folders_that_hold_no_target(damage: str, arguments: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "target"
    shutil.copytree(arguments["target"], folder)
    TARGET_DAMAGES[damage][0](folder)
    message = refused({**arguments, "target": str(folder)}, TargetError)
    assert message.startswith(TARGET_DAMAGES[damage][1])
    assert str(folder) in message


def changed_target(arguments: dict[str, str], folder: Path, **changes: Any) -> dict[str, str]:
    """The same run on another Llama target: other weights, unless `changes` are of its config."""
    other = save_tiny(folder, family="llama", seed=8, **{**DEEP["llama"], **changes})
    return {**arguments, "target": str(with_tokenizer(other))}


def test_another_target_is_refused_by_the_first_field_that_differs(
    arguments: dict[str, str], targets: dict[str, Path], tmp_path: Path
) -> None:
    for changes, field, got, expected in (
        ({"hidden_size": 64, "vocab_size": 64}, "hidden_size", "32", "64"),
        ({"num_hidden_layers": 8}, "num_layers", str(LAYERS), "8"),
        ({"vocab_size": 64}, "vocab_size", str(VOCAB), "64"),
    ):
        given = changed_target(arguments, tmp_path / field, **changes)
        message = f"the drafter was made for another {field} than the target in {given['target']} has: got {got}, "
        assert refused(given, ContractError) == f"{message}expected {expected} (contract.json)"
    given = changed_target(arguments, tmp_path / "weights")
    digests = [weights_digest(Path(folder)) for folder in (arguments["target"], given["target"])]
    message = f"the drafter was made for another target_digest than the target in {given['target']} has: "
    assert refused(given, ContractError) == f"{message}got {digests[0]}, expected {digests[1]} (contract.json)"
    message = refused({**arguments, "target": str(targets["gemma4"])}, ContractError)
    assert "made for another family than" in message


def test_another_tokenizer_and_another_template_are_refused_by_name(arguments: dict[str, str], tmp_path: Path) -> None:
    for field, tokenizer in (
        ("tokenizer_digest", letter_tokenizer(unknown="!")),
        ("template_digest", letter_tokenizer(TEMPLATE.replace("<|sys|>", "<|user|>"))),
    ):
        folder = tmp_path / field
        shutil.copytree(arguments["target"], folder)
        tokenizer.save_pretrained(str(folder))
        assert f"made for another {field} than" in refused({**arguments, "target": str(folder)}, ContractError)


@pytest.mark.parametrize(
    ("field", "value"),
    [("capture_layers", (0, 1, 2, 3, 5)), ("block_size", 5), ("sample_from_anchor", False), ("mask_token_id", 7)],
)
def test_a_config_that_is_not_the_contracts_is_refused_by_name(
    field: str, value: Any, arguments: dict[str, str], targets: dict[str, Path]
) -> None:
    drafter = deep_drafter("dspark", targets["llama"])
    contract_of(drafter, targets["llama"], **{field: value}).write(Path(arguments["drafter"]))
    assert f"made for another {field} than the config.json beside it has" in refused(arguments, ContractError)


def usage(*given: str) -> Result:
    return CliRunner().invoke(cli, ["evaluate", *given])


def test_both_forms_of_the_command_at_once_and_none(arguments: dict[str, str]) -> None:
    found = usage("--key", "k", "--drafter", "d", "--seed", "0")
    assert found.exit_code == 2
    assert "--key takes its settings from params.yaml and goes without --drafter, --seed" in found.output
    found = usage("--drafter", "d", "--target", "t")
    assert found.exit_code == 2
    assert "either --key, or --drafter, --target, --prompts and --out: no --prompts, --out" in found.output
    found = usage()
    assert found.exit_code == 2
    assert "no --drafter, --target, --prompts, --out" in found.output
    for name, value in (("temperature", "-1"), ("max-new-tokens", "0"), ("batch-size", "0"), ("dtype", "int8")):
        found = CliRunner().invoke(cli, words({**arguments, name: value}))
        assert found.exit_code == 2
        assert f"--{name}" in found.output
    for value in ("nan", "inf"):
        assert "temperature" in refused({**arguments, "temperature": value}, ParamsError)
