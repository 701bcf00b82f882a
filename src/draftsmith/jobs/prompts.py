"""Stage `prompts`: sources and files -> three disjoint splits of prompts in the store."""

from __future__ import annotations

from draftsmith.evaluation.benchmarks import benchmark_turns
from draftsmith.jobs.benchmarks import override_folder
from draftsmith.jobs.stores import workspace_store
from draftsmith.manifest import Manifest, ObjectRecord, hash8, sha256_hex
from draftsmith.params import Params
from draftsmith.paths import Workspace
from draftsmith.text.prompts import build_prompts
from draftsmith.text.rows import encode_prompts
from draftsmith.tracking import stage_run


def run(workspace: Workspace, params: Params) -> None:
    """Build the splits, clear of every benchmark that is evaluated, and write the manifest."""
    store = workspace_store(workspace)
    names = [row.name for row in params.evaluate.benchmarks]
    with stage_run("prompts", "prompts", workspace=workspace, params=params.prompts.model_dump(), tags={}) as tracked:
        judged = benchmark_turns(names, folder=override_folder(workspace, params.evaluate))
        sets = build_prompts(params.prompts, root=workspace.root, benchmark_turns=judged)
        encoded = {split: encode_prompts(prompts) for split, prompts in sets.splits().items()}
        prefix = f"prompts/{hash8({split: sha256_hex(data) for split, data in encoded.items()})}"
        objects = []
        for split, data in encoded.items():
            store.put(f"{prefix}/{split}.parquet", data)
            objects.append(ObjectRecord(f"{split}.parquet", len(data), sha256_hex(data)))
        facts = {
            "num_prompts": {split: len(prompts) for split, prompts in sets.splits().items()},
            "counts": sets.counts,
            "kept_clear_of": names,
            "benchmarks_folder": params.evaluate.folder,
        }
        manifest = Manifest("prompts", prefix, tuple(objects), facts)
        tracked.log_json(facts, "prompts.json")
        tracked.log_metrics({f"num_{split}": len(prompts) for split, prompts in sets.splits().items()}, step=0)
        tracked.set_tags({"data_digest": manifest.digest})
    manifest.write(workspace.prompts_manifest)
