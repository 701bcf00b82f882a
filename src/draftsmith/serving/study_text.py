"""A serving study in words and series: sentences, serve.md, serve.csv. Every number is read off the body."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from typing import Any

CSV_COLUMNS = (
    "study", "policy", "concurrency", "tokens_per_s", "tokens_per_s_error", "user_tokens_per_s", "speedup",
    "accepted_length", "budget", "acceptance",
)  # fmt: skip
CLEAR = 0.01
"""Changes below a hundredth are told as none."""

Body = Mapping[str, Any]


def answers(body: Body) -> dict[str, str | None]:
    """What the numbers of a study say of its policies and of the two open questions."""
    return {
        "policy": _policy(body),
        "staleness": None if body["staleness"] is None else _staleness(body["staleness"]),
        "early_exit": _early_exit(body["early_exit"]["rows"], labels(body)),
    }


def labels(body: Body) -> dict[str, str]:
    """Label of each policy by its name."""
    return {item["name"]: item["label"] for item in body["policies"]}


def _policy(body: Body) -> str:
    best, named = body["best_by_concurrency"], labels(body)
    told = []
    for name, group in _runs((item["policy"], item) for item in best):
        users = _span([item["concurrency"] for item in group])
        if name == "none":
            told.append(f"no drafter at {users}")
        else:
            gains = _range([item["speedup"] - 1 for item in group])
            told.append(f"{named[name]} at {users} ({gains} over no drafter)")
    text = f"Most tokens a second: {'; '.join(told)}."
    steady = body["overall"][0]
    text += (
        f" One policy for all loads: {named[steady['policy']]}, which never has less than"
        f" {steady['worst_share']:.1%} of the best."
    )
    budgets = [
        (point["concurrency"], point["budget"])
        for item in body["pareto"]
        if item["policy"] == "async_2"
        for point in item["points"]
    ]
    if budgets:
        (low, first), (high, last) = budgets[0], budgets[-1]
        text += (
            f" The asynchronous scheduler verifies {first:.1f} tokens a request and step at {_users(low)}"
            f" and {last:.1f} at {high}, the anchor included."
        )
    return text


def _staleness(found: Body) -> str:
    """How much speed is lost from the freshest asynchronous scheduler to the stalest, evenly and in bursts."""
    fresh, stalest = sorted(found["staleness"])[1], max(found["staleness"])
    told = []
    for factor in found["burst_factors"]:
        cells = {cell["staleness"]: cell for cell in found["cells"] if cell["burst_factor"] == factor}
        traffic = "even (Poisson) traffic" if factor == 1 else f"bursts of {factor:g} times the calm rate"
        slower, tail = cells[stalest]["fresh_change"], cells[stalest]["fresh_p95_change"]
        told.append(
            f"{_percent(slower)} tokens/s for the median user and {_percent(tail)} time to the end at the 95th"
            f" percentile under {traffic}"
        )
    changes = [cell["change"] for cell in found["cells"] if cell["staleness"] == fresh]
    text = ", ".join(told)
    if fresh != stalest:
        text = f"Budgets from {stalest} steps before rather than {fresh} change {text}."
    else:
        text = f"Measured at a staleness of {fresh} alone."
    return (
        f"{text} Against the synchronous scheduler, which stops at the first token that does not pay, the asynchronous"
        f" one at {_steps(fresh)} has {_range(changes)} tokens/s for the median user."
    )


def _early_exit(rows: list[dict[str, Any]], named: Mapping[str, str]) -> str:
    told = []
    for (policy, kind), group in _grouped(rows, ("policy", "early_exit")):
        what = {
            "recent": "Drafting only where recent survival is high",
            "worth": "Drafting only where it pays at the load",
        }[kind]
        gains = [item["gain"] for item in group]
        most = max(group, key=lambda item: float(item["gain"]))
        clear = [item for item in group if item["clear"] and abs(item["gain"]) >= CLEAR]
        text = f"{what} changes the throughput of {named[policy]} by {_range(gains)}"
        if not clear:
            text += ", nowhere beyond noise"
        elif most["gain"] >= CLEAR:
            text += (
                f", most at {_users(most['concurrency'])}, where {most['drafting_share']:.0%} of rounds draft"
                f" ({_percent(most['gain_over_none'])} over no drafter)"
            )
        told.append(text + ".")
    return " ".join(told)


def serve_csv(bodies: Iterable[Body]) -> str:
    """One row a study, policy and concurrency: series for `dvc plots`."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, CSV_COLUMNS, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    for body in bodies:
        for item in body["pareto"]:
            for point in item["points"]:
                own = {"study": body["name"], "policy": item["policy"]}
                writer.writerow({**point, **own, "user_tokens_per_s": point["user_tokens_per_s"]["p50"]})
    return stream.getvalue()


