"""The contract file: what is written is read back, and a drafter that meets another target is refused by name."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from draftsmith.drafters.contract import CAPTURE_CONVENTION, CONTRACT_NAME, Contract
from draftsmith.errors import ContractError

CONTRACT = Contract(
    target="toy",
    target_digest="aa11",
    tokenizer_digest="bb22",
    capture_convention=CAPTURE_CONVENTION,
    capture_layers=(1, 3),
    block_size=7,
    sample_from_anchor=True,
    mask_token_id=4,
    rope={"rope_type": "default", "rope_theta": 10000.0},
    logit_softcap=None,
    embedding_scale=1.0,
    shared=("embed_tokens", "lm_head"),
    data_digest="cc33",
    cache_digest="dd44",
    params_digest="ee55",
)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    CONTRACT.write(tmp_path)
    assert Contract.read(tmp_path) == CONTRACT
    assert json.loads((tmp_path / CONTRACT_NAME).read_text())["capture_layers"] == [1, 3]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("target_digest", "ff66"),
        ("tokenizer_digest", "ff66"),
        ("capture_layers", (1, 2)),
        ("mask_token_id", 5),
        ("rope", {"rope_type": "default", "rope_theta": 500000.0}),
        ("logit_softcap", 30.0),
        ("embedding_scale", 2.0),
    ],
)
def test_a_drafter_that_meets_another_target_is_refused_by_the_field_that_differs(field: str, value: Any) -> None:
    expected = asdict(replace(CONTRACT, **{field: value}))
    with pytest.raises(ContractError, match=f"made for another {field} than the target of today has") as caught:
        CONTRACT.check(expected, meets="the target of today")
    assert str(value) in str(caught.value)
    assert str(getattr(CONTRACT, field)) in str(caught.value)


def test_the_first_field_in_the_contracts_order_is_named() -> None:
    with pytest.raises(ContractError, match="another target than"):
        CONTRACT.check({"mask_token_id": 9, "target": "other"}, meets="a target")


def test_fields_that_agree_or_are_not_asked_for_pass() -> None:
    CONTRACT.check({}, meets="a target")
    CONTRACT.check({"target_digest": "aa11", "capture_layers": (1, 3)}, meets="a target")


@pytest.mark.parametrize("damage", ["{", "[]", '{"target": "toy"}'])
def test_a_contract_that_cannot_be_read_is_named(damage: str, tmp_path: Path) -> None:
    (tmp_path / CONTRACT_NAME).write_text(damage)
    with pytest.raises(ContractError, match=str(tmp_path / CONTRACT_NAME)):
        Contract.read(tmp_path)


def test_a_folder_without_a_contract_says_what_to_run(tmp_path: Path) -> None:
    """A drafter's folder bears its key."""
    with pytest.raises(
        ContractError, match=rf"no trained drafter in {tmp_path}.*draftsmith train --key {tmp_path.name}"
    ):
        Contract.read(tmp_path)


def test_an_unknown_field_is_refused(tmp_path: Path) -> None:
    (tmp_path / CONTRACT_NAME).write_text(json.dumps({**asdict(CONTRACT), "colour": "blue"}))
    with pytest.raises(ContractError, match="colour"):
        Contract.read(tmp_path)
