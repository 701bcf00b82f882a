"""Comparing two evaluations: verdicts by hand, the correction for many benchmarks, simulated gates of known truth."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest

from draftsmith.errors import DraftsmithError, ParamsError
from draftsmith.evaluation.bootstrap import Estimate
from draftsmith.evaluation.compare import Comparison, compare, holm, judge
from tests.unit.evaluation.evaluations import body_of, body_of_lengths, make_decoded, make_facts


@pytest.mark.parametrize(
    ("value", "low", "high", "verdict", "loss"),
    [
        (0.3, 0.1, 0.5, "better", "excluded"),
        (-0.05, -0.08, -0.02, "worse", "excluded"),  # a small loss that is none of chance
        (-0.08, -0.15, -0.01, "worse", "possible"),
        (-0.2, -0.35, -0.05, "regression", "possible"),
        (-0.3, -0.4, -0.2, "regression", "shown"),
        (0.0, -0.05, 0.05, "within noise", "excluded"),
        (-0.04, -0.2, 0.09, "within noise", "possible"),
        (0.05, -0.08, 0.3, "within noise", "excluded"),
        (0.0, -0.11, 0.12, "cannot tell", "possible"),
        (-0.2, -0.5, 0.2, "cannot tell", "possible"),
        (0.0, 0.0, 0.0, "within noise", "excluded"),
    ],
)
def test_verdicts_at_a_margin_of_a_tenth(value: float, low: float, high: float, verdict: str, loss: str) -> None:
    assert judge(Estimate(value, (low, high), 9), margin=0.1) == (verdict, loss)


def test_without_an_interval_nothing_can_be_told() -> None:
    assert judge(Estimate(-3.0, None, 1), margin=0.1) == ("cannot tell", "possible")


def test_without_a_margin_every_loss_counts() -> None:
    assert judge(Estimate(-0.05, (-0.08, -0.02), 9), margin=0.0) == ("regression", "shown")
    assert judge(Estimate(-0.05, (-0.2, 0.1), 9), margin=0.0) == ("within noise", "possible")


def test_holm_by_hand() -> None:
    # Ascending 0.01 0.02 0.03 0.04 times 4 3 2 1: 0.04, 0.06, 0.06, 0.04; never below the one before.
    assert holm([0.03, 0.01, None, 0.04, 0.02]) == pytest.approx([0.06, 0.04, None, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


# Eight prompts of one round; B accepts one token less on each of gsm8k, as many on humaneval.
A = {"gsm8k": [[2], [1]] * 4, "humaneval": [[1], [0]] * 4}
B = {"gsm8k": [[1], [0]] * 4, "humaneval": [[1], [0]] * 4}


def by_scope(found: Comparison) -> dict[str, Any]:
    return {item.scope: item for item in (*found.benchmarks, *found.averages)}


def test_a_loss_on_one_of_two_benchmarks() -> None:
    found = compare(body_of_lengths("a", A), candidate=body_of_lengths("b", B), margin=0.2)
    rows = by_scope(found)
    assert (rows["gsm8k"].baseline, rows["gsm8k"].candidate) == (2.5, 1.5)
    assert (rows["gsm8k"].difference.value, rows["gsm8k"].verdict) == (-1.0, "regression")
    assert rows["gsm8k"].difference.interval == pytest.approx((-1.0, -1.0))
    assert rows["gsm8k"].adjusted_p == 0.0
    assert (rows["humaneval"].difference.value, rows["humaneval"].verdict) == (0.0, "within noise")
    assert (rows["average"].difference.value, rows["average"].difference.num_prompts) == (-0.5, 16)
    assert [item.scope for item in found.regressions] == ["average", "gsm8k"]
    assert found.regressed
    assert found.text.splitlines()[-1] == "Regression: B is worse than A by more than 0.2: average (T 0), gsm8k (T 0)."


def test_the_other_way_round_it_is_better() -> None:
    found = compare(body_of_lengths("a", B), candidate=body_of_lengths("b", A), margin=0.2)
    assert {scope: row.verdict for scope, row in by_scope(found).items()} == {
        "gsm8k": "better", "humaneval": "within noise", "average": "better",
    }  # fmt: skip
    assert not found.regressed
    assert found.text.splitlines()[-1] == "No regression: over the benchmarks a loss of more than 0.2 is excluded."


def test_a_benchmark_against_itself() -> None:
    found = compare(body_of_lengths("a", A), candidate=body_of_lengths("b", A), margin=0.0)
    assert {row.verdict for row in by_scope(found).values()} == {"within noise"}
    assert {row.loss for row in by_scope(found).values()} == {"excluded"}
    assert not found.regressed


def test_too_few_prompts_say_how_many_would_tell() -> None:
    """Differences of +1 and -1 in turn: of 40 prompts the half-width is about 0.3, three times the margin."""
    one = {"gsm8k": [[1]] * 40}
    mixed = {"gsm8k": [[2], [0]] * 20}
    found = compare(body_of_lengths("a", one), candidate=body_of_lengths("b", mixed), margin=0.1)
    [row] = found.benchmarks
    assert row.difference.interval is not None
    low, high = row.difference.interval
    # Student's: +-1 over sqrt(39) prompts times 2.023, on the grid of resampled means (steps of 0.05).
    assert (high - low) / 2 == pytest.approx(2.023 / math.sqrt(39), abs=0.05)
    assert row.verdict == "cannot tell"
    assert row.needed == math.ceil(40 * ((high - low) / 2 / 0.1) ** 2)
    assert 300 < row.needed < 560
    assert f"needs about {row.needed} prompts" in found.text
    assert found.text.splitlines()[-1] == (
        "No regression shown, but a loss of more than 0.1 is not excluded: average (T 0) is cannot tell; about "
        f"{row.needed} prompts would tell."
    )


def test_one_of_many_benchmarks_is_worse_by_chance() -> None:
    """A benchmark whose own interval excludes 0 counts for the gate only if it does so after Holm's correction."""
    rng = np.random.default_rng(0)
    names = ("gsm8k", "math500", "humaneval", "mt_bench")
    settings = [(name, temperature) for temperature in (0.0, 1.0) for name in names]
    lengths = {setting: rng.integers(1, 8, size=16) for setting in settings}
    # Seven of eight comparisons are even; in one, seven prompts lose a token and one gains one.
    changes = {setting: np.array([1, -1] * 8) for setting in settings}
    changes["gsm8k", 0.0] = np.array([-1] * 7 + [1] + [0] * 8)

    def body(key: str, *, changed: bool) -> dict[str, Any]:
        return body_of(
            key,
            [
                make_decoded(
                    name, [[int(n)] for n in lengths[name, t] + changed * changes[name, t]], temperature=t, block_size=8
                )
                for name, t in settings
            ],
            block_size=8,
        )

    found = compare(body("a", changed=False), candidate=body("b", changed=True), margin=0.1)
    [chance] = [row for row in found.benchmarks if (row.scope, row.temperature) == ("gsm8k", 0.0)]
    assert chance.verdict == "regression"
    assert chance.difference.p_value is not None
    assert chance.difference.p_value < 0.05
    assert chance.adjusted_p == pytest.approx(8 * chance.difference.p_value)
    assert chance.adjusted_p > 0.05
    assert not found.regressed
    alone = compare(body("a", changed=False), candidate=body("b", changed=True), margin=0.1, temperature=0.0)
    assert len(alone.benchmarks) == 4


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("target", "large", r"differ in target cannot be compared: got large \(b\), expected tiny \(a\)"),
        ("dtype", "bfloat16", r"differ in dtype cannot be compared: got bfloat16 \(b\), expected float32 \(a\)"),
        ("max_new_tokens", 4, r"differ in max_new_tokens cannot be compared: got 4 \(b\), expected 96 \(a\)"),
    ],
)
def test_unequal_settings_are_refused_by_name(field: str, value: Any, message: str) -> None:
    with pytest.raises(DraftsmithError, match=message):
        compare(body_of_lengths("a", A), candidate=body_of_lengths("b", B, **{field: value}), margin=0.1)


