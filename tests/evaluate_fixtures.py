"""A tiny target of each family with a tokenizer, drafters saved for them, and `draftsmith evaluate --drafter`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from draftsmith.cli import cli
from draftsmith.drafters.contract import (
    CAPTURE_CONVENTION,
    SHARED,
    Contract,
    config_facts,
    new_parts,
    target_facts,
    text_facts,
)
from draftsmith.drafters.registry import save_drafter, start_from_target
from draftsmith.errors import DraftsmithError
from draftsmith.jobs.parts import weights_digest
from draftsmith.targets.base import read_config
from draftsmith.targets.families import FAMILIES
from draftsmith.targets.fetch import load_chat_format
from tests.line_fixtures import PROGRAMS
from tests.tiny_models import (
    END_TOKEN,
    MASK_TOKEN,
    save_tiny,
    tiny_drafter,
)

NUM_NEW, SIZE, LAYERS = 20, 4, 7
CAPTURED = (0, 1, 2, 4, 5)
DEEP: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": LAYERS},
    "qwen3": {"num_hidden_layers": LAYERS},
    "gemma4": {
        "num_hidden_layers": LAYERS,
        "layer_types": [*["sliding_attention", "full_attention"] * 3, "full_attention"],
    },
}
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .,?!-'\nABCDEFGHIJK"
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'system' %}<|sys|>{{ message.content }}<|end|>"
    "{% elif message.role == 'user' %}<|user|>{{ message.content }}<|end|>"
    "{% else %}<|bot|>{{ message.content }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|bot|>{% endif %}"
)
CONTROL = {"<|user|>": 0, "<|bot|>": 1, "<|sys|>": 2, "<|end|>": END_TOKEN, "<|mask|>": MASK_TOKEN}
PROMPTS = [
    {"id": "rivers", "turns": ["name three rivers.", "and one lake?"]},
    {"turns": ["what is 7 - 3?"]},
    {"id": 12, "turns": ["a", "b", "c d e f g"], "reference": "not read"},
]
IDS = ["rivers", "2", "12"]


def letter_tokenizer(template: str = TEMPLATE, *, unknown: str = "?") -> PreTrainedTokenizerFast:
    """One token a character, 3..58; what is not among them becomes `unknown`."""
    vocab = {**CONTROL, **{letter: index for index, letter in enumerate(LETTERS, start=3)}}
    assert sorted(vocab.values()) == [*range(len(LETTERS) + 3), END_TOKEN, MASK_TOKEN]
    backend = Tokenizer(models.WordLevel(vocab, unk_token=unknown))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in CONTROL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="session")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Family -> folder of a tiny target, deep enough for EAGLE-3's five layers, with a tokenizer beside it."""
    folder = tmp_path_factory.mktemp("targets")
    return {family: with_tokenizer(save_tiny(folder, family=family, seed=5, **DEEP[family])) for family in DEEP}


def with_tokenizer(folder: Path) -> Path:
    letter_tokenizer().save_pretrained(str(folder))
    return folder


def contract_of(drafter: Any, target: Path, **changes: Any) -> Contract:
    """The contract of a drafter that was made for a target folder."""
    family, chat = FAMILIES[target.name], load_chat_format(target)
    config = drafter.config
    facts = {**config_facts(config), **target_facts(read_config(target), family=family), **text_facts(chat)}
    made = Contract(
        target="tiny", revision="1", **facts, target_digest=weights_digest(target), system_prompt=None,
        capture_convention=CAPTURE_CONVENTION, frozen=SHARED, shared=SHARED, new=new_parts(drafter), data_digest="aa",
        cache_digest="bb", params={},
    )  # fmt: skip
    return replace(made, **changes)


def deep_drafter(kind: str, target: Path) -> Any:
    return tiny_drafter(kind, target, seed=3, capture_layers=CAPTURED, num_layers=LAYERS)


def save(kind: str, target: Path, folder: Path, **changes: Any) -> Path:
    """A drafter that starts as its target's own last layers, saved with its contract."""
    drafter = deep_drafter(kind, target)
    start_from_target(drafter, target_folder=target)
    save_drafter(drafter, folder=folder, dtype=torch.float32)
    contract_of(drafter, target, **changes).write(folder)
    return folder


def write_prompts(path: Path, prompts: list[Any]) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in prompts))
    return path


@pytest.fixture
def arguments(targets: dict[str, Path], tmp_path: Path) -> dict[str, str]:
    """Options of a run on the Llama target that goes well."""
    return options(save("dspark", targets["llama"], tmp_path / "drafter"), targets["llama"], tmp_path)


def options(drafter: Path, target: Path, folder: Path) -> dict[str, str]:
    return {
        "drafter": str(drafter),
        "target": str(target),
        "prompts": str(write_prompts(folder / "prompts.jsonl", PROMPTS)),
        "out": str(folder / "out.json"),
        "max-new-tokens": str(NUM_NEW),
        "batch-size": "2",
        "dtype": "float32",
    }


def words(given: dict[str, str]) -> list[str]:
    return ["evaluate", *(word for name, value in given.items() for word in (f"--{name}", value))]


def evaluate(given: dict[str, str]) -> dict[str, Any]:
    """Run the command in this process; returns its report."""
    done = CliRunner().invoke(cli, words(given), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return dict(json.loads(Path(given["out"]).read_text()))


def refused(given: dict[str, str], kind: type[DraftsmithError]) -> str:
    """The message of a run that must be refused; nothing is written."""
    with pytest.raises(kind) as caught:
        CliRunner().invoke(cli, words(given), catch_exceptions=False)
    assert not Path(given["out"]).exists()
    return str(caught.value)


def run_command(given: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, in `folder`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [str(PROGRAMS / "draftsmith"), *words(given)], cwd=folder, env=environment, capture_output=True, text=True,
        stdin=subprocess.DEVNULL, timeout=300, check=False,
    )  # fmt: skip
