"""params.yaml: what it accepts, and that whatever is wrong in it is told by its place, all of it at once."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftsmith.errors import ParamsError
from draftsmith.params import Params, Target, Train, load_params, merged, parse_params

REPOSITORY = Path(__file__).resolve().parents[2]
RAW: dict[str, Any] = yaml.safe_load((REPOSITORY / "params.yaml").read_text())
KEY = "dspark_b7_2l-smollm2_135m"


def changed(change: Callable[[dict[str, Any]], object]) -> Params:
    """The repository's params with one change to the document."""
    raw = copy.deepcopy(RAW)
    change(raw)
    return parse_params(raw)


def refusal(change: Callable[[dict[str, Any]], object]) -> str:
    """The text with which a change is refused."""
    with pytest.raises(ParamsError) as caught:
        changed(change)
    return str(caught.value)


def test_the_repositorys_own_file_is_read() -> None:
    params = load_params(REPOSITORY / "params.yaml")
    assert params.active_targets == ("smollm2_135m",)
    assert params.run(KEY).drafter == "dspark_b7_2l"
    assert params.target("smollm2_135m").capture_layers == (1, 8, 14, 21, 27)
    assert params.drafters["dspark_b7_2l"].sequential is not None
    assert params.drafters["dflash_b7_2l"].sequential is None


def test_the_released_recipe_is_the_papers() -> None:
    """DSpark 3.3: block size 7, five draft layers, rank 256, 0.1 CE + 0.9 TV + 1.0 confidence; DFlash is CE alone."""
    drafters = load_params(REPOSITORY / "params.yaml").drafters
    row = drafters["dspark_b7"]
    assert (row.block_size, row.layers) == (7, 5)
    assert row.sequential is not None
    assert row.sequential.rank == 256
    assert (row.loss.ce, row.loss.tv, row.loss.confidence) == (0.1, 0.9, 1.0)
    assert (drafters["dflash_b7"].loss.ce, drafters["dflash_b7"].loss.tv) == (1.0, 0.0)


def test_every_target_captures_five_layers_it_has() -> None:
    """Five layers spread from the second to the third last, as the paper captures them; none is the last one."""
    for name, row in load_params(REPOSITORY / "params.yaml").targets.items():
        assert len(row.capture_layers) == 5, name
        assert max(row.capture_layers) < row.num_layers - 1, name


def test_unknown_and_missing_keys_are_named_by_their_place() -> None:
    def change(raw: dict[str, Any]) -> None:
        raw["train"]["stepz"] = raw["train"].pop("steps")
        raw["drafters"]["dspark_b7"]["loss"]["kl"] = 1.0
        raw["serving"] = {}

    assert sorted(refusal(change).split("; ")) == [
        "missing key train.steps (params.yaml)",
        "unknown key drafters.dspark_b7.loss.kl (params.yaml)",
        "unknown key serving (params.yaml)",
        "unknown key train.stepz (params.yaml)",
    ]


@pytest.mark.parametrize("text", ["", "[]", "draftsmith", "3"])
def test_a_document_of_another_form(text: str) -> None:
    with pytest.raises(ParamsError, match="should be a valid dictionary"):
        parse_params(yaml.safe_load(text))


def test_a_file_that_is_no_yaml(tmp_path: Path) -> None:
    place = tmp_path / "params.yaml"
    place.write_text("train: {steps: 3\nruns: [")
    with pytest.raises(ParamsError) as caught:
        load_params(place)
    assert str(caught.value).startswith("params file is not YAML: while parsing a flow mapping")
    assert f"({place})" in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(ParamsError, match=r"params file is missing: got .*/nothing, expected a readable"):
        load_params(tmp_path / "nothing")


def test_numbers_as_yaml_1_1_reads_them() -> None:
    """`lr: 1e-3` without a dot is a text to YAML 1.1, and what its writer means is clear."""
    assert yaml.safe_load("lr: 1e-3") == {"lr": "1e-3"}
    assert changed(lambda raw: raw["train"].update(lr="1e-3")).train.lr == 0.001
    assert "train.lr" in refusal(lambda raw: raw["train"].update(lr="fast"))


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("train", "steps", 0),
        ("train", "lr", 0.0),
        ("train", "lr", float("nan")),
        ("train", "warmup_share", 1.0),
        ("train", "zero_stage", 3),
        ("train", "dtype", "float16"),
        ("train", "init", "zeros"),
        ("train", "min_supervised", 1),
        ("answers", "batch_size", 0),
        ("cache", "max_length", 1),
        ("calibrate", "holdout_share", 1.0),
        ("calibrate", "grid_low", 1.5),
        ("calibrate", "grid_high", 0.9),
        ("calibrate", "temperature", -0.1),
        ("prompts", "num_train", 0),
        ("evaluate", "max_new_tokens", 2.5),
    ],
)
def test_values_out_of_range_are_told_with_their_place_and_value(section: str, field: str, value: object) -> None:
    message = refusal(lambda raw: raw[section].update({field: value}))
    assert message.startswith(f"{section}.{field}: ")
    assert message.endswith(f", got {value!r} (params.yaml)")
    assert ";" not in message


