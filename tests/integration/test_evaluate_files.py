"""`draftsmith evaluate --drafter`: a saved drafter on a target folder, run as a user runs it, from an empty folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from draftsmith.decoding.rounds import Generation
from draftsmith.errors import ContractError
from draftsmith.evaluation.conversations import Answered
from draftsmith.jobs.evaluate_files import totals
from tests.evaluate_fixtures import (
    IDS,
    NUM_NEW,
    PROMPTS,
    SIZE,
    arguments,
    evaluate,
    options,
    refused,
    run_command,
    save,
    targets,
)
from tests.tiny_models import (
    END_TOKEN,
    hugging_face_greedy,
    reference,
)

__all__ = ["arguments", "targets"]

CASES = [
    ("dspark", "llama"), ("dflash_masks", "llama"), ("eagle3", "qwen3"), ("dspark_gated", "qwen3"),
    ("dspark", "gemma4"), ("eagle3", "gemma4"), ("mtp1", "llama"),
]  # fmt: skip


def greedy_answers(target: Path, turns: list[str], *, system_prompt: str | None = None) -> list[list[int]]:
    """Hugging Face's own greedy answers turn by turn, its template and tokenizer in between."""
    model, tokenizer = reference(target), AutoTokenizer.from_pretrained(str(target))
    messages = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    answers = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        answers.append(hugging_face_greedy(model, ids, num=NUM_NEW))
        messages.append({"role": "assistant", "content": tokenizer.decode(answers[-1], skip_special_tokens=True)})
    return answers


def check_sums(body: dict[str, Any], *, size: int) -> None:
    """Lengths against token counts, and the shares by position counted over again from the rounds."""
    rounds, without_bonus, num_tokens, num_turns = [], [], 0, 0
    for item in body["prompts"]:
        own = []
        for turn in item["turns"]:
            lengths = turn["accepted_lengths"]
            # The first token is the prompt's own pass.
            assert 1 + sum(lengths) == len(turn["token_ids"])
            assert all(1 <= length <= size + 1 for length in lengths)
            own += lengths
            without_bonus += turn["accepted_lengths_without_bonus"]
            num_tokens, num_turns = num_tokens + len(turn["token_ids"]), num_turns + 1
        assert item["accepted_length"] == (pytest.approx(sum(own) / len(own)) if own else None)
        assert len(item["conditional_acceptance"]) == len(item["num_conditional"]) == size
        assert item["num_conditional"][0] == len(own)
        rounds += own
    found = body["totals"]
    assert (found["num_tokens"], found["num_requests"], found["num_rounds"]) == (num_tokens, num_turns, len(rounds))
    assert found["num_committed"] == sum(rounds) == num_tokens - num_turns
    assert found["accepted_length"] == pytest.approx(sum(rounds) / len(rounds))
    assert found["accepted_length_without_bonus"] == pytest.approx(sum(without_bonus) / len(rounds))
    low, high = found["accepted_length_interval"]
    assert low <= found["accepted_length"] <= high
    for k in range(size):
        evidence = [item["num_conditional"][k] for item in body["prompts"]]
        assert found["num_conditional"][k] == sum(evidence)
        shares = [item["conditional_acceptance"][k] for item in body["prompts"]]
        kept = sum(share * count for share, count in zip(shares, evidence, strict=True) if count)
        if sum(evidence):
            assert found["conditional_acceptance"][k] == pytest.approx(kept / sum(evidence))
        else:
            assert found["conditional_acceptance"][k] is None


