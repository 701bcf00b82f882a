"""Tables over evaluations (bodies of evaluate.json), in the form of the paper's Table 1 and below it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from draftsmith.errors import DraftsmithError
from draftsmith.evaluation.benchmarks import BENCHMARKS
from draftsmith.evaluation.bootstrap import MIN_PROMPTS
from draftsmith.evaluation.breakdown import length_name, temperatures_of
from draftsmith.evaluation.compare import pair_prompts, paired_difference, unequal_field
from draftsmith.evaluation.grid import MISSING, Grid, number, percent, with_interval
from draftsmith.evaluation.paired import Bonus
from draftsmith.evaluation.report import DOMAINS

Body = Mapping[str, Any]
Cells = Literal["values", "intervals"]
AVERAGE = "average"


def length_grid(bodies: Sequence[Body], *, temperature: float, bonus: Bonus = "with", cells: Cells = "values") -> Grid:
    """Accepted length as in the paper's Table 1: a row a key, a column a benchmark in the paper's order, the average
    last.

    Of several keys on one target the best of a column is bold where it is better than the second best on the same
    prompts, by an interval that excludes 0. The average of a key that lacks a benchmark says over how many it is.
    """
    bodies = [body for body in bodies if any(row["temperature"] == temperature for row in body["rows"])]
    columns = benchmark_columns(bodies, temperature=temperature)
    name = length_name(bonus, "micro")
    marked = {column: _best(bodies, column, temperature=temperature, bonus=bonus) for column in (*columns, AVERAGE)}
    rows = []
    for body in bodies:
        found = _by_benchmark(body, temperature)
        line = [body["key"], body["target"], str(body["block_size"])]
        for column in columns:
            line.append(_length(found.get(column), name, cells=cells, bold=body["key"] in marked[column]))
        [average] = [row for row in body["averages"] if row["temperature"] == temperature]
        text = _length(average, name, cells=cells, bold=body["key"] in marked[AVERAGE])
        if average["num_benchmarks"] < len(columns):
            text += f" ({average['num_benchmarks']} of {len(columns)})"
        rows.append((*line, text))
    heads = [f"{domain}: {column}" for column, domain in columns.items()]
    return Grid(("key", "target", "K", *heads, AVERAGE), tuple(rows))


def benchmark_columns(bodies: Sequence[Body], *, temperature: float) -> dict[str, str]:
    """Every benchmark of the bodies at a temperature with its domain: math, code, chat, each in the paper's order."""
    known = list(BENCHMARKS)
    found = {
        row["benchmark"]: row["domain"] for body in bodies for row in body["rows"] if row["temperature"] == temperature
    }

    def place(name: str) -> tuple[int, int]:
        return DOMAINS.index(found[name]), known.index(name) if name in known else len(known)

    return {name: found[name] for name in sorted(found, key=place)}


def speed_grid(bodies: Sequence[Body]) -> Grid:
    """Speculative against plain decoding of the same engine, a row a key, temperature and batch size."""
    headers = ("key", "T", "batch size", "tok/s", "plain tok/s", "speed-up", "draft ms", "verify ms", "rest ms",
               "overhead")  # fmt: skip
    rows = [
        (
            body["key"],
            f"{row['temperature']:g}",
            str(row["batch_size"]),
            f"{row['tokens_per_s']:.1f}",
            f"{row['plain_tokens_per_s']:.1f}",
            f"{row['speedup']:.2f}x",
            f"{row['draft_ms']:.2f}",
            f"{row['verify_ms']:.2f}",
            f"{row['sample_ms']:.2f}",
            percent(row["overhead_share"]),
        )
        for body in bodies
        for row in sorted(body["speed"], key=lambda row: (row["temperature"], row["batch_size"]))
    ]
    return Grid(headers, tuple(rows))


