"""What one round makes of a request, by hand: end of text, the length limit, both, and neither."""

from __future__ import annotations

import pytest

from draftsmith.decoding.live import LiveRequest, Request
from draftsmith.decoding.rounds import Generation, Round
from draftsmith.params import Sampling

END, STOP = 9, 8
PROMPT = (1, 2, 3)


def begun(*, room: int) -> LiveRequest:
    """A request with one token written and `room` more to write; 9 ends every text, 8 this request's."""
    request = Request("r/t1", PROMPT, room + 1, Sampling(), seed=0, stop_ids=frozenset({STOP}))
    item = LiveRequest.begin(request, end_ids=frozenset({END}))
    item.commit([7], num_draft=0)
    assert (item.room, item.anchor_position, item.num_rounds, item.finish) == (room, 3, 1, None)
    return item


def round_of(verified: int, accepted: int, committed: int, **changes: object) -> Round:
    fields = {"ended": False, "cut": False, "rejected_token": None, **changes}
    return Round(3, verified, accepted, committed, confidence_logits=(0.5, -1.0), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("verified", "accepted", "following", "room", "committed", "num_draft", "made", "finish"),
    [
        pytest.param([4, 5], 0, 6, 9, [6], 0, round_of(2, 0, 1, rejected_token=4), None, id="nothing accepted"),
        pytest.param([4, 5], 1, 6, 9, [4, 6], 1, round_of(2, 1, 2, rejected_token=5), None, id="some accepted"),
        pytest.param([4, 5], 2, 6, 9, [4, 5, 6], 2, round_of(2, 2, 3), None, id="all accepted"),
        pytest.param([], 0, 6, 9, [6], 0, round_of(0, 0, 1), None, id="nothing verified"),
        # end of text among the accepted: no token of the target's behind it
        pytest.param([4, END, 5], 3, 6, 9, [4, END], 2, round_of(3, 2, 2, ended=True), "end_of_text", id="ended"),
        pytest.param([4, STOP, 5], 3, 6, 9, [4, STOP], 2, round_of(3, 2, 2, ended=True), "end_of_text", id="stopped"),
        pytest.param([END], 1, 6, 9, [END], 1, round_of(1, 1, 1, ended=True), "end_of_text", id="ended at once"),
        pytest.param(
            [4, END, 5], 2, 6, 9, [4, END], 2, round_of(3, 2, 2, ended=True), "end_of_text", id="ended, 5 refused"
        ),
        pytest.param(
            [STOP, END], 2, 6, 9, [STOP], 1, round_of(2, 1, 1, ended=True), "end_of_text", id="the first of two ends"
        ),
        # the target's own token ends the text
        pytest.param([4, 5], 2, END, 9, [4, 5, END], 2, round_of(2, 2, 3), "end_of_text", id="bonus token ends"),
        pytest.param([4, 5], 2, STOP, 9, [4, 5, STOP], 2, round_of(2, 2, 3), "end_of_text", id="bonus token stops"),
        pytest.param(
            [4, 5], 1, STOP, 9, [4, STOP], 1, round_of(2, 1, 2, rejected_token=5), "end_of_text", id="correction stops"
        ),
        # an end that was not accepted ends nothing
        pytest.param([STOP, 5], 0, 6, 9, [6], 0, round_of(2, 0, 1, rejected_token=STOP), None, id="stop id rejected"),
        pytest.param([4, END], 0, 6, 9, [6], 0, round_of(2, 0, 1, rejected_token=4), None, id="end behind a rejection"),
        pytest.param(
            [4, END], 1, STOP, 9, [4, STOP], 1, round_of(2, 1, 2, rejected_token=END), "end_of_text",
            id="end rejected for a stop id",
        ),
        # the length limit
        pytest.param([4, 5], 2, 6, 3, [4, 5, 6], 2, round_of(2, 2, 3), "length", id="just fits"),
        pytest.param([4, 5], 2, 6, 2, [4, 5], 2, round_of(2, 2, 2, cut=True), "length", id="bonus token cut"),
        pytest.param([4, 5, 6], 3, 7, 1, [4], 1, round_of(3, 3, 1, cut=True), "length", id="accepted tokens cut"),
        pytest.param(
            [4, 5, 6], 1, 7, 1, [4], 1, round_of(3, 1, 1, cut=True, rejected_token=5), "length", id="correction cut"
        ),
        pytest.param([4], 0, 6, 1, [6], 0, round_of(1, 0, 1, rejected_token=4), "length", id="correction is the last"),
        # both
        pytest.param([4, END], 2, 6, 2, [4, END], 2, round_of(2, 2, 2, ended=True), "end_of_text", id="end just fits"),
        pytest.param([4, END], 2, 6, 1, [4], 1, round_of(2, 2, 1, ended=True, cut=True), "length", id="end is cut off"),
        pytest.param([4, 5], 2, END, 2, [4, 5], 2, round_of(2, 2, 2, cut=True), "length", id="ending bonus cut off"),
        pytest.param([4, 5], 2, END, 3, [4, 5, END], 2, round_of(2, 2, 3), "end_of_text", id="ending bonus fits"),
    ],
)  # fmt: skip
def test_a_round_by_hand(
    verified: list[int],
    accepted: int,
    following: int,
    room: int,
    committed: list[int],
    num_draft: int,
    made: Round,
    finish: str | None,
) -> None:
    item = begun(room=room)
    kept = item.settle(verified, accepted=accepted, following=following, confidence=(0.5, -1.0))
    assert kept == committed
    assert item.rounds == [made]
    assert item.tokens == [*PROMPT, 7, *committed]
    assert item.drafted == [False] + [True] * num_draft + [False] * (len(committed) - num_draft)
    assert item.finish == finish
    assert item.num_rounds == 2
    assert item.room == room - len(committed)
    assert item.anchor_position == 3 + len(committed)
    assert made.committed_draft == num_draft
    assert made.counted == (made.accepted if made.ended else len(verified))


def test_an_answer_so_far() -> None:
    """One that was taken out before its end is cut by its length."""
    item = begun(room=5)
    item.settle([4, 5], accepted=1, following=6, confidence=())
    expected = Generation("r/t1", (7, 4, 6), (False, True, False), "length", tuple(item.rounds))
    assert item.generation == expected
    assert item.generation.prompt_id == "r"
    waiting = LiveRequest.begin(item.request, end_ids=frozenset())
    assert waiting.generation == Generation("r/t1", (), (), "length", ())


def test_a_request_of_its_own_stop_ids_leaves_the_others_alone() -> None:
    end_ids = frozenset({END})
    stopped = Request("a", (1,), 5, Sampling(), seed=0, stop_ids=frozenset({4}))
    plain = Request("b", (1,), 5, Sampling(), seed=0)
    for request, finish in ((stopped, "end_of_text"), (plain, None)):
        item = LiveRequest.begin(request, end_ids=end_ids)
        item.commit([4], num_draft=0)
        assert item.finish == finish
    assert end_ids == {END}
