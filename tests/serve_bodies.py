"""Made-up bodies of serve.json and profile.json: every part that the schema names, values by simple formulas."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

Body = dict[str, Any]
Rates = Mapping[str, Sequence[float]]

STALENESS, BURSTS = (0, 1, 2, 4), (1.0, 4.0, 16.0)
SPREAD = ("mean", "p50", "p90", "p95", "p99")


def policy(
    name: str, kind: str, *, parameter: float | None = None, early_exit: str | None = None, label: str | None = None
) -> Body:
    return {
        "name": name, "label": label or name.replace("_", " "), "kind": kind, "parameter": parameter,
        "early_exit": early_exit,
    }  # fmt: skip


NONE = policy("none", "none", label="no drafter")
FIXED = [policy(f"fixed_{k}", "fixed", parameter=k) for k in (1, 3, 7)]
EXITS = [policy("fixed_7+worth", "fixed", parameter=7, early_exit="worth")]
CONFIDENT = [
    policy("threshold_0.5", "threshold", parameter=0.5),
    policy("sync", "synchronous"),
    policy("async_2", "asynchronous", parameter=2),
    policy("async_2+worth", "asynchronous", parameter=2, early_exit="worth"),
]


def rates_by_formula(policies: Sequence[Body], loads: Sequence[int], *, gain: float) -> dict[str, list[float]]:
    """Plain decoding saturates; policies gain `gain` for one user and less with each doubling, each a bit otherwise."""
    found = {}
    for place, item in enumerate(policies):
        lift = 0.0 if item["kind"] == "none" else gain * (1 + 0.03 * place)
        found[item["name"]] = [
            30 * load / (1 + load / 24) * (1 + lift - 0.12 * math.log2(load) * (lift != 0)) for load in loads
        ]
    return found


def study(
    *,
    key: str = "dspark_b7-toy",
    name: str = "measured",
    kind: str = "dspark",
    confidence: bool = True,
    synthetic: bool = False,
    loads: Sequence[int] = (1, 2, 4, 8, 16),
    gain: float = 0.3,
    rates: Rates | None = None,
    error: float = 0.01,
    as_good: Mapping[int, Sequence[str]] | None = None,
    temperature: float | None = 1.0,
    what_if: Sequence[Body] = (),
    processor: str = "toy processor",
) -> Body:
    """One study. `rates`: tokens a second of each policy by `loads`; those without an entry are left out."""
    policies = [NONE, *FIXED, *(CONFIDENT if confidence else []), *EXITS]
    if rates is None:
        rates = rates_by_formula(policies, loads, gain=gain)
    policies = [dict(item) for item in policies if item["name"] in rates]
    pareto = [_series(item, loads, rates, error) for item in policies]
    body: Body = {
        "schema_version": 1, "key": key, "name": name, "synthetic": synthetic,
        "note": "Made up." if synthetic else "Measured on a toy.",
        "drafter": {"name": key.split("-")[0], "kind": kind, "block_size": 7, "confidence": confidence},
        "machine": {"processor": processor},
        "profile": {"source": f"profile of {processor}", "synthetic": synthetic, "note": "", "max_batch_tokens": 128},
        "rounds": {
            "source": "synthetic" if synthetic else "evaluation", "temperature": temperature, "num_answers": 30,
            "num_rounds": 1200, "accepted_length": 2.5,
            "domains": {"chat": {"share": 1.0, "num_answers": 30, "num_rounds": 1200, "accepted_length": 2.5}},
            "confidence_auc": [0.8] * 7 if confidence else None,
        },
        "temperatures": [1.1] * 7 if confidence else None,
        "limits": {"max_requests": loads[-1], "kv_tokens": None, "prefill_tokens": 4096},
        "workload": {
            "prompt_tokens": {"median": 128, "spread": 0.6, "low": 8, "high": 1024},
            "output_tokens": {"median": 96, "spread": 0.5, "low": 8, "high": 512},
            "mean_output_tokens": 108.3, "domains": {"chat": 1.0},
        },
        "settings": {"seed": 0}, "policies": policies, "believed_table": "monotone", "costs_table": "jagged",
        "pareto": pareto, **_bests(pareto, loads, rates, as_good or {}),
        "anchors": _anchors(pareto, loads), "matched_throughput": _matched(pareto, rates),
        "deadline": {"first_token_s": 1.0, "per_token_s": 0.07, "basis": "0.5 of plain decoding's"},
        "capacity": {"policy": "none", "tokens_per_s": max(rates["none"]), "requests_per_s": 2.0},
        "latencies": [_latency(workload, load, item) for workload, shares in
                      (("poisson", (0.3, 0.9)), ("bursty", (0.6,))) for load in shares for item in policies[:4]],
        "staleness": _staleness() if confidence else None,
        "believed": [{"policy": "sync", "table": table, "concurrency": load, "tokens_per_s": 50.0 * load,
                      "ratio": 1.0 if table == "monotone" else 0.97}
                     for table in ("monotone", "jagged") for load in loads] if "sync" in rates else None,
        "early_exit": {"rows": _exits(policies, loads, rates)},
        "answers": {"staleness": "Staleness costs little." if confidence else None,
                    "early_exit": "Early exit pays.", "policy": "Most tokens a second: see there."},
        "trace": None,
    }  # fmt: skip
    if name == "measured":
        body["what_if"] = list(what_if)
    return body


def _series(item: Body, loads: Sequence[int], rates: Rates, error: float) -> Body:
    plain, own = rates["none"], rates[item["name"]]
    drafts = item["kind"] != "none"
    points = []
    for load, rate, base in zip(loads, own, plain, strict=True):
        points.append({
            "concurrency": load, "tokens_per_s": rate, "tokens_per_s_error": error,
            "user_tokens_per_s": {"mean": rate / load, "p50": rate / load}, "speedup": rate / base,
            "accepted_length": 2.5 if drafts else 1.0,
            "budget": (1 + (item["parameter"] or 4)) if drafts else 1.0,
            "acceptance": 0.4 if drafts else None, "draft_share": 0.2 if drafts else 0.0,
            "drafting_share": 1.0 if drafts else 0.0, "mean_concurrency": float(load), "num_requests": 96 * load,
            "num_rounds": 5000, "on_frontier": False,
        })  # fmt: skip
    return {"policy": item["name"], "points": points}


def _bests(pareto: list[Body], loads: Sequence[int], rates: Rates, as_good: Mapping[int, Sequence[str]]) -> Body:
    points = [(entry["policy"], point) for entry in pareto for point in entry["points"]]

    def speeds(point: Body) -> tuple[float, float]:
        return point["tokens_per_s"], point["user_tokens_per_s"]["p50"]

    frontier = []
    for name, point in points:
        mine = speeds(point)
        beaten = any(a >= mine[0] and b >= mine[1] and (a, b) != mine for _, one in points for a, b in [speeds(one)])
        if not beaten:
            point["on_frontier"] = True
            frontier.append({"policy": name, "concurrency": point["concurrency"], "tokens_per_s": mine[0],
                             "user_tokens_per_s": mine[1]})  # fmt: skip
    best = []
    for place, load in enumerate(loads):
        name = max(rates, key=lambda item: rates[item][place])
        best.append({"concurrency": load, "policy": name, "tokens_per_s": rates[name][place],
                     "speedup": rates[name][place] / rates["none"][place],
                     "as_good": list(as_good.get(load, ()))})  # fmt: skip
    overall = []
    for name, own in rates.items():
        shares = [own[place] / best[place]["tokens_per_s"] for place in range(len(loads))]
        overall.append({"policy": name, "worst_share": min(shares), "concurrency": loads[shares.index(min(shares))]})
    overall.sort(key=lambda row: -row["worst_share"])
    frontier.sort(key=lambda row: row["user_tokens_per_s"])
    return {"frontier": frontier, "best_by_concurrency": best, "overall": overall}


def _anchors(pareto: list[Body], loads: Sequence[int]) -> list[Body]:
    one = pareto[0]["points"][0]["user_tokens_per_s"]["p50"]
    found = []
    for share in (0.5, 1.2):
        rows = []
        for entry in pareto:
            reached = [point for point in entry["points"] if point["user_tokens_per_s"]["p50"] >= share * one]
            last = reached[-1] if reached else None
            rows.append({"policy": entry["policy"], "tokens_per_s": last and last["tokens_per_s"],
                         "concurrency": last and float(last["concurrency"]), "gain": None,
                         "at_limit": bool(last and last["concurrency"] == loads[-1])})  # fmt: skip
        plain = rows[0]["tokens_per_s"]
        for row in rows:
            if plain is not None and row["tokens_per_s"] is not None:
                row["gain"] = row["tokens_per_s"] / plain - 1
        reached = [row for row in rows if row["tokens_per_s"] is not None]
        best = max(reached, key=lambda row: row["tokens_per_s"])["policy"] if reached else None
        found.append({"share": share, "user_tokens_per_s": share * one, "rows": rows, "best": best})
    return found


def _matched(pareto: list[Body], rates: Rates) -> list[Body]:
    rows = [{"policy": entry["policy"], "user_tokens_per_s": 20.0 + place, "gain": place / 20, "at_limit": False}
            for place, entry in enumerate(pareto)]  # fmt: skip
    return [{"share": 0.5, "tokens_per_s": max(rates["none"]) / 2, "rows": rows, "best": rows[-1]["policy"]}]


def _spread(mean: float) -> Body:
    return dict(zip(SPREAD, (mean, mean * 0.9, mean * 1.6, mean * 2, mean * 3), strict=True))


def _latency(workload: str, load: float, item: Body) -> Body:
    return {
        "workload": workload, "load": load, "requests_per_s": 2 * load, "policy": item["name"], "num_requests": 300,
        "tokens_per_s": 200 * load, "tokens_per_busy_s": 230.0, "goodput_requests_per_s": 1.9 * load,
        "goodput_tokens_per_s": 190 * load, "share_in_time": 0.95 - load / 10, "mean_concurrency": 8 * load,
        "overloaded": load > 0.8 and item["kind"] == "none", "ttft_s": _spread(0.2 * load), "tpot_s": _spread(0.03),
        "end_to_end_s": _spread(3 * load + 1), "user_tokens_per_s": _spread(30 / load), "accepted_length": 2.5,
        "budget": 4.2,
    }  # fmt: skip


def _staleness() -> Body:
    cells = [{"burst_factor": burst, "staleness": steps, "user_tokens_per_s": 40 - 0.4 * steps, "end_to_end_p50_s": 2.0,
              "end_to_end_p95_s": 5.0, "share_in_time": 0.9, "budget": 4.0, "accepted_length": 2.5,
              "mean_concurrency": 5.0, "tokens_per_busy_s": 220.0, "change": -0.01 * steps,
              "p95_change": 0.02 * steps * burst / 16, "fresh_change": -0.01 * (steps - 1),
              "fresh_p95_change": 0.02 * (steps - 1) * burst / 16}
             for burst in BURSTS for steps in STALENESS]  # fmt: skip
    return {"load": 0.6, "requests_per_s": 1.2, "burst_share": 0.1, "burst_s": 10.0, "burst_factors": list(BURSTS),
            "staleness": list(STALENESS), "cells": cells}  # fmt: skip


def _exits(policies: Sequence[Body], loads: Sequence[int], rates: Rates) -> list[Body]:
    rows = []
    for item in policies:
        base = item["name"].partition("+")[0]
        if item["early_exit"] is None or base not in rates:
            continue
        for place, load in enumerate(loads):
            own, always, plain = (rates[name][place] for name in (item["name"], base, "none"))
            rows.append({"policy": base, "early_exit": item["early_exit"], "concurrency": load, "tokens_per_s": own,
                         "gain": own / always - 1, "clear": True, "gain_over_none": own / plain - 1,
                         "user_tokens_per_s": own / load, "drafting_share": 0.8,
                         "base_tokens_per_s": always})  # fmt: skip
    return rows


def profile(*, synthetic: bool = False) -> Body:
    """A profile.json as far as curves need it: the rate falls, with one probe that rises."""
    probes = [1, 2, 4, 8, 16, 32, 64, 128]
    measured = [1 / (0.02 + 0.0004 * tokens) for tokens in probes]
    measured[3] = measured[2] * 1.1
    monotone = [min(measured[: place + 1]) for place in range(len(measured))]
    parts = {name: {"sample_batch_tokens": probes, "sample_steps_per_sec": values, "max_batch_tokens": 128}
             for name, values in (("jagged", measured), ("table", monotone))}  # fmt: skip
    return {"schema_version": 1, "key": "dspark_b7-toy", "synthetic": synthetic, "note": "A toy.",
            "machine": {"processor": "toy processor"}, "block_size": 7, **parts}  # fmt: skip
