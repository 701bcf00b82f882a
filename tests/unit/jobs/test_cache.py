"""The cache job on the tiny target: what it plans, what the target computes for it, and what it says at its end."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from draftsmith.cache.claims import Claim
from draftsmith.cache.commits import claim_path
from draftsmith.cache.plan import LastHidden
from draftsmith.cache.references import read_references
from draftsmith.cache.schema import read_metadata
from draftsmith.errors import ParamsError, ShardClaimedError
from draftsmith.jobs import cache as job
from draftsmith.jobs.cache import Computer, planned_cache
from draftsmith.jobs.parts import load_placed
from draftsmith.jobs.stores import workspace_store
from draftsmith.manifest import Manifest, ObjectRecord, sha256_hex
from draftsmith.nn.kv import FlatBatch
from draftsmith.params import Params, load_params
from draftsmith.paths import Workspace
from draftsmith.text.answers import AnswerRow, Split, encode_answers
from tests.line_fixtures import PARAMS, TARGET, tiny_target
from tests.line_target import VOCAB_SIZE
from tests.unit.cache.toy import DyingStore, elsewhere

__all__ = ["tiny_target"]


class Recorder:
    """What a job logs to MLflow."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}

    def log_metrics(self, values: Mapping[str, float], *, step: int) -> None:
        self.metrics |= values

    def log_dataset(self, **_: str) -> None:
        return


@pytest.fixture
def tracked(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Metrics of the job, kept here instead of in MLflow, whose data base takes seconds to set up."""
    recorder = Recorder()

    @contextmanager
    def stage_run(*_: object, **__: object) -> Iterator[Recorder]:
        yield recorder

    monkeypatch.setattr(job, "stage_run", stage_run)
    return recorder


def answer(number: int) -> AnswerRow:
    draw = np.random.default_rng(number)
    prompt, text = draw.integers(5, VOCAB_SIZE, 4 + number), draw.integers(5, VOCAB_SIZE, 40 + 9 * number)
    split: Split = "validation" if number == 3 else "train"
    return AnswerRow(f"answer-{number}", split, "chat", 0, tuple(prompt.tolist()), tuple(text.tolist()), "length")


def make_workspace(root: Path, target: Path, **changes: Any) -> tuple[Workspace, Params]:
    """A folder with params.yaml and the answers of the tiny target; `changes` are to the target's row."""
    root.mkdir()
    params = copy.deepcopy(PARAMS)
    params["targets"][TARGET] |= {"folder": str(target), **changes}
    params["cache"] |= {"shard_tokens": 256, "batch_tokens": 160, "max_length": 256}
    (root / "params.yaml").write_text(yaml.safe_dump(params))
    workspace = Workspace(root)
    data = encode_answers([answer(number) for number in range(12)])
    workspace_store(workspace).put("answers/tiny-0/batch.parquet", data)
    record = ObjectRecord("batch.parquet", len(data), sha256_hex(data))
    Manifest("answers", "answers/tiny-0", (record,), {}).write(workspace.answers_manifest(TARGET))
    return workspace, load_params(workspace.params)


@pytest.fixture
def opened(tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Workspace, Params]:
    for name in ("DRAFTSMITH_STORE", "DRAFTSMITH_LEASE_S", "DRAFTSMITH_CACHE_MAX_BYTES"):
        monkeypatch.delenv(name, raising=False)
    return make_workspace(tmp_path / "copy", tiny_target)


def forbid_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a target was opened")

    monkeypatch.setattr(job, "load_placed", refuse)


def all_files(workspace: Workspace) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in workspace.root.rglob("*") if path.is_file()}


