"""DeepSpec's flat form: published directories load by their config.json alone, and ours are written with its fields."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.drafters import deepspec
from draftsmith.drafters.base import Drafter, DrafterConfig
from draftsmith.drafters.dflash import DFlash
from draftsmith.drafters.dspark import DSpark
from draftsmith.drafters.eagle3 import Eagle3
from draftsmith.drafters.registry import load_drafter, read_drafter_config, save_drafter
from draftsmith.errors import ContractError
from draftsmith.nn.sequential import GatedHead, MarkovHead, RnnHead
from draftsmith.targets.base import load_shared
from draftsmith.targets.families import FAMILIES
from tests.tiny_models import save_tiny, tiny_drafter, tiny_folders
from tests.unit.drafters import published

__all__ = ["tiny_folders"]


@pytest.fixture(scope="session")
def deep_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 target of seven layers: five can be captured."""
    return save_tiny(tmp_path_factory.mktemp("deep"), family="qwen3", seed=3, num_hidden_layers=7)


@pytest.fixture(autouse=True)
def _unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are looked at after loading, so their matrices are not packed for decoding."""
    monkeypatch.setattr("draftsmith.drafters.registry.pack_linears", lambda _: None)


def load(folder: Path, *, target: Path, dtype: torch.dtype = torch.bfloat16) -> Drafter:
    shared = load_shared(target, family=FAMILIES[target.name])
    return load_drafter(folder, target_folder=target, shared=shared, dtype=dtype)


def read(body: dict[str, Any]) -> DrafterConfig:
    return deepspec.read_body(body, where="config.json")


def check_landed(drafter: Drafter, tensors: dict[str, torch.Tensor]) -> None:
    """Every weight of the file lies in the drafter, bit by bit, and no other."""
    state = drafter.state_dict()
    assert state.keys() == tensors.keys()
    assert all(torch.equal(state[name], tensors[name]) for name in tensors)


# Published directories


def test_a_published_qwen3_dspark_loads_by_its_config_alone(tmp_path: Path, tiny_folders: dict[str, Path]) -> None:
    target = tiny_folders["qwen3"]
    own = published.random_weights(published.QWEN3_SHAPES, seed=1)
    folder = published.write(tmp_path, published.QWEN3, {**own, **published.target_weights(target)})
    drafter = load(folder, target=target)
    check_landed(drafter, own)
    config = drafter.config
    assert (config.kind, config.family, config.block_size, config.num_layers) == ("dspark", "qwen3", 7, 2)
    assert (config.capture_layers, config.num_target_layers) == ((0, 2, 3), 5)
    assert (config.mask_token_id, config.vocab_size, config.windows) == (60, 61, (None, None))
    assert (config.sequential, config.confidence, config.confidence_with_markov) == (("markov", 6), True, True)
    assert config.sample_from_anchor
    assert config.block_width == 7
    geometry = config.geometry
    assert (geometry.hidden_size, geometry.intermediate_size) == (32, 48)
    assert (geometry.num_heads, geometry.num_kv_heads, geometry.head_size) == (4, 2, 12)
    assert (geometry.head_norms, geometry.norm_eps, geometry.attention_bias) == (True, 1e-6, False)
    assert geometry.attention_scale == pytest.approx(0.28867513)  # 1 / sqrt(12)


def test_rotary_positions_are_the_configs_not_the_targets(tmp_path: Path, tiny_folders: dict[str, Path]) -> None:
    target = tiny_folders["qwen3"]
    assert json.loads((target / "config.json").read_text())["rope_parameters"]["rope_theta"] != 1000000
    folder = published.write(tmp_path, published.QWEN3, published.random_weights(published.QWEN3_SHAPES, seed=1))
    drafter = load(folder, target=target)
    assert isinstance(drafter, DSpark)
    expected = [1000000 ** (-2 * index / 12) for index in range(6)]
    assert drafter.rope.inverse_frequencies.tolist() == pytest.approx(expected, rel=1e-6)


def test_the_older_names_of_the_rotary_fields_are_read() -> None:
    body = {name: value for name, value in published.QWEN3.items() if name != "rope_parameters"}
    assert read({**body, "rope_theta": 1000000, "rope_scaling": None}) == read(published.QWEN3)


def test_a_published_dflash_is_the_same_class_without_heads(tmp_path: Path, tiny_folders: dict[str, Path]) -> None:
    own = published.random_weights(published.DFLASH_SHAPES, seed=2)
    drafter = load(published.write(tmp_path, published.DFLASH, own), target=tiny_folders["qwen3"])
    assert type(drafter) is DFlash
    check_landed(drafter, own)
    assert drafter.config.sample_from_anchor
    assert (drafter.config.block_size, drafter.config.sequential, drafter.config.confidence) == (7, None, False)


@pytest.mark.parametrize(
    ("name", "kind", "head", "extra"),
    [
        ("gated", "gated", GatedHead, {"gate_proj.weight": (6, 32 + 6), "gate_proj.bias": (6,)}),
        ("rnn", "rnn", RnnHead, {"joint_proj.weight": (18, 12 + 32), "joint_proj.bias": (18,)}),
        ("vanilla", "markov", MarkovHead, {}),
    ],
)
def test_each_sequential_head_loads_under_its_published_names(
    name: str, kind: str, head: type, extra: dict[str, tuple[int, ...]], tmp_path: Path, tiny_folders: dict[str, Path]
) -> None:
    """Without W1[x] in the confidence head, which then reads D numbers."""
    shapes = {**published.QWEN3_SHAPES, **{f"markov_head.{part}": shape for part, shape in extra.items()}}
    shapes["confidence_head.proj.weight"] = (1, 32)
    own = published.random_weights(shapes, seed=3)
    body = {**published.QWEN3, "markov_head_type": name, "confidence_head_with_markov": False}
    drafter = load(published.write(tmp_path, body, own), target=tiny_folders["qwen3"])
    check_landed(drafter, own)
    assert isinstance(drafter, DSpark)
    assert type(drafter.markov_head) is head
    assert drafter.config.sequential == (kind, 6)


def test_a_published_gemma4_dspark_loads_by_its_config_alone(tmp_path: Path, tiny_folders: dict[str, Path]) -> None:
    target = tiny_folders["gemma4"]
    own = published.random_weights(published.GEMMA4_SHAPES, seed=4)
    folder = published.write(tmp_path, published.GEMMA4, {**own, **published.target_weights(target)})
    drafter = load(folder, target=target)
    check_landed(drafter, own)
    assert isinstance(drafter, DSpark)
    geometry = drafter.config.geometry
    assert (geometry.head_size, geometry.num_heads, geometry.num_kv_heads) == (16, 4, 1)
    assert (geometry.values, geometry.attention_scale, geometry.style) == ("keys", 1.0, "gemma4")
    assert drafter.config.mask_token_id == 4
    # A quarter of 16 dimensions turns: two frequencies, with exponents over the whole head; the others stand still.
    expected = [1.0, 1000000 ** (-2 / 16), *[0.0] * 6]
    assert drafter.rope.inverse_frequencies.tolist() == pytest.approx(expected, rel=1e-6)


def test_a_published_eagle3_loads_by_its_config_alone(tmp_path: Path, deep_qwen3: Path) -> None:
    own = published.random_weights(published.EAGLE3_SHAPES, seed=5)
    tensors = {**own, **published.target_weights(deep_qwen3)}
    drafter = load(published.write(tmp_path, published.EAGLE3, tensors), target=deep_qwen3)
    assert isinstance(drafter, Eagle3)
    check_landed(drafter, own)
    config = drafter.config
    assert (config.kind, config.block_size, config.step_decay, config.mask_token_id) == ("eagle3", 7, 0.8, None)
    assert config.capture_layers == (0, 1, 2, 4, 5)


# What is refused by name

WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (published.QWEN3, {"architectures": ["Qwen3ForCausalLM"]}, "unknown architecture: got Qwen3ForCausalLM"),
    (published.QWEN3, {"architectures": []}, r"architectures: got \[\]"),
    (published.QWEN3, {"model_type": "qwen3_moe"}, "model_type: got 'qwen3_moe', expected qwen3"),
    (published.QWEN3, {"num_experts": 8}, "experts: num_experts: got 8"),
    (published.QWEN3, {"block_size": "7"}, "block_size: got '7', expected an integer >= 2"),
    (published.QWEN3, {"block_size": True}, "block_size: got True"),
    (published.QWEN3, {"block_size": 1}, "block_size: got 1, expected an integer >= 2"),
    (published.QWEN3, {"mask_token_id": 61}, "mask_token_id: got 61, expected < vocab_size 61"),
    (published.QWEN3, {"markov_rank": -1}, "markov_rank: got -1"),
    (published.QWEN3, {"markov_head_type": "lstm"}, "markov_head_type: got 'lstm', expected vanilla or gated or rnn"),
    (published.QWEN3, {"markov_rank": 0}, "enable_confidence_head without a sequential head"),
    (published.QWEN3, {"enable_confidence_head": 1}, "enable_confidence_head: got 1, expected true or false"),
    (published.QWEN3, {"target_layer_ids": [0, 3, 2]}, r"must strictly increase: got \[0, 3, 2\]"),
    (published.QWEN3, {"target_layer_ids": [0, 2, 2]}, "must strictly increase"),
    (published.QWEN3, {"target_layer_ids": [0, 2, 4]}, r"ids in -1..3 \(the last layer cannot be captured\)"),
    (published.QWEN3, {"target_layer_ids": [-2, 2, 3]}, "ids in -1..3"),
    (published.QWEN3, {"target_layer_ids": []}, "ids in -1..3"),
    (published.QWEN3, {"target_layer_ids": "0,2"}, "target_layer_ids: got '0,2', expected a list of integers"),
    (published.QWEN3, {"draft_vocab_size": 32}, "draft_vocab_size: got 32, expected the whole vocab_size 61"),
    (published.QWEN3, {"layer_types": ["full_attention"]}, "layer_types.*expected 2 of full_attention"),
    (published.QWEN3, {"layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
    (published.QWEN3, {"layer_types": ["full_attention", "sliding_attention"]}, "use_sliding_window false"),
    (published.QWEN3, {"hidden_act": 7}, "text config of a drafter cannot be read.*hidden_act"),
    (published.QWEN3, {"hidden_size": "32"}, "hidden_size: got '32'"),
    (published.QWEN3, {"rms_norm_eps": 0}, "rms_norm_eps: got 0"),
    (published.QWEN3, {"num_key_value_heads": 3}, "attention heads: got 4 of 12 numbers over 3 key heads"),
    (published.GEMMA4, {"enable_moe_block": True}, "enable_moe_block"),
    (published.GEMMA4, {"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input"),
    (published.GEMMA4, {"hidden_activation": "silu"}, "hidden_activation"),
    (published.GEMMA4, {"num_global_key_value_heads": None}, "without num_global_key_value_heads"),
    (published.EAGLE3, {"target_layer_ids": [0, 1, 2, 4]}, "EAGLE-3.*exactly 5 layers"),
    (published.EAGLE3, {"target_layer_ids": [-1, 1, 2, 4, 5]}, r"EAGLE-3.*without the embedding \(-1\)"),
    (published.EAGLE3, {"num_hidden_layers": 2, "layer_types": None}, "num_hidden_layers.*Eagle3Model: got 2"),
    (published.EAGLE3, {"draft_num_hidden_layers": 2}, "draft_num_hidden_layers: got 2, expected num_hidden_layers 1"),
    (published.EAGLE3, {"step_loss_decay": 0}, "step_loss_decay: got 0"),
]


@pytest.mark.parametrize(("body", "changes", "told"), WRONG, ids=[f"{told[:40]}" for _, _, told in WRONG])
def test_a_wrong_field_is_refused_by_name(body: dict[str, Any], changes: dict[str, Any], told: str) -> None:
    read(body)
    with pytest.raises(ContractError, match=rf"(?s){told}.*\(config\.json\)"):
        read({**body, **changes})


MISSING = [
    *((published.QWEN3, name) for name in (
        "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "num_target_layers",
        "target_layer_ids", "block_size", "mask_token_id", "markov_rank", "markov_head_type", "enable_confidence_head",
        "confidence_head_with_markov",
    )),
    *((published.GEMMA4, name) for name in ("global_head_dim", "attention_k_eq_v", "rope_parameters",
                                            "num_global_key_value_heads", "hidden_activation")),
    *((published.EAGLE3, name) for name in ("ttt_length", "step_loss_decay")),
]  # fmt: skip


@pytest.mark.parametrize(("body", "name"), MISSING, ids=[f"{body['architectures'][0]}-{n}" for body, n in MISSING])
def test_a_missing_field_is_named_and_no_default_takes_its_place(body: dict[str, Any], name: str) -> None:
    with pytest.raises(ContractError, match=rf"without {name}: got nothing \(config\.json\)"):
        read({field: value for field, value in body.items() if field != name})


def test_draft_layers_keep_keys_of_their_own_where_the_targets_share_them() -> None:
    """DeepSpec's config repeats its target's field, which its classes do not read."""
    assert read({**published.GEMMA4, "num_kv_shared_layers": 2}) == read(published.GEMMA4)


def test_a_missing_rope_is_named() -> None:
    body = {name: value for name, value in published.QWEN3.items() if name != "rope_parameters"}
    with pytest.raises(ContractError, match="without rope_theta"):
        read(body)


@pytest.mark.parametrize("damage", ["{", "[]", "7"])
def test_a_file_that_is_no_config_is_named(damage: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(damage)
    with pytest.raises(ContractError, match=str(tmp_path / "config.json")):
        read_drafter_config(tmp_path)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_target_layers": 6}, "another num_target_layers: got 6, expected 5"),
        ({"hidden_size": 64}, "another hidden_size: got 64, expected 32"),
        ({"vocab_size": 62}, "another vocab_size: got 62, expected 61"),
    ],
)
def test_a_drafter_of_another_target_is_refused_by_the_size_that_differs(
    changes: dict[str, Any], told: str, tmp_path: Path, tiny_folders: dict[str, Path]
) -> None:
    own = published.random_weights(published.QWEN3_SHAPES, seed=1)
    with pytest.raises(ContractError, match=told):
        load(published.write(tmp_path, {**published.QWEN3, **changes}, own), target=tiny_folders["qwen3"])


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_another_soft_cap_than_the_targets_is_refused(
    softcap: float | None, tmp_path: Path, tiny_folders: dict[str, Path]
) -> None:
    own = published.random_weights(published.GEMMA4_SHAPES, seed=4)
    folder = published.write(tmp_path, {**published.GEMMA4, "final_logit_softcapping": softcap}, own)
    with pytest.raises(ContractError, match=f"another final_logit_softcapping: got {softcap}, expected 8.0"):
        load(folder, target=tiny_folders["gemma4"])


# Embedding and LM head in the file


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
def test_an_embedding_or_head_of_its_own_is_refused(name: str, tmp_path: Path, tiny_folders: dict[str, Path]) -> None:
    target = tiny_folders["qwen3"]
    tensors = {
        **published.random_weights(published.QWEN3_SHAPES, seed=1),
        **published.target_weights(target),
    }
    tensors[name][17, 3] += 1.0
    with pytest.raises(ContractError, match=f"brings its own {name}: got 1 of 61 rows"):
        load(published.write(tmp_path, published.QWEN3, tensors), target=target)
    tensors[name] = tensors[name][:40].contiguous()
    with pytest.raises(ContractError, match=rf"{name} of the drafter.*got \[40, 32\], expected \[61, 32\]"):
        load(published.write(tmp_path, published.QWEN3, tensors), target=target)


# What we write


def as_written(body: dict[str, Any]) -> dict[str, Any]:
    """A published config as it reads after us: rotary fields of both layer types alone, our one more field."""
    body = deepcopy(body)
    if "gemma4" in body["model_type"]:
        body["rope_parameters"] = {
            kind: body["rope_parameters"][kind] for kind in ("full_attention", "sliding_attention")
        }
    if "block_size" in body:
        body["sample_from_anchor"] = True
    del body["transformers_version"]
    return body


@pytest.mark.parametrize("body", [published.QWEN3, published.DFLASH, published.GEMMA4, published.EAGLE3])
def test_a_published_config_is_written_again_with_exactly_its_fields(body: dict[str, Any]) -> None:
    written = deepspec.write_body(read(body), dtype=torch.bfloat16, num_anchors=512)
    written.pop("transformers_version")
    assert json.loads(json.dumps(written)) == as_written(body)


@pytest.mark.parametrize("body", [published.QWEN3, published.DFLASH, published.GEMMA4, published.EAGLE3])
def test_what_is_written_is_read_back(body: dict[str, Any]) -> None:
    config = read(body)
    assert read(deepspec.write_body(config, dtype=torch.float32)) == config
    windowed = replace(config, windows=(9,) * config.num_layers)
    written = deepspec.write_body(windowed, dtype=torch.float32)
    assert (written["sliding_window"], set(written["layer_types"])) == (9, {"sliding_attention"})
    assert read(written).windows == windowed.windows


def test_a_window_may_be_some_layers_alone() -> None:
    config = replace(read(published.QWEN3), windows=(None, 5))
    written = deepspec.write_body(config, dtype=torch.bfloat16)
    assert written["layer_types"] == ["full_attention", "sliding_attention"]
    assert (written["sliding_window"], written["use_sliding_window"]) == (5, True)
    assert read(written).windows == (None, 5)
    with pytest.raises(ContractError, match=r"different windows: got \[4, 5\]"):
        deepspec.write_body(replace(config, windows=(4, 5)), dtype=torch.bfloat16)


@pytest.mark.parametrize(("head_norms", "name", "model_type"), [
    (True, "Qwen3DSparkModel", "qwen3"), (False, "LlamaDSparkModel", "llama"),
])  # fmt: skip
def test_a_llama_target_s_drafter_is_qwen3_s_with_head_norms_and_ours_without(
    head_norms: bool, name: str, model_type: str, tmp_path: Path, tiny_folders: dict[str, Path]
) -> None:
    target = tiny_folders["llama"]
    drafter = tiny_drafter("dspark", target, seed=8, head_norms=head_norms)
    save_drafter(drafter, folder=tmp_path, dtype=torch.float32, num_anchors=24)
    body = json.loads((tmp_path / "config.json").read_text())
    assert (body["architectures"], body["model_type"]) == ([name], model_type)
    assert (body["num_hidden_layers"], body["num_target_layers"], body["num_anchors"]) == (2, 5, 24)
    assert body["dtype"] == "float32"
    stored = load_file(tmp_path / "model.safetensors")
    assert ("layers.0.self_attn.q_norm.weight" in stored) == head_norms
    assert not {"embed_tokens.weight", "lm_head.weight"} & stored.keys()
    again = load(tmp_path, target=target, dtype=torch.float32)
    assert again.config == drafter.config
    check_landed(again, stored)


def test_an_eagle3_of_three_layers_is_refused_before_anything_is_written(
    tmp_path: Path, tiny_folders: dict[str, Path]
) -> None:
    drafter = tiny_drafter("eagle3", tiny_folders["qwen3"], seed=9)
    with pytest.raises(ContractError, match=r"EAGLE-3.*exactly 5 layers"):
        save_drafter(drafter, folder=tmp_path / "out", dtype=torch.float32)
    assert not (tmp_path / "out").exists()


def test_layers_that_the_form_cannot_say_are_refused(tmp_path: Path) -> None:
    """A Llama target with biases in its MLPs: Qwen3's layer, which head norms make it, has none."""
    target = save_tiny(tmp_path, family="llama", seed=1, mlp_bias=True)
    drafter = tiny_drafter("dflash", target, seed=2, head_norms=True)
    with pytest.raises(ContractError, match="a config of qwen3 cannot say"):
        save_drafter(drafter, folder=tmp_path / "out", dtype=torch.float32)
