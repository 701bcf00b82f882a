"""`draftsmith cache fidelity`: what each codec changes, measured on a tiny line; and the divergence against a loop."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from draftsmith.jobs.fidelity import logit_kl, markdown
from draftsmith.targets.base import SharedWeights
from tests.line_fixtures import DSPARK, TARGET, Line, line, prepared_line, tiny_target
from tests.unit.cache.toy import bf16_bits

__all__ = ["line", "prepared_line", "tiny_target"]


def test_states_of_the_tiny_line(line: Line) -> None:
    printed = line.run("cache", "fidelity", "--key", DSPARK, "--states-only").stdout
    body = json.loads((line.root / "reports" / f"fidelity-{TARGET}.json").read_text())
    assert body["trained"] is None
    states = body["states"]
    assert states["layers"] == [0, 2]
    for codec in ("plain", "bf16"):
        for array in states["codecs"][codec].values():
            assert array["identical"]
            assert set(array["relative_error"]) == {0.0}
    assert states["codecs"]["bf16"]["last_hidden"]["logit_kl"]["largest"] == 0.0
    int8 = states["codecs"]["int8"]
    for array in int8.values():
        assert not array["identical"]
        assert all(0.001 < error < 0.02 for error in array["relative_error"])
    assert 0 < int8["last_hidden"]["logit_kl"]["mean"] < 0.01
    assert "| bf16 |" in printed
    assert "0 (bit for bit)" in printed
    assert (line.root / "reports" / f"fidelity-{TARGET}.md").read_text().strip() == printed.strip()


def test_divergence_by_a_loop() -> None:
    draw = np.random.default_rng(0)
    exact, other = (bf16_bits(draw.standard_normal((5, 8))) for _ in range(2))
    head = torch.from_numpy(draw.standard_normal((11, 8)).astype(np.float32))
    found = logit_kl(exact, other, shared=SharedWeights(head, head, 1.0, None))
    rows = []
    for row in range(5):
        p, q = (
            np.exp(head.numpy().astype(np.float64) @ (bits[row].astype(np.uint32) << 16).view(np.float32).astype(float))
            for bits in (exact, other)
        )
        p, q = p / p.sum(), q / q.sum()
        rows.append(sum(float(a) * math.log(a / b) for a, b in zip(p, q, strict=True)))
    assert found["mean"] == pytest.approx(sum(rows) / 5, rel=1e-5)
    assert found["largest"] == pytest.approx(max(rows), rel=1e-5)
    assert logit_kl(exact, exact, shared=SharedWeights(head, head, 1.0, None)) == {"mean": 0.0, "largest": 0.0}


def test_the_page_says_whether_drafters_are_equal() -> None:
    array = {"ratio": 1.5, "identical": True, "relative_error": [0.0], "logit_kl": {"mean": 0.0}}
    row = {
        "stored_bytes": 2_000_000, "accepted_length": 1.5, "accepted_length_interval": [1.4, 1.6], "difference": 0.0,
        "difference_interval": [0.0, 0.0], "weights_identical": True,
    }  # fmt: skip
    lossy = {**row, "difference": -0.012, "difference_interval": [-0.03, 0.01], "weights_identical": False}
    states = {
        "num_tokens": 9, "num_samples": 2, "layers": [3],
        "codecs": {"plain": {"context": array, "last_hidden": array}},
    }  # fmt: skip
    trained = {"temperature": 1.0, "steps": 4, "codecs": {"plain": row, "int8": lossy}}
    body = {"target": "tiny", "key": "k", "machine": "m", "states": states, "trained": trained}
    lines = markdown(body).splitlines()
    assert "| plain | 1.500 | 0 (bit for bit) | 0 (bit for bit) | 0 |" in lines
    assert "| plain | 2 MB | 1.500 [1.400, 1.600] | +0.000 [0.000, 0.000] | identical to plain's |" in lines
    assert "| int8 | 2 MB | 1.500 [1.400, 1.600] | -0.012 [-0.030, 0.010] | differ from plain's |" in lines
