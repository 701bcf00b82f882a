"""`draftsmith evaluate --drafter DIR --target DIR`: any drafter folder on any target folder, without a working copy."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from draftsmith.decoding.engine import Engine
from draftsmith.decoding.rounds import Generation
from draftsmith.drafters.contract import Contract, open_contract, target_facts, text_facts
from draftsmith.drafters.registry import load_drafter, read_drafter_config
from draftsmith.errors import ContractError, ParamsError, PromptError, StoreError, TargetError
from draftsmith.evaluation.accepted_length import AcceptedLength, measure_accepted_length
from draftsmith.evaluation.conversations import Answered, Conversation, answer_conversations
from draftsmith.jobs.parts import device_name, tell_unknown, weights_digest
from draftsmith.jobs.progress import progress
from draftsmith.manifest import write_json
from draftsmith.params import Dtype, Sampling
from draftsmith.provenance import read_hardware, read_versions
from draftsmith.targets.base import Family, load_target, read_config
from draftsmith.targets.families import FAMILIES
from draftsmith.targets.fetch import check_folder, load_chat_format, one_line
from draftsmith.text.chat import ChatFormat
from draftsmith.text.rows import SetAside, row_turns

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Arguments:
    """What is evaluated, and how; `system_prompt` None stands for the one that the drafter's contract names."""

    drafter: Path
    target: Path
    prompts: Path
    out: Path
    temperature: float
    max_new_tokens: int
    batch_size: int
    seed: int
    dtype: Dtype
    top_p: float
    top_k: int
    system_prompt: str | None

    def body(self, *, system_prompt: str | None) -> dict[str, Any]:
        """As JSON values, with the system prompt that was used."""
        own = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}
        return {**own, "system_prompt": system_prompt}


def run(arguments: Arguments) -> str:
    """Decode every prompt with the drafter, write the report last, and return it in a sentence.

    Raises StoreError for a report that could not be written, PromptError, TargetError and ContractError for what cannot
    be used, before a weight is loaded.
    """
    if not math.isfinite(arguments.temperature):
        raise ParamsError("the temperature is no number", got=arguments.temperature, where="--temperature")
    check_out(arguments.out)
    conversations = read_conversations(arguments.prompts)
    contract = open_drafter_folder(arguments.drafter)
    family, whole = read_target(arguments.target)
    chat = load_chat_format(arguments.target)
    check_target(contract, arguments.target, family=family, config=whole, chat=chat)
    tell_unknown(arguments.drafter, contract.unknown)
    config = read_drafter_config(arguments.drafter)
    system_prompt = contract.system_prompt if arguments.system_prompt is None else arguments.system_prompt
    target = load_target(
        arguments.target, family=family, capture_layers=config.capture_layers, dtype=arguments.dtype,
        device=device_name(),
    )  # fmt: skip
    drafter = load_drafter(
        arguments.drafter, target_folder=arguments.target, shared=target.shared, dtype=target.dtype
    )  # fmt: skip
    engine = Engine(target, drafter=drafter, end_ids=chat.end_ids, batch_size=arguments.batch_size)
    num_answers = sum(len(item.turns) for item in conversations)
    with progress("evaluate", total=num_answers, unit="answers") as advance:
        answered = answer_conversations(
            engine,
            conversations,
            chat=chat,
            system_prompt=system_prompt,
            sampling=Sampling(temperature=arguments.temperature, top_p=arguments.top_p, top_k=arguments.top_k),
            max_new_tokens=arguments.max_new_tokens,
            seed=arguments.seed,
            on_finish=lambda _: advance(1),
        )
    body = {
        "schema_version": SCHEMA_VERSION,
        "arguments": arguments.body(system_prompt=system_prompt),
        "machine": read_hardware().description,
        "versions": read_versions(),
        "drafter": {"kind": config.kind, "block_size": config.block_size, "contract": contract.body()},
        "totals": totals(answered, block_size=config.block_size, seed=arguments.seed),
        "prompts": prompts_body(answered.generations, block_size=config.block_size),
    }
    write_json(arguments.out, body)
    return sentence(body)


def check_out(path: Path) -> None:
    """Raises StoreError unless a file can be written there."""
    problem = None
    if not path.parent.is_dir():
        problem = f"no folder {path.parent}"
    elif path.is_dir():
        problem = f"{path} is a folder"
    elif not os.access(path.parent, os.W_OK):
        problem = f"no leave to write in {path.parent}"
    if problem is not None:
        raise StoreError("the report cannot be written", got=problem, expected="a file in a folder that is there",
                         where="--out")  # fmt: skip