def test_planning_opens_no_target_and_writes_nothing(
    opened: tuple[Workspace, Params], monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_targets(monkeypatch)
    workspace, params = opened
    before = all_files(workspace)
    planned = planned_cache(workspace, params, TARGET)
    assert planned.plan.num_samples == 12
    assert planned.plan.num_tokens == sum(44 + 10 * number for number in range(12))
    assert planned.prefix.startswith(f"cache/{TARGET}-")
    assert planned.facts["validation_ids"] == ["answer-3"]
    Computer(workspace, params, planned)
    assert all_files(workspace) == before


@pytest.mark.parametrize("last_hidden", ["labels", "all"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_computed_arrays_are_those_of_single_sequences(
    tmp_path: Path, tiny_target: Path, last_hidden: LastHidden, dtype: str
) -> None:
    """Every batch of the plan, one in flight, against the target run on each sequence by itself; rows by a loop.

    A sequence's numbers may hang on its batch by 1e-5 of a row's root mean square in float32 (which is then rounded to
    bfloat16's 8 significant bits), and by two units in its last place in bfloat16.
    """
    workspace, params = make_workspace(tmp_path / "copy", tiny_target, last_hidden=last_hidden, dtype=dtype)
    planned = planned_cache(workspace, params, TARGET)
    computer, target = Computer(workspace, params, planned), load_placed(planned.place)
    answers = {f"answer-{number}": answer(number) for number in range(12)}
    num_seen = 0
    for shard in planned.plan.shards:
        batches = [shard.batch(number) for number in range(len(shard.batches))]
        computed = list(computer(iter(batches)))
        assert len(computed) == len(batches)
        for sample, arrays in [
            pair for batch, made in zip(batches, computed, strict=True) for pair in zip(batch, made, strict=True)
        ]:
            row = answers[sample.id]
            ids = [*row.prompt_ids, *row.answer_ids]
            assert arrays.input_ids.tolist() == ids
            assert arrays.supervised.tolist() == [0] * len(row.prompt_ids) + [1] * len(row.answer_ids)
            batch = FlatBatch.make([0], counts=[len(ids)], slots=[0], device=target.device)
            output = target.forward(torch.tensor(ids), batch=batch, rows=target.new_rows())
            rows = [p for p in range(len(ids) - 1) if p >= len(row.prompt_ids)]
            kept = output.last_hidden if last_hidden == "all" else output.last_hidden[rows]
            for bits, expected in ((arrays.context, output.captured), (arrays.last_hidden, kept)):
                assert bits is not None
                values, wanted = (bits.astype(np.uint32) << 16).view(np.float32), expected.float().numpy()
                size = np.sqrt(np.square(wanted).mean(-1, keepdims=True))
                bound = np.abs(wanted) * 2.0**-8 + 1e-5 * size
                if dtype == "bfloat16":
                    bound = 2 * 2.0 ** (np.floor(np.log2(size)) - 7)
                assert values.shape == wanted.shape
                assert (np.abs(values - wanted) <= bound).all()
            num_seen += 1
    assert num_seen == 12


def test_a_run_and_what_it_leaves(opened: tuple[Workspace, Params], tracked: Recorder) -> None:
    workspace, params = opened
    job.run(workspace, params, TARGET, part=None)
    manifest = Manifest.read(workspace.cache_manifest(TARGET), "cache")
    assert manifest.prefix == planned_cache(workspace, params, TARGET).prefix
    assert tracked.metrics["num_tokens"] == sum(44 + 10 * number for number in range(12))
    assert tracked.metrics["tokens_per_s"] > 0
    assert tracked.metrics["stored_bytes"] == sum(
        item.size for item in workspace_store(workspace).list(manifest.prefix)
    )
    (reference,) = read_references(workspace_store(workspace), manifest.prefix)
    assert reference.root == workspace.root.resolve()


def test_a_second_run_opens_no_target(
    opened: tuple[Workspace, Params], tracked: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the manifest is lost: every shard is done, so only the manifest is made."""
    workspace, params = opened
    job.run(workspace, params, TARGET, part=None)
    first = Manifest.read(workspace.cache_manifest(TARGET), "cache")
    workspace.cache_manifest(TARGET).unlink()
    forbid_targets(monkeypatch)
    job.run(workspace, params, TARGET, part=None)
    assert Manifest.read(workspace.cache_manifest(TARGET), "cache").digest == first.digest
    assert tracked.metrics["tokens_per_s"] == 0


def test_slices_write_no_manifest(
    opened: tuple[Workspace, Params], tracked: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace, params = opened
    for index in range(2):
        job.run(workspace, params, TARGET, part=(index, 2))
        assert not workspace.cache_manifest(TARGET).exists()
    assert list(read_references(workspace_store(workspace), planned_cache(workspace, params, TARGET).prefix)) == []
    forbid_targets(monkeypatch)
    job.run(workspace, params, TARGET, part=None)
    assert workspace.cache_manifest(TARGET).exists()


def test_another_process_at_work_is_named_at_the_end(opened: tuple[Workspace, Params], tracked: Recorder) -> None:
    """All other shards are done by then; there is no manifest."""
    workspace, params = opened
    store, planned = workspace_store(workspace), planned_cache(workspace, params, TARGET)
    assert len(planned.plan.shards) > 2
    with (
        Claim.hold(store, claim_path(planned.prefix, 1), owner=elsewhere(), lease_s=60.0),
        pytest.raises(ShardClaimedError, match=r"shard 1 is claimed by process 4242 on other-host"),
    ):
        job.run(workspace, params, TARGET, part=None)
    assert not workspace.cache_manifest(TARGET).exists()
    numbers = {int(item.path[-11:-5]) for item in store.list(f"records/{planned.prefix}/commits")}
    assert numbers == {shard.index for shard in planned.plan.shards} - {1}
    job.run(workspace, params, TARGET, part=None)
    assert workspace.cache_manifest(TARGET).exists()


@pytest.mark.parametrize("part", [None, (0, 2)])
def test_a_cache_larger_than_the_store_may_hold_is_only_planned(
    opened: tuple[Workspace, Params], tracked: Recorder, part: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One byte decides; a slice of such a cache has nothing to do."""
    workspace, params = opened
    forbid_targets(monkeypatch)
    planned = planned_cache(workspace, params, TARGET)
    most = sum(planned.plan.stored_bytes.values())
    assert most > 2 * planned.plan.num_tokens * 2 * 64
    monkeypatch.setenv("DRAFTSMITH_CACHE_MAX_BYTES", str(most - 1))
    job.run(workspace, params, TARGET, part=part)
    assert list(workspace_store(workspace).list("cache")) == []
    assert workspace.cache_manifest(TARGET).exists() == (part is None)
    if part is None:
        manifest = Manifest.read(workspace.cache_manifest(TARGET), "cache")
        assert (manifest.facts["mode"], list(manifest.objects), manifest.prefix) == ("stream", [], planned.prefix)
        assert manifest.facts["totals"]["plan_digest"] == planned.plan.digest
    monkeypatch.setenv("DRAFTSMITH_CACHE_MAX_BYTES", str(most))
    with pytest.raises(AssertionError, match="a target was opened"):
        job.run(workspace, params, TARGET, part=part)


class SlowStore(DyingStore):
    """A store that had to do some things again."""

    retries = {"slow down": 2, "timeout": 1}  # noqa: RUF012


def test_repeated_requests_are_told(
    opened: tuple[Workspace, Params],
    tracked: Recorder,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On stderr and in MLflow, also when the job fails."""
    workspace, params = opened
    store = workspace_store(workspace)
    monkeypatch.setattr(job, "workspace_store", lambda _: SlowStore(store, die_after=-1))
    job.run(workspace, params, TARGET, part=None)
    expected = f"draftsmith: requests to {store.uri} that were repeated: 2 slow down, 1 timeout\n"
    assert capsys.readouterr().err.endswith(expected)
    told = {name: value for name, value in tracked.metrics.items() if name.startswith("store_retries")}
    assert told == {"store_retries/slow down": 2, "store_retries/timeout": 1}
    first = next(iter(planned_cache(workspace, params, TARGET).plan.shards))
    prefix = planned_cache(workspace, params, TARGET).prefix
    store.delete(f"{prefix}/context/c.{first.index}.0.0")
    forbid_targets(monkeypatch)
    with pytest.raises(AssertionError, match="a target was opened"):
        job.run(workspace, params, TARGET, part=None)
    assert capsys.readouterr().err.endswith(expected)


def test_int8_fits_its_scales_with_the_target(
    opened: tuple[Workspace, Params], tracked: Recorder, tiny_target: Path
) -> None:
    """The same cache by one run and by two slices; scales lie in its metadata and are near the states' own sizes."""
    workspace, params = make_workspace(opened[0].root.parent / "int8", tiny_target, codec="int8")
    job.run(workspace, params, TARGET, part=None)
    manifest = Manifest.read(workspace.cache_manifest(TARGET), "cache")
    store = workspace_store(workspace)
    scales = read_metadata(lambda path: store.get(f"{manifest.prefix}/{path}"), where="here").scales
    planned = planned_cache(workspace, params, TARGET)
    computed = Computer(workspace, params, planned)(planned.plan.shards[0].batch(0) for _ in range(1))
    values = np.concatenate([arrays.context[1:] for arrays in next(computed)]).astype(np.uint32) << 16
    rms = np.sqrt(np.square(values.view(np.float32)).mean(axis=0)).ravel()
    assert scales["context"].shape == rms.shape == (2 * 64,)
    assert np.median(np.abs(scales["context"] / rms - 1)) < 0.2

    other, params = make_workspace(opened[0].root.parent / "slices", tiny_target, codec="int8")
    for part in [(1, 2), (0, 2), None]:
        job.run(other, params, TARGET, part=part)
    assert Manifest.read(other.cache_manifest(TARGET), "cache").digest == manifest.digest


@pytest.mark.parametrize("text", ["soon", "0", "-3", "inf", "nan", "1e300"])
def test_a_lease_that_cannot_be_read(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_LEASE_S", text)
    with pytest.raises(ParamsError, match=f"got {text}, expected seconds > 0.*DRAFTSMITH_LEASE_S"):
        job.lease_s()


@pytest.mark.parametrize("text", ["", "1", "1/1", "-1/2", "0/0", " 0/2", "0/2/3", "\u00b2/3", f"0/{'9' * 5000}"])
def test_a_slice_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ParamsError, match=r"--slice cannot be read.*expected i/n with 0 <= i < n"):
        job.parse_slice(text)
    assert job.parse_slice("2/3") == (2, 3)


def test_sequences_need_no_torch() -> None:
    code = "import sys, draftsmith.jobs.sequences; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
