"""`draftsmith cache fidelity`: what each codec changes, from the hidden states to the drafters trained from them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from numpy.typing import NDArray

from draftsmith.cache.arrays import SampleArrays
from draftsmith.cache.fidelity import bf16_values, measure_states
from draftsmith.cache.plan import CacheSpec, Codec, PlannedSample, array_layouts
from draftsmith.cache.reader import CachedSample, CacheReader
from draftsmith.cache.scales import fit_scales
from draftsmith.cache.shard import ShardCodec
from draftsmith.decoding.rounds import Generation
from draftsmith.drafters.contract import CONTRACT_NAME, Contract
from draftsmith.errors import CacheError, ContractError, DraftsmithError
from draftsmith.evaluation.accepted_length import compare_accepted_length, measure_accepted_length
from draftsmith.jobs.calibrate import decode_rounds
from draftsmith.jobs.parts import target_folder, trained_with
from draftsmith.jobs.stores import cache_manifest, reading_store, stored, workspace_store
from draftsmith.jobs.train_data import cache_digest
from draftsmith.manifest import Manifest, write_bytes, write_json
from draftsmith.params import Params, load_params
from draftsmith.paths import Workspace
from draftsmith.provenance import read_hardware
from draftsmith.targets.base import SharedWeights, load_shared
from draftsmith.targets.families import FAMILIES
from draftsmith.text.rows import decode_prompts
from draftsmith.tracking import stage_run

CODECS: tuple[Codec, ...] = ("plain", "bf16", "int8")
BASELINE: Codec = "plain"
MAX_TOKENS = 16384
KL_ROWS = 512  # of logits at a time
BOOTSTRAP_SEED = 0


def run(workspace: Workspace, params: Params, key: str, *, states_only: bool) -> str:
    """Measure every codec on the cached states of the target of `key` and, unless `states_only`, train the drafter of
    `key` from a cache of each codec with the same seed and steps and compare the accepted lengths.

    Writes reports/fidelity-<target>.json and .md, and returns the latter. Raises CacheError if the cache at hand is
    not lossless: then the exact states are not there.
    """
    name = params.run(key).target
    with stage_run(
        "fidelity", key, workspace=workspace, params={"states_only": states_only}, tags={"target": name}
    ) as tracked:
        body: dict[str, Any] = {
            "schema_version": 1,
            "target": name,
            "key": key,
            "machine": read_hardware().description,
            "states": measure_cached_states(workspace, params, name),
            "trained": None if states_only else measure_trained(workspace, params, key),
        }
        text = markdown(body)
        tracked.log_json(body, "fidelity.json")
        tracked.log_text(text, "fidelity.md")
    folder = workspace.root / "reports"
    write_bytes(folder / f"fidelity-{name}.md", text.encode())
    write_json(folder / f"fidelity-{name}.json", body)
    return text


def measure_cached_states(workspace: Workspace, params: Params, name: str) -> dict[str, Any]:
    """By codec: ratio, relative error by layer, and the KL divergence of the target's logits from the decoded states.

    From the first samples of the target's own (lossless) cache, MAX_TOKENS tokens at most; an int8 codec is fitted on
    those of them that the writer would take.
    """
    reader = CacheReader(reading_store(workspace), cache_manifest(workspace, name))
    if reader.spec.codec not in ("plain", "bf16"):
        raise CacheError(
            f"the cache of {name} is lossy, so the exact states are not there",
            got=f"codec {reader.spec.codec}",
            expected="a cache of codec bf16 or plain to measure from",
            where=f"params.yaml: targets.{name}.codec",
        )
    planned, samples = _first_samples(reader)
    place = target_folder(workspace, params, name)
    shared = load_shared(place.folder, family=FAMILIES[place.row.family])
    lengths = np.array([len(sample.input_ids) for sample in samples])
    first_rows = np.cumsum(lengths) - lengths
    scales = fit_scales(zip(planned, map(_arrays, samples), strict=True), spec=reader.spec)
    found: dict[str, Any] = {"num_samples": len(samples), "num_tokens": int(lengths.sum()), "codecs": {}}
    for codec in CODECS:
        spec = _with_codec(reader, codec)
        arrays: dict[str, NDArray[np.uint16]] = {
            "context": np.concatenate([sample.context for sample in samples]),
            "last_hidden": np.concatenate([sample.last_hidden for sample in samples]),
        }
        result: dict[str, Any] = {}
        for layout in (item for item in array_layouts(spec) if item.name in arrays):
            rows = arrays[layout.name]
            coder = ShardCodec(layout, spec=spec, scales=scales[layout.name] if codec == "int8" else None)
            data = coder.encode(rows)
            if data is None:
                raise CacheError(f"no rows of {layout.name} to measure", where=f"the cache of {name}")
            decoded = coder.decode(data, num_rows=len(rows), where=layout.name)
            shaped = (rows, decoded) if rows.ndim == 3 else (rows[:, None], decoded[:, None])
            starts = first_rows if layout.rows == "tokens" else np.zeros(0, np.int64)
            measured = asdict(measure_states(*shaped, first_rows=starts, stored_bytes=len(data)))
            if layout.name == "last_hidden":
                measured["logit_kl"] = logit_kl(rows, decoded, shared=shared)
            result[layout.name] = measured
        found["codecs"][codec] = result
    found["layers"] = list(place.row.capture_layers)
    return found


def logit_kl(exact: NDArray[np.uint16], decoded: NDArray[np.uint16], *, shared: SharedWeights) -> dict[str, float]:
    """KL(target from exact states || from decoded ones) in nats over rows [n, D]: mean and largest."""
    sums, largest = 0.0, 0.0
    head = SharedWeights(shared.embedding, shared.head.float(), shared.embedding_scale, shared.logit_softcap)
    for start in range(0, len(exact), KL_ROWS):
        p, q = (
            head.logits(torch.from_numpy(bf16_values(rows[start : start + KL_ROWS]))).log_softmax(dim=-1)
            for rows in (exact, decoded)
        )
        divergence = (p.exp() * (p - q)).sum(dim=-1).double()
        sums += divergence.sum().item()
        largest = max(largest, divergence.max().item())
    return {"mean": sums / len(exact), "largest": largest}


def measure_trained(workspace: Workspace, params: Params, key: str) -> dict[str, Any]:
    """By codec: a drafter trained from its cache (same seed, steps, data), decoded on the calibration prompts.

    For the target's own codec that is the drafter of this working copy. Raises ContractError if it is not trained, or
    not from the cache that is here.
    """
    prompts = Manifest.read(workspace.prompts_manifest, "prompts")
    split = decode_prompts(stored(workspace_store(workspace), prompts, "calibration.parquet", stage="prompts"))
    generations: dict[str, tuple[Generation, ...]] = {}
    weights: dict[str, bytes] = {}
    found: dict[str, Any] = {}
    own_codec = params.target(params.run(key).target).codec
    for codec in CODECS:
        copy = workspace if codec == own_codec else build_copy(workspace, params, key, codec=codec)
        own = load_params(copy.params)
        check_made_here(copy, own, key)
        weights[codec] = (copy.drafter_dir(key) / "model.safetensors").read_bytes()
        same = weights[codec] == weights[BASELINE]
        generations[codec] = (
            generations[BASELINE]
            if same and codec != BASELINE
            else decode_rounds(copy, own, key, prompts=split)  # an equal drafter decodes equally
        )
        block_size = own.drafters[own.run(key).drafter].block_size
        measured = measure_accepted_length(generations[codec], block_size=block_size, seed=BOOTSTRAP_SEED)
        difference = compare_accepted_length(generations[codec], baseline=generations[BASELINE], seed=BOOTSTRAP_SEED)
        manifest = cache_manifest(copy, own.run(key).target)
        found[codec] = {
            "stored_bytes": manifest.num_bytes,
            "accepted_length": measured.accepted_length,
            "accepted_length_interval": measured.accepted_length_interval,
            "num_prompts": measured.num_prompts,
            "num_rounds": measured.num_rounds,
            "difference": difference.value,
            "difference_interval": difference.interval,
            "weights_identical": same,
        }
    return {"temperature": params.calibrate.temperature, "steps": params.train_of(key).steps, "codecs": found}


def build_copy(workspace: Workspace, params: Params, key: str, *, codec: Codec) -> Workspace:
    """A working copy under data/scratch whose params differ in the codec alone, with cache and drafter built there.

    It shares the store, the target and the answers; run again, it goes on where it was.
    """
    name = params.run(key).target
    root = _copy_root(workspace, codec)
    copy = Workspace(root)
    raw = yaml.safe_load(workspace.params.read_text())
    raw["targets"][name]["codec"] = codec
    raw["runs"] = {key: raw["runs"][key]}
    raw["active_targets"] = [name]
    for path, twin in (
        (workspace.answers_manifest(name), copy.answers_manifest(name)),
        (workspace.prompts_manifest, copy.prompts_manifest),
    ):
        twin.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, twin)
    targets = root / "data" / "targets"
    if not targets.exists():
        targets.symlink_to(workspace.data / "targets")
    write_bytes(copy.params, yaml.safe_dump(raw).encode())
    environment = {**os.environ, "DRAFTSMITH_STORE": workspace.store_uri}
    for command in (["cache", "build", "--target", name], ["train", "--key", key]):
        if command[0] == "train" and _is_trained(copy, key):
            continue
        words = [sys.executable, "-m", "draftsmith.cli", *command]
        status = subprocess.run(words, cwd=root, env=environment, check=False).returncode
        if status != 0:
            raise DraftsmithError(
                f"draftsmith {' '.join(command)} ended with status {status}", expected="see the message above"
            )
    return copy


def check_made_here(workspace: Workspace, params: Params, key: str) -> None:
    """Raises ContractError that names the first field if the drafter of `key` was trained from another cache than the
    working copy's, or with other params."""
    folder, manifest = workspace.drafter_dir(key), cache_manifest(workspace, params.run(key).target)
    Contract.read(folder).check(
        {
            "data_digest": manifest.facts["data_digest"],
            "cache_digest": cache_digest(manifest),
            "params": trained_with(params, key),
        },
        meets=f"the fidelity job, which measures {manifest.prefix},",
        where=f"{folder / CONTRACT_NAME}; `draftsmith train --key {key}`",
    )


