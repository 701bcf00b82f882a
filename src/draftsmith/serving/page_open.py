"""Figures of open loads and of what is behind a study: latencies, staleness under bursts, the profile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftsmith.evaluation.grid import MISSING, Grid, number, percent
from draftsmith.evaluation.page_html import plot_text
from draftsmith.evaluation.page_plot import Figure, Trace, axis, layout
from draftsmith.serving.page_closed import load_axis, marked
from draftsmith.serving.page_model import Body, Scenario, hover_text, hovering, rounded, short, signed, users

QUANTILES = ("p50", "p90", "p95", "p99")
LATENCIES = (
    ("ttft_s", "Time to the first token", "seconds"),
    ("tpot_s", "Time of each further token", "seconds"),
    ("end_to_end_s", "Time to the last token", "seconds"),
)
MOST_POINTS = 160
"""Of a curve of the profile, which has a point for every number of tokens."""


def workloads(scenarios: Sequence[Scenario]) -> list[str]:
    """Every workload of any scenario, in order."""
    return list(dict.fromkeys(str(row["workload"]) for item in scenarios for row in item.study["latencies"]))


def workload_rows(scenario: Scenario, workload: str) -> list[Body]:
    """Rows of a workload; none if the scenario has not got it."""
    return [row for row in scenario.study["latencies"] if row["workload"] == workload]


def latency_figures(scenario: Scenario, workload: str) -> list[Figure]:
    """Latencies, and requests that were finished in time."""
    rows = workload_rows(scenario, workload)
    figures = [_latency(scenario, rows, workload, *which) for which in LATENCIES]
    goodput = _rows_figure(
        scenario, rows, f"goodput-{workload}", "Requests a second finished in time",
        values=[row["goodput_requests_per_s"] for row in rows],
        hover=[f"{short(row['goodput_requests_per_s'])} requests/s in time, {percent(row['share_in_time'])} of all"
               for row in rows],
        cells=lambda row: (short(row["goodput_requests_per_s"]), short(row["goodput_tokens_per_s"]),
                           percent(row["share_in_time"])),
        headers=("requests/s in time", "tokens/s of those", "share in time"), unit="requests a second",
    )  # fmt: skip
    return [*figures, goodput]


def _latency(scenario: Scenario, rows: Sequence[Body], workload: str, what: str, title: str, unit: str) -> Figure:
    def told(row: Body) -> str:
        spread = row[what]
        if spread is None:
            return MISSING
        return ", ".join(f"{name} {short(spread[name])} s" for name in QUANTILES)

    return _rows_figure(
        scenario, rows, f"{what.removesuffix('_s').replace('_', '-')}-{workload}", title,
        values=[row[what] and row[what]["p50"] for row in rows],
        upper=[row[what] and row[what]["p95"] - row[what]["p50"] for row in rows],
        hover=[told(row) for row in rows],
        cells=lambda row: tuple(number(row[what] and row[what][name], digits=3) for name in QUANTILES),
        headers=QUANTILES, unit=unit, note="Bars: median; whiskers: to the 95th percentile.",
    )  # fmt: skip


def _rows_figure(
    scenario: Scenario,
    rows: Sequence[Body],
    name: str,
    title: str,
    *,
    values: Sequence[float | None],
    hover: Sequence[str],
    cells: Any,
    headers: tuple[str, ...],
    unit: str,
    upper: Sequence[float | None] = (),
    note: str = "",
) -> Figure:
    """Bars by load, one colour a policy; a hatched bar is of a load that cannot be held."""
    policies = list(dict.fromkeys(str(row["policy"]) for row in rows))
    traces: list[Trace] = []
    for policy in policies:
        chosen = [place for place, row in enumerate(rows) if row["policy"] == policy]
        style = scenario.styles[policy]
        traces.append({
            "type": "bar",
            "name": plot_text(scenario.labels[policy]),
            "x": [load_name(rows[place]) for place in chosen],
            "y": rounded([values[place] for place in chosen]),
            "error_y": {"type": "data", "symmetric": False, "visible": bool(upper), "color": "var(--ink)",
                        "thickness": 1.3, "width": 3,
                        "array": rounded([upper[place] for place in chosen] if upper else []),
                        "arrayminus": [0] * len(chosen)},
            "marker": {"color": style.shade, "line": {"width": 0},
                       "pattern": {"shape": ["x" if rows[place]["overloaded"] else "" for place in chosen],
                                   "fillmode": "overlay", "fgcolor": "var(--card)"}},
            **hovering([f"{scenario.labels[policy]}, {load_name(rows[place])}: {hover[place]}"
                        f"{'; overloaded, the queue grows' if rows[place]['overloaded'] else ''}" for place in chosen]),
        })  # fmt: skip
    lines = [
        (f"{scenario.labels[row['policy']]}, {load_name(row)}", *cells(row), "yes" if row["overloaded"] else "no")
        for row in rows
    ]
    return Figure(
        name=f"{name}-{scenario.name}",
        title=title,
        traces=traces,
        layout=layout(
            x=axis("load, of the best throughput in the closed loop", type="category", showgrid=False),
            y=axis(unit, rangemode="tozero"),
            barmode="group",
            **marked(scenario),
        ),
        numbers=Grid(("policy, load", *headers, "overloaded"), tuple(lines)),
        note=note,
        height=380,
        size="half",
    )


def load_name(row: Body) -> str:
    """A load for people."""
    return "as recorded" if row["load"] is None else f"{100 * row['load']:.3g} %"


def staleness_figures(scenario: Scenario) -> list[Figure]:
    """Heat maps of what stale budgets cost, by how bursty the traffic is; none without a confidence head."""
    found = scenario.study["staleness"]
    if found is None:
        return []
    return [
        _heat(scenario, found, "fresh_change", "Speed of the median user", better="more"),
        _heat(scenario, found, "fresh_p95_change", "Time to the last token, 95th percentile", better="less"),
    ]


def _heat(scenario: Scenario, found: Body, what: str, title: str, *, better: str) -> Figure:
    cells = {(cell["burst_factor"], cell["staleness"]): cell for cell in found["cells"]}
    steps, bursts = found["staleness"], found["burst_factors"]
    columns = ["synchronous" if value == 0 else str(value) for value in steps]
    rows = ["even" if factor == 1 else f"{factor:g} times" for factor in bursts]
    values = [[cells[factor, value][what] for value in steps] for factor in bursts]
    # The synchronous one may be far from all others, which would then share a colour.
    most = max([0.01, *(abs(cell[what]) for cell in found["cells"] if cell["staleness"] > 0)])
    low, high = ("var(--worse)", "var(--better)") if better == "more" else ("var(--better)", "var(--worse)")
    trace = {
        "type": "heatmap",
        "x": columns,
        "y": rows,
        "z": [rounded(line) for line in values],
        "text": [[signed(value) for value in line] for line in values],
        "texttemplate": "%{text}",
        "textfont": {"color": "var(--ink)", "size": 13},
        "customdata": [
            [
                hover_text(_cell_text(cells[factor, value], row, column))
                for value, column in zip(steps, columns, strict=True)
            ]
            for factor, row in zip(bursts, rows, strict=True)
        ],
        "hovertemplate": "%{customdata}<extra></extra>",
        "zmin": -most,
        "zmax": most,
        "colorscale": [[0, low], [0.5, "var(--card)"], [1, high]],
        "showscale": False,
        "xgap": 2,
        "ygap": 2,
    }
    return Figure(
        name=f"{'staleness-speed' if better == 'more' else 'staleness-tail'}-{scenario.name}",
        title=title,
        traces=[trace],
        layout=layout(
            x=axis("steps between confidences and the budget", type="category", showgrid=False),
            y=axis("rate in bursts", type="category", showgrid=False),
            **marked(scenario),
        ),
        numbers=Grid(
            ("rate in bursts", *columns),
            tuple((row, *map(signed, line)) for row, line in zip(rows, values, strict=True)),
        ),
        note=f"Change against the freshest asynchronous budgets ({steps[1]} step{'' if steps[1] == 1 else 's'}) under "
        "the same traffic; blue is better, orange worse.",
        height=300,
        size="half",
    )


def _cell_text(cell: Body, row: str, column: str) -> str:
    return "\n".join(
        (
            f"{column}{'' if column == 'synchronous' else ' steps stale'}, rate in bursts: {row}",
            f"{short(cell['user_tokens_per_s'])} tokens/s for the median user ({signed(cell['fresh_change'])})",
            f"{short(cell['end_to_end_p95_s'])} s to the last token at p95 ({signed(cell['fresh_p95_change'])})",
            f"{percent(cell['share_in_time'])} in time, {cell['budget']:.2f} verified a round",
        )
    )


def profile_figures(scenario: Scenario) -> list[Figure]:
    """Verification by batch tokens, as measured and as schedulers believe; what believing the other costs."""
    figures = []
    if scenario.profile is not None:
        figures = [
            _curve(scenario, scenario.profile, "rate", "Verification steps a second", "steps a second"),
            _curve(scenario, scenario.profile, "time", "Time of a verification step", "milliseconds"),
        ]
    return figures + ([_believed(scenario)] if scenario.study["believed"] is not None else [])


def _curve(scenario: Scenario, profile: Body, what: str, title: str, unit: str) -> Figure:
    traces, lines = [], []
    for part, label, slot, dash in (("jagged", "as measured", 0, "solid"), ("table", "monotone", 1, "dash")):
        tokens, rates = thinned(profile[part]["sample_batch_tokens"], profile[part]["sample_steps_per_sec"])
        values = rates if what == "rate" else [1000 / rate for rate in rates]
        traces.append({
            "type": "scatter", "mode": "lines" if len(tokens) > 60 else "lines+markers", "name": label,
            "x": list(tokens), "y": rounded(values),
            "line": {"color": f"var(--series-{slot})", "width": 2, "dash": dash, "shape": "hv"},
            "marker": {"color": f"var(--series-{slot})", "size": 5},
            **hovering([f"{label}, {count} tokens: {short(value)} {unit}"
                        for count, value in zip(tokens, values, strict=True)]),
        })  # fmt: skip
        lines += [(f"{label}, {count}", short(value)) for count, value in zip(tokens, values, strict=True)]
    return Figure(
        name=f"profile-{what}-{scenario.name}",
        title=title,
        traces=traces,
        layout=layout(
            x=axis("tokens in the batch, anchors included", rangemode="tozero"),
            y=axis(unit, rangemode="tozero"),
            **marked(scenario),
        ),
        numbers=Grid(("table, tokens", unit), tuple(lines)),
        note=f"A rate holds up to the next point. Shown where it changes, at {MOST_POINTS} points at most.",
        size="half",
    )


def thinned(tokens: Sequence[int], rates: Sequence[float]) -> tuple[list[int], list[float]]:
    """The points where the rate changes and the last one; of more than `MOST_POINTS`, so many, evenly over them."""
    last = len(tokens) - 1
    kept = [place for place in range(len(tokens)) if place in (0, last) or rates[place] != rates[place - 1]]
    if len(kept) > MOST_POINTS:
        kept = [kept[round(step * (len(kept) - 1) / (MOST_POINTS - 1))] for step in range(MOST_POINTS)]
    return [tokens[place] for place in kept], [rates[place] for place in kept]


def _believed(scenario: Scenario) -> Figure:
    rows = [row for row in scenario.study["believed"] if row["table"] == "jagged"]
    loads = sorted({int(row["concurrency"]) for row in rows})
    most = 1.2 * max([0.02, *(abs(row["ratio"] - 1) for row in rows)])
    traces, lines = [], []
    for policy in dict.fromkeys(str(row["policy"]) for row in rows):
        group = [row for row in rows if row["policy"] == policy]
        gains = [row["ratio"] - 1 for row in group]
        hover = [
            f"{scenario.labels[policy]}, {users(row['concurrency'])}: {signed(gain)}"
            for row, gain in zip(group, gains, strict=True)
        ]
        trace = scenario.line(policy, x=[row["concurrency"] for row in group], y=gains, hover=hover)
        traces.append(trace | {"visible": True})
        lines.append((scenario.labels[policy], *map(signed, gains)))
    return Figure(
        name=f"believed-{scenario.name}",
        title="Schedulers that believe in the measured table",
        traces=traces,
        layout=layout(
            x=load_axis(loads), y=axis("tokens/s", tickformat="+.1%", range=[-most, most]), **marked(scenario)
        ),
        numbers=Grid(("policy", *map(users, loads)), tuple(lines)),
        note="Over the same scheduler with the monotone table, on the machine as measured.",
        size="half",
    )
