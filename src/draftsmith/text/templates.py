"""Filling prompt templates from a seeded generator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random

Template = Callable[[Random], str]

FOLLOW_UP_SHARE = 0.125
PATIENCE = 50  # repeats of texts already made, a template, after which the templates count as exhausted


def filled(
    templates: Sequence[Template], *, endings: Sequence[str], follow_ups: Sequence[str], seed: int, count: int
) -> Iterator[tuple[str, ...]]:
    """At most `count` different prompts as user turns: the templates in turn, each filling with one of the endings.

    About one in eight has a follow-up as its second turn. The first n of a longer request are those of a request for n.
    Fewer come only when the templates are exhausted.
    """
    rng = Random(seed)
    seen: set[str] = set()
    misses = 0
    index = 0
    while len(seen) < count and misses < PATIENCE * len(templates):
        text = templates[index % len(templates)](rng)
        index += 1
        ending, follow_up = rng.choice(endings), rng.choice(follow_ups)
        has_follow_up = rng.random() < FOLLOW_UP_SHARE
        if text in seen:
            misses += 1
            continue
        misses = 0
        seen.add(text)
        yield (text + ending, follow_up) if has_follow_up else (text + ending,)


def slots(text: str, *choices: Sequence[str]) -> Template:
    """A template with one `<>` for each list of choices, in their order."""
    pieces = text.split("<>")
    if len(pieces) != len(choices) + 1:
        raise ValueError(f"{len(pieces) - 1} slots for {len(choices)} lists of choices in {text!r}")

    def fill(rng: Random) -> str:
        chosen = [rng.choice(options) for options in choices]
        return pieces[0] + "".join(word + piece for word, piece in zip(chosen, pieces[1:], strict=True))

    return fill
