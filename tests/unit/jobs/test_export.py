"""`draftsmith export deepspec`: a whole directory beside its contract, and what of it is not public said aloud."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner
from safetensors.torch import load_file

from draftsmith.cli import cli
from draftsmith.drafters.contract import derive_contract
from draftsmith.drafters.registry import build_drafter, drafter_config, save_drafter
from draftsmith.errors import ContractError
from draftsmith.jobs.export import export_deepspec, notes
from draftsmith.jobs.parts import weights_digest
from draftsmith.params import load_params
from draftsmith.paths import Workspace
from draftsmith.targets.families import FAMILIES
from tests.line_fixtures import DSPARK, PARAMS, TARGET
from tests.line_target import tiny_weights, write_tiny_target

LLAMA = FAMILIES["llama"]


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """A working copy with a target and an untrained drafter of DSPARK in the place of a trained one."""
    target, opened = write_tiny_target(tmp_path / "target"), Workspace(tmp_path / "copy")
    body = deepcopy(PARAMS)
    body["targets"][TARGET]["folder"] = str(target)
    opened.root.mkdir()
    opened.params.write_text(yaml.safe_dump(body))
    params = load_params(opened.params)
    row = params.drafters[params.run(DSPARK).drafter]
    drafter = build_drafter(
        drafter_config(row, target=params.target(TARGET), target_folder=target), target_folder=target
    )
    drafter.reset(seed=1)
    save_drafter(drafter, folder=opened.drafter_dir(DSPARK), dtype=torch.bfloat16, num_anchors=6)
    write_contract(opened.drafter_dir(DSPARK), digest=weights_digest(target))
    return opened


def write_contract(folder: Path, *, digest: str) -> None:
    made = derive_contract(folder)
    unknown = tuple(name for name in made.unknown if name != "target_digest")
    replace(made, target_digest=digest, unknown=unknown).write(folder)


def export(workspace: Workspace, out: Path, *, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(workspace.root)
    done = CliRunner().invoke(cli, ["export", "deepspec", "--key", DSPARK, "--out", str(out)], catch_exceptions=False)
    assert done.exit_code == 0
    return str(done.stdout)


def test_the_directory_is_whole(workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, out = workspace.drafter_dir(DSPARK), tmp_path / "out"
    told = export(workspace, out, monkeypatch=monkeypatch)
    size = (out / "model.safetensors").stat().st_size
    assert told.splitlines() == [
        f"{out}: LlamaDSparkModel, {size} bytes of weights",
        "note: LlamaDSparkModel is draftsmith's own class; no public engine loads it",
    ]
    assert {path.name for path in out.iterdir()} == {"config.json", "model.safetensors", "contract.json"}
    for name in ("contract.json", "config.json"):
        assert (out / name).read_bytes() == (own / name).read_bytes()
    body, theirs = json.loads((out / "config.json").read_text()), tiny_weights()
    assert (body["num_anchors"], body["dtype"], body["tie_word_embeddings"]) == (6, "bfloat16", False)
    whole, small = load_file(out / "model.safetensors"), load_file(own / "model.safetensors")
    assert {value.dtype for value in whole.values()} == {torch.bfloat16}
    assert torch.equal(whole.pop("embed_tokens.weight"), theirs["model.embed_tokens.weight"].bfloat16())
    assert torch.equal(whole.pop("lm_head.weight"), theirs["lm_head.weight"].bfloat16())
    assert whole.keys() == small.keys()
    assert all(torch.equal(whole[name], small[name]) for name in small)


def test_an_export_may_be_made_again(workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    export(workspace, out, monkeypatch=monkeypatch)
    first = (out / "model.safetensors").read_bytes()
    export(workspace, out, monkeypatch=monkeypatch)
    assert (out / "model.safetensors").read_bytes() == first


def test_a_drafter_of_other_weights_is_refused(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_contract(workspace.drafter_dir(DSPARK), digest="ff66")
    with pytest.raises(ContractError, match="made for another target_digest than target tiny has"):
        export(workspace, tmp_path / "out", monkeypatch=monkeypatch)
    assert not (tmp_path / "out").exists()


def test_a_folder_with_other_files_and_the_drafters_own_are_refused(workspace: Workspace, tmp_path: Path) -> None:
    own, out, target = workspace.drafter_dir(DSPARK), tmp_path / "out", tmp_path / "target"
    out.mkdir()
    (out / "model-00001-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(ContractError, match=f"holds other files: got model-00001-of-00002.safetensors.*{out}"):
        export_deepspec(own, out=out, target=target, family=LLAMA)
    with pytest.raises(ContractError, match="would overwrite the drafter it is made from"):
        export_deepspec(own, out=own.parent / ".." / "drafters" / own.name, target=target, family=LLAMA)


def test_what_is_not_public_is_noted(workspace: Workspace) -> None:
    params = load_params(workspace.params)
    row, target = params.drafters["dflash_tiny"], params.target(TARGET)
    config = drafter_config(
        row.model_copy(update={"head_norms": True}), target=target, target_folder=Path(str(target.folder))
    )
    assert notes(config) == []
    assert ["sample_from_anchor" in note for note in notes(replace(config, sample_from_anchor=False))] == [True]
    assert ["sliding layers" in note for note in notes(replace(config, windows=(4,)))] == [True]
    assert ["Qwen3MTPModel" in note for note in notes(replace(config, kind="mtp1"))] == [True]