def _is_trained(copy: Workspace, key: str) -> bool:
    """Whether a copy holds the finished drafter of its own cache and params."""
    if not (copy.drafter_dir(key) / "model.safetensors").is_file():
        return False
    try:
        check_made_here(copy, load_params(copy.params), key)
    except ContractError:
        return False
    return True


def markdown(body: Mapping[str, Any]) -> str:
    """The report for people: one table of states and one of drafters."""
    states = body["states"]
    layers = states["layers"]
    lines = [
        f"# Fidelity of the cache's codecs, target {body['target']}",
        "",
        f"{states['num_tokens']} tokens of {states['num_samples']} samples; "
        "relative error: mean over tokens of |x' - x| / |x|.",
        "",
        "| codec | ratio | " + " | ".join(f"layer {layer}" for layer in layers) + " | last hidden | logit KL (nats) |",
        "|---|---|" + "---|" * (len(layers) + 2),
    ]
    for codec, arrays in states["codecs"].items():
        context, last = arrays["context"], arrays["last_hidden"]
        cells = [_error(value, identical=context["identical"]) for value in context["relative_error"]]
        cells.append(_error(last["relative_error"][0], identical=last["identical"]))
        lines.append(f"| {codec} | {context['ratio']:.3f} | {' | '.join(cells)} | {last['logit_kl']['mean']:.2g} |")
    trained = body["trained"]
    if trained is not None:
        lines += [
            "",
            f"Drafters of {body['key']} trained from each ({trained['steps']} steps, same seed and data), accepted "
            f"length with bonus at temperature {trained['temperature']:g}; 95 % intervals by bootstrap over prompts, "
            "paired for the difference.",
            "",
            "| codec | cache | accepted length | less that from plain | weights |",
            "|---|---|---|---|---|",
        ]
        for codec, row in trained["codecs"].items():
            same = "identical to plain's" if row["weights_identical"] else "differ from plain's"
            lines.append(
                f"| {codec} | {row['stored_bytes'] / 1e6:.0f} MB | {row['accepted_length']:.3f} "
                f"{_interval(row['accepted_length_interval'])} | {row['difference']:+.3f} "
                f"{_interval(row['difference_interval'])} | {same} |"
            )
    return "\n".join([*lines, "", f"Measured on {body['machine']}.", ""])


def _first_samples(reader: CacheReader) -> tuple[list[PlannedSample], list[CachedSample]]:
    planned: list[PlannedSample] = []
    samples: list[CachedSample] = []
    filled = 0
    for index, sample in enumerate(reader.samples):
        if samples and filled + sample.num_tokens > min(MAX_TOKENS, reader.spec.shard_tokens):
            break
        planned.append(sample)
        samples.append(reader.read(index, epoch=-1))
        filled += sample.num_tokens
    return planned, samples


def _arrays(sample: CachedSample) -> SampleArrays:
    return SampleArrays(sample.input_ids, sample.supervised, sample.context, sample.last_hidden)


def _with_codec(reader: CacheReader, codec: Codec) -> CacheSpec:
    return replace(reader.spec, codec=codec)


def _copy_root(workspace: Workspace, codec: Codec) -> Path:
    return workspace.scratch_dir("fidelity", codec)


def _error(value: float, *, identical: bool) -> str:
    return "0 (bit for bit)" if identical else f"{value:.4f}"


def _interval(values: Sequence[float] | None) -> str:
    return "" if values is None else f"[{values[0]:.3f}, {values[1]:.3f}]"
