"""Copies to the host: the same bits as a plain copy, also when the tensors are gone or written over meanwhile."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch

from draftsmith.targets.host_copy import HostCopy

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def upper_half(value: float) -> int:
    """The bits of a number that bfloat16 holds exactly."""
    return int.from_bytes(struct.pack(">f", value)[:2])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bits_of_each_tensor(device: str, dtype: torch.dtype) -> None:
    """Numbers that bfloat16 holds, a view that is not contiguous, and no rows at all."""
    values = [1.0, -2.5, 0.0, 384.0, -0.0078125, 3.0]
    matrix = torch.tensor(values, dtype=dtype, device=device).view(2, 3)
    copied, turned, empty = HostCopy([matrix, matrix.T, matrix[:0]]).wait()
    bits = [upper_half(value) for value in values]
    assert (copied.dtype, copied.ravel().tolist()) == (np.dtype(np.uint16), bits)
    assert turned.tolist() == [[bits[0], bits[3]], [bits[1], bits[4]], [bits[2], bits[5]]]
    assert empty.shape == (0, 3)


def test_float32_is_rounded_to_the_nearest() -> None:
    """1 + 2^-8 lies between two bfloat16 numbers and goes to the even one; a little more goes up."""
    (copied,) = HostCopy([torch.tensor([1 + 2.0**-8, 1 + 2.0**-8 + 2.0**-20])]).wait()
    assert copied.tolist() == [upper_half(1.0), upper_half(1 + 2.0**-7)]


@needs_gpu
def test_many_copies_in_flight() -> None:
    """Each tensor is forgotten at once, so that its memory is given to the next one while the copy may still run."""
    copies = [HostCopy([torch.full((1 << 20,), float(number), device="cuda")]) for number in range(16)]
    for number, copy in enumerate(copies):
        assert set(np.unique(copy.wait()[0]).tolist()) == {upper_half(float(number))}
