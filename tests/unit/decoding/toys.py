"""A target that is a table of next-token probabilities, and a drafter that is a function of the text so far.

The drafter checks what the engine shows it: every token once, at its position, with its own captured state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.drafters.base import Drafter, DrafterConfig, LossSums, Observation, Proposal, Sampler, stack_proposal
from draftsmith.nn.block import BlockBatch
from draftsmith.nn.kv import FlatBatch, KeyValueRows
from draftsmith.nn.layers import LayerGeometry
from draftsmith.params import LossWeights
from draftsmith.targets.base import SharedWeights, Target, TargetOutput

CPU = torch.device("cpu")
Text = tuple[int, ...]
DraftLogits = Callable[[list[Text], int], Tensor]
"""Texts of R requests, tokens drafted so far included, and the slot (0-based) -> logits [R, V]."""
Confidence = Callable[[list[Text]], list[float]]
"""The same texts -> the raw confidence logit of the token drafted next."""


@dataclass(frozen=True)
class ToyConfig:
    """The sizes of a target."""

    hidden_size: int
    vocab_size: int


@dataclass(frozen=True)
class ToyCapture:
    """The layers that a target captures."""

    layer_ids: tuple[int, ...]


class TableTarget:
    """Logits of the next token depend on the last one alone; hidden states are the token itself."""

    def __init__(self, table: Tensor) -> None:
        """`table` [V, V]: row p holds the logits after token p."""
        self.table, self.device = table, CPU
        self.config, self.capture = ToyConfig(1, len(table)), ToyCapture((0,))

    def new_rows(self) -> KeyValueRows:
        return KeyValueRows(0, dtype=torch.float32, device=CPU)

    def forward(self, token_ids: Tensor, *, batch: FlatBatch, rows: KeyValueRows) -> TargetOutput:
        assert token_ids.shape == (batch.num_tokens,)
        state = token_ids.float().unsqueeze(1)
        return TargetOutput(state.unsqueeze(1), state)

    def logits(self, last_hidden: Tensor) -> Tensor:
        return self.table[last_hidden[:, 0].long()].float()


class SeenRows(KeyValueRows):
    """The text that a drafter was shown, per slot."""

    def __init__(self) -> None:
        super().__init__(0, dtype=torch.float32, device=CPU)
        self.texts: dict[int, list[int]] = {}

    def move(self, source: int, destination: int) -> None:
        self.texts[destination] = self.texts.pop(source)


class ScriptedDrafter(Drafter):
    """Drafts by `draft` and, if given, says its confidence by `confidence`."""

    def __init__(
        self,
        draft: DraftLogits,
        *,
        target: TableTarget | Target,
        block_size: int,
        confidence: Confidence | None = None,
    ) -> None:
        geometry = LayerGeometry(target.config.hidden_size, 2, 1, 1, 2, 1e-5, "silu", False, False, 1.0, False)
        config = DrafterConfig(
            kind="scripted",
            family="llama",
            block_size=block_size,
            num_layers=1,
            geometry=geometry,
            vocab_size=target.config.vocab_size,
            mask_token_id=0,
            capture_layers=target.capture.layer_ids,
            num_target_layers=1,
            windows=(None,),
            text={},
            confidence=confidence is not None,
        )
        nothing = torch.zeros(1, 2)
        super().__init__(config, shared=SharedWeights(nothing, nothing, 1.0, None))
        self.draft, self.confidence = draft, confidence

    def losses(self, batch: BlockBatch, *, weights: LossWeights) -> LossSums:
        raise NotImplementedError

    def reset(self, *, seed: int) -> None:
        raise NotImplementedError

    def new_rows(self) -> SeenRows:
        return SeenRows()

    def observe(self, observation: Observation, *, rows: KeyValueRows) -> None:
        assert isinstance(rows, SeenRows)
        batch = observation.batch
        if observation.captured.shape[1:] == (1, 1):  # a table target: states are the tokens themselves
            assert torch.equal(observation.captured[:, 0, 0].long(), observation.token_ids)
            assert torch.equal(observation.last_hidden[:, 0].long(), observation.token_ids)
        parts = observation.token_ids.split(list(batch.counts))
        for slot, start, ids in zip(batch.slots, batch.starts, parts, strict=True):
            if start == 0:
                rows.texts[slot] = []
            assert start == len(rows.texts[slot]), "a token was shown twice or never"
            rows.texts[slot] += ids.tolist()

    def propose(
        self,
        anchors: Tensor,
        *,
        positions: list[int],
        rows: KeyValueRows,
        sample: Sampler,
        slots: Sequence[int] | None = None,
        num_tokens: int | None = None,
    ) -> Proposal:
        assert isinstance(rows, SeenRows)
        places = list(range(len(positions)) if slots is None else slots)
        assert [len(rows.texts[place]) for place in places] == positions
        texts = [(*rows.texts[place], anchor) for place, anchor in zip(places, anchors.tolist(), strict=True)]
        drawn: list[tuple[Tensor, Tensor | None]] = []
        said: list[list[float]] = []
        for slot in range(self.config.block_size if num_tokens is None else num_tokens):
            if self.confidence is not None:
                said.append(self.confidence(texts))
            drawn.append(sample(self.draft(texts, slot).float(), slot))
            texts = [(*text, token) for text, token in zip(texts, drawn[-1][0].tolist(), strict=True)]
        confidence = torch.tensor(said).T.contiguous() if said else None
        return stack_proposal(drawn, confidence)


def one_hot_logits(tokens: Sequence[int], *, vocab: int) -> Tensor:
    """Logits [R, V] whose argmax is the given token of each row."""
    logits = torch.zeros(len(tokens), vocab)
    logits[torch.arange(len(tokens)), torch.tensor(list(tokens))] = 10.0
    return logits


def table_draft(table: Tensor) -> DraftLogits:
    """Draft logits that depend on the last token alone; table [V, V]."""
    return lambda texts, _slot: table[torch.tensor([text[-1] for text in texts])]


def whole_text_draft(rows: Tensor, *, around: Tensor | float = 0.0) -> DraftLogits:
    """Draft logits that depend on every token of the text and its place: rows [M, V] to pick from, added to those of a
    table `around` [V, V] that depend on the last token, if given."""

    def draft(texts: list[Text], _slot: int) -> Tensor:
        keys = [sum(token * 7**place for place, token in enumerate(text, start=1)) for text in texts]
        picked = rows[torch.tensor(keys) % len(rows)]
        return picked + (around[[text[-1] for text in texts]] if isinstance(around, Tensor) else around)

    return draft


def as_target(toy: TableTarget) -> Any:
    """The toy where a `Target` is asked for."""
    return toy
