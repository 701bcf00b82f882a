"""The engine on rounds worked out by hand, and its answers that must not depend on who shares the batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from draftsmith.decoding import session as session_module
from draftsmith.decoding.engine import Engine, Request
from draftsmith.decoding.policies import DraftedBlocks, verify_all
from draftsmith.decoding.rounds import Generation, Round
from draftsmith.errors import ContractError, TargetError
from draftsmith.params import Sampling
from tests.tiny_models import (
    END_TOKEN,
    VOCAB,
    hugging_face_greedy,
    random_ids,
    reference,
    save_tiny,
    tiny_drafter,
    tiny_folders,
    tiny_target,
)
from tests.unit.decoding.toys import ScriptedDrafter, TableTarget, Text, as_target, one_hot_logits

__all__ = ["tiny_folders"]

GREEDY = Sampling(temperature=0.0)
COUNT = 20


def counting_target() -> TableTarget:
    """After p comes p + 1."""
    return TableTarget(one_hot_logits([(token + 1) % COUNT for token in range(COUNT)], vocab=COUNT))


def counting_drafter(right: dict[int, int], *, block_size: int = 3) -> ScriptedDrafter:
    """Drafts right tokens in the first `right[anchor token]` slots (in all of them where it is not named)."""

    def draft(texts: list[Text], slot: int) -> Tensor:
        wrong = [slot >= right.get(text[-1 - slot], block_size) for text in texts]
        return one_hot_logits(
            [(t[-1] + (7 if w else 1)) % COUNT for t, w in zip(texts, wrong, strict=True)], vocab=COUNT
        )

    return ScriptedDrafter(draft, target=counting_target(), block_size=block_size)


def count_from_zero(*, max_new_tokens: int, end_ids: tuple[int, ...] = (), right: dict[int, int]) -> Generation:
    """Answer the prompt [0] with 1, 2, 3, ..; anchors 1, 4, 5 by the script 2, 0, 3 right ones."""
    engine = Engine(as_target(counting_target()), drafter=counting_drafter(right), end_ids=end_ids, batch_size=1)
    return engine.generate([Request("r", (0,), max_new_tokens, GREEDY, seed=1)])[0]


SCRIPT = {1: 2, 4: 0, 5: 3}
FIRST = Round(anchor_position=1, verified=3, accepted=2, committed=3, ended=False, cut=False, rejected_token=10)
SECOND = Round(anchor_position=4, verified=3, accepted=0, committed=1, ended=False, cut=False, rejected_token=11)


@pytest.mark.parametrize(
    ("max_new_tokens", "end_ids", "finish", "last_token", "last"),
    [
        # rounds that end on the limit, inside an accepted block, and on its first token
        (9, (), "length", 9, Round(5, 3, accepted=3, committed=4, ended=False, cut=False)),
        (8, (), "length", 8, Round(5, 3, accepted=3, committed=3, ended=False, cut=True)),
        (6, (), "length", 6, Round(5, 3, accepted=3, committed=1, ended=False, cut=True)),
        # end-of-text among the accepted: no bonus token, and nothing behind it
        (9, (7,), "end_of_text", 7, Round(5, 3, accepted=2, committed=2, ended=True, cut=False)),
        (9, (6, 8), "end_of_text", 6, Round(5, 3, accepted=1, committed=1, ended=True, cut=False)),
        (9, (8,), "end_of_text", 8, Round(5, 3, accepted=3, committed=3, ended=True, cut=False)),
        # the bonus token is the end-of-text
        (20, (9,), "end_of_text", 9, Round(5, 3, accepted=3, committed=4, ended=False, cut=False)),
        # an accepted end-of-text past the limit, and one that just fits
        (6, (7,), "length", 6, Round(5, 3, accepted=2, committed=1, ended=True, cut=True)),
        (7, (7,), "end_of_text", 7, Round(5, 3, accepted=2, committed=2, ended=True, cut=False)),
    ],
)
def test_rounds_by_hand(
    max_new_tokens: int, end_ids: tuple[int, ...], finish: str, last_token: int, last: Round
) -> None:
    found = count_from_zero(max_new_tokens=max_new_tokens, end_ids=end_ids, right=SCRIPT)
    assert found.token_ids == tuple(range(1, last_token + 1))
    assert found.finish == finish
    assert found.rounds == (FIRST, SECOND, last)
    drafted = [False, True, True, False, False, *[place < last.accepted for place in range(last.committed)]]
    assert found.drafted == tuple(drafted)
    assert sum(found.drafted) == sum(one.committed_draft for one in found.rounds)


def test_an_end_of_text_as_correction_ends_without_being_drafted() -> None:
    found = count_from_zero(max_new_tokens=9, end_ids=(5,), right=SCRIPT)
    assert found.token_ids == (1, 2, 3, 4, 5)
    assert found.finish == "end_of_text"
    assert found.rounds == (FIRST, SECOND)
    assert found.drafted == (False, True, True, False, False)


@pytest.mark.parametrize(("max_new_tokens", "end_ids", "finish"), [(1, (), "length"), (5, (1,), "end_of_text")])
def test_an_answer_of_one_token_has_no_round(max_new_tokens: int, end_ids: tuple[int, ...], finish: str) -> None:
    found = count_from_zero(max_new_tokens=max_new_tokens, end_ids=end_ids, right=SCRIPT)
    assert (found.token_ids, found.finish, found.rounds, found.drafted) == ((1,), finish, (), (False,))


def test_verified_lengths_are_the_policys() -> None:
    """Lengths 0, 1, 2, 3 in turn with a perfect drafter: 1, 2, 3 and 4 tokens a round."""
    turns = iter((0, 1, 2, 3))

    def policy(blocks: DraftedBlocks) -> list[int]:
        assert blocks == DraftedBlocks(("r",), 3, None)
        return [next(turns)]

    engine = Engine(as_target(counting_target()), drafter=counting_drafter({}), end_ids=[], batch_size=1, policy=policy)
    found = engine.generate([Request("r", (0,), 11, GREEDY, seed=1)])[0]
    assert found.token_ids == tuple(range(1, 12))
    assert [(one.verified, one.accepted, one.committed) for one in found.rounds] == [
        (0, 0, 1),
        (1, 1, 2),
        (2, 2, 3),
        (3, 3, 4),
    ]


def test_plain_decoding_has_no_rounds() -> None:
    engine = Engine(as_target(counting_target()), drafter=None, end_ids=[6], batch_size=2)
    found = engine.generate([Request("a", (0,), 9, GREEDY, seed=1), Request("b", (3, 1), 3, GREEDY, seed=1)])
    assert [one.token_ids for one in found] == [(1, 2, 3, 4, 5, 6), (2, 3, 4)]
    assert [one.finish for one in found] == ["end_of_text", "length"]
    assert all(one.rounds == () and not any(one.drafted) for one in found)
    assert engine.times.num_tokens == 9
    assert engine.times.num_steps == 5  # the longer answer's first token came with its prompt


def test_requests_join_as_others_leave() -> None:
    """Two at a time, answers of 2, 6, 3, 1 and 2 tokens, one token a step: who finishes when, by hand.

    d joins after c and ends with its prefill, so e joins in the same pause.
    """
    sizes = {"a": 2, "b": 6, "c": 3, "d": 1, "e": 2}
    finished, committed = list[str](), dict[str, list[int]]()

    def on_commit(name: str, tokens: list[int], drafted: list[bool]) -> None:
        assert len(tokens) == len(drafted)
        committed.setdefault(name, []).extend(tokens)

    engine = Engine(
        as_target(counting_target()),
        drafter=counting_drafter({}, block_size=2),
        end_ids=[],
        batch_size=2,
        policy=lambda blocks: [0] * blocks.num_requests,
    )
    requests = [
        Request(name, tuple(range(place + 1)), size, GREEDY, seed=0) for place, (name, size) in enumerate(sizes.items())
    ]
    found = engine.generate(requests, on_finish=lambda one: finished.append(one.request_id), on_commit=on_commit)
    assert finished == ["a", "c", "d", "b", "e"] or finished == ["a", "c", "d", "e", "b"]
    assert [one.request_id for one in found] == list(sizes)
    for place, one in enumerate(found):
        assert one.token_ids == tuple(range(place + 1, place + 1 + sizes[one.request_id]))
        assert committed[one.request_id] == list(one.token_ids)


def test_long_prompts_are_admitted_within_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Budget 5: prompts of 4 and 1 together, one of 9 alone, then 3; the answers are the same."""
    monkeypatch.setattr(session_module, "PREFILL_TOKENS", 5)
    target, sizes = counting_target(), list[int]()
    forward = target.forward

    def counted(ids: Tensor, *, batch, rows):  # type: ignore[no-untyped-def]
        if batch.is_prefill:
            sizes.append(batch.num_tokens)
        return forward(ids, batch=batch, rows=rows)

    monkeypatch.setattr(target, "forward", counted)
    engine = Engine(as_target(target), drafter=None, end_ids=[], batch_size=4)
    prompts = [(0, 0, 0, 1), (5,), (2,) * 9, (0, 0, 9)]
    found = engine.generate([Request(str(place), prompt, 2, GREEDY, seed=0) for place, prompt in enumerate(prompts)])
    assert sizes == [5, 9, 3]
    assert [one.token_ids for one in found] == [(2, 3), (6, 7), (3, 4), (10, 11)]


