"""The head of the evaluation's page: what was evaluated, on what, and every reason to read it with care."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from draftsmith.evaluation.bootstrap import MIN_PROMPTS
from draftsmith.evaluation.compare import BENCHMARK_SETTINGS, DIGESTS
from draftsmith.evaluation.grid import MISSING, Grid, percent
from draftsmith.evaluation.page_html import details, notice, paragraph, table
from draftsmith.evaluation.page_model import Body, Page, Shown, different_settings
from draftsmith.evaluation.page_plot import by_drafter

DIGEST_LETTERS = 12
SETTING_NAMES = {
    "target": "target",
    "dtype": "dtype",
    "max_new_tokens": "max new tokens",
    "target_digest": "the target's weights",
    "text_digest": "the tokenizer or the chat template",
}
SOURCE_STATES = {"no": "as committed", "yes": "changed since", "unknown": "unknown whether changed"}
"""By provenance's `git_dirty`."""
MAX_IDS = 8
"""Ids named in a notice; all of them are in the table of benchmarks."""


def key_grid(page: Page) -> Grid:
    """One column a key: drafter, target, settings, machine, and the source that made it."""
    facts = [_key_facts(item) for item in page.drafters]
    rows = [(name, *(found[name] for found in facts)) for name in facts[0]]
    return Grid(("drafter", *(item.label for item in page.drafters)), tuple(rows))


def _key_facts(shown: Shown) -> dict[str, str]:
    body, source = shown.evaluate, shown.evaluate["provenance"]
    return {
        "key": shown.key,
        "kind": f"{body['drafter']['kind']}, {'with' if shown.has_confidence else 'without'} confidence head",
        "K, draft tokens a round": str(shown.block_size),
        "target": f"{body['target']}, {body['dtype']}",
        "max new tokens": f"{body['max_new_tokens']:,}",
        "seed": str(body["seed"]),
        "machine": str(body["machine"]),
        "commit": f"{source['git_commit'][:DIGEST_LETTERS]}, {SOURCE_STATES[source['git_dirty']]}",
    }


def benchmark_grid(page: Page) -> Grid:
    """One row a benchmark: where it comes from, how it is asked, and how many of the paper's prompts were used."""
    rows = []
    for benchmark in page.benchmarks:
        for drafters, row in _descriptions(page, benchmark.name):
            label = benchmark.name if drafters is None else f"{benchmark.name} ({drafters})"
            rows.append(
                (
                    label,
                    row["domain"],
                    f"{row['num_prompts']:,}",
                    _known(row["reference_count"]),
                    _known(row["cap"]),
                    str(row["turns"]),
                    str(row["prompt_form"]),
                    str(row["replaced_by"] or row["source"]),
                    _known(row["revision"]),
                    _known(row["split"]),
                    str(row["licence"]),
                    ", ".join(map(str, row["contaminated"])) or "none",
                )
            )
    return Grid(
        ("benchmark", "domain", "prompts", "in the paper", "cap", "turns", "prompt form", "source", "revision", "split",
         "licence", "near a training prompt"),
        tuple(rows),
    )  # fmt: skip


def facts_html(page: Page) -> str:
    """How many prompts were used, and the tables of keys and benchmarks."""
    title = "Benchmarks: sources, prompt forms, caps, licences"
    return (
        table(key_grid(page), caption="What was evaluated")
        + paragraph(prompts_line(page))
        + details(title, table(benchmark_grid(page), caption=title))
    )


def prompts_line(page: Page) -> str:
    """How many of the paper's prompts were used, benchmark by benchmark."""
    parts = []
    for benchmark in page.benchmarks:
        found = [row for _, row in _descriptions(page, benchmark.name)]
        used = " or ".join(dict.fromkeys(f"{row['num_prompts']:,}" for row in found))
        paper = found[0]["reference_count"]
        parts.append(f"{benchmark.name} {used} of {paper}" if paper is not None else f"{benchmark.name} {used}")
    return f"Prompts used, of those in the paper's evaluation where it has the benchmark: {', '.join(parts)}."


def notices(page: Page) -> list[str]:
    """Everything that makes a number on the page mean less than it seems to, one notice each."""
    return [
        *_contamination(page),
        *_unequal(page),
        *_unlike_plain(page),
        *_few_prompts(page),
    ]


