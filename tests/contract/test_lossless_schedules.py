"""Every drafter kind: whenever requests come in and leave, each has the ids that it gets alone, in float32."""

from __future__ import annotations

from functools import cache
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest

from draftsmith.decoding.engine import Engine, Request
from draftsmith.decoding.policies import LengthPolicy
from draftsmith.decoding.rounds import Generation
from draftsmith.params import Sampling
from draftsmith.serving.policies import FixedLength, StaticThreshold
from draftsmith.targets.families import FAMILIES
from tests.tiny_models import END_TOKEN, KINDS, random_ids, tiny_drafter, tiny_folders, tiny_target
from tests.unit.decoding.schedules import Event, assert_as_alone, play

__all__ = ["tiny_folders"]

SAMPLINGS = (Sampling(temperature=0.0), Sampling(), Sampling(temperature=0.7, top_p=0.9, min_p=0.02))
NUM_REQUESTS = 9


def request_of(number: int) -> Request:
    """Prompts of 1 to 20 tokens, 1 to 16 new ones, greedy and sampled."""
    prompt = random_ids(1 + 7 * number % 20, seed=number)
    return Request(str(number), tuple(prompt), 1 + 5 * number % 16, SAMPLINGS[number % len(SAMPLINGS)], seed=number)


def schedule(seed: int) -> list[Event]:
    """Each request comes in once and again, among steps and cancellations."""
    draw = np.random.default_rng(seed)
    comings = [Event("submit", number) for number in (*range(NUM_REQUESTS), *range(NUM_REQUESTS))]
    events = [*comings, *[Event("cancel", number) for number in range(4)], *[Event("step")] * 25]
    return [events[place] for place in draw.permutation(len(events))]


@pytest.mark.parametrize(("kind", "family"), list(zip(KINDS, cycle(FAMILIES))))
def test_requests_that_come_and_go_have_the_answers_of_each_alone(
    kind: str, family: str, tiny_folders: dict[str, Path]
) -> None:
    target = tiny_target(tiny_folders[family])
    drafter = tiny_drafter(kind, tiny_folders[family], seed=7).eval().requires_grad_(False)
    by_confidence = drafter.config.confidence
    policy: LengthPolicy = StaticThreshold(0.5) if by_confidence else FixedLength(min(3, drafter.config.block_size))

    def engine_of(batch_size: int) -> Engine:
        return Engine(target, drafter=drafter, end_ids=[END_TOKEN], batch_size=batch_size, policy=policy)

    @cache
    def alone(request: Request) -> Generation:
        return engine_of(1).generate([request])[0]

    played = play(engine_of(3), schedule(seed=1), request_of=request_of, num_ids=6)
    assert_as_alone(played, alone)
    assert played.most_live == 3
    assert len(played.finished) > 6
    assert any(one.rounds for _, one in played.cancelled)
