"""The token view: which tokens of an answer the drafter proposed, which the target wrote, and what it rejected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from draftsmith.decoding.rounds import Generation
from draftsmith.evaluation.breakdown import turn_number
from draftsmith.evaluation.thresholds import raw_confidence

SCHEMA_VERSION = 1
WHOLE = 64  # tokens decoded prefix by prefix; longer answers are halved first
CONTEXT = 16  # tokens before a rejected one that may share a character with it

Source = Literal["first", "drafted", "bonus", "correction"]
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Sample:
    """One answer to be shown; `prompt` is the text of the turn that it answers."""

    benchmark: str
    temperature: float
    prompt: str
    generation: Generation


def samples_body(*, key: str, samples: Sequence[Sample], decode: Decode) -> dict[str, Any]:
    """The body of samples.json, in the order of `samples`.

    `decode` turns ids into text, and the texts of an answer's tokens concatenate to `decode` of all its ids. The source
    of a token is `first` (of the prefill, in no round), `drafted` (an accepted draft token), `bonus` (the target's own
    after a block that was accepted to its verified end) or `correction` (the target's own in place of the rejected
    draft token, whose text is `rejected`). `confidence` is the raw one of the token's slot, of a correction that of the
    rejected draft token; null for the target's other tokens and without a confidence head.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "key": key,
        "samples": [
            {
                "benchmark": item.benchmark,
                "prompt_id": item.generation.prompt_id,
                "temperature": item.temperature,
                "turn": turn_number(item.generation),
                "prompt": item.prompt,
                "finish": item.generation.finish,
                "tokens": _tokens(item.generation, decode),
            }
            for item in samples
        ],
    }


def text_pieces(ids: Sequence[int], decode: Decode) -> list[str]:
    """The text that each token adds; together they are `decode(ids)`.

    A token adds what the decoded prefix up to it has beyond the one before, as far as the whole text begins with it: so
    the pieces of a character that several tokens share (bytes of one UTF-8 character) fall to the token that completes
    it, the others add nothing. What no prefix shows falls to the last token.
    """
    whole = decode(ids)
    if len(ids) > WHOLE:
        # Halves at a place where the text falls apart, to decode in n log n instead of n squared tokens.
        for cut in range(len(ids) // 2, len(ids) // 2 + 8):
            if decode(ids[:cut]) + decode(ids[cut:]) == whole:
                return text_pieces(ids[:cut], decode) + text_pieces(ids[cut:], decode)
    pieces, shown = [], 0
    for end in range(1, len(ids) + 1):
        text = whole if end == len(ids) else decode(ids[:end])
        stable = max(shown, _num_common(text, whole))
        pieces.append(whole[shown:stable])
        shown = stable
    return pieces


def _tokens(generation: Generation, decode: Decode) -> list[dict[str, Any]]:
    ids = generation.token_ids
    texts = text_pieces(ids, decode)
    tokens = [_token(texts[0], "first")]
    for index, item in enumerate(generation.rounds):
        start, confidences = len(tokens), [raw_confidence(logit) for logit in item.confidence_logits]
        for slot in range(item.committed):
            text = texts[start + slot]
            confidence = confidences[slot] if slot < len(confidences) else None
            if slot < item.committed_draft:
                tokens.append(_token(text, "drafted", index, confidence))
            elif item.accepted == item.verified:
                tokens.append(_token(text, "bonus", index))
            else:
                rejected = None
                if item.rejected_token is not None:
                    rejected = _text_after(ids[: start + slot], item.rejected_token, decode)
                tokens.append(_token(text, "correction", index, confidence, rejected))
    assert len(tokens) == len(ids), "rounds and the token of the prefill make up the answer"
    return tokens


def _token(
    text: str,
    source: Source,
    index: int | None = None,
    confidence: float | None = None,
    rejected: str | None = None,
) -> dict[str, Any]:
    return {"text": text, "source": source, "round": index, "confidence": confidence, "rejected": rejected}


def _text_after(ids: Sequence[int], token: int, decode: Decode) -> str:
    """What `token` would have added to the text of `ids`."""
    before = decode(ids[-CONTEXT:])
    text = decode([*ids[-CONTEXT:], token])
    return text[_num_common(before, text) :]


def _num_common(first: str, second: str) -> int:
    """How many characters both begin with."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))
