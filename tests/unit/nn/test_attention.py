"""What block queries see, cell by cell; attention under masks against a loop, and flex_attention against masks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from draftsmith.nn.attention import FlexAttention, MaskedAttention, Visibility

NUM_TOKENS = 12


def visibility(lengths: list[int], anchors: list[int]) -> Visibility:
    """One row of documents of these lengths, padded to NUM_TOKENS."""
    documents = [number for number, length in enumerate(lengths) for _ in range(length)]
    positions = [place for length in lengths for place in range(length)]
    padding = NUM_TOKENS - len(documents)
    return Visibility(
        torch.tensor([anchors]),
        torch.tensor([documents + [-1] * padding]),
        torch.tensor([positions + [0] * padding]),
    )


def queries_of(seen: Visibility, width: int) -> Tensor:
    starts = seen.positions.gather(1, seen.anchors.clamp(min=0))
    return (starts.unsqueeze(-1) + torch.arange(width)).flatten(1)


def test_a_small_row_by_hand() -> None:
    """Documents of 4 and 3 tokens; blocks at tokens 1 and 6, and none; two queries and two own keys a block."""
    seen = visibility([4, 3], [1, 6, -1])
    mask = seen.mask(queries_of(seen, 2), num_own=2, window=None)
    rows = ["".join(str(int(cell)) for cell in row) for row in mask[0]]
    assert rows == [
        "100000000000" + "110000",
        "100000000000" + "110000",
        "000011000000" + "001100",
        "000011000000" + "001100",
        "000000000000" + "000011",
        "000000000000" + "000011",
    ]
    assert not seen.mask(queries_of(seen, 1), num_own=0, window=1).any()
    two = seen.mask(queries_of(seen, 2), num_own=2, window=2)
    assert ["".join(str(int(cell)) for cell in row[:12]) for row in two[0, :4]] == [
        "100000000000",  # query at position 1 sees position 0
        "000000000000",  # query at position 2 sees no position before 1
        "000001000000",  # query at position 2 of the second document sees its position 1
        "000000000000",
    ]
    one = seen.mask(queries_of(seen, 2), num_own=2, window=1)
    assert ["".join(str(int(cell)) for cell in row[12:]) for row in one[0, :4]] == [
        "110000",  # own keys stand at positions 1 and 2: the query at 1 sees itself and what is ahead in its block
        "010000",  # the query at 2 no longer sees 1
        "001100",
        "000100",
    ]
    steps = seen.mask(queries_of(seen, 1), num_own=3, window=2)
    assert ["".join(str(int(cell)) for cell in row[12:]) for row in steps[0, :2]] == [
        "011000000",  # one query whose own keys are the steps before it and itself
        "000011000",
    ]


LAYOUTS = st.tuples(
    st.lists(st.integers(1, 5), min_size=1, max_size=3).filter(lambda lengths: sum(lengths) <= NUM_TOKENS),
    st.lists(st.integers(-1, NUM_TOKENS - 1), min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(0, 3),
    st.sampled_from([None, 1, 2, 4]),
)


@given(LAYOUTS)
def test_cell_by_cell(layout: tuple[list[int], list[int], int, int, int | None]) -> None:
    lengths, anchors, width, num_own, window = layout
    anchors = [anchor if anchor < sum(lengths) else -1 for anchor in anchors]
    seen = visibility(lengths, anchors)
    queries = queries_of(seen, width)
    mask = seen.mask(queries, num_own=num_own, window=window)
    assert mask.shape == (1, len(anchors) * width, NUM_TOKENS + len(anchors) * num_own)
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    for query in range(len(anchors) * width):
        block = query // width
        anchor = anchors[block]
        begin = max((start for start in starts if start <= anchor), default=0)
        for token in range(NUM_TOKENS):
            near = window is None or token - begin > anchor - begin + query % width - window
            assert bool(mask[0, query, token]) == (anchor >= 0 and begin <= token < anchor and near)
        last, own = int(queries[0, block * width + width - 1]), int(queries[0, query])
        for key in range(len(anchors) * num_own):
            place = last - (num_own - 1 - key % num_own)
            near = window is None or place > own - window
            assert bool(mask[0, query, NUM_TOKENS + key]) == (key // num_own == block and near)


def random_heads(seed: int, count: int, heads: int) -> Tensor:
    return torch.randn(1, count, heads, 8, generator=torch.Generator().manual_seed(seed))


def test_masked_attention_is_softmax_over_what_is_seen() -> None:
    seen = visibility([7, 4], [5, 9])
    queries, width = queries_of(seen, 2), 2
    mask = seen.mask(queries, num_own=width, window=3)
    q, k, v = random_heads(0, 4, 4), random_heads(1, 16, 2), random_heads(2, 16, 2)
    got = MaskedAttention(mask).attend(q, keys=k, values=v, scale=0.3)
    for query in range(4):
        for head in range(4):
            keys, values = k[0, mask[0, query], head // 2].double(), v[0, mask[0, query], head // 2].double()
            weights = (0.3 * keys @ q[0, query, head].double()).softmax(0)
            torch.testing.assert_close(got[0, query, head].double(), weights @ values, rtol=1e-5, atol=1e-6)


def test_a_query_that_sees_nothing_gets_zeros_and_finite_gradients() -> None:
    q = random_heads(3, 2, 2).requires_grad_()
    k = random_heads(4, 5, 2).requires_grad_()
    mask = torch.zeros(1, 2, 5, dtype=torch.bool)
    mask[0, 1, 2] = True
    out = MaskedAttention(mask).attend(q, keys=k, values=k, scale=1.0)
    assert out[0, 0].abs().sum() == 0
    out.sum().backward()
    assert q.grad is not None
    assert k.grad is not None
    assert bool(q.grad.isfinite().all() and k.grad.isfinite().all())


FLEX = [
    ([7, 5], [0, 3, 8, -1], 3, 3, None),
    ([12], [11, 2], 2, 2, 4),
    ([4, 4, 4], [3, 7, 11], 1, 0, None),
    ([7, 5], [0, 6, 9, -1], 3, 3, 2),
    ([12], [11, 5], 1, 3, 2),
]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("lengths", "anchors", "width", "num_own", "window"), FLEX)
def test_flex_attention_equals_masks(
    lengths: list[int], anchors: list[int], width: int, num_own: int, window: int | None
) -> None:
    """Forward alone: on the CPU it has no backward."""
    seen = visibility(lengths, anchors)
    queries = queries_of(seen, width)
    num_keys = NUM_TOKENS + len(anchors) * num_own
    q = random_heads(5, len(anchors) * width, 4)
    k, v = random_heads(6, num_keys, 2), random_heads(7, num_keys, 2)
    masked = MaskedAttention(seen.mask(queries, num_own=num_own, window=window)).attend(q, keys=k, values=v, scale=0.5)
    flexed = FlexAttention(seen.flex_mask(queries, num_own=num_own, window=window)).attend(
        q, keys=k, values=v, scale=0.5
    )
    torch.testing.assert_close(flexed, masked, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize(("lengths", "anchors", "width", "num_own", "window"), FLEX)
def test_flex_attention_equals_masks_in_gradients_too(
    lengths: list[int], anchors: list[int], width: int, num_own: int, window: int | None
) -> None:
    on_cpu = visibility(lengths, anchors)
    seen = Visibility(on_cpu.anchors.cuda(), on_cpu.documents.cuda(), on_cpu.positions.cuda())
    queries = queries_of(on_cpu, width).cuda()
    num_keys = NUM_TOKENS + len(anchors) * num_own
    found = []
    for attention in (
        MaskedAttention(seen.mask(queries, num_own=num_own, window=window)),
        FlexAttention(seen.flex_mask(queries, num_own=num_own, window=window)),
    ):
        q = random_heads(5, len(anchors) * width, 4).repeat(1, 1, 1, 2).cuda().requires_grad_()
        k, v = (random_heads(seed, num_keys, 2).repeat(1, 1, 1, 2).cuda().requires_grad_() for seed in (6, 7))
        out = attention.attend(q, keys=k, values=v, scale=0.5)
        out.square().sum().backward()
        found.append((out, q.grad, k.grad, v.grad))
    for one, other in zip(*found, strict=True):
        assert one is not None
        assert other is not None
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
