"""Tables of accepted length on the evaluation's page: the paper's Table 1, the means, and what is behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draftsmith.evaluation.breakdown import length_name
from draftsmith.evaluation.grid import MISSING, Grid, number, percent, with_interval
from draftsmith.evaluation.page_differences import Differences
from draftsmith.evaluation.page_html import escape, scrolling
from draftsmith.evaluation.page_model import Benchmark, Body, Page, Shown
from draftsmith.evaluation.paired import BONUSES, Bonus

MEAN = "mean"
PLAIN_LENGTH = {"with": 1, "without": 0}
"""Accepted length of plain decoding: each step is a round that commits the target's own token."""


@dataclass(frozen=True)
class Column:
    """A column of the table: one benchmark, or the mean of a domain or of all (`of`)."""

    benchmarks: tuple[str, ...]
    domain: str | None = None
    mean: str | None = None

    def row(self, shown: Shown, temperature: float) -> Body | None:
        """Where the report of a drafter has its number."""
        if self.mean is None:
            return shown.rows(temperature).get(self.benchmarks[0])
        if self.domain is None:
            return shown.average(temperature)
        return next((row for row in shown.at("domains", temperature) if row["domain"] == self.domain), None)


def length_table(page: Page, temperature: float, bonus: Bonus, differences: Differences) -> str:
    """Drafter by benchmark as in the paper's Table 1, with the mean of each domain and of all; n are prompts.

    The highest of a column is bold where it is better than the next on the same prompts.
    """
    groups = _groups(page)
    columns = [column for _, members in groups for column in members]
    drafters = page.evaluated(temperature)
    name = length_name(bonus, "micro")
    cells: dict[Shown, str] = dict.fromkeys(drafters, "")
    for column in columns:
        rows = {item: row for item in drafters if (row := column.row(item, temperature)) is not None}
        ranked = sorted(rows, key=lambda item: -rows[item][name])
        clear = differences.clearly_highest(ranked, names=column.benchmarks, temperature=temperature, bonus=bonus)
        for item in drafters:
            cells[item] += _cell(rows.get(item), name, bold=clear and item is ranked[0], mean=column.mean is not None)
    lines = [
        f'<tr><th scope="row">{escape(item.label)}<small>K {item.block_size}</small></th>{cells[item]}</tr>'
        for item in drafters
    ]
    plain = f'<td class="number">{PLAIN_LENGTH[bonus]}</td>' * len(columns)
    lines.append(f'<tr class="plain"><th scope="row">plain decoding</th>{plain}</tr>')
    return scrolling(
        f'<table class="lengths">{_head(page, groups, temperature)}<tbody>{"".join(lines)}</tbody></table>',
        label="Accepted length by drafter and benchmark",
    )


def counts_grid(page: Page, temperature: float) -> Grid:
    """What is behind each cell of the table: prompts, rounds, tokens, how rounds ended, and the mean over prompts."""
    lines = []
    for benchmark in page.benchmarks:
        for item in page.evaluated(temperature):
            row = item.rows(temperature).get(benchmark.name)
            if row is None:
                continue
            macro = (length_name(bonus, "macro") for bonus in BONUSES)
            lines.append(
                (
                    f"{benchmark.name}, {item.label}",
                    f"{row['num_prompts']:,}",
                    f"{row['num_requests']:,}",
                    f"{row['num_prompts_without_rounds']:,}",
                    f"{row['num_rounds']:,}",
                    f"{row['num_tokens']:,}",
                    percent(row["share_cut"]),
                    percent(row["share_ended"]),
                    *(with_interval(row[name], row[f"{name}_interval"]) for name in macro),
                )
            )
    return Grid(
        ("benchmark, drafter", "prompts", "answers", "prompts without a round", "rounds", "tokens",
         "rounds cut by the length limit", "rounds ended inside the block", "mean over prompts, bonus included",
         "mean over prompts, no bonus"),
        tuple(lines),
    )  # fmt: skip


def glance_grid(page: Page, temperature: float) -> Grid:
    """One row a drafter: the means that a decision starts from."""
    lines = []
    for item in page.evaluated(temperature):
        average = item.average(temperature)
        if average is None:
            continue
        names = [length_name(bonus, "micro") for bonus in BONUSES]
        batch = sorted({row["batch_size"] for row in item.at("rows", temperature)})
        lines.append(
            (
                item.label,
                str(item.block_size),
                *(with_interval(average[name], average[f"{name}_interval"]) for name in names),
                number(average["speedup"], digits=2),
                " or ".join(map(str, batch)),
                str(average["num_benchmarks"]),
                f"{average['num_rounds']:,}",
            )
        )
    return Grid(
        ("drafter", "K", "accepted length, bonus included", "without bonus", "speed, times plain", "batch size",
         "benchmarks", "rounds"),
        tuple(lines),
    )  # fmt: skip


def _groups(page: Page) -> list[tuple[str, list[Column]]]:
    """The mean of all, which stays in sight on a narrow screen, then columns by domain and the mean of each."""
    groups = []
    if len(page.benchmarks) > 1:
        groups.append(("all", [Column(tuple(item.name for item in page.benchmarks), None, MEAN)]))
    for domain in dict.fromkeys(item.domain for item in page.benchmarks):
        names = tuple(item.name for item in page.benchmarks if item.domain == domain)
        mean = [Column(names, domain, MEAN)] if len(names) > 1 else []
        groups.append((domain, [*(Column((name,), domain) for name in names), *mean]))
    return groups


def _head(page: Page, groups: Sequence[tuple[str, Sequence[Column]]], temperature: float) -> str:
    domains = "".join(
        f'<th colspan="{len(members)}" scope="colgroup" class="group">{escape(domain)}</th>'
        for domain, members in groups
    )
    found = {item.name: item for item in page.benchmarks}
    names = "".join(
        f'<th scope="col" class="number mean">{column.mean}<small>of {len(column.benchmarks)}</small></th>'
        if column.mean is not None
        else f'<th scope="col" class="number">{escape(column.benchmarks[0])}'
        f"<small>{_prompts(page, found[column.benchmarks[0]], temperature)}</small></th>"
        for _, members in groups
        for column in members
    )
    return f'<thead><tr><th rowspan="2" scope="col">drafter</th>{domains}</tr><tr>{names}</tr></thead>'


def _prompts(page: Page, benchmark: Benchmark, temperature: float) -> str:
    found = [item.rows(temperature).get(benchmark.name) for item in page.evaluated(temperature)]
    counts = sorted({row["num_prompts"] for row in found if row is not None})
    return f"n = {' or '.join(map(str, counts))}" if counts else "not run"


def _cell(row: Body | None, name: str, *, bold: bool, mean: bool) -> str:
    kind = "number mean" if mean else "number"
    if row is None:
        return f'<td class="{kind}">{MISSING}</td>'
    text = f"<strong>{row[name]:.2f}</strong>" if bold else f"{row[name]:.2f}"
    ends = row[f"{name}_interval"]
    interval = "no interval" if ends is None else f"{ends[0]:.2f}–{ends[1]:.2f}"
    return f'<td class="{kind}">{text}<small>{interval}</small></td>'
