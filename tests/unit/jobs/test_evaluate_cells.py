"""Cells of an evaluation in the store: where they lie, what is decoded, what is found, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from draftsmith.decoding.engine import Engine
from draftsmith.decoding.rounds import Generation
from draftsmith.drafters.contract import Contract
from draftsmith.errors import ContractError
from draftsmith.evaluation.cells import MODES, DecodedCell, decode_cell, encode_cell
from draftsmith.evaluation.conversations import Conversation, answer_conversations
from draftsmith.jobs import evaluate_cells
from draftsmith.jobs.evaluate_cells import (
    Decoder,
    code_digest,
    decode_missing,
    load_decoded,
    planned_evaluation,
    read_cells,
)
from draftsmith.jobs.stores import workspace_store
from draftsmith.params import Sampling
from tests.evaluate_job import (
    DFLASH,
    DSPARK,
    NUM_ANSWERS,
    NUM_CELLS,
    Evaluation,
    decode,
    evaluation,
    evaluation_source,
    watch,
)

__all__ = ["evaluation", "evaluation_source"]


def prefixes(evaluation: Evaluation, key: str = DSPARK, **evaluate: Any) -> tuple[str, str]:
    found = planned_evaluation(evaluation.workspace, evaluation.params(**evaluate), key).prefixes
    return found["plain"], found["speculative"]


def without_logits(answer: Generation) -> Generation:
    return replace(answer, rounds=tuple(replace(one, confidence_logits=()) for one in answer.rounds))


def logits(answer: Generation) -> list[float]:
    return [logit for one in answer.rounds for logit in one.confidence_logits]


def test_the_code_digest_is_of_names_and_contents(tmp_path: Path) -> None:
    for name in ("a/one.py", "a/two.py", "b/three.py", "c.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    first = code_digest(["a", "c.py"], root=tmp_path)
    assert code_digest(["c.py", "a"], root=tmp_path) == first
    (tmp_path / "b/three.py").write_text("changed")
    (tmp_path / "a/notes.txt").write_text("no code")
    assert code_digest(["a", "c.py"], root=tmp_path) == first
    (tmp_path / "a/two.py").write_text("changed")
    second = code_digest(["a", "c.py"], root=tmp_path)
    (tmp_path / "a/two.py").rename(tmp_path / "a/zwei.py")
    third = code_digest(["a", "c.py"], root=tmp_path)
    (tmp_path / "c.py").write_text("changed")
    assert len({first, second, third, code_digest(["a", "c.py"], root=tmp_path)}) == 4


def test_what_names_the_code_is_there() -> None:
    root = Path(evaluate_cells.__file__).parents[1]
    assert all((root / name).exists() for name in evaluate_cells.SPECULATIVE_CODE)
    assert set(evaluate_cells.SPECULATIVE_CODE) - set(evaluate_cells.PLAIN_CODE) == {"drafters"}


def test_prefixes_change_with_what_changes_tokens(evaluation: Evaluation, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, speculative = prefixes(evaluation)
    assert plain.startswith("evaluate/tiny-plain-")
    assert speculative.startswith(f"evaluate/{DSPARK}-")
    unchanged = {
        "batch_size": 1, "cell_prompts": 3, "num_samples": 0, "temperatures": [0.7],
        "benchmarks": [{"name": "gsm8k", "cap": 1}],
        "speed": {"benchmark": "gsm8k", "num_prompts": 1, "max_new_tokens": 4},
    }  # fmt: skip
    for name, value in unchanged.items():
        assert prefixes(evaluation, **{name: value}) == (plain, speculative), name
    seen = {(plain, speculative)}
    for changed in ({"max_new_tokens": 15}, {"seed": 7}):
        other = prefixes(evaluation, **changed)
        assert (other[0] == plain, other[1] == speculative) == (False, False)
        seen.add(other)
    assert len(seen) == 3
    # Plain answers are the target's alone.
    assert prefixes(evaluation, DFLASH) != (plain, speculative)
    assert prefixes(evaluation, DFLASH)[0] == plain
    weights = evaluation.workspace.drafter_dir(DSPARK) / "model.safetensors"
    tensors = load_file(weights)
    save_file({name: value + 1 for name, value in tensors.items()}, weights, metadata={"format": "pt"})
    retrained = prefixes(evaluation)
    assert retrained[0] == plain
    assert retrained[1] != speculative
    real = code_digest
    for folder, kept in (("drafters", (True, False)), ("decoding", (False, False))):
        monkeypatch.setattr(
            evaluate_cells, "code_digest", lambda sources, name=folder: "edited" if name in sources else real(sources)
        )
        edited = prefixes(evaluation)
        assert (edited[0] == plain, edited[1] == retrained[1]) == kept, folder


@pytest.mark.parametrize(
    ("change", "field"),
    [({"dtype": "bfloat16"}, None), ({"system_prompt": "be short."}, "system_prompt")],
)
def test_prefixes_change_with_the_targets_row(
    evaluation: Evaluation, change: dict[str, Any], field: str | None
) -> None:
    before = prefixes(evaluation)
    evaluation.edit_params(lambda body: body["targets"]["tiny"].update(change))
    if field is not None:
        with pytest.raises(ContractError, match=field):
            prefixes(evaluation)
        folder = evaluation.workspace.drafter_dir(DSPARK)
        body = {**Contract.read(folder).body(), **change}
        Contract.parse(body, where="test").write(folder)
    after = prefixes(evaluation)
    assert before[0] != after[0]
    assert before[1] != after[1]


def test_prefixes_change_with_the_targets_weights_and_text(evaluation: Evaluation, tmp_path: Path) -> None:
    [row] = evaluation.params().targets.values()
    assert row.folder is not None
    before, seen = prefixes(evaluation), []

    def changed(name: str, change: Callable[[Path], object]) -> None:
        folder = tmp_path / name
        shutil.copytree(str(row.folder), folder)
        change(folder)
        evaluation.edit_params(lambda body: body["targets"]["tiny"].update(folder=str(folder)))
        planned = planned_evaluation(evaluation.workspace, evaluation.params(), DSPARK)
        seen.append((planned.prefixes["plain"], planned.prefixes["speculative"]))

    def scale(folder: Path) -> None:
        file = folder / "model.safetensors"
        tensors = load_file(file)
        save_file({key: value * 2 for key, value in tensors.items()}, file, metadata={"format": "pt"})
        accept(target_digest=evaluate_cells.weights_digest(folder))

    def another_end(folder: Path) -> None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7]}))

    def accept(**fields: str) -> None:
        drafter = evaluation.workspace.drafter_dir(DSPARK)
        Contract.parse({**Contract.read(drafter).body(), **fields}, where="test").write(drafter)

    changed("end", another_end)
    changed("weights", scale)
    assert len({before[0], *(plain for plain, _ in seen)}) == 3
    assert len({before[1], *(speculative for _, speculative in seen)}) == 3


def test_cells_hold_what_the_engine_answers_to_all_prompts_at_once(evaluation: Evaluation) -> None:
    """Against one batch without cells, without a store, in one process."""
    assert decode(evaluation) == 2 * NUM_ANSWERS
    planned = planned_evaluation(evaluation.workspace, evaluation.params(), DSPARK)
    decoder = Decoder(planned)
    found = load_decoded(evaluation.workspace, evaluation.params(), DSPARK)
    assert [(item.benchmark, item.temperature) for item in found] == [
        ("gsm8k", 0.0), ("mt_bench", 0.0), ("gsm8k", 1.0), ("mt_bench", 1.0),
    ]  # fmt: skip
    for item in found:
        for drafter, ours in ((None, item.plain), (decoder.drafter, item.generations)):
            engine = Engine(decoder.target, drafter=drafter, end_ids=planned.chat.end_ids, batch_size=64)
            answered = answer_conversations(
                engine,
                [Conversation(prompt.id, prompt.turns) for prompt in planned.prompts[item.benchmark]],
                chat=planned.chat,
                system_prompt=None,
                sampling=Sampling(temperature=item.temperature),
                max_new_tokens=14,
                seed=6,
            )
            theirs = {answer.request_id: answer for answer in answered.generations}
            assert len(theirs) == len(ours)
            for answer in ours:
                assert without_logits(answer) == without_logits(theirs[answer.request_id])
                # Sums of float32 in another order.
                assert logits(answer) == pytest.approx(logits(theirs[answer.request_id]), abs=1e-5)
        ids = [(prompt.id, turn) for prompt in planned.prompts[item.benchmark] for turn in range(len(prompt.turns))]
        assert [answer.request_id for answer in item.generations] == [f"{name}/t{turn}" for name, turn in ids]
        assert [answer.request_id for answer in item.plain] == [f"{name}/t{turn}" for name, turn in ids]
    assert sorted({len(item.generations) for item in found}) == [5, 7]
    # Something to measure: blocks of every accepted length, and logits of the confidence head as they were.
    rounds = [one for item in found for answer in item.generations for one in answer.rounds]
    assert {one.accepted for one in rounds} == {0, 1, 2, 3, 4}
    assert {len(one.confidence_logits) for one in rounds} == {4}


def test_a_cell_is_its_own_object_and_says_how_it_was_decoded(evaluation: Evaluation) -> None:
    decode(evaluation)
    planned = planned_evaluation(evaluation.workspace, evaluation.params(), DSPARK)
    assert len(evaluation.cells()) == 2 * NUM_CELLS
    wanted = {planned.path(cell, mode).removeprefix("evaluate/") for cell in planned.cells for mode in MODES}
    assert wanted == evaluation.cells().keys()
    cell = planned.cells[0]
    data = (evaluation.store / planned.path(cell, "speculative")).read_bytes()
    read = decode_cell(data, cell, mode="speculative", where="here")
    assert read.batch_size == 4
    assert read.wall_s > 0
    assert read.machine == evaluate_cells.read_hardware().description


def test_slices_share_out_the_cells(evaluation: Evaluation, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch(monkeypatch)
    shares = []
    for index in range(3):
        told = decode(evaluation, part=(index, 3))
        shares.append({name for _, name in seen[sum(2 * len(share) for share in shares) :]})
        assert told == 2 * sum(
            len(cell.request_ids)
            for cell in planned_evaluation(evaluation.workspace, evaluation.params(), DSPARK).cells[index::3]
        )
    assert [len(share) for share in shares] == [4, 3, 3]
    assert len(set.union(*shares)) == NUM_CELLS
    assert len(seen) == len(set(seen)) == 2 * NUM_CELLS
    assert decode(evaluation) == 2 * NUM_ANSWERS
    assert len(seen) == 2 * NUM_CELLS


def test_the_second_drafter_finds_the_plain_answers(evaluation: Evaluation, monkeypatch: pytest.MonkeyPatch) -> None:
    decode(evaluation)
    before, seen = evaluation.cells("tiny-plain"), watch(monkeypatch)
    assert decode(evaluation, DFLASH) == 2 * NUM_ANSWERS
    assert [mode for mode, _ in seen] == ["speculative"] * NUM_CELLS
    assert evaluation.cells("tiny-plain") == before
    assert len(evaluation.cells(DFLASH)) == NUM_CELLS
    one, other = (load_decoded(evaluation.workspace, evaluation.params(), key) for key in (DSPARK, DFLASH))
    assert [item.plain for item in one] == [item.plain for item in other]
    assert one[2].generations != other[2].generations


def test_more_prompts_and_temperatures_decode_what_is_new(
    evaluation: Evaluation, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode(evaluation, temperatures=[1.0], benchmarks=[{"name": "mt_bench", "cap": 3}])
    assert len(evaluation.cells()) == 2 * 2
    seen = watch(monkeypatch)
    decode(evaluation)
    assert len(seen) == 2 * (NUM_CELLS - 2)


def test_a_cell_that_another_process_wrote_first_counts(
    evaluation: Evaluation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is written while this process decodes it, one just before it would begin."""
    params = evaluation.params(temperatures=[1.0], benchmarks=[{"name": "gsm8k", "cap": 4}])
    planned, store = planned_evaluation(evaluation.workspace, params, DSPARK), workspace_store(evaluation.workspace)
    first, second = planned.cells
    real, seen = Decoder.decode, []

    def theirs(decoder: Decoder, cell: Any, mode: Any) -> None:
        made = real(decoder, cell, mode)
        other = DecodedCell(made.generations, 123.0, made.batch_size, made.machine)
        store.put_if_absent(planned.path(cell, mode), encode_cell(other, cell, mode=mode))

    def slow(self: Decoder, cell: Any, mode: Any, **rest: Any) -> DecodedCell:
        seen.append((cell.index, mode))
        if seen == [(0, "plain")]:
            theirs(self, first, "plain")
            theirs(self, second, "speculative")
        return real(self, cell, mode, **rest)

    monkeypatch.setattr(Decoder, "decode", slow)
    told: list[int] = []
    decode_missing(store, planned, part=None, decoder=Decoder(planned), on_answers=told.append)
    assert seen == [(0, "plain"), (0, "speculative"), (1, "plain")]
    assert sum(told) == 2 * 4
    [found] = read_cells(store, planned)
    assert found.plain_wall_s is not None
    assert found.wall_s is not None
    assert found.plain_wall_s > 123
    assert found.wall_s > 123


def test_wall_times_are_of_this_machine_and_batch_size(evaluation: Evaluation, monkeypatch: pytest.MonkeyPatch) -> None:
    decode(evaluation)
    params = evaluation.params()
    assert all(item.speedup is not None for item in load_decoded(evaluation.workspace, params, DSPARK))
    for item in load_decoded(evaluation.workspace, evaluation.params(batch_size=5), DSPARK):
        assert (item.batch_size, item.wall_s, item.plain_wall_s) == (5, None, None)
    there = evaluate_cells.read_hardware()
    monkeypatch.setattr(evaluate_cells, "read_hardware", lambda: type(there)("Linux", "other", 1, 1, ()))
    assert all(item.wall_s is None for item in load_decoded(evaluation.workspace, params, DSPARK))


def test_nothing_is_decoded_where_nothing_is_missing(evaluation: Evaluation, monkeypatch: pytest.MonkeyPatch) -> None:
    decode(evaluation)
    before = evaluation.cells()
    monkeypatch.setattr(evaluate_cells, "load_placed", lambda _: pytest.fail("weights are not needed"))
    assert decode(evaluation) == 2 * NUM_ANSWERS
    assert evaluation.cells() == before
