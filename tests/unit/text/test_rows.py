"""Prompt rows and a user's own files: what is set aside, what is refused, and the stored form."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from draftsmith.errors import PromptError
from draftsmith.params import PromptFile
from draftsmith.text.rows import Prompt, SetAside, decode_prompts, encode_prompts, read_prompt_file, row_turns


def user(text: str) -> dict[str, object]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, object]:
    return {"role": "assistant", "content": text}


def test_id_is_the_start_of_sha256_over_the_turns() -> None:
    prompt = Prompt("chat", "x", ("hé", "b"))
    assert prompt.id == hashlib.sha256(b'["h\\u00e9","b"]').hexdigest()[:16]
    assert prompt.id == Prompt("code", "y", ("hé", "b")).id != Prompt("chat", "x", ("hé b",)).id


@pytest.mark.parametrize(
    ("row", "turns"),
    [
        ({"turns": ["a", "b"]}, ("a", "b")),
        ({"messages": [user("a")]}, ("a",)),
        ({"messages": [user("a"), assistant("x"), user("b")]}, ("a", "b")),
        ({"messages": [user("a"), assistant("x")], "other": 1}, ("a",)),
    ],
)
def test_good_rows(row: object, turns: tuple[str, ...]) -> None:
    assert row_turns(row) == turns


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (["a"], "not a JSON object"),
        ({}, "exactly one of"),
        ({"turns": ["a"], "messages": [user("a")]}, "exactly one of"),
        ({"turns": "a"}, "not a list"),
        ({"turns": [""]}, "empty"),
        ({"messages": []}, "not a list of messages"),
        ({"messages": [{"role": "user"}]}, "without role and content"),
        ({"messages": [user("a"), user("b")]}, "do not alternate"),
        ({"messages": [assistant("a")]}, "do not alternate"),
        ({"messages": [user("a"), {"role": "tool", "content": "x"}]}, "unknown role 'tool'"),
        ({"messages": [{"role": "system", "content": "x"}, user("a")]}, "system message"),
        ({"messages": [user("a"), assistant(" ")]}, "empty"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "not text"),
    ],
)
def test_bad_rows_are_set_aside_with_their_reason(row: object, reason: str) -> None:
    result = row_turns(row)
    assert isinstance(result, SetAside)
    assert reason in result.reason


def test_file_rows_come_in_order_and_blank_lines_are_nothing(tmp_path: Path) -> None:
    lines = [json.dumps({"turns": ["a\u2028b"]}, ensure_ascii=False), "", json.dumps({"turns": []}), '{"turns": ["c"]}']
    (tmp_path / "mine.jsonl").write_text("\ufeff" + "\r\n".join(lines), encoding="utf-8", newline="")
    rows = list(read_prompt_file(PromptFile(path="mine.jsonl", domain="math"), root=tmp_path))
    assert rows == [
        Prompt("math", "file:mine.jsonl", ("a\u2028b",)),
        SetAside("no turns"),
        Prompt("math", "file:mine.jsonl", ("c",)),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "missing"),
        (b'{"turns": ["a"]}\n{"turns": [', r"bad\.jsonl:2"),
        (b'{"turns": ["a"]}\n\xff', "UTF-8"),
    ],
)
def test_bad_files_are_refused_with_path_and_line(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "bad.jsonl").write_bytes(content)
    with pytest.raises(PromptError, match=message) as caught:
        list(read_prompt_file(PromptFile(path="bad.jsonl", domain="chat"), root=tmp_path))
    assert str(tmp_path / "bad.jsonl") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="cannot be read"):
        list(read_prompt_file(PromptFile(path=".", domain="chat"), root=tmp_path))


def test_stored_prompts_come_back_and_equal_prompts_give_equal_bytes() -> None:
    prompts = (Prompt("chat", "s", ("a", "b é")), Prompt("math", "t", ("1 + 1?",)))
    data = encode_prompts(prompts)
    assert decode_prompts(data) == prompts
    assert encode_prompts(list(prompts)) == data
    assert decode_prompts(encode_prompts(())) == ()
    with pytest.raises(PromptError):
        decode_prompts(b"PAR1 nonsense")
