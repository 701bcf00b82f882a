"""The two JSON files that SGLang's DSpark reads beside a drafter, checked before a server meets them (METHOD 13).

- STS, `--speculative-dspark-confidence-sts-path`: a temperature for each slot of the block.
- SPS, `--speculative-dspark-sps-table-path`: steps a second by batch tokens.

Read from sgl-project/sglang, python/sglang/srt/speculative/dspark_components: dspark_sts.py (9e16e2d0), dspark_sps.py
(45b76f55), dspark_planner.py (00c3cffa). SGLang decodes both into typed structures and ignores keys that it does not
know. What it takes without a word though it cannot be meant is refused here as well: see `check_sps`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from draftsmith.errors import DraftsmithError
from draftsmith.serving.cost_table import MAXIMUM, PROBES, RATES

TEMPERATURES, ERRORS = "temperatures", ("ece_before", "ece_after")
OTHER_TABLE = "bias_seconds"
"""Where these letters stand anywhere in the file SGLang reads its other, additive table instead."""


def check_sts(body: Mapping[str, Any], *, block_size: int, where: str) -> None:
    """Raises DraftsmithError, naming `where`, for an STS file that SGLang refuses at a block of K = `block_size`.

    That is: no temperatures, one that is not > 0, not one a slot (it compares with its gamma, which is K), or a note
    (`dataset`, `num_samples`, `ece_before`, `ece_after`) of another type. Where a note is given for each slot there
    must be K of them, which SGLang does not look at.
    """
    temperatures = _numbers(body, TEMPERATURES, where)
    if len(temperatures) != block_size:
        raise DraftsmithError(
            "an STS file of another block size", got=f"{len(temperatures)} temperatures", expected=block_size,
            where=where,
        )  # fmt: skip
    _each(temperatures, TEMPERATURES, where)
    for name in ERRORS:
        if name in body and len(_numbers(body, name, where)) not in (0, block_size):
            raise DraftsmithError(
                f"{name} of an STS file", got=len(body[name]), expected=f"0 or {block_size}", where=where
            )
    if not isinstance(body.get("dataset", ""), str):
        raise DraftsmithError("dataset of an STS file", got=repr(body["dataset"]), expected="a text", where=where)
    if not _is_whole(body.get("num_samples", 0)):
        raise DraftsmithError(
            "num_samples of an STS file", got=repr(body["num_samples"]), expected="a whole number", where=where
        )


def check_sps(body: Mapping[str, Any], *, where: str) -> None:
    """Raises DraftsmithError, naming `where`, for an SPS file that SGLang refuses or takes for something else.

    It refuses a missing key, no probe, probes that are not whole or do not strictly increase, not one rate a probe, and
    a `max_batch_tokens` below the last probe. It takes a table of one probe for none at all and then verifies whole
    blocks, reads another table where `bias_seconds` stands in the file, and schedules by rates that are 0 or negative.
    Rates that rise with the tokens it takes as they are; its documentation asks for tables without
    (docs: DSpark SPS cost table, "Handling non-monotone probes"), see `CostTable.monotone`.
    """
    if OTHER_TABLE in str(dict(body)):
        raise DraftsmithError(f"SGLang reads a file with {OTHER_TABLE} in it as its other table", where=where)
    probes, rates = _numbers(body, PROBES, where), _numbers(body, RATES, where)
    if len(probes) != len(rates):
        raise DraftsmithError(
            "an SPS file needs a rate for each probe", got=f"{len(probes)} probes, {len(rates)} rates", where=where
        )
    if len(probes) < 2:
        raise DraftsmithError(
            "SGLang takes a table of so few probes for none", got=len(probes), expected=">= 2", where=where
        )
    unfit = next((value for value in probes if not _is_whole(value) or value < 1), None)
    if unfit is not None:
        raise DraftsmithError(f"{PROBES} of an SPS file", got=unfit, expected="whole numbers >= 1", where=where)
    if sorted(set(probes)) != list(probes):
        raise DraftsmithError(f"{PROBES} of an SPS file", got=list(probes), expected="strictly increasing", where=where)
    _each(rates, RATES, where)
    most = body.get(MAXIMUM)
    if not isinstance(most, int) or isinstance(most, bool) or most < probes[-1]:
        raise DraftsmithError(
            f"{MAXIMUM} of an SPS file", got=repr(most), expected=f"whole, >= {probes[-1]}", where=where
        )


def _numbers(body: Mapping[str, Any], name: str, where: str) -> Sequence[float]:
    values = body.get(name)
    if not isinstance(values, list | tuple) or not all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in values
    ):
        raise DraftsmithError(f"{name} of a sidecar", got=repr(values), expected="a list of numbers", where=where)
    return values


def _each(values: Sequence[float], name: str, where: str) -> None:
    unfit = next((value for value in values if not 0 < value < math.inf), None)
    if unfit is not None:
        raise DraftsmithError(f"{name} of a sidecar", got=unfit, expected="finite, > 0", where=where)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
