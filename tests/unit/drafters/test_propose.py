"""A proposal: sampled left to right, each slot on the token really sampled before it, with what was sampled from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.drafters.base import Observation, Proposal
from draftsmith.drafters.dflash import DFlash
from draftsmith.nn.kv import FlatBatch, KeyValueRows
from tests.tiny_models import HIDDEN, KINDS, MASK_TOKEN, tiny_drafter, tiny_folders

__all__ = ["tiny_folders"]

SIZE, REQUESTS = 4, 3
ANCHORS, POSITIONS = [7, 20, 33], [5, 2, 9]


def observed(drafter: DFlash) -> KeyValueRows:
    rows = drafter.new_rows()
    batch = FlatBatch.make([0] * REQUESTS, counts=POSITIONS, slots=range(REQUESTS), device=torch.device("cpu"))
    captured = torch.randn(sum(POSITIONS), 3, HIDDEN, generator=torch.Generator().manual_seed(0))
    ids = torch.zeros(sum(POSITIONS), dtype=torch.int64)
    drafter.observe(Observation(ids, captured, captured[:, 0], batch), rows=rows)
    return rows


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_dspark_conditions_each_slot_on_the_token_sampled_before_it(family: str, tiny_folders: dict[str, Path]) -> None:
    """Logits and confidence from the block's states by hand: (U_k + W2 W1[x_{k-1}]) and w . [h_k ; W1[x_{k-1}]] + b."""
    drafter = tiny_drafter("dspark", tiny_folders[family], seed=5, block_size=SIZE)
    rows, chosen, seen = observed(drafter), [[3, 9, 1], [50, 2, 8], [0, 4, 4], [11, 12, 13]], []

    def sample(logits: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        seen.append(logits.double())
        return torch.tensor(chosen[slot]), torch.full_like(logits, float(slot))

    proposal = drafter.propose(torch.tensor(ANCHORS), positions=POSITIONS, rows=rows, sample=sample)
    with torch.inference_mode():
        states = drafter.block_states(torch.tensor(ANCHORS), positions=POSITIONS, rows=rows).double()
    w1, w2 = (drafter.get_parameter(f"markov_head.markov_{name}.weight").detach().double() for name in ("w1", "w2"))
    weight, bias = (
        drafter.get_parameter(f"confidence_head.proj.{name}").detach().double() for name in ("weight", "bias")
    )
    head = drafter.shared.head.double()
    assert proposal.confidence_logits is not None
    assert proposal.probabilities is not None
    for slot, previous in enumerate([ANCHORS, *chosen[:-1]]):
        for row, token in enumerate(previous):
            logits = head @ states[row, slot] + w2 @ w1[token]
            torch.testing.assert_close(seen[slot][row], logits, rtol=1e-4, atol=1e-4)
            confidence = weight[0] @ torch.cat((states[row, slot], w1[token])) + bias[0]
            assert float(proposal.confidence_logits[row, slot]) == pytest.approx(float(confidence), abs=1e-4)
    assert proposal.tokens.tolist() == [list(row) for row in zip(*chosen, strict=True)]
    assert [float(part[0]) for part in proposal.probabilities[0]] == [0.0, 1.0, 2.0, 3.0]


def test_dflash_drafts_all_slots_from_one_pass(tiny_folders: dict[str, Path]) -> None:
    drafter = tiny_drafter("dflash", tiny_folders["qwen3"], seed=6, block_size=SIZE)
    rows = observed(drafter)
    proposal = drafter.propose(
        torch.tensor(ANCHORS), positions=POSITIONS, rows=rows, sample=lambda logits, _: (logits.argmax(1), None)
    )
    with torch.inference_mode():
        states = drafter.block_states(torch.tensor(ANCHORS), positions=POSITIONS, rows=rows)
    expected = (states.double() @ drafter.shared.head.double().T).argmax(-1)
    assert proposal.tokens.tolist() == expected.tolist()
    assert proposal.probabilities is None
    assert proposal.confidence_logits is None


def test_a_block_is_the_anchor_and_mask_tokens(tiny_folders: dict[str, Path]) -> None:
    """Change one token's embedding: the mask token's moves every block, an anchor's its own, another one's none."""
    drafter = tiny_drafter("dflash", tiny_folders["llama"], seed=7, block_size=SIZE)
    anchors = torch.tensor(ANCHORS)

    def states() -> Tensor:
        with torch.inference_mode():
            return drafter.block_states(anchors, positions=POSITIONS, rows=observed(drafter))

    before = states()
    table = drafter.shared.embedding.clone()
    for token, moves in ((MASK_TOKEN, [True] * 3), (ANCHORS[1], [False, True, False]), (59, [False] * 3)):
        drafter.shared.embedding.copy_(table)
        drafter.shared.embedding[token] += 1.0
        moved = (states() - before).abs().amax((1, 2))
        assert [float(size) > 1e-3 for size in moved] == moves


@pytest.mark.parametrize("kind", KINDS)
def test_some_requests_and_the_first_slots_draft_as_in_whole_blocks(kind: str, tiny_folders: dict[str, Path]) -> None:
    """Requests 2 and 0, the first two slots: tokens, draft probabilities and confidences of the whole proposal."""
    size = 1 if kind == "mtp1" else SIZE
    drafter = tiny_drafter(kind, tiny_folders["llama"], seed=8, block_size=size).eval().requires_grad_(False)
    short, members = min(2, size), [2, 0]

    def sample(logits: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        del slot
        return logits.argmax(1), logits.softmax(1)

    def drafted(chosen: list[int], **how: Any) -> Proposal:
        return drafter.propose(
            torch.tensor([ANCHORS[r] for r in chosen]), positions=[POSITIONS[r] for r in chosen],
            rows=observed(drafter), sample=sample, **how,
        )  # fmt: skip

    whole, part = drafted([0, 1, 2]), drafted(members, slots=members, num_tokens=short)
    assert part.tokens.tolist() == whole.tokens[members, :short].tolist()
    assert part.probabilities is not None
    assert whole.probabilities is not None
    torch.testing.assert_close(part.probabilities, whole.probabilities[members, :short], rtol=1e-4, atol=1e-6)
    assert (part.confidence_logits is None) == (not drafter.config.confidence)
    if part.confidence_logits is not None and whole.confidence_logits is not None:
        torch.testing.assert_close(
            part.confidence_logits, whole.confidence_logits[members, :short], rtol=1e-4, atol=1e-5
        )


def test_a_proposal_among_others_leaves_them_empty() -> None:
    part = Proposal(torch.tensor([[5], [6]]), torch.tensor([[[0.25, 0.75]], [[1.0, 0.0]]]), None)
    whole = part.among(3, members=[2, 0])
    assert whole.tokens.tolist() == [[6], [0], [5]]
    assert whole.probabilities is not None
    assert whole.probabilities.tolist() == [[[1.0, 0.0]], [[0.0, 0.0]], [[0.25, 0.75]]]
    assert whole.confidence_logits is None
