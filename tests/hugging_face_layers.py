"""Hugging Face's own decoder layers with a drafter's weights: what drafters are compared with.

The layer's residuals, attention, rotary positions, MLP and norms are the library's code. Only its input norm is
replaced by a reading that the test writes down, because that is where drafters differ from their family's layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextDecoderLayer, Gemma4TextRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

from draftsmith.drafters.base import Observation
from draftsmith.nn.kv import FlatBatch
from draftsmith.targets.base import read_config
from draftsmith.targets.families import FAMILIES
from tests.tiny_models import (
    CAPTURED,
    HIDDEN,
    VARIANTS,
    VOCAB,
    random_ids,
    reference,
    tiny_drafter,
    tiny_folders,
    variant_folders,
)

__all__ = ["tiny_folders", "variant_folders"]

FULL = "full_attention"
ROTARY = {"llama": LlamaRotaryEmbedding, "qwen3": Qwen3RotaryEmbedding, "gemma4": Gemma4TextRotaryEmbedding}
LAYERS = {"llama": LlamaDecoderLayer, "qwen3": Qwen3DecoderLayer, "gemma4": Gemma4TextDecoderLayer}

Reading = Callable[[Tensor], Tensor]


def rotary(family: str, config: Any, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [..., E] in float32 of the family's own module (Gemma4: of full-attention layers)."""
    kind = {"layer_type": FULL} if family == "gemma4" else {}
    cos, sin = ROTARY[family](config)(torch.zeros(1), positions, **kind)
    return cos, sin


def family_layer(family: str, config: Any) -> Any:
    """A decoder layer of the family (Gemma4: one of full attention) whose weights want to be loaded."""
    number = config.layer_types.index(FULL) if family == "gemma4" else 0
    return LAYERS[family](config, number).eval()