@pytest.mark.parametrize(("kind", "family"), CASES)
def test_greedy_answers_are_hugging_faces(
    kind: str, family: str, targets: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over several turns, in float32, whatever the drafter drafts; there is no working copy anywhere above."""
    monkeypatch.chdir(tmp_path)
    target = targets[family]
    body = evaluate(options(save(kind, target, tmp_path / "drafter"), target, tmp_path))
    assert [item["id"] for item in body["prompts"]] == IDS
    for item, prompt in zip(body["prompts"], PROMPTS, strict=True):
        expected = greedy_answers(target, prompt["turns"])  # type: ignore[arg-type]
        assert [turn["token_ids"] for turn in item["turns"]] == expected
        ends = ["end_of_text" if answer[-1] == END_TOKEN else "length" for answer in expected]
        assert [turn["finish"] for turn in item["turns"]] == ends
    check_sums(body, size=1 if kind == "mtp1" else SIZE)
    assert body["schema_version"] == 1
    assert (body["drafter"]["kind"], body["drafter"]["block_size"]) == (
        kind.partition("_")[0],
        1 if kind == "mtp1" else SIZE,
    )
    assert body["drafter"]["contract"]["unknown"] == []
    assert body["arguments"]["max_new_tokens"] == NUM_NEW
    assert body["arguments"]["drafter"] == str(tmp_path / "drafter")
    assert body["machine"]
    assert body["versions"]["torch"] == torch.__version__
    assert sorted(path.name for path in tmp_path.iterdir()) == ["drafter", "out.json", "prompts.jsonl"]


def test_sums_where_many_drafts_are_accepted(arguments: dict[str, str]) -> None:
    """At a high temperature the two distributions come near each other, whatever the drafter learned."""
    body = evaluate({**arguments, "temperature": "8", "max-new-tokens": "40"})
    check_sums(body, size=SIZE)
    assert 0.5 < body["totals"]["conditional_acceptance"][0] < 1
    assert all(body["totals"]["num_conditional"])
    assert body["totals"]["accepted_length_without_bonus"] > 1


def test_a_seed_gives_the_same_answers_and_another_seed_others(arguments: dict[str, str]) -> None:
    sampled = {**arguments, "temperature": "1", "seed": "3"}
    answers = []
    for given in (sampled, {**sampled, "batch-size": "1"}, {**sampled, "seed": "4"}):
        body = evaluate(given)
        check_sums(body, size=SIZE)
        answers.append([turn["token_ids"] for item in body["prompts"] for turn in item["turns"]])
    assert answers[0] == answers[1]
    assert answers[0] != answers[2]


def test_top_k_of_one_is_greedy(arguments: dict[str, str]) -> None:
    greedy = evaluate(arguments)
    found = evaluate({**arguments, "temperature": "1", "top-k": "1"})
    ids = [[turn["token_ids"] for item in body["prompts"] for turn in item["turns"]] for body in (greedy, found)]
    assert ids[0] == ids[1]
    assert (found["arguments"]["temperature"], found["arguments"]["top_k"]) == (1.0, 1)


def test_the_system_prompt_is_the_contracts_unless_another_is_given(targets: dict[str, Path], tmp_path: Path) -> None:
    target = targets["qwen3"]
    given = options(save("dspark", target, tmp_path / "drafter", system_prompt="be brief."), target, tmp_path)
    for changes, prompt in (({}, "be brief."), ({"system-prompt": "be long."}, "be long.")):
        body = evaluate({**given, **changes})
        assert body["arguments"]["system_prompt"] == prompt
        answers = [turn["token_ids"] for turn in body["prompts"][0]["turns"]]
        assert answers == greedy_answers(target, PROMPTS[0]["turns"], system_prompt=prompt)  # type: ignore[arg-type]


def test_answers_of_one_token_have_no_round(arguments: dict[str, str]) -> None:
    body = evaluate({**arguments, "max-new-tokens": "1"})
    assert body["totals"]["num_rounds"] == 0
    assert body["totals"]["accepted_length"] is None
    assert body["totals"]["num_tokens"] == body["totals"]["num_requests"] == 6
    assert all(item["accepted_length"] is None for item in body["prompts"])


def test_totals_by_hand() -> None:
    """One answer of no round: the fields are there, and say nothing."""
    one = Generation("a/t0", (7,), (False,), "end_of_text", ())
    found = totals(Answered((one,), wall_s=0.5), block_size=2, seed=0)
    assert (found["num_tokens"], found["tokens_per_s"], found["conditional_acceptance"]) == (1, 2.0, None)


def test_a_drafter_without_a_contract_is_checked_on_what_it_says(
    arguments: dict[str, str], targets: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """It says what nobody could check, on stderr and in the report; another target is refused all the same."""
    (Path(arguments["drafter"]) / "contract.json").unlink()
    body = evaluate(arguments)
    unknown = body["drafter"]["contract"]["unknown"]
    assert {"target", "target_digest", "tokenizer_digest", "template_digest", "cache_digest"} <= set(unknown)
    assert not {"hidden_size", "vocab_size", "capture_layers", "block_size"} & set(unknown)
    done = run_command(arguments, Path(arguments["out"]).parent)
    assert done.returncode == 0
    assert f"the drafter in {arguments['drafter']} does not say, so it is not checked: target, revision" in done.stderr
    Path(arguments["out"]).unlink()
    message = refused({**arguments, "target": str(targets["qwen3"])}, ContractError)
    assert message.startswith("the drafter was made for another family than the target in ")
    assert "got llama, expected qwen3" in message


def test_the_command_says_its_result_in_a_line_and_its_refusal_in_one(arguments: dict[str, str]) -> None:
    folder = Path(arguments["out"]).parent
    done = run_command(arguments, folder)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(Path(arguments["out"]).read_text())["totals"]
    assert done.stdout.startswith(f"accepted length {found['accepted_length']:.3f} [")
    assert f"{found['accepted_length_without_bonus']:.3f} without bonus" in done.stdout
    Path(arguments["prompts"]).unlink()
    done = run_command(arguments, folder)
    assert done.returncode == 2
    message = f"prompts file is missing: got {arguments['prompts']}, expected a JSON lines file (--prompts)"
    assert done.stderr.strip() == f"draftsmith: error: {message}"
