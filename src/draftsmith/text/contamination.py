"""Whether a prompt is, or nearly is, a benchmark's: no drafter may be trained or calibrated on what it is judged by."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

SHINGLE_WORDS = 5
MIN_SHARED = 3
NEAR_SHARE = 0.5
COMMON_IN = 3  # a shingle of more benchmark prompts than this is their form ("reason step by step"), not their content

Likeness = Literal["equal to", "near"]

_TOKEN = re.compile(r"\w+|[^\w\s]")
_WORD = re.compile(r"\w+")
_DIGITS = re.compile(r"\d+")


class Asked(Protocol):
    """A prompt of a benchmark: its id and its user turns."""

    @property
    def id(self) -> str:
        """The id by which it is reported."""

    @property
    def turns(self) -> Sequence[str]:
        """The user turns."""


def normalised(turns: Sequence[str]) -> str:
    """The turns for comparing as equal: Unicode NFKC, case folded, white space and closing marks evened out."""
    return "\n".join(_evened(_folded(turn)) for turn in turns)


class BenchmarkIndex:
    """Word shingles of all benchmark prompts, to be asked whether a prompt comes from one of them.

    Two prompts are equal if a turn of the one and a turn of the other are `normalised` to the same text.
    They are near if they share at least `MIN_SHARED` shingles (runs of five words, digits evened out), and these are at
    least half of the shingles of the smaller of the two. Shingles that more than `COMMON_IN` benchmark prompts hold do
    not count. Both relations are symmetric.

    Memory grows with the benchmark prompts only: prompts that are asked about may be a stream of any length.
    """

    def __init__(self, benchmark_turns: Iterable[Sequence[str]]) -> None:
        """Index prompts given as their user turns; equal ones are one prompt, numbered in the order they came."""
        self._numbers: dict[tuple[str, ...], int] = {}
        for turns in benchmark_turns:
            self._numbers.setdefault(tuple(turns), len(self._numbers))
        folded = [[_folded(turn) for turn in turns] for turns in self._numbers]
        self._equal: dict[str, list[int]] = {}
        for index, texts in enumerate(folded):
            for key in {_evened(text) for text in texts}:
                self._equal.setdefault(key, []).append(index)
        raw = [_shingles(texts) for texts in folded]
        holders = Counter(shingle for shingles in raw for shingle in shingles)
        self._common = {shingle for shingle, count in holders.items() if count > COMMON_IN}
        self._sizes = [len(shingles - self._common) for shingles in raw]
        self._holders: dict[str, list[int]] = {}
        for index, shingles in enumerate(raw):
            for shingle in shingles - self._common:
                self._holders.setdefault(shingle, []).append(index)

    def number(self, turns: Sequence[str]) -> int:
        """The number of an indexed prompt."""
        return self._numbers[tuple(turns)]

    def matches(self, turns: Sequence[str]) -> dict[int, Likeness]:
        """The numbers of all benchmark prompts that `turns` are equal to or near; equal goes before near."""
        texts = [_folded(turn) for turn in turns]
        own = _shingles(texts)
        found: dict[int, Likeness] = {}
        if not self._holders.keys().isdisjoint(own):
            size = len(own - self._common)
            shared = Counter(index for shingle in own for index in self._holders.get(shingle, ()))
            for index, count in shared.items():
                if count >= MIN_SHARED and count >= NEAR_SHARE * min(size, self._sizes[index]):
                    found[index] = "near"
        for text in texts:
            found.update(dict.fromkeys(self._equal.get(_evened(text), ()), "equal to"))
        return found

    def problem(self, turns: Sequence[str]) -> str | None:
        """`equal to a benchmark prompt`, `near a benchmark prompt`, or None."""
        found = set(self.matches(turns).values())
        return f"{min(found)} a benchmark prompt" if found else None


def contaminated(
    prompts: Sequence[Asked], *, training: Iterable[Sequence[str]], others: Iterable[Sequence[str]] = ()
) -> dict[str, str]:
    """Which benchmark prompts a training (or calibration) prompt is equal to or near: id -> `near a training prompt`.

    `training` are the user turns of each training prompt, read once and not kept. `others` are the turns of benchmark
    prompts that are not asked about, such as those that a cap leaves out: they tell what is only the benchmarks' form.
    With `prompts` and `others` together being all that the prompts stage kept training clear of, a benchmark prompt is
    found if and only if the prompts stage would have dropped the training prompt for it. The result is in the order of
    `prompts` and depends on no order of the training prompts.
    """
    index = BenchmarkIndex([*(prompt.turns for prompt in prompts), *others])
    found: dict[int, Likeness] = {}
    for turns in training:
        for number, likeness in index.matches(turns).items():
            found[number] = min(likeness, found.get(number, likeness))  # "equal to" is the lesser word
    numbers = {prompt.id: index.number(prompt.turns) for prompt in prompts}
    return {name: f"{found[number]} a training prompt" for name, number in numbers.items() if number in found}


def _folded(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold()


def _evened(folded: str) -> str:
    return " ".join(_TOKEN.findall(folded)).rstrip(" .!?")


def _shingles(folded: Sequence[str]) -> set[str]:
    found: set[str] = set()
    for text in folded:
        words = _WORD.findall(_DIGITS.sub("0", text))
        found.update(map(" ".join, zip(*(words[start:] for start in range(SHINGLE_WORDS)), strict=False)))
    return found
