"""Draft layers with a window shorter than the context and than a block: every kind, family and variant of target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.targets.families import FAMILIES
from tests.contract.drafter_case import Case, check_losses, drafted_step_by_step, expected_losses
from tests.tiny_models import KINDS, VARIANTS, reference, tiny_drafter, tiny_folders, variant_folders

__all__ = ["tiny_folders", "variant_folders"]

WINDOW = 2
"""Shorter than the contexts and than a block, so that a late slot or step no longer sees the first."""


@pytest.fixture(scope="module")
def models(tiny_folders: dict[str, Path], variant_folders: dict[str, Path]) -> dict[str, tuple[Path, Any]]:
    """Make of target -> its folder and Hugging Face's model of it."""
    return {name: (folder, reference(folder)) for name, folder in {**tiny_folders, **variant_folders}.items()}


def check(case: Case) -> None:
    """Every anchor of two samples, drafted one after the other on rows that are never rebuilt: the training form."""
    samples = [case.sample(17, seed=1, supervised="00011111110011111"), case.sample(12, seed=2)]
    with torch.no_grad():
        found = case.losses(case.batch(*samples))
        packed = case.losses(case.batch(*samples, row_tokens=40))
    check_losses(found, expected_losses(case, drafted_step_by_step(case, samples)))
    torch.testing.assert_close(packed.acceptance, found.acceptance, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_training_is_decoding_within_a_window(kind: str, family: str, models: dict[str, tuple[Path, Any]]) -> None:
    folder, model = models[family]
    layers = 1 if kind.startswith(("eagle3", "mtp1")) else 2
    check(Case(kind, folder, model, tiny_drafter(kind, folder, seed=7, windows=(WINDOW,) * layers)))


@pytest.mark.parametrize("make", VARIANTS)
@pytest.mark.parametrize("kind", ["dspark", "eagle3", "mtp1"])
def test_training_is_decoding_on_every_variant_of_target(
    kind: str, make: str, models: dict[str, tuple[Path, Any]]
) -> None:
    """Draft layers of different windows, one of them without."""
    folder, model = models[make]
    windows = (None,) if kind.startswith(("eagle3", "mtp1")) else (None, 3)
    check(Case(kind, folder, model, tiny_drafter(kind, folder, seed=7, windows=windows)))
