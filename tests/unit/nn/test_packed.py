"""Packed matrices multiply as plain ones do, to the bit, and everything that runs on them writes the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from draftsmith.decoding.engine import Engine, Request
from draftsmith.drafters.base import Drafter
from draftsmith.nn.packed import PackedLinear, PackedMatrix, can_pack, pack_linears
from draftsmith.params import Sampling
from draftsmith.targets.base import Target, load_target
from draftsmith.targets.families import FAMILIES
from tests.tiny_models import KINDS, random_ids, randomize, tiny_drafter, tiny_folders

__all__ = ["tiny_folders"]

needs_packing = pytest.mark.skipif(
    not can_pack(torch.zeros(2, 2, dtype=torch.bfloat16)), reason="this processor has no bfloat16 products to pack for"
)


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_only_bfloat16_on_a_cpu_is_packed() -> None:
    assert not can_pack(torch.zeros(2, 2))
    assert not can_pack(torch.zeros(2, 2, dtype=torch.bfloat16, device="meta"))


@needs_packing
@pytest.mark.parametrize(("size_in", "size_out"), [(64, 48), (37, 101), (576, 192), (256, 3001)])
@pytest.mark.parametrize("num_rows", [1, 2, 7, 16, 33, 130])
def test_products_are_the_same_to_the_bit(size_in: int, size_out: int, num_rows: int) -> None:
    weight, rows, bias = random(size_out, size_in, seed=1), random(num_rows, size_in, seed=2), random(size_out, seed=3)
    packed = PackedMatrix(weight)
    assert torch.equal(packed.multiply(rows), nn.functional.linear(rows, weight))
    assert torch.equal(packed.multiply(rows.unsqueeze(0))[0], nn.functional.linear(rows, weight))
    exact = rows.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(packed.multiply(rows, bias=bias).double(), exact, rtol=2**-7, atol=2**-7)


@needs_packing
def test_a_layer_with_bias_is_packed_and_others_are_left() -> None:
    module = nn.Sequential(nn.Linear(8, 4), nn.Sequential(nn.Linear(4, 4, bias=False), nn.SiLU()), nn.LayerNorm(4))
    module.bfloat16().requires_grad_(False)
    rows = random(3, 8, seed=4)
    expected = module(rows)
    pack_linears(module)
    assert isinstance(module[0], PackedLinear)
    assert isinstance(module[1][0], PackedLinear)
    assert isinstance(module[2], nn.LayerNorm)
    torch.testing.assert_close(module(rows), expected, rtol=2**-7, atol=2**-7)
    full = nn.Linear(8, 4)
    pack_linears(nn.Sequential(full))
    assert full.weight.dtype == torch.float32


def decode(target: Target, drafter: Drafter | None) -> list[tuple[tuple[int, ...], tuple[object, ...]]]:
    engine = Engine(target, drafter=drafter, end_ids=[], batch_size=3)
    requests = [
        Request(f"r{seed}", tuple(random_ids(5 + 4 * seed, seed=seed)), 12, Sampling(temperature=float(seed % 2)), seed)
        for seed in range(4)
    ]
    return [(one.token_ids, one.rounds) for one in engine.generate(requests)]


@needs_packing
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_is_the_same_to_the_bit(
    family: str, kind: str, tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain and speculative, every family and kind, with packed matrices and without."""
    folder = tiny_folders[family]

    def opened() -> tuple[Target, Drafter]:
        drafter = tiny_drafter(kind, folder, seed=3)
        layers = drafter.config.capture_layers
        target = load_target(folder, family=FAMILIES[family], capture_layers=layers, dtype="bfloat16", device="cpu")
        randomize(drafter, seed=8, std=0.2)
        drafter.bfloat16().eval().requires_grad_(False)
        drafter.shared = target.shared
        pack_linears(drafter)
        return target, drafter

    def num_packed(target: Target, drafter: Drafter) -> int:
        return sum(isinstance(item, PackedLinear) for item in (*target.model.modules(), *drafter.modules()))

    packed = opened()
    for module in ("draftsmith.nn.packed", "draftsmith.targets.base"):
        monkeypatch.setattr(f"{module}.can_pack", lambda _: False)
    plain = opened()
    assert num_packed(*packed) > 20
    assert packed[0].shared.packed_head is not None
    assert num_packed(*plain) == 0
    assert plain[0].shared.packed_head is None
    assert decode(packed[0], None) == decode(plain[0], None)
    assert decode(*packed) == decode(*plain)