def run_layer(layer: Any, x: Tensor, *, mask: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """x [B, n, D] through a decoder layer; mask bool [n, n], True = visible."""
    additive = torch.zeros(mask.shape).masked_fill(~mask, float("-inf")).expand(len(x), 1, -1, -1)
    shared = {"shared_kv_states": {}} if isinstance(layer, Gemma4TextDecoderLayer) else {}
    out: Tensor = layer(x, attention_mask=additive, position_embeddings=rope, **shared)
    return out


def causal(num: int, *, window: int | None = None) -> Tensor:
    """What each of `num` positions sees, no further back than the window: bool [n, n]."""
    behind = torch.arange(num).unsqueeze(1) - torch.arange(num)
    return (behind >= 0) & (behind < (window or num))


class Read(nn.Module):
    """In the place of an input norm: whatever the test says that attention reads."""

    reading: Reading

    def forward(self, x: Tensor) -> Tensor:
        return self.reading(x)


class Reference:
    """Of one drafter on a tiny target: Hugging Face's layers and norms with its weights, the target's embedding, head
    and rotary module. `norms` maps the drafter's own names (`norm`, `hidden_norm`, `layers.0.input_layernorm`, ...)."""

    def __init__(self, drafter: Any, folder: Path) -> None:
        self.family = folder.name
        self.model = reference(folder).requires_grad_(False)
        self.config = read_config(folder)
        self.config._attn_implementation = "eager"
        self.layers: list[Any] = []
        self.norms: dict[str, Any] = {}
        for number, own in enumerate(drafter.layers):
            self.layers.append(self._layer(own, f"layers.{number}"))
        for name, part in drafter.named_children():
            if name.endswith("norm"):
                self.norms[name] = self._norm(part)

    def _layer(self, own: Any, name: str) -> Any:
        """The family's layer with the weights of `own`; a Llama layer with head norms is Qwen3's."""
        family, config = self.family, self.config
        if family == "llama" and own.self_attn.geometry.head_norms:
            family = "qwen3"
            shown = set(Qwen3Config().to_dict()) - {"model_type", "layer_types", "architectures"}
            config = Qwen3Config(**{key: value for key, value in config.to_dict().items() if key in shown})
            config._attn_implementation = "eager"
        layer = family_layer(family, config)
        self.norm_class = type(layer.post_attention_layernorm)
        for part in ("q_proj", "k_proj", "v_proj"):
            old = getattr(layer.self_attn, part)
            if old is not None:
                wide = getattr(own.self_attn, part).in_features
                setattr(layer.self_attn, part, nn.Linear(wide, old.out_features, bias=old.bias is not None))
        weights = own.state_dict()
        for norm in ("input_layernorm", "hidden_norm"):
            if weights.pop(f"{norm}.weight", None) is not None:
                self.norms[f"{name}.{norm}"] = self._norm(getattr(own, norm))
        layer.input_layernorm = Read()
        layer.load_state_dict(weights, strict=True)
        return layer

    def _norm(self, own: Any) -> Any:
        norm = self.norm_class(len(own.weight), eps=self.config.rms_norm_eps)
        norm.load_state_dict(own.state_dict(), strict=True)
        return norm

    def run(self, number: int, x: Tensor, *, reads: Reading, positions: Tensor, mask: Tensor) -> Tensor:
        """x [n, D] through layer `number`: attention reads `reads(x)`; positions [n], mask bool [n, n] -> [n, D]."""
        self.layers[number].input_layernorm.reading = lambda rows: reads(rows)  # a module would join its parameters
        rope = rotary(self.family, self.config, positions.unsqueeze(0))
        return run_layer(self.layers[number], x.unsqueeze(0), mask=mask, rope=rope)[0]

    def embed(self, ids: Tensor) -> Tensor:
        """ids [n] -> the target's own embeddings [n, D], scaled where the family does so."""
        embedded: Tensor = self.model.get_input_embeddings()(ids)
        return embedded

    def logits(self, states: Tensor) -> Tensor:
        """states [n, D] after the final norm -> logits [n, V] in float64, soft-capped where the target does so."""
        logits = states.detach().double() @ self.model.get_output_embeddings().weight.double().T
        cap = self.config.to_dict().get("final_logit_softcapping")
        return logits if cap is None else cap * (logits / cap).tanh()

    def check_gradients(self, drafter: Any, found: Tensor, *, expected: Tensor, others: dict[str, Tensor]) -> None:
        """The same random loss on both: every parameter of the drafter gets the gradient of its like here.

        `others`: the drafter's parameters outside layers and norms, as leaves of the graph of `expected`.
        """
        chosen = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
        (found * chosen).sum().backward()
        (expected * chosen).sum().backward()
        pairs = {
            f"layers.{number}.{name}": part
            for number, layer in enumerate(self.layers)
            for name, part in layer.named_parameters()
        }
        pairs |= {f"{name}.weight": norm.weight for name, norm in self.norms.items()} | others
        assert pairs.keys() == dict(drafter.named_parameters()).keys()
        for name, part in pairs.items():
            got = drafter.get_parameter(name).grad
            assert got is not None
            assert part.grad is not None
            assert float((got - part.grad).norm()) < 1e-4 * float(part.grad.norm()), name


# Cases and rounds that the tests of all kinds share

MAKES = [*FAMILIES, *VARIANTS, "llama, head norms"]
PROMPTS, ACCEPTED = (6, 2, 9), ((0, 4, 2, 1), (3, 0, 0, 4), (1, 2, 4, 0))
"""Of three requests: tokens before the first anchor, and how many draft tokens each round accepts (at most K)."""


@dataclass
class Make:
    """A make of target, and the drafters on it."""

    folder: Path
    head_norms: bool

    def drafter(self, kind: str, *, windows: tuple[int | None, ...]) -> Any:
        return tiny_drafter(kind, self.folder, seed=7, head_norms=self.head_norms, windows=windows)


@pytest.fixture(params=MAKES)
def make(request: pytest.FixtureRequest, tiny_folders: dict[str, Path], variant_folders: dict[str, Path]) -> Make:
    """Every family and variant, and Llama's layer with head norms."""
    own = "head norms" in request.param
    folder = tiny_folders["llama"] if own else {**tiny_folders, **variant_folders}[request.param]
    return Make(folder, own or folder.name != "llama")


@dataclass
class Drafted:
    """One request's block in one round: `text` up to its anchor (the last token), the target's states of each of its
    positions, and the tokens drafted [K] with the logits [K, V] that they were chosen by."""

    text: list[int]
    captured: Tensor
    hidden: Tensor
    tokens: Tensor
    logits: Tensor


def drafted_rounds(drafter: Any) -> Iterator[Drafted]:
    """Rounds of three requests side by side: each commits some of its draft tokens and another one.

    The target's states are random, its tokens too where it rejects; rejected rows stay behind in the drafter's rows.
    """
    longest = max(PROMPTS) + 1 + sum(max(row) + 1 for row in ACCEPTED)
    generator = torch.Generator().manual_seed(11)
    captured = torch.randn(3, longest, len(CAPTURED), HIDDEN, generator=generator)
    hidden = torch.randn(3, longest, HIDDEN, generator=generator)
    texts = [random_ids(count + 1, seed=seed) for seed, count in enumerate(PROMPTS)]
    rows, shown = drafter.new_rows(), [0, 0, 0]
    for number in range(len(ACCEPTED[0])):
        anchors = [len(text) - 1 for text in texts]
        parts = [slice(start, stop) for start, stop in zip(shown, anchors, strict=True)]
        counts = [part.stop - part.start for part in parts]
        batch = FlatBatch.make(shown, counts=counts, slots=range(3), device=torch.device("cpu"))
        observation = Observation(
            torch.tensor([token for text, part in zip(texts, parts, strict=True) for token in text[part]]),
            torch.cat([states[part] for states, part in zip(captured, parts, strict=True)]),
            torch.cat([states[part] for states, part in zip(hidden, parts, strict=True)]),
            batch,
        )
        drafter.observe(observation, rows=rows)
        seen: list[Tensor] = []

        def sample(logits: Tensor, slot: int, seen: list[Tensor] = seen) -> tuple[Tensor, None]:
            assert slot == len(seen)
            seen.append(logits)
            return logits.argmax(1), None

        last = torch.tensor([text[-1] for text in texts])
        tokens = drafter.propose(last, positions=anchors, rows=rows, sample=sample).tokens
        for row, text in enumerate(texts):
            logits = torch.stack([step[row] for step in seen])
            yield Drafted(list(text), captured[row], hidden[row], tokens[row], logits)
            taken = tokens[row, : ACCEPTED[row][number]].tolist()
            text += [*taken, (3 + 5 * number + row) % VOCAB]
        shown = anchors
