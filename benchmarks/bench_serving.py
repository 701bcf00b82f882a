"""The serving simulator against the real engine: verification length and tokens per second at three loads.

Both serve the same prompts of the calibration split at temperature 1, all there from the beginning, with so many
requests in flight; the simulator knows the rounds of other prompts and a profile that is measured in the same run.
Needs the trained drafter of `make run`, and a machine with nothing else to do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from rows import write_row

from draftsmith.decoding.engine import Engine, Request
from draftsmith.decoding.policies import LengthPolicy, verify_all
from draftsmith.drafters.base import Drafter
from draftsmith.jobs.parts import OpenTarget, open_drafter, open_target
from draftsmith.jobs.stores import stored, workspace_store
from draftsmith.manifest import Manifest
from draftsmith.params import Params, Sampling, load_params
from draftsmith.paths import Workspace
from draftsmith.serving.engine_comparison import EngineComparison, compare_with_engine
from draftsmith.serving.policies import FixedLength, SynchronousPolicy
from draftsmith.serving.profile import Origin, Profile
from draftsmith.serving.profile_points import prefill_points, step_points
from draftsmith.serving.profiling import time_engine
from draftsmith.serving.recorded import RecordedRounds, record_rounds
from draftsmith.text.rows import Prompt, decode_prompts

KEY = "dspark_b7_2l-smollm2_135m"
COMMAND = "make run && .venv/bin/python benchmarks/bench_serving.py"
LOADS, NUM_TOKENS, SEEDS = (2, 8, 16), 64, range(8)


def requests_of(opened: OpenTarget, prompts: Sequence[Prompt], *, first_seed: int) -> list[Request]:
    system = opened.place.row.system_prompt
    return [
        Request(item.id, tuple(opened.chat.prompt_ids(item.turns[:1], (), system_prompt=system)), NUM_TOKENS,
                Sampling(temperature=1.0), seed=first_seed + place)
        for place, item in enumerate(prompts)
    ]  # fmt: skip


def record(opened: OpenTarget, drafter: Drafter, prompts: Sequence[Prompt]) -> RecordedRounds:
    """Rounds of full-length verification, by domain."""
    engine = Engine(opened.target, drafter=drafter, end_ids=opened.chat.end_ids, batch_size=max(LOADS))
    answers: dict[str, list] = {}
    for item, answer in zip(prompts, engine.generate(requests_of(opened, prompts, first_seed=0)), strict=True):
        answers.setdefault(item.domain, []).append(answer)
    return record_rounds(answers, block_size=drafter.config.block_size)


def measure_profile(params: Params, opened: OpenTarget, drafter: Drafter, prompts: Sequence[Prompt]) -> Profile:
    ids = [request.prompt_ids for request in requests_of(opened, prompts, first_seed=0)]
    timings = time_engine(opened.target, drafter=drafter, prompts=ids, row=params.profile, on_step=lambda: None)
    origin = Origin(key=KEY, block_size=drafter.config.block_size)
    return Profile.of_points(origin, points=step_points(timings.steps), prefill=prefill_points(timings.passes))


def write_rows(name: str, found: Sequence[EngineComparison], *, num_requests: int, about: str) -> None:
    for one in found:
        note = f"{num_requests} requests of up to {NUM_TOKENS} tokens, {one.max_requests} in flight, {about}"
        if name == "synchronous" and one.engine_verified:  # of a fixed length there is nothing to foretell
            write_row(
                f"simulated_length_{name}_{one.max_requests}", ours=one.simulated_length, baseline=one.engine_length,
                unit="draft tokens verified a round", bound="within 0.1", command=COMMAND,
                note=f"{note}; baseline: the engine",
            )  # fmt: skip
        write_row(
            f"simulated_throughput_{name}_{one.max_requests}", ours=one.simulated_tokens_per_s,
            baseline=one.engine_tokens_per_s, unit="tokens/s", bound="within 0.1", command=COMMAND,
            note=f"{note}; accepted length {one.simulated_accepted_length:.3f} simulated, "
            f"{one.engine_accepted_length:.3f} real; baseline: the engine",
        )  # fmt: skip


def main() -> None:
    workspace = Workspace.find()
    params = load_params(workspace.params)
    opened = open_target(workspace, params, params.run(KEY).target)
    drafter = open_drafter(workspace, params, KEY, opened=opened)
    manifest = Manifest.read(workspace.prompts_manifest, "prompts")
    split = decode_prompts(stored(workspace_store(workspace), manifest, "calibration.parquet", stage="prompts"))
    recorded, served = split[::2], split[1::2]
    rounds = record(opened, drafter, recorded)
    temperatures = json.loads((workspace.report_dir(KEY) / "calibrate.json").read_text())["temperatures"]
    profile = measure_profile(params, opened, drafter, recorded)
    costs = profile.step_costs()
    fixed_s = costs.fixed_s(max(LOADS))
    policies: dict[str, tuple[str, Callable[[], LengthPolicy]]] = {
        "synchronous": ("Algorithm 1", lambda: SynchronousPolicy(profile.table, fixed_s=fixed_s)),
        "full": ("whole blocks verified", lambda: verify_all),
        "fixed_2": ("two tokens verified", lambda: FixedLength(2)),
    }
    for name, (about, new_policy) in policies.items():
        found = compare_with_engine(
            requests_of(opened, served, first_seed=1_000), domain=[item.domain for item in served],
            target=opened.target, drafter=drafter, end_ids=opened.chat.end_ids, new_policy=new_policy,
            temperatures=temperatures, rounds=rounds, max_requests=LOADS, seeds=SEEDS, costs=costs,
        )  # fmt: skip
        write_rows(name, found, num_requests=len(served), about=about)


if __name__ == "__main__":
    main()
