"""`draftsmith plan`: against finished caches, and what it says when little is known."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from numpy.typing import NDArray

from draftsmith.cache.claims import Owner
from draftsmith.cache.estimate import CacheEstimate
from draftsmith.cache.plan import CacheSpec, Codec, PlannedSample, SampleLength, plan_cache
from draftsmith.cache.writer import CacheWriter, SampleArrays
from draftsmith.errors import CacheError, ParamsError
from draftsmith.jobs import plan as job
from draftsmith.jobs.sequences import Sequences, read_sequences
from draftsmith.manifest import Manifest, ObjectRecord, sha256_hex
from draftsmith.params import Params, load_params
from draftsmith.paths import Workspace
from draftsmith.storage import Store, open_store
from draftsmith.text.answers import AnswerRow, encode_answers
from tests.unit.cache.toy import bf16_bits, each

ROOT = Path(__file__).parents[3]
TARGET, OTHER = "qwen3_4b", "qwen3_8b"
LAYERS, HIDDEN = 5, 64
UNKNOWN: dict[str, Any] = {
    "tokens": None, "answers": None, "mean_length": None, "label_share": None, "tokens_per_s": None,
    "price_per_tb_month": None, "ratio": None,
}  # fmt: skip


def answers(count: int) -> list[AnswerRow]:
    """Some of whose prompts are too long, whose answers are too short, or which have to be cut at 512 tokens."""
    draw = np.random.default_rng(1)
    found = []
    for number in range(count):
        num_prompt, num_answer = int(draw.integers(5, 120)), int(draw.integers(1, 420))
        if number % 20 == 0:
            num_prompt, num_answer = {0: (511, 9), 1: (50, 1), 2: (300, 300)}[number // 20 % 3]
        prompt, answer = (tuple(draw.integers(5, 900, size).tolist()) for size in (num_prompt, num_answer))
        found.append(AnswerRow(f"{number:03d}/t0", "train", "chat", 0, prompt, answer, "length"))
    return found


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    monkeypatch.delenv("DRAFTSMITH_STORE", raising=False)
    body = yaml.safe_load((ROOT / "params.yaml").read_text())
    body["cache"] |= {"shard_tokens": 4096, "chunk_tokens": 256, "batch_tokens": 2048, "max_length": 512}
    for name in (TARGET, OTHER):
        body["targets"][name]["hidden_size"] = HIDDEN
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(body))
    return Workspace(tmp_path)


def write_answers(workspace: Workspace, count: int = 120, *, path: Path | None = None) -> Manifest:
    rows, records = answers(count), []
    store = open_store(workspace.store_uri)
    for number, start in enumerate(range(0, count, 50)):
        data = encode_answers(rows[start : start + 50])
        store.put(f"answers/{TARGET}-0/batch-{number}.parquet", data)
        records.append(ObjectRecord(f"batch-{number}.parquet", len(data), sha256_hex(data)))
    manifest = Manifest("answers", f"answers/{TARGET}-0", records, {})
    manifest.write(path or workspace.answers_manifest(TARGET))
    return manifest


def params_of(workspace: Workspace, **changes: Any) -> Params:
    """The params with changes to the target's row."""
    body = copy.deepcopy(yaml.safe_load(workspace.params.read_text()))
    body["targets"][TARGET] |= changes
    workspace.params.write_text(yaml.safe_dump(body))
    return load_params(workspace.params)


def plan_of(workspace: Workspace, params: Params | None = None, **options: Any) -> CacheEstimate:
    return job.run(workspace, params or params_of(workspace), TARGET, **{**UNKNOWN, **options})