def _contamination(page: Page) -> Iterable[str]:
    for benchmark in page.benchmarks:
        for drafters, row in _descriptions(page, benchmark.name):
            ids = [str(name) for name in row["contaminated"]]
            if ids:
                more = f" and {len(ids) - MAX_IDS} more" if len(ids) > MAX_IDS else ""
                whose = "" if drafters is None else f" of {drafters}"
                yield notice(
                    "Contaminated benchmark.",
                    f"{benchmark.name}: {len(ids)} of {row['num_prompts']} prompts are equal or near to a training "
                    f"prompt{whose}, so its numbers flatter the drafter: {', '.join(ids[:MAX_IDS])}{more}.",
                )


def _unequal(page: Page) -> Iterable[str]:
    base, *others = page.drafters
    names = dict.fromkeys(name for item in others for name in different_settings(item, base))
    for name in names:
        values = by_drafter(page.drafters, [_setting(item, name) for item in page.drafters])
        yield notice("Not comparable.", f"The keys differ in {SETTING_NAMES[name]} ({values}).")
    if len({str(item.evaluate["machine"]) for item in page.drafters}) > 1:
        yield notice("Speeds are not comparable.", "The keys were measured on different machines; see the table below.")
    unequal = [name.name for name in page.benchmarks if _asked_differently(page, name.name)]
    if unequal:
        yield notice(
            "Not the same prompts.",
            f"{', '.join(unequal)}: not every key was asked the same prompts in the same form, so columns and means "
            "compare different questions.",
        )


def _setting(shown: Shown, name: str) -> str:
    if name in DIGESTS:
        return str(shown.evaluate["provenance"].get(name, "unknown"))[:DIGEST_LETTERS]
    return str(shown.evaluate[name])


def _unlike_plain(page: Page) -> Iterable[str]:
    for item in page.drafters:
        rows = [row for row in item.evaluate["rows"] if row["identical_to_plain"] is not None]
        different = [row for row in rows if row["identical_to_plain"] < 1]
        if different:
            told = ", ".join(f"{row['benchmark']} {percent(row['identical_to_plain'])}" for row in different)
            yield notice(
                "Not identical to plain decoding.",
                f"{item.label} at temperature 0 should answer token for token as plain decoding does; share of prompts "
                f"for which it did: {told}. Rounding can turn a near tie, often in bfloat16 and rarely in float32 "
                f"(here: {item.evaluate['dtype']}).",
            )


def _few_prompts(page: Page) -> Iterable[str]:
    few = {
        row["benchmark"]: row["num_prompts"]
        for item in page.drafters
        for row in item.evaluate["rows"]
        if row["num_prompts"] < MIN_PROMPTS
    }
    if few:
        told = ", ".join(f"{name} ({count})" for name, count in few.items())
        yield notice(
            "Few prompts.",
            f"{told}: below {MIN_PROMPTS} prompts an interval covers less than the 95 % that it is named for.",
        )


def _descriptions(page: Page, name: str) -> list[tuple[str | None, Body]]:
    """The different descriptions of a benchmark, each with the drafters whose report has it; None: all of them."""
    found: list[tuple[list[Shown], Body]] = []
    for item in page.drafters:
        row = next((row for row in item.evaluate["benchmarks"] if row["name"] == name), None)
        if row is None:
            continue
        same = next((drafters for drafters, other in found if other == row), None)
        if same is None:
            found.append(([item], row))
        else:
            same.append(item)
    if len(found) == 1:
        return [(None, found[0][1])]
    return [(", ".join(item.label for item in drafters), row) for drafters, row in found]


def _asked_differently(page: Page, name: str) -> bool:
    asked: list[tuple[Sequence[object], ...]] = []
    for item in page.drafters:
        rows = [row for row in item.evaluate["rows"] if row["benchmark"] == name]
        facts = [row for row in item.evaluate["benchmarks"] if row["name"] == name]
        asked.append(
            (
                [row[fact] for row in facts for fact in (*BENCHMARK_SETTINGS, "replaced_by")],
                sorted({str(prompt) for row in rows for prompt in row["prompts"]["ids"]}),
            )
        )
    return any(other != asked[0] for other in asked[1:])


def _known(value: object) -> str:
    return MISSING if value is None else str(value)
