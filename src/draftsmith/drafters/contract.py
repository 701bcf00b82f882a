"""The contract between a drafter and what it was made for; checked wherever a drafter meets a target or a cache."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from draftsmith.drafters.base import Drafter, DrafterConfig
from draftsmith.drafters.registry import CONFIG_NAME, read_drafter_config
from draftsmith.errors import ContractError
from draftsmith.manifest import write_json
from draftsmith.targets.base import Family, Target
from draftsmith.targets.families import FAMILIES
from draftsmith.text.chat import ChatFormat

CONTRACT_NAME = "contract.json"
SCHEMA_VERSION = 1
CAPTURE_CONVENTION = "output of decoder layer, -1 embedding"
SHARED = ("embed_tokens", "lm_head")
FULL_ATTENTION = "full_attention"
LENT_LAYERS = ("qwen3",)  # families whose layers drafters of other targets have too


@dataclass(frozen=True)
class Contract:
    """What must agree, in the order in which it is checked.

    The target and its text; what is captured of it; how a block is read; how positions, embeddings and logits are
    scaled; which parts are the target's (`shared`), which of them stand still (`frozen`) and which were trained
    (`new`); what it was trained from and how (`params`: the drafter's row and the training recipe).

    Fields named in `unknown` are None and are not checked: a drafter made elsewhere says less of itself.
    """

    target: str | None
    revision: str | None
    family: str | None
    hidden_size: int | None
    num_layers: int | None
    vocab_size: int | None
    target_digest: str | None
    tokenizer_digest: str | None
    template_digest: str | None
    system_prompt: str | None
    capture_convention: str | None
    capture_layers: tuple[int, ...] | None
    kind: str | None
    block_size: int | None
    sample_from_anchor: bool | None
    mask_token_id: int | None
    rope: dict[str, Any] | None
    logit_softcap: float | None
    embedding_scale: float | None
    frozen: tuple[str, ...] | None
    shared: tuple[str, ...] | None
    new: tuple[str, ...] | None
    data_digest: str | None
    cache_digest: str | None
    params: dict[str, Any] | None
    unknown: tuple[str, ...] = ()

    def body(self) -> dict[str, Any]:
        """The contract as JSON values."""
        own = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        return {"schema_version": SCHEMA_VERSION, **own}

    def write(self, folder: Path) -> None:
        write_json(folder / CONTRACT_NAME, self.body())

    @classmethod
    def parse(cls, body: object, *, where: str) -> Contract:
        """The contract of a `body`. Raises ContractError, naming `where`, if it is of another form or version."""
        if not isinstance(body, dict) or body.get("schema_version") != SCHEMA_VERSION:
            got = f"schema_version {body.get('schema_version')}" if isinstance(body, dict) else type(body).__name__
            raise ContractError("contract of another form", got=got, expected=f"schema_version {SCHEMA_VERSION}",
                                where=where)  # fmt: skip
        own: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in body.items()}
        del own["schema_version"]
        names = {field.name for field in fields(cls)}
        if own.keys() != names:
            wrong = [f"no {name}" for name in sorted(names - own.keys())]
            wrong += [f"unknown field {name}" for name in sorted(own.keys() - names)]
            raise ContractError(f"contract cannot be read: {', '.join(wrong)}", where=where)
        return cls(**own)

    @classmethod
    def read(cls, folder: Path) -> Contract:
        """Raises ContractError if the file is missing, of another form or of another version."""
        path = folder / CONTRACT_NAME
        try:
            body = json.loads(path.read_text())
        except FileNotFoundError:
            raise ContractError(f"no {CONTRACT_NAME} in {folder}", expected="the folder of a trained drafter") from None
        except ValueError as error:
            raise ContractError(f"contract cannot be read: {error}", where=str(path)) from None
        return cls.parse(body, where=str(path))

    def check(self, expected: Mapping[str, Any], *, meets: str, where: str = CONTRACT_NAME) -> None:
        """Compare the fields in `expected` that are known; raises ContractError that names the first to differ."""
        own = self.body()
        assert expected.keys() <= own.keys(), "a field that no contract has"
        known = [field.name for field in fields(self) if field.name in expected and field.name not in self.unknown]
        for name in known:
            _compare(name, own[name], expected[name], meets=meets, where=where)


def open_contract(folder: Path, *, expected: str) -> Contract:
    """The contract of a drafter folder, derived from its config if it has none.

    Raises ContractError if no drafter is there; `expected` says how one comes there.
    """
    if (folder / CONTRACT_NAME).is_file():
        contract = Contract.read(folder)
        config = read_drafter_config(folder)
        contract.check(config_facts(config), meets=f"the {CONFIG_NAME} beside it", where=str(folder / CONTRACT_NAME))
        return contract
    if not (folder / CONFIG_NAME).is_file():
        raise ContractError(f"no trained drafter in {folder}", got=f"no {CONFIG_NAME}", expected=expected)
    return derive_contract(folder)


def derive_contract(folder: Path) -> Contract:
    """What the config.json of a drafter made elsewhere says of what it was made for; the rest is `unknown`.

    Raises ContractError for a config that `read_drafter_config` refuses; it reads layer ids in our convention.
    """
    config = read_drafter_config(folder)
    known = {**config_facts(config), "capture_convention": CAPTURE_CONVENTION}
    if config.family not in LENT_LAYERS:
        known["family"] = config.family
    names = [field.name for field in fields(Contract) if field.name != "unknown"]
    unknown = tuple(name for name in names if name not in known)
    return Contract(**{**dict.fromkeys(names), **known}, unknown=unknown)


def config_facts(config: DrafterConfig) -> dict[str, Any]:
    """What a drafter's config repeats of its contract."""
    family, text = FAMILIES[config.family], SimpleNamespace(**config.text)
    return {
        "hidden_size": config.geometry.hidden_size,
        "num_layers": config.num_target_layers,
        "vocab_size": config.vocab_size,
        "capture_layers": config.capture_layers,
        "kind": config.kind,
        "block_size": config.block_size,
        "sample_from_anchor": config.sample_from_anchor,
        "mask_token_id": config.mask_token_id,
        "rope": rope_facts(text),
        "logit_softcap": family.logit_softcap(text),
        "embedding_scale": family.embedding_scale(text),
    }


def target_facts(config: Any, *, family: Family) -> dict[str, Any]:
    """What a target's config says of the contract with a drafter; `config` is the model's whole one."""
    text = family.text_config(config)
    return {
        "family": family.name,
        "hidden_size": text.hidden_size,
        "num_layers": text.num_hidden_layers,
        "vocab_size": text.vocab_size,
        "rope": rope_facts(text),
        "logit_softcap": family.logit_softcap(text),
        "embedding_scale": family.embedding_scale(text),
    }


def text_facts(chat: ChatFormat) -> dict[str, Any]:
    """What a target's tokenizer and template say."""
    return {"tokenizer_digest": chat.tokenizer_digest, "template_digest": chat.template_digest}


def rope_facts(text: Any) -> dict[str, Any]:
    """Rotary parameters of a text config; those of full attention where layer types have their own."""
    found = text.rope_parameters
    return dict(found.get(FULL_ATTENTION, found))


def check_engine(config: DrafterConfig, *, target: Target) -> None:
    """Raises ContractError that names the first size, or the captured layers, in which a loaded target differs."""
    for name, own, theirs in (
        ("hidden_size", config.geometry.hidden_size, target.config.hidden_size),
        ("vocab_size", config.vocab_size, target.config.vocab_size),
        ("capture_layers", config.capture_layers, target.capture.layer_ids),
    ):
        _compare(name, own, theirs, meets="the loaded target", where=f"the drafter's {CONFIG_NAME}")


def new_parts(drafter: Drafter) -> tuple[str, ...]:
    """The parts of a drafter that are its own, by the first word of their weights' names."""
    return tuple(sorted({name.partition(".")[0] for name in drafter.state_dict()}))


def _compare(name: str, own: Any, expected: Any, *, meets: str, where: str) -> None:
    """Raises ContractError unless the two are equal; of two dicts it names the first entry that differs."""
    own, expected = (list(value) if isinstance(value, tuple) else value for value in (own, expected))
    if isinstance(own, dict) and isinstance(expected, dict):
        for key in dict.fromkeys((*own, *expected)):
            _compare(f"{name}.{key}", own.get(key), expected.get(key), meets=meets, where=where)
    elif own != expected:
        got, wanted = ("none" if value is None else value for value in (own, expected))
        raise ContractError(
            f"the drafter was made for another {name} than {meets} has", got=got, expected=wanted, where=where
        )
