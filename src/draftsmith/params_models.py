"""Rows of params.yaml that say what a model is: targets and drafters. Imports no torch."""

from __future__ import annotations

from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

Dtype = Literal["bfloat16", "float32"]
Domain = Literal["chat", "math", "code"]
LAST_HIDDEN_KINDS = ("mtp1",)


class Row(BaseModel):
    """A frozen row in which an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


AnyRow = TypeVar("AnyRow", bound=Row)


class Sampling(Row):
    """How the target is served: temperature 0 is greedy; top_p 1, top_k 0 and min_p 0 switch a filter off."""

    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    min_p: float = Field(0.0, ge=0, le=1)


class Target(Row):
    """A target model. Exactly one of `package`, `hf_id`, `folder` says where its weights come from.

    Its dimensions stand here so that planning needs no weights; they are checked against its config on load.
    `capture_layers` are ids of decoder layers whose output the drafter reads; -1 is the embedding output.
    """

    family: Literal["llama", "qwen3", "gemma4"]
    package: str | None = None
    hf_id: str | None = None
    revision: str | None = None
    folder: str | None = None
    hidden_size: int = Field(gt=0)
    num_layers: int = Field(gt=1)
    vocab_size: int = Field(gt=1)
    mask_token_id: int = Field(ge=0)
    capture_layers: tuple[int, ...] = Field(min_length=1)
    last_hidden: Literal["labels", "all"] = "labels"
    codec: Literal["plain", "bf16", "int8"] = "bf16"
    dtype: Dtype = "bfloat16"
    system_prompt: str | None = None
    sampling: Sampling = Sampling()

    @model_validator(mode="after")
    def _consistent(self) -> Target:
        named = [name for name in ("package", "hf_id", "folder") if getattr(self, name) is not None]
        if len(named) != 1:
            raise ValueError(f"exactly one of package, hf_id, folder must be set, got {named or 'none'}")
        if self.hf_id is not None and self.revision is None:
            raise ValueError("hf_id needs a pinned revision (a commit sha)")
        if list(self.capture_layers) != sorted(set(self.capture_layers)):
            raise ValueError(f"capture_layers must strictly increase, got {list(self.capture_layers)}")
        if self.capture_layers[0] < -1 or self.capture_layers[-1] >= self.num_layers - 1:
            raise ValueError(
                f"capture_layers must lie in -1..{self.num_layers - 2} (the last layer cannot be captured), "
                f"got {list(self.capture_layers)}"
            )
        if self.mask_token_id >= self.vocab_size:
            raise ValueError(f"mask_token_id must be < vocab_size {self.vocab_size}, got {self.mask_token_id}")
        return self


class Sequential(Row):
    """The sequential head (DSpark Eq. 4-6) and the rank r of its bias."""

    kind: Literal["markov", "gated", "rnn"] = "markov"
    rank: int = Field(256, gt=0)


class LossWeights(Row):
    """Weights of the training loss: cross-entropy to the labels, total variation to the target's distribution, BCE of
    the confidence; and the soft cross-entropy to the target's distribution, which EAGLE-3 has in their place."""

    ce: float = Field(0.0, ge=0)
    tv: float = Field(0.0, ge=0)
    confidence: float = Field(0.0, ge=0)
    soft_ce: float = Field(0.0, ge=0)


class Drafter(Row):
    """A drafter's architecture and the loss that defines it. `block_size` is K: draft tokens a round.

    `sample_from_anchor`: the anchor's own slot drafts the first token (false: only the mask slots draft, the original
    DFlash). `sliding_window`: tokens back that the draft layers see (null: all). `confidence_with_markov`: whether
    the confidence head reads the sequential head's feature too. `step_decay`: EAGLE-3's weight of a further step.
    """

    kind: Literal["dspark", "dflash", "eagle3", "mtp1"]
    block_size: int = Field(ge=1, le=64)  # decoding has random numbers for so many slots of a round
    layers: int = Field(1, ge=1)
    head_norms: bool = False
    sliding_window: int | None = Field(None, gt=0)
    sequential: Sequential | None = None
    confidence: bool = False
    confidence_with_markov: bool = True
    sample_from_anchor: bool = True
    step_decay: float = Field(0.8, gt=0, le=1)
    loss: LossWeights

    @property
    def reads_last_hidden(self) -> bool:
        """Whether it reads the target's last hidden state of every token: the cache must hold them all."""
        return self.kind in LAST_HIDDEN_KINDS

    @model_validator(mode="after")
    def _consistent(self) -> Drafter:
        if self.kind == "dspark" and self.sequential is None:
            raise ValueError("a dspark drafter needs `sequential`; without one it is a dflash")
        if self.kind != "dspark" and (self.sequential is not None or self.confidence):
            raise ValueError(f"a {self.kind} drafter has neither `sequential` nor `confidence`")
        if self.kind in ("dspark", "dflash") and self.block_size < 2:
            raise ValueError(f"block_size must be >= 2, got {self.block_size}")
        if self.kind == "mtp1" and self.block_size != 1:
            raise ValueError(f"an mtp1 drafter drafts one token: block_size must be 1, got {self.block_size}")
        if self.kind in ("eagle3", "mtp1") and self.layers != 1:
            raise ValueError(f"an {self.kind} drafter has one layer, got {self.layers}")
        if self.kind in ("eagle3", "mtp1") and not self.sample_from_anchor:
            raise ValueError(f"sample_from_anchor is for blocks of masks, which an {self.kind} drafter has not")
        self._check_loss()
        return self

    def _check_loss(self) -> None:
        if self.loss.confidence > 0 and not self.confidence:
            raise ValueError("loss.confidence > 0 needs `confidence: true`")
        if self.kind == "eagle3":
            if self.loss.soft_ce == 0 or self.loss.ce + self.loss.tv > 0:
                raise ValueError("an eagle3 drafter learns from loss.soft_ce > 0 alone")
        elif self.loss.soft_ce > 0:
            raise ValueError(f"loss.soft_ce is the loss of eagle3, not of {self.kind}")
        elif self.loss.ce + self.loss.tv == 0:
            raise ValueError("loss.ce and loss.tv cannot both be 0")
