"""What a codec does to hidden states, measured on states that were captured: size and relative error by layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class StatesFidelity:
    """One array under one codec. `relative_error` [L]: mean over tokens of |x' - x| / |x| (Euclidean over D), by layer;
    `relative_error_first` [L]: the same over first tokens (None: there are none); `largest` [L]: the worst token."""

    ratio: float
    identical: bool
    relative_error: tuple[float, ...]
    relative_error_first: tuple[float, ...] | None
    largest: tuple[float, ...]


def measure_states(
    states: NDArray[np.uint16], decoded: NDArray[np.uint16], *, first_rows: NDArray[np.int64], stored_bytes: int
) -> StatesFidelity:
    """Compare states [T, L, D] with what a codec gave back, both bfloat16 bits; `first_rows` are rows of first tokens.

    `stored_bytes` is what the codec made of the states.
    """
    errors = np.empty(states.shape[:2])
    for layer in range(states.shape[1]):
        exact = bf16_values(states[:, layer]).astype(np.float64)
        change = bf16_values(decoded[:, layer]).astype(np.float64) - exact
        norms = np.linalg.norm(exact, axis=1)
        errors[:, layer] = np.linalg.norm(change, axis=1) / np.where(norms == 0, 1.0, norms)
    return StatesFidelity(
        ratio=states.nbytes / stored_bytes,
        identical=bool(np.array_equal(states, decoded)),
        relative_error=tuple(errors.mean(axis=0).tolist()),
        relative_error_first=tuple(errors[first_rows].mean(axis=0).tolist()) if len(first_rows) else None,
        largest=tuple(errors.max(axis=0).tolist()),
    )


def bf16_values(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """bfloat16 bits -> the numbers they stand for."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
