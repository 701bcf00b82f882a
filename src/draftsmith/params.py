"""The strict schema of params.yaml: every knob that changes a result, and nothing else. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from draftsmith.errors import ParamsError

Dtype = Literal["bfloat16", "float32"]
Domain = Literal["chat", "math", "code"]
LAST_HIDDEN_KINDS = ("mtp1",)


class Row(BaseModel):
    """A frozen row in which an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


AnyRow = TypeVar("AnyRow", bound=Row)


class Sampling(Row):
    """How the target is served: temperature 0 is greedy; top_p 1 and top_k 0 switch a filter off."""

    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)


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
    block_size: int = Field(ge=1)
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


class PromptFile(Row):
    """A user's own prompts: JSON lines of {"turns": [...]} or {"messages": [...]}."""

    path: str
    domain: Domain


class Prompts(Row):
    """How many prompts of which domains; counts are in all, shared out by `mix`."""

    sources: tuple[str, ...]
    files: tuple[PromptFile, ...] = ()
    mix: dict[Domain, float]
    num_train: int = Field(gt=0)
    num_validation: int = Field(gt=0)
    num_calibration: int = Field(gt=0)
    max_prompt_chars: int = Field(2000, gt=0)
    seed: int = 0

    @model_validator(mode="after")
    def _consistent(self) -> Prompts:
        if not self.sources and not self.files:
            raise ValueError("at least one of prompts.sources and prompts.files must have a row")
        if not self.mix or any(share <= 0 for share in self.mix.values()):
            raise ValueError(f"prompts.mix must hold positive shares, got {self.mix}")
        return self


class Answers(Row):
    """How the target answers the training and validation prompts."""

    max_new_tokens: int = Field(gt=0)
    batch_size: int = Field(gt=0)
    seed: int = 0


class Cache(Row):
    """Layout of the target cache, in tokens."""

    shard_tokens: int = Field(gt=0)
    chunk_tokens: int = Field(gt=0)
    batch_tokens: int = Field(gt=0)
    max_length: int = Field(gt=1)
    seed: int = 0

    @model_validator(mode="after")
    def _consistent(self) -> Cache:
        if self.shard_tokens % self.chunk_tokens:
            raise ValueError(
                f"shard_tokens must be a multiple of chunk_tokens {self.chunk_tokens}, got {self.shard_tokens}"
            )
        if self.shard_tokens < self.max_length:
            raise ValueError(f"shard_tokens must be >= max_length {self.max_length}, got {self.shard_tokens}")
        return self


