"""Building the three splits: counts, disjointness, determinism, and an account of every row."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from draftsmith.errors import PromptError
from draftsmith.params import Prompts, load_params
from draftsmith.text.prompts import PromptSets, build_prompts, share_out
from tests.target_fixtures import REPOSITORY


def row(**changes: object) -> Prompts:
    base: dict[str, object] = {
        "sources": ["math_templates", "code_templates", "chat_templates"],
        "mix": {"math": 0.5, "code": 0.3, "chat": 0.2},
        "num_train": 30,
        "num_validation": 7,
        "num_calibration": 11,
        "seed": 3,
    }
    return Prompts.model_validate({**base, **changes})


def write(path: Path, rows: list[object]) -> None:
    path.write_text("".join(json.dumps(item) + "\n" for item in rows))


def all_ids(sets: PromptSets) -> list[str]:
    return [prompt.id for prompts in sets.splits().values() for prompt in prompts]


def test_counts_follow_the_mix_exactly_and_the_splits_are_disjoint(tmp_path: Path) -> None:
    sets = build_prompts(row(), root=tmp_path, benchmark_turns=[])
    assert {name: Counter(item.domain for item in items) for name, items in sets.splits().items()} == {
        "train": {"math": 15, "code": 9, "chat": 6},
        "validation": {"math": 4, "code": 2, "chat": 1},  # 3.5, 2.1, 1.4: the largest rest gets the one left over
        "calibration": {"math": 6, "code": 3, "chat": 2},  # 5.5, 3.3, 2.2
    }
    assert len(set(all_ids(sets))) == 48


@pytest.mark.parametrize(
    ("number", "mix", "expected"),
    [
        (360, {"chat": 0.34, "math": 0.33, "code": 0.33}, {"chat": 122, "math": 119, "code": 119}),
        (10, {"chat": 1, "math": 1, "code": 1}, {"chat": 4, "math": 3, "code": 3}),
        (1, {"chat": 0.4, "math": 0.6}, {"chat": 0, "math": 1}),
        (100, {"chat": 7.0}, {"chat": 100}),
    ],
)
def test_share_out(number: int, mix: dict, expected: dict) -> None:
    assert share_out(number, mix) == expected


def test_the_seed_decides_and_the_order_of_a_file_does_not(tmp_path: Path) -> None:
    rows: list[object] = [{"turns": [f"Question number {index} of many?"]} for index in range(40)]
    changes = {"sources": [], "files": [{"path": "f.jsonl", "domain": "chat"}], "mix": {"chat": 1}, "num_train": 10}
    write(tmp_path / "f.jsonl", rows)
    first = build_prompts(row(**changes), root=tmp_path, benchmark_turns=[])
    write(tmp_path / "f.jsonl", rows[::-1])
    assert build_prompts(row(**changes), root=tmp_path, benchmark_turns=[]) == first
    assert build_prompts(row(**changes, seed=4), root=tmp_path, benchmark_turns=[]) != first


def test_every_row_is_accounted_for(tmp_path: Path) -> None:
    good = [{"turns": [f"Please describe town {index} for me."]} for index in range(9)]
    bench = "Compose a letter to the harbour master about the missing blue boat and its brave crew."
    write(
        tmp_path / "f.jsonl",
        [
            *good,
            {"turns": ["please  DESCRIBE town 3 for me"]},
            {"turns": ["x" * 101]},
            {"turns": [bench]},
            {"turns": ["Hello. " + bench]},
            {"turns": [" "]},
            {"messages": [{"role": "tool", "content": "x"}]},
        ],
    )
    write(tmp_path / "g.jsonl", [{"turns": ["Write code."]}])
    sets = build_prompts(
        row(
            sources=[],
            files=[{"path": "f.jsonl", "domain": "chat"}, {"path": "g.jsonl", "domain": "code"}],
            mix={"chat": 1},
            num_train=4,
            num_validation=2,
            num_calibration=1,
            max_prompt_chars=100,
        ),
        root=tmp_path,
        benchmark_turns=[(bench,)],
    )
    assert sets.counts == {
        "file:f.jsonl": {
            "used": 7,
            "not needed": 2,
            "duplicate": 1,
            "longer than max_prompt_chars 100": 1,
            "equal to a benchmark prompt": 1,
            "near a benchmark prompt": 1,
            "a turn is empty": 1,
            "unknown role 'tool'": 1,
        },
        "file:g.jsonl": {"domain code is not in the mix": 1},
    }
    assert sum(sets.counts["file:f.jsonl"].values()) == 15


def test_not_enough_prompts_says_how_many(tmp_path: Path) -> None:
    write(tmp_path / "f.jsonl", [{"turns": ["One?"]}, {"turns": ["Two?"]}])
    with pytest.raises(PromptError, match=r"not enough chat prompts: got 2 usable ones, expected 48"):
        build_prompts(
            row(sources=[], files=[{"path": "f.jsonl", "domain": "chat"}], mix={"chat": 1}),
            root=tmp_path,
            benchmark_turns=[],
        )


def test_an_unknown_source_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"no prompt source 'nope'.*chitchat.*open_perfectblend"):
        build_prompts(row(sources=["nope"]), root=tmp_path, benchmark_turns=[])


def test_the_repositorys_own_params_give_their_splits() -> None:
    prompts = load_params(REPOSITORY / "params.yaml").prompts
    sets = build_prompts(prompts, root=REPOSITORY, benchmark_turns=[])
    assert (len(sets.train), len(sets.validation), len(sets.calibration)) == (
        prompts.num_train,
        prompts.num_validation,
        prompts.num_calibration,
    )
    assert len(set(all_ids(sets))) == prompts.num_train + prompts.num_validation + prompts.num_calibration
    assert sum(fates["used"] for fates in sets.counts.values()) == len(all_ids(sets))
