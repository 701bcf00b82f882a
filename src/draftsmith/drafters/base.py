"""What every drafter is: a module that learns from cached samples and proposes blocks in decoding.

Letters: R requests, N flat tokens, L captured layers, D hidden, K block size, V vocabulary, r rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from draftsmith.nn.block import BlockBatch
from draftsmith.nn.kv import FlatBatch, KeyValueRows
from draftsmith.nn.layers import LayerGeometry
from draftsmith.targets.base import SharedWeights


@dataclass(frozen=True)
class DrafterConfig:
    """Everything that fixes a drafter's shape, from its row and its target's config."""

    kind: str
    family: str
    block_size: int
    num_layers: int
    geometry: LayerGeometry
    vocab_size: int
    mask_token_id: int
    capture_layers: tuple[int, ...]
    sequential_kind: str | None
    sequential_rank: int
    confidence: bool
    sample_from_anchor: bool


@dataclass(frozen=True)
class LossSums:
    """Weighted sums of one micro-batch: `total` is differentiable, the rest is for people.

    `weight` is the sum of slot weights; `acceptance` [n] and `correct` [n] per counted slot, `confidence` [n]
    predicted survival or None; `slot_number` [n] (0-based).
    """

    total: Tensor
    ce: Tensor
    tv: Tensor
    bce: Tensor | None
    weight: Tensor
    acceptance: Tensor
    correct: Tensor
    confidence: Tensor | None
    slot_number: Tensor


@dataclass(frozen=True)
class Observation:
    """What the target showed of newly committed tokens: their ids [N], captured states [N, L, D], flat batch."""

    token_ids: Tensor
    captured: Tensor
    last_hidden: Tensor
    batch: FlatBatch


@dataclass(frozen=True)
class Proposal:
    """A drafted block per request: tokens [R, K]; draft probabilities [R, K, V] really sampled from (float32), or
    None where every request is greedy; raw confidence logits [R, K] or None."""

    tokens: Tensor
    probabilities: Tensor | None
    confidence_logits: Tensor | None


Sampler = Callable[[Tensor, int], tuple[Tensor, Tensor | None]]
"""(logits [R, V] float32, slot number 0-based) -> (tokens [R], probabilities [R, V] or None when all are greedy)."""


class Drafter(nn.Module, ABC):
    """Base of all drafters; `shared` (embedding and LM head of the target) is frozen and not a parameter."""

    def __init__(self, config: DrafterConfig, *, shared: SharedWeights) -> None:
        super().__init__()
        self.config = config
        self.shared = shared

    @abstractmethod
    def losses(self, batch: BlockBatch, *, ce_weight: float, tv_weight: float, confidence_weight: float) -> LossSums:
        """Weighted loss sums of one micro-batch (not yet normalised)."""

    @abstractmethod
    def new_rows(self) -> KeyValueRows:
        """Empty key-value rows for decoding."""

    @abstractmethod
    def observe(self, observation: Observation, *, rows: KeyValueRows) -> None:
        """Append context rows for committed tokens at their absolute positions."""

    @abstractmethod
    def propose(self, anchors: Tensor, *, positions: list[int], rows: KeyValueRows, sample: Sampler) -> Proposal:
        """Draft a block per request from anchor tokens [R] at `positions`; context rows cover all earlier positions."""

    @abstractmethod
    def reset(self, *, seed: int) -> None:
        """Random start, the same for the same seed."""
