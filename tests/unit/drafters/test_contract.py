"""The contract file: what is written is read back, what differs is named, and what a foreign config says is derived."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.drafters.contract import (
    CAPTURE_CONVENTION,
    CONTRACT_NAME,
    SHARED,
    Contract,
    derive_contract,
    new_parts,
    open_contract,
    target_facts,
)
from draftsmith.drafters.registry import save_drafter
from draftsmith.errors import ContractError
from draftsmith.targets.base import read_config
from draftsmith.targets.families import FAMILIES
from tests.tiny_models import CAPTURED, HIDDEN, LAYERS, MASK_TOKEN, VOCAB, tiny_drafter, tiny_folders

__all__ = ["tiny_folders"]

CONTRACT = Contract(
    target="toy/toy",
    revision="0a1b",
    family="llama",
    hidden_size=HIDDEN,
    num_layers=LAYERS,
    vocab_size=VOCAB,
    target_digest="aa11",
    tokenizer_digest="bb22",
    template_digest="bb33",
    system_prompt=None,
    capture_convention=CAPTURE_CONVENTION,
    capture_layers=CAPTURED,
    kind="dspark",
    block_size=4,
    sample_from_anchor=True,
    mask_token_id=MASK_TOKEN,
    rope={"rope_type": "default", "rope_theta": 10000.0},
    logit_softcap=None,
    embedding_scale=1.0,
    frozen=SHARED,
    shared=SHARED,
    new=("fc", "hidden_norm", "layers", "norm"),
    data_digest="cc33",
    cache_digest="dd44",
    params={"drafter": {"kind": "dspark"}, "train": {"steps": 10, "lr": 0.001}},
)
# Field -> another value of it.
OTHERS: dict[str, Any] = {
    "target": "toy/other",
    "revision": "0a1c",
    "family": "qwen3",
    "hidden_size": 64,
    "num_layers": 6,
    "vocab_size": 64,
    "target_digest": "ff66",
    "tokenizer_digest": "ff66",
    "template_digest": "ff66",
    "system_prompt": "Be brief.",
    "capture_convention": "input of decoder layer",
    "capture_layers": (0, 1, 3),
    "kind": "dflash",
    "block_size": 5,
    "sample_from_anchor": False,
    "mask_token_id": 5,
    "rope": {"rope_type": "default", "rope_theta": 500000.0},
    "logit_softcap": 30.0,
    "embedding_scale": 2.0,
    "frozen": ("lm_head",),
    "shared": ("lm_head",),
    "new": ("fc",),
    "data_digest": "ff66",
    "cache_digest": "ff66",
    "params": {"drafter": {"kind": "dspark"}, "train": {"steps": 11, "lr": 0.001}},
}
# What is named of a field that holds several values.
PARTS = {"rope": ("rope.rope_theta", 10000.0, 500000.0), "params": ("params.train.steps", 10, 11)}


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    CONTRACT.write(tmp_path)
    assert Contract.read(tmp_path) == CONTRACT
    body = json.loads((tmp_path / CONTRACT_NAME).read_text())
    assert body["schema_version"] == 1
    assert body["capture_layers"] == list(CAPTURED)
    assert body["rope"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert body["unknown"] == []


def test_every_field_has_a_case_here() -> None:
    assert OTHERS.keys() | {"unknown"} == {field.name for field in fields(Contract)}


@pytest.mark.parametrize("field", OTHERS)
def test_a_drafter_that_meets_another_target_is_refused_by_the_field_that_differs(field: str) -> None:
    own, other = getattr(CONTRACT, field), OTHERS[field]
    name, got, expected = PARTS.get(field, (field, own, other))
    with pytest.raises(ContractError) as caught:
        CONTRACT.check(replace(CONTRACT, **{field: other}).body(), meets="the target of today")
    assert caught.value.what == f"the drafter was made for another {name} than the target of today has"
    plain = {None: "none"}
    as_list = [list(value) if isinstance(value, tuple) else plain.get(value, value) for value in (got, expected)]
    assert [caught.value.got, caught.value.expected] == as_list
    assert caught.value.where == CONTRACT_NAME


def test_the_first_field_in_the_contracts_order_is_named() -> None:
    """Whatever the order in which they are asked for."""
    with pytest.raises(ContractError, match="another vocab_size than"):
        CONTRACT.check({"mask_token_id": 9, "target_digest": "ff66", "vocab_size": 99}, meets="a target")


def test_fields_that_agree_or_are_not_asked_for_pass() -> None:
    CONTRACT.check({}, meets="a target")
    CONTRACT.check({"target_digest": "aa11", "capture_layers": CAPTURED, "logit_softcap": None}, meets="a target")


def test_a_field_that_is_unknown_is_not_compared() -> None:
    derived = replace(CONTRACT, target_digest=None, logit_softcap=None, unknown=("target_digest",))
    derived.check({"target_digest": "ff66"}, meets="a target")
    with pytest.raises(ContractError, match=r"another logit_softcap than a target has: got none, expected 30\.0"):
        derived.check({"target_digest": "ff66", "logit_softcap": 30.0}, meets="a target")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("{", "contract cannot be read"),
        ("[]", "another form: got list, expected schema_version 1"),
        ('{"target": "toy"}', "another form: got schema_version None, expected schema_version 1"),
        ('{"schema_version": 2}', "another form: got schema_version 2, expected schema_version 1"),
        ('{"schema_version": 1, "target": "toy"}', "contract cannot be read: no block_size, no cache_digest"),
    ],
)
def test_a_contract_that_cannot_be_read_is_named(damage: str, message: str, tmp_path: Path) -> None:
    (tmp_path / CONTRACT_NAME).write_text(damage)
    with pytest.raises(ContractError, match=message) as caught:
        Contract.read(tmp_path)
    assert caught.value.where == str(tmp_path / CONTRACT_NAME)


def test_an_unknown_field_is_refused(tmp_path: Path) -> None:
    (tmp_path / CONTRACT_NAME).write_text(json.dumps({**CONTRACT.body(), "colour": "blue"}))
    with pytest.raises(ContractError, match="unknown field colour"):
        Contract.read(tmp_path)


def test_a_folder_without_a_drafter_says_how_one_comes_there(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match=rf"no trained drafter in {tmp_path}: .*expected `draftsmith train` first"):
        open_contract(tmp_path, expected="`draftsmith train` first")


def test_a_contract_beside_another_drafters_config_is_refused(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    save_drafter(tiny_drafter("dspark", tiny_folders["llama"], seed=0), folder=tmp_path, dtype=torch.float32)
    CONTRACT.write(tmp_path)
    assert open_contract(tmp_path, expected="") == CONTRACT
    replace(CONTRACT, capture_layers=(0, 1, 3)).write(tmp_path)
    message = r"another capture_layers than the config.json beside it has: got \[0, 1, 3\], expected \[0, 2, 3\]"
    with pytest.raises(ContractError, match=message):
        open_contract(tmp_path, expected="")


def test_the_parts_of_a_drafter_by_hand(tiny_folders: dict[str, Path]) -> None:
    parts = new_parts(tiny_drafter("dspark", tiny_folders["llama"], seed=0))
    assert parts == ("confidence_head", "fc", "hidden_norm", "layers", "markov_head", "norm")


def test_what_a_target_says_of_itself_by_hand(tiny_folders: dict[str, Path]) -> None:
    """Numbers of tiny_models' configs; gemma4 scales embeddings by sqrt(32) and has its own rope for full attention."""
    found = {name: target_facts(read_config(tiny_folders[name]), family=FAMILIES[name]) for name in ("llama", "gemma4")}
    sizes = {"hidden_size": HIDDEN, "num_layers": LAYERS, "vocab_size": VOCAB}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    plain = {"rope": rope, "logit_softcap": None, "embedding_scale": 1.0}
    assert found["llama"] == {"family": "llama", **sizes, **plain}
    assert found["gemma4"]["rope"] == {
        "rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0,
    }  # fmt: skip
    assert found["gemma4"]["logit_softcap"] == 8.0
    assert found["gemma4"]["embedding_scale"] == pytest.approx(5.656854, rel=1e-6)


