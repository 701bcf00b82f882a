"""Wherever a drafter meets a target, a cache or a checkpoint, what does not fit is refused by the name of a field."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.cache.reader import CacheReader
from draftsmith.drafters.contract import CONTRACT_NAME, Contract
from draftsmith.drafters.registry import drafter_config
from draftsmith.errors import ContractError
from draftsmith.jobs.fidelity import check_made_here
from draftsmith.jobs.parts import contract_facts, open_drafter, open_target, target_folder, trained_with
from draftsmith.jobs.stores import cache_manifest, workspace_store
from draftsmith.jobs.train_data import cache_digest, check_arrays
from draftsmith.jobs.train_session import Session
from draftsmith.params import Drafter, load_params
from draftsmith.targets.fetch import load_chat_format
from tests.line_fixtures import DSPARK, TARGET, Line, prepared_line, tiny_target, trained_line
from tests.line_target import TEMPLATE

__all__ = ["prepared_line", "tiny_target", "trained_line"]

CHANGED_TEMPLATE = TEMPLATE.replace("<|assistant|>{{", "<|assistant|> {{")


@pytest.fixture
def line(trained_line: Line, tiny_target: Path, tmp_path: Path) -> Line:
    """A copy of the trained line whose target's folder is its own, free to be changed."""
    line = trained_line.copied(tmp_path / "line")
    shutil.copytree(tiny_target, tmp_path / "target")
    line.edit_params(lambda body: body["targets"][TARGET].update(folder=str(tmp_path / "target")))
    return line


def target_dir(line: Line) -> Path:
    return line.root.parent / "target"


def change_weights(line: Line) -> None:
    path = target_dir(line) / "model.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], 1.25)
    save_file(weights, path, metadata={"format": "pt"})


def change_template(line: Line) -> None:
    path = target_dir(line) / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": CHANGED_TEMPLATE}))


def change_tokenizer(line: Line) -> None:
    """The same ids for every text, but not the same tokenizer."""
    path = target_dir(line) / "tokenizer.json"
    body = json.loads(path.read_text())
    body["model"]["dropout"] = 0.0
    path.write_text(json.dumps(body))


def change_row(**fields: Any) -> Callable[[Line], None]:
    return lambda line: line.edit_params(lambda body: body["targets"][TARGET].update(fields))


def change_drafter(**fields: Any) -> Callable[[Line], None]:
    return lambda line: line.edit_params(lambda body: body["drafters"]["dspark_tiny"].update(fields))


CHANGES: dict[str, Callable[[Line], None]] = {
    "target_digest": change_weights,
    "tokenizer_digest": change_tokenizer,
    "template_digest": change_template,
    "system_prompt": change_row(system_prompt="Be brief."),
    "capture_layers": change_row(capture_layers=[0, 1]),
    "mask_token_id": change_row(mask_token_id=3),
    "kind": change_drafter(kind="dflash", sequential=None, confidence=False, loss={"ce": 1.0}),
    "block_size": change_drafter(block_size=4),
    "sample_from_anchor": change_drafter(sample_from_anchor=False),
}


ROW_FIELDS = ("kind", "block_size", "sample_from_anchor", "mask_token_id")


