"""Prompt sources by name: packages, our own templates, and the hub. Adding a source is one row of `SOURCES`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import yaml

from draftsmith.params import Domain
from draftsmith.text.chat_templates import chat_requests
from draftsmith.text.code_templates import code_tasks
from draftsmith.text.hub import hub_rows
from draftsmith.text.math_templates import math_problems
from draftsmith.text.packages import package_files
from draftsmith.text.rows import Prompt, SetAside, row_turns

WHERE = "params.yaml: prompts.sources"
PERFECTBLEND_ID = "mlabonne/open-perfectblend"
PERFECTBLEND_REVISION = "5c1a4a7e8cb9c8e31891fb6b6f79baaf464d9338"
# The domain of each part of Open-PerfectBlend, by the name its rows carry (instruction following counts as chat).
PERFECTBLEND_DOMAINS: dict[str, Domain] = {
    "meta-math/MetaMathQA": "math",
    "HuggingFaceH4/orca-math-word-problems-200k": "math",
    "microsoft/orca-math-word-problems-200k": "math",
    "openbmb/UltraInteract_sft": "code",
    "theblackcat102/evol-codealpaca-v1": "code",
    "HuggingFaceH4/ultrachat_200k": "chat",
    "HuggingFaceH4/ultrafeedback_binarized": "chat",
    "Post-training-Data-Flywheel/AutoIF-instruct-61k": "chat",
    "mlabonne/lmsys-arena-human-preference-55k-sharegpt": "chat",
}
_ENGLISH = re.compile(
    r"\b(the|a|an|is|are|was|do|does|did|you|your|i|to|of|in|it|that|what|how|why|who|when|where|which|can|would|if)\b"
)
_WORD = re.compile(r"[A-Za-z']+")
_ASKS = re.compile(
    r"\?|^(tell|explain|describe|name|list|write|give|show|make|suggest|recommend|compare|help|imagine|let's talk)\b",
    re.I,
)
_SMALL_TALK = re.compile(
    r"\b(chat|chats|chatting|prompt|prompts|bug|bugged|bots?|anyone|anybody|everybody|you there|hello+|respond|"
    r"survey|extra credit|class|professor|real person)\b",
    re.I,
)
_REPLY = re.compile(
    r"(because|then|like|or|and|but|so|it depends|depends|of course|yes|no|yeah|nah|haha|lol|well|oh|ooh|ugh|hm+|"
    r"what about|how about you|that|this|definitely|always|probably|maybe|my|i|i'd|i'm|it|they|he|she|we)\b",
    re.I,
)


@dataclass(frozen=True)
class Source:
    """One source. `read(seed, count)` yields prompts and set-aside rows; `count` bounds what an endless one makes."""

    name: str
    licence: str
    read: Callable[[int, int], Iterator[Prompt | SetAside]]


def _chitchat(seed: int, count: int) -> Iterator[Prompt | SetAside]:
    """The questions that conversations were started with, and the first message of each that stands alone.

    Only the first speaker's opening is looked at; where no message of it stands alone, the conversation counts as set
    aside with the reason of its last one.
    """
    path = package_files("chitchat-dataset", suffix="dataset.json", where=WHERE)[0]
    conversations = json.loads(path.read_text()).values()
    for starter in dict.fromkeys(conversation.get("prompt") for conversation in conversations):
        if starter:
            yield Prompt("chat", "chitchat", (starter,))
    for conversation in conversations:
        opening = conversation["messages"][0] if conversation["messages"] else []
        texts = [" ".join(message["text"].split()) for message in opening]
        problems = [_chat_problem(text, min_words=7) for text in texts]
        good = [text for text, problem in zip(texts, problems, strict=True) if problem is None]
        if good:
            yield Prompt("chat", "chitchat", (good[0],))
        else:
            yield SetAside(problems[-1] if problems and problems[-1] is not None else "empty conversation")


def _chatterbot(seed: int, count: int) -> Iterator[Prompt | SetAside]:
    """The opening side of each English pair; the file on coding counts as code."""
    for path in package_files("chatterbot-corpus", suffix=".yml", where=WHERE):
        if path.parent.name != "english":
            continue
        domain: Domain = "code" if path.stem == "coding" else "chat"
        for pair in yaml.load(path.read_text(), Loader=yaml.CSafeLoader)["conversations"]:
            if not isinstance(pair, list) or not isinstance(pair[0], str):
                yield SetAside("not a pair of texts")
                continue
            text = " ".join(pair[0].split())
            reason = _chat_problem(text, min_words=3)
            yield Prompt(domain, "chatterbot", (text,)) if reason is None else SetAside(reason)


def _chat_templates(seed: int, count: int) -> Iterator[Prompt | SetAside]:
    for turns in chat_requests(seed, count=count):
        yield Prompt("chat", "chat_templates", turns)


def _math_templates(seed: int, count: int) -> Iterator[Prompt | SetAside]:
    for turns in math_problems(seed, count=count):
        yield Prompt("math", "math_templates", turns)


def _code_templates(seed: int, count: int) -> Iterator[Prompt | SetAside]:
    for turns in code_tasks(seed, count=count):
        yield Prompt("code", "code_templates", turns)


def _open_perfectblend(seed: int, count: int) -> Iterator[Prompt | SetAside]:
    """User turns of Open-PerfectBlend (rows of from/value messages), each in the domain of the part it came from."""
    roles = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system"}
    for row in hub_rows(PERFECTBLEND_ID, split="train", revision=PERFECTBLEND_REVISION, where=WHERE):
        domain = PERFECTBLEND_DOMAINS.get(row["source"])
        if domain is None:
            yield SetAside(f"unknown part {row['source']!r}"[:80])
            continue
        messages = [
            {"role": roles.get(message["from"], message["from"]), "content": message["value"]}
            for message in row["conversations"]
        ]
        turns = row_turns({"messages": messages})
        yield turns if isinstance(turns, SetAside) else Prompt(domain, "open_perfectblend", turns)


def _chat_problem(text: str, *, min_words: int) -> str | None:
    """Why a recorded chat message is no prompt on its own, or None if it is one."""
    words = _WORD.findall(text)
    if len(words) < min_words or len(text) < 12:
        return "too short to stand alone"
    if len(text) > 600:
        return "longer than 600 characters"
    if sum(character.isalpha() or character.isspace() for character in text) < 0.8 * len(text):
        return "mostly not letters"
    if not text.isascii() and sum(character > "\u024f" for character in text) > 3:
        return "not Latin script"
    if len(_ENGLISH.findall(text.lower())) < max(1, len(words) // 10):
        return "does not look English"
    if not _ASKS.search(text):
        return "neither a question nor a request"
    if _SMALL_TALK.search(text):
        return "about the chat itself"
    if _REPLY.match(text):
        return "a reply to something"
    return None


_ROWS = (
    Source("chitchat", "MIT (chitchat-dataset)", _chitchat),
    Source("chatterbot", "BSD (chatterbot-corpus)", _chatterbot),
    Source("chat_templates", "MIT (this project)", _chat_templates),
    Source("math_templates", "MIT (this project)", _math_templates),
    Source("code_templates", "MIT (this project)", _code_templates),
    Source("open_perfectblend", "as on the hub (mlabonne/open-perfectblend)", _open_perfectblend),
)
SOURCES: dict[str, Source] = {row.name: row for row in _ROWS}