def serve_markdown(body: Body) -> str:
    """serve.md: the study, and the what-ifs behind it."""
    parts = [f"# Serving {body['key']}", *_section(body)]
    for item in body.get("what_if", ()):
        parts += [f"# What if: {item['name']} (synthetic)", *_section(item)]
    return "\n\n".join(parts) + "\n"


def _section(body: Body) -> list[str]:
    """Of one study."""
    rounds, told = body["rounds"], body["answers"]
    domains = ", ".join(f"{name} {item['accepted_length']:.2f}" for name, item in rounds["domains"].items())
    parts = [
        ("**Synthetic.** " if body["synthetic"] else "") + body["note"],
        f"Rounds: {rounds['num_rounds']} ({rounds['source']}), accepted length {rounds['accepted_length']:.2f}"
        f" ({domains}).",
        told["policy"],
        "Tokens a second by users at once, with the speed of the median user behind the slash:",
        _throughput_table(body),
        "Throughput at promised speeds of a user, and what that is over no drafter:",
        _anchor_table(body),
    ]
    if told["staleness"] is not None:
        parts += ["**How does the asynchronous scheduler hold under irregular traffic?** " + told["staleness"]]
        parts += [_staleness_table(body["staleness"])]
    return [*parts, "**What would early exit buy?** " + told["early_exit"]]


def _throughput_table(body: Body) -> str:
    loads = [point["concurrency"] for point in body["pareto"][0]["points"]]
    named = labels(body)
    rows = [
        [named[item["policy"]]]
        + [f"{point['tokens_per_s']:.4g} / {point['user_tokens_per_s']['p50']:.3g}" for point in item["points"]]
        for item in body["pareto"]
    ]
    return _table(["policy", *map(str, loads)], rows)


def _anchor_table(body: Body) -> str:
    named, anchors = labels(body), body["anchors"]
    heads = [f"{item['user_tokens_per_s']:.3g} tokens/s/user" for item in anchors]
    rows = [
        [named[name]] + [_anchor_cell(item["rows"][at]) for item in anchors]
        for at, name in enumerate(row["policy"] for row in anchors[0]["rows"])
    ] if anchors else []  # fmt: skip
    return _table(["policy", *heads], rows)


def _anchor_cell(row: Body) -> str:
    if row["tokens_per_s"] is None:
        return "out of reach"
    gain = "" if row["gain"] is None else f" ({_percent(row['gain'])})"
    return f"{'>= ' if row['at_limit'] else ''}{row['tokens_per_s']:.4g}{gain}"


def _staleness_table(found: Body) -> str:
    rows = []
    for factor in found["burst_factors"]:
        cells = [cell for cell in found["cells"] if cell["burst_factor"] == factor]
        rows.append([
            f"{factor:g}",
            *(f"{cell['user_tokens_per_s']:.4g} / {cell['end_to_end_p95_s']:.3g} s" for cell in cells),
        ])  # fmt: skip
    heads = ["synchronous" if steps == 0 else _steps(steps) for steps in found["staleness"]]
    return _table(["burst factor", *heads], rows)


def _table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _runs(items: Iterable[tuple[str, Any]]) -> list[tuple[str, list[Any]]]:
    """Neighbours of one name put together."""
    found: list[tuple[str, list[Any]]] = []
    for name, item in items:
        if not found or found[-1][0] != name:
            found.append((name, []))
        found[-1][1].append(item)
    return found


def _grouped(rows: list[dict[str, Any]], names: tuple[str, str]) -> list[tuple[tuple[str, str], list[dict[str, Any]]]]:
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row[names[0]], row[names[1]]), []).append(row)
    return list(found.items())


def _percent(change: float) -> str:
    return "no change" if abs(change) < 0.0005 else f"{100 * change:+.1f} %"


def _range(changes: list[float]) -> str:
    low, high = min(changes), max(changes)
    return _percent(low) if high - low < 0.001 else f"{100 * low:+.1f} to {100 * high:+.1f} %"


def _span(numbers: list[int]) -> str:
    return _users(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]} users"


def _users(number: int) -> str:
    return f"{number} user{'' if number == 1 else 's'}"


def _steps(number: int) -> str:
    return f"{number} step{'' if number == 1 else 's'}"