def run_grid(bodies: Sequence[Body]) -> Grid:
    """What lies behind the lengths, a row a key, benchmark and temperature: prompts, rounds, checks and wall speed."""
    headers = ("key", "benchmark", "T", "prompts", "rounds", "cut", "ended", "identical to plain", "batch size",
               "tok/s", "plain tok/s", "speed-up")  # fmt: skip
    rows = [
        (
            body["key"],
            row["benchmark"],
            f"{row['temperature']:g}",
            str(row["num_prompts"]),
            str(row["num_rounds"]),
            percent(row["share_cut"]),
            percent(row["share_ended"]),
            percent(row["identical_to_plain"]),
            str(row["batch_size"]),
            number(row["tokens_per_s"], digits=1),
            number(row["plain_tokens_per_s"], digits=1),
            MISSING if row["speedup"] is None else f"{row['speedup']:.2f}x",
        )
        for body in bodies
        for row in body["rows"]
    ]
    return Grid(headers, tuple(rows))


def position_grid(bodies: Sequence[Body]) -> Grid:
    """Conditional acceptance by position, a row a key, benchmark and temperature."""
    block_size = max((body["block_size"] for body in bodies), default=0)
    rows = []
    for body in bodies:
        for row in body["rows"]:
            shares = [number(value, digits=3) for value in row["conditional_acceptance"]]
            padding = [MISSING] * (block_size - len(shares))
            setting = [row["benchmark"], f"{row['temperature']:g}", str(row["num_rounds"])]
            rows.append((body["key"], *setting, *shares, *padding))
    return Grid(("key", "benchmark", "T", "rounds", *map(str, range(1, block_size + 1))), tuple(rows))


def four_lengths_grid(body: Body) -> Grid:
    """Accepted length four ways with intervals, of one key: a row a benchmark, a domain and the average."""
    places = [
        *((row["benchmark"], row) for row in body["rows"]),
        *((f"all {row['domain']}", row) for row in body["domains"] if len(row["benchmarks"]) > 1),
        *((AVERAGE, row) for row in body["averages"]),
    ]
    return _lengths(places)


def turn_grid(body: Body) -> Grid:
    """Accepted length by turn, of the benchmarks with more than one."""
    places = [
        (f"{row['benchmark']}, turn {turn['turn'] + 1}", {**turn, "temperature": row["temperature"]})
        for row in body["rows"]
        if len(row["turns"]) > 1
        for turn in row["turns"]
    ]
    return _lengths(places)


def output_position_grid(body: Body) -> Grid:
    """Accepted length by the position in the answer at which a round begins, all benchmarks together."""
    return _lengths([(f"{row['first']}-{row['last']}", row) for row in body["output_positions"]])


def threshold_grid(body: Body) -> Grid:
    """What static confidence thresholds would verify, accept and reject; every other threshold."""
    headers = ("threshold", "T", "verified a round", "accepted", "rejected", "acceptance", "accepted length")
    rows = [
        (
            f"{row['threshold']:.2f}",
            f"{row['temperature']:g}",
            *(f"{row[name] / row['num_rounds']:.2f}" for name in ("verified", "accepted", "rejected")),
            percent(row["acceptance_rate"]),
            f"{row['accepted_length']:.2f}",
        )
        for row in body["thresholds"]
        if round(row["threshold"] * 20) % 2 == 0
    ]
    return Grid(headers, tuple(rows))


def settings_lines(bodies: Sequence[Body]) -> list[str]:
    """How the keys were evaluated, one line for those that were alike."""
    alike: dict[str, list[str]] = {}
    for body in bodies:
        alike.setdefault(_settings(body), []).append(body["key"])
    if len(alike) == 1:
        return list(alike)
    return [f"{', '.join(keys)}: {text}" for text, keys in alike.items()]


def caveats(bodies: Sequence[Body]) -> list[str]:
    """What a reader must know about the prompts: replaced, contaminated or too few."""
    found = []
    for body in bodies:
        rows = {row["benchmark"]: row for row in body["rows"]}
        for item in body["benchmarks"]:
            if item["name"] not in rows:
                continue
            number_of = rows[item["name"]]["num_prompts"]
            if item.get("replaced_by") is not None:
                found.append(f"{item['name']} is read from {item['replaced_by']}, not from the paper's source.")
            if item.get("contaminated"):
                found.append(
                    f"{item['name']}: {len(item['contaminated'])} of {number_of} prompts are equal or near to a "
                    "training prompt."
                )
            if number_of - rows[item["name"]]["num_prompts_without_rounds"] < MIN_PROMPTS:
                found.append(
                    f"{item['name']}: intervals over fewer than {MIN_PROMPTS} prompts are narrower than their 95 %."
                )
    return list(dict.fromkeys(found))


