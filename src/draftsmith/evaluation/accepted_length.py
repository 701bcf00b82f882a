"""How long the accepted prefixes are: accepted length, acceptance by position, and their intervals over prompts.

Definitions (Leviathan et al. 2023; DSpark section 4):

- accepted length: committed tokens a round, the bonus token (or the correction in its place) included. *Micro* divides
  the sums over all rounds; *macro* is the mean over prompts of each prompt's own ratio.
- without bonus: committed tokens a round that the drafter proposed.
- conditional acceptance at k: of the rounds in which tokens 1..k-1 were accepted and slot k counts, the share in which
  token k was accepted too. A slot counts if it was verified and lies not past an accepted end-of-text.
- prefix survival at k: of all rounds in which slot k counts, the share in which tokens 1..k were accepted. It is
  unconditional: never compare the two.

The token of the prefill belongs to no round. The length limit may cut the last round of an answer: its slots are
evidence as usual, but it commits only what fitted, so cut rounds pull the accepted length down; they are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftsmith.decoding.rounds import Generation
from draftsmith.errors import DraftsmithError
from draftsmith.evaluation.bootstrap import NUM_RESAMPLES, Estimate, Interval, estimate_share
from draftsmith.evaluation.paired import BONUSES, MEANS, PromptCounts, mean_difference, mean_length

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class AcceptedLength:
    """Accepted length and acceptance by position. Intervals are 95 %, by bootstrap over prompts (see
    `evaluation.bootstrap`); None below two prompts.

    Lists hold one entry a position 1..K; None where no round has evidence there.
    """

    num_prompts: int
    num_requests: int  # a prompt of several turns makes several requests
    num_prompts_without_rounds: int  # answered by the prefill token alone; in no mean
    num_rounds: int
    num_cut_rounds: int  # by the length limit
    num_ended_rounds: int  # on an accepted end-of-text inside the block
    num_tokens: int  # of the answers: committed ones and the tokens of the prefills
    num_committed: int
    accepted_length: float
    accepted_length_interval: Interval | None
    accepted_length_without_bonus: float
    accepted_length_without_bonus_interval: Interval | None
    accepted_length_macro: float
    accepted_length_macro_interval: Interval | None
    accepted_length_without_bonus_macro: float
    accepted_length_without_bonus_macro_interval: Interval | None
    conditional_acceptance: tuple[float | None, ...]  # [K]
    conditional_acceptance_interval: tuple[Interval | None, ...]  # [K]
    num_conditional: tuple[int, ...]  # [K] rounds behind each conditional acceptance
    prefix_survival: tuple[float | None, ...]  # [K]
    num_counted: tuple[int, ...]  # [K] rounds behind each prefix survival
    prompts: PromptCounts  # of every prompt, for comparisons

    @property
    def share_cut(self) -> float:
        """Share of rounds that the length limit cut."""
        return self.num_cut_rounds / self.num_rounds

    @property
    def share_ended(self) -> float:
        """Share of rounds that ended on an accepted end-of-text inside the block."""
        return self.num_ended_rounds / self.num_rounds


@dataclass(frozen=True)
class _SlotSums:
    """Sums over the rounds of each prompt that has any (P prompts)."""

    conditional: Floats  # [P, K] rounds whose prefix k - 1 was accepted and whose slot k counts
    survived: Floats  # [P, K] rounds whose prefix k was accepted
    counted: Floats  # [P, K] rounds whose slot k counts


def measure_accepted_length(
    generations: Sequence[Generation], *, block_size: int, seed: int, num_resamples: int = NUM_RESAMPLES
) -> AcceptedLength:
    """Accepted length of `generations`; see the definitions above. `block_size` is K.

    Raises DraftsmithError if there is no round at all.
    """
    by_prompt = group_by_prompt(generations)
    with_rounds = [turns for turns in by_prompt.values() if any(turn.rounds for turn in turns)]
    if not with_rounds:
        raise DraftsmithError(
            "no decoding round to measure",
            got=f"{len(generations)} answers of one token",
            expected="longer answers",
            where="params.yaml: evaluate.max_new_tokens",
        )
    rounds = [item for generation in generations for item in generation.rounds]
    counts = count_by_prompt(generations)
    sums = _sum_slots(with_rounds, block_size=block_size)
    conditional, survived, counted = sums.conditional.sum(axis=0), sums.survived.sum(axis=0), sums.counted.sum(axis=0)
    slots = range(block_size)
    acceptance = [
        estimate_share(sums.survived[:, k], bottom=sums.conditional[:, k], seed=seed, num_resamples=num_resamples)
        for k in slots
    ]
    micro, micro_bare, macro, macro_bare = (
        mean_length([counts], seed=seed, bonus=bonus, mean=mean, num_resamples=num_resamples)
        for mean in MEANS
        for bonus in BONUSES
    )
    return AcceptedLength(
        num_prompts=len(by_prompt),
        num_requests=len(generations),
        num_prompts_without_rounds=len(by_prompt) - len(with_rounds),
        num_rounds=len(rounds),
        num_cut_rounds=sum(item.cut for item in rounds),
        num_ended_rounds=sum(item.ended for item in rounds),
        num_tokens=sum(len(generation.token_ids) for generation in generations),
        num_committed=sum(counts.committed),
        accepted_length=micro.value,
        accepted_length_interval=micro.interval,
        accepted_length_without_bonus=micro_bare.value,
        accepted_length_without_bonus_interval=micro_bare.interval,
        accepted_length_macro=macro.value,
        accepted_length_macro_interval=macro.interval,
        accepted_length_without_bonus_macro=macro_bare.value,
        accepted_length_without_bonus_macro_interval=macro_bare.interval,
        conditional_acceptance=tuple(share for share, _ in acceptance),
        conditional_acceptance_interval=tuple(interval for _, interval in acceptance),
        num_conditional=tuple(int(conditional[k]) for k in slots),
        prefix_survival=tuple(_share(survived[k], of=counted[k]) for k in slots),
        num_counted=tuple(int(counted[k]) for k in slots),
        prompts=counts,
    )


def count_by_prompt(generations: Sequence[Generation]) -> PromptCounts:
    """Rounds and committed tokens of each prompt over its turns, prompts in the order of their first turn."""
    rounds = {
        name: [item for turn in turns for item in turn.rounds] for name, turns in group_by_prompt(generations).items()
    }
    return PromptCounts(
        ids=tuple(rounds),
        rounds=tuple(len(items) for items in rounds.values()),
        committed=tuple(sum(item.committed for item in items) for items in rounds.values()),
        committed_draft=tuple(sum(item.committed_draft for item in items) for items in rounds.values()),
    )


def compare_accepted_length(
    generations: Sequence[Generation], *, baseline: Sequence[Generation], seed: int
) -> Estimate:
    """Micro accepted length (bonus included) of `generations` minus that of `baseline`, paired by prompt.

    See `evaluation.paired` for the interval, and for the errors.
    """
    return mean_difference([count_by_prompt(generations)], baseline=[count_by_prompt(baseline)], seed=seed)


def share_identical(generations: Sequence[Generation], *, plain: Sequence[Generation]) -> float:
    """Share of prompts whose answers, in all their turns, equal those of plain decoding token for token.

    Raises DraftsmithError if the two do not answer the same requests.
    """
    plain_ids = {generation.request_id: generation.token_ids for generation in plain}
    if plain_ids.keys() != {generation.request_id for generation in generations} or not generations:
        raise DraftsmithError(
            "plain and speculative decoding must answer the same requests",
            got=f"{len(generations)} and {len(plain_ids)} requests",
        )
    identical: dict[str, bool] = {}
    for generation in generations:
        same = generation.token_ids == plain_ids[generation.request_id]
        identical[generation.prompt_id] = identical.get(generation.prompt_id, True) and same
    return sum(identical.values()) / len(identical)


def group_by_prompt(generations: Sequence[Generation]) -> dict[str, list[Generation]]:
    """The turns of each prompt, prompts in the order of their first turn."""
    found: dict[str, list[Generation]] = {}
    for generation in generations:
        found.setdefault(generation.prompt_id, []).append(generation)
    return found


def _sum_slots(prompts: Sequence[Sequence[Generation]], *, block_size: int) -> _SlotSums:
    owner, table = [], []
    for index, turns in enumerate(prompts):
        for turn in turns:
            for item in turn.rounds:
                owner.append(index)
                table.append((item.accepted, item.counted))
    accepted, counted = np.asarray(table, np.int64).T
    slots = np.arange(1, block_size + 1)
    counts = counted[:, None] >= slots  # [N, K]

    def total(values: NDArray) -> Floats:
        sums = np.zeros((len(prompts), block_size))
        np.add.at(sums, np.asarray(owner), values)
        return sums

    return _SlotSums(
        conditional=total(counts & (accepted[:, None] >= slots - 1)),
        survived=total(counts & (accepted[:, None] >= slots)),
        counted=total(counts),
    )


def _share(part: float, *, of: float) -> float | None:
    return float(part / of) if of else None
