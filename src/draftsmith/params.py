"""The strict schema of params.yaml: every knob that changes a result, and nothing else. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from draftsmith.errors import ParamsError
from draftsmith.params_models import (
    LAST_HIDDEN_KINDS,
    AnyRow,
    Domain,
    Drafter,
    Dtype,
    LossWeights,
    Row,
    Sampling,
    Sequential,
    Target,
)
from draftsmith.params_serving import Profile, Serve

__all__ = [
    "LAST_HIDDEN_KINDS", "Answers", "Benchmark", "Cache", "Calibrate", "Domain", "Drafter", "Dtype", "Evaluate",
    "LossWeights", "Params", "Profile", "PromptFile", "Prompts", "Row", "Run", "Sampling", "Sequential", "Serve",
    "Speed", "Study", "Target", "Train", "load_params", "merged", "parse_params",
]  # fmt: skip


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
    """Rounds of real speculative decoding on the calibration split, and the grid of the fit (DSpark 3.2.1).

    `by_domain` fits the temperatures of each domain as well; `online_half_life` is that of the running estimate, rounds
    after which one counts half.
    """

    max_new_tokens: int = Field(gt=0)
    batch_size: int = Field(gt=0)
    temperature: float = Field(1.0, ge=0)
    holdout_share: float = Field(0.5, gt=0, lt=1)
    min_rounds: int = Field(200, gt=0)
    by_domain: bool = False
    online_half_life: float = Field(1000.0, gt=0)
    num_bins: int = Field(20, gt=1)
    grid_low: float = Field(0.2, gt=0, le=1)
    grid_high: float = Field(5.0, gt=1)
    grid_points: int = Field(200, gt=1)
    seed: int = 0


class Benchmark(Row):
    """One benchmark of the evaluation and how many of its prompts are used."""

    name: str
    cap: int = Field(gt=0)


class Speed(Row):
    """What speculative decoding gains over plain decoding of the same engine, at each batch size: one benchmark's first
    `num_prompts` turns to `max_new_tokens` tokens; at batch sizes above it prompts are repeated."""

    benchmark: str
    batch_sizes: tuple[Annotated[int, Field(gt=0)], ...] = Field((1, 4, 16), min_length=1)
    num_prompts: int = Field(gt=0)
    max_new_tokens: int = Field(gt=1)


class Evaluate(Row):
    """Lossless speculative decoding against plain decoding of the same engine.

    `folder`, relative to the working copy, holds <benchmark>.jsonl files of {"turns": [...]} that replace the
    benchmarks' sources; DVC sees its edits below `prompts/`. `cell_prompts` are decoded and kept together: what an
    interrupted evaluation goes on from, and what slices share out.
    `num_samples` prompts of each benchmark are shown token by token in the report.
    """

    benchmarks: tuple[Benchmark, ...] = Field(min_length=1)
    temperatures: tuple[Annotated[float, Field(ge=0)], ...] = Field(min_length=1)
    batch_size: int = Field(gt=0)
    max_new_tokens: int = Field(gt=0)
    folder: str | None = None
    cell_prompts: int = Field(64, gt=0)
    num_samples: int = Field(2, ge=0)
    speed: Speed | None = None
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
    profile: Profile = Profile()
    serve: Serve = Serve()
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