def test_another_target_under_the_same_name_is_refused() -> None:
    first = body_of_lengths("a", A, provenance={"target_digest": "01", "text_digest": "ab"})
    for change, message in (
        ({"target_digest": "02"}, r"differ in provenance.target_digest cannot be compared: got 02 \(b\)"),
        ({"text_digest": "cd"}, r"differ in provenance.text_digest cannot be compared: got cd \(b\)"),
    ):
        other = body_of_lengths("b", B, provenance={**first["provenance"], **change})
        with pytest.raises(DraftsmithError, match=message):
            compare(first, candidate=other, margin=0.1)
    silent = body_of_lengths("b", B, provenance={"target_digest": None})
    assert compare(first, candidate=silent, margin=0.1).regressed


@pytest.mark.parametrize("field", ["source", "revision", "split", "prompt_form", "turns"])
def test_other_prompts_under_the_same_ids_are_refused(field: str) -> None:
    facts = [make_facts("gsm8k"), make_facts("humaneval", **{field: "other"})]
    with pytest.raises(DraftsmithError, match=rf"differ in benchmarks.humaneval.{field} cannot be compared: got other"):
        compare(body_of_lengths("a", A), candidate=body_of_lengths("b", B, facts=facts), margin=0.1)


def test_block_size_kind_cap_and_batch_may_differ() -> None:
    """They are what is compared, or change no accepted token."""
    other = body_of_lengths("b", A, block_size=5, facts=[make_facts("gsm8k", cap=90), make_facts("humaneval")])
    other["drafter"]["kind"] = "eagle3"
    for row in other["rows"]:
        row["batch_size"] = 1
    assert not compare(body_of_lengths("a", A), candidate=other, margin=0.1).regressed


