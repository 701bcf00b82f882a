"""From rows to drafters: what fits a target, and a start from the target's own layers checked through its rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftsmith.drafters.base import Observation
from draftsmith.drafters.dflash import DFlash
from draftsmith.drafters.dspark import DSpark
from draftsmith.drafters.registry import build_drafter, drafter_config, start_from_target
from draftsmith.errors import ParamsError
from draftsmith.nn.kv import FlatBatch
from draftsmith.params import Target
from tests.tiny_models import (
    HIDDEN,
    LAYERS,
    MASK_TOKEN,
    VOCAB,
    drafter_row,
    random_ids,
    reference,
    target_row,
    tiny_drafter,
    tiny_folders,
    tiny_target,
)

__all__ = ["tiny_folders"]

FAMILIES = ("llama", "qwen3")


def test_a_config_follows_its_two_rows(tiny_folders: dict[str, Path]) -> None:
    folder = tiny_folders["llama"]
    config = drafter_config(drafter_row("dspark", block_size=7), target=target_row(folder), target_folder=folder)
    assert (config.kind, config.family, config.block_size, config.num_layers) == ("dspark", "llama", 7, 2)
    assert (config.vocab_size, config.mask_token_id, config.capture_layers) == (VOCAB, MASK_TOKEN, (0, 2, 3))
    assert (config.sequential, config.confidence) == (("markov", 6), True)
    geometry = config.geometry
    assert (geometry.hidden_size, geometry.num_heads, geometry.num_kv_heads, geometry.head_size) == (HIDDEN, 4, 2, 12)
    assert geometry.attention_scale == pytest.approx(0.28867513)  # 1 / sqrt(12)
    assert not geometry.head_norms


def test_a_llama_drafter_may_have_head_norms_and_a_qwen3_drafter_must(tiny_folders: dict[str, Path]) -> None:
    row = drafter_row("dflash", head_norms=True)
    folder = tiny_folders["llama"]
    assert drafter_config(row, target=target_row(folder), target_folder=folder).geometry.head_norms
    folder = tiny_folders["qwen3"]
    with pytest.raises(ParamsError, match=r"head_norms must be true on qwen3 targets.*got False.*params.yaml"):
        drafter_config(drafter_row("dflash"), target=target_row(folder), target_folder=folder)


def test_mtp_wants_every_last_hidden_state(tiny_folders: dict[str, Path]) -> None:
    folder = tiny_folders["llama"]
    with pytest.raises(ParamsError, match=r"last hidden state of every token: got last_hidden labels, expected all"):
        drafter_config(drafter_row("mtp1"), target=target_row(folder, last_hidden="labels"), target_folder=folder)


def test_more_draft_layers_than_the_target_has_are_refused(tiny_folders: dict[str, Path]) -> None:
    folder = tiny_folders["llama"]
    with pytest.raises(ParamsError, match=f"layers: got {LAYERS + 1}, expected <= {LAYERS}"):
        drafter_config(drafter_row("dflash", layers=LAYERS + 1), target=target_row(folder), target_folder=folder)


def test_a_kind_makes_its_own_parts(tiny_folders: dict[str, Path]) -> None:
    dspark, dflash = (tiny_drafter(kind, tiny_folders["llama"], seed=0) for kind in ("dspark", "dflash"))
    assert isinstance(dspark, DSpark)
    assert type(dflash) is DFlash
    extra = {
        "markov_head.markov_w1.weight",
        "markov_head.markov_w2.weight",
        "confidence_head.proj.weight",
        "confidence_head.proj.bias",
    }
    assert {name for name, _ in dspark.named_parameters()} - {name for name, _ in dflash.named_parameters()} == extra


@pytest.mark.parametrize("family", FAMILIES)
def test_a_start_from_the_target_copies_its_last_layers(family: str, tiny_folders: dict[str, Path]) -> None:
    folder = tiny_folders[family]
    drafter = tiny_drafter("dspark", folder, seed=1)
    heads_before = drafter.get_parameter("markov_head.markov_w1.weight").detach().clone()
    names = start_from_target(drafter, target_folder=folder)
    theirs = reference(folder).model
    for own, layer in zip(drafter.layers, theirs.layers[-2:], strict=True):
        for name, value in layer.state_dict().items():
            assert torch.equal(own.get_parameter(name), value), name
    assert torch.equal(drafter.norm.weight, theirs.norm.weight)
    assert torch.equal(drafter.get_parameter("markov_head.markov_w1.weight"), heads_before)
    heads = {name for name, _ in drafter.named_parameters() if name.startswith(("markov_head", "confidence_head"))}
    assert set(names) == {name for name, _ in drafter.named_parameters()} - heads


@pytest.mark.parametrize("family", FAMILIES)
def test_a_start_from_the_target_sees_the_context_as_the_target_does(
    family: str, tiny_folders: dict[str, Path]
) -> None:
    """The last captured layer is the one below the first copied one: its rows are the target's own, to the letter."""
    folder, captured = tiny_folders[family], (0, LAYERS - 3)
    target = tiny_target(folder, capture_layers=captured)
    drafter = tiny_drafter("dflash", folder, seed=2, capture_layers=captured)
    start_from_target(drafter, target_folder=folder)
    ids = torch.tensor(random_ids(10, seed=3))
    batch = FlatBatch.make([0, 0], counts=[6, 4], slots=[0, 1], device=target.device)
    target_rows, draft_rows = target.new_rows(), drafter.new_rows()
    output = target.forward(ids, batch=batch, rows=target_rows)
    drafter.observe(Observation(ids, output.captured, output.last_hidden, batch), rows=draft_rows)
    for slot, count in ((0, 6), (1, 4)):
        for own, theirs in (
            (draft_rows.keys[0], target_rows.keys[LAYERS - 2]),
            (draft_rows.values[0], target_rows.values[LAYERS - 2]),
        ):
            assert own is not None
            assert theirs is not None
            torch.testing.assert_close(own[slot, :count], theirs[slot, :count], rtol=1e-4, atol=1e-5)


def test_head_norms_that_the_target_lacks_keep_their_start(tiny_folders: dict[str, Path]) -> None:
    folder = tiny_folders["llama"]
    row: Target = target_row(folder)
    config = drafter_config(drafter_row("dflash", head_norms=True), target=row, target_folder=folder)
    drafter = build_drafter(config, target_folder=folder)
    assert isinstance(drafter, DFlash)
    drafter.reset(seed=0)
    names = start_from_target(drafter, target_folder=folder)
    assert not any("q_norm" in name or "k_norm" in name for name in names)
    assert drafter.get_parameter("layers.0.self_attn.q_norm.weight").tolist() == [1.0] * 12
