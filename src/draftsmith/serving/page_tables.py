"""Tables of the serving page: what was studied, speeds that users must get, loads, engine settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftsmith.evaluation.grid import MISSING, Grid, number, percent
from draftsmith.evaluation.page_html import details, escape, paragraph, table
from draftsmith.serving.engines import NAMES, SOURCES
from draftsmith.serving.page_model import Body, Scenario, short, signed, users
from draftsmith.serving.page_open import load_name
from draftsmith.serving.settings import (
    band,
    end_sentence,
    one_server_sentence,
    recommend,
    settings_grid,
)

OUT_OF_REACH = "out of reach"


def facts_grid(scenario: Scenario) -> Grid:
    """What was replayed, on what, under which limits."""
    study = scenario.study
    drafter, rounds, limits, work = (study[name] for name in ("drafter", "rounds", "limits", "workload"))
    head = "with" if drafter["confidence"] else "without"
    asked = "drawn" if rounds["temperature"] is None else f"temperature {rounds['temperature']:g}"
    domains = ", ".join(f"{name} {percent(share)}" for name, share in work["domains"].items())
    rows = (
        ("key", str(study["key"])),
        ("drafter", f"{drafter['name']}: {drafter['kind']}, K {drafter['block_size']}, {head} confidence head"),
        ("profile", f"{study['profile']['source']}, up to {study['profile']['max_batch_tokens']:,} batch tokens"),
        ("machine", told(study["machine"])),
        ("rounds", f"{rounds['source']}: {rounds['num_rounds']:,} rounds of {rounds['num_answers']:,} answers, "
         f"{asked}, accepted length {rounds['accepted_length']:.2f}"),
        ("requests", f"prompts of {_law(work['prompt_tokens'])}, answers of {_law(work['output_tokens'])} "
         f"(mean {work['mean_output_tokens']:.1f}); {domains}"),
        ("limits", f"{limits['max_requests']} requests in flight; cache {_limit(limits['kv_tokens'])}; "
         f"prefill a step {_limit(limits['prefill_tokens'])}"),
        ("in time", f"first token within {study['deadline']['first_token_s']:.3g} s, then "
         f"{study['deadline']['per_token_s']:.3g} s a token ({study['deadline']['basis']})"),
    )  # fmt: skip
    return Grid(("what", "studied"), rows)


def overall_grid(scenario: Scenario) -> Grid:
    """The one policy to run if the load is not known, best first."""
    rows = tuple(
        (scenario.labels[row["policy"]], percent(row["worst_share"]), str(row["concurrency"]))
        for row in scenario.study["overall"]
    )
    return Grid(("policy", "of the best policy's tokens/s, at its worst", "at users"), rows)


def anchors_grid(scenario: Scenario) -> Grid:
    """Tokens a second of all users that each policy reaches while the median user gets a given speed."""
    anchors = scenario.study["anchors"]
    return _by_policy(
        scenario,
        anchors,
        headers=[f"{short(item['user_tokens_per_s'])} tokens/s a user{_share(item)}" for item in anchors],
        cell=lambda row: _reached(row, "tokens_per_s", f", {users(row['concurrency'] or 0)}"),
    )


def matched_grid(scenario: Scenario) -> Grid:
    """Speed for the median user at equal throughput."""
    matched = scenario.study["matched_throughput"]
    return _by_policy(
        scenario,
        matched,
        headers=[f"{short(item['tokens_per_s'])} tokens/s in all ({percent(item['share'])} of plain's most)"
                 for item in matched],
        cell=lambda row: _reached(row, "user_tokens_per_s", ""),
    )  # fmt: skip


def _by_policy(scenario: Scenario, items: list[Body], *, headers: list[str], cell: Any) -> Grid:
    rows = []
    for name, label in scenario.labels.items():
        found = [next(row for row in item["rows"] if row["policy"] == name) for item in items]
        marks = [" (best)" if item["best"] == name else "" for item in items]
        rows.append((label, *(cell(row) + mark for row, mark in zip(found, marks, strict=True))))
    return Grid(("policy", *headers), tuple(rows))


def _share(item: Body) -> str:
    return "" if item["share"] is None else f" ({100 * item['share']:.3g} % of plain's one user)"


def _reached(row: Body, name: str, more: str) -> str:
    if row[name] is None:
        return OUT_OF_REACH
    least = ">= " if row["at_limit"] else ""
    return f"{least}{short(row[name])}{more}, {signed(row['gain'])}"


def latency_grid(scenario: Scenario, rows: list[Body]) -> Grid:
    """Everything about an open load, one row a policy and load."""
    lines = []
    for row in rows:
        lines.append(
            (
                f"{scenario.labels[row['policy']]}, {load_name(row)}",
                MISSING if row["requests_per_s"] is None else short(row["requests_per_s"]),
                f"{row['num_requests']:,}",
                short(row["tokens_per_s"]),
                number(row["mean_concurrency"], digits=2),
                number(row["accepted_length"], digits=2),
                number(row["budget"], digits=2),
                MISSING if row["user_tokens_per_s"] is None else short(row["user_tokens_per_s"]["p50"]),
                percent(row["share_in_time"]),
                "yes" if row["overloaded"] else "no",
            )
        )
    headers = ("policy, load", "requests/s offered", "requests", "tokens/s", "mean in flight", "accepted length",
               "budget", "median user's tokens/s", "in time", "overloaded")  # fmt: skip
    return Grid(headers, tuple(lines))


def settings_html(scenario: Scenario, *, sample_from_anchor: bool) -> str:
    """A table of each engine, its commands and where its options were read."""
    parts = []
    for item in recommend(scenario.study, sample_from_anchor=sample_from_anchor):
        name = NAMES[item.engine]
        commands = "".join(
            f"<p>{escape(title)}</p>{_command(shell)}"
            for title, shell in (
                *((f"{band(row)} in flight: {row.label}", row.launch.shell) for row in item.rows),
                (f"One server for all loads: {item.one_server.label}", item.one_server.launch.shell),
                *((f"{file}", str(body)) for file, body in item.one_server.launch.written.items()),
            )
        )
        notes = "".join(f"<li>{escape(note)}</li>" for note in item.notes)
        parts.append(
            f"<h3>{name}</h3>"
            + paragraph(f"{end_sentence(item)} {one_server_sentence(item)}")
            + table(settings_grid(item), caption=f"Settings for {name}")
            + details(f"Commands for {name}", commands)
            + f"<ul>{notes}</ul>"
            + paragraph(f"Options read from: {'; '.join(SOURCES[item.engine])}.", kind="basis")
        )
    return "".join(parts)


def _command(text: str) -> str:
    return f'<pre class="command" tabindex="0">{escape(text)}</pre>'


def told(facts: Mapping[str, Any] | str) -> str:
    """A machine in one line."""
    return facts if isinstance(facts, str) else ", ".join(f"{name} {value}" for name, value in facts.items())


def _law(law: Body) -> str:
    return f"{law['low']} to {law['high']} tokens, median {law['median']:g}"


def _limit(value: int | None) -> str:
    return "without limit" if value is None else f"{value:,} tokens"
