"""The training sequences of a target: prompt and answer ids with the mask of its own tokens. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftsmith.errors import CacheError
from draftsmith.jobs.stores import stored
from draftsmith.manifest import Manifest
from draftsmith.storage import Store
from draftsmith.text.answers import decode_answers


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


def read_sequences(store: Store, manifest: Manifest, *, name: str, max_length: int) -> Sequences:
    """Prompt and answer ids of every answer of target `name`; longer ones are cut at `max_length` and counted."""
    items, counts = [], {"cut_at_max_length": 0, "prompt_fills_max_length": 0, "answer_too_short": 0}
    for record in manifest.objects:
        for row in decode_answers(stored(store, manifest, record.path, stage=f"answers@{name}")):
            ids = [*row.prompt_ids, *row.answer_ids]
            if len(row.prompt_ids) + 2 > max_length:
                counts["prompt_fills_max_length"] += 1
                continue
            if len(row.answer_ids) < 2:
                counts["answer_too_short"] += 1
                continue
            counts["cut_at_max_length"] += len(ids) > max_length
            supervised = np.zeros(len(ids), dtype=np.uint8)
            supervised[len(row.prompt_ids) :] = 1
            items.append(
                Sequence(row.id, row.split, np.array(ids[:max_length], dtype=np.int32), supervised[:max_length])
            )
    if not items:
        raise CacheError(
            "no answer is long enough to cache", got=counts, where="params.yaml: answers, cache.max_length"
        )
    return Sequences(tuple(items), counts)
