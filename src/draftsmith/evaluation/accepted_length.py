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
from draftsmith.evaluation.paired import Estimate, PromptCounts, mean_difference

Floats = NDArray[np.float64]
Interval = tuple[float, float]


@dataclass(frozen=True)
class AcceptedLength:
    """Accepted length and acceptance by position. Intervals are 95 %, by bootstrap over prompts; None below 2 prompts.

    Lists hold one entry a position 1..K; None where no round has evidence there.
    """

    num_prompts: int
    num_requests: int  # a prompt of several turns makes several requests
    num_prompts_without_rounds: int  # answered by the prefill token alone; in no mean
    num_rounds: int
    num_cut_rounds: int
    num_tokens: int  # of the answers: committed ones and the tokens of the prefills
    num_committed: int
    accepted_length: float
    accepted_length_interval: Interval | None
    accepted_length_without_bonus: float
    accepted_length_without_bonus_interval: Interval | None
    accepted_length_macro: float
    accepted_length_without_bonus_macro: float
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


@dataclass(frozen=True)
class _PromptSums:
    """Sums over the rounds of each prompt that has any (P prompts)."""

    rounds: Floats  # [P]
    committed: Floats  # [P]
    committed_draft: Floats  # [P]
    conditional: Floats  # [P, K] rounds whose prefix k - 1 was accepted and whose slot k counts
    survived: Floats  # [P, K] rounds whose prefix k was accepted
    counted: Floats  # [P, K] rounds whose slot k counts


def measure_accepted_length(
    generations: Sequence[Generation], *, block_size: int, seed: int, num_resamples: int = 2000
) -> AcceptedLength:
    """Accepted length of `generations`; see the definitions above. `block_size` is K.

    Raises DraftsmithError if there is no round at all.
    """
    by_prompt = _by_prompt(generations)
    with_rounds = [turns for turns in by_prompt.values() if any(turn.rounds for turn in turns)]
    if not with_rounds:
        raise DraftsmithError(
            "no decoding round to measure",
            got=f"{len(generations)} answers of one token",
            expected="longer answers",
            where="params.yaml: evaluate.max_new_tokens",
        )
    sums = _sum_by_prompt(with_rounds, block_size=block_size)
    weights = _resamples(len(with_rounds), num_resamples=num_resamples, seed=seed)
    conditional, survived, counted = sums.conditional.sum(axis=0), sums.survived.sum(axis=0), sums.counted.sum(axis=0)
    slots = range(block_size)
    return AcceptedLength(
        num_prompts=len(by_prompt),
        num_requests=len(generations),
        num_prompts_without_rounds=len(by_prompt) - len(with_rounds),
        num_rounds=int(sums.rounds.sum()),
        num_cut_rounds=sum(item.cut for generation in generations for item in generation.rounds),
        num_tokens=sum(len(generation.token_ids) for generation in generations),
        num_committed=int(sums.committed.sum()),
        accepted_length=float(sums.committed.sum() / sums.rounds.sum()),
        accepted_length_interval=_interval(sums.committed, over=sums.rounds, weights=weights),
        accepted_length_without_bonus=float(sums.committed_draft.sum() / sums.rounds.sum()),
        accepted_length_without_bonus_interval=_interval(sums.committed_draft, over=sums.rounds, weights=weights),
        accepted_length_macro=float(np.mean(sums.committed / sums.rounds)),
        accepted_length_without_bonus_macro=float(np.mean(sums.committed_draft / sums.rounds)),
        conditional_acceptance=tuple(_share(survived[k], of=conditional[k]) for k in slots),
        conditional_acceptance_interval=tuple(
            _interval(sums.survived[:, k], over=sums.conditional[:, k], weights=weights) for k in slots
        ),
        num_conditional=tuple(int(conditional[k]) for k in slots),
        prefix_survival=tuple(_share(survived[k], of=counted[k]) for k in slots),
        num_counted=tuple(int(counted[k]) for k in slots),
        prompts=count_by_prompt(generations),
    )


def count_by_prompt(generations: Sequence[Generation]) -> PromptCounts:
    """Rounds and committed tokens of each prompt over its turns, prompts in the order of their first turn."""
    rounds = {name: [item for turn in turns for item in turn.rounds] for name, turns in _by_prompt(generations).items()}
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


def _by_prompt(generations: Sequence[Generation]) -> dict[str, list[Generation]]:
    found: dict[str, list[Generation]] = {}
    for generation in generations:
        found.setdefault(generation.prompt_id, []).append(generation)
    return found


def _sum_by_prompt(prompts: Sequence[Sequence[Generation]], *, block_size: int) -> _PromptSums:
    owner, table = [], []
    for index, turns in enumerate(prompts):
        for turn in turns:
            for item in turn.rounds:
                owner.append(index)
                table.append((item.accepted, item.counted, item.committed, item.committed_draft))
    accepted, counted, committed, committed_draft = np.asarray(table, np.int64).T
    slots = np.arange(1, block_size + 1)
    counts = counted[:, None] >= slots  # [N, K]

    def total(values: NDArray) -> Floats:
        sums = np.zeros((len(prompts), *values.shape[1:]))
        np.add.at(sums, np.asarray(owner), values)
        return sums

    return _PromptSums(
        rounds=total(np.ones(len(owner))),
        committed=total(committed),
        committed_draft=total(committed_draft),
        conditional=total(counts & (accepted[:, None] >= slots - 1)),
        survived=total(counts & (accepted[:, None] >= slots)),
        counted=total(counts),
    )


def _resamples(num_prompts: int, *, num_resamples: int, seed: int) -> Floats | None:
    """How often each bootstrap sample draws each prompt, [num_resamples, P]; None below two prompts."""
    if num_prompts < 2:
        return None
    rng = np.random.default_rng(seed)
    return rng.multinomial(num_prompts, np.full(num_prompts, 1 / num_prompts), size=num_resamples).astype(np.float64)


def _interval(numerator: Floats, *, over: Floats, weights: Floats | None) -> Interval | None:
    """95 % percentile interval of sum(numerator) / sum(over) [P each]; resamples without evidence are left out.

    None if fewer than two prompts have evidence.
    """
    if weights is None or np.count_nonzero(over) < 2:
        return None
    top, bottom = weights @ numerator, weights @ over
    low, high = np.quantile(top[bottom > 0] / bottom[bottom > 0], [0.025, 0.975])
    return float(low), float(high)


def _share(part: float, *, of: float) -> float | None:
    return float(part / of) if of else None
