"""Every drafter kind on every target family keeps the target's law, exactly: a sum over all drafts and acceptances.

The target's own probabilities are those of Hugging Face's model in float64.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftsmith.decoding.policies import LengthPolicy, verify_all
from draftsmith.drafters.registry import build_drafter, drafter_config
from draftsmith.params import Sampling
from draftsmith.serving.cost_table import CostTable
from draftsmith.serving.policies import (
    AsynchronousPolicy,
    FixedLength,
    NoSpeculation,
    StaticThreshold,
    SynchronousPolicy,
)
from draftsmith.targets.families import FAMILIES
from tests.tiny_models import KINDS, drafter_row, randomize, reference, save_tiny, target_row, tiny_target
from tests.unit.decoding import biases
from tests.unit.decoding.exact import CLOSE, RoundLaw, World, round_laws
from tests.unit.decoding.laws import Floats
from tests.unit.decoding.toys import Text

VOCAB, SIZE, PROMPT, CAPTURED = 3, 3, (1, 0, 2), (0, 1)
COSTS = CostTable([1, 2, 3, 4, 6, 8], steps_per_s=[1.0, 0.95, 0.75, 0.7, 0.62, 0.5])
OTHERS = ((0.9, 0.7, 0.6), (0.8, 0.3, 0.9))
Policies = tuple[Callable[[], LengthPolicy], ...]
SYNCHRONOUS, ASYNCHRONOUS = (lambda: SynchronousPolicy(COSTS)), (lambda: AsynchronousPolicy(COSTS))
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.3),
    Sampling(temperature=1.7, top_k=2),
    Sampling(temperature=0.0),
    Sampling(temperature=0.8, top_p=0.9, min_p=0.25),
)
BY_CONFIDENCE: Policies = (SYNCHRONOUS, ASYNCHRONOUS, lambda: StaticThreshold(0.5), SYNCHRONOUS, ASYNCHRONOUS)
BY_NUMBER: Policies = (
    lambda: verify_all,
    lambda: FixedLength(1),
    lambda: verify_all,
    lambda: verify_all,
    NoSpeculation,
)
"""Each with the sampling at its place."""


@dataclass(frozen=True)
class Small:
    """A target with a vocabulary of 3: its folder, and Hugging Face's model of it in float64."""

    folder: Path
    model: Any

    def logits_after(self, text: Text, size: int) -> list[Floats]:
        """As `exact.LogitsAfter`: one row for every text of `size` more tokens holds those of its beginnings."""
        more = np.array(list(itertools.product(range(VOCAB), repeat=size)))
        ids = np.concatenate([np.tile(text, (len(more), 1)), more], axis=1)
        with torch.inference_mode():
            logits = self.model(torch.from_numpy(ids)).logits[:, -size - 1 :].numpy()
        return [logits[:: VOCAB ** (size - d), d] for d in range(size + 1)]


@pytest.fixture(scope="module")
def small_targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Small]:
    """Family -> its small target, sliding layers among its three where the family has them."""
    found = {}
    for family in FAMILIES:
        layers = {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}
        folder = save_tiny(
            tmp_path_factory.mktemp(family), family=family, seed=3, std=0.2, vocab_size=VOCAB, num_hidden_layers=3,
            eos_token_id=2, **(layers if family == "gemma4" else {}),
        )  # fmt: skip
        found[family] = Small(folder, reference(folder, dtype=torch.float64))
    return found


def small_drafter(kind: str, folder: Path) -> Any:
    row = target_row(folder, capture_layers=CAPTURED, vocab_size=VOCAB, num_layers=3, mask_token_id=2)
    size = 1 if kind == "mtp1" else SIZE
    config = drafter_config(
        drafter_row(kind, block_size=size, head_norms=folder.name != "llama", layers=1), target=row,
        target_folder=folder,
    )  # fmt: skip
    drafter = build_drafter(config, target_folder=folder)
    randomize(drafter, seed=8, std=0.4)
    return drafter.eval().requires_grad_(False)


def laws(kind: str, small: Small, *, rounds_before: int) -> dict[str, RoundLaw]:
    """All samplings in one batch, with lengths of different policies; without a confidence head they are fixed."""
    drafter = small_drafter(kind, small.folder)
    policies = BY_CONFIDENCE if drafter.config.confidence else BY_NUMBER
    worlds = [
        World(str(sampling), sampling, seed, policy, OTHERS)
        for seed, (sampling, policy) in enumerate(zip(SAMPLINGS, policies, strict=True))
    ]
    target = tiny_target(small.folder, capture_layers=CAPTURED)
    return round_laws(
        target, drafter=drafter, worlds=worlds, prompt=PROMPT, rounds_before=rounds_before,
        logits_after=small.logits_after,
    )  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_random_drafter_keeps_the_law(kind: str, family: str, small_targets: dict[str, Small]) -> None:
    """At once, and after two rounds of each world's own."""
    accepted, verified = set[int](), set[int]()
    for rounds_before in (0, 2):
        found = laws(kind, small_targets[family], rounds_before=rounds_before)
        assert {name: law.distance for name, law in found.items() if not law.distance < CLOSE} == {}
        for law in found.values():
            accepted, verified = accepted | law.accepted, verified | law.verified
    assert accepted == set(range(2 if kind == "mtp1" else SIZE + 1))
    assert len(verified) > 1


@pytest.mark.parametrize("bias", ["accept always", "no residual", "misquoted draft"])
def test_a_bias_is_far_from_the_law(
    bias: str, small_targets: dict[str, Small], monkeypatch: pytest.MonkeyPatch
) -> None:
    biases.OF_VERIFICATION[bias](monkeypatch)
    found = laws("dflash", small_targets["llama"], rounds_before=1)
    assert found[str(Sampling())].distance > 1e-2
    assert found[str(Sampling(temperature=0.0))].distance < CLOSE
