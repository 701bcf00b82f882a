"""Quality of a short training: the start from the target's layers against a random start, and a reference run.

Both starts train the default DSpark drafter with 150 steps of 6 samples x 24 anchors on the target cache of
`make run`, cut to the supervised tokens of the reference run. The reference figure, 1.361, is of the reference
implementation's modules on other prompts (benchmark prompts), so it is a yardstick and no comparison on equal data.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml
from rows import write_row

from draftsmith.paths import Workspace
from draftsmith.storage import open_store

KEY = "dspark_b7_2l-smollm2_135m"
TARGET = "smollm2_135m"
REFERENCE_EXPECTED_LENGTH = 1.361
REFERENCE_TRAIN_TOKENS = 49_986 * 0.85  # supervised tokens of the reference run's training share
COMMAND = "make run && make bench"


def expected_length(workspace: Workspace, init: str, scratch: Path) -> float:
    """Train in a workspace of its own that shares the store, cache manifest and target; the validation's figure."""
    root = scratch / init
    (root / "data" / "cache").mkdir(parents=True)
    shutil.copy(workspace.cache_manifest(TARGET), root / "data" / "cache")
    (root / "data" / "targets").symlink_to(workspace.data / "targets")
    raw = yaml.safe_load(workspace.params.read_text())
    raw["train"] |= {"steps": 150, "global_batch": 6, "micro_batch": 6, "anchors": 24, "init": init}
    raw["train"]["max_supervised_tokens"] = int(REFERENCE_TRAIN_TOKENS)
    (root / "params.yaml").write_text(yaml.safe_dump(raw))
    environment = {**os.environ, "DRAFTSMITH_STORE": workspace.store_uri}
    command = [sys.executable, "-m", "draftsmith.cli", "train", "--key", KEY]
    subprocess.run(command, cwd=root, env=environment, check=True)
    body = json.loads((root / "reports" / KEY / "train.json").read_text())
    return float(body["expected_accepted_length"])


def main() -> None:
    workspace = Workspace.find()
    store = open_store(workspace.store_uri)
    before = {item.path for item in store.list("train")}
    with tempfile.TemporaryDirectory() as scratch:
        found = {init: expected_length(workspace, init, Path(scratch)) for init in ("target_layers", "random")}
    for item in list(store.list("train")):  # this benchmark's own checkpoints
        if item.path not in before:
            store.delete(item.path)
    write_row(
        "expected_length_against_reference",
        ours=found["target_layers"],
        baseline=REFERENCE_EXPECTED_LENGTH,
        unit="tokens a round, bonus included, held-out answers, temperature 1",
        bound=">= 1.0",
        command=COMMAND,
        note="K = 7, 150 steps of 6 x 24 anchors, as many supervised tokens; the reference run's prompts differ",
    )
    write_row(
        "expected_length_target_start_against_random",
        ours=found["target_layers"],
        baseline=found["random"],
        unit="tokens a round, bonus included, held-out answers, temperature 1",
        bound="> 1.0",
        command=COMMAND,
        note="same data, steps and seed; only train.init differs",
    )


if __name__ == "__main__":
    main()
