"""The sliced draft loss against the plain one: peak memory above the inputs, and time forward + backward.

Shapes of the default run's target: V = 49,152, D = 576, r = 256; bf16 and float32; 1,792 and 3,584 slots. The plain
loss holds full logits and leaves the gradients to autograd; both give the same outputs. Memory is the peak resident
set of a process that does one step, above what it had with the inputs made. Time is the median of alternating steps.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rows import write_row
from torch import Tensor
from torch.nn import functional

from draftsmith.nn.losses import draft_loss

VOCAB, HIDDEN, RANK = 49_152, 576, 256
SLOTS = (1_792, 3_584)
THREADS = 2
CE_WEIGHT, TV_WEIGHT = 0.1, 0.9
TIME_BOUNDS = {"bfloat16": "<= 0.7", "float32": "<= 0.85"}
MEMORY_BOUND = f"<= {1 / 7:.6f}"
COMMAND = "python benchmarks/bench_loss.py"
STATUS = Path("/proc/self/status")


@dataclass
class Operands:
    """hidden [n, D], feature [n, r], output_weight [V, r]: learnt; head [V, D], target_hidden [n, D]; labels [n]."""

    hidden: Tensor
    feature: Tensor
    output_weight: Tensor
    head: Tensor
    target_hidden: Tensor
    labels: Tensor
    weights: Tensor

    @classmethod
    def draw(cls, num: int, *, dtype: torch.dtype, vocab: int = VOCAB) -> Operands:
        generator = torch.Generator().manual_seed(0)

        def normal(rows: int, columns: int, scale: float) -> Tensor:
            return (torch.randn(rows, columns, generator=generator) * scale).to(dtype)

        return cls(
            hidden=normal(num, HIDDEN, 1.0).requires_grad_(True),
            feature=normal(num, RANK, 1.0).requires_grad_(True),
            output_weight=normal(vocab, RANK, 0.05).requires_grad_(True),
            head=normal(vocab, HIDDEN, 0.1),
            target_hidden=normal(num, HIDDEN, 1.0),
            labels=torch.randint(vocab, (num,), generator=generator),
            weights=torch.rand(num, generator=generator),
        )

    def learnt(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.hidden, self.feature, self.output_weight


Loss = Callable[[Operands], tuple[Tensor, Tensor, Tensor]]
"""Operands -> (total, acceptance [n], correct [n])."""


def plain_loss(operands: Operands) -> tuple[Tensor, Tensor, Tensor]:
    logits = (operands.hidden @ operands.head.T + operands.feature @ operands.output_weight.T).float()
    target = (operands.target_hidden @ operands.head.T).float().softmax(-1)
    ce = functional.cross_entropy(logits, operands.labels, reduction="none")
    tv = (logits.softmax(-1) - target).abs().sum(-1)
    total = ((CE_WEIGHT * ce + TV_WEIGHT * tv) * operands.weights).sum()
    return total, (1 - 0.5 * tv.detach()).clamp(0, 1), logits.argmax(-1) == operands.labels


def sliced_loss(operands: Operands) -> tuple[Tensor, Tensor, Tensor]:
    loss = draft_loss(
        operands.hidden,
        feature=operands.feature,
        output_weight=operands.output_weight,
        head=operands.head,
        target_hidden=operands.target_hidden,
        labels=operands.labels,
        weights=operands.weights,
        ce_weight=CE_WEIGHT,
        tv_weight=TV_WEIGHT,
    )
    return loss.total, loss.acceptance, loss.correct


LOSSES: dict[str, Loss] = {"ours": sliced_loss, "plain": plain_loss}


def step(loss: Loss, operands: Operands) -> float:
    """Forward and backward; seconds."""
    for tensor in operands.learnt():
        tensor.grad = None
    start = time.perf_counter()
    loss(operands)[0].backward()
    return time.perf_counter() - start


def resident(field: str) -> float:
    """MB of VmRSS (now) or VmHWM (peak since the last reset)."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def peak_memory(loss: Loss, num: int, dtype: torch.dtype) -> float:
    """MB of one step above the inputs; the libraries have run before, on a vocabulary of 64."""
    operands = Operands.draw(num, dtype=dtype)
    step(loss, Operands.draw(8, dtype=dtype, vocab=64))
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is resident
    before = resident("VmRSS")
    step(loss, operands)
    return resident("VmHWM") - before


def memory_in_process(name: str, num: int, dtype: str) -> float:
    command = [sys.executable, __file__, "--memory", name, "--slots", str(num), "--dtype", dtype]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def largest_difference(operands: Operands) -> float:
    """Of the gradients of the two losses: the largest relative difference, as norms."""
    gradients = []
    for loss in LOSSES.values():
        step(loss, operands)
        gradients.append([tensor.grad.float() for tensor in operands.learnt() if tensor.grad is not None])
    return max(float((a - b).norm() / b.norm()) for a, b in zip(*gradients, strict=True))


def measure(num: int, dtype: str, *, rounds: int) -> None:
    memory = {name: memory_in_process(name, num, dtype) for name in LOSSES}
    operands = Operands.draw(num, dtype=getattr(torch, dtype))
    difference = largest_difference(operands)
    seconds: dict[str, list[float]] = {name: [] for name in LOSSES}
    for _ in range(rounds):
        for name, loss in LOSSES.items():
            seconds[name].append(step(loss, operands))
    note = f"V {VOCAB}, D {HIDDEN}, r {RANK}; gradients differ by {difference:.1e} at most"
    write_row(
        f"loss_memory_{dtype}_{num}",
        ours=memory["ours"],
        baseline=memory["plain"],
        unit="MB peak above the inputs",
        bound=MEMORY_BOUND,
        command=COMMAND,
        note=note,
    )
    write_row(
        f"loss_time_{dtype}_{num}",
        ours=statistics.median(seconds["ours"]),
        baseline=statistics.median(seconds["plain"]),
        unit="s forward + backward",
        bound=TIME_BOUNDS[dtype],
        command=COMMAND,
        note=f"{note}; median of {rounds} alternating steps, {THREADS} threads",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slots", type=int, action="append", help="default: all")
    parser.add_argument("--dtype", choices=sorted(TIME_BOUNDS), action="append", help="default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", choices=sorted(LOSSES), help="print the peak memory of one loss, and no more")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    slots, dtypes = options.slots or SLOTS, options.dtype or list(TIME_BOUNDS)
    if options.memory:
        sys.stdout.write(f"{peak_memory(LOSSES[options.memory], slots[0], getattr(torch, dtypes[0]))}\n")
        return
    for dtype in dtypes:
        for num in slots:
            measure(num, dtype, rounds=options.rounds)


if __name__ == "__main__":
    main()
