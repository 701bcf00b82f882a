"""Gemma4: targets of every make against Hugging Face's own models, and what a draft layer takes from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma4Config, Gemma4TextConfig, Gemma4UnifiedConfig, Gemma4UnifiedTextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm

from draftsmith.decoding.engine import Engine, Request
from draftsmith.drafters.base import Observation
from draftsmith.drafters.dflash import DFlash
from draftsmith.drafters.registry import build_drafter, drafter_config, start_from_target
from draftsmith.errors import ParamsError, TargetError
from draftsmith.nn.kv import FlatBatch
from draftsmith.params import Sampling
from draftsmith.targets.base import load_shared
from draftsmith.targets.families import FAMILIES
from tests.tiny_models import (
    GEMMA4_ROPE,
    HIDDEN,
    LAYERS,
    VOCAB,
    drafter_row,
    hugging_face_greedy,
    random_ids,
    random_model,
    randomize,
    reference,
    save_tiny,
    target_row,
    tiny_config,
    tiny_target,
)

FAMILY = FAMILIES["gemma4"]
CPU = torch.device("cpu")
SHARING = {"num_kv_shared_layers": 2, "use_double_wide_mlp": True,
           "layer_types": ["sliding_attention", *["full_attention", "sliding_attention"] * 2]}  # fmt: skip
PER_LAYER = {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": VOCAB}
TIED = {"tie_word_embeddings": True}
EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
          "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 8}  # fmt: skip
UNIFIED_VISION = {"mm_embed_dim": HIDDEN, "output_proj_dims": HIDDEN, "mm_posemb_size": 8}


def text(**changes: Any) -> Gemma4TextConfig:
    config: Gemma4TextConfig = tiny_config("gemma4", **changes)
    return config


def unified_text(**changes: Any) -> Gemma4UnifiedTextConfig:
    """The same sizes; a unified decoder knows neither experts nor per-layer inputs."""
    shown = {name: value for name, value in text().to_dict().items() if name in Gemma4UnifiedTextConfig().to_dict()}
    own = {"model_type", "use_bidirectional_attention", "transformers_version", "per_layer_config"}
    rest = {name: value for name, value in shown.items() if name not in own}
    sizes = {"global_head_dim": 16, "num_global_key_value_heads": 1}
    return Gemma4UnifiedTextConfig(**{**rest, **sizes, **changes})


MAKES = {
    "text": text,
    "own values": lambda: text(attention_k_eq_v=False),
    "biases, no soft-cap": lambda: text(attention_bias=True, final_logit_softcapping=None),
    "own rotary positions": lambda: text(rope_parameters=GEMMA4_ROPE),
    "shared keys": lambda: text(**SHARING, **PER_LAYER),
    "experts": lambda: text(**EXPERTS),
    "multimodal": lambda: Gemma4Config(text_config=text(**TIED).to_dict(), vision_config=VISION),
    "unified text": unified_text,
    "unified, shared keys": lambda: unified_text(**SHARING),
    "unified multimodal": lambda: Gemma4UnifiedConfig(
        text_config=unified_text(**TIED).to_dict(), vision_config=UNIFIED_VISION, audio_config={}
    ),
}


@pytest.fixture(scope="module")
def makes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Make -> folder of a tiny random target of it."""
    folder = tmp_path_factory.mktemp("gemma4")
    found = {}
    for seed, (make, config) in enumerate(MAKES.items()):
        found[make] = folder / str(seed) / "gemma4"
        random_model(config(), seed=seed).save_pretrained(found[make])
    return found


# Targets


