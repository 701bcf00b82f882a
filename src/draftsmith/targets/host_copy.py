"""Device tensors on their way to the host while the device goes on computing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class HostCopy:
    """Copies of tensors as bfloat16 bits. On CUDA they go to pinned memory, on a stream of their own, and `wait` waits
    for an event; on the CPU they are there at once."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Begin to copy; the tensors may be forgotten at once."""
        values = [tensor.detach().to(torch.bfloat16).contiguous() for tensor in tensors]
        self._done: torch.cuda.Event | None = None
        if not values or values[0].device.type != "cuda":
            self._host = values
            return
        device = values[0].device
        stream = _copy_stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        self._host = []
        with torch.cuda.stream(stream):
            for value in values:
                host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
                self._host.append(host.copy_(value, non_blocking=True))
                # The allocator must not give the memory to another tensor before the copy has read it.
                value.record_stream(stream)
            self._done = torch.cuda.Event()
            self._done.record(stream)

    def wait(self) -> list[NDArray[np.uint16]]:
        """The bits of each tensor, uint16 of its shape, when the copy has ended."""
        if self._done is not None:
            self._done.synchronize()
        return [value.view(torch.int16).numpy().view(np.uint16) for value in self._host]


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream for copies from a device."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]
