"""Laws of answers worked out without the engine, and the test that holds counts of answers against them.

Letters: n rows, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from draftsmith.params import Sampling
from tests.unit.decoding.toys import Text

Law = dict[Text, float]
Floats = NDArray[np.float64]
PLAIN = Sampling()
LEAST_EXPECTED = 5.0
"""Cells in which fewer answers are expected are put together: the chi-square's rule of thumb."""


def transformed(row: Floats, sampling: Sampling) -> Floats:
    """Temperature, top-k, top-p and min-p (or argmax) of one row of logits [V], by sorting."""
    if sampling.temperature == 0:
        return np.eye(len(row))[row.argmax()]
    weights = np.exp((row - row.max()) / sampling.temperature)
    law = weights / weights.sum()
    order = np.argsort(-law, kind="stable")
    if sampling.top_k:
        law[order[sampling.top_k :]] = 0
        law = law / law.sum()
    mass = 0.0
    for token in order:
        law[token], mass = (law[token] if mass < sampling.top_p else 0.0), mass + law[token]
    law[law < sampling.min_p * law.max()] = 0
    return law / law.sum()


def transformed_rows(logits: Floats, sampling: Sampling) -> Floats:
    """[n, V] -> [n, V]."""
    return np.stack([transformed(row, sampling) for row in logits])


def text_law(table: Tensor, *, first: int, num: int, end_ids: Sequence[int] = (), sampling: Sampling = PLAIN) -> Law:
    """Probability of every answer after token `first` of a target of logits `table` [V, V]: `num` tokens, or fewer that
    end with one of `end_ids`."""
    rows = transformed_rows(table.double().numpy(), sampling)
    law: Law = {}

    def extend(text: Text, probability: float) -> None:
        if probability == 0:
            return
        if len(text) == num or (text and text[-1] in end_ids):
            law[text] = probability
            return
        for token, share in enumerate(rows[text[-1] if text else first]):
            extend((*text, token), probability * share)

    extend((), 1.0)
    assert sum(law.values()) == pytest.approx(1.0)
    return law


def p_value(found: Sequence[Text], law: Law) -> float:
    """Chi-square of the counts against the law; 0 where an answer is there that the law does not know."""
    counts = Counter(found)
    if not set(counts) <= set(law):
        return 0.0
    expected = np.array([law[text] * len(found) for text in law])
    seen = np.array([counts[text] for text in law], dtype=float)
    small = expected < LEAST_EXPECTED
    if small.any():
        expected, seen = np.append(expected[~small], expected[small].sum()), np.append(seen[~small], seen[small].sum())
    if len(expected) == 1:
        return 1.0
    return float(stats.chisquare(seen, expected * seen.sum() / expected.sum()).pvalue)
