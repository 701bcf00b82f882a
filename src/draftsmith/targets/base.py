"""A frozen target: Hugging Face's own layers run on a flat batch of tokens, with captured hidden states.

The model's attention is replaced by attention over `KeyValueRows` through Hugging Face's attention interface, so
that norms, rotary variants and MLPs are the library's own for every family.
Letters: N flat tokens, L captured layers, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from draftsmith.errors import TargetError
from draftsmith.nn.kv import FlatBatch, KeyValueRows
from draftsmith.nn.layers import LayerGeometry
from draftsmith.nn.packed import PackedMatrix, can_pack, pack_linears
from draftsmith.targets.capture import Capture

ATTENTION_NAME = "draftsmith_rows"


@dataclass(frozen=True)
class Family:
    """What a target family adds to the common target: where its text config and parts lie, and its draft layer.

    `text_config` and `weight_prefix` (of the decoder's names in the safetensors) take the model's whole config, the
    others its text config. `start_layers` are the target's layers that a draft layer can start as, ascending.
    """

    name: str
    model_types: tuple[str, ...]
    text_config: Callable[[Any], Any]
    geometry: Callable[[Any], LayerGeometry]
    rope: Callable[[Any], tuple[Tensor, float]]
    embedding_scale: Callable[[Any], float]
    logit_softcap: Callable[[Any], float | None]
    weight_prefix: Callable[[Any], str]
    start_layers: Callable[[Any], Sequence[int]]


@dataclass(frozen=True)
class TargetOutput:
    """Of one forward pass: `captured` [N, L, D] and `last_hidden` [N, D] (after the final norm)."""

    captured: Tensor
    last_hidden: Tensor


@dataclass(frozen=True)
class SharedWeights:
    """What a drafter shares with its target, frozen: embedding [V, D], LM head [V, D] and how they are scaled."""

    embedding: Tensor
    head: Tensor
    embedding_scale: float
    logit_softcap: float | None
    packed_head: PackedMatrix | None = None

    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids [...] -> scaled embeddings [..., D]."""
        rows = nn.functional.embedding(token_ids, self.embedding)
        if self.embedding_scale == 1.0:
            return rows
        return rows * torch.tensor(self.embedding_scale, dtype=rows.dtype, device=rows.device)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, D] -> logits [n, V] in float32, soft-capped where the family does so."""
        rows = hidden.to(self.head.dtype)
        logits = (rows @ self.head.T if self.packed_head is None else self.packed_head.multiply(rows)).float()
        if self.logit_softcap is not None:
            logits = torch.tanh(logits / self.logit_softcap) * self.logit_softcap
        return logits

    def packed(self) -> SharedWeights:
        """The same with the head packed for products, where this machine multiplies faster so."""
        return replace(self, packed_head=PackedMatrix(self.head)) if can_pack(self.head) else self

    def to(self, *, dtype: torch.dtype, device: torch.device) -> SharedWeights:
        embedding = self.embedding.to(device, dtype)
        head = embedding if self.head is self.embedding else self.head.to(device, dtype)
        return SharedWeights(embedding, head, self.embedding_scale, self.logit_softcap)


def attend_rows(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    key_value_rows: KeyValueRows | None = None,
    flat_batch: FlatBatch | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Hugging Face's attention interface over our rows: query [1, H, N, D], key and value [1, G, N, D]."""
    assert key_value_rows is not None
    assert flat_batch is not None
    out = key_value_rows.attend(
        cast(int, module.layer_idx),
        queries=query[0].transpose(0, 1),
        keys=key[0].transpose(0, 1),
        values=value[0].transpose(0, 1),
        batch=flat_batch,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
    )
    return out.unsqueeze(0), None