def test_the_contract_of_a_trained_drafter(line: Line) -> None:
    """Everything in it, against what lies here; the tiny target's sizes are those of line_fixtures."""
    body = json.loads((line.workspace.drafter_dir(DSPARK) / CONTRACT_NAME).read_text())
    manifest, params = line.manifest("cache"), load_params(line.workspace.params)
    chat = load_chat_format(target_dir(line))
    assert body == {
        "schema_version": 1,
        "target": TARGET,
        "revision": None,
        "family": "llama",
        "hidden_size": 64,
        "num_layers": 4,
        "vocab_size": 320,
        "target_digest": manifest.facts["target_digest"],
        "tokenizer_digest": chat.tokenizer_digest,
        "template_digest": chat.template_digest,
        "system_prompt": None,
        "capture_convention": "output of decoder layer, -1 embedding",
        "capture_layers": [0, 2],
        "kind": "dspark",
        "block_size": 3,
        "sample_from_anchor": True,
        "mask_token_id": 4,
        "rope": {"rope_type": "default", "rope_theta": 10000.0},
        "logit_softcap": None,
        "embedding_scale": 1.0,
        "frozen": ["embed_tokens", "lm_head"],
        "shared": ["embed_tokens", "lm_head"],
        "new": ["confidence_head", "fc", "hidden_norm", "layers", "markov_head", "norm"],
        "data_digest": line.manifest("answers").digest,
        "cache_digest": manifest.digest,
        "params": trained_with(params, DSPARK),
        "unknown": [],
    }
    assert body["params"]["train"]["steps"] == 10
    assert "checkpoint_every" not in body["params"]["train"]
    assert body["params"]["drafter"]["sequential"] == {"kind": "markov", "rank": 8}


@pytest.mark.parametrize("field", CHANGES)
def test_a_drafter_opened_for_decoding(field: str, line: Line) -> None:
    """As calibrate, evaluate, generate and the fidelity job open it."""
    CHANGES[field](line)
    params = load_params(line.workspace.params)
    opened = open_target(line.workspace, params, TARGET)
    with pytest.raises(ContractError) as caught:
        open_drafter(line.workspace, params, DSPARK, opened=opened)
    meets = "drafters.dspark_tiny of params.yaml" if field in ROW_FIELDS else "target tiny"
    assert caught.value.what == f"the drafter was made for another {field} than {meets} has"
    assert caught.value.got != caught.value.expected


@pytest.mark.parametrize(
    "command",
    [("calibrate",), ("evaluate",), ("generate", "Hello?"), ("export", "deepspec", "--out", "whole")],
    ids=" ".join,
)
def test_each_command_that_opens_a_drafter(command: tuple[str, ...], line: Line) -> None:
    change_template(line)
    done = line.tried(*command, "--key", DSPARK)
    assert done.returncode == 2
    message = "draftsmith: error: the drafter was made for another template_digest than target tiny has: got "
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (line.workspace.report_dir(DSPARK) / f"{command[0]}.json").exists()
    assert not (line.root / "whole").exists()


TRAIN_CHANGES = {
    "target_digest": "target_digest",
    "tokenizer_digest": "tokenizer_digest (of tokenizer, template and end-of-text ids)",
    "template_digest": "tokenizer_digest (of tokenizer, template and end-of-text ids)",
    "capture_layers": "capture_layers",
}


@pytest.mark.parametrize("field", TRAIN_CHANGES)
def test_training_from_a_cache_of_another_target(field: str, line: Line) -> None:
    CHANGES[field](line)
    before = (line.workspace.drafter_dir(DSPARK) / CONTRACT_NAME).read_bytes()
    done = line.tried("train", "--key", DSPARK)
    assert done.returncode == 2
    prefix = line.manifest("cache").prefix
    message = f"draftsmith: error: the cache {prefix} was made with another {TRAIN_CHANGES[field]}: got "
    assert message in done.stderr
    assert f"(dvc repro cache@{TARGET})" in done.stderr
    assert (line.workspace.drafter_dir(DSPARK) / CONTRACT_NAME).read_bytes() == before


