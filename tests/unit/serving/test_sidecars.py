"""SGLang's two sidecars: what it refuses, and what it would silently misread."""

from __future__ import annotations

import json
from typing import Any

import pytest

from draftsmith.errors import DraftsmithError
from draftsmith.serving.cost_table import CostTable
from draftsmith.serving.sidecars import check_sps, check_sts

STS: dict[str, Any] = {
    "temperatures": [1.1, 0.9, 5.0],
    "dataset": "prompts 0123",
    "num_samples": 2320,
    "ece_before": [0.1, 0.2, 0.3],
    "ece_after": [0.01, 0.02, 0.03],
}
SPS: dict[str, Any] = {
    "sample_batch_tokens": [8, 16, 32, 64],
    "sample_steps_per_sec": [1000.0, 950.0, 500.0, 480],
    "max_batch_tokens": 128,
}


def test_good_files_pass_also_with_keys_that_sglang_does_not_know() -> None:
    check_sts(STS, block_size=3, where="sts.json")
    check_sts({"temperatures": [1.0]}, block_size=1, where="sts.json")
    check_sts(STS | {"ece_before": [], "more": None}, block_size=3, where="sts.json")
    check_sps(SPS | {"note": "x"}, where="sps.json")
    check_sps(SPS | {"max_batch_tokens": 64}, where="sps.json")


def test_a_cost_table_writes_what_passes() -> None:
    body = CostTable([1, 2, 9], steps_per_s=[30.0, 31.0, 10.0]).to_sidecar()
    check_sps(json.loads(json.dumps(body)), where="sps.json")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"temperatures": [1.0, 2.0]}, "another block size: got 2 temperatures, expected 3 (here)"),
        ({"temperatures": []}, "got 0 temperatures"),
        ({"temperatures": None}, "temperatures of a sidecar: got None, expected a list of numbers (here)"),
        ({"temperatures": [1.0, "2", 1.0]}, "a list of numbers"),
        ({"temperatures": [1.0, True, 1.0]}, "a list of numbers"),
        ({"temperatures": [1.0, 0.0, 1.0]}, "got 0.0, expected finite, > 0"),
        ({"temperatures": [1.0, -2, 1.0]}, "got -2, expected finite, > 0"),
        ({"temperatures": [1.0, float("nan"), 1.0]}, "got nan"),
        ({"temperatures": [1.0, float("inf"), 1.0]}, "got inf"),
        ({"ece_after": [0.1]}, "ece_after of an STS file: got 1, expected 0 or 3"),
        ({"ece_before": [0.1, None, 0.2]}, "ece_before of a sidecar"),
        ({"dataset": None}, "dataset of an STS file: got None, expected a text"),
        ({"num_samples": 1.5}, "num_samples of an STS file: got 1.5, expected a whole number"),
    ],
)
def test_sts_that_is_refused(change: dict[str, Any], told: str) -> None:
    with pytest.raises(DraftsmithError) as raised:
        check_sts(STS | change, block_size=3, where="here")
    assert told in str(raised.value)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"sample_batch_tokens": [8, 8, 16, 32]}, "strictly increasing (here)"),
        ({"sample_batch_tokens": [16, 8, 32, 64]}, "strictly increasing"),
        ({"sample_batch_tokens": [0, 8, 16, 32]}, "got 0, expected whole numbers >= 1"),
        ({"sample_batch_tokens": [8.5, 16, 32, 64]}, "got 8.5, expected whole numbers"),
        ({"sample_batch_tokens": "8"}, "a list of numbers"),
        ({"sample_steps_per_sec": [1.0]}, "got 4 probes, 1 rates"),
        ({"sample_steps_per_sec": [1.0, 2.0, 0.0, 1.0]}, "got 0.0, expected finite, > 0"),
        ({"sample_steps_per_sec": [1.0, 2.0, -1.0, 1.0]}, "got -1.0"),
        ({"max_batch_tokens": 63}, "max_batch_tokens of an SPS file: got 63, expected whole, >= 64"),
        ({"max_batch_tokens": 64.0}, "got 64.0"),
        ({"max_batch_tokens": None}, "got None"),
        ({"sample_batch_tokens": [1], "sample_steps_per_sec": [1.0]}, "for none: got 1, expected >= 2"),
        ({"sample_batch_tokens": [], "sample_steps_per_sec": []}, "for none: got 0"),
        ({"note": "no bias_seconds here"}, "reads a file with bias_seconds in it as its other table (here)"),
    ],
)
def test_sps_that_is_refused(change: dict[str, Any], told: str) -> None:
    with pytest.raises(DraftsmithError) as raised:
        check_sps(SPS | change, where="here")
    assert told in str(raised.value)


def test_a_missing_key_is_named() -> None:
    for name in SPS:
        with pytest.raises(DraftsmithError, match=name):
            check_sps({key: value for key, value in SPS.items() if key != name}, where="here")
