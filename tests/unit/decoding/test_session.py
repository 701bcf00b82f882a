"""A session by hand: who is in flight after each step, what a request leaves behind, and what a policy is told."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from draftsmith.decoding.engine import Engine, Request, Session
from draftsmith.decoding.policies import DraftedBlocks, LengthPolicy, verify_all
from draftsmith.decoding.rounds import Generation
from draftsmith.drafters.base import Proposal, Sampler
from draftsmith.errors import TargetError
from draftsmith.params import Sampling
from tests.unit.decoding.toys import (
    Confidence,
    ScriptedDrafter,
    TableTarget,
    Text,
    as_target,
    one_hot_logits,
    table_draft,
)

GREEDY = Sampling(temperature=0.0)
COUNT, SIZE = 40, 2
TARGET = TableTarget(one_hot_logits([(token + 1) % COUNT for token in range(COUNT)], vocab=COUNT))
"""After p comes p + 1."""


def counting_session(
    *,
    batch_size: int = 3,
    policy: LengthPolicy = verify_all,
    confidence: Confidence | None = None,
    temperatures: Sequence[float] | None = None,
    on_commit: Callable[[str, list[int], list[bool]], None] | None = None,
    end_ids: Sequence[int] = (),
) -> Session:
    """A session whose drafter is always right: three tokens a round."""
    drafter = ScriptedDrafter(table_draft(TARGET.table), target=TARGET, block_size=SIZE, confidence=confidence)
    engine = Engine(
        as_target(TARGET), drafter=drafter, end_ids=end_ids, batch_size=batch_size, policy=policy,
        temperatures=temperatures,
    )  # fmt: skip
    return engine.session(on_commit=on_commit)


def asked(name: str, first: int, num: int, stop_ids: Sequence[int] = ()) -> Request:
    return Request(name, (first,), num, GREEDY, seed=0, stop_ids=frozenset(stop_ids))


def texts(generations: Sequence[Generation]) -> dict[str, tuple[int, ...]]:
    return {one.request_id: one.token_ids for one in generations}


def drained(session: Session) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    while not session.is_idle:
        found |= texts(session.step())
    return found


# Who is in flight


def test_requests_join_between_steps() -> None:
    """Room for two. A step admits first, and then runs a round of all: 1 + 3 tokens for who came in, 3 for others."""
    session = counting_session(batch_size=2)
    assert session.is_idle
    assert session.step() == []
    session.submit(asked("a", 0, 9))
    assert not session.is_idle
    assert (session.step(), session.num_live) == ([], 1)  # a: 4
    session.submit(asked("b", 10, 4))
    session.submit(asked("c", 20, 6))
    assert texts(session.step()) == {"b": (11, 12, 13, 14)}  # a: 7, b: 4
    assert session.num_live == 1
    assert texts(session.step()) == {"a": tuple(range(1, 10))}  # a: 9 of 10, c: 4
    assert session.num_live == 1
    assert texts(session.step()) == {"c": tuple(range(21, 27))}
    assert session.is_idle
    assert session.step() == []


def test_a_request_that_ends_with_its_first_token_leaves_room_in_the_same_step() -> None:
    """Room for two: b and c end with their prefill, so that d comes in too and runs a round."""
    session = counting_session(batch_size=2, end_ids=[31])
    for request in (asked("a", 0, 9), asked("b", 30, 9), asked("c", 5, 1), asked("d", 7, 3)):
        session.submit(request)
    assert texts(session.step()) == {"b": (31,), "c": (6,), "d": (8, 9, 10)}
    assert session.num_live == 1
    assert drained(session) == {"a": tuple(range(1, 10))}


def test_each_request_stops_at_its_own_ids() -> None:
    session = counting_session(end_ids=[36])
    for request in (asked("a", 0, 9, [5]), asked("b", 2, 9, [9, 7]), asked("c", 2, 9), asked("d", 33, 9, [3])):
        session.submit(request)
    assert drained(session) == {
        "a": (1, 2, 3, 4, 5), "b": (3, 4, 5, 6, 7), "c": tuple(range(3, 12)), "d": (34, 35, 36)
    }  # fmt: skip


def test_requests_leave_when_they_are_cancelled() -> None:
    session = counting_session(batch_size=2)
    for name, first in (("a", 0), ("b", 10), ("c", 20), ("d", 30)):
        session.submit(asked(name, first, 9))
    session.step()
    taken = session.cancel("a")  # b takes its slot
    assert (taken.token_ids, taken.drafted, taken.finish) == ((1, 2, 3, 4), (False, True, True, False), "length")
    assert [one.committed for one in taken.rounds] == [3]
    waiting = session.cancel("d")
    assert (waiting.token_ids, waiting.rounds, waiting.finish) == ((), (), "length")
    assert session.num_live == 1
    assert drained(session) == {"b": tuple(range(11, 20)), "c": tuple(range(21, 30))}


@pytest.mark.parametrize("gone", ["a", "b", "c"])
def test_whichever_slot_becomes_free_the_others_go_on(gone: str) -> None:
    session = counting_session()
    for name, first in (("a", 0), ("b", 10), ("c", 20)):
        session.submit(asked(name, first, 9))
    session.step()
    session.cancel(gone)
    session.submit(asked(gone, 30, 5))
    assert drained(session) == {
        **{name: tuple(range(first, first + 9)) for name, first in (("a", 1), ("b", 11), ("c", 21))},
        gone: tuple(range(31, 36)),
    }


def test_an_id_is_free_again_once_its_request_has_left() -> None:
    session = counting_session(batch_size=1)
    session.submit(asked("a", 0, 4))
    session.submit(asked("b", 10, 4))
    for name in ("a", "b"):  # in flight or waiting, it is taken
        with pytest.raises(TargetError, match=f"request ids must differ: got {name} given twice"):
            session.submit(asked(name, 5, 4))
    assert texts(session.step()) == {"a": (1, 2, 3, 4)}
    session.submit(asked("a", 20, 3))
    session.cancel("b")
    session.submit(asked("b", 30, 3))
    assert drained(session) == {"a": (21, 22, 23), "b": (31, 32, 33)}


def test_what_is_not_here_cannot_be_cancelled() -> None:
    session = counting_session()
    session.submit(asked("a", 0, 4))
    session.step()
    for name in ("a", "z"):  # finished, never seen
        with pytest.raises(TargetError, match=f"no such request is waiting or in flight: got {name}"):
            session.cancel(name)


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (Request("a", (), 2, GREEDY, 0), "request a has an empty prompt"),
        (Request("a", (1,), 0, GREEDY, 0), "request a: max_new_tokens: got 0, expected >= 1"),
    ],
)
def test_a_request_that_cannot_be_answered_leaves_no_trace(request_: Request, text: str) -> None:
    session = counting_session()
    with pytest.raises(TargetError, match=text):
        session.submit(request_)
    assert session.is_idle
    session.submit(asked("a", 0, 2))
    assert drained(session) == {"a": (1, 2)}


def test_tokens_are_told_as_they_are_committed() -> None:
    told = list[Any]()
    session = counting_session(on_commit=lambda *seen: told.append(seen))
    session.submit(asked("a", 0, 5))
    session.step()
    assert told == [("a", [1], [False]), ("a", [2, 3, 4], [True, True, False])]
    session.submit(asked("b", 10, 2))
    session.step()
    assert told[2:] == [("b", [11], [False]), ("a", [5], [True]), ("b", [12], [True])]


def test_a_caller_may_cancel_and_submit_when_it_is_told() -> None:
    """Of a round and of a prefill: the other requests lose nothing and are told of all, who comes in starts anew."""
    taken, told = dict[str, tuple[int, ...]](), dict[str, list[int]]()

    def on_commit(name: str, tokens: list[int], drafted: list[bool]) -> None:
        told.setdefault(name, []).extend(tokens)
        if (name, tokens[0]) in (("a", 2), ("b", 11)):
            taken[name] = session.cancel(name).token_ids
            session.submit(asked(f"{name}2", 30, 6))

    session = counting_session(on_commit=on_commit)
    for name, first in (("a", 0), ("b", 10), ("c", 20)):
        session.submit(asked(name, first, 9))
    found = drained(session)
    assert taken == {"a": (1, 2, 3, 4), "b": (11,)}
    assert found == {"c": tuple(range(21, 30)), "a2": tuple(range(31, 37)), "b2": tuple(range(31, 37))}
    assert {name: tuple(tokens) for name, tokens in told.items()} == {**taken, **found}


# What a policy says


@pytest.mark.parametrize(
    ("lengths", "shown"),
    [([2], "[2]"), ([2, 2, 2], "[2, 2, 2]"), ([-1, 2], "[-1, 2]"), ([3, 0], "[3, 0]"), ([], "[]")],
)
def test_lengths_that_cannot_be_are_refused(lengths: list[int], shown: str) -> None:
    """And nothing of that round is committed: with a policy that has come to its senses the answers are the same."""
    given = [lengths]
    session = counting_session(policy=lambda blocks: given.pop() if given else verify_all(blocks))
    session.submit(asked("a", 0, 5))
    session.submit(asked("b", 10, 5))
    with pytest.raises(TargetError) as caught:
        session.step()
    assert str(caught.value) == (
        f"the verification lengths of a policy cannot be used: got {shown}, expected 2 numbers from 0 to 2"
    )
    assert session.num_live == 2
    assert drained(session) == {"a": tuple(range(1, 6)), "b": tuple(range(11, 16))}


def test_a_policy_may_answer_in_numpy() -> None:
    session = counting_session(policy=lambda blocks: np.full(blocks.num_requests, 1))  # type: ignore[return-value, arg-type]
    session.submit(asked("a", 0, 4))
    generation = session.step() + session.step()
    assert texts(generation) == {"a": (1, 2, 3, 4)}
    assert [one.verified for one in generation[0].rounds] == [1, 1]


# What a policy is told


def told_to_policy(logits: Sequence[float], *, temperatures: Sequence[float] | None) -> tuple[np.ndarray, Generation]:
    """The confidences of one round of a drafter that says these logits, and what is recorded of it."""
    seen = list[DraftedBlocks]()

    def policy(blocks: DraftedBlocks) -> list[int]:
        seen.append(blocks)
        return [0]

    def confidence(current: list[Text]) -> list[float]:
        return [logits[len(text) - 2] for text in current]

    session = counting_session(policy=policy, confidence=confidence, temperatures=temperatures)
    session.submit(asked("a", 0, 2))
    [generation] = session.step()
    [blocks] = seen
    assert (blocks.request_ids, blocks.block_size, blocks.num_requests) == (("a",), SIZE, 1)
    assert blocks.confidence is not None
    assert blocks.confidence.dtype == np.float64
    return blocks.confidence[0], generation


def test_confidences_reach_the_policy_by_the_temperature_of_their_slot() -> None:
    """c_k = sigmoid(logit_k / T_k), by math.exp; the record keeps the raw logits."""
    for temperatures, (first, second) in ((None, (1.0, 1.0)), ([0.25, 4.0], (0.25, 4.0))):
        found, generation = told_to_policy([1.5, -3.0], temperatures=temperatures)
        assert found.tolist() == pytest.approx([1 / (1 + math.exp(-1.5 / first)), 1 / (1 + math.exp(3.0 / second))])
        assert generation.rounds[0].confidence_logits == (1.5, -3.0)


@pytest.mark.parametrize("temperatures", [None, [0.2, 5.0]])
@pytest.mark.parametrize("logit", [1e4, 3e38, math.inf])
def test_extreme_confidences_are_sure_and_nothing_overflows(logit: float, temperatures: Sequence[float] | None) -> None:
    """Warnings are errors here, numpy's of overflow too."""
    with np.errstate(all="raise", under="ignore"):
        (high, low), generation = told_to_policy([logit, -logit], temperatures=temperatures)
    assert high == 1.0
    assert 0.0 <= low < 1e-300
    assert generation.rounds[0].confidence_logits == (np.float32(logit), -np.float32(logit))