def read_conversations(path: Path) -> list[Conversation]:
    """The prompts of a JSON lines file of {"turns": [...]}, with `id` or named by their line number.

    Raises PromptError that names the line that cannot be used.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise PromptError(
            "prompts file is missing", got=path, expected="a JSON lines file", where="--prompts"
        ) from None
    except OSError as error:
        raise PromptError(f"prompts file cannot be read: {error.strerror}", got=path, where="--prompts") from None
    except UnicodeDecodeError as error:
        raise PromptError("prompts file is not UTF-8", got=f"byte {error.start} of {path}", where="--prompts") from None
    found: list[Conversation] = []
    lines: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        item = _conversation(line, number=number, where=f"{path}:{number}")
        if item.id in lines:
            raise PromptError(
                "two prompts of one id", got=f"{item.id!r} on line {lines[item.id]} too", where=f"{path}:{number}"
            )
        lines[item.id] = number
        found.append(item)
    if not found:
        raise PromptError("prompts file is empty", got=path, expected='lines of {"turns": [...]}', where="--prompts")
    return found


def _conversation(line: str, *, number: int, where: str) -> Conversation:
    expected = '{"turns": ["...", ...]} a line'
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise PromptError(f"prompts file is not JSON lines: {error}", expected=expected, where=where) from None
    turns = row_turns(row)
    if isinstance(turns, SetAside):
        raise PromptError("a prompt cannot be used", got=turns.reason, expected=expected, where=where)
    name = row.get("id", str(number))
    if not isinstance(name, str | int) or isinstance(name, bool) or not str(name).isprintable() or not str(name):
        raise PromptError("the id of a prompt cannot be used", got=repr(name), expected="text", where=where)
    return Conversation(str(name), turns)


def open_drafter_folder(folder: Path) -> Contract:
    """The contract of a drafter folder. Raises ContractError if it holds no drafter."""
    if not folder.is_dir():
        raise ContractError("the drafter's folder is missing", got=folder, expected="a folder with a config.json and "
                            "a model.safetensors", where="--drafter")  # fmt: skip
    return open_contract(folder, expected="a config.json and a model.safetensors (--drafter)")


def read_target(folder: Path) -> tuple[Family, Any]:
    """Family and whole config of a target's folder. Raises TargetError if it is not a model of a known family."""
    check_folder(folder, place="--target")
    try:
        config = read_config(folder)
    except (OSError, ValueError, KeyError) as error:
        raise TargetError(
            f"the target's config cannot be read: {one_line(error)}", where=f"{folder}/config.json"
        ) from None
    types = {name: family for family in FAMILIES.values() for name in family.model_types}
    if config.model_type not in types:
        raise TargetError("no such target family", got=f"a model of type {config.model_type}",
                          expected=f"one of {', '.join(types)}", where=f"{folder}/config.json")  # fmt: skip
    return types[config.model_type], config


def check_target(contract: Contract, folder: Path, *, family: Family, config: Any, chat: ChatFormat) -> None:
    """Raises ContractError that names the first field in which the drafter was made for another target.

    The target's files are hashed only if the contract has a digest to compare.
    """
    facts = {**target_facts(config, family=family), **text_facts(chat)}
    if contract.target_digest is not None:
        facts["target_digest"] = weights_digest(folder)
    contract.check(facts, meets=f"the target in {folder}")


def totals(answered: Answered, *, block_size: int, seed: int) -> dict[str, Any]:
    """Everything that is measured over all prompts: see `AcceptedLength`, whose fields are null without a round."""
    found = measured(answered.generations, block_size=block_size, seed=seed)
    return {
        **found,
        "num_requests": len(answered.generations),
        "num_tokens": sum(len(item.token_ids) for item in answered.generations),
        "wall_s": answered.wall_s,
        "tokens_per_s": answered.tokens_per_s,
    }


def measured(generations: Sequence[Generation], *, block_size: int, seed: int) -> dict[str, Any]:
    """The fields of `AcceptedLength`; null where no round was made, because the first token ended every answer."""
    if not any(item.rounds for item in generations):
        empty = {field.name: None for field in fields(AcceptedLength)}
        return {**empty, "num_rounds": 0}
    return asdict(measure_accepted_length(generations, block_size=block_size, seed=seed))


def prompts_body(generations: Sequence[Generation], *, block_size: int) -> list[dict[str, Any]]:
    """Each prompt in the file's order: its answers turn by turn, and acceptance over all of its rounds."""
    turns: dict[str, list[Generation]] = {}
    for generation in generations:
        turns.setdefault(generation.prompt_id, []).append(generation)
    names = ("accepted_length", "accepted_length_without_bonus", "conditional_acceptance", "num_conditional")
    bodies = []
    for name, own in turns.items():
        found = measured(own, block_size=block_size, seed=0)
        bodies.append({"id": name, "turns": list(map(turn_body, own)), **{key: found[key] for key in names}})
    return bodies


def turn_body(generation: Generation) -> dict[str, Any]:
    """One answer. `accepted_lengths` are committed tokens round by round; the first token belongs to no round."""
    return {
        "token_ids": list(generation.token_ids),
        "finish": generation.finish,
        "accepted_lengths": [item.committed for item in generation.rounds],
        "accepted_lengths_without_bonus": [item.committed_draft for item in generation.rounds],
    }


def sentence(body: Mapping[str, Any]) -> str:
    """The report for people, in one line."""
    found = body["totals"]
    if found["accepted_length"] is None:
        return f"no round: each of {found['num_requests']} answers ended with its first token"
    interval = found["accepted_length_interval"]
    spread = "" if interval is None else f" [{interval[0]:.2f}, {interval[1]:.2f}]"
    return (
        f"accepted length {found['accepted_length']:.3f}{spread}, {found['accepted_length_without_bonus']:.3f} without "
        f"bonus, over {found['num_rounds']} rounds of {found['num_requests']} answers; "
        f"{found['tokens_per_s']:.1f} tokens/s"
    )
