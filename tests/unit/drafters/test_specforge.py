"""SpecForge's nested form: read as the flat one, its two block conventions told apart, and what is not ours refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from draftsmith.drafters import deepspec, specforge
from draftsmith.drafters.base import DrafterConfig
from draftsmith.drafters.dflash import DFlash
from draftsmith.drafters.registry import load_drafter, read_drafter_config
from draftsmith.errors import ContractError
from draftsmith.targets.base import load_shared
from draftsmith.targets.families import FAMILIES
from tests.tiny_models import tiny_folders
from tests.unit.drafters import published

__all__ = ["tiny_folders"]


@pytest.fixture(autouse=True)
def _unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are looked at after loading, so their matrices are not packed for decoding."""
    monkeypatch.setattr("draftsmith.drafters.registry.pack_linears", lambda _: None)


def read(body: dict[str, Any]) -> DrafterConfig:
    assert specforge.is_nested(body)
    return deepspec.read_body(specforge.flatten(body, where="config.json"), where="config.json")


def nested(body: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A config with fields of its nest changed; None takes one out."""
    fields = {**body["dflash_config"], **changes}
    return {**body, "dflash_config": {name: value for name, value in fields.items() if value is not None}}


def test_a_flat_config_is_not_nested() -> None:
    assert not specforge.is_nested(published.QWEN3)
    assert not specforge.is_nested({})
    assert not specforge.is_nested({"architectures": "DSparkDraftModel"})


def test_a_dspark_block_of_seven_slots_drafts_seven_from_the_anchor() -> None:
    config = read(published.SPECFORGE_DSPARK)
    assert (config.kind, config.block_size, config.block_width, config.sample_from_anchor) == ("dspark", 7, 7, True)
    assert (config.capture_layers, config.mask_token_id, config.num_target_layers) == ((0, 2, 3), 60, 5)
    assert (config.sequential, config.confidence, config.confidence_with_markov) == (("markov", 6), True, True)


def test_it_is_the_same_drafter_as_in_the_flat_form() -> None:
    flat = {**published.QWEN3, "max_window_layers": 5}
    assert read(published.SPECFORGE_DSPARK) == deepspec.read_body(flat, where="config.json")


def test_the_class_of_its_own_name_is_a_dspark_without_a_projector() -> None:
    body = nested({**published.SPECFORGE_DSPARK, "architectures": ["DSparkDraftModel"]}, projector_type=None)
    assert read(body) == read(published.SPECFORGE_DSPARK)


def test_a_dflash_block_of_sixteen_slots_drafts_fifteen_at_its_masks() -> None:
    config = read(published.SPECFORGE_DFLASH)
    assert (config.kind, config.block_size, config.block_width, config.sample_from_anchor) == ("dflash", 15, 16, False)
    assert (config.sequential, config.confidence) == (None, False)


def test_fields_at_the_top_and_under_the_other_nest_are_read() -> None:
    """As some exports repeat or keep them."""
    body = {**published.SPECFORGE_DSPARK, "dspark_config": published.SPECFORGE_DSPARK["dflash_config"]}
    assert read(body) == read(published.SPECFORGE_DSPARK)
    top = {**nested(published.SPECFORGE_DSPARK, markov_rank=None), "markov_rank": 6, "model_type": "dspark"}
    assert read(top) == read(published.SPECFORGE_DSPARK)


def test_a_confidence_head_is_there_by_either_name_or_by_the_weight_of_its_loss() -> None:
    bare = nested(published.SPECFORGE_DSPARK, enable_confidence_head=None)
    assert read(bare).confidence
    assert not read(nested(bare, confidence_head_alpha=0.0)).confidence
    assert not read(nested(bare, use_confidence_head=False)).confidence
    with pytest.raises(ContractError, match="enable_confidence_head and use_confidence_head"):
        read(nested(published.SPECFORGE_DSPARK, use_confidence_head=False))


@pytest.mark.parametrize(
    ("body", "changes", "told"),
    [
        (published.SPECFORGE_DSPARK, {"projector_type": "domino"}, "projector_type: got domino"),
        (published.SPECFORGE_DSPARK, {"projector_type": None}, "projector_type: got none, but markov_rank > 0"),
        (published.SPECFORGE_DSPARK, {"emb_dim": 256}, "unknown field dflash_config.emb_dim: got 256"),
        (published.SPECFORGE_DSPARK, {"attention_mode": "mla"}, "attention_mode: got mla"),
        (published.SPECFORGE_DSPARK, {"attention_modes": ["gqa", "kda"]}, "attention_mode: got kda"),
        (published.SPECFORGE_DSPARK, {"causal": True}, "causal: got True, expected False"),
        (published.SPECFORGE_DSPARK, {"pure_draft_prefix_len": 1}, "pure_draft_prefix_len: got 1"),
        (published.SPECFORGE_DSPARK, {"markov_head_type": "lstm"}, "markov_head_type: got 'lstm'"),
        (published.SPECFORGE_DSPARK, {"block_size": 8}, "two values of block_size.*got 8 and 7"),
        (published.SPECFORGE_DSPARK, {"target_layer_ids": None}, "without target_layer_ids"),
        (published.SPECFORGE_DSPARK, {"target_layer_ids": [2, 0]}, "must strictly increase"),
        (published.SPECFORGE_DFLASH, {"shift_label": True}, "shift_label"),
        (published.SPECFORGE_DFLASH, {"block_size": "16"}, "two values of block_size"),
    ],
)
def test_a_nested_field_that_is_not_ours_to_run_is_refused_by_name(
    body: dict[str, Any], changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(ContractError, match=rf"{told}.*\(config\.json\)"):
        read(nested(body, **changes))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"dflash_config": None}, "dflash_config: got none"),
        ({"dflash_config": [1]}, r"dflash_config: got \[1\], expected an object"),
        ({"model_type": "deepseek_v4"}, "model_type: got deepseek_v4, expected qwen3 or dspark"),
        ({"speculators_model_type": "dspark"}, "in the form of speculators"),
        ({"draft_vocab_size": 32}, "draft_vocab_size: got 32, expected the whole vocab_size 61"),
        ({"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True, "sliding_window": 9},
         "sliding layers are causal inside a block"),
        ({"block_size": 2}, "block_size: got 1, expected an integer >= 2"),
        ({"block_size": "16"}, "block_size: got '16'"),
        ({"head_dim": None}, "without head_dim"),
    ],
)  # fmt: skip
def test_a_field_of_the_file_that_is_not_ours_to_run_is_refused_by_name(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ContractError, match=rf"{told}.*\(config\.json\)"):
        read({**published.SPECFORGE_DFLASH, **changes})


@pytest.mark.parametrize(
    ("body", "shapes"),
    [
        (published.SPECFORGE_DSPARK, published.QWEN3_SHAPES),
        (published.SPECFORGE_DFLASH, published.DFLASH_SHAPES),
    ],
)
def test_its_weights_load_without_embedding_and_head(
    body: dict[str, Any], shapes: dict[str, tuple[int, ...]], tmp_path: Path, tiny_folders: dict[str, Path]
) -> None:
    """And in shards, as large ones are kept."""
    target, own = tiny_folders["qwen3"], published.random_weights(shapes, seed=6)
    folder = published.write(tmp_path, body, own)
    half = sorted(own)[: len(own) // 2]
    shards = {
        "model-00001-of-00002.safetensors": half,
        "model-00002-of-00002.safetensors": sorted(own.keys() - set(half)),
    }
    shared = load_shared(target, family=FAMILIES["qwen3"])
    one = load_drafter(folder, target_folder=target, shared=shared, dtype=torch.bfloat16)
    (folder / "model.safetensors").unlink()
    for shard, names in shards.items():
        save_file({name: own[name] for name in names}, folder / shard)
    index = {name: shard for shard, names in shards.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(str({"weight_map": index}).replace("'", '"'))
    many = load_drafter(folder, target_folder=target, shared=shared, dtype=torch.bfloat16)
    for drafter in (one, many):
        assert isinstance(drafter, DFlash)
        state = drafter.state_dict()
        assert state.keys() == own.keys()
        assert all(torch.equal(state[name], own[name]) for name in own)
    assert read_drafter_config(folder) == one.config