@pytest.mark.parametrize("make", MAKES)
def test_ragged_rounds_equal_hugging_faces_model(make: str, makes: dict[str, Path]) -> None:
    """A prefill of texts longer and shorter than the window of 6, single tokens, and rounds with rejected tokens."""
    every = range(-1, LAYERS - 1)
    target, model = tiny_target(makes[make], capture_layers=every), reference(makes[make])
    texts = [random_ids(32, seed=seed) for seed in range(3)]
    with torch.inference_mode():
        full = [model(torch.tensor([one]), output_hidden_states=True) for one in texts]
    rows = target.new_rows()
    steps = [
        ([0, 0, 0], [19, 2, 7], 0),
        ([19, 2, 7], [1, 1, 1], 0),
        ([20, 3, 8], [5, 2, 4], 3),
        ([22, 4, 9], [8, 9, 1], 0),
    ]
    for starts, counts, num_wrong in steps:
        ids, keep, states, logits = [], [], [], []
        for one, expected, start, count in zip(texts, full, starts, counts, strict=True):
            right, part = count - min(num_wrong, count - 1), slice(start, start + count)
            ids += [(token + 7 * (place >= right)) % VOCAB for place, token in enumerate(one[part])]
            keep += [place < right for place in range(count)]
            states.append(torch.stack([layer[0, part] for layer in expected.hidden_states], dim=1))
            logits.append(expected.logits[0, part])
        batch = FlatBatch.make(starts, counts=counts, slots=range(3), device=CPU)
        output = target.forward(torch.tensor(ids), batch=batch, rows=rows)
        got = torch.cat((output.captured, output.last_hidden.unsqueeze(1)), dim=1)
        assert got.shape == (sum(counts), LAYERS + 1, HIDDEN)
        torch.testing.assert_close(got[keep], torch.cat(states)[keep], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(target.logits(got[:, -1])[keep], torch.cat(logits)[keep], rtol=1e-4, atol=1e-4)


def test_logits_are_capped(makes: dict[str, Path]) -> None:
    """By hand: 8 tanh(x / 8) of the plain product."""
    target = tiny_target(makes["multimodal"])
    hidden = 3 * torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(0))
    plain = hidden.double() @ target.shared.head.double().T
    assert float(plain.abs().max()) > 8
    torch.testing.assert_close(target.logits(hidden).double(), 8 * (plain / 8).tanh(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", ["text", "biases, no soft-cap", "multimodal", "unified multimodal"])
def test_shared_weights_are_read_without_the_model(make: str, makes: dict[str, Path]) -> None:
    shared, model = load_shared(makes[make], family=FAMILY), reference(makes[make])
    assert torch.equal(shared.embedding, model.get_input_embeddings().weight)
    assert torch.equal(shared.head, model.get_output_embeddings().weight)
    assert (shared.head is shared.embedding) == ("multimodal" in make)
    assert shared.embedding_scale == pytest.approx(5.6568542)  # sqrt(32)
    assert shared.logit_softcap == (None if make == "biases, no soft-cap" else 8.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_embedding_scale_is_rounded_to_the_weights_dtype(dtype: torch.dtype, makes: dict[str, Path]) -> None:
    shared = load_shared(makes["unified multimodal"], family=FAMILY).to(dtype=dtype, device=CPU)
    ids = torch.arange(VOCAB)
    with torch.inference_mode():
        expected = reference(makes["unified multimodal"], dtype=dtype).get_input_embeddings()(ids)
    assert torch.equal(shared.embed(ids), expected)
    if dtype == torch.bfloat16:  # the neighbours of sqrt(32) are 5.65625 and 5.6875
        assert torch.equal(expected, (shared.embedding.double() * 5.65625).bfloat16())


# The draft layer


def inputs(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("config", [text, unified_text])
def test_rotary_frequencies_by_hand(config: Any) -> None:
    """A quarter of the 8 angles turns, with exponents over the whole head: 1 and 1e6 ** (-2 / 16)."""
    frequencies, scale = FAMILY.rope(config())
    torch.testing.assert_close(frequencies, torch.tensor([1.0, 0.17782794, 0, 0, 0, 0, 0, 0]))
    assert scale == 1.0


def test_the_geometry_is_that_of_full_attention() -> None:
    for config in (text(), unified_text()):
        geometry = FAMILY.geometry(config)
        assert (geometry.head_size, geometry.num_heads, geometry.num_kv_heads) == (16, 4, 1)
        assert (geometry.attention_scale, geometry.values, geometry.head_norms) == (1.0, "keys", True)
    geometry = FAMILY.geometry(text(attention_k_eq_v=False))
    assert (geometry.head_size, geometry.num_kv_heads, geometry.values) == (16, 2, "projected")


# Drafters


def drafter_on(folder: Path, *, kind: str = "dspark", layers: int = 2, seed: int = 5, **changes: Any) -> DFlash:
    """A drafter of random weights."""
    row = drafter_row(kind, head_norms=True, layers=layers)
    config = drafter_config(row, target=target_row(folder, **changes), target_folder=folder)
    drafter = build_drafter(config, target_folder=folder)
    assert isinstance(drafter, DFlash)
    randomize(drafter, seed=seed)
    return drafter.eval().requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_norm_of_a_drafter_is_hugging_faces_bit_by_bit(dtype: torch.dtype, makes: dict[str, Path]) -> None:
    drafter = drafter_on(makes["text"]).to(dtype)
    norms = {name: part for name, part in drafter.named_modules() if name.endswith("norm")}
    assert len(norms) == 2 + 2 * (4 + 3)
    for name, ours in norms.items():
        size, scaled = (16 if "self_attn" in name else HIDDEN), not name.endswith("v_norm")
        theirs = Gemma4RMSNorm(size, eps=1e-5, with_scale=scaled).to(dtype)
        theirs.load_state_dict(ours.state_dict())
        x = (30 * torch.randn(50, size, generator=torch.Generator().manual_seed(3))).to(dtype)
        assert torch.equal(ours(x), theirs(x)), name


def test_the_soft_cap_comes_before_the_sequential_bias(makes: dict[str, Path]) -> None:
    """By hand from the block's states: 8 tanh(U_k / 8) + W2 W1[x_{k-1}]."""
    drafter = drafter_on(makes["multimodal"])
    captured, rows, seen = inputs(6, 7, 3), drafter.new_rows(), []
    batch = FlatBatch.make([0], counts=[7], slots=[0], device=CPU)
    drafter.observe(Observation(torch.zeros(7, dtype=torch.int64), captured, captured[:, 0], batch), rows=rows)

    def sample(logits: Tensor, slot: int) -> tuple[Tensor, None]:
        seen.append(logits[0].double())
        return torch.tensor([11 + slot]), None

    drafter.propose(torch.tensor([10]), positions=[7], rows=rows, sample=sample)
    with torch.inference_mode():
        states = drafter.block_states(torch.tensor([10]), positions=[7], rows=rows)[0].double()
    w1, w2 = (drafter.get_parameter(f"markov_head.markov_{name}.weight").double() for name in ("w1", "w2"))
    plain = states @ drafter.shared.head.double().T
    assert float(plain.abs().max()) > 4
    for slot in range(4):
        expected = 8 * (plain[slot] / 8).tanh() + w2 @ w1[10 + slot]
        torch.testing.assert_close(seen[slot], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("make", ["own values", "multimodal", "unified multimodal"])
def test_a_start_from_the_target_copies_its_last_full_attention_layers(make: str, makes: dict[str, Path]) -> None:
    """Layers 2 and 4 of five, scalars included, and their context rows are the target's own behind layer 1."""
    folder, captured = makes[make], (0, 1)
    drafter = drafter_on(folder, capture_layers=captured)
    names = start_from_target(drafter, target_folder=folder)
    theirs = reference(folder).get_decoder()
    for own, number in zip(drafter.layers, (2, 4), strict=True):
        expected = theirs.layers[number].state_dict()
        assert own.state_dict().keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in own.state_dict().items())
    assert torch.equal(drafter.norm.weight, theirs.norm.weight)
    heads = {name for name in drafter.state_dict() if name.startswith(("markov_head", "confidence_head"))}
    assert set(names) == set(drafter.state_dict()) - heads

    target, ids = tiny_target(folder, capture_layers=captured), torch.tensor(random_ids(10, seed=3))
    batch = FlatBatch.make([0], counts=[10], slots=[0], device=CPU)
    target_rows, draft_rows = target.new_rows(), drafter.new_rows()
    output = target.forward(ids, batch=batch, rows=target_rows)
    drafter.observe(Observation(ids, output.captured, output.last_hidden, batch), rows=draft_rows)
    for own, other in ((draft_rows.keys[0], target_rows.keys[2]), (draft_rows.values[0], target_rows.values[2])):
        assert own is not None
        assert other is not None
        torch.testing.assert_close(own[0, :10], other[0, :10], rtol=1e-4, atol=1e-5)


def test_draft_layers_beyond_the_targets_full_attention_layers_keep_their_start(makes: dict[str, Path]) -> None:
    drafter = drafter_on(makes["text"], layers=3)
    before = {name: value.clone() for name, value in drafter.state_dict().items()}
    names = start_from_target(drafter, target_folder=makes["text"])
    assert all((name in names) == name.startswith(("layers.1", "layers.2")) for name in before if name[:6] == "layers")
    assert all(torch.equal(value, before[name]) for name, value in drafter.state_dict().items() if name not in names)
    assert torch.equal(drafter.hidden_norm.weight, reference(makes["text"]).model.layers[2].input_layernorm.weight)


def test_layers_to_start_as_by_hand() -> None:
    """48 layers of which every sixth is a full one; those that borrow their keys are no start."""
    config = Gemma4UnifiedTextConfig(num_hidden_layers=48)
    assert FAMILY.start_layers(config)[-5:] == [23, 29, 35, 41, 47]
    assert FAMILY.start_layers(text(**SHARING, **PER_LAYER)) == [1]


def test_greedy_speculative_decoding_is_plain_decoding_is_hugging_faces(tmp_path: Path) -> None:
    """A vocabulary of 8, so that some drafts are right: windows cut, rows roll back, requests join and leave."""
    vocab, end = 8, 7
    folder = save_tiny(tmp_path, family="gemma4", seed=4, vocab_size=vocab, eos_token_id=end)
    drafter = drafter_on(folder, seed=7, vocab_size=vocab, mask_token_id=6)
    prompts = [random_ids(4 + 6 * seed, seed=seed, vocab=6) for seed in range(4)]
    requests = [Request(str(i), tuple(p), 30, Sampling(temperature=0.0), seed=i) for i, p in enumerate(prompts)]
    target, model = tiny_target(folder), reference(folder)
    expected = [hugging_face_greedy(model, prompt, num=30) for prompt in prompts]
    assert [len(answer) for answer in expected] == [30, 30, 30, 1]
    for one in (drafter, None):
        found = Engine(target, drafter=one, end_ids=[end], batch_size=3).generate(requests)
        assert [list(generation.token_ids) for generation in found] == expected
        if one is not None:
            accepted = {item.accepted for generation in found for item in generation.rounds}
            assert accepted == {0, 1, 2, 3}


# What is refused


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (EXPERTS, "enable_moe_block"),
        (PER_LAYER, "hidden_size_per_layer_input"),
        ({"hidden_activation": "silu"}, "hidden_activation"),
    ],
    ids=["experts", "per-layer inputs", "activation"],
)
def test_parts_that_a_draft_layer_lacks_are_refused_by_name(changes: dict, named: str, tmp_path: Path) -> None:
    text(**changes).save_pretrained(tmp_path / "gemma4")
    with pytest.raises(TargetError, match=named):
        drafter_on(tmp_path / "gemma4")


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (lambda: unified_text(use_bidirectional_attention="all"), "use_bidirectional_attention all"),
        (lambda: text(**SHARING), "num_kv_shared_layers 2, hidden_size_per_layer_input 0"),
        (lambda: unified_text(num_kv_shared_layers=LAYERS), f"num_kv_shared_layers.*got {LAYERS}"),
    ],
    ids=["bidirectional", "shared keys without per-layer inputs", "all keys shared"],
)
def test_decoders_that_cannot_run_are_refused_by_name(config: Any, named: str) -> None:
    with pytest.raises(TargetError, match=named):
        FAMILY.text_config(config())


def test_a_drafter_without_head_norms_is_refused(makes: dict[str, Path]) -> None:
    with pytest.raises(ParamsError, match="head_norms must be true on gemma4 targets"):
        drafter_config(drafter_row("dflash"), target=target_row(makes["text"]), target_folder=makes["text"])
