"""Accepted length by turn, domain and output position, and what rounds and answers look like one by one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from draftsmith.decoding.rounds import Generation
from draftsmith.evaluation.accepted_length import count_by_prompt
from draftsmith.evaluation.bootstrap import Interval
from draftsmith.evaluation.paired import BONUSES, MEANS, Bonus, Mean, PromptCounts, mean_length

FIRST_BIN = 16
"""Output positions below this are the first bin; each later bin ends where the next power of two begins."""


def length_fields(benchmarks: Sequence[PromptCounts], *, seed: int) -> dict[str, Any]:
    """Accepted length four ways (micro and macro, with and without bonus), each with its interval as a list or null.

    Over several benchmarks each value is the plain mean of theirs. All are null if no benchmark has a round.
    """
    counted = [item for item in benchmarks if item.with_rounds]
    fields: dict[str, Any] = {}
    for mean in MEANS:
        for bonus in BONUSES:
            found = mean_length(counted, seed=seed, bonus=bonus, mean=mean) if counted else None
            name = length_name(bonus, mean)
            fields[name] = None if found is None else found.value
            fields[f"{name}_interval"] = None if found is None else pair(found.interval)
    return fields


def length_name(bonus: Bonus, mean: Mean) -> str:
    """The field's name in evaluate.json."""
    return "accepted_length" + ("_without_bonus" if bonus == "without" else "") + ("_macro" if mean == "macro" else "")


def pair(interval: Interval | None) -> list[float] | None:
    """An interval as JSON has it."""
    return None if interval is None else list(interval)


def turn_number(generation: Generation) -> int:
    """The turn that a request answers, from 0: the number in `<prompt>/t<turn>`, 0 for an id without one."""
    found = re.search(r"/t(\d+)$", generation.request_id)
    return int(found[1]) if found else 0


def by_turn(generations: Sequence[Generation], *, seed: int) -> list[dict[str, Any]]:
    """Accepted length of each turn of a benchmark's conversations; null where no answer of that turn has a round."""
    turns: dict[int, list[Generation]] = {}
    for generation in generations:
        turns.setdefault(turn_number(generation), []).append(generation)
    return [
        {
            "turn": turn,
            "num_requests": len(found),
            "num_rounds": sum(len(item.rounds) for item in found),
            **length_fields([count_by_prompt(found)], seed=seed),
        }
        for turn, found in sorted(turns.items())
    ]


def by_output_position(generations: Sequence[Generation], *, seed: int) -> list[dict[str, Any]]:
    """Accepted length by where in the answer a round begins: bins 0-15, 16-31, 32-63, ..., without the empty ones.

    The position is the anchor's, 0 for the first token of the answer (that of the prefill). Prompts of all benchmarks
    are drawn together, so an interval also holds how benchmarks differ.
    """
    bins: dict[int, dict[str, list[int]]] = {}
    for generation in generations:
        position = 0
        for item in generation.rounds:
            sums = bins.setdefault(bin_number(position), {}).setdefault(generation.prompt_id, [0, 0, 0])
            for index, value in enumerate((1, item.committed, item.committed_draft)):
                sums[index] += value
            position += item.committed
    rows = []
    for number, prompts in sorted(bins.items()):
        columns = tuple(zip(*prompts.values(), strict=True))
        counts = PromptCounts(tuple(prompts), columns[0], columns[1], columns[2])
        first, last = bin_ends(number)
        rows.append(
            {"first": first, "last": last, "num_rounds": sum(counts.rounds), **length_fields([counts], seed=seed)}
        )
    return rows


def bin_number(position: int) -> int:
    """The bin of an output position: 0 for 0-15, 1 for 16-31, 2 for 32-63, ..."""
    return max(0, position.bit_length() - (FIRST_BIN - 1).bit_length())


def bin_ends(number: int) -> tuple[int, int]:
    """First and last position of a bin."""
    return (0 if number == 0 else FIRST_BIN << (number - 1)), (FIRST_BIN << number) - 1


def by_domain(rows: Sequence[Mapping[str, Any]], *, domains: Sequence[str], seed: int) -> list[dict[str, Any]]:
    """Means over the benchmarks of each domain at each temperature, from rows of evaluate.json."""
    return [
        {
            "domain": domain,
            "temperature": temperature,
            "benchmarks": [row["benchmark"] for row in found],
            **_means(found, seed=seed),
        }
        for temperature in temperatures_of(rows)
        for domain in domains
        if (found := [row for row in rows if (row["domain"], row["temperature"]) == (domain, temperature)])
    ]


def averages(rows: Sequence[Mapping[str, Any]], *, seed: int) -> list[dict[str, Any]]:
    """Means over all benchmarks at each temperature, from rows of evaluate.json; no speed-up if one has none."""
    found = []
    for temperature in temperatures_of(rows):
        group = [row for row in rows if row["temperature"] == temperature]
        speedups = [row["speedup"] for row in group]
        found.append(
            {
                "temperature": temperature,
                "benchmarks": [row["benchmark"] for row in group],
                "num_benchmarks": len(group),
                **_means(group, seed=seed),
                "speedup": None if None in speedups else fmean(speedups),
            }
        )
    return found


def accepted_histogram(generations: Iterable[Generation], *, block_size: int) -> list[int]:
    """Rounds with 0..K accepted draft tokens, [K + 1]."""
    seen = Counter(item.accepted for generation in generations for item in generation.rounds)
    return [seen[number] for number in range(block_size + 1)]


def temperatures_of(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """The temperatures of rows, each once, in their order."""
    return list(dict.fromkeys(row["temperature"] for row in rows))


def _means(rows: Sequence[Mapping[str, Any]], *, seed: int) -> dict[str, Any]:
    counts = [PromptCounts.from_json(row["prompts"]) for row in rows]
    return {"num_rounds": sum(row["num_rounds"] for row in rows), **length_fields(counts, seed=seed)}
