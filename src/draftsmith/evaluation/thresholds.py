"""What a static confidence threshold would have verified and accepted, replayed over rounds of full length."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from draftsmith.decoding.rounds import Round

STEPS = 20
"""Thresholds 0, 1 / STEPS, ..., (STEPS - 1) / STEPS."""


def threshold_sweep(rounds: Iterable[Round], *, block_size: int) -> list[dict[str, Any]]:
    """One row a threshold: verify up to the first raw confidence below it (DSpark section 3.2.2's static baseline).

    Of each round that verified its whole block, the slots up to that length count as verified; those past an accepted
    end-of-text do not count. Verified slots are accepted or rejected: the one that was rejected, and those after it.
    `accepted_length` is tokens committed a round, bonus token (or correction) included, with what the length limit cut
    off left out; at threshold 0 it is the measured one. The sweep takes rounds as they began: with a shorter
    verification the next round would begin elsewhere, which the replay cannot know. Rounds without confidences, or
    of another verified length, are left out.
    """
    whole = [item for item in rounds if item.verified == block_size == len(item.confidence_logits)]
    if not whole:
        return []
    confidences = [[raw_confidence(logit) for logit in item.confidence_logits] for item in whole]
    rows = []
    for step in range(STEPS):
        threshold = step / STEPS
        verified = accepted = committed = 0
        for item, values in zip(whole, confidences, strict=True):
            length = next((slot for slot, value in enumerate(values) if value < threshold), block_size)
            kept = min(item.accepted, length)
            verified += min(length, item.counted)
            accepted += kept
            # The bonus token or the correction comes after those kept, unless the round itself had no room for one.
            committed += min(item.committed, kept + 1)
        rows.append(
            {
                "threshold": threshold,
                "num_rounds": len(whole),
                "verified": verified,
                "accepted": accepted,
                "rejected": verified - accepted,
                "acceptance_rate": accepted / verified if verified else None,
                "accepted_length": committed / len(whole),
            }
        )
    return rows


def raw_confidence(logit: float) -> float:
    """The confidence head's probability before any temperature: the logistic function of its logit."""
    return 1 / (1 + math.exp(-logit)) if logit >= 0 else math.exp(logit) / (1 + math.exp(logit))
