"""What a serving study comes to, in sentences that its numbers decide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from draftsmith.serving.page_model import MEASURED, short, signed, users

Body = Mapping[str, Any]
PLAIN = "none"


def headline(study: Body) -> list[str]:
    """First whether speculation pays here, then the rest; plain text."""
    labels = {item["name"]: f'"{item["label"]}"' for item in study["policies"]}
    told = [_against_plain(study, labels), *_anchors(study, labels)]
    return [*told, str(study["answers"]["policy"])]


def _against_plain(study: Body, labels: Mapping[str, str]) -> str:
    """Where a policy clearly beats plain decoding: the best is another, and plain decoding not as good."""
    where = "On this machine" if study["name"] == MEASURED else f'On the machine of profile "{study["name"]}"'
    where = "In this made-up setting" if study["synthetic"] else where
    best = study["best_by_concurrency"]
    ahead = [row for row in best if row["policy"] != PLAIN and PLAIN not in row["as_good"]]
    if not ahead:
        return f"{where} no policy beats plain decoding at any load studied ({_range(best)})."
    gains = [row["speedup"] - 1 for row in ahead]
    top = max(ahead, key=lambda row: row["speedup"])
    gain = (
        f"the most by {labels[top['policy']]} at {users(top['concurrency'])}, {signed(top['speedup'] - 1)}"
        if len(gains) > 1
        else f"by {labels[top['policy']]}, {signed(gains[0])}"
    )
    if len(ahead) == len(best):
        return f"{where} speculation beats plain decoding at every load studied ({_range(best)}), {gain}."
    last = max(row["concurrency"] for row in ahead)
    above = [row for row in best if row["concurrency"] > last]
    if len(above) + len(ahead) == len(best):
        return f"{where} no policy beats plain decoding above {users(last)}; up to there speculation does, {gain}."
    at = ", ".join(str(row["concurrency"]) for row in ahead)
    return f"{where} speculation beats plain decoding at some loads only ({at} users), {gain}."


def _anchors(study: Body, labels: Mapping[str, str]) -> list[str]:
    """The best policy where users must get a given speed."""
    told = []
    for anchor in study["anchors"]:
        speed = f"{short(anchor['user_tokens_per_s'])} tokens/s a user"
        if anchor["best"] is None:
            told.append(f"No policy gives users {speed} at any load studied.")
            continue
        row = next(row for row in anchor["rows"] if row["policy"] == anchor["best"])
        least = "at least " if row["at_limit"] else ""
        gain = "" if anchor["best"] == PLAIN else _over_plain(row)
        told.append(
            f"Where users must get {speed}, {labels[anchor['best']]} serves the most: "
            f"{least}{short(row['tokens_per_s'])} tokens/s to {users(row['concurrency'])}{gain}."
        )
    return told


def _over_plain(row: Body) -> str:
    if row["gain"] is None:
        return ", and plain decoding cannot give it"
    return f", {signed(row['gain'])} over plain decoding"


def _range(rows: Sequence[Body]) -> str:
    loads = [row["concurrency"] for row in rows]
    return f"{loads[0]} to {users(loads[-1])}" if len(loads) > 1 else users(loads[0])
