"""DeepSpeed behind a small face; the only import of it.

The loss of a step is normalised over the global accumulated batch (all ranks and micro-steps), so micro-batches of
different sizes weigh right: sum of terms / sum of weights.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.drafters.base import Drafter, LossSums
from draftsmith.errors import StoreError, TrainingError
from draftsmith.nn.block import BlockBatch
from draftsmith.params import LossWeights, Train


@dataclass(frozen=True)
class StepResult:
    """Of one update over all ranks: normalised losses, gradient norm, and what was counted."""

    loss: float
    ce: float
    tv: float
    bce: float
    acceptance: tuple[float, ...]
    num_slots: int
    num_anchors: int
    num_tokens: int
    grad_norm: float


class _LossModule(nn.Module):
    """What DeepSpeed wraps: forward = the drafter's losses."""

    def __init__(self, drafter: Drafter, weights: LossWeights) -> None:
        super().__init__()
        self.drafter, self.weights = drafter, weights

    def forward(self, batch: BlockBatch) -> LossSums:
        return self.drafter.losses(batch, weights=self.weights)


def prepare_process(*, rank: int, num_ranks: int) -> None:
    """Set the environment of a rank before DeepSpeed is imported (its accelerator is chosen at import)."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("RANK", str(rank))
    os.environ.setdefault("LOCAL_RANK", str(rank))
    os.environ.setdefault("WORLD_SIZE", str(num_ranks))
    os.environ.setdefault("LOCAL_WORLD_SIZE", str(num_ranks))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)


class TrainEngine:
    """A drafter under DeepSpeed: one `update` per step, checkpoints, scalar reductions."""

    def __init__(self, drafter: Drafter, *, recipe: Train, loss: LossWeights, num_micro: int, init_method: str) -> None:
        """`num_micro`: micro-batches a rank and step; `init_method`: a torch.distributed rendezvous."""
        import deepspeed
        from deepspeed import comm

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        if not comm.is_initialized():
            deepspeed.init_distributed(
                dist_backend=backend, init_method=init_method, rank=int(os.environ["RANK"]),
                world_size=int(os.environ["WORLD_SIZE"]), auto_mpi_discovery=False, verbose=False,
            )  # fmt: skip
        self.rank, self.num_ranks = comm.get_rank(), comm.get_world_size()
        self._comm = comm
        self.num_micro, self.block_size = num_micro, drafter.config.block_size
        self._norm_is_ours = recipe.zero_stage == 0 and recipe.dtype == "float32"
        self.drafter = drafter
        optimizer = torch.optim.AdamW(
            [parameter for parameter in drafter.parameters() if parameter.requires_grad],
            lr=recipe.lr,
            weight_decay=recipe.weight_decay,
            fused=True,
        )
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=_LossModule(drafter, loss),
            optimizer=optimizer,
            config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": num_micro,
                "gradient_clipping": recipe.clip_norm,
                "bf16": {"enabled": recipe.dtype == "bfloat16"},
                "zero_optimization": {"stage": recipe.zero_stage},
                "zero_allow_untested_optimizer": True,
                "steps_per_print": 10**9,
                "wall_clock_breakdown": False,
            },
        )
        for state in optimizer.state.values():
            state["step"].zero_()  # without ZeRO, DeepSpeed makes bfloat16's state by a step that AdamW would count

    @property
    def device(self) -> torch.device:
        return self.engine.device

    def update(self, batches: Sequence[BlockBatch], *, lr: float, where: str) -> StepResult:
        """One optimiser update over this rank's micro-batches. Raises TrainingError on a loss that is not finite.

        `where` describes the step for the error text.
        """
        counts = [float(self.drafter.batch_weight(batch)) for batch in batches]
        weight = self.sum(torch.tensor([sum(counts)], dtype=torch.float64))[0].item()
        if weight == 0:
            raise TrainingError(f"no valid anchor in the whole batch of {where}")
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        totals = torch.zeros(7 + 2 * self.block_size, dtype=torch.float64)
        for batch in batches:
            sums: LossSums = self.engine(batch)
            scaled = sums.total * (self.num_ranks * self.num_micro / weight)
            if batch.num_slots == 0:
                scaled = sum((parameter.sum() * 0.0 for parameter in self.drafter.parameters()), start=scaled)
            self.engine.backward(scaled)
            norm = self._grad_norm() if self._norm_is_ours else None
            self.engine.step()
            totals += self._tally(sums, batch)
        totals = self.sum(totals)
        loss = totals[0].item() / weight
        if not torch.isfinite(totals[0]):
            raise TrainingError(f"loss is not finite at {where}", got=loss)
        size = self.block_size
        reached, seen = totals[7 : 7 + size], totals[7 + size :]
        return StepResult(
            loss=loss,
            ce=totals[1].item() / weight,
            tv=totals[2].item() / weight,
            bce=totals[3].item() / weight,
            acceptance=tuple((reached / seen.clamp(min=1)).tolist()),
            num_slots=int(totals[4].item()),
            num_anchors=int(totals[5].item()),
            num_tokens=int(totals[6].item()),
            grad_norm=float(norm if norm is not None else self.engine.get_global_grad_norm()),
        )

    def _grad_norm(self) -> float:
        """Norm of the reduced gradients before the update; DeepSpeed keeps none for float32 without ZeRO."""
        gradients = [item.grad for item in self.drafter.parameters() if item.grad is not None]
        return float(nn.utils.get_total_norm(gradients))

    def _tally(self, sums: LossSums, batch: BlockBatch) -> Tensor:
        bce = 0.0 if sums.bce is None else float(sums.bce)
        head = [float(sums.total.detach()), float(sums.ce), float(sums.tv), bce, batch.num_slots, batch.num_anchors]
        slots, size = sums.slot_number.cpu(), self.block_size
        reached = torch.bincount(slots, weights=sums.acceptance.double().cpu(), minlength=size)
        seen = torch.bincount(slots, minlength=size).double()
        return torch.cat((torch.tensor([*head, batch.num_tokens], dtype=torch.float64), reached, seen))

    def sum(self, values: Tensor) -> Tensor:
        """Sum of a float64 vector over all ranks."""
        if self.num_ranks > 1:
            values = values.to(self.device)
            self._comm.all_reduce(values)
        return values.cpu()

    def barrier(self) -> None:
        if self.num_ranks > 1:
            self._comm.barrier()

    def save(self, folder: Path, *, tag: str, state: Mapping[str, Any]) -> None:
        """Write this rank's part of a checkpoint below `folder`/`tag`. Raises StoreError if the disk refuses."""
        try:
            self.engine.save_checkpoint(str(folder), tag=tag, client_state=dict(state), save_latest=False)
        except RuntimeError as error:
            # How torch's file writer reports a full disk.
            if "inline_container" not in str(error):
                raise
            raise StoreError(
                f"cannot write checkpoint {tag} in {folder}",
                got=" ".join(str(error).split())[:200],
                expected="a writable disk with room",
            ) from None

    def load(self, folder: Path, *, tag: str) -> dict[str, Any]:
        """Load a checkpoint; returns its state. Raises TrainingError if it is not there or DeepSpeed refuses it."""
        found = (folder / tag).is_dir()
        path, state = self.engine.load_checkpoint(str(folder), tag=tag) if found else (None, {})
        if path is None:
            raise TrainingError(f"checkpoint cannot be loaded from {folder / tag}")
        return dict(state)

    def close(self) -> None:
        """Leave the process group in step with the other ranks."""
        self.barrier()
        self.engine.destroy()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