def test_prompts_in_one_only_are_left_out_and_counted() -> None:
    """A has prompts 0-4, B has 0-6 and no round on prompt 1: 0, 2, 3, 4 are compared."""
    first = body_of_lengths("a", {"gsm8k": [[2], [2], [2], [1], [1]]})
    second = body_of_lengths("b", {"gsm8k": [[1], [], [2], [1], [0], [2], [2]]})
    found = compare(first, candidate=second, margin=0.1)
    [row] = found.benchmarks
    assert row.difference.num_prompts == 4
    assert row.baseline == pytest.approx((3 + 3 + 2 + 2) / 4)
    assert row.candidate == pytest.approx((2 + 3 + 2 + 1) / 4)
    assert row.difference.value == pytest.approx(-0.5)
    assert "Left out of gsm8k at temperature 0: 2 only in B, 1 without a round." in found.notes
    turned = compare(second, candidate=first, margin=0.1)
    assert "Left out of gsm8k at temperature 0: 2 only in A, 1 without a round." in turned.text


def test_no_prompt_in_common_is_an_error() -> None:
    first, second = body_of_lengths("a", A), body_of_lengths("b", B)
    prompts = second["rows"][0]["prompts"]
    prompts["ids"] = [f"{name}x" for name in prompts["ids"]]
    with pytest.raises(DraftsmithError, match=r"no prompt of gsm8k at temperature 0.*got 8 prompts \(b\)"):
        compare(first, candidate=second, margin=0.1)


def test_benchmarks_and_temperatures_in_one_only_are_told() -> None:
    first = body_of_lengths("a", A, temperatures=(0.0, 1.0))
    second = body_of_lengths("b", {"gsm8k": B["gsm8k"], "mt_bench": A["gsm8k"]})
    found = compare(first, candidate=second, margin=0.1)
    assert [(row.scope, row.temperature) for row in found.benchmarks] == [("gsm8k", 0.0)]
    assert found.notes == (
        "Left out: temperature 1 is in one of them only.",
        "Left out: humaneval at temperature 0 is only in A.",
        "Left out: mt_bench at temperature 0 is only in B.",
    )
    with pytest.raises(DraftsmithError, match=r"no benchmark at temperature 0.*got mt_bench \(b\), expected gsm8k"):
        compare(body_of_lengths("a", {"gsm8k": A["gsm8k"]}),
                candidate=body_of_lengths("b", {"mt_bench": A["gsm8k"]}), margin=0.1)  # fmt: skip


