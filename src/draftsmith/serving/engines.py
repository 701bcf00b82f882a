"""What vLLM and SGLang can be told about speculation, and how: read off their source, engine by engine.

vLLM (vllm-project/vllm):
- vllm/config/speculative.py (002e77c1): `--speculative-config` takes method, model, num_speculative_tokens,
  draft_sample_method (greedy by default: drafts are then argmax and accepted as one-hot),
  `enable_adaptive_verification` (refused there unless the method is dspark) and
  `num_speculative_tokens_per_batch_size`. There is no `disable_by_batch_size` any more and no threshold on confidence.
  A method mtp is for targets with such layers of their own; a separate MTP-1 head is not among its model types.
- vllm/v1/spec_decode/dynamic/utils.py (14b450ca): entries [first, last, K] of that schedule do not overlap, the first
  begins at 1, K = 0 drafts nothing, and what lies beyond the last keeps its K.
- docs/features/speculative_decoding/dynamic_speculative_decoding.md (015a47e1): not with data parallelism; tested with
  EAGLE, EAGLE-3 and DFlash.
- docs/features/speculative_decoding/adaptive_verification.md (05084858): the budget of most expected tokens a second,
  by survival and costs that vLLM profiles at startup; not with eager execution, LoRA or pipeline parallelism.
- vllm/v1/worker/gpu/spec_decode/dspark/online_sts.py (7cb213ab): temperatures are fitted while serving. So vLLM reads
  neither sidecar.
SGLang (sgl-project/sglang):
- python/sglang/srt/arg_groups/fields/spec.py (015c8726), speculative_hook.py (004c82e0):
  `--speculative-num-draft-tokens` counts the anchor (K + 1, else refused), `--speculative-dspark-block-size` is K;
  without `--max-running-requests` it becomes 48; DSpark runs on CUDA and NPU, without pipeline parallelism. DFLASH
  drafts block size - 1 tokens (the anchor's slot drafts none). There is no threshold on confidence and, for DSpark and
  DFLASH, nothing that ends speculation at a batch size.
- python/sglang/srt/speculative/ragged_verify.py (02d548f3), dspark_components/dspark_planner.py (00c3cffa): only
  SGLANG_RAGGED_VERIFY_MODE=compact (default: static) verifies parts of blocks; it needs the confidence head, takes the
  budget from an SPS table (without one: whole blocks) and from confidences some steps old (two by default).
- python/sglang/srt/speculative/dspark_components/dspark_config.py (01f47623): DSpark needs markov_rank > 0 and warns
  if K is not the block size of the checkpoint.
- python/sglang/srt/speculative/adaptive_spec_params.py (015c8726), adaptive_step_router.py (a12239f6):
  `--speculative-adaptive` with a file of candidate steps from a batch size on (0: none), for EAGLE and EAGLE3 alone.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Engine = Literal["vllm", "sglang"]
ENGINES: tuple[Engine, ...] = ("vllm", "sglang")
NAMES: Mapping[Engine, str] = {"vllm": "vLLM", "sglang": "SGLang"}
SOURCES: Mapping[Engine, tuple[str, ...]] = {
    "vllm": (
        "vllm-project/vllm vllm/config/speculative.py 002e77c1",
        "vllm-project/vllm vllm/v1/spec_decode/dynamic/utils.py 14b450ca",
        "vllm-project/vllm docs/features/speculative_decoding/adaptive_verification.md 05084858",
        "vllm-project/vllm vllm/v1/worker/gpu/spec_decode/dspark/online_sts.py 7cb213ab",
    ),
    "sglang": (
        "sgl-project/sglang python/sglang/srt/arg_groups/fields/spec.py 015c8726",
        "sgl-project/sglang python/sglang/srt/arg_groups/speculative_hook.py 004c82e0",
        "sgl-project/sglang python/sglang/srt/speculative/dspark_components/dspark_planner.py 00c3cffa",
        "sgl-project/sglang python/sglang/srt/speculative/adaptive_spec_params.py 015c8726",
    ),
}
TARGET, DRAFTER = "TARGET", "DRAFTER"
"""Stand in commands for the folders of both models."""
ADAPTIVE_FILE = "adaptive.json"


@dataclass(frozen=True)
class Drafter:
    """What an engine must know of a drafter. `sample_from_anchor`: the anchor's slot drafts the first token."""

    kind: str
    block_size: int  # K
    confidence: bool
    sample_from_anchor: bool = True


@dataclass(frozen=True)
class Launch:
    """How to start an engine: its command, variables of its environment, files it reads, and files to write first."""

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    sidecars: tuple[str, ...] = ()
    written: Mapping[str, Any] = field(default_factory=dict)  # bodies of JSON files, by name

    @property
    def shell(self) -> str:
        """One line for a shell."""
        return " ".join([*(f"{name}={value}" for name, value in self.environment.items()), shlex.join(self.command)])


Steps = Sequence[tuple[int, int, int]]
"""Bands of concurrency: first, last, draft tokens."""


