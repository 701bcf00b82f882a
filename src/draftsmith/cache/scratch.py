"""Memory for what a thread needs only while it codes a chunk.

Memory of some MB that is asked for anew each time comes from the system anew each time, page by page, which costs more
than all that the codecs do in it.
"""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray


class Scratch(threading.local):
    """Bytes by name, each thread its own; what `take` gave is overwritten by the thread's next `take` of that name."""

    def __init__(self) -> None:
        self._arrays: dict[str, NDArray[np.uint8]] = {}

    def take(self, name: str, num_bytes: int) -> NDArray[np.uint8]:
        """uint8 [num_bytes] of any contents."""
        array = self._arrays.get(name)
        if array is None or array.size < num_bytes:
            array = self._arrays[name] = np.empty(num_bytes, dtype=np.uint8)
        return array[:num_bytes]
