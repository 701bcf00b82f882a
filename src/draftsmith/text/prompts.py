"""From prompt sources to three disjoint splits: gathered, deduplicated, kept clear of benchmarks, drawn by a seed."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from draftsmith.errors import PromptError
from draftsmith.params import Domain, Prompts
from draftsmith.text.chat import turns_problem
from draftsmith.text.contamination import BenchmarkIndex, normalised
from draftsmith.text.rows import Prompt, SetAside, read_prompt_file
from draftsmith.text.sources import SOURCES

USED = "used"
SPARE = "not needed"


@dataclass(frozen=True)
class PromptSets:
    """The three splits, disjoint, each in the order drawn, and what became of every row that was read.

    `counts[source][fate]`: fates are `used`, `not needed` and the reason of each dropped row; they add up to all rows.
    """

    train: tuple[Prompt, ...]
    validation: tuple[Prompt, ...]
    calibration: tuple[Prompt, ...]
    counts: dict[str, dict[str, int]]

    def splits(self) -> dict[str, tuple[Prompt, ...]]:
        """The splits by name."""
        return {"train": self.train, "validation": self.validation, "calibration": self.calibration}


def build_prompts(row: Prompts, *, root: Path, benchmark_turns: Iterable[Sequence[str]]) -> PromptSets:
    """Gather prompts from the row's sources and files (relative to `root`) and draw the three splits.

    Each split holds the row's number of prompts, shared out over the domains by `mix` (largest remainders). A prompt is
    dropped, and counted with its reason, if it is a duplicate after normalising, longer than `max_prompt_chars`, or
    equal or near to a benchmark prompt. What is drawn depends on the seed and on the set of usable prompts, not on
    their order.

    Raises:
        PromptError: an unknown source, a missing package, hub or file, or fewer usable prompts than are asked for.
    """
    unknown = [name for name in row.sources if name not in SOURCES]
    if unknown:
        raise PromptError(
            f"no prompt source {unknown[0]!r}",
            expected=f"one of {', '.join(SOURCES)}",
            where="params.yaml: prompts.sources",
        )
    shares = {
        split: share_out(number, row.mix)
        for split, number in (
            ("train", row.num_train),
            ("validation", row.num_validation),
            ("calibration", row.num_calibration),
        )
    }
    wanted: dict[Domain, int] = {domain: sum(share[domain] for share in shares.values()) for domain in row.mix}
    counts: dict[str, Counter[str]] = {}
    pool = _usable(_rows(row, root=root, count=max(wanted.values())), row, BenchmarkIndex(benchmark_turns), counts)
    by_domain = _drawn(pool, wanted, seed=row.seed)
    chosen: dict[str, list[Prompt]] = {split: [] for split in shares}
    for domain, prompts in by_domain.items():
        start = 0
        for split, share in shares.items():
            chosen[split] += prompts[start : start + share[domain]]
            start += share[domain]
    used = {prompt.id for prompts in chosen.values() for prompt in prompts}
    for prompt in pool:
        counts[prompt.source][USED if prompt.id in used else SPARE] += 1
    in_order = {split: tuple(sorted(items, key=lambda item: _draw(item, row.seed))) for split, items in chosen.items()}
    return PromptSets(
        train=in_order["train"],
        validation=in_order["validation"],
        calibration=in_order["calibration"],
        counts={source: dict(sorted(fates.items())) for source, fates in counts.items()},
    )


def share_out(number: int, mix: Mapping[Domain, float]) -> dict[Domain, int]:
    """`number` in proportion to `mix`, in whole numbers that add up (largest remainders, ties in the order of mix)."""
    weights = {domain: Fraction(str(share)) for domain, share in mix.items()}
    whole = sum(weights.values())
    exact = {domain: number * weight / whole for domain, weight in weights.items()}
    shares = {domain: int(value) for domain, value in exact.items()}
    by_rest = sorted(mix, key=lambda domain: shares[domain] - exact[domain])
    for domain in by_rest[: number - sum(shares.values())]:
        shares[domain] += 1
    return shares


def _rows(row: Prompts, *, root: Path, count: int) -> Iterator[tuple[str, Prompt | SetAside]]:
    margin = count + count // 4 + 32  # an endless source makes some more than are drawn: a few will be dropped
    for name in row.sources:
        for item in SOURCES[name].read(row.seed, margin):
            yield name, item
    for file in row.files:
        for item in read_prompt_file(file, root=root):
            yield f"file:{file.path}", item


def _usable(
    rows: Iterable[tuple[str, Prompt | SetAside]],
    row: Prompts,
    benchmarks: BenchmarkIndex,
    counts: dict[str, Counter[str]],
) -> list[Prompt]:
    pool: list[Prompt] = []
    seen: set[str] = set()
    for source, item in rows:
        fates = counts.setdefault(source, Counter())
        reason = item.reason if isinstance(item, SetAside) else _problem(item, row, benchmarks, seen)
        if isinstance(item, SetAside) or reason is not None:
            fates[str(reason)] += 1
        else:
            seen.add(normalised(item.turns))
            pool.append(item)
    return pool


def _problem(prompt: Prompt, row: Prompts, benchmarks: BenchmarkIndex, seen: set[str]) -> str | None:
    problem = turns_problem(prompt.turns)
    if problem is not None:
        return problem
    if prompt.domain not in row.mix:
        return f"domain {prompt.domain} is not in the mix"
    if sum(len(turn) for turn in prompt.turns) > row.max_prompt_chars:
        return f"longer than max_prompt_chars {row.max_prompt_chars}"
    if normalised(prompt.turns) in seen:
        return "duplicate"
    return benchmarks.problem(prompt.turns)


def _draw(prompt: Prompt, seed: int) -> str:
    return hashlib.sha256(f"{seed}:{prompt.id}".encode()).hexdigest()


def _drawn(pool: Sequence[Prompt], wanted: Mapping[Domain, int], *, seed: int) -> dict[Domain, list[Prompt]]:
    drawn: dict[Domain, list[Prompt]] = {}
    for domain, number in wanted.items():
        there = sorted((prompt for prompt in pool if prompt.domain == domain), key=lambda prompt: _draw(prompt, seed))
        if len(there) < number:
            raise PromptError(
                f"not enough {domain} prompts",
                got=f"{len(there)} usable ones",
                expected=f"{number} for the three splits",
                where="params.yaml: prompts (add sources or files, or ask for fewer)",
            )
        drawn[domain] = there[:number]
    return drawn
