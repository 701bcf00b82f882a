"""DFlash's backbone is the family's layers over [context ; block]: Hugging Face's own, so arranged."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftsmith.training.batches import make_block_batch
from tests.hugging_face_layers import Make, Reading, Reference, drafted_rounds, make
from tests.tiny_models import MASK_TOKEN, batch_shape, make_sample, random_ids, tiny_folders, variant_folders

__all__ = ["make", "tiny_folders", "variant_folders"]

SIZE, LENGTH = 4, 12
CASES = [("dflash", (None, None)), ("dflash", (None, 3)), ("dflash_masks", (2, 6))]


def after(context: int, norm: Reading) -> Reading:
    """Attention reads the context rows as they are, the block's rows through the input norm."""
    return lambda x: torch.cat((x[..., :context, :], norm(x[..., context:, :])), dim=-2)


def block_states(
    theirs: Reference, captured: Tensor, *, anchor: int, fc: Tensor, width: int, windows: tuple[int | None, ...]
) -> Tensor:
    """States [K, D] of one block at position t behind t context tokens: captured [t, L, D], the anchor's id."""
    num = len(captured)
    context = theirs.norms["hidden_norm"](captured.flatten(-2) @ fc.T)
    x = theirs.embed(torch.tensor([anchor, *[MASK_TOKEN] * (width - 1)]))
    positions = torch.arange(num + width)
    for number, window in enumerate(windows):
        mask = positions > positions.unsqueeze(1) - (window or num + width)
        mask[:num] = torch.eye(num + width, dtype=torch.bool)[:num]
        reads = after(num, theirs.norms[f"layers.{number}.input_layernorm"])
        x = theirs.run(number, torch.cat((context, x)), reads=reads, positions=positions, mask=mask)[num:]
    states: Tensor = theirs.norms["norm"](x)[-SIZE:]
    return states


@pytest.mark.parametrize(("kind", "windows"), CASES)
def test_training_blocks_and_their_gradients(make: Make, kind: str, windows: tuple[int | None, ...]) -> None:
    drafter = make.drafter(kind, windows=windows)
    theirs, width = Reference(drafter, make.folder), drafter.config.block_width
    sample = make_sample(theirs.model, random_ids(LENGTH, seed=3), supervised=[1] * LENGTH)
    batch = make_block_batch([(sample, 0)], shape=batch_shape(block_size=SIZE), seed=0)
    fc = drafter.fc.weight.detach().clone().requires_grad_(True)
    expected = torch.stack(
        [
            block_states(
                theirs,
                batch.context[0, :anchor],
                anchor=int(batch.token_ids[0, anchor]),
                fc=fc,
                width=width,
                windows=windows,
            )
            for anchor in batch.anchors[0].tolist()
        ]
    )
    found = drafter.slot_states(batch)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)
    theirs.check_gradients(drafter, found, expected=expected, others={"fc.weight": fc})


@pytest.mark.parametrize(("kind", "windows"), CASES)
def test_rounds_of_context_and_blocks(make: Make, kind: str, windows: tuple[int | None, ...]) -> None:
    drafter = make.drafter(kind, windows=windows).requires_grad_(False)
    theirs, count = Reference(drafter, make.folder), 0
    for drafted in drafted_rounds(drafter):
        states = block_states(
            theirs,
            drafted.captured[: len(drafted.text) - 1],
            anchor=drafted.text[-1],
            fc=drafter.fc.weight,
            width=drafter.config.block_width,
            windows=windows,
        )
        torch.testing.assert_close(drafted.logits.double(), theirs.logits(states), rtol=1e-4, atol=1e-4)
        count += 1
    assert count == 3 * 4