def test_evaluation_settings_differ_and_are_no_less_than_zero() -> None:
    message = refusal(lambda raw: raw["evaluate"].update(temperatures=[0.0, -1.0]))
    assert message.startswith("evaluate.temperatures.1: ")
    assert "got -1.0" in message
    twice = {"name": "gsm8k", "cap": 1}
    assert refusal(lambda raw: raw["evaluate"].update(benchmarks=[twice, twice])) == (
        "evaluate: benchmarks must differ, got ['gsm8k', 'gsm8k'] (params.yaml)"
    )
    assert "temperatures must differ" in refusal(lambda raw: raw["evaluate"].update(temperatures=[1, 1.0]))
    assert "evaluate.benchmarks" in refusal(lambda raw: raw["evaluate"].update(benchmarks=[]))


def target(**fields: object) -> Target:
    row = {"family": "llama", "folder": "x", "hidden_size": 8, "num_layers": 4, "vocab_size": 10, "mask_token_id": 3}
    return Target.model_validate(row | {"capture_layers": [0, 2]} | fields)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"capture_layers": [0, 3]}, r"must lie in -1\.\.2 \(the last layer cannot be captured\), got \[0, 3\]"),
        ({"capture_layers": [-2, 1]}, r"must lie in -1\.\.2"),
        ({"capture_layers": [2, 1]}, r"must strictly increase, got \[2, 1\]"),
        ({"capture_layers": [1, 1]}, "must strictly increase"),
        ({"capture_layers": []}, "at least 1 item"),
        ({"mask_token_id": 10}, "mask_token_id must be < vocab_size 10, got 10"),
        ({"folder": None}, "exactly one of package, hf_id, folder must be set, got none"),
        ({"package": "p"}, r"exactly one of package, hf_id, folder must be set, got \['package', 'folder'\]"),
        ({"folder": None, "hf_id": "a/b"}, "hf_id needs a pinned revision"),
        ({"family": "mamba"}, "should be 'llama', 'qwen3' or 'gemma4'"),
        ({"codec": "int4"}, "should be 'plain', 'bf16' or 'int8'"),
    ],
)
def test_targets_that_cannot_be(fields: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        target(**fields)


def test_targets_that_can_be() -> None:
    assert target(capture_layers=[-1, 2]).capture_layers == (-1, 2), "the embedding output and the last but one layer"
    assert target(folder=None, hf_id="a/b", revision="c").revision == "c"
    assert target().last_hidden == "labels"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"sequential": None}, "a dspark drafter needs `sequential`; without one it is a dflash"),
        ({"kind": "dflash"}, "a dflash drafter has neither `sequential` nor `confidence`"),
        ({"confidence": False}, "loss.confidence > 0 needs `confidence: true`"),
        ({"loss": {"ce": 0.0, "tv": 0.0}}, "loss.ce and loss.tv cannot both be 0"),
        ({"block_size": 1}, "block_size must be >= 2, got 1"),
        ({"layers": 0}, "greater than or equal to 1, got 0"),
        ({"kind": "mtp1", "sequential": None, "confidence": False}, "block_size must be 1, got 7"),
        ({"kind": "eagle3", "sequential": None, "confidence": False}, "an eagle3 drafter has one layer, got 2"),
        (
            {"kind": "eagle3", "sequential": None, "confidence": False, "layers": 1, "loss": {"ce": 1.0}},
            "an eagle3 drafter learns from loss.soft_ce > 0 alone",
        ),
    ],
)
def test_drafters_that_cannot_be(change: dict[str, object], told: str) -> None:
    message = refusal(lambda raw: raw["drafters"]["dspark_b7_2l"].update(change))
    assert message.startswith("drafters.dspark_b7_2l")
    assert told in message


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"shard_tokens": 1000, "chunk_tokens": 300}, "shard_tokens must be a multiple of chunk_tokens 300, got 1000"),
        ({"shard_tokens": 512, "chunk_tokens": 256}, "shard_tokens must be >= max_length 1024, got 512"),
    ],
)
def test_cache_layouts_that_cannot_be(row: dict[str, int], told: str) -> None:
    assert refusal(lambda raw: raw["cache"].update(row)) == f"cache: {told} (params.yaml)"


def test_prompts_need_a_source_and_a_mix() -> None:
    assert "at least one of prompts.sources and prompts.files" in refusal(lambda raw: raw["prompts"].update(sources=[]))
    files = [{"path": "mine.jsonl", "domain": "chat"}]
    assert changed(lambda raw: raw["prompts"].update(sources=[], files=files)).prompts.files[0].domain == "chat"
    assert "positive shares" in refusal(lambda raw: raw["prompts"].update(mix={"chat": 0.0}))
    assert "positive shares" in refusal(lambda raw: raw["prompts"].update(mix={}))
    assert "prompts.mix.poetry" in refusal(lambda raw: raw["prompts"]["mix"].update(poetry=1))


def test_runs_name_rows_that_exist() -> None:
    assert refusal(lambda raw: raw["runs"][KEY].update(drafter="eagle")) == (
        f"runs.{KEY}.drafter: no such row in drafters: 'eagle' (params.yaml)"
    )
    assert "no such row in targets: 'small'" in refusal(lambda raw: raw["runs"][KEY].update(target="small"))


