"""The learning rate: linear warm-up that never overshoots, then cosine to zero."""

from __future__ import annotations

import math


def learning_rate(step: int, *, steps: int, peak: float, warmup_share: float) -> float:
    """Rate of update `step` (0-based) of `steps`: rises to `peak` over the warm-up, then falls to 0 by a cosine."""
    warmup = max(1, math.ceil(steps * warmup_share))
    if step < warmup:
        return peak * ((step + 1) / warmup)
    progress = (step + 1 - warmup) / max(1, steps - warmup)
    return peak * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
