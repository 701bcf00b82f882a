"""Rounds of an evaluated drafter, recorded under full-length verification, to be replayed under any policy.

A simulated request is given one recorded answer of its domain and replays its rounds in their order, one in each of its
own rounds, so that easy and hard stretches, and easy and hard answers, stay what they were; a request that outlasts
the recording begins it anew. Answers are drawn in proportion to the tokens of their rounds, so that over requests much
longer than the recordings the accepted length under full-length verification is that of all rounds together. Which
round is a request's j-th depends on the seed and the request alone, never on the policy: policies are compared on the
same rounds.

What cannot be known is what the drafter would have proposed from places at which it was never asked: where a policy
verifies fewer tokens than were accepted, the next recorded round is replayed all the same, as if it began there.
`serving.engine_comparison` measures how much that matters.
Letters: N rounds, A answers, K block size, R requests of a step, n requests in all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftsmith.decoding.rounds import Generation, Round
from draftsmith.errors import DraftsmithError
from draftsmith.evaluation.decoded import Decoded

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class RecordedRounds:
    """Rounds by answer, answers by domain. Rounds of an answer follow each other."""

    block_size: int
    accepted: Ints  # [N] accepted draft tokens
    ended: Bools  # [N] the last accepted one was an end-of-text
    logits: Floats | None  # [N, K] raw confidence logits; None without a confidence head
    first: Ints  # [A] first round of each answer
    last: Ints  # [A] its last round
    domains: tuple[str, ...]
    domain: Ints  # [A], index into `domains`, ascending
    num_without_rounds: int
    """Answers of one token, which the prefill wrote: left out, as there is nothing to replay."""

    @property
    def num_rounds(self) -> int:
        return len(self.accepted)

    @property
    def num_answers(self) -> int:
        return len(self.first)

    @property
    def counted(self) -> Ints:
        """[N]: slots that are evidence, all K or those up to an accepted end-of-text (DSpark section 3.2.1)."""
        return np.where(self.ended, self.accepted, self.block_size)

    @property
    def committed(self) -> Ints:
        """[N]: tokens that each round adds if all its slots are verified and no length limit cuts it."""
        return self.accepted + ~self.ended

    @property
    def accepted_length(self) -> float:
        """Tokens a round of full-length verification, bonus token included."""
        return float(self.committed.mean())

    def settle(self, rounds: Ints, *, lengths: Ints) -> tuple[Ints, Ints]:
        """(accepted, committed) [R] of recorded rounds [R] of which `lengths` [R] slots are verified.

        An accepted end-of-text has no bonus token behind it; where the policy stops before it, there is one.
        """
        accepted = self.accepted[rounds]
        ends = self.ended[rounds] & (accepted <= lengths)
        kept = np.minimum(accepted, lengths)
        return kept, kept + 1 - ends

    def draw_answers(self, domains: Sequence[str], *, domain: Ints, seed: int) -> Ints:
        """An answer for each of n requests [n]; request i is about `domains[domain[i]]`, and its draw depends on
        (seed, i) alone.

        Raises DraftsmithError for a domain that was not recorded.
        """
        if missing := sorted({domains[index] for index in np.unique(domain)} - set(self.domains)):
            raise DraftsmithError(
                "no recorded rounds of a domain", got=", ".join(missing), expected=f"one of {', '.join(self.domains)}"
            )
        weights = np.add.reduceat(self.committed, self.first)
        numbers = np.random.default_rng((seed, _STREAM)).random(len(domain))
        answers = np.empty(len(domain), np.int64)
        for index in np.unique(domain):
            low, high = np.searchsorted(self.domain, [place := self.domains.index(domains[index]), place + 1])
            total = np.cumsum(weights[low:high])
            chosen = domain == index
            answers[chosen] = low + np.searchsorted(total, numbers[chosen] * total[-1], side="right")
        return answers


_STREAM = 1_000
"""Keeps the draws apart from those of a workload of the same seed."""


def record_rounds(generations: Mapping[str, Sequence[Generation]], *, block_size: int) -> RecordedRounds:
    """The rounds of answers by domain; `block_size` is the drafter's K.

    Rounds that a length limit cut count in full: their slots were all verified.
    Raises DraftsmithError, naming request and round, unless all K slots of every round were verified and either every
    round has K finite confidence logits or none has any; and for a domain without a round.
    """
    kept: list[Sequence[Round]] = []
    domain: list[int] = []
    names = tuple(generations)
    for index, name in enumerate(names):
        for generation in generations[name]:
            for number, item in enumerate(generation.rounds, start=1):
                _check_round(item, block_size=block_size, where=f"request {generation.request_id}, round {number}")
            if generation.rounds:
                kept.append(generation.rounds)
                domain.append(index)
        if index not in domain[-1:]:
            raise DraftsmithError("a domain without recorded rounds", got=name)
    if not kept:
        raise DraftsmithError("no recorded rounds", expected="at least one domain")
    sizes = np.array([len(rounds) for rounds in kept])
    rounds = [item for answer in kept for item in answer]
    return RecordedRounds(
        block_size=block_size,
        accepted=np.array([item.accepted for item in rounds], np.int64),
        ended=np.array([item.ended for item in rounds], np.bool_),
        logits=_logits(rounds, block_size=block_size),
        first=np.cumsum(sizes) - sizes,
        last=np.cumsum(sizes) - 1,
        domains=names,
        domain=np.array(domain, np.int64),
        num_without_rounds=sum(len(part) for part in generations.values()) - len(kept),
    )


def record_decoded(decoded: Sequence[Decoded], *, block_size: int) -> RecordedRounds:
    """The rounds of an evaluation's speculative answers, benchmarks put together by domain.

    Raises DraftsmithError if they were not all decoded at one temperature, and as `record_rounds` does.
    """
    temperatures = sorted({item.temperature for item in decoded})
    if len(temperatures) > 1:
        raise DraftsmithError(
            "rounds of several temperatures cannot be one recording", got=temperatures, expected="one temperature"
        )
    generations: dict[str, list[Generation]] = {}
    for item in decoded:
        generations.setdefault(item.domain, []).extend(item.generations)
    return record_rounds(generations, block_size=block_size)


def plain_rounds(domains: Sequence[str]) -> RecordedRounds:
    """Plain decoding, without a drafter: blocks of no slots, one token a round in each of the domains."""
    places = np.arange(len(domains))
    return RecordedRounds(
        block_size=0,
        accepted=np.zeros(len(domains), np.int64),
        ended=np.zeros(len(domains), np.bool_),
        logits=None,
        first=places,
        last=places,
        domains=tuple(domains),
        domain=places,
        num_without_rounds=0,
    )


def _check_round(item: Round, *, block_size: int, where: str) -> None:
    if item.verified != block_size:
        raise DraftsmithError(
            "only rounds of full-length verification can be replayed", got=f"{item.verified} slots verified",
            expected=block_size, where=where,
        )  # fmt: skip
    if not int(item.ended) <= item.accepted <= block_size:
        raise DraftsmithError(
            "a round contradicts itself", got=f"{item.accepted} accepted of {item.verified}, ended {item.ended}",
            where=where,
        )  # fmt: skip
    if len(item.confidence_logits) not in (0, block_size):
        raise DraftsmithError(
            "a round needs one confidence logit a slot, or none at all", got=len(item.confidence_logits),
            expected=block_size, where=where,
        )  # fmt: skip
    if not np.isfinite(item.confidence_logits).all():
        raise DraftsmithError("confidence logits must be finite", got=item.confidence_logits, where=where)


def _logits(rounds: Sequence[Round], *, block_size: int) -> Floats | None:
    having = sum(len(item.confidence_logits) > 0 for item in rounds)
    if having == 0:
        return None
    if having < len(rounds):
        raise DraftsmithError(
            "some recorded rounds have confidences and others have none", got=f"{having} of {len(rounds)}"
        )
    return np.array([item.confidence_logits for item in rounds], np.float64).reshape(len(rounds), block_size)