class Build:
    """A cache of the answers, written shard by shard; hidden states have channels of very different sizes."""

    def __init__(self, workspace: Workspace, sequences: Sequences, *, codec: Codec) -> None:
        self.store: Store = open_store(workspace.store_uri)
        self.prefix = f"cache/{TARGET}-01234567"
        spec = CacheSpec(LAYERS, HIDDEN, codec, "labels", 4096, 256, 2048, seed=3)
        self._by_id = {item.id: item for item in sequences.items}
        lengths = [SampleLength(i.id, len(i.input_ids), len(i.label_positions)) for i in sequences.items]
        self.plan = plan_cache(lengths, spec=spec)
        draw = np.random.default_rng(2)
        self._size = np.exp(draw.normal(size=(LAYERS + 1, HIDDEN)))
        scales = {"context": self._size[:-1].ravel(), "last_hidden": self._size[-1]} if codec == "int8" else {}
        self.writer = CacheWriter(
            self.store, prefix=self.prefix, plan=self.plan, facts={"target": TARGET},
            owner=Owner.this_process(processor="toy processor"), lease_s=60.0,
            scales=lambda: {name: values.astype(np.float32) for name, values in scales.items()},
        )  # fmt: skip

    def write(self, first: int, stop: int | None = None) -> None:
        self.writer.write_shards(self.plan.shards[first:stop], each(self._arrays))

    def _arrays(self, sample: PlannedSample) -> SampleArrays:
        item, draw = self._by_id[sample.id], np.random.default_rng(sample.index)
        states: NDArray[Any] = draw.normal(size=(sample.num_tokens, LAYERS + 1, HIDDEN)) * self._size
        bits = bf16_bits(states)
        return SampleArrays(item.input_ids, item.supervised, bits[:, :-1], bits[item.label_positions, -1])

    def stored(self) -> dict[str, int]:
        """Bytes by array, and of everything else."""
        found = {"input_ids": 0, "supervised": 0, "context": 0, "last_hidden": 0, "": 0}
        for item in self.store.list(""):
            if self.prefix in item.path:
                name = item.path.removeprefix(f"{self.prefix}/").partition("/c.")[0]
                found[name if name in found else ""] += item.size
        return found


@pytest.mark.parametrize("codec", ["plain", "bf16", "int8"])
def test_what_was_planned_is_what_is_written(workspace: Workspace, codec: Codec) -> None:
    """Plain exactly, and within a hundredth with all metadata; the others within a twentieth from two shards."""
    manifest, params = write_answers(workspace), params_of(workspace, codec=codec)
    build = Build(workspace, read_sequences(open_store(workspace.store_uri), manifest, name=TARGET, max_length=512),
                  codec=codec)  # fmt: skip
    before = plan_of(workspace, params)
    assert before.extent.num_shards == build.plan.num_shards > 5
    assert (before.extent.num_tokens, before.extent.num_labels) == (build.plan.num_tokens, build.plan.num_labels)
    assert before.rate is None
    build.write(0, 2)
    found = plan_of(workspace, params)
    build.write(2)
    build.writer.finish()
    real = build.stored()
    planned = {layout.name: found.array_bytes(layout, codec) for layout in found.layouts}
    assert {name: planned[name] for name in ("input_ids", "supervised")} == {
        name: real[name] for name in ("input_ids", "supervised")
    }
    within = 0.01 if codec == "plain" else 0.05
    assert found.total_bytes(codec) == pytest.approx(sum(real.values()), rel=within)
    if codec == "plain":
        assert planned == {name: real[name] for name in planned}
        return
    for name in ("context", "last_hidden"):
        assert planned[name] == pytest.approx(real[name], rel=0.05)
    assert before.ratios[codec].source == "shipped, measured on SmolLM2-135M"
    assert found.ratios[codec].source == "measured on 2 shards in the store"
    assert found.ratios[codec].value != before.ratios[codec].value


def test_the_rate_is_measured_or_given(workspace: Workspace) -> None:
    manifest = write_answers(workspace)
    build = Build(workspace, read_sequences(open_store(workspace.store_uri), manifest, name=TARGET, max_length=512),
                  codec="bf16")  # fmt: skip
    build.write(0, 3)
    # Other machines and their times, instead of those of this one.
    for shard, (processor, compute_s) in enumerate([("H200", 2.0), ("H200", 4.0), ("cpu", 1000.0)]):
        path = f"records/{build.prefix}/commits/{shard:06d}.json"
        body = json.loads(build.store.get(path))
        build.store.put(path, json.dumps({**body, "processor": processor, "compute_s": compute_s}).encode())
    shards = build.plan.shards[:2]
    found = plan_of(workspace)
    assert found.rate is not None
    assert found.rate.value == pytest.approx((shards[0].num_tokens / 2 + shards[1].num_tokens / 4) / 2)
    assert found.rate.source == "measured on H200, 2 shards"
    assert found.device_hours == pytest.approx(build.plan.num_tokens / found.rate.value / 3600)
    given = plan_of(workspace, tokens_per_s=123.0, ratio=3.0, price_per_tb_month=20.0)
    assert given.to_json()["tokens_per_s"] == 123.0
    assert (given.ratios["bf16"].value, given.ratios["bf16"].source) == (3.0, "given")
    assert given.ratios["int8"].source == "shipped, measured on SmolLM2-135M"
    assert given.monthly_cost("plain") == pytest.approx(given.total_bytes("plain") / 1e12 * 20)