def temperatures(bodies: Sequence[Body]) -> list[float]:
    """Every temperature of the bodies, ascending."""
    return sorted({value for body in bodies for value in temperatures_of(body["rows"])})


def _best(bodies: Sequence[Body], column: str, *, temperature: float, bonus: Bonus) -> set[str]:
    """Of each target, the key whose value is the highest of a column, if it is better than the second by pairs."""
    best = set()
    for target in {body["target"] for body in bodies}:
        ranked = []
        for body in bodies:
            row = _cell_row(body, column, temperature)
            if body["target"] == target and row is not None:
                ranked.append((row[length_name(bonus, "micro")], body))
        ranked.sort(key=lambda item: -item[0])
        if len(ranked) > 1 and _is_better(ranked[0][1], ranked[1][1], column, temperature=temperature, bonus=bonus):
            best.add(ranked[0][1]["key"])
    return best


def _is_better(first: Body, second: Body, column: str, *, temperature: float, bonus: Bonus) -> bool:
    if unequal_field(second, first) is not None:
        return False
    try:
        pairings = pair_prompts(second, first, temperature=temperature, names=(second["key"], first["key"]))
    except DraftsmithError:
        return False  # no prompt in common: nothing is known of the difference
    if column == AVERAGE:
        whole = all(_by_benchmark(body, temperature).keys() == pairings.keys() for body in (first, second))
        return whole and paired_difference([*pairings.values()], seed=first["seed"], bonus=bonus).excludes_zero
    return paired_difference([pairings[column]], seed=first["seed"], bonus=bonus).excludes_zero


def _cell_row(body: Body, column: str, temperature: float) -> Mapping[str, Any] | None:
    if column == AVERAGE:
        return next((row for row in body["averages"] if row["temperature"] == temperature), None)
    return _by_benchmark(body, temperature).get(column)


def _by_benchmark(body: Body, temperature: float) -> dict[str, Mapping[str, Any]]:
    return {row["benchmark"]: row for row in body["rows"] if row["temperature"] == temperature}


def _length(row: Mapping[str, Any] | None, name: str, *, cells: Cells, bold: bool) -> str:
    if row is None:
        return MISSING
    interval = row[f"{name}_interval"] if cells == "intervals" else None
    text = with_interval(row[name], interval)
    return f"**{text}**" if bold else text


def _lengths(places: Sequence[tuple[str, Mapping[str, Any]]]) -> Grid:
    names = [length_name(bonus, mean) for mean in ("micro", "macro") for bonus in ("with", "without")]
    rows = [
        (
            place,
            f"{row['temperature']:g}",
            str(row["num_rounds"]),
            *(with_interval(row[name], row[f"{name}_interval"]) for name in names),
        )
        for place, row in places
    ]
    headers = ("", "T", "rounds", "accepted length", "without bonus", "macro", "macro without bonus")
    return Grid(headers, tuple(rows))


def _settings(body: Body) -> str:
    prompts = []
    for name in benchmark_columns([body], temperature=body["rows"][0]["temperature"]):
        row = next(row for row in body["rows"] if row["benchmark"] == name)
        paper = "" if row["reference_count"] is None else f" of the paper's {row['reference_count']}"
        prompts.append(f"{name} {row['num_prompts']}{paper} (cap {row['cap']})")
    sizes = "/".join(dict.fromkeys(str(row["batch_size"]) for row in body["rows"]))
    return (
        f"target {body['target']} in {body['dtype']}, at most {body['max_new_tokens']} new tokens an answer, batch "
        f"size {sizes}, seed {body['seed']}; prompts: {', '.join(prompts)}."
    )
