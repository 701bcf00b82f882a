"""The one capture of hidden states, used by the cache and by decoding alike.

Layer id k is the output of decoder layer k (Hugging Face's `hidden_states[k + 1]`); -1 is the embedding output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.errors import TargetError


class Capture:
    """Forward hooks that keep the outputs of chosen decoder layers of the latest forward pass."""

    def __init__(self, layers: nn.ModuleList, *, embedding: nn.Module, layer_ids: Sequence[int]) -> None:
        """`layer_ids` strictly increase within -1..N-2. Raises TargetError otherwise."""
        last = len(layers) - 2
        if list(layer_ids) != sorted(set(layer_ids)) or layer_ids[0] < -1 or layer_ids[-1] > last:
            raise TargetError("capture layers", got=list(layer_ids), expected=f"strictly increasing ids in -1..{last}")
        self._kept: dict[int, Tensor] = {}
        self.layer_ids = tuple(layer_ids)
        for layer_id in layer_ids:
            if layer_id == -1:
                embedding.register_forward_hook(self._keep(layer_id))
            else:
                layers[layer_id].register_forward_hook(self._keep(layer_id))

    def _keep(self, layer_id: int) -> Any:
        def hook(_module: nn.Module, _inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
            self._kept[layer_id] = output if isinstance(output, Tensor) else output[0]

        return hook

    def take(self) -> Tensor:
        """The captured states of the latest pass, [N, L, D]; the capture is empty afterwards."""
        states = torch.stack([self._kept[layer_id][0] for layer_id in self.layer_ids], dim=1)
        self._kept.clear()
        return states