def test_shards_that_cannot_tell_are_left_out(workspace: Workspace) -> None:
    """Those of other dimensions, of another target, of a cache without metadata, and records of an older version."""
    manifest = write_answers(workspace)
    store = open_store(workspace.store_uri)
    build = Build(workspace, read_sequences(store, manifest, name=TARGET, max_length=512), codec="bf16")
    build.write(0, 2)
    assert plan_of(workspace).ratios["bf16"].source.startswith("measured")
    wide = params_of(workspace, hidden_size=128)
    assert plan_of(workspace, wide).ratios["bf16"].source.startswith("shipped")
    params = params_of(workspace, hidden_size=HIDDEN)
    assert plan_of(workspace, params).ratios["bf16"].source.startswith("measured")
    other = job.run(workspace, params, OTHER, **{**UNKNOWN, "tokens": 1000})
    assert (other.ratios["bf16"].source, other.rate) == ("shipped, measured on SmolLM2-135M", None)
    path = f"records/{build.prefix}/commits/000001.json"
    old = {key: value for key, value in json.loads(store.get(path)).items() if key != "logical_bytes"}
    store.put(path, json.dumps(old).encode())
    assert plan_of(workspace, params).ratios["bf16"].source == "measured on 1 shard in the store"
    store.delete(f"{build.prefix}/zarr.json")
    found = plan_of(workspace, params)
    assert (found.ratios["bf16"].source, found.rate) == ("shipped, measured on SmolLM2-135M", None)


def test_what_is_cut_or_left_out_is_said(workspace: Workspace) -> None:
    write_answers(workspace)
    found, rows = plan_of(workspace), answers(120)
    kept = [row for row in rows if len(row.answer_ids) > 1 and len(row.prompt_ids) < 511]
    lengths = [min(512, len(row.prompt_ids) + len(row.answer_ids)) for row in kept]
    assert found.extent.num_tokens == sum(lengths)
    assert found.extent.num_labels == sum(lengths) - sum(len(row.prompt_ids) + 1 for row in kept)
    (basis,) = found.basis
    cut = sum(len(row.prompt_ids) + len(row.answer_ids) > 512 and len(row.prompt_ids) < 511 for row in rows)
    short = sum(len(row.answer_ids) < 2 for row in rows)
    assert basis == (
        f"the lengths of all answers in answers/{TARGET}-0 ({cut} cut at max length, 2 prompt fills max length, "
        f"{short} answer too short)"
    )


def test_a_number_of_tokens_in_samples_like_the_answers(workspace: Workspace) -> None:
    write_answers(workspace)
    exact = plan_of(workspace).extent
    found = plan_of(workspace, tokens=100 * exact.num_tokens)
    assert found.extent.num_tokens == 100 * exact.num_tokens
    assert found.extent.num_samples == 100 * exact.num_samples
    assert found.extent.num_labels == pytest.approx(100 * exact.num_labels, rel=0.001)
    assert f"(as in {exact.num_samples} answers of answers/{TARGET}-0)" in found.text
    given = plan_of(workspace, tokens=1_000_000, mean_length=200.0, label_share=0.25)
    assert given.extent.num_samples == 5000
    assert given.extent.num_labels == pytest.approx(250_000, rel=0.01)
    assert given.basis == ["200 tokens a sample (given)", "25.0% of the tokens with a label (given)"]


def test_a_number_of_tokens_of_which_nothing_is_known(workspace: Workspace) -> None:
    found = plan_of(workspace, tokens=10_000_000)
    assert found.basis == ["512 tokens a sample (assumed)", "85.0% of the tokens with a label (assumed)"]
    assert found.extent.num_samples == round(10_000_000 / 512)


def test_answers_of_a_file(workspace: Workspace, tmp_path: Path) -> None:
    write_answers(workspace, 60, path=tmp_path / "mine.json")
    found = plan_of(workspace, answers=tmp_path / "mine.json")
    assert found.extent.num_samples == sum(
        len(row.answer_ids) >= 2 and len(row.prompt_ids) < 511 for row in answers(60)
    )
    with pytest.raises(CacheError, match=r"no answers manifest at .*other.json"):
        plan_of(workspace, answers=tmp_path / "other.json")


