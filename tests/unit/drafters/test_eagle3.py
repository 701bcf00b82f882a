"""EAGLE-3's layer is the family's own over [norm(embedding) ; norm(feature)]: Hugging Face's layer, so arranged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.drafters.eagle3 import Eagle3
from draftsmith.nn.block import BlockBatch
from draftsmith.training.batches import make_block_batch
from tests.hugging_face_layers import (
    Make,
    Reading,
    Reference,
    causal,
    drafted_rounds,
    family_layer,
    make,
    rotary,
    run_layer,
)
from tests.tiny_models import HIDDEN, batch_shape, make_sample, random_ids, randomize, tiny_folders, variant_folders

__all__ = ["make", "tiny_folders", "variant_folders"]

SIZE, LENGTH = 4, 13
WINDOWS = [None, 7, 2]
"""The last one is shorter than a block: a later step no longer sees the first."""


def reads(theirs: Reference, embedded: Tensor) -> Reading:
    """What attention reads of features [n, D] beside embeddings [n, D]."""
    token, feature = theirs.norms["layers.0.input_layernorm"], theirs.norms["layers.0.hidden_norm"]
    return lambda x: torch.cat((token(embedded).expand(x.shape), feature(x)), dim=-1)


def training_batch(theirs: Reference) -> BlockBatch:
    """One text with an anchor at every token but the first and the last."""
    ids = random_ids(LENGTH, seed=3)
    sample = make_sample(theirs.model, ids, supervised=[0, *[1] * (LENGTH - 1)])
    return make_block_batch([(sample, 0)], shape=batch_shape(block_size=SIZE), seed=0)


def seen(num_steps: int, window: int | None) -> Tensor:
    """Of all rows, step after step: each sees step 0 of the rows up to its own, and its own row's steps until now."""
    step = torch.arange(num_steps).repeat_interleave(LENGTH)
    row = torch.arange(LENGTH).repeat(num_steps)
    context = (step == 0) & (row <= row.unsqueeze(1))
    own = (row == row.unsqueeze(1)) & (step <= step.unsqueeze(1))
    behind = (row + step).unsqueeze(1) - (row + step)
    return (context | own) & (behind < (window or num_steps * LENGTH))


def training_steps(theirs: Reference, batch: BlockBatch, *, fc: Tensor, window: int | None) -> list[Tensor]:
    """States of every row after each step [T, D] (METHOD section 14): row i of step j reads token i + 1 + j beside
    the feature of row i (j = 0) or its own output of the step before, at rotary position i + j."""
    ids = torch.cat((batch.token_ids[0], torch.zeros(SIZE, dtype=torch.int64)))
    features, states = [batch.context[0].flatten(-2) @ fc.T], []
    for step in range(SIZE):
        embedded = torch.cat([theirs.embed(ids[1 + j : 1 + j + LENGTH]) for j in range(step + 1)])
        positions = torch.cat([torch.arange(LENGTH) + j for j in range(step + 1)])
        out = theirs.run(
            0,
            torch.cat(features),
            reads=reads(theirs, embedded),
            positions=positions,
            mask=seen(step + 1, window),
        )
        features.append(out[-LENGTH:])
        states.append(theirs.norms["norm"](features[-1]))
    return states


def of_blocks(states: list[Tensor], batch: BlockBatch) -> tuple[Tensor, Tensor]:
    """States [A, K, D] of the blocks, of which row p - 1 makes the one at anchor p, and which of them have a token."""
    anchors = batch.anchors[0]
    expected = torch.stack([step[anchors - 1] for step in states], dim=1)
    return expected, anchors.unsqueeze(1) + torch.arange(SIZE) < LENGTH


@pytest.mark.parametrize("window", WINDOWS)
def test_training_steps_and_their_gradients(make: Make, window: int | None) -> None:
    """Step 0 is one causal pass over all rows; a step's own output goes on to the next with its gradient."""
    drafter = make.drafter("eagle3", windows=(window,))
    theirs = Reference(drafter, make.folder)
    batch, fc = training_batch(theirs), drafter.fc.weight.detach().clone().requires_grad_(True)
    expected, counted = of_blocks(training_steps(theirs, batch, fc=fc, window=window), batch)
    found = drafter.slot_states(batch)
    torch.testing.assert_close(found[counted], expected[counted], rtol=1e-4, atol=2e-5)

    theirs.check_gradients(drafter, found[counted], expected=expected[counted], others={"fc.weight": fc})


def chain(theirs: Reference, drafted: Any, *, fc: Tensor, window: int | None) -> Tensor:
    """Draft logits [K, V] written straight from METHOD section 14, nothing kept from the round before.

    Rows 0..n-1 (n the anchor's position) pair the target's features with ids 1..n; draft 1 comes from the last row's
    output, and draft token x_k is read beside the output before it at rotary position n + k - 1.
    """
    num = len(drafted.text) - 1
    features, ids, logits = drafted.captured[:num].flatten(-2) @ fc.T, drafted.text[1:], []
    for token in drafted.tokens.tolist():
        out = theirs.run(
            0,
            features,
            reads=reads(theirs, theirs.embed(torch.tensor(ids))),
            positions=torch.arange(len(ids)),
            mask=causal(len(ids), window=window),
        )
        logits.append(theirs.logits(theirs.norms["norm"](out[-1])))
        features, ids = torch.cat((features, out[-1:])), [*ids, token]
    return torch.stack(logits)


@pytest.mark.parametrize("window", WINDOWS)
def test_rounds_of_prefill_chain_acceptance_and_cutting_back(make: Make, window: int | None) -> None:
    drafter = make.drafter("eagle3", windows=(window,)).requires_grad_(False)
    theirs, count = Reference(drafter, make.folder), 0
    for drafted in drafted_rounds(drafter):
        expected = chain(theirs, drafted, fc=drafter.fc.weight, window=window)
        torch.testing.assert_close(drafted.logits.double(), expected, rtol=1e-4, atol=1e-4)
        count += 1
    assert count == 3 * 4


@pytest.mark.parametrize("make", ["llama", "qwen3", "gemma4"], indirect=True)
def test_without_the_embeddings_columns_it_is_the_familys_layer_over_the_features(make: Make) -> None:
    """Zero columns for the embedding and the family's input norm as the feature's: the layer itself, untouched."""
    drafter: Eagle3 = make.drafter("eagle3", windows=(None,)).requires_grad_(False)
    layer = family_layer(make.folder.name, Reference(drafter, make.folder).config).requires_grad_(False)
    randomize(layer, seed=4)
    weights = layer.state_dict()
    weights["hidden_norm.weight"] = weights.pop("input_layernorm.weight")
    for part in ("q_proj", "k_proj", "v_proj"):
        name = f"self_attn.{part}.weight"
        if name in weights:
            weights[name] = torch.cat((torch.zeros_like(weights[name]), weights[name]), dim=1)
    weights["input_layernorm.weight"] = drafter.layer.input_layernorm.weight
    drafter.layer.load_state_dict(weights, strict=True)

    batch = training_batch(Reference(drafter, make.folder))
    features = batch.context.flatten(-2) @ drafter.fc.weight.T
    rope = rotary(make.folder.name, Reference(drafter, make.folder).config, batch.positions)
    expected = drafter.norm(run_layer(layer, features, mask=causal(LENGTH), rope=rope))[0]
    assert expected.shape == (LENGTH, HIDDEN)
    torch.testing.assert_close(drafter.slot_states(batch)[:, 0], expected[batch.anchors[0] - 1], rtol=1e-5, atol=1e-5)
