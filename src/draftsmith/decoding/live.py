"""A request and what becomes of it, round by round."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from draftsmith.decoding.rounds import Generation, Round
from draftsmith.params import Sampling


@dataclass(frozen=True)
class Request:
    """One prompt to answer. `seed` fixes its sampling whoever shares the batch.

    `stop_ids` end the answer as the engine's own end ids do: the first one met is its last token.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling
    seed: int
    stop_ids: frozenset[int] = frozenset()


@dataclass
class LiveRequest:
    """A request in flight; `tokens` are prompt and answer, the last one is the anchor."""

    request: Request
    tokens: list[int]
    end_ids: frozenset[int]
    drafted: list[bool] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    num_rounds: int = 0
    finish: str | None = None
    total: list[int] = field(default_factory=lambda: [0, 0, 0])
    last: list[int] = field(default_factory=lambda: [0, 0, 0])
    """Draft tokens drafted, verified and accepted: of all rounds, and of the last one."""
    confidence: NDArray[np.float64] | None = None
    """[K] of the last round, temperatures applied."""

    @classmethod
    def begin(cls, request: Request, *, end_ids: frozenset[int]) -> LiveRequest:
        return cls(request, list(request.prompt_ids), end_ids | request.stop_ids)

    @property
    def anchor_position(self) -> int:
        return len(self.tokens) - 1

    @property
    def room(self) -> int:
        return self.request.max_new_tokens - len(self.drafted)

    @property
    def generation(self) -> Generation:
        return Generation(
            request_id=self.request.request_id,
            token_ids=tuple(self.tokens[len(self.request.prompt_ids) :]),
            drafted=tuple(self.drafted),
            finish="end_of_text" if self.finish == "end_of_text" else "length",
            rounds=tuple(self.rounds),
        )

    def commit(self, tokens: list[int], *, num_draft: int) -> None:
        """Append tokens of a round, the first `num_draft` of them the drafter's; the last one may end the answer."""
        self.tokens.extend(tokens)
        self.drafted.extend(index < num_draft for index in range(len(tokens)))
        self.num_rounds += 1
        if self.tokens[-1] in self.end_ids:
            self.finish = "end_of_text"
        elif self.room <= 0:
            self.finish = "length"

    def remember(self, drafted: int, *, verified: int, accepted: int, confidence: NDArray[np.float64] | None) -> None:
        """What a draft policy may know of the round when the next one comes."""
        self.last = [drafted, verified, accepted]
        self.total = [before + now for before, now in zip(self.total, self.last, strict=True)]
        self.confidence = confidence

    def settle(self, verified: list[int], *, accepted: int, following: int, confidence: tuple[float, ...]) -> list[int]:
        """Commit a draft-verify round: `verified` draft tokens, how many were accepted, and the target's token behind.

        A round that ends on an accepted end-of-text has no token behind it; what is past the length limit is dropped.
        Returns what was committed.
        """
        tokens = [*verified[:accepted], following]
        ended = next((index for index, token in enumerate(verified[:accepted]) if token in self.end_ids), None)
        if ended is not None:
            tokens = tokens[: ended + 1]
        kept = tokens[: self.room]
        self.rounds.append(
            Round(
                anchor_position=self.anchor_position,
                verified=len(verified),
                accepted=accepted if ended is None else ended + 1,
                committed=len(kept),
                ended=ended is not None,
                cut=len(kept) < len(tokens),
                confidence_logits=confidence,
                rejected_token=verified[accepted] if ended is None and accepted < len(verified) else None,
            )
        )
        self.commit(kept, num_draft=min(accepted, len(kept)))
        return kept
