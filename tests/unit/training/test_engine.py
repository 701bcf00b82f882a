"""Updates under DeepSpeed, in processes of their own, against one backward and one AdamW step of plain PyTorch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftsmith.training.batches import make_block_batch
from draftsmith.training.launch import launch_ranks
from tests.target_fixtures import REPOSITORY
from tests.tiny_models import WEIGHTS, batch_shape, save_tiny
from tests.unit.training.engine_process import LENGTHS, LR, NARROW, ONE_RANK, SIZE, drafter_on, texts

MODULE = "tests.unit.training.engine_process"
Found = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine")
    save_tiny(folder, family="llama", seed=0)
    return folder


@pytest.fixture(scope="module")
def built_once() -> Any:
    """DeepSpeed's compiled part is shared with the program itself, as `make` does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(REPOSITORY / ".torch_extensions"))
        yield


@pytest.fixture(scope="module")
def one_rank(folder: Path, built_once: None) -> Found:
    done = subprocess.run([sys.executable, "-m", MODULE, str(folder)], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "found-1-0.json").read_text())


@pytest.fixture(scope="module")
def two_ranks(folder: Path, built_once: None) -> list[Found]:
    launch_ranks(MODULE, arguments=[str(folder)], num_ranks=2, cwd=REPOSITORY)
    return [json.loads((folder / f"found-2-{rank}.json").read_text()) for rank in (0, 1)]


def plain_update(folder: Path, *, first: int) -> Found:
    """One backward over all samples from `first` on, divided by the sum of weights, and one AdamW step."""
    drafter, row = drafter_on(folder), WEIGHTS["dspark"]
    samples = [(sample, 0) for sample in texts(folder)[first:]]
    batch = make_block_batch(samples, shape=batch_shape(block_size=SIZE), seed=1)
    sums = drafter.losses(batch, weights=row)
    loss = sums.total / sums.weight
    loss.backward()
    gradients = {
        name: value.grad.flatten().double().numpy()
        for name, value in drafter.named_parameters()
        if value.grad is not None
    }
    torch.optim.AdamW(drafter.parameters(), lr=LR, weight_decay=0.0).step()
    assert sums.bce is not None
    means = {
        "loss": loss.detach(),
        "ce": sums.ce / sums.weight,
        "tv": sums.tv / sums.weight,
        "bce": sums.bce / sums.weight,
    }
    slots = sums.slot_number.numpy()
    return {
        **{name: float(value) for name, value in means.items()},
        "acceptance": [float(sums.acceptance.numpy()[slots == k].mean()) for k in range(SIZE)],
        "counts": (batch.num_slots, batch.num_anchors, batch.num_tokens),
        "gradients": gradients,
        "grad_norm": float(np.sqrt(sum((value**2).sum() for value in gradients.values()))),
        "parameters": {name: value.detach().flatten().double().numpy() for name, value in drafter.named_parameters()},
    }


@pytest.fixture(scope="module")
def plain(folder: Path) -> Found:
    return plain_update(folder, first=0)


def check(found: Found, expected: Found) -> None:
    result = found["result"]
    for name in ("loss", "ce", "tv", "bce", "grad_norm"):
        assert result[name] == pytest.approx(expected[name], rel=1e-5), name
    assert result["acceptance"] == pytest.approx(expected["acceptance"], rel=1e-5)
    assert (result["num_slots"], result["num_anchors"], result["num_tokens"]) == expected["counts"]
    for name, value in expected["parameters"].items():
        np.testing.assert_allclose(found["parameters"][name], value, atol=1e-5, err_msg=name)


def check_gradients(parts: list[Found], expected: Found) -> None:
    """The mean over ranks of what autograd handed out, micro-steps summed."""
    for name, value in expected["gradients"].items():
        got = np.mean([part["gradients"][name] for part in parts], axis=0)
        assert np.linalg.norm(got - value) <= 1e-5 * np.linalg.norm(value), name


@pytest.mark.parametrize("name", ONE_RANK)
def test_micro_batches_of_different_sizes_weigh_as_one_batch(name: str, one_rank: Found, plain: Found) -> None:
    """One micro-batch of six, one of four and one of two, six of one: one loss, one gradient, one update."""
    size = ONE_RANK[name][1]
    assert len(one_rank[name]["slots"]) == -(-len(LENGTHS) // size)
    check(one_rank[name], plain)
    # six equal shares: DeepSpeed divides each loss by their number, which the engine has multiplied in
    check_gradients([one_rank[name]], plain)


@pytest.mark.parametrize("name", NARROW)
def test_the_first_update_in_bfloat16_moves_every_weight_by_the_learning_rate(name: str, one_rank: Found) -> None:
    """AdamW's first step is the learning rate in the gradient's direction, up to bfloat16's rounding of weights of
    about 0.25; a step that was counted before (bias corrections of step 2) would make it 0.74 of that."""
    steps = np.concatenate([np.abs(part) for part in one_rank[name].values()])
    assert steps[steps > 0].mean() == pytest.approx(LR, rel=0.05)
    assert (steps > 0).mean() > 0.9


@pytest.mark.parametrize("name", ["zero-2", "plain-2"])
def test_two_ranks_weigh_as_one(name: str, two_ranks: list[Found], plain: Found) -> None:
    """Three samples a rank, in micro-batches of two and one: both ranks end with the update of one."""
    for rank in two_ranks:
        check(rank[name], plain)
    check_gradients([rank[name] for rank in two_ranks], plain)
    assert two_ranks[0][name]["slots"] != two_ranks[1][name]["slots"]


def test_a_rank_without_a_sample_takes_part(two_ranks: list[Found], folder: Path) -> None:
    """One sample for two ranks: the second has an empty micro-batch and makes the same update."""
    expected = plain_update(folder, first=5)
    assert [rank["few"]["slots"] for rank in two_ranks] == [[expected["counts"][0]], [0]]
    for rank in two_ranks:
        check(rank["few"], expected)
    check_gradients([rank["few"] for rank in two_ranks], expected)


def test_errors_name_the_step(one_rank: Found) -> None:
    assert one_rank["errors"] == [
        "no valid anchor in the whole batch of step 7",
        "loss is not finite at step 7: got nan",
    ]


def test_a_resumed_run_goes_on_as_if_never_stopped(one_rank: Found) -> None:
    found = one_rank["resumed"]
    assert found["whole"] == found["parts"]  # to the last bit
    assert found["same"]
    assert found["state"] == {"step": 3, "run_id": "r"}
    assert len(set(found["whole"])) == 5


def test_a_checkpoint_that_is_not_there_is_named(one_rank: Found, folder: Path) -> None:
    assert one_rank["resumed"]["missing"] == f"checkpoint cannot be loaded from {folder}/checkpoints/step-000004"