FOREIGN_UNKNOWN = {
    "target",
    "revision",
    "target_digest",
    "tokenizer_digest",
    "template_digest",
    "system_prompt",
    "frozen",
    "shared",
    "new",
    "data_digest",
    "cache_digest",
    "params",
}


def foreign_folder(folder: Path, target: Path) -> Path:
    """DeepSpec's config of a drafter on a tiny target: a flat copy of the target's, with the drafter's fields."""
    own = json.loads((target / "config.json").read_text())
    body = {
        **own,
        "architectures": [{"qwen3": "Qwen3DSparkModel", "gemma4": "Gemma4DSparkModel"}[target.name]],
        "num_target_layers": LAYERS,
        "num_hidden_layers": 2,
        "layer_types": ["full_attention"] * 2,
        "block_size": 4,
        "tie_word_embeddings": False,
        "mask_token_id": MASK_TOKEN,
        "target_layer_ids": list(CAPTURED),
        "num_anchors": 512,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "markov_rank": 6,
        "markov_head_type": "vanilla",
    }
    if target.name == "gemma4":
        # As older versions of transformers write them, and as DeepSpec therefore has them.
        body |= {"global_head_dim": 16, "num_global_key_value_heads": 1, "target_text_model_type": "gemma4_text"}
        body.pop("per_layer_config", None)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(body))
    return folder


