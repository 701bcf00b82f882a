"""Key-value rows and ragged attention against plain float64 attention over each request's own history."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from draftsmith.nn.kv import FlatBatch, KeyValueRows

HEADS, GROUPS, SIZE = 6, 2, 5
CPU = torch.device("cpu")


class History:
    """What each request's row must hold, kept as plain lists of float64 [G, E]."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.keys: dict[int, list[Tensor]] = {}
        self.values: dict[int, list[Tensor]] = {}

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def store(self, names: list[int], batch: FlatBatch, keys: Tensor, values: Tensor) -> None:
        first = 0
        for name, start, count in zip(names, batch.starts, batch.counts, strict=True):
            for store, new in ((self.keys, keys), (self.values, values)):
                store[name] = [*store.get(name, [])[:start], *new[first : first + count].double()]
            first += count

    def attend(self, name: int, query: Tensor, *, first: int, stop: int, scale: float) -> Tensor:
        """One query [H, E] over positions first..stop-1; head h reads key head h // (H / G)."""
        out = torch.zeros(HEADS, SIZE, dtype=torch.float64)
        for head in range(HEADS):
            group = head // (HEADS // GROUPS)
            keys = torch.stack([key[group] for key in self.keys[name][first:stop]])
            values = torch.stack([value[group] for value in self.values[name][first:stop]])
            out[head] = ((keys @ query[head].double()) * scale).softmax(0) @ values
        return out


def step(
    rows: KeyValueRows,
    history: History,
    names: list[int],
    starts: list[int],
    counts: list[int],
    *,
    visibility: str = "causal",
    slots: list[int] | None = None,
    window: int | None = None,
) -> None:
    """Attend with fresh numbers and compare every token with the plain form."""
    batch = FlatBatch.make(
        starts, counts=counts, slots=range(len(names)) if slots is None else slots, device=CPU, visibility=visibility
    )
    num, scale = sum(counts), 0.3
    queries, keys, values = history.normal(num, HEADS, SIZE), *(history.normal(num, GROUPS, SIZE) for _ in range(2))
    got = rows.attend(0, queries=queries, keys=keys, values=values, batch=batch, scale=scale, window=window)
    history.store(names, batch, keys, values)
    token = 0
    for name, start, count in zip(names, starts, counts, strict=True):
        for offset in range(count):
            stop = start + (count if visibility == "block" else offset + 1)
            first = 0 if window is None else max(0, start + offset - window + 1)
            expected = history.attend(name, queries[token], first=first, stop=stop, scale=scale)
            torch.testing.assert_close(got[token].double(), expected, rtol=1e-5, atol=1e-6)
            token += 1


def test_ragged_steps_with_rollback_growth_and_leaving_equal_the_plain_form() -> None:
    """A prefill, ragged rounds that overwrite rejected positions, a request that leaves, one that joins."""
    rows, history = KeyValueRows(1, dtype=torch.float32, device=CPU), History(0)
    step(rows, history, [10, 11, 12], [0, 0, 0], [4, 1, 7])
    step(rows, history, [10, 11, 12], [4, 1, 7], [5, 1, 3])
    step(rows, history, [10, 11, 12], [5, 2, 7], [1, 4, 4])  # request 10 lost four tokens, request 12 lost three
    rows.move(2, 0)  # request 10 leaves, the last one takes its slot
    step(rows, history, [12, 11], [9, 6], [2, 2])
    step(rows, history, [13], [0], [3], slots=[2])
    step(rows, history, [12, 11, 13], [10, 7, 3], [1, 140, 2])  # beyond the first capacity
    step(rows, history, [12, 11, 13], [11, 140, 5], [3, 3, 3])


def test_blocks_see_their_whole_request_and_are_covered_again() -> None:
    rows, history = KeyValueRows(1, dtype=torch.float32, device=CPU), History(1)
    step(rows, history, [0, 1], [0, 0], [6, 3])
    step(rows, history, [0, 1], [6, 3], [4, 4], visibility="block")
    step(rows, history, [0, 1], [6, 3], [2, 4])
    step(rows, history, [0, 1], [8, 7], [4, 4], visibility="block")