class Train(Row):
    """The training recipe. `global_batch` counts samples a step over all ranks and micro-steps.

    `row_tokens`: samples of a micro-batch are packed into rows of at most so many tokens (0: a row a sample).
    `max_supervised_tokens` trains on the first samples of the cache whose supervised tokens fit in it (null: on all).
    """

    steps: int = Field(gt=0)
    global_batch: int = Field(gt=0)
    micro_batch: int = Field(gt=0)
    anchors: int = Field(gt=0)
    row_tokens: int = Field(0, ge=0)
    gamma_w: float = Field(4.0, gt=0)
    lr: float = Field(gt=0)
    warmup_share: float = Field(0.04, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    clip_norm: float = Field(1.0, gt=0)
    init: Literal["target_layers", "random"] = "target_layers"
    dtype: Dtype = "bfloat16"
    zero_stage: Literal[0, 1, 2] = 1
    min_supervised: int = Field(14, ge=2)
    max_supervised_tokens: int | None = Field(None, gt=0)
    checkpoint_every: int = Field(gt=0)
    keep_checkpoints: int = Field(1, gt=0)
    validate_every: int = Field(gt=0)
    seed: int = 0


class Calibrate(Row):
    """Rounds of real speculative decoding on the calibration split, and the grid of the fit (DSpark 3.2.1)."""

    max_new_tokens: int = Field(gt=0)
    batch_size: int = Field(gt=0)
    temperature: float = Field(1.0, ge=0)
    holdout_share: float = Field(0.5, gt=0, lt=1)
    min_rounds: int = Field(200, gt=0)
    num_bins: int = Field(20, gt=1)
    grid_low: float = Field(0.2, gt=0, le=1)
    grid_high: float = Field(5.0, gt=1)
    grid_points: int = Field(200, gt=1)
    seed: int = 0


class Benchmark(Row):
    """One benchmark of the evaluation and how many of its prompts are used."""

    name: str
    cap: int = Field(gt=0)


class Evaluate(Row):
    """Lossless speculative decoding against plain decoding of the same engine."""

    benchmarks: tuple[Benchmark, ...] = Field(min_length=1)
    temperatures: tuple[Annotated[float, Field(ge=0)], ...] = Field(min_length=1)
    batch_size: int = Field(gt=0)
    max_new_tokens: int = Field(gt=0)
    seed: int = 0

    @model_validator(mode="after")
    def _consistent(self) -> Evaluate:
        names = [item.name for item in self.benchmarks]
        for field, values in (("benchmarks", names), ("temperatures", list(self.temperatures))):
            if len(set(values)) != len(values):
                raise ValueError(f"{field} must differ, got {values}")
        return self


class Run(Row):
    """One drafter on one target; `train` overrides single fields of the common training row."""

    drafter: str
    target: str
    train: dict[str, Any] = Field(default_factory=dict)


class Study(Row):
    """Drafters side by side on one target: equal data, equal steps. The first is the one that others are compared to.

    `train` and `evaluate` override single fields of the common rows, for every drafter of the study alike.
    """

    target: str
    drafters: tuple[str, ...] = Field(min_length=2)
    train: dict[str, Any] = Field(default_factory=dict)
    evaluate: dict[str, Any] = Field(default_factory=dict)


class Params(Row):
    """The whole of params.yaml."""

    active_targets: tuple[str, ...]
    runs: dict[str, Run] = Field(min_length=1)
    targets: dict[str, Target]
    drafters: dict[str, Drafter]
    prompts: Prompts
    answers: Answers
    cache: Cache
    train: Train
    calibrate: Calibrate
    evaluate: Evaluate
    study: Study | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Params:
        for key, run in self.runs.items():
            if run.drafter not in self.drafters:
                raise ValueError(f"runs.{key}.drafter: no such row in drafters: {run.drafter!r}")
            if run.target not in self.targets:
                raise ValueError(f"runs.{key}.target: no such row in targets: {run.target!r}")
            if self.drafters[run.drafter].reads_last_hidden and self.targets[run.target].last_hidden != "all":
                raise ValueError(f"runs.{key}: {run.drafter} needs targets.{run.target}.last_hidden: all")
            stem = f"{run.drafter}-{run.target}"
            if key != stem and not key.startswith(stem + "-"):
                raise ValueError(f"runs.{key}: the key must be {stem!r} or {stem + '-<variant>'!r}")
            try:
                merged(self.train, run.train)
            except ValidationError as error:
                raise ValueError("; ".join(_problems(error, stem=f"runs.{key}.train."))) from None
        wanted, active = sorted({run.target for run in self.runs.values()}), sorted(set(self.active_targets))
        if active != wanted:
            raise ValueError(f"active_targets must equal the targets of runs {wanted}, got {active}")
        if self.study is not None:
            self._check_study(self.study)
        return self

    def _check_study(self, study: Study) -> None:
        if study.target not in self.targets:
            raise ValueError(f"study.target: no such row in targets: {study.target!r}")
        if unknown := [name for name in study.drafters if name not in self.drafters]:
            raise ValueError(f"study.drafters: no such row in drafters: {unknown[0]!r}")
        if len(set(study.drafters)) != len(study.drafters):
            raise ValueError(f"study.drafters must differ, got {list(study.drafters)}")
        for name, common in (("train", self.train), ("evaluate", self.evaluate)):
            try:
                merged(common, getattr(study, name))
            except ValidationError as error:
                raise ValueError("; ".join(_problems(error, stem=f"study.{name}."))) from None

    def run(self, key: str) -> Run:
        """The row of `key`; raises ParamsError that lists the keys there are."""
        if key not in self.runs:
            raise ParamsError(f"no run {key!r}", expected=f"one of {', '.join(self.runs)}", where="params.yaml: runs")
        return self.runs[key]

    def target(self, name: str) -> Target:
        """The row of target `name`; raises ParamsError that lists the names there are."""
        if name not in self.targets:
            known = ", ".join(self.targets)
            raise ParamsError(f"no target {name!r}", expected=f"one of {known}", where="params.yaml: targets")
        return self.targets[name]

    def train_of(self, key: str) -> Train:
        """The training row of `key`: the common one with the run's own fields laid over it."""
        return merged(self.train, self.run(key).train)


def merged(common: AnyRow, fields: dict[str, Any]) -> AnyRow:
    """`common` with `fields` laid over it, validated again."""
    return type(common).model_validate({**common.model_dump(), **fields})


def load_params(path: Path) -> Params:
    """Read and check params.yaml; raises ParamsError that names every wrong field."""
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        told = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        raise ParamsError(f"params file {told}", got=path, expected="a readable params.yaml") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # no YAML, no text, no such date, no end
        raise ParamsError(f"params file is not YAML: {' '.join(str(error).split())}", where=str(path)) from None
    return parse_params(raw, str(path.name))


def parse_params(raw: object, where: str = "params.yaml") -> Params:
    """Check a parsed document; raises ParamsError with one line a wrong field."""
    try:
        return Params.model_validate(raw)
    except ValidationError as error:
        raise ParamsError("; ".join(f"{problem} ({where})" for problem in _problems(error))) from None


def _problems(error: ValidationError, *, stem: str = "") -> list[str]:
    """What is wrong with each field, by its place in the document; `stem` comes before the places."""
    found = []
    for item in error.errors():
        place = stem + ".".join(str(part) for part in item["loc"])
        told = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            found.append(f"unknown key {place}")
        elif item["type"] == "missing":
            found.append(f"missing key {place}")
        elif item["type"] == "value_error":
            found.append(f"{place}: {told}" if place else told)
        else:
            found.append(f"{place or '(whole file)'}: {told}, got {item['input']!r}")
    return found
