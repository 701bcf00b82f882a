"""One rank of a training run: `python -m draftsmith.jobs.train_rank --key KEY` under torchrun, or called in process."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import closing
from pathlib import Path

import torch

import draftsmith
from draftsmith.drafters.contract import SHARED, Contract, config_facts, new_parts
from draftsmith.drafters.deepspec import check_form
from draftsmith.drafters.registry import build_drafter, drafter_config
from draftsmith.errors import DraftsmithError
from draftsmith.jobs.parts import contract_facts, device_name, target_folder, trained_with
from draftsmith.jobs.stores import cache_manifest, reading_store, workspace_store
from draftsmith.jobs.train_data import (
    CacheFeed,
    Feed,
    cache_digest,
    check_arrays,
    check_cache,
    held_out_batches,
    start_backbone,
    start_head,
)
from draftsmith.jobs.train_session import Session, newest_whole
from draftsmith.jobs.train_stream import StreamFeed, planned_stream
from draftsmith.manifest import hash8, json_digest, sha256_hex
from draftsmith.params import Params, load_params
from draftsmith.paths import Workspace
from draftsmith.targets.base import load_shared
from draftsmith.targets.families import FAMILIES
from draftsmith.targets.fetch import load_chat_format
from draftsmith.training.batches import BatchShape
from draftsmith.training.checkpoint import CheckpointStore
from draftsmith.training.engine import TrainEngine, prepare_process
from draftsmith.training.launch import remove_shared_memory
from draftsmith.training.loader import StepLoader, num_micro_batches

CODE = ("nn", "drafters", "training")


def run_rank(
    workspace: Workspace, params: Params, key: str, *, rank: int, num_ranks: int, init_method: str, start_id: str
) -> None:
    """Train as one of `num_ranks` ranks; rank 0 writes checkpoints, reports and the drafter.

    `start_id` names this start of the job, the same on every rank.
    """
    prepare_process(rank=rank, num_ranks=num_ranks)
    run = params.run(key)
    recipe, row = params.train_of(key), params.drafters[run.drafter]
    store, manifest = workspace_store(workspace), cache_manifest(workspace, run.target)
    planned = planned_stream(workspace, params, manifest, run.target) if manifest.is_stream else None
    place = target_folder(workspace, params, run.target) if planned is None else planned.place
    config, chat = drafter_config(row, target=place.row, target_folder=place.folder), load_chat_format(place.folder)
    check_form(config, where="params.yaml: drafters, targets")
    made_for = contract_facts(place, chat)
    check_cache(manifest, place, chat=chat, made_for=made_for)
    identity = {
        "code": code_digest(),
        "made_for": made_for,
        "params": trained_with(params, key),
        "cache": cache_digest(manifest),
        "num_ranks": num_ranks,
    }
    checkpoints = CheckpointStore(store, f"train/{key}-{hash8(identity)}")
    folder = workspace.scratch_dir("train", key) / "checkpoints"
    fetched = newest_whole(checkpoints, folder=folder) if rank == 0 else 0
    # The other ranks' weights are rank 0's: DeepSpeed sends them when the engine is made.
    makes_start = recipe.init == "target_layers" and rank == 0 and fetched == 0
    feed: Feed
    if planned is None:
        feed = CacheFeed(reading_store(workspace), manifest, recipe=recipe)
    else:
        feed = StreamFeed(
            workspace, store, key, planned=planned, digest=cache_digest(manifest), recipe=recipe, first_step=fetched,
            wants_head_start=makes_start and row.sequential is not None, rank=rank, start_id=start_id,
        )  # fmt: skip
    with closing(feed):
        dtype, device = getattr(torch, recipe.dtype), torch.device(device_name())
        shared = load_shared(place.folder, family=FAMILIES[place.row.family]).to(dtype=dtype, device=device)
        drafter = build_drafter(config, target_folder=place.folder, shared=shared)
        check_arrays(
            feed.source.spec, config, reads_last_hidden=drafter.reads_last_hidden, prefix=feed.prefix, target=place.name
        )
        contract = Contract(
            **{**config_facts(config), **made_for}, frozen=SHARED, shared=SHARED, new=new_parts(drafter),
            data_digest=feed.source.facts["data_digest"], cache_digest=feed.digest, params=trained_with(params, key),
        )  # fmt: skip
        drafter.reset(seed=recipe.seed)
        if makes_start:
            start_backbone(drafter, place=place)
            start_head(drafter, feed.start_samples())
        feed.settle()
        shape = BatchShape(
            config.block_size, recipe.anchors, recipe.gamma_w, dtype, device,
            (len(config.capture_layers), config.geometry.hidden_size), recipe.row_tokens, drafter.reads_last_hidden,
        )  # fmt: skip
        loader = StepLoader(
            feed.source, members=feed.members.train, shape=shape, size=recipe.global_batch,
            micro_batch=recipe.micro_batch, seed=recipe.seed, rank=rank, num_ranks=num_ranks,
        )  # fmt: skip
        batches = held_out_batches(feed, recipe=recipe, shape=shape, rank=rank, num_ranks=num_ranks)
        num_micro = num_micro_batches(recipe.global_batch, num_ranks=num_ranks, micro_batch=recipe.micro_batch)
        engine = TrainEngine(drafter, recipe=recipe, loss=row.loss, num_micro=num_micro, init_method=init_method)
        session = Session(
            workspace, params, key, recipe=recipe, contract=contract, feed=feed, engine=engine, checkpoints=checkpoints,
            folder=folder, fetched=fetched,
        )  # fmt: skip
        session.run(drafter, loader=loader, held_out=batches)
        engine.close()
        feed.finish()
    if rank == 0:
        remove_shared_memory(own=True)


def code_digest() -> str:
    """sha256 over the sources that a training run's result depends on: other code never resumes its checkpoints."""
    root = Path(draftsmith.__file__).parent
    files = [path for folder in CODE for path in sorted((root / folder).glob("*.py"))]
    return json_digest([[path.name, sha256_hex(path.read_bytes())] for path in files])


def main() -> None:
    """Entry of a rank under torchrun."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--key", required=True)
    parser.add_argument("--start-id", required=True)
    options = parser.parse_args()
    workspace = Workspace.find(Path.cwd())
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        run_rank(
            workspace, load_params(workspace.params), options.key, rank=rank, num_ranks=num_ranks,
            init_method="env://", start_id=options.start_id,
        )  # fmt: skip
    except DraftsmithError as error:
        sys.stderr.write(f"draftsmith: rank {rank}: {error}\n")
        sys.stderr.flush()
        os._exit(2)


if __name__ == "__main__":
    main()
