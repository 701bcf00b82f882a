"""Engines made wrong on purpose: each bias patches one part of verification in a way that keeps every shape right.

Letters as in `draftsmith.decoding.accept`: R requests, K block size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.decoding import session, verification
from draftsmith.decoding.accept import Verdict
from draftsmith.decoding.sampling import Purpose, SamplingGroups
from draftsmith.params import Sampling

Bias = Callable[[pytest.MonkeyPatch], None]
right = verification.verify_sampled


def normalised(weights: Tensor) -> Tensor:
    """Rows [.., V] to sum one; rows of nothing stay so."""
    return weights / weights.sum(dim=-1, keepdim=True).clamp(min=1e-30)


def rows_at(laws: Tensor, slots: Tensor) -> Tensor:
    """laws [R, S, V], slots [R] -> [R, V], slots past the end read as the last."""
    return laws[torch.arange(len(laws)), slots.clamp(max=laws.shape[1] - 1)]


def verifying(wrong: Callable[..., Verdict]) -> Bias:
    return lambda patch: patch.setattr(verification, "verify_sampled", wrong)


def accept_always(tokens: Tensor, *, draft: Tensor, target: Tensor, lengths: Tensor, numbers: Tensor) -> Verdict:
    return Verdict(lengths, rows_at(target, lengths))


def no_residual(tokens: Tensor, **given: Tensor) -> Verdict:
    """A rejected token is replaced by a sample of p_t."""
    accepted = right(tokens, **given).accepted
    return Verdict(accepted, rows_at(given["target"], accepted))


def residual_of_the_next_slot(tokens: Tensor, **given: Tensor) -> Verdict:
    """p_t - p_d, with p_d of the slot behind the rejected one."""
    verdict = right(tokens, **given)
    accepted, rejected = verdict.accepted, verdict.accepted < given["lengths"]
    residual = (rows_at(given["target"], accepted) - rows_at(given["draft"], accepted + 1)).clamp(min=0.0)
    rejected &= residual.sum(dim=1) > 0
    return Verdict(accepted, torch.where(rejected.unsqueeze(1), residual, verdict.next_distribution))


def misquoted_draft(tokens: Tensor, *, draft: Tensor, **given: Tensor) -> Verdict:
    """p_d of twice the temperature that the drafts were drawn at."""
    return right(tokens, draft=normalised(draft.sqrt()), **given)


def bonus_of_the_draft(tokens: Tensor, **given: Tensor) -> Verdict:
    """Behind a block that was accepted whole comes what the drafter says, of the slot behind or, past it, its last."""
    verdict = right(tokens, **given)
    whole = verdict.accepted == given["lengths"]
    drafted = rows_at(given["draft"], verdict.accepted)
    return Verdict(verdict.accepted, torch.where(whole.unsqueeze(1), drafted, verdict.next_distribution))


def untransformed_acceptance(tokens: Tensor, *, target: Tensor, **given: Tensor) -> Verdict:
    """At temperature 0.5, acceptance by p_t of temperature 1; the tokens behind are the right target's."""
    accepted = right(tokens, target=normalised(target.sqrt()), **given).accepted
    residual = (rows_at(target, accepted) - rows_at(given["draft"], accepted)).clamp(min=0.0)
    rejected = (accepted < given["lengths"]) & (residual.sum(dim=1) > 0)
    return Verdict(accepted, torch.where(rejected.unsqueeze(1), residual, rows_at(target, accepted)))


def no_filters(patch: pytest.MonkeyPatch) -> None:
    """Verification against the target at its temperature, without top-k, top-p and min-p."""
    transform = verification.probabilities

    def bare(logits: Tensor, *, groups: SamplingGroups) -> Tensor:
        of = tuple(Sampling(temperature=sampling.temperature) for sampling in groups.of)
        return transform(logits, groups=replace(groups, of=of))

    patch.setattr(verification, "probabilities", bare)


def one_number_for_two_purposes(patch: pytest.MonkeyPatch) -> None:
    """A slot's draft token is accepted by the number that it was drawn with."""
    numbers = session.uniforms

    def shared(seeds: Sequence[int], *, purpose: Purpose, **given: Any) -> Any:
        return numbers(seeds, purpose=Purpose.DRAFT if purpose is Purpose.ACCEPT else purpose, **given)

    patch.setattr(session, "uniforms", shared)


def later_waves_one_slot_early(patch: pytest.MonkeyPatch) -> None:
    """Every wave but the first takes draft tokens, their laws and their numbers of the slots before its own."""
    verify = verification._verify_wave

    def shifted(logits: Tensor, *, wave: Any, **given: Any) -> Any:
        early = replace(wave, first=wave.first - 1) if wave.first else wave
        return verify(logits, wave=early, **given)

    patch.setattr(verification, "_verify_wave", shifted)


def waves_with_a_gap(patch: pytest.MonkeyPatch) -> None:
    """The first wave leaves out its last slot."""
    waves = verification.waves

    def gapped(num_slots: int, *, num_waves: int | None) -> Iterator[tuple[int, int]]:
        for first, width in waves(num_slots, num_waves=num_waves):
            yield first, width if first else width - 1

    patch.setattr(verification, "waves", gapped)


OF_VERIFICATION: dict[str, Bias] = {
    "accept always": verifying(accept_always),
    "no residual": verifying(no_residual),
    "residual of the next slot": verifying(residual_of_the_next_slot),
    "misquoted draft": verifying(misquoted_draft),
    "bonus of the draft": verifying(bonus_of_the_draft),
    "later waves one slot early": later_waves_one_slot_early,
    "waves with a gap": waves_with_a_gap,
}
"""Name -> a bias that shows at any temperature, without filters, where blocks of 3 and more are verified whole."""
