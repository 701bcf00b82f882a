"""What speculative decoding records of each round: the raw material of calibration, metrics and the simulator."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Round:
    """One draft-verify round of one request (METHOD: speculative decoding).

    `verified` draft tokens were scored, the first `accepted` of them accepted. `committed` counts the tokens that
    the round added: accepted ones and the bonus token, except that a round which ends on an accepted end-of-text
    (`ended`; `accepted` then stops there) commits no bonus token, and one at the length limit may be cut (`cut`).
    `confidence_logits` [K] are the raw logits of the confidence head, before any temperature, nan in slots that were
    not drafted; empty without one.
    `rejected_token` is the draft token that was rejected, in whose place the target's correction came; None if every
    verified token was accepted, or an accepted end-of-text came before it.
    """

    anchor_position: int
    verified: int
    accepted: int
    committed: int
    ended: bool
    cut: bool
    confidence_logits: tuple[float, ...] = ()
    rejected_token: int | None = None

    @property
    def counted(self) -> int:
        """Slots 1..counted are evidence: verified, and not past an accepted end-of-text (DSpark section 3.2.1).

        A cut round counts as any other: its slots were drafted and verified, only the tokens past the limit were
        dropped. So `ended` must hold also where the accepted end-of-text itself fell past the limit.
        """
        return self.accepted if self.ended else self.verified

    @property
    def committed_draft(self) -> int:
        """Committed tokens that the drafter proposed; the bonus token (or correction) is the rest of `committed`."""
        return min(self.accepted, self.committed)


@dataclass(frozen=True)
class Generation:
    """The answer to one request.

    `token_ids` include the end-of-text token where one was written; `drafted` marks, per token, whether the drafter
    proposed it (accepted draft token) or the target wrote it (bonus, correction, first token).
    """

    request_id: str
    token_ids: tuple[int, ...]
    drafted: tuple[bool, ...]
    finish: Literal["end_of_text", "length"]
    rounds: tuple[Round, ...]

    @property
    def prompt_id(self) -> str:
        """`request_id` without its `/t<turn>` suffix: the turns of one conversation are one prompt."""
        return re.sub(r"/t\d+$", "", self.request_id)