def test_temperatures_are_chosen_or_refused() -> None:
    both = body_of_lengths("a", A, temperatures=(0.0, 1.0))
    cold = body_of_lengths("b", B)
    assert [row.temperature for row in compare(both, candidate=both, margin=0.1).averages] == [0.0, 1.0]
    assert [row.temperature for row in compare(both, candidate=both, margin=0.1, temperature=1.0).averages] == [1.0]
    with pytest.raises(DraftsmithError, match=r"no temperature 1 in both: got 0 \(b\), expected 0, 1 \(a\)"):
        compare(both, candidate=cold, margin=0.1, temperature=1.0)
    hot = body_of_lengths("h", A, temperatures=(1.0,))
    with pytest.raises(DraftsmithError, match=r"no temperature in common: got 1 \(h\), expected 0 \(b\)"):
        compare(cold, candidate=hot, margin=0.1)


def test_seeds_matter_only_where_tokens_are_sampled() -> None:
    first = body_of_lengths("a", A, temperatures=(0.0, 1.0))
    other = {**copy.deepcopy(first), "seed": 9}
    assert "Note: sampled with different seeds (6 and 9)." in compare(first, candidate=other, margin=0.1).notes
    assert compare(first, candidate=other, margin=0.1, temperature=0.0).notes == ()


@pytest.mark.parametrize("margin", [-0.1, math.nan, math.inf])
def test_margins_are_checked(margin: float) -> None:
    with pytest.raises(ParamsError, match=r"margin must be a number of tokens >= 0.*\(--margin\)"):
        compare(body_of_lengths("a", A), candidate=body_of_lengths("b", B), margin=margin)


def test_the_text_has_a_line_for_everything() -> None:
    found = compare(body_of_lengths("a", A), candidate=body_of_lengths("b", B), margin=0.2, names=("champion", "new"))
    lines = found.text.splitlines()
    assert lines[:2] == ["A, the baseline: champion", "B, the candidate: new"]
    cells = {line.split("|")[1].strip(): [cell.strip() for cell in line.strip("|").split("|")] for line in lines
             if line.startswith("|")}  # fmt: skip
    assert cells["gsm8k"] == [
        "gsm8k", "0", "8", "2.500", "1.500", "-1.000 [-1.000, -1.000]", "shown", "< 0.001", "regression",
    ]  # fmt: skip
    assert cells["humaneval"][5:] == ["0.000 [0.000, 0.000]", "excluded", "1.000", "within noise"]
    assert cells["average"][2:5] == ["16", "2.000", "1.500"]
    assert cells["average"][7] == "-"


def simulated(rng: np.random.Generator, *, shift: float, num_prompts: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two drafters on four benchmarks; the candidate's chance of accepting a token is lower by `shift`."""
    names = ("gsm8k", "math500", "humaneval", "mt_bench")
    bodies = []
    ease, rounds = rng.uniform(0.3, 0.7, size=(4, num_prompts)), rng.integers(8, 20, size=(4, num_prompts))
    for lower in (0.0, shift):
        rows = []
        for name, chances, counts in zip(names, ease, rounds, strict=True):
            draft = [
                int(np.minimum(rng.geometric(1 - p + lower, size=n) - 1, 4).sum())
                for p, n in zip(chances, counts, strict=True)
            ]
            prompts = {
                "ids": [f"{name}/{index}" for index in range(num_prompts)], "rounds": counts.tolist(),
                "committed": [int(n) + tokens for n, tokens in zip(counts, draft, strict=True)],
                "committed_draft": draft,
            }  # fmt: skip
            rows.append({"benchmark": name, "temperature": 0.0, "prompts": prompts})
        bodies.append(
            {"key": f"shift {lower}", "target": "tiny", "dtype": "float32", "max_new_tokens": 64, "seed": 0,
             "provenance": {},
             "benchmarks": [make_facts(name) for name in names], "rows": rows}
        )  # fmt: skip
    return bodies[0], bodies[1]


def test_the_gate_seldom_cries_wolf_and_sees_a_real_loss() -> None:
    rng = np.random.default_rng(1)
    alarms = sum(
        compare(first, candidate=second, margin=0.0).regressed
        for first, second in (simulated(rng, shift=0.0, num_prompts=12) for _ in range(60))
    )
    # The average and all benchmarks together: 2.5 % each, 3 of 60. Each benchmark by itself would be another 10 %.
    assert alarms <= 6
    seen = sum(
        compare(first, candidate=second, margin=0.05).regressed
        for first, second in (simulated(rng, shift=0.1, num_prompts=12) for _ in range(10))
    )
    assert seen == 10