def test_a_block_without_any_history() -> None:
    step(KeyValueRows(1, dtype=torch.float32, device=CPU), History(2), [0], [0], [4], visibility="block")


@pytest.mark.parametrize("window", [1, 3, 50])
def test_a_sliding_window_sees_the_latest_positions_alone(window: int) -> None:
    rows, history = KeyValueRows(1, dtype=torch.float32, device=CPU), History(3)
    step(rows, history, [0, 1], [0, 0], [7, 2], window=window)
    step(rows, history, [0, 1], [7, 2], [1, 4], window=window)


@pytest.mark.parametrize("window", [None, 3, 5])
def test_a_prefill_does_not_depend_on_its_neighbours(window: int | None) -> None:
    history = History(4)
    queries, keys, values = (
        history.normal(9, HEADS, SIZE),
        history.normal(9, GROUPS, SIZE),
        history.normal(9, GROUPS, SIZE),
    )

    def prefill(first: int, count: int, starts: list[int], counts: list[int]) -> Tensor:
        part = slice(first, first + count)
        batch = FlatBatch.make(starts, counts=counts, slots=range(len(counts)), device=CPU)
        rows = KeyValueRows(1, dtype=torch.float32, device=CPU)
        new = {"queries": queries[part], "keys": keys[part], "values": values[part]}
        return rows.attend(0, **new, batch=batch, scale=0.4, window=window)

    both = prefill(0, 9, [0, 0], [5, 4])
    assert torch.equal(both[:5], prefill(0, 5, [0], [5]))
    assert torch.equal(both[5:], prefill(5, 4, [0], [4]))


def test_growth_keeps_what_is_there() -> None:
    rows = KeyValueRows(2, dtype=torch.float32, device=CPU)
    batch = FlatBatch.make([0, 2], counts=[2, 3], slots=[0, 1], device=CPU)
    keys, values = torch.randn(5, GROUPS, SIZE), torch.randn(5, GROUPS, SIZE)
    rows.write(1, keys=keys, values=values, batch=batch)
    rows.reserve(num_slots=7, capacity=400)
    assert rows.capacity >= 400
    assert rows.keys[0] is None
    stored_keys, stored_values = rows.keys[1], rows.values[1]
    assert stored_keys is not None
    assert stored_values is not None
    assert stored_keys.shape == (7, rows.capacity, GROUPS, SIZE)
    for stored, new in ((stored_keys, keys), (stored_values, values)):
        assert torch.equal(stored[0, 0:2], new[:2])
        assert torch.equal(stored[1, 2:5], new[2:])
        assert float(stored.abs().sum()) == pytest.approx(float(new.abs().sum()), rel=1e-6)
    before = rows.capacity
    rows.reserve(num_slots=7, capacity=before + 1)
    assert rows.capacity >= math.floor(1.5 * before)  # grown by a factor, not token by token


def test_a_flat_batch_by_hand() -> None:
    batch = FlatBatch.make([3, 0, 7], counts=[2, 1, 3], slots=[0, 1, 2], device=CPU)
    assert (batch.num_tokens, batch.end) == (6, 10)
    assert batch.positions.tolist() == [3, 4, 0, 7, 8, 9]
    assert batch.token_slots.tolist() == [0, 0, 1, 2, 2, 2]
    assert batch.padded_index.tolist() == [0, 1, 3, 6, 7, 8]
    assert not batch.is_prefill
    bias = batch.bias(2, dtype=torch.float32, window=None)
    assert bias.shape == (3, 1, 6, 10)
    seen = ["".join("1" if cell == 0 else "0" for cell in row) for row in bias[0, 0].tolist()]
    assert seen == ["1111000000", "1111100000", "1000000000"] * 2  # the third row is padding
    assert np.isneginf(bias[0, 0, 0, 4:].numpy()).all()
