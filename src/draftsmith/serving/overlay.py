"""Drafters of several serving studies side by side: the frontier of each, and what each reaches at promised speeds.

Only studies of like settings share a figure: the same scenario, target, machine, temperature, requests and limits.
Others form groups of their own, and what keeps the groups apart is told.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from draftsmith.errors import DraftsmithError
from draftsmith.evaluation.grid import Grid, markdown, percent
from draftsmith.serving.page_model import SCHEMA_VERSION, short, signed, users
from draftsmith.serving.page_tables import OUT_OF_REACH, told
from draftsmith.serving.pareto import LoadPoint, Reached, pareto_front, throughput_at

Body = Mapping[str, Any]

OVERLAY_VERSION = 1
PLAIN = "none"
NO_DRAFTER = "no drafter"
SAME_PLAIN = 1e-6
"""Relative difference below which plain decoding of two keys is drawn once."""
UNEQUAL_PLAIN = 0.05
"""Relative difference above which it is told that plain decoding itself differs between keys."""
DECIDING = ("scenario", "target", "machine", "profile", "temperature", "requests", "limits")
"""Settings that must be alike."""
TELLING = ("rounds", "loads", "seed")
"""Settings that are told where they differ, though drafters stay side by side."""


def overlay(bodies: Sequence[Body], *, targets: Mapping[str, str]) -> dict[str, Any]:
    """Bodies of serve.json, one a key, with their what-ifs, in groups of like settings; `targets` by key.

    Raises DraftsmithError if there are none, one is of another schema version, or a key comes twice.
    """
    if not bodies:
        raise DraftsmithError("no serving study to show", expected="at least one serve.json")
    for body in bodies:
        if body.get("schema_version") != SCHEMA_VERSION:
            raise DraftsmithError(
                "serve.json is of another schema version",
                got=body.get("schema_version"),
                expected=f"{SCHEMA_VERSION}; run the serve stage again",
                where=f"serve.json of {body.get('key', 'an unnamed key')}",
            )
    keys = [str(body["key"]) for body in bodies]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise DraftsmithError("a key is to be shown twice", got=twice)
    studies = [study for body in bodies for study in (body, *body["what_if"])]
    facts = [_facts(study, targets[str(study["key"])]) for study in studies]
    groups: dict[str, list[int]] = {}
    for place, found in enumerate(facts):
        groups.setdefault(json.dumps([found[name] for name in DECIDING], sort_keys=True), []).append(place)
    # Measured before made up, larger before smaller; otherwise as the keys come.
    order = sorted(groups.values(), key=lambda group: (studies[group[0]]["synthetic"], -len(group)))
    made = [_group([studies[place] for place in group], [facts[place] for place in group]) for group in order]
    return {
        "schema_version": OVERLAY_VERSION,
        "keys": keys,
        "differences": _apart(made, synthetic=False) + _apart(made, synthetic=True),
        "groups": made,
    }


def _facts(study: Body, target: str) -> dict[str, str]:
    work, rounds = study["workload"], study["rounds"]
    laws = (f"{name.replace('_', ' ')} {told(work[name])}" for name in ("prompt_tokens", "output_tokens"))
    domains = ", ".join(f"{name} {percent(share)}" for name, share in sorted(work["domains"].items()))
    limits = {name: value for name, value in study["limits"].items() if name != "max_requests"}
    # The file of a profile carries its key; what it was made of, its machine, is what must agree.
    source = "measured on the machine" if study["name"] == "measured" else str(study["profile"]["source"])
    return {
        "scenario": str(study["name"]),
        "target": target,
        "machine": told(study["machine"]),
        "profile": f"{source}{', synthetic' if study['profile']['synthetic'] else ''}",
        "temperature": "drawn rounds" if rounds["temperature"] is None else f"{rounds['temperature']:g}",
        "requests": f"{'; '.join(laws)}; {domains}",
        "limits": told(limits),
        "rounds": f"{rounds['source']}, "
        + ", ".join(f"{name} {item['num_answers']} answers" for name, item in sorted(rounds["domains"].items())),
        "loads": f"up to {users(study['limits']['max_requests'])}",
        "seed": str(study["settings"]["seed"]),
    }


def _apart(groups: Sequence[Body], *, synthetic: bool) -> list[dict[str, Any]]:
    """The settings in which groups differ, and each one's value; measured and made-up ones each among themselves."""
    kept = [(number, group) for number, group in enumerate(groups, start=1) if group["synthetic"] == synthetic]
    found = []
    for name in DECIDING:
        values = {number: group["settings"][name] for number, group in kept}
        if len(set(values.values())) > 1 and name != "scenario":
            found.append({"setting": name, "values": [{"group": number, "value": values[number]} for number in values]})
    return found