@pytest.mark.parametrize(
    ("requests", "text"),
    [
        ([Request("a", (1,), 2, GREEDY, 0)] * 2, "request ids must differ: got 1 given twice"),
        ([Request("a", (), 2, GREEDY, 0)], "request a has an empty prompt"),
        ([Request("a", (1,), 0, GREEDY, 0)], "request a: max_new_tokens: got 0, expected >= 1"),
    ],
)
def test_requests_that_cannot_be_answered_are_refused(requests: list[Request], text: str) -> None:
    with pytest.raises(TargetError, match=text):
        Engine(as_target(counting_target()), drafter=None, end_ids=[], batch_size=1).generate(requests)


def test_no_requests_give_no_answers() -> None:
    assert Engine(as_target(counting_target()), drafter=None, end_ids=[], batch_size=1).generate([]) == []


# On a real layer stack: independence of the batch, and lossless at every accepted length


def by_confidence(blocks: DraftedBlocks) -> list[int]:
    """Up to the first slot whose own confidence is below one half."""
    assert blocks.confidence is not None
    return (blocks.confidence > 0.5).cumprod(axis=1).sum(axis=1).tolist()


SAMPLINGS = {
    "greedy": lambda _: GREEDY,
    "sampled": lambda place: Sampling(temperature=0.8, top_p=0.9) if place % 2 else Sampling(),
    "mixed": lambda place: GREEDY if place % 2 else Sampling(temperature=0.7, top_k=20),
}


