"""The token view: sources of tokens by hand, and texts of tokens that share characters, with a toy byte tokenizer."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.decoding.rounds import Generation
from draftsmith.evaluation.samples import Sample, samples_body, text_pieces
from tests.unit.evaluation.evaluations import make_generation, make_round

END = 256


def decode_bytes(ids: Sequence[int]) -> str:
    """A byte-level tokenizer: a token is a byte, what is no UTF-8 becomes U+FFFD; the end-of-text has no text."""
    return bytes(token for token in ids if token < END).decode(errors="replace")


class Merged:
    """A byte-level BPE: each token is some bytes, cut without regard to characters."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = list(pieces)

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self.pieces[token] for token in ids).decode(errors="replace")


def strip_first(ids: Sequence[int]) -> str:
    """As decoders of SentencePiece do: every word brings its blank, that of the first one is dropped."""
    return "".join(f" w{token}" for token in ids)[1:]


def test_a_character_belongs_to_the_token_that_completes_it() -> None:
    ids = list("aé€🙂b".encode())
    pieces = text_pieces(ids, decode_bytes)
    assert pieces == ["a", "", "é", "", "", "€", "", "", "", "🙂", "b"]


def test_a_character_that_the_limit_cut_is_shown_as_the_decoder_shows_it() -> None:
    ids = list("ab🙂".encode())[:-1]
    whole = decode_bytes(ids)
    assert whole == "ab\ufffd"
    pieces = text_pieces(ids, decode_bytes)
    assert "".join(pieces) == whole
    assert pieces[:2] == ["a", "b"]


def test_bytes_that_are_no_text_stay_in_the_text() -> None:
    ids = [0x61, 0xFF, 0x62, 0xC3, 0x63]
    pieces = text_pieces(ids, decode_bytes)
    assert "".join(pieces) == decode_bytes(ids) == "a\ufffdb\ufffdc"
    assert (pieces[0], pieces[2], pieces[4][-1]) == ("a", "b", "c")


def test_a_decoder_that_takes_text_back() -> None:
    """Cleaning decoders may: what was shown stays shown, and the next token adds what is beyond it."""
    texts = ["", "ab", "a", "abc", "abcd"]
    assert text_pieces([0, 1, 2, 3], lambda ids: texts[len(ids)]) == ["ab", "", "c", "d"]


def test_tokens_without_text_have_none() -> None:
    assert text_pieces([0x61, END], decode_bytes) == ["a", ""]
    assert text_pieces([], decode_bytes) == []


@settings(deadline=None, max_examples=60)
@given(st.text(max_size=120), st.lists(st.integers(1, 5), min_size=1), st.booleans())
def test_pieces_make_up_the_text_however_it_is_cut(text: str, sizes: list[int], complete: bool) -> None:
    data = text.encode("utf-8", errors="ignore")
    data = data if complete else data[:-1]
    tokens, start = [], 0
    while start < len(data):
        size = sizes[len(tokens) % len(sizes)]
        tokens.append(data[start : start + size])
        start += size
    merged = Merged(tokens)
    ids = list(range(len(tokens)))
    pieces = text_pieces(ids, merged.decode)
    assert "".join(pieces) == merged.decode(ids)
    assert len(pieces) == len(ids)
    # Of what is whole UTF-8, a token shows the characters that end in it, neither more nor less.
    if complete and "\ufffd" not in text:
        shown = 0
        for token, piece in zip(tokens, pieces, strict=True):
            shown += len(token)
            before = data[: shown - len(token)].decode(errors="ignore")
            assert before + piece == data[:shown].decode(errors="ignore")


@pytest.mark.parametrize("number", [5, 6, 12, 90])
def test_long_answers_are_cut_like_short_ones(number: int) -> None:
    ids = list(("é€🙂ab" * number).encode())  # 11 tokens each time
    expected, shown = [], 0
    for end in range(1, len(ids) + 1):
        text = bytes(ids[:end]).decode(errors="ignore")
        expected.append(text[shown:])
        shown = len(text)
    assert text_pieces(ids, decode_bytes) == expected


def test_long_answers_are_not_decoded_prefix_by_prefix() -> None:
    seen = []

    def decode(ids: Sequence[int]) -> str:
        seen.append(len(ids))
        return decode_bytes(ids)

    ids = list(("x" * 4096).encode())
    assert text_pieces(ids, decode) == ["x"] * 4096
    assert sum(seen) < 4096 * 100  # 4096 * 2048 otherwise


def test_a_decoder_that_drops_the_first_blank() -> None:
    ids = list(range(150))
    assert text_pieces(ids, strip_first) == ["w0", *(f" w{token}" for token in ids[1:])]


def tokens_of(generation: Generation, decode=decode_bytes) -> list[dict]:
    body = samples_body(key="k", samples=[Sample("gsm8k", 1.0, "How many?", generation)], decode=decode)
    [sample] = json.loads(json.dumps(body, allow_nan=False))["samples"]
    return list(sample["tokens"])


def test_sources_by_hand() -> None:
    logits = [0.0, math.log(3), -math.log(3)]  # confidences 0.5, 0.75, 0.25
    rounds = [
        make_round(3, logits=logits),  # all accepted, and a bonus token
        make_round(1, logits=logits, rejected=ord("?")),  # one accepted, the second replaced
        make_round(0, verified=0, logits=logits),  # nothing was verified: the target's own
        make_round(2, logits=logits, ended=True),
    ]
    generation = make_generation("gsm8k/3/t1", rounds, first_token=ord("a"))
    tokens = tokens_of(generation)
    assert "".join(token["text"] for token in tokens) == "abcdefghij"
    assert [(token["source"], token["round"], token["confidence"], token["rejected"]) for token in tokens] == [
        ("first", None, None, None),
        *((("drafted", 0, pytest.approx(c), None)) for c in (0.5, 0.75, 0.25)),
        ("bonus", 0, None, None),
        ("drafted", 1, pytest.approx(0.5), None),
        ("correction", 1, pytest.approx(0.75), "?"),
        ("bonus", 2, None, None),
        ("drafted", 3, pytest.approx(0.5), None),
        ("drafted", 3, pytest.approx(0.75), None),
    ]
    body = samples_body(key="k", samples=[Sample("gsm8k", 1.0, "How many?", generation)], decode=decode_bytes)
    assert (body["schema_version"], body["key"]) == (1, "k")
    [sample] = body["samples"]
    assert {name: sample[name] for name in sample if name != "tokens"} == {
        "benchmark": "gsm8k", "prompt_id": "gsm8k/3", "temperature": 1.0, "turn": 1, "prompt": "How many?",
        "finish": "length",
    }  # fmt: skip


def test_cut_rounds_have_the_tokens_that_fitted() -> None:
    rounds = [make_round(2, committed=3, rejected=63), make_round(2, committed=1, cut=True, rejected=63)]
    tokens = tokens_of(make_generation("a", rounds, first_token=97))
    assert [token["source"] for token in tokens] == ["first", "drafted", "drafted", "correction", "drafted"]
    assert {token["confidence"] for token in tokens} == {None}


def test_an_answer_of_one_token() -> None:
    assert [token["source"] for token in tokens_of(make_generation("a", []))] == ["first"]


def test_a_rejected_part_of_a_character() -> None:
    """The target wrote the second byte of é where the drafter had that of è."""
    ids = (0x61, 0xC3, 0xA9)
    rounds = (make_round(1, rejected=0xA8),)
    assert tokens_of(Generation("a", ids, (False, True, False), "length", rounds))[2] == {
        "text": "é", "source": "correction", "round": 0, "confidence": None, "rejected": "è",
    }  # fmt: skip