def refusal(engine: Engine, drafter: Drafter) -> str | None:
    """Why the engine cannot draft with it at all; None if it can."""
    if drafter.kind == "mtp1":
        return f"{NAMES[engine]} serves MTP layers that belong to the target's checkpoint, not a separate MTP-1 head"
    if engine == "sglang" and drafter.kind == "dflash" and drafter.sample_from_anchor:
        return (
            "SGLang's DFLASH drafts nothing in the anchor's slot, which this drafter was trained to do, and its DSPARK "
            "refuses drafters without a Markov head"
        )
    return None


def has_scheduler(engine: Engine, drafter: Drafter) -> bool:
    """Whether the engine sizes each request's verification by confidence and load."""
    return refusal(engine, drafter) is None and drafter.kind == "dspark" and drafter.confidence


def has_schedule(engine: Engine, drafter: Drafter) -> bool:
    """Whether one server can change the number of draft tokens, to none as well, with the requests in flight."""
    return refusal(engine, drafter) is None and (engine == "vllm" or drafter.kind == "eagle3")


def plain_launch(engine: Engine, *, max_requests: int) -> Launch:
    """Without speculation."""
    return Launch(_base(engine, max_requests))


def fixed_launch(
    engine: Engine, drafter: Drafter, *, num_draft_tokens: int, max_requests: int, sampled: bool
) -> Launch:
    """So many draft tokens a round, all verified. `sampled`: temperatures above 0 are served."""
    if engine == "vllm":
        return _vllm(drafter, num_draft_tokens, max_requests=max_requests, sampled=sampled)
    return Launch((*_base(engine, max_requests), *_sglang(drafter, num_draft_tokens, sampled=sampled)))


def scheduler_launch(engine: Engine, drafter: Drafter, *, max_requests: int, sampled: bool) -> Launch:
    """Whole blocks are drafted; the engine's scheduler decides how much is verified."""
    if engine == "vllm":
        return _vllm(drafter, drafter.block_size, max_requests=max_requests, sampled=sampled,
                     enable_adaptive_verification=True)  # fmt: skip
    files = ("sps.json", "sts.json")
    flags = (
        *_sglang(drafter, drafter.block_size, sampled=sampled),
        "--speculative-dspark-sps-table-path", files[0], "--speculative-dspark-confidence-sts-path", files[1],
    )  # fmt: skip
    return Launch((*_base(engine, max_requests), *flags), {"SGLANG_RAGGED_VERIFY_MODE": "compact"}, files)


def schedule_launch(engine: Engine, drafter: Drafter, *, steps: Steps, max_requests: int, sampled: bool) -> Launch:
    """Draft tokens by the requests in flight; at least one band drafts."""
    most = max(tokens for _, _, tokens in steps)
    if engine == "vllm":
        return _vllm(drafter, most, max_requests=max_requests, sampled=sampled,
                     num_speculative_tokens_per_batch_size=[list(step) for step in steps])  # fmt: skip
    body = {str(first): {"candidate_steps": [tokens]} for first, _, tokens in steps}
    flags = ("--speculative-adaptive", "--speculative-adaptive-config", ADAPTIVE_FILE)
    command = (*_base(engine, max_requests), *_sglang(drafter, most, sampled=sampled), *flags)
    return Launch(command, written={ADAPTIVE_FILE: body})


def _base(engine: Engine, max_requests: int) -> tuple[str, ...]:
    if engine == "vllm":
        return "vllm", "serve", TARGET, "--max-num-seqs", str(max_requests)
    start = ("python", "-m", "sglang.launch_server", "--model-path", TARGET)
    return (*start, "--max-running-requests", str(max_requests))


def _vllm(drafter: Drafter, num_draft_tokens: int, *, max_requests: int, sampled: bool, **more: Any) -> Launch:
    # A DFlash that drafts in the anchor's slot is what vLLM's method dspark runs, without a Markov head.
    method = "dspark" if drafter.kind == "dflash" and drafter.sample_from_anchor else drafter.kind
    config = {
        "method": method,
        "model": DRAFTER,
        "num_speculative_tokens": num_draft_tokens,
        **({"draft_sample_method": "probabilistic"} if sampled else {}),
        **more,
    }
    return Launch((*_base("vllm", max_requests), "--speculative-config", json.dumps(config)))


def _sglang(drafter: Drafter, num_draft_tokens: int, *, sampled: bool) -> tuple[str, ...]:
    start = ("--speculative-algorithm", drafter.kind.upper(), "--speculative-draft-model-path", DRAFTER)
    counted = ("--speculative-num-draft-tokens", str(num_draft_tokens + 1))
    if drafter.kind == "dspark":
        return (*start, "--speculative-dspark-block-size", str(num_draft_tokens), *counted)
    if drafter.kind == "eagle3":
        chain = ("--speculative-num-steps", str(num_draft_tokens), "--speculative-eagle-topk", "1")
        return (*start, *chain, *counted, *(("--speculative-use-rejection-sampling",) if sampled else ()))
    return (*start, *counted)