def assert_same(found: Generation, expected: Generation) -> None:
    """Equal but for the last bits of the confidence logits."""
    assert (found.token_ids, found.drafted, found.finish) == (expected.token_ids, expected.drafted, expected.finish)
    for one, other in zip(found.rounds, expected.rounds, strict=True):
        assert one.confidence_logits == pytest.approx(other.confidence_logits, abs=1e-4)
        assert Round(**{**vars(one), "confidence_logits": ()}) == Round(**{**vars(other), "confidence_logits": ()})


@pytest.mark.parametrize("choice", SAMPLINGS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_an_answer_does_not_depend_on_its_batch(family: str, choice: str, tiny_folders: dict[str, Path]) -> None:
    """Alone, in one batch with five others, and in a batch of two that they join and leave, in reversed order."""
    target = tiny_target(tiny_folders[family])
    drafter = tiny_drafter("dspark", tiny_folders[family], seed=11).eval().requires_grad_(False)
    pick: Callable[[int], Sampling] = SAMPLINGS[choice]
    requests = [
        Request(
            f"r{place}", tuple(random_ids(2 + 7 * place % 19, seed=place)), 6 + 5 * place, pick(place), seed=40 + place
        )
        for place in range(6)
    ]

    def answers(chosen: list[Request], batch_size: int) -> dict[str, Generation]:
        engine = Engine(target, drafter=drafter, end_ids=[END_TOKEN], batch_size=batch_size, policy=by_confidence)
        return {one.request_id: one for one in engine.generate(chosen)}

    together, reversed_pairs = answers(requests, 6), answers(requests[::-1], 2)
    assert sum(one.accepted for found in together.values() for one in found.rounds) > 0
    for request in requests:
        alone = answers([request], 1)[request.request_id]
        assert_same(together[request.request_id], alone)
        assert_same(reversed_pairs[request.request_id], alone)


def test_a_seed_fixes_an_answer_and_another_seed_gives_another(tiny_folders: dict[str, Path]) -> None:
    target = tiny_target(tiny_folders["llama"])
    drafter = tiny_drafter("dspark", tiny_folders["llama"], seed=11).eval().requires_grad_(False)
    prompt = tuple(random_ids(9, seed=0))
    engine = Engine(target, drafter=drafter, end_ids=[], batch_size=8)
    found = engine.generate([Request(str(i), prompt, 20, Sampling(), seed=seed) for i, seed in enumerate((3, 3, 4, 5))])
    assert found[0].token_ids == found[1].token_ids
    assert len({one.token_ids for one in found}) == 3
    again = engine.generate([Request("x", prompt, 20, Sampling(), seed=3)])
    assert again[0].token_ids == found[0].token_ids


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_greedy_output_and_accepted_lengths_with_a_drafter_that_is_often_right(
    family: str, batch_size: int, tiny_folders: dict[str, Path]
) -> None:
    """The drafter knows Hugging Face's own answer and spoils chosen places: both follow, round by round, by hand."""
    model, target = reference(tiny_folders[family]), tiny_target(tiny_folders[family])
    prompts = [random_ids(4 + 3 * place, seed=30 + place) for place in range(5)]
    texts = [tuple(prompt) + tuple(hugging_face_greedy(model, prompt, num=40)) for prompt in prompts]
    assert len({text[: 4 + 3 * place] for place, text in enumerate(texts)}) == 5

    def spoiled(position: int) -> bool:
        return position % 7 == 3 or position % 11 == 5

    def guess(text: Text) -> int:
        place = len(text)
        whole = next((whole for whole in texts if whole[:place] == text and place < len(whole)), None)
        return 0 if whole is None else (whole[place] + spoiled(place)) % VOCAB

    drafter = ScriptedDrafter(
        lambda current, _slot: one_hot_logits([guess(text) for text in current], vocab=VOCAB),
        target=target,
        block_size=5,
    )
    engine = Engine(target, drafter=drafter, end_ids=[END_TOKEN], batch_size=batch_size, policy=verify_all)
    found = engine.generate([Request(str(place), tuple(prompt), 40, GREEDY, 0) for place, prompt in enumerate(prompts)])
    assert sum(len(one.rounds) for one in found) >= 25
    for prompt, whole, one in zip(prompts, texts, found, strict=True):
        assert (*prompt, *one.token_ids) == whole
        for made in one.rounds[:-1]:
            right = 0
            while right < 5 and not spoiled(made.anchor_position + 1 + right):
                right += 1
            assert (made.accepted, made.committed) == (right, right + 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 64}, "another hidden_size than the loaded target has: got 32, expected 64"),
        (
            {"vocab_size": VOCAB + 3},
            f"another vocab_size than the loaded target has: got {VOCAB}, expected {VOCAB + 3}",
        ),
    ],
)
def test_a_target_of_other_sizes_is_refused_before_anything_is_decoded(
    changes: dict[str, int], message: str, tiny_folders: dict[str, Path], tmp_path: Path
) -> None:
    other = tiny_target(save_tiny(tmp_path, family="llama", seed=1, **changes))
    with pytest.raises(ContractError, match=message):
        Engine(other, drafter=tiny_drafter("dspark", tiny_folders["llama"], seed=2), end_ids=[], batch_size=1)


def test_a_target_that_captures_other_layers_is_refused(tiny_folders: dict[str, Path]) -> None:
    """As many layers, so that every shape fits."""
    target = tiny_target(tiny_folders["llama"], capture_layers=(0, 1, 3))
    drafter = tiny_drafter("dspark", tiny_folders["llama"], seed=2, capture_layers=(0, 2, 3))
    message = r"another capture_layers than the loaded target has: got \[0, 2, 3\], expected \[0, 1, 3\]"
    with pytest.raises(ContractError, match=message):
        Engine(target, drafter=drafter, end_ids=[], batch_size=1)