def test_a_key_says_its_drafter_and_target() -> None:
    row = {"drafter": "dspark_b7", "target": "smollm2_135m"}
    assert refusal(lambda raw: raw["runs"].update(best=row)) == (
        "runs.best: the key must be 'dspark_b7-smollm2_135m' or 'dspark_b7-smollm2_135m-<variant>' (params.yaml)"
    )
    assert "the key must be" in refusal(lambda raw: raw["runs"].update({"dspark_b7-smollm2_135mx": row}))
    params = changed(lambda raw: raw["runs"].update({"dspark_b7-smollm2_135m-wide": row}))
    assert params.run("dspark_b7-smollm2_135m-wide").drafter == "dspark_b7"


def test_active_targets_are_those_of_the_runs() -> None:
    """DVC builds caches by the one list and drafters by the other."""
    assert refusal(lambda raw: raw.update(active_targets=["qwen3_4b"])) == (
        "active_targets must equal the targets of runs ['smollm2_135m'], got ['qwen3_4b'] (params.yaml)"
    )
    both = {**RAW["runs"], "dspark_b7-qwen3_4b": {"drafter": "dspark_b7", "target": "qwen3_4b"}}
    params = changed(lambda raw: raw.update(active_targets=["qwen3_4b", "smollm2_135m"], runs=both))
    assert params.active_targets == ("qwen3_4b", "smollm2_135m")


def test_a_run_lays_its_own_training_over_the_common_one() -> None:
    params = changed(lambda raw: raw["runs"][KEY].update(train={"steps": 7, "lr": 0.5}))
    row, common = params.train_of(KEY), params.train
    assert (row.steps, row.lr) == (7, 0.5)
    assert row.model_dump(exclude={"steps", "lr"}) == common.model_dump(exclude={"steps", "lr"})
    assert params.train_of("dflash_b7_2l-smollm2_135m") == common


def test_overrides_are_checked_like_the_row_itself() -> None:
    message = refusal(lambda raw: raw["runs"][KEY].update(train={"stepz": 3, "lr": -1}))
    assert message == (
        f"runs.{KEY}.train.lr: Input should be greater than 0, got -1; unknown key runs.{KEY}.train.stepz (params.yaml)"
    )
    common = Train.model_validate(RAW["train"])
    with pytest.raises(ValueError, match="seeds"):
        merged(common, {"seeds": 1})


def test_names_that_do_not_exist_are_answered_with_those_that_do() -> None:
    params = load_params(REPOSITORY / "params.yaml")
    with pytest.raises(ParamsError) as caught:
        params.run("dspark")
    assert str(caught.value) == f"no run 'dspark': expected one of {', '.join(RAW['runs'])} (params.yaml: runs)"
    with pytest.raises(ParamsError) as caught:
        params.target("small")
    assert str(caught.value) == f"no target 'small': expected one of {', '.join(RAW['targets'])} (params.yaml: targets)"


def test_rows_cannot_be_changed() -> None:
    params = load_params(REPOSITORY / "params.yaml")
    with pytest.raises(ValueError, match="frozen"):
        params.train.steps = 1  # type: ignore[misc]


def test_dvc_and_the_schema_read_the_same_names() -> None:
    """A params entry of dvc.yaml that names nothing would make its stage fail, or never become stale."""
    stages = yaml.safe_load((REPOSITORY / "dvc.yaml").read_text())["stages"]
    known = set(Params.model_fields)
    for name, stage in stages.items():
        rows = stage.get("do", stage)
        for entry in rows.get("params", []):
            assert entry.split(".")[0] in known, (name, entry)


def test_reading_params_is_quick() -> None:
    """No heavy package: a mistyped key is told before anything is loaded."""
    code = "import sys, draftsmith.params; print(sorted({'torch', 'numpy', 'mlflow', 'boto3'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("data", [b"cache: \xff\xfe", b"cache: 2001-99-99", b"[" * 3000])
def test_bytes_that_are_no_yaml(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "params.yaml"
    path.write_bytes(data)
    with pytest.raises(ParamsError, match=r"params file is not YAML: .*params\.yaml"):
        load_params(path)


def test_a_folder_in_the_place_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(ParamsError, match="params file cannot be read: Is a directory"):
        load_params(tmp_path)


def test_a_drafter_that_reads_every_last_hidden_state_needs_a_cache_of_them() -> None:
    def add(raw: dict[str, Any], *, last_hidden: str) -> None:
        raw["targets"]["smollm2_135m"]["last_hidden"] = last_hidden
        raw["runs"]["mtp1-smollm2_135m"] = {"drafter": "mtp1", "target": "smollm2_135m"}

    with pytest.raises(ParamsError, match=r"runs\.mtp1-smollm2_135m: mtp1 needs targets\.smollm2_135m\.last_hidden"):
        changed(lambda raw: add(raw, last_hidden="labels"))
    assert changed(lambda raw: add(raw, last_hidden="all")).drafters["mtp1"].reads_last_hidden