def test_training_from_a_cache_that_lacks_what_the_drafter_reads(line: Line) -> None:
    """An MTP drafter reads every last hidden state; other layers, and other sizes."""
    params = load_params(line.workspace.params)
    place, manifest = target_folder(line.workspace, params, TARGET), line.manifest("cache")
    spec = CacheReader(workspace_store(line.workspace), manifest).spec
    row = params.drafters["dspark_tiny"]
    config = drafter_config(row, target=place.row, target_folder=place.folder)

    def refusal(spec: Any, *, reads_last_hidden: bool) -> str:
        with pytest.raises(ContractError) as caught:
            check_arrays(spec, config, reads_last_hidden=reads_last_hidden, prefix=manifest.prefix, target=TARGET)
        return str(caught.value)

    head, tail = f"the cache {manifest.prefix} was made with another ", f" (dvc repro cache@{TARGET})"
    assert refusal(spec, reads_last_hidden=True) == f"{head}last_hidden: got labels, expected all{tail}"
    fewer, wider = replace(spec, num_layers=1), replace(spec, hidden_size=128)
    message = f"{head}number of capture_layers: got 1, expected 2{tail}"
    assert refusal(fewer, reads_last_hidden=False) == message
    assert refusal(wider, reads_last_hidden=False) == f"{head}hidden_size: got 128, expected 64{tail}"
    check_arrays(spec, config, reads_last_hidden=False, prefix=manifest.prefix, target=TARGET)


def test_the_fidelity_job_meets_a_drafter_of_another_cache(line: Line) -> None:
    params, manifest = load_params(line.workspace.params), line.manifest("cache")
    folder = line.workspace.drafter_dir(DSPARK)
    check_made_here(line.workspace, params, DSPARK)
    made = Contract.read(folder)
    assert made.cache_digest == cache_digest(cache_manifest(line.workspace, TARGET))
    other = {**trained_with(params, DSPARK), "train": {**trained_with(params, DSPARK)["train"], "lr": 0.5}}
    for changes, field in (
        ({"data_digest": "aa"}, "data_digest"),
        ({"cache_digest": "aa"}, "cache_digest"),
        ({"params": other}, r"params\.train\.lr"),
    ):
        replace(made, **changes).write(folder)  # type: ignore[arg-type]
        message = f"another {field} than the fidelity job, which measures {manifest.prefix}, has: got"
        with pytest.raises(ContractError, match=message):
            check_made_here(line.workspace, params, DSPARK)


def test_a_checkpoint_of_another_run(line: Line) -> None:
    """Its prefix in the store says the same; this is for a checkpoint that was put there by hand."""
    params = load_params(line.workspace.params)
    made = Contract.read(line.workspace.drafter_dir(DSPARK))
    other = replace(made, capture_layers=(0, 1))
    state = {"contract": other.body(), "curve": [], "validations": [], "counts": {}, "trained_s": 0.0, "run_id": "r"}
    engine = SimpleNamespace(sum=lambda values: values, load=lambda folder, tag: state, rank=0)
    session = Session(
        line.workspace, params, DSPARK, recipe=params.train_of(DSPARK), contract=made, feed=SimpleNamespace(),  # type: ignore[arg-type]
        engine=engine, checkpoints=SimpleNamespace(prefix="train/x-1234"), folder=Path(), fetched=4,  # type: ignore[arg-type]
    )  # fmt: skip
    place = r"\(checkpoint step-000004 in train/x-1234\)"
    message = rf"another capture_layers than this run has: got \[0, 1\], expected \[0, 2\] {place}"
    with pytest.raises(ContractError, match=message):
        session._resume()
    state["contract"] = made.body()
    assert session._resume() == (4, "r")


def test_a_row_says_what_a_contract_says_of_it(line: Line) -> None:
    """Hub and package targets are named by their source and its revision."""
    params = load_params(line.workspace.params)
    place = target_folder(line.workspace, params, TARGET)
    chat = load_chat_format(place.folder)
    row = place.row.model_copy(update={"folder": None, "hf_id": "someone/model", "revision": "0" * 40})
    facts = contract_facts(replace(place, row=row), chat)
    assert (facts["target"], facts["revision"]) == ("someone/model", "0" * 40)
    row = place.row.model_copy(update={"folder": None, "package": "click"})
    facts = contract_facts(replace(place, row=row), chat)
    assert facts["target"] == "click"
    assert facts["revision"][0].isdigit()
    assert isinstance(params.drafters["dspark_tiny"], Drafter)
