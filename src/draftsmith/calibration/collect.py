"""From recorded rounds to the arrays that calibration works on, cut into a fitting and a held-out part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftsmith.decoding.rounds import Generation
from draftsmith.errors import CalibrationError


@dataclass(frozen=True)
class RoundArrays:
    """Rounds as arrays: slot k of a round is evidence iff `counted >= k`; its prefix was accepted iff `accepted >= k`.

    Slots count if they were verified, up to and including an accepted end-of-text (DSpark section 3.2.1).
    """

    logits: NDArray[np.float64]  # [N, K] raw confidence logits
    accepted: NDArray[np.int64]  # [N] accepted draft tokens
    counted: NDArray[np.int64]  # [N] slots that count, accepted <= counted <= K
    prompt: NDArray[np.int64]  # [N] of each round, index into prompt_ids
    prompt_ids: tuple[str, ...]

    @property
    def num_prompts(self) -> int:
        return len(self.prompt_ids)

    def chosen(self, rows: NDArray[np.bool_]) -> RoundArrays:
        """Some of the rounds [N], and the prompts that they are of."""
        places, prompt = np.unique(self.prompt[rows], return_inverse=True)
        ids = tuple(self.prompt_ids[place] for place in places)
        return RoundArrays(self.logits[rows], self.accepted[rows], self.counted[rows], prompt, ids)

    @property
    def num_rounds(self) -> int:
        return len(self.accepted)

    @property
    def num_slots(self) -> int:
        """K, the block size."""
        return self.logits.shape[1]

    @property
    def num_counted(self) -> tuple[int, ...]:
        """[K] rounds in which each slot counts."""
        return tuple(int((self.counted > slot).sum()) for slot in range(self.num_slots))


@dataclass(frozen=True)
class RoundSplit:
    """Rounds to fit temperatures on, and rounds of other prompts to report on."""

    fit: RoundArrays
    holdout: RoundArrays


def collect_rounds(generations: Sequence[Generation], *, block_size: int) -> RoundArrays:
    """All rounds of `generations` as arrays. `block_size` is K.

    Raises CalibrationError, naming the request, if a round lacks its K confidence logits or contradicts itself.
    """
    logits, accepted, counted, prompt = [], [], [], []
    places: dict[str, int] = {}
    for generation in generations:
        place = places.setdefault(generation.prompt_id, len(places))
        for index, item in enumerate(generation.rounds):
            where = f"request {generation.request_id}, round {index}"
            if len(item.confidence_logits) != block_size:
                raise CalibrationError(
                    "a round needs one confidence logit a slot",
                    got=len(item.confidence_logits),
                    expected=block_size,
                    where=where,
                )
            if not 0 <= item.accepted <= item.counted <= item.verified <= block_size:
                raise CalibrationError(
                    "a round contradicts itself",
                    got=f"{item.accepted} accepted of {item.verified} verified",
                    expected=f"0 <= accepted <= verified <= {block_size}",
                    where=where,
                )
            logits.append(item.confidence_logits)
            accepted.append(item.accepted)
            counted.append(item.counted)
            prompt.append(place)
    return RoundArrays(
        logits=np.asarray(logits, np.float64).reshape(len(logits), block_size),
        accepted=np.asarray(accepted, np.int64),
        counted=np.asarray(counted, np.int64),
        prompt=np.asarray(prompt, np.int64),
        prompt_ids=tuple(places),
    )


def split_rounds(
    generations: Sequence[Generation], *, block_size: int, holdout_share: float, min_rounds: int, seed: int
) -> RoundSplit:
    """Cut `generations` by prompt into a fitting and a held-out part; no prompt, and so no request, is in both.

    About `holdout_share` of the prompts are held out, at least one and never all; the choice depends on the set of
    prompt ids and `seed` only, not on the order of `generations`. Each slot must count in at least `min_rounds` rounds
    of either part, else CalibrationError says how many prompts would do.
    """
    prompt_ids = sorted({generation.prompt_id for generation in generations})
    if len(prompt_ids) < 2:
        raise CalibrationError(
            "too few prompts to hold some out", got=len(prompt_ids), expected="at least 2", where=NUM_PROMPTS_KNOB
        )
    num_holdout = min(max(round(holdout_share * len(prompt_ids)), 1), len(prompt_ids) - 1)
    order = np.random.default_rng(seed).permutation(len(prompt_ids))
    held_out = {prompt_ids[index] for index in order[:num_holdout]}
    split = RoundSplit(
        fit=collect_rounds([item for item in generations if item.prompt_id not in held_out], block_size=block_size),
        holdout=collect_rounds([item for item in generations if item.prompt_id in held_out], block_size=block_size),
    )
    for name, part in (("fitting", split.fit), ("held-out", split.holdout)):
        require_rounds(part, name=name, min_rounds=min_rounds, total_prompts=len(prompt_ids))
    return split


NUM_PROMPTS_KNOB = "params.yaml: prompts.num_calibration"


def require_rounds(part: RoundArrays, *, name: str, min_rounds: int, total_prompts: int) -> None:
    """Raises CalibrationError, with the number of prompts that would do, if a slot counts in too few rounds."""
    fewest = min(part.num_counted)
    if fewest >= min_rounds:
        return
    needed = f", about {math.ceil(total_prompts * min_rounds / fewest)} calibration prompts in all" if fewest else ""
    raise CalibrationError(
        f"too few {name} rounds to calibrate",
        got=f"{fewest} that count at slot {part.num_counted.index(fewest) + 1}, from {part.num_prompts} prompts",
        expected=f"at least {min_rounds}{needed}",
        where=f"{NUM_PROMPTS_KNOB}, calibrate.max_new_tokens or calibrate.min_rounds",
    )