class Target:
    """A loaded target: `forward` over flat tokens, `logits` of last hidden states, shared weights for drafters."""

    def __init__(self, model: Any, *, family: Family, capture_layers: Sequence[int]) -> None:
        self.model = model.eval().requires_grad_(False)
        self.family = family
        self.config = family.text_config(model.config)
        self.backbone = model.get_decoder()
        self.capture = Capture(
            self.backbone.layers, embedding=self.backbone.get_input_embeddings(), layer_ids=capture_layers
        )
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.shared = SharedWeights(
            model.get_input_embeddings().weight.detach(),
            model.get_output_embeddings().weight.detach(),
            family.embedding_scale(self.config),
            family.logit_softcap(self.config),
        )

    def pack(self) -> None:
        """Pack the matrices where this machine multiplies faster so; the model can only be run from then on."""
        pack_linears(self.backbone)
        self.shared = self.shared.packed()

    def new_rows(self) -> KeyValueRows:
        return KeyValueRows(self.config.num_hidden_layers, dtype=self.dtype, device=self.device)

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, *, batch: FlatBatch, rows: KeyValueRows) -> TargetOutput:
        """One pass over flat tokens [N]; their keys and values are written to `rows`."""
        output = self.backbone(
            input_ids=token_ids.unsqueeze(0),
            position_ids=batch.positions.unsqueeze(0),
            use_cache=False,
            key_value_rows=rows,
            flat_batch=batch,
        )
        return TargetOutput(self.capture.take(), output.last_hidden_state[0])

    @torch.inference_mode()
    def logits(self, last_hidden: Tensor) -> Tensor:
        """last_hidden [n, D] -> float32 logits [n, V]."""
        return self.shared.logits(last_hidden)


def draft_activation(name: str) -> Literal["silu", "gelu_pytorch_tanh"]:
    """A config's `hidden_act` as draft layers know it; raises TargetError for another one."""
    if name == "silu":
        return "silu"
    if name == "gelu_pytorch_tanh":
        return "gelu_pytorch_tanh"
    raise TargetError("hidden_act", got=name, expected="silu or gelu_pytorch_tanh", where="config.json")


def read_config(folder: Path) -> PreTrainedConfig:
    """The Hugging Face config of a folder; raises TargetError if there is none."""
    if not (folder / "config.json").is_file():
        raise TargetError("target folder has no config.json", got=folder, expected="a Hugging Face model folder")
    return AutoConfig.from_pretrained(folder, local_files_only=True)


def load_target(folder: Path, *, family: Family, capture_layers: Sequence[int], dtype: str, device: str) -> Target:
    """Load a target from a Hugging Face folder, its attention replaced by ours.

    Raises TargetError if the folder is not a model of `family`, or lacks weights (Hugging Face would fill them at
    random).
    """
    config = read_config(folder)
    check_family(config, family, folder)
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, attend_rows)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=getattr(torch, dtype),
            attn_implementation=ATTENTION_NAME,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise TargetError(f"target cannot be loaded from {folder}: {' '.join(str(error).split())[:300]}") from None
    model, found = loaded
    missing = sorted(found["missing_keys"])
    if missing:
        raise TargetError(f"{len(missing)} weights are missing in {folder}", got=f"no {missing[0]}")
    target = Target(model.to(device), family=family, capture_layers=capture_layers)
    target.pack()
    return target


def check_family(config: Any, family: Family, folder: Path) -> None:
    """Raise TargetError unless the config is of one of the family's model types."""
    if config.model_type not in family.model_types:
        raise TargetError(
            f"target of another family in {folder}",
            got=config.model_type,
            expected=" or ".join(family.model_types),
            where="params.yaml: targets.<name>.family",
        )


def read_tensors(folder: Path, names: Sequence[str]) -> dict[str, Tensor]:
    """Read single tensors out of a folder's safetensors, without loading the model. Missing names are left out.

    Raises TargetError if there are no safetensors or one cannot be read.
    """
    found: dict[str, Tensor] = {}
    wanted = set(names)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise TargetError("target folder without weights", got=folder, expected="*.safetensors files in it")
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in wanted.intersection(tensors.keys()):
                    found[name] = tensors.get_tensor(name)
        except SafetensorError as error:
            raise TargetError(f"weights cannot be read: {error}", where=str(file)) from None
    return found


def load_shared(folder: Path, *, family: Family) -> SharedWeights:
    """Embedding and LM head of a target, read straight from its safetensors. Raises TargetError if they are missing."""
    whole = read_config(folder)
    config = family.text_config(whole)
    embedding_name = f"{family.weight_prefix(whole)}embed_tokens.weight"
    tensors = read_tensors(folder, [embedding_name, "lm_head.weight"])
    if embedding_name not in tensors:
        raise TargetError(f"{embedding_name} is not in the weights", got=folder)
    embedding = tensors[embedding_name]
    head = embedding if config.tie_word_embeddings else tensors.get("lm_head.weight")
    if head is None:
        raise TargetError("lm_head.weight is not in the weights and embeddings are not tied", got=folder)
    return SharedWeights(embedding, head, family.embedding_scale(config), family.logit_softcap(config))
