"""Weights on disk: one file or shards, safetensors alone, every misfit told by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from draftsmith.drafters.weights import check_same, check_weights, read_weights
from draftsmith.errors import ContractError

TENSORS = {name: torch.full((2, 3), float(place)) for place, name in enumerate(("a", "b", "c", "d"))}


def write_shards(folder: Path, shards: dict[str, list[str]], *, index: dict[str, str] | None = None) -> None:
    """Shards by their names in the file, and the index that names them (or another one)."""
    for shard, names in shards.items():
        save_file({name: TENSORS[name] for name in names}, folder / shard)
    where = {name: shard for shard, names in shards.items() for name in names} if index is None else index
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def check_whole(folder: Path) -> None:
    found = read_weights(folder)
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)


def test_one_file_is_read(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    check_whole(tmp_path)


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def test_shards_are_read_by_their_index(tmp_path: Path) -> None:
    write_shards(tmp_path, {FIRST: ["a", "c"], SECOND: ["b", "d"]})
    check_whole(tmp_path)


def test_one_file_goes_before_an_index(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    write_shards(tmp_path, {FIRST: ["a"]})
    check_whole(tmp_path)


@pytest.mark.parametrize(
    ("index", "told"),
    [
        ({"a": FIRST, "c": FIRST, "b": SECOND, "d": SECOND, "e": "gone.safetensors"}, "shard gone.safetensors is not"),
        ({"a": FIRST, "c": FIRST, "b": SECOND}, f"{SECOND} holds d, which the index does not name there"),
        ({"a": FIRST, "c": SECOND, "b": SECOND, "d": SECOND}, f"{FIRST} holds c"),
        ({"a": FIRST, "c": FIRST, "b": SECOND, "d": SECOND, "e": SECOND}, f"{SECOND} lacks e"),
    ],
)
def test_an_index_that_does_not_fit_its_shards_is_told(index: dict[str, str], told: str, tmp_path: Path) -> None:
    write_shards(tmp_path, {FIRST: ["a", "c"], SECOND: ["b", "d"]}, index=index)
    with pytest.raises(ContractError, match=f"do not fit their index: {told}.*index.json"):
        read_weights(tmp_path)


@pytest.mark.parametrize(
    "index", [{"weight_map": {"a": "../model.safetensors"}}, {"weight_map": {"a": "/x.safetensors"}},
              {"weight_map": {"a": "pytorch_model.bin"}}, {"weight_map": {"a": 7}}, {"weight_map": []}, {}, [], 7],
)  # fmt: skip
def test_an_index_of_another_form_or_that_leads_elsewhere_is_refused(index: Any, tmp_path: Path) -> None:
    folder = tmp_path / "drafter"
    folder.mkdir()
    save_file(TENSORS, tmp_path / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ContractError, match="index of drafter weights cannot be read"):
        read_weights(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "drafter.pt", "weights.pth"])
def test_pickled_weights_are_named_and_never_opened(name: str, tmp_path: Path) -> None:
    """Opening this one would leave a mark."""
    mark = tmp_path / "mark"
    payload = b"cos\nsystem\n(S'touch " + str(mark).encode() + b"'\ntR."
    (tmp_path / name).write_bytes(payload)
    with pytest.raises(ContractError, match=f"without safetensors: got {name}, which are pickles.*model.safetensors"):
        read_weights(tmp_path)
    assert not mark.exists()


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match=rf"got no weights, expected model.safetensors \({tmp_path}\)"):
        read_weights(tmp_path)


def test_a_cut_file_is_named(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-5])
    with pytest.raises(ContractError, match=f"cannot be read.*{tmp_path / 'model.safetensors'}"):
        read_weights(tmp_path)


def test_all_that_does_not_fit_is_listed_at_once() -> None:
    expected = {"a": torch.zeros(2, 3), "b": torch.zeros(2, 3), "c": torch.zeros(4), "d": torch.zeros(2)}
    found = {
        "b": torch.zeros(3, 2),
        "c": torch.zeros(4, dtype=torch.int8),
        "d": torch.zeros(2, dtype=torch.float8_e4m3fn),
        "e": torch.zeros(1),
    }
    with pytest.raises(ContractError) as caught:
        check_weights(found, expected=expected, where="folder")
    assert str(caught.value) == (
        "drafter weights do not fit their config: missing a; extra e; b is [3, 2], expected [2, 3]; "
        "c is int8, expected float32 or float16 or bfloat16; "
        "d is float8_e4m3fn, expected float32 or float16 or bfloat16 (folder)"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_that_fit_pass_in_any_float(dtype: torch.dtype) -> None:
    check_weights({"a": torch.zeros(2, 3, dtype=dtype)}, expected={"a": torch.zeros(2, 3)}, where="folder")


def test_sameness_is_asked_in_the_files_dtype() -> None:
    """1/3 in bfloat16 is another number than in float32, and the same as the target's once that is rounded."""
    target = torch.full((4, 2), 1 / 3)
    check_same(target.bfloat16(), target=target, name="lm_head.weight", where="folder")
    check_same(target.clone(), target=target, name="lm_head.weight", where="folder")
    with pytest.raises(ContractError, match=r"brings its own lm_head.weight: got 4 of 4 rows"):
        check_same(target.bfloat16().float(), target=target, name="lm_head.weight", where="folder")
    other = target.clone()
    other[2, 1] = float("nan")
    with pytest.raises(ContractError, match="got 1 of 4 rows"):
        check_same(other, target=target, name="lm_head.weight", where="folder")
