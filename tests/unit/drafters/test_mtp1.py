"""MTP-1 is one more causal layer of the target: Hugging Face's own over the projected pairs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftsmith.training.batches import make_block_batch
from tests.hugging_face_layers import Make, Reference, causal, drafted_rounds, make
from tests.tiny_models import batch_shape, make_sample, random_ids, tiny_folders, variant_folders

__all__ = ["make", "tiny_folders", "variant_folders"]

LENGTH = 13
WINDOWS = [None, 3]


def rows_of(theirs: Reference, ids: Tensor, *, hidden: Tensor, projection: Tensor, window: int | None) -> Tensor:
    """States [n, D] of rows 0..n-1: ids [n + 1] of a text, last hidden states [n, D] (METHOD section 8)."""
    token, state = theirs.norms["token_layernorm"], theirs.norms["hidden_layernorm"]
    x = torch.cat((token(theirs.embed(ids[1:])), state(hidden)), dim=-1) @ projection.T
    out = theirs.run(
        0,
        x,
        reads=theirs.norms["layers.0.input_layernorm"],
        positions=torch.arange(len(x)),
        mask=causal(len(x), window=window),
    )
    states: Tensor = theirs.norms["norm"](out)
    return states


@pytest.mark.parametrize("window", WINDOWS)
def test_training_is_one_causal_pass_with_its_gradients(make: Make, window: int | None) -> None:
    """Row p - 1 drafts the token after anchor p."""
    drafter = make.drafter("mtp1", windows=(window,))
    theirs = Reference(drafter, make.folder)
    sample = make_sample(theirs.model, random_ids(LENGTH, seed=3), supervised=[0, *[1] * (LENGTH - 1)], every=True)
    shape = batch_shape(block_size=1, last_hidden=True)
    batch = make_block_batch([(sample, 0)], shape=shape, seed=0)
    assert batch.hidden is not None
    projection = drafter.input_proj.weight.detach().clone().requires_grad_(True)
    states = rows_of(theirs, batch.token_ids[0], hidden=batch.hidden[0, :-1], projection=projection, window=window)
    expected, found = states[batch.anchors[0] - 1], drafter.slot_states(batch)[:, 0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)
    theirs.check_gradients(drafter, found, expected=expected, others={"input_proj.weight": projection})


@pytest.mark.parametrize("window", WINDOWS)
def test_rounds_of_prefill_and_one_draft_token(make: Make, window: int | None) -> None:
    """A round that accepts commits its draft token and another one."""
    drafter = make.drafter("mtp1", windows=(window,)).requires_grad_(False)
    theirs, count = Reference(drafter, make.folder), 0
    for drafted in drafted_rounds(drafter):
        hidden = drafted.hidden[: len(drafted.text) - 1]
        states = rows_of(
            theirs, torch.tensor(drafted.text), hidden=hidden, projection=drafter.input_proj.weight, window=window
        )
        expected = theirs.logits(states[-1])
        torch.testing.assert_close(drafted.logits[0].double(), expected, rtol=1e-4, atol=1e-4)
        count += 1
    assert count == 3 * 4
