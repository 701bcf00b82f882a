"""The training sequences of a target: prompt and answer ids with the mask of its own tokens. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftsmith.cache.layout import SampleLength
from draftsmith.errors import CacheError
from draftsmith.jobs.stores import stored
from draftsmith.manifest import Manifest
from draftsmith.storage import Store
from draftsmith.text.answers import decode_answer_lengths, decode_answers


@dataclass(frozen=True)
class Sequence:
    """One training sequence: ids [T] and the mask of the target's own tokens [T]."""

    id: str
    split: str
    input_ids: NDArray[np.int32]
    supervised: NDArray[np.uint8]

    @property
    def label_positions(self) -> NDArray[np.int64]:
        """Positions whose own token and next token are supervised."""
        return np.flatnonzero(self.supervised[:-1] & self.supervised[1:]).astype(np.int64)


@dataclass(frozen=True)
class Sequences:
    """All sequences that fit, and what was cut or left out, counted by reason."""

    items: tuple[Sequence, ...]
    counts: dict[str, int]


def new_counts() -> dict[str, int]:
    """Nothing cut or left out yet, by reason."""
    return {"cut_at_max_length": 0, "prompt_fills_max_length": 0, "answer_too_short": 0}


def read_sequences(store: Store, manifest: Manifest, *, name: str, max_length: int) -> Sequences:
    """Prompt and answer ids of every answer of target `name`; longer ones are cut at `max_length` and counted."""
    items, counts = [], new_counts()
    for record in manifest.objects:
        for row in decode_answers(stored(store, manifest, record.path, stage=f"answers@{name}")):
            kept = _kept_tokens(len(row.prompt_ids), len(row.answer_ids), max_length=max_length, counts=counts)
            if not kept:
                continue
            input_ids = np.array([*row.prompt_ids, *row.answer_ids][:kept], dtype=np.int32)
            supervised = np.zeros(kept, dtype=np.uint8)
            supervised[len(row.prompt_ids) :] = 1
            items.append(Sequence(row.id, row.split, input_ids, supervised))
    if not items:
        raise CacheError(
            "no answer is long enough to cache", got=counts, where="params.yaml: answers, cache.max_length"
        )
    return Sequences(tuple(items), counts)


def read_lengths(
    store: Store, manifest: Manifest, *, name: str, max_length: int, counts: dict[str, int]
) -> Iterator[SampleLength]:
    """The lengths of the sequences of `read_sequences`, one object of the store at a time.

    What was cut or left out so far is added to `counts`.
    """
    for record in manifest.objects:
        data = stored(store, manifest, record.path, stage=f"answers@{name}")
        for sample_id, num_prompt, num_answer in decode_answer_lengths(data):
            kept = _kept_tokens(num_prompt, num_answer, max_length=max_length, counts=counts)
            if kept:
                yield SampleLength(sample_id, kept, kept - num_prompt - 1)


def _kept_tokens(num_prompt: int, num_answer: int, *, max_length: int, counts: dict[str, int]) -> int:
    """Tokens that are kept of a prompt and its answer; 0 leaves them out. Counts why not all are."""
    if num_prompt + 2 > max_length:
        counts["prompt_fills_max_length"] += 1
        return 0
    if num_answer < 2:
        counts["answer_too_short"] += 1
        return 0
    counts["cut_at_max_length"] += num_prompt + num_answer > max_length
    return min(num_prompt + num_answer, max_length)