@pytest.mark.parametrize("family", ["qwen3", "gemma4"])
def test_a_foreign_drafter_gets_a_contract_of_what_its_config_says(
    family: str, tiny_folders: dict[str, Path], tmp_path: Path
) -> None:
    target = tiny_folders[family]
    found = open_contract(foreign_folder(tmp_path / "foreign", target), expected="")
    # Qwen3's layers serve drafters of other targets too, so they do not tell the target's family.
    assert set(found.unknown) == FOREIGN_UNKNOWN | ({"family"} if family == "qwen3" else set())
    assert all(getattr(found, name) is None for name in found.unknown)
    expected = target_facts(read_config(target), family=FAMILIES[family])
    assert (found.capture_layers, found.block_size, found.mask_token_id) == (CAPTURED, 4, MASK_TOKEN)
    assert (found.sample_from_anchor, found.capture_convention) == (True, CAPTURE_CONVENTION)
    assert {name: value for name, value in asdict(found).items() if name in expected} == expected | (
        {"family": None} if family == "qwen3" else {}
    )
    found.check({**expected, "target_digest": "aa11"}, meets="its target")


def test_a_foreign_drafter_is_refused_on_what_it_says(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    found = {
        family: derive_contract(foreign_folder(tmp_path / family, tiny_folders[family]))
        for family in ("qwen3", "gemma4")
    }
    llama = target_facts(read_config(tiny_folders["llama"]), family=FAMILIES["llama"])
    with pytest.raises(ContractError, match="another family than the llama has: got gemma4, expected llama"):
        found["gemma4"].check(llama, meets="the llama")
    found["qwen3"].check(llama, meets="a llama of the same sizes")
    for name, value, told in (
        ("num_layers", 6, "num_layers than the llama has: got 5, expected 6"),
        ("vocab_size", 64, "vocab_size than the llama has: got 61, expected 64"),
        ("rope", {**llama["rope"], "rope_theta": 5e5}, r"rope\.rope_theta than .*: got 10000\.0, expected 500000\.0"),
        ("logit_softcap", 30.0, r"logit_softcap than the llama has: got none, expected 30\.0"),
        ("embedding_scale", 2.0, r"embedding_scale than the llama has: got 1\.0, expected 2\.0"),
    ):
        with pytest.raises(ContractError, match=told):
            found["qwen3"].check({**llama, name: value}, meets="the llama")
