"""What calibration reaches on prompts that it was not fitted on: the worst position's ECE, and the order it must keep.

The calibration prompts are answered anew, temperatures are fitted on one part of them, and the other part is measured,
all as params.yaml says. The baseline of an ECE is what a perfectly calibrated predictor with the same confidences, bins
and rounds shows by chance: its 95 % quantile. At one position a perfect calibration fails that in one of twenty runs.
One temperature a position keeps the order of a position's own confidences, so that its ROC-AUC must not move at all.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from rows import write_row

from draftsmith.calibration.collect import RoundArrays, split_rounds
from draftsmith.calibration.ece import roc_auc
from draftsmith.calibration.report import calibration_body
from draftsmith.calibration.sts import confidence, fit_temperatures, temperature_grid
from draftsmith.jobs.calibrate import decode_rounds
from draftsmith.jobs.stores import stored, workspace_store
from draftsmith.manifest import Manifest
from draftsmith.params import load_params
from draftsmith.paths import Workspace
from draftsmith.text.rows import decode_prompts

COMMAND = "make run && .venv/bin/python benchmarks/bench_calibration.py"
KEY = "dspark_b7_2l-smollm2_135m"
LEAST_SLOTS = 20_000
MOST_AUC_CHANGE = 1e-12


def measured(key: str) -> tuple[RoundArrays, dict[str, Any]]:
    """The held-out rounds of a fresh decode, and the body of calibrate.json that they give."""
    workspace = Workspace.find()
    params = load_params(workspace.params)
    row, block_size = params.calibrate, params.drafters[params.run(key).drafter].block_size
    manifest = Manifest.read(workspace.prompts_manifest, "prompts")
    prompts = decode_prompts(stored(workspace_store(workspace), manifest, "calibration.parquet", stage="prompts"))
    split = split_rounds(
        decode_rounds(workspace, params, key, prompts=prompts), block_size=block_size,
        holdout_share=row.holdout_share, min_rounds=row.min_rounds, seed=row.seed,
    )  # fmt: skip
    temperatures = fit_temperatures(
        split.fit.logits, accepted=split.fit.accepted, counted=split.fit.counted,
        grid=temperature_grid(row.grid_low, high=row.grid_high, num_points=row.grid_points), num_bins=row.num_bins,
    )  # fmt: skip
    return split.holdout, calibration_body(split, temperatures=temperatures, num_bins=row.num_bins, seed=row.seed)


def auc_changes(rounds: RoundArrays, temperatures: list[float]) -> list[float]:
    """By position, how far the AUC of its own confidence moves, among rounds whose prefix survived; undefined ones
    are left out."""
    found = []
    for slot, temperature in enumerate(temperatures):
        rows = (rounds.counted > slot) & (rounds.accepted >= slot)
        outcome = rounds.accepted[rows] > slot
        if not 0 < outcome.sum() < len(outcome):
            continue
        before, after = (
            roc_auc(confidence(rounds.logits[rows, slot], temperatures=scale), outcome=outcome)
            for scale in (1.0, temperature)
        )
        assert before is not None
        assert after is not None
        found.append(abs(after - before))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--key", default=KEY)
    options = parser.parse_args()
    rounds, body = measured(options.key)
    errors, chance = (np.array(body[name]) for name in ("ece_after", "null_ece_quantile_95_after"))
    chance = np.maximum(chance, np.finfo(np.float64).tiny)
    worst, num_slots = int(np.argmax(errors / chance)), sum(rounds.num_counted)
    measured_on = f"{options.key}, {num_slots} held-out slots of {rounds.num_prompts} prompts"
    write_row(
        "calibration_worst_position", ours=float(errors[worst]), baseline=float(chance[worst]), unit="ECE",
        bound="< 1.0", command=COMMAND,
        note=f"position {worst + 1} of {rounds.num_slots}; {measured_on}; baseline: 95 % quantile of perfect "
        f"calibration; all positions: {' '.join(f'{ratio:.2f}' for ratio in errors / chance)}",
    )  # fmt: skip
    write_row(
        "calibration_mean", ours=body["mean_ece_after"], baseline=body["null_mean_ece_quantile_95_after"], unit="ECE",
        bound="< 1.0", command=COMMAND,
        note=f"mean over positions, {measured_on}; raw confidences: {body['mean_ece_before']:.4f}; baseline: 95 % "
        f"quantile of perfect calibration",
    )  # fmt: skip
    write_row(
        "calibration_slots", ours=num_slots, baseline=LEAST_SLOTS, unit="slots", bound=">= 1.0", command=COMMAND,
        note=f"what the two errors are measured on; {options.key}; baseline: the least that is allowed",
    )  # fmt: skip
    changes = auc_changes(rounds, body["temperatures"])
    write_row(
        "calibration_auc", ours=max(changes) / MOST_AUC_CHANGE, baseline=1.0, unit="1e-12 of AUC", bound="<= 1.0",
        command=COMMAND,
        note=f"largest change of the AUC of a position's own confidence, {len(changes)} positions where it is defined; "
        f"{measured_on}; baseline: the most that is allowed",
    )  # fmt: skip


if __name__ == "__main__":
    main()
