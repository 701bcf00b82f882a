"""Whether a prompt is, or nearly is, a benchmark's: no drafter may be trained or calibrated on what it is judged by."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence

SHINGLE_WORDS = 5
MIN_SHARED = 3
NEAR_SHARE = 0.5
COMMON_IN = 3  # a shingle of more benchmark prompts than this is their form ("reason step by step"), not their content

_TOKEN = re.compile(r"\w+|[^\w\s]")
_WORD = re.compile(r"\w+")


def normalised(turns: Sequence[str]) -> str:
    """The turns for comparing as equal: Unicode NFKC, case folded, white space and closing marks evened out."""
    texts = (unicodedata.normalize("NFKC", turn).casefold() for turn in turns)
    return "\n".join(" ".join(_TOKEN.findall(text)).rstrip(" .!?") for text in texts)


class BenchmarkIndex:
    """Word shingles of all benchmark prompts, to be asked whether a prompt comes from one of them.

    A near-duplicate shares at least `MIN_SHARED` shingles (runs of five words, digits evened out) with one benchmark
    prompt, and they are at least half of the shingles of the smaller of the two.
    """

    def __init__(self, benchmark_turns: Iterable[Sequence[str]]) -> None:
        """Index prompts given as their user turns."""
        prompts = [tuple(turns) for turns in benchmark_turns]
        self._equal = {normalised(turns) for turns in prompts} | {
            normalised([turn]) for turns in prompts for turn in turns
        }
        raw = [_shingles(turns) for turns in dict.fromkeys(prompts)]
        common = Counter(shingle for shingles in raw for shingle in shingles)
        self._common = {shingle for shingle, count in common.items() if count > COMMON_IN}
        self._sizes = [len(shingles - self._common) for shingles in raw]
        self._holders: dict[str, list[int]] = {}
        for index, shingles in enumerate(raw):
            for shingle in shingles - self._common:
                self._holders.setdefault(shingle, []).append(index)

    def problem(self, turns: Sequence[str]) -> str | None:
        """`equal to a benchmark prompt`, `near a benchmark prompt`, or None."""
        if normalised(turns) in self._equal or any(normalised([turn]) in self._equal for turn in turns):
            return "equal to a benchmark prompt"
        own = _shingles(turns) - self._common
        shared = Counter(index for shingle in own for index in self._holders.get(shingle, ()))
        for index, count in shared.items():
            if count >= MIN_SHARED and count >= NEAR_SHARE * min(len(own), self._sizes[index]):
                return "near a benchmark prompt"
        return None


def _shingles(turns: Sequence[str]) -> set[str]:
    found = set()
    for turn in turns:
        text = re.sub(r"\d+", "0", unicodedata.normalize("NFKC", turn).casefold())
        words = _WORD.findall(text)
        found |= {" ".join(words[start : start + SHINGLE_WORDS]) for start in range(len(words) - SHINGLE_WORDS + 1)}
    return found
