"""What a published directory drafts, computed in float64 from its tensors and DeepSpec's formulas alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from draftsmith.drafters.base import Observation
from draftsmith.drafters.registry import load_drafter
from draftsmith.nn.kv import FlatBatch
from draftsmith.targets.base import load_shared
from draftsmith.targets.families import FAMILIES
from tests.tiny_models import reference, tiny_folders
from tests.unit.drafters import published

__all__ = ["tiny_folders"]

TOKENS, ANCHOR, SIZE = 9, 21, 7
EPS = 1e-6


def norm(x: Tensor, weight: Tensor | float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def rotated(x: Tensor, *, positions: Tensor, frequencies: list[float]) -> Tensor:
    """x [n, heads, E] turned pair by pair, dimension i with i + E/2."""
    angles = positions.double()[:, None] * torch.tensor(frequencies, dtype=torch.float64)
    cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@dataclass
class Directory:
    """A published directory's tensors in float64, and what differs between the two families' layers."""

    tensors: dict[str, Tensor]
    body: dict[str, Any]

    @property
    def is_gemma4(self) -> bool:
        return "target_model_type" in self.body

    @property
    def size(self) -> int:
        """E."""
        return int(self.body["global_head_dim" if self.is_gemma4 else "head_dim"])

    @property
    def frequencies(self) -> list[float]:
        """Gemma4: a quarter of the dimensions turns, exponents over the whole head."""
        turning = self.size // 8 if self.is_gemma4 else self.size // 2
        return [1e6 ** (-2 * i / self.size) for i in range(turning)] + [0.0] * (self.size // 2 - turning)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.tensors[f"{name}.weight"].T

    def normed(self, x: Tensor, name: str) -> Tensor:
        return norm(x, self.tensors[f"{name}.weight"])

    def attention(self, x: Tensor, *, context: Tensor, layer: int) -> Tensor:
        """x [K, D] after its input norm, context [T, D] -> [K, D]; nothing is masked."""
        part, both = f"layers.{layer}.self_attn", torch.cat((context, x))
        positions = torch.arange(len(both))

        def heads(states: Tensor, name: str) -> Tensor:
            return self.linear(states, f"{part}.{name}").unflatten(-1, (-1, self.size))

        values = norm(heads(both, "k_proj"), 1.0) if self.is_gemma4 else heads(both, "v_proj")
        queries = self.normed(heads(x, "q_proj"), f"{part}.q_norm")
        keys = self.normed(heads(both, "k_proj"), f"{part}.k_norm")
        queries = rotated(queries, positions=positions[len(context) :], frequencies=self.frequencies)
        keys = rotated(keys, positions=positions, frequencies=self.frequencies)
        group = queries.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhe,khe->hqk", queries, keys) * (1.0 if self.is_gemma4 else self.size**-0.5)
        mixed = torch.einsum("hqk,khe->qhe", scores.softmax(-1), values)
        return self.linear(mixed.flatten(1), f"{part}.o_proj")

    def layer(self, x: Tensor, *, context: Tensor, layer: int) -> Tensor:
        name = f"layers.{layer}"
        attended = self.attention(self.normed(x, f"{name}.input_layernorm"), context=context, layer=layer)
        act: Callable[[Tensor], Tensor] = functional.silu
        if self.is_gemma4:
            x = x + self.normed(attended, f"{name}.post_attention_layernorm")
            read, act = (
                self.normed(x, f"{name}.pre_feedforward_layernorm"),
                lambda y: functional.gelu(y, approximate="tanh"),
            )
        else:
            x = x + attended
            read = self.normed(x, f"{name}.post_attention_layernorm")
        inner = act(self.linear(read, f"{name}.mlp.gate_proj")) * self.linear(read, f"{name}.mlp.up_proj")
        out = self.linear(inner, f"{name}.mlp.down_proj")
        if not self.is_gemma4:
            return x + out
        return (x + self.normed(out, f"{name}.post_feedforward_layernorm")) * self.tensors[f"{name}.layer_scalar"]

    def draft(self, captured: Tensor, *, embedding: Tensor, head: Tensor) -> tuple[list[int], Tensor, Tensor]:
        """A block after context captured [T, L, D]: greedy tokens, their logits [K, V], confidence logits [K]."""
        context = self.normed(self.linear(captured.flatten(1), "fc"), "hidden_norm")
        ids = [ANCHOR, *[self.body["mask_token_id"]] * (SIZE - 1)]
        x = embedding[ids] * (math.sqrt(embedding.shape[1]) if self.is_gemma4 else 1.0)
        for layer in range(self.body["num_hidden_layers"]):
            x = self.layer(x, context=context, layer=layer)
        states = self.normed(x, "norm")
        base = states @ head.T
        if self.is_gemma4:
            cap = self.body["final_logit_softcapping"]
            base = cap * (base / cap).tanh()
        tokens, logits, confidence, previous = [], [], [], ANCHOR
        for slot in range(SIZE):
            feature = self.tensors["markov_head.markov_w1.weight"][previous]
            logits.append(base[slot] + self.tensors["markov_head.markov_w2.weight"] @ feature)
            pair = torch.cat((states[slot], feature))
            weight, bias = (self.tensors[f"confidence_head.proj.{part}"] for part in ("weight", "bias"))
            confidence.append((weight @ pair + bias)[0])
            previous = int(logits[-1].argmax())
            tokens.append(previous)
        return tokens, torch.stack(logits), torch.stack(confidence)


@pytest.mark.parametrize(
    ("family", "body", "shapes"),
    [
        ("qwen3", published.QWEN3, published.QWEN3_SHAPES),
        ("llama", published.QWEN3, published.QWEN3_SHAPES),
        ("gemma4", published.GEMMA4, published.GEMMA4_SHAPES),
    ],
)
def test_a_published_dspark_drafts_what_its_formulas_say(
    family: str, body: dict[str, Any], shapes: dict[str, tuple[int, ...]], tmp_path: Path, tiny_folders: dict[str, Path]
) -> None:
    """Also one of Qwen3's layers on a Llama target: such a drafter has head norms that its target lacks."""
    target, own = tiny_folders[family], published.random_weights(shapes, seed=11)
    folder = published.write(tmp_path, body, {**own, **published.target_weights(target)})
    shared = load_shared(target, family=FAMILIES[family])
    drafter = load_drafter(folder, target_folder=target, shared=shared, dtype=torch.float32)

    captured = torch.randn(TOKENS, 3, 32, generator=torch.Generator().manual_seed(2))
    rows = drafter.new_rows()
    batch = FlatBatch.make([0], counts=[TOKENS], slots=[0], device=torch.device("cpu"))
    drafter.observe(Observation(torch.zeros(TOKENS, dtype=torch.int64), captured, captured[:, 0], batch), rows=rows)
    seen: list[Tensor] = []

    def sample(logits: Tensor, _: int) -> tuple[Tensor, None]:
        seen.append(logits[0])
        return logits.argmax(-1), None

    proposal = drafter.propose(torch.tensor([ANCHOR]), positions=[TOKENS], rows=rows, sample=sample)

    model = reference(target)
    tensors = {name: value.double() for name, value in own.items()}
    embedding = model.get_input_embeddings().weight.detach().double()
    head = model.get_output_embeddings().weight.detach().double()
    tokens, logits, confidence = Directory(tensors, body).draft(captured.double(), embedding=embedding, head=head)
    assert proposal.tokens.tolist() == [tokens]
    torch.testing.assert_close(torch.stack(seen).double(), logits, rtol=1e-4, atol=1e-4)
    assert proposal.confidence_logits is not None
    torch.testing.assert_close(proposal.confidence_logits[0].double(), confidence, rtol=1e-4, atol=1e-4)