def test_without_a_confidence_head_the_policy_is_told_so() -> None:
    seen = list[DraftedBlocks]()

    def policy(blocks: DraftedBlocks) -> list[int]:
        seen.append(blocks)
        return [blocks.block_size] * blocks.num_requests

    session = counting_session(policy=policy, temperatures=[1.0, 2.0], batch_size=2)
    for name, first in (("a", 0), ("b", 10), ("c", 20)):
        session.submit(asked(name, first, 4))
    drained(session)
    assert seen == [DraftedBlocks(("a", "b"), SIZE, None), DraftedBlocks(("c",), SIZE, None)]


def test_the_policy_is_asked_in_the_order_of_the_batch() -> None:
    """Each request is told apart by its confidence, whoever left before it."""
    seen = list[dict[str, float]]()

    def policy(blocks: DraftedBlocks) -> list[int]:
        assert blocks.confidence is not None
        logits = np.log(blocks.confidence[:, 0] / (1 - blocks.confidence[:, 0]))
        seen.append(dict(zip(blocks.request_ids, logits.round(6).tolist(), strict=True)))
        return verify_all(blocks)

    session = counting_session(
        policy=policy, confidence=lambda current: [text[0] / 10 for text in current], batch_size=3
    )
    for name, first, num in (("a", 0, 4), ("b", 10, 9), ("c", 20, 7), ("d", 30, 9)):
        session.submit(asked(name, first, num))
    drained(session)
    assert seen == [
        {"a": 0.0, "b": 1.0, "c": 2.0}, {"c": 2.0, "b": 1.0, "d": 3.0}, {"d": 3.0, "b": 1.0}, {"d": 3.0}
    ]  # fmt: skip
    assert list(seen[1]) == ["c", "b", "d"]  # the last took the slot of the first