def _group(studies: Sequence[Body], facts: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """Drafters that may be compared."""
    names = [str(study["drafter"]["name"]) for study in studies]
    labels = names if len(set(names)) == len(names) else [str(study["key"]) for study in studies]
    series = [
        {
            "label": label,
            "key": study["key"],
            "kind": study["drafter"]["kind"],
            "block_size": study["drafter"]["block_size"],
            "accepted_length": study["rounds"]["accepted_length"],
            "points": _frontier(study),
        }
        for label, study in zip(labels, studies, strict=True)
    ]
    plain = _plain(studies, labels)
    return {
        "scenario": facts[0]["scenario"],
        "synthetic": any(bool(study["synthetic"]) for study in studies),
        "notes": list(dict.fromkeys(str(study["note"]) for study in studies)),
        "settings": {name: facts[0][name] for name in DECIDING},
        "unlike": [
            {"setting": name, "values": [{"label": label, "value": item[name]}
                                         for label, item in zip(labels, facts, strict=True)]}
            for name in TELLING if len({item[name] for item in facts}) > 1
        ],
        "plain_spread": _plain_spread(studies),
        "plain": plain,
        "series": series,
        "anchors": _anchors(studies, labels),
    }  # fmt: skip


def _load_points(points: Sequence[Body]) -> list[LoadPoint]:
    return [
        LoadPoint(point["concurrency"], point["tokens_per_s"], point["user_tokens_per_s"]["p50"]) for point in points
    ]


def _frontier(study: Body) -> list[dict[str, Any]]:
    """Points of the drafter that no other of its policies beats in both; plain decoding is no policy of a drafter."""
    labels = {item["name"]: item["label"] for item in study["policies"]}
    found = [(entry["policy"], point) for entry in study["pareto"] if entry["policy"] != PLAIN
             for point in entry["points"]]  # fmt: skip
    front = pareto_front(_load_points([point for _, point in found]))
    return [_point(found[at][1]) | {"policy": labels[found[at][0]]} for at in front]


def _point(point: Body) -> dict[str, Any]:
    names = ("concurrency", "tokens_per_s", "speedup", "accepted_length", "budget", "acceptance")
    return {name: point[name] for name in names} | {"user_tokens_per_s": point["user_tokens_per_s"]["p50"]}


def _plain_points(study: Body) -> Sequence[Body]:
    points: Sequence[Body] = next(entry["points"] for entry in study["pareto"] if entry["policy"] == PLAIN)
    return points


def _plain(studies: Sequence[Body], labels: Sequence[str]) -> list[dict[str, Any]]:
    """Plain decoding, once if all keys have the same."""
    if _plain_spread(studies) <= SAME_PLAIN:
        return [{"label": NO_DRAFTER, "points": [_point(point) for point in _plain_points(studies[0])]}]
    return [
        {"label": f"{NO_DRAFTER} (run of {label})", "points": [_point(point) for point in _plain_points(study)]}
        for label, study in zip(labels, studies, strict=True)
    ]


def _plain_spread(studies: Sequence[Body]) -> float:
    """How far plain decoding differs between keys at a load that all have, at most: largest over smallest, less 1."""
    rates = [{point["concurrency"]: point["tokens_per_s"] for point in _plain_points(study)} for study in studies]
    shared = set.intersection(*map(set, rates))
    return max((max(found) / min(found) - 1 for load in shared for found in [[rate[load] for rate in rates]]),
               default=math.inf)  # fmt: skip


def _anchors(studies: Sequence[Body], labels: Sequence[str]) -> list[dict[str, Any]]:
    """Each drafter's best policy at speeds that are the same for all: shares of the median of plain decoding's."""
    one_user = median(_plain_points(study)[0]["user_tokens_per_s"]["p50"] for study in studies)
    wanted = {(anchor["share"], None if anchor["share"] is not None else anchor["user_tokens_per_s"])
              for study in studies for anchor in study["anchors"]}  # fmt: skip
    speeds = sorted(((float(speed or share * one_user), share) for share, speed in wanted), key=lambda item: item[0])
    return [_anchor(studies, labels, speed=speed, share=share) for speed, share in speeds]


def _anchor(studies: Sequence[Body], labels: Sequence[str], *, speed: float, share: float | None) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for label, study in zip(labels, studies, strict=True):
        named = {item["name"]: item["label"] for item in study["policies"]}
        reached = {
            entry["policy"]: throughput_at(_load_points(entry["points"]), user_tokens_per_s=speed)
            for entry in study["pareto"]
        }
        plain = reached.pop(PLAIN)
        best = max(reached, key=lambda name: _value(reached[name]))
        item = reached[best]
        rows.append({
            "label": label,
            "policy": None if item is None else named[best],
            "tokens_per_s": None if item is None else item.value,
            "concurrency": None if item is None else item.concurrency,
            "at_limit": item is not None and item.at_limit,
            "plain_tokens_per_s": None if plain is None else plain.value,
            "gain": None if item is None or plain is None else item.value / plain.value - 1,
        })  # fmt: skip
    # Plain decoding first: a drafter must have more than it.
    found = [(row["plain_tokens_per_s"], NO_DRAFTER) for row in rows] + [
        (row["tokens_per_s"], row["label"]) for row in rows
    ]
    known = [(rate, label) for rate, label in found if rate is not None]
    best_label = max(known, key=lambda item: item[0])[1] if known else None
    return {"share": share, "user_tokens_per_s": speed, "rows": rows, "best": best_label}


def _value(item: Reached | None) -> float:
    return -math.inf if item is None else item.value


def overlay_notices(body: Body) -> list[tuple[str, str]]:
    """Title and text of everything that makes a comparison mean less than it seems to."""
    found = []
    for item in body["differences"]:
        values = "; ".join(f"group {part['group']}: {part['value']}" for part in item["values"])
        found.append(("Not comparable.", f"Groups differ in {item['setting']}, so no figure holds both ({values})."))
    for number, group in enumerate(body["groups"], start=1):
        for item in group["unlike"]:
            values = "; ".join(f"{part['label']}: {part['value']}" for part in item["values"])
            found.append(("Not quite alike.", f"Group {number}: keys differ in {item['setting']} ({values})."))
        if len(group["series"]) > 1 and group["plain_spread"] > UNEQUAL_PLAIN:
            found.append(("Machines in different states.", f"Group {number}: plain decoding alone differs by up to "
                          f"{percent(group['plain_spread'])} between the keys' profiles; trust the gains over each "
                          "key's own plain decoding more than rates side by side."))  # fmt: skip
    return found


def group_title(number: int, group: Body) -> str:
    """`Group 1: measured`."""
    return f"Group {number}: {group['scenario']}{' (synthetic)' if group['synthetic'] else ''}"


def anchors_grid(group: Body) -> Grid:
    """What each drafter reaches at promised speeds, by its best policy there."""
    anchors = group["anchors"]
    rows = []
    for place, item in enumerate(group["series"]):
        cells = [_cell(anchor["rows"][place], best=anchor["best"] == item["label"]) for anchor in anchors]
        length = f"{item['accepted_length']:.2f}"
        rows.append((f"{item['label']} ({item['kind']}, K {item['block_size']})", length, *cells))
    rows += [
        (item["label"], "1.00", *(_plain_cell(anchor, place) for anchor in anchors))
        for place, item in enumerate(group["plain"])
    ]
    heads = [f"{short(anchor['user_tokens_per_s'])} tokens/s a user" for anchor in anchors]
    return Grid(("drafter", "accepted length, whole blocks", *heads), tuple(rows))


def _plain_cell(anchor: Body, place: int) -> str:
    rates = [row["plain_tokens_per_s"] for row in anchor["rows"]]
    if rates[place] is None:
        return OUT_OF_REACH
    best = anchor["best"] == NO_DRAFTER and rates[place] == max(rate for rate in rates if rate is not None)
    return short(rates[place]) + (" (best)" if best else "")


def _cell(row: Body, *, best: bool) -> str:
    if row["tokens_per_s"] is None:
        return OUT_OF_REACH
    least = ">= " if row["at_limit"] else ""
    text = f"{least}{short(row['tokens_per_s'])}, {users(row['concurrency'])}, {signed(row['gain'])}: {row['policy']}"
    return f"{text} (best)" if best else text


def overlay_markdown(body: Body) -> str:
    """reports/serving.md."""
    lines = ["# Serving: drafters side by side", ""]
    lines += [f"- **{title}** {text}" for title, text in overlay_notices(body)]
    for number, group in enumerate(body["groups"], start=1):
        lines += ["", f"## {group_title(number, group)}", ""]
        if group["synthetic"]:
            lines += ["**SYNTHETIC: nothing in this group was measured.**", ""]
        lines += [*group["notes"], ""]
        lines += [f"- {name}: {value}" for name, value in group["settings"].items()]
        lines += ["", "Tokens a second of all users while the median user gets a speed, by each drafter's best policy; "
                  "gains over plain decoding of the same key.", "", markdown(anchors_grid(group))]  # fmt: skip
    return "\n".join(lines).rstrip("\n") + "\n"
