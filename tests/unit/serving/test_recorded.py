"""Recorded rounds: what is kept of them, what a shorter verification makes of them, which answer a request is given."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from draftsmith.decoding.rounds import Generation
from draftsmith.errors import DraftsmithError
from draftsmith.evaluation.decoded import Decoded
from draftsmith.serving.recorded import plain_rounds, record_decoded, record_rounds
from tests.unit.serving.recordings import answer

FIRST = answer("x/1/t0", [(3, False), (0, False), (2, True)], block_size=3, logits=[[1, 2, 3], [4, 5, 6], [7, 8, 9]])
SECOND = answer("x/2/t0", [(1, False)], block_size=3, logits=[[0, -1, -2]])
OF_ONE_TOKEN = Generation("x/3/t0", (7,), (False,), "length", ())


def test_rounds_are_kept_in_order_by_answer_and_domain() -> None:
    rounds = record_rounds({"chat": [FIRST, OF_ONE_TOKEN], "math": [SECOND]}, block_size=3)
    assert rounds.accepted.tolist() == [3, 0, 2, 1]
    assert rounds.ended.tolist() == [False, False, True, False]
    assert rounds.logits is not None
    assert rounds.logits.tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9], [0, -1, -2]]
    assert (rounds.first.tolist(), rounds.last.tolist()) == ([0, 3], [2, 3])
    assert (rounds.domains, rounds.domain.tolist()) == (("chat", "math"), [0, 1])
    assert (rounds.num_rounds, rounds.num_answers, rounds.num_without_rounds) == (4, 2, 1)
    assert rounds.counted.tolist() == [3, 3, 2, 3]
    assert rounds.committed.tolist() == [4, 1, 2, 2]
    assert rounds.accepted_length == (4 + 1 + 2 + 2) / 4


@pytest.mark.parametrize(
    ("length", "accepted", "committed"),
    [
        # of rounds that accepted 3, 0, 2 up to an end-of-text, and 1: no bonus token behind the end-of-text alone
        (0, [0, 0, 0, 0], [1, 1, 1, 1]),
        (1, [1, 0, 1, 1], [2, 1, 2, 2]),
        (2, [2, 0, 2, 1], [3, 1, 2, 2]),
        (3, [3, 0, 2, 1], [4, 1, 2, 2]),
    ],
)
def test_a_shorter_verification_accepts_no_more_than_it_verifies(
    length: int, accepted: list[int], committed: list[int]
) -> None:
    rounds = record_rounds({"chat": [FIRST, SECOND]}, block_size=3)
    found = rounds.settle(np.arange(4), lengths=np.full(4, length))
    assert (found[0].tolist(), found[1].tolist()) == (accepted, committed)


def test_lengths_go_by_request() -> None:
    rounds = record_rounds({"chat": [FIRST, SECOND]}, block_size=3)
    accepted, committed = rounds.settle(np.array([2, 2, 0, 2]), lengths=np.array([3, 1, 2, 0]))
    assert (accepted.tolist(), committed.tolist()) == ([2, 1, 2, 0], [2, 2, 3, 1])


def test_a_round_cut_by_a_length_limit_counts_in_full() -> None:
    cut = replace(FIRST, rounds=(replace(FIRST.rounds[0], committed=1, cut=True),))
    assert record_rounds({"chat": [cut]}, block_size=3).committed.tolist() == [4]


def test_a_drafter_without_confidences_gives_none() -> None:
    assert record_rounds({"chat": [answer("a", [(1, False)], block_size=2)]}, block_size=2).logits is None


def changed(index: int, **changes: object) -> Generation:
    rounds = list(FIRST.rounds)
    rounds[index] = replace(rounds[index], **changes)  # type: ignore[arg-type]
    return replace(FIRST, rounds=tuple(rounds))


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (
            changed(1, verified=2),
            "full-length verification .* got 2 slots verified, expected 3 .request x/1/t0, round 2",
        ),
        (changed(0, accepted=4), "contradicts itself: got 4 accepted of 3"),
        (changed(0, accepted=-1), "contradicts itself"),
        (changed(2, accepted=0), "contradicts itself: got 0 accepted of 3, ended True .request x/1/t0, round 3"),
        (changed(2, confidence_logits=(1.0, 2.0)), "one confidence logit a slot, or none at all: got 2, expected 3"),
        (changed(1, confidence_logits=()), "some recorded rounds have confidences and others have none: got 2 of 3"),
        (changed(1, confidence_logits=(1.0, float("nan"), 2.0)), "must be finite: .* .request x/1/t0, round 2"),
    ],
)
def test_unfit_rounds_are_refused(wrong: Generation, text: str) -> None:
    with pytest.raises(DraftsmithError, match=text):
        record_rounds({"chat": [wrong]}, block_size=3)


def test_another_block_size_is_refused() -> None:
    with pytest.raises(DraftsmithError, match="full-length verification"):
        record_rounds({"chat": [FIRST]}, block_size=4)


def test_a_domain_without_rounds_is_refused() -> None:
    with pytest.raises(DraftsmithError, match="a domain without recorded rounds: got code"):
        record_rounds({"chat": [FIRST], "code": [OF_ONE_TOKEN]}, block_size=3)
    with pytest.raises(DraftsmithError, match="no recorded rounds"):
        record_rounds({}, block_size=3)


def decoded(benchmark: str, domain: str, generations: list[Generation], *, temperature: float = 1.0) -> Decoded:
    return Decoded(benchmark, domain, temperature, 4, tuple(generations), (), None, None)  # type: ignore[arg-type]


def test_benchmarks_of_a_domain_are_one_recording() -> None:
    third = answer("z", [(2, False)], block_size=3, logits=[[3, 3, 3]])
    found = record_decoded(
        [decoded("one", "chat", [FIRST]), decoded("two", "math", [SECOND]), decoded("three", "chat", [third])],
        block_size=3,
    )
    assert found.domains == ("chat", "math")
    assert found.accepted.tolist() == [3, 0, 2, 2, 1]
    assert (found.domain.tolist(), found.first.tolist()) == ([0, 0, 1], [0, 3, 4])


def test_temperatures_are_not_mixed() -> None:
    mixed = [decoded("one", "chat", [FIRST]), decoded("two", "chat", [SECOND], temperature=0.0)]
    with pytest.raises(DraftsmithError, match=r"several temperatures .* got \[0.0, 1.0\]"):
        record_decoded(mixed, block_size=3)


def drawn(rounds: dict[str, list[Generation]], domains: list[str], *, seed: int = 0) -> np.ndarray:
    names = tuple(dict.fromkeys(domains))
    index = np.array([names.index(name) for name in domains])
    return record_rounds(rounds, block_size=3).draw_answers(names, domain=index, seed=seed)


POOL = {"chat": [FIRST, SECOND], "math": [answer("m", [(3, False)] * 2, block_size=3, logits=[[1, 1, 1]] * 2)]}


def test_answers_are_drawn_by_their_tokens() -> None:
    """Rounds of 4 + 1 + 2 tokens against one of 2."""
    found = drawn(POOL, ["chat"] * 4_000, seed=3)
    num = int((found == 0).sum())
    assert stats.binomtest(num, 4_000, 7 / 9).pvalue > 1e-3
    assert set(found.tolist()) == {0, 1}


def test_a_draw_depends_on_the_seed_and_the_request_alone() -> None:
    all_chat = drawn(POOL, ["chat"] * 50)
    mixed = drawn(POOL, ["math", "chat"] * 25)
    assert (mixed[::2] == 2).all()
    assert (mixed[1::2] == all_chat[1::2]).all()
    assert (drawn(POOL, ["chat"] * 30) == all_chat[:30]).all()
    assert (drawn(POOL, ["chat"] * 50, seed=1) != all_chat).any()


def test_domains_that_were_not_recorded_are_refused() -> None:
    with pytest.raises(DraftsmithError, match="no recorded rounds of a domain: got code, expected one of chat, math"):
        drawn(POOL, ["chat", "code"])


def test_plain_decoding_writes_one_token_a_round() -> None:
    rounds = plain_rounds(["chat", "math"])
    assert rounds.block_size == 0
    accepted, committed = rounds.settle(np.array([0, 1, 1]), lengths=np.zeros(3, np.int64))
    assert (accepted.tolist(), committed.tolist()) == ([0, 0, 0], [1, 1, 1])
    assert rounds.draw_answers(("math", "chat"), domain=np.array([0, 1, 0]), seed=0).tolist() == [1, 0, 1]
    assert rounds.accepted_length == 1.0