def test_drafts_are_drawn_at_each_requests_temperature_without_its_filters() -> None:
    """softmax(logits / T), or the likeliest alone where the request is greedy, is what the drafter draws from."""
    logits, laws = torch.tensor([0.0, 1.0, 2.0, 4.0]), list[Tensor | None]()

    class Noting(ScriptedDrafter):
        def propose(self, anchors: Tensor, *, sample: Sampler, **how: Any) -> Proposal:
            laws.append(sample(logits.expand(len(anchors), -1), 0)[1])
            return super().propose(anchors, sample=sample, **how)

    target = TableTarget(torch.zeros(4, 4))
    drafter = Noting(table_draft(torch.zeros(4, 4)), target=target, block_size=SIZE)
    session = Engine(as_target(target), drafter=drafter, end_ids=[], batch_size=4).session()
    samplings = (
        Sampling(temperature=0.5, top_k=2), GREEDY, Sampling(temperature=2.0, top_p=0.3), Sampling(min_p=0.9)
    )  # fmt: skip
    for number, sampling in enumerate(samplings):
        session.submit(Request(str(number), (0,), 9, sampling, seed=number))
    session.step()
    [found] = laws
    assert found is not None
    weights = [[math.exp(logit / heat) for logit in logits.tolist()] for heat in (0.5, 2.0, 1.0)]
    expected = [[weight / sum(row) for weight in row] for row in weights]
    torch.testing.assert_close(found, torch.tensor([expected[0], [0, 0, 0, 1], *expected[1:]]))


def test_no_gradient_is_kept() -> None:
    table = TARGET.table.clone().requires_grad_()
    session = Engine(as_target(TableTarget(table)), drafter=None, end_ids=[], batch_size=1).session()
    session.submit(asked("a", 0, 2))
    assert drained(session) == {"a": (1, 2)}
    assert table.grad is None
    assert torch.is_grad_enabled()