def test_options_that_do_not_go_together(workspace: Workspace) -> None:
    with pytest.raises(ParamsError, match=r"no answers of qwen3_4b to plan from: .* expected --tokens N .*dvc repro"):
        plan_of(workspace)
    with pytest.raises(ParamsError, match="describe samples that are not there yet: expected --tokens N with them"):
        plan_of(workspace, mean_length=100.0)
    with pytest.raises(ParamsError, match=r"--ratio is of a codec that compresses: got targets.qwen3_4b.codec plain"):
        plan_of(workspace, params_of(workspace, codec="plain"), tokens=10, ratio=2.0)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"tokens": 0}, r"--tokens is out of its range: got 0, expected 1\.\.1e\+15"),
        ({"tokens": 10**30}, "--tokens"),
        ({"tokens": 1000, "mean_length": float("nan")}, "--mean-length"),
        ({"tokens": 1000, "label_share": float("nan")}, "--label-share"),
        ({"tokens": 1000, "tokens_per_s": float("inf")}, "--tokens-per-s"),
        ({"tokens": 1000, "tokens_per_s": 1e-320}, "--tokens-per-s"),
        ({"tokens": 1000, "price_per_tb_month": float("nan")}, "--price-per-tb-month"),
        ({"tokens": 1000, "ratio": float("inf")}, "--ratio"),
        ({"tokens": 1000, "ratio": 1e-320}, "--ratio"),
    ],
)
def test_options_out_of_their_range(workspace: Workspace, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ParamsError, match=told):
        plan_of(workspace, **options)


def test_as_many_tokens_as_may_be(workspace: Workspace) -> None:
    found = plan_of(workspace, tokens=10**15)
    assert found.extent.num_tokens == 10**15
    assert "1,000,000,000,000,000 tokens" in found.text


def test_changed_answers_are_not_planned_from(workspace: Workspace) -> None:
    """A flipped bit may leave a Parquet file readable, with other lengths in it."""
    write_answers(workspace)
    manifest = Manifest.read(workspace.answers_manifest(TARGET), "answers")
    path = Path(workspace.store_uri) / manifest.prefix / manifest.objects[0].path
    data = path.read_bytes()
    path.write_bytes(data[:-30] + bytes([data[-30] ^ 1]) + data[-29:])
    told = rf"is not what the answers manifest names: got {len(data)} bytes.*delete it, then dvc repro -f -s answers@"
    with pytest.raises(CacheError, match=told):
        plan_of(workspace)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1240000000", 1_240_000_000),
        ("1.24G", 1_240_000_000),
        ("1e9", 10**9),
        ("2.5k", 2500),
        (" 7 ", 7),
        ("1T", 10**12),
    ],
)
def test_numbers_of_tokens(text: str, expected: int) -> None:
    assert job.parse_tokens(text) == expected


@pytest.mark.parametrize("text", ["0", "-5", "", "1.5", "1,24G", "many", "1e-9", "1e999", "nan", "\u00b2", "9" * 5000])
def test_what_is_no_number_of_tokens(text: str) -> None:
    with pytest.raises(ParamsError, match=r"--tokens cannot be read: got .*, expected a whole number of 1 or more"):
        job.parse_tokens(text)


def imported(workspace: Workspace, *options: str) -> Iterator[str]:
    """The modules that `draftsmith plan` has imported at its end."""
    code = (
        "import sys\nfrom draftsmith.cli import cli\n"
        f"cli(['plan', '--target', '{TARGET}', *{list(options)!r}], standalone_mode=False)\n"
        "sys.stderr.write(' '.join(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=workspace.root, capture_output=True, text=True, check=True)
    assert "Target cache of qwen3_4b" in done.stdout
    return iter(done.stderr.split())


def test_planning_loads_nothing_heavy(workspace: Workspace) -> None:
    """Not torch, whatever is asked; and for a number of tokens not even what reads answers."""
    heavy = {"torch", "transformers", "zarr", "mlflow", "boto3", "deepspeed", "datasets"}
    assert set(imported(workspace, "--tokens", "1240000000")) & (heavy | {"pyarrow"}) == set()
    write_answers(workspace)
    modules = set(imported(workspace))
    assert modules & heavy == set()
    assert "pyarrow" in modules
