"""The folder of files that replaces the benchmarks' sources, and how such a file can be ragged."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path

import pytest

from draftsmith.errors import PromptError
from draftsmith.evaluation.benchmarks import (
    BENCHMARKS,
    benchmark_facts,
    benchmark_turns,
    folder_file,
    load_benchmark,
)
from tests.target_fixtures import REPOSITORY

SHARED = REPOSITORY.parent / "shared" / "benchmarks"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="no ../shared/benchmarks beside this repository")
GOOD = '{"turns": ["a"]}\n{"turns": ["b", "c"]}\n'
FOUND = [("gsm8k/0", ("a",)), ("gsm8k/1", ("b", "c"))]


def load(folder: Path, data: bytes, *, file: str = "gsm8k.jsonl", cap: int = 100) -> list[tuple[str, tuple[str, ...]]]:
    (folder / file).write_bytes(data)
    return [(prompt.id, prompt.turns) for prompt in load_benchmark("gsm8k", cap=cap, folder=folder)]


@needs_shared
@pytest.mark.parametrize("name", [name for name in BENCHMARKS if name != "alpaca"])
def test_a_folder_replaces_the_source(name: str) -> None:
    lines = (SHARED / BENCHMARKS[name].file).read_text().split("\n")
    expected = [tuple(json.loads(line)["turns"]) for line in lines if line]
    prompts = load_benchmark(name, cap=100, folder=SHARED)
    assert [prompt.turns for prompt in prompts] == expected
    assert [prompt.id for prompt in prompts] == [f"{name}/{index}" for index in range(8)]
    assert {prompt.domain for prompt in prompts} == {BENCHMARKS[name].domain}


@pytest.mark.parametrize(
    "data",
    [
        GOOD.encode(),
        b"\xef\xbb\xbf" + GOOD.encode(),
        GOOD.replace("\n", "\r\n").encode(),
        ("\n\n" + GOOD.replace("\n", "\n  \n")).encode(),
        GOOD.strip().encode(),
        b'{"turns": ["a"], "id": 7, "category": "x"}\n{"turns": ["b", "c"]}',
    ],
    ids=["plain", "byte order mark", "CRLF", "blank lines", "no last line end", "more columns"],
)
def test_forms_of_a_file(tmp_path: Path, data: bytes) -> None:
    assert load(tmp_path, data) == FOUND


def test_only_line_feeds_end_a_line(tmp_path: Path) -> None:
    """Other line ends of Unicode may stand inside a JSON string as they are."""
    text = "one\u2028two\x85three"
    data = json.dumps({"turns": [text]}, ensure_ascii=False).encode()
    assert load(tmp_path, data) == [("gsm8k/0", (text,))]


def test_a_gzipped_file(tmp_path: Path) -> None:
    assert load(tmp_path, gzip.compress(GOOD.encode()), file="gsm8k.jsonl.gz") == FOUND


@pytest.mark.parametrize("file", ["mt-bench.jsonl", "mt_bench.jsonl", "mt-bench.jsonl.gz", "mt_bench.jsonl.gz"])
def test_a_file_goes_by_either_name(tmp_path: Path, file: str) -> None:
    data = GOOD.encode()
    (tmp_path / file).write_bytes(gzip.compress(data) if file.endswith(".gz") else data)
    assert folder_file("mt_bench", folder=tmp_path) == tmp_path / file
    assert [prompt.id for prompt in load_benchmark("mt_bench", cap=9, folder=tmp_path)] == ["mt_bench/0", "mt_bench/1"]


def test_two_files_of_one_benchmark_are_refused(tmp_path: Path) -> None:
    for file in ("mt-bench.jsonl", "mt_bench.jsonl.gz"):
        (tmp_path / file).write_bytes(b"")
    with pytest.raises(PromptError, match=r"mt_bench has more than one file: got mt-bench\.jsonl, mt_bench\.jsonl\.gz"):
        load_benchmark("mt_bench", cap=1, folder=tmp_path)


def test_equal_prompts_all_count_and_lines_of_the_file_number_them(tmp_path: Path) -> None:
    assert load(tmp_path, b'{"turns": ["a"]}\n\n{"turns": ["a"]}\n{"turns": ["b"]}') == [
        ("gsm8k/0", ("a",)),
        ("gsm8k/1", ("a",)),
        ("gsm8k/2", ("b",)),
    ]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", r"gsm8k has no rows \(.*gsm8k\.jsonl\)"),
        (b"\n \r\n", "gsm8k has no rows"),
        (GOOD.encode() + b"{", r"not JSON lines: got Expecting property name.*column 2 \(.*gsm8k\.jsonl:3\)"),
        (b'\n{"turns": ["a"]}\n\n[1', r"not JSON lines.*gsm8k\.jsonl:4"),
        (b"[" * 100_000, r"not JSON lines.*gsm8k\.jsonl:1"),
        (b'{"turns": ["a"], "n": ' + b"1" * 5000 + b"}", r"not JSON lines.*gsm8k\.jsonl:1"),
        (GOOD.encode() + b'{"prompt": "a"}', r"row 2 has no 'turns': got \['prompt'\] \(.*gsm8k\.jsonl:3\)"),
        (GOOD.encode() + b'{"turns": []}', r"row 2 is unusable: got no turns \(.*gsm8k\.jsonl:3\)"),
        (b'{"turns": [""]}', "row 0 is unusable: got a turn is empty"),
        (b'{"turns": ["a", 4]}', "row 0 is unusable: got a turn is not text"),
        (b'{"turns": [null]}', "row 0 is unusable: got a turn is not text"),
        (b'{"turns": "abc"}', "row 0 is unusable: got turns is not a list"),
        (b'{"turns": ["\\ud800"]}', "row 0 is unusable: got a turn is not valid Unicode"),
        (b'["a"]', r"row 0 is not a JSON object: got list \(.*gsm8k\.jsonl:1\)"),
        (b"7", "row 0 is not a JSON object: got int"),
        (b'{"turns": ["\xe9"]}', "not UTF-8: got byte 12"),
    ],
)
def test_a_ragged_file_is_refused_with_the_line(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        load(tmp_path, data, cap=1)


WHOLE = gzip.compress(GOOD.encode() * 9)


@pytest.mark.parametrize(
    "data", [WHOLE[:-12], b"no gzip", WHOLE[:10] + b"\xff" + WHOLE[11:]], ids=["cut", "text", "broken"]
)
def test_a_damaged_gzip_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(PromptError, match=r"not whole gzip.*gsm8k\.jsonl\.gz"):
        load(tmp_path, data, file="gsm8k.jsonl.gz")


def test_a_missing_file_names_what_is_there(tmp_path: Path) -> None:
    for file in ("humaneval.jsonl", "mbpp.jsonl.gz", "notes.txt"):
        (tmp_path / file).write_bytes(b"")
    with pytest.raises(PromptError, match=r"gsm8k: its file is missing") as caught:
        load_benchmark("gsm8k", cap=3, folder=tmp_path)
    assert f"got humaneval.jsonl, mbpp.jsonl.gz in {tmp_path}, expected gsm8k.jsonl or gsm8k.jsonl.gz" in str(
        caught.value
    )
    assert "evaluate.folder" in str(caught.value)


def test_an_empty_and_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"got no \.jsonl file in"):
        load_benchmark("gsm8k", cap=3, folder=tmp_path)
    with pytest.raises(PromptError, match=r"the folder of benchmarks is missing: got .*nowhere"):
        load_benchmark("gsm8k", cap=3, folder=tmp_path / "nowhere")


def test_benchmark_turns_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "gsm8k.jsonl").write_text(GOOD)
    (tmp_path / "lbpp.jsonl").write_text('{"turns": ["d"]}')
    assert benchmark_turns(["lbpp", "gsm8k"], folder=tmp_path) == [("d",), ("a",), ("b", "c")]


def test_facts_of_a_folder(tmp_path: Path) -> None:
    data = gzip.compress(GOOD.encode())
    (tmp_path / "gsm8k.jsonl.gz").write_bytes(data)
    assert benchmark_facts("gsm8k", folder=tmp_path) == {
        "name": "gsm8k",
        "domain": "math",
        "source": "folder (gsm8k.jsonl.gz)",
        "revision": f"sha256:{hashlib.sha256(data).hexdigest()}",
        "split": None,
        "prompt_form": "each of {turns}",
        "turns": 2,
        "reference_count": 500,
        "licence": "that of the folder's file",
    }
    assert benchmark_facts("gsm8k") == BENCHMARKS["gsm8k"].facts()
    with pytest.raises(PromptError, match="no benchmark 'gsm'"):
        benchmark_facts("gsm")
