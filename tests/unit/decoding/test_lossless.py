"""Sampling through a drafter has the target's own law: chi-square against exact enumeration, and power checks.

The seeds are fixed, so every p-value is a constant. A right engine keeps it above 1e-3; the power checks are engines
made wrong on purpose, which the same test at the same number of answers rejects below 1e-9.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from draftsmith.decoding import verification
from draftsmith.decoding.accept import Verdict
from draftsmith.decoding.engine import Engine, Request
from draftsmith.decoding.policies import DraftedBlocks, LengthPolicy, verify_all
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.registry import build_drafter, drafter_config
from draftsmith.params import Sampling
from draftsmith.targets.families import FAMILIES
from tests.tiny_models import KINDS, drafter_row, randomize, reference, save_tiny, target_row, tiny_target
from tests.unit.decoding.toys import ScriptedDrafter, TableTarget, Text, as_target, table_draft

Law = dict[Text, float]
VOCAB, END, NUM_TOKENS, NUM_ANSWERS = 5, 4, 4, 12000
PLAIN = Sampling()
TINY_VOCAB, PROMPT = 6, (1, 3, 2)


def random_table(seed: int, *, spread: float = 1.5) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((VOCAB, VOCAB)) * spread)


TARGET = random_table(0)
BAD = -TARGET  # likely where the target is not
IMPOSSIBLE = torch.where(torch.arange(VOCAB) == 2, -math.inf, TARGET)  # a target that never writes token 2
ADVERSARY = torch.where(torch.arange(VOCAB) == 2, 3.0, random_table(1))  # a drafter that mostly writes it


def softmax(row: np.ndarray) -> np.ndarray:
    weights = np.exp(row - row.max())
    return weights / weights.sum()


def transformed(row: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Temperature, top-k, top-p (or argmax) of one row of logits, by sorting."""
    if sampling.temperature == 0:
        return np.eye(len(row))[row.argmax()]
    law = softmax(row / sampling.temperature)
    order = np.argsort(-law)
    if sampling.top_k:
        law[order[sampling.top_k :]] = 0
        law = law / law.sum()
    kept, mass = [], 0.0
    for token in order:
        if mass < sampling.top_p:
            kept.append(token)
            mass += law[token]
    return np.where(np.isin(np.arange(len(row)), kept), law, 0) / law[kept].sum()


def table_law(table: Tensor, *, first: int, sampling: Sampling = PLAIN, num: int = NUM_TOKENS) -> Law:
    """Probability of every answer after token `first`: `num` tokens, or fewer that end with END."""
    rows = [transformed(row, sampling) for row in table.double().numpy()]
    law: Law = {}

    def extend(text: Text, probability: float) -> None:
        if probability == 0:
            return
        if len(text) == num or (text and text[-1] == END):
            law[text] = probability
            return
        for token in range(VOCAB):
            extend((*text, token), probability * rows[text[-1] if text else first][token])

    extend((), 1.0)
    assert sum(law.values()) == pytest.approx(1.0)
    return law


def p_value(found: list[Text], law: Law) -> float:
    """Chi-square of the counts against the law, cells below 5 expected put together; fails on impossible ones."""
    counts = Counter(found)
    assert set(counts) <= set(law), "an answer that the target never gives"
    expected = np.array([law[text] * len(found) for text in law])
    seen = np.array([counts[text] for text in law], dtype=float)
    small = expected < 5
    if small.any():
        expected, seen = np.append(expected[~small], expected[small].sum()), np.append(seen[~small], seen[small].sum())
    if len(expected) == 1:
        return 1.0
    return float(stats.chisquare(seen, expected * seen.sum() / expected.sum()).pvalue)


def answers(
    target: object,
    drafter: Drafter | None,
    *,
    policy: LengthPolicy = verify_all,
    samplings: tuple[Sampling, ...] = (PLAIN,),
    prompt: Text = (0,),
    num: int = NUM_TOKENS,
    end_ids: tuple[int, ...] = (END,),
    count: int = NUM_ANSWERS,
) -> list[list[Text]]:
    """Many answers to one prompt, by sampling; neighbours in a batch sample differently."""
    engine = Engine(as_target(target), drafter=drafter, end_ids=end_ids, batch_size=2000, policy=policy)  # type: ignore[arg-type]
    requests = [Request(str(seed), prompt, num, samplings[seed % len(samplings)], seed) for seed in range(count)]
    found = engine.generate(requests)
    return [[one.token_ids for one in found[start :: len(samplings)]] for start in range(len(samplings))]


def confidence_of(texts: list[Text]) -> list[float]:
    """A confidence that depends on everything before the slot that it speaks of."""
    return [float((3 * text[-1] + 5 * len(text)) % 7 - 2) for text in texts]


def drafter_of(table: Tensor) -> ScriptedDrafter:
    return ScriptedDrafter(table_draft(table), target=TableTarget(table), block_size=3, confidence=confidence_of)


def by_earlier_slots(blocks: DraftedBlocks) -> list[int]:
    """Verify up to the first low confidence: slot k's own speaks of the tokens before it, so nothing looks ahead."""
    assert blocks.confidence is not None
    return (blocks.confidence > 0.5).cumprod(axis=1).sum(axis=1).tolist()


@pytest.mark.parametrize("policy", [verify_all, by_earlier_slots])
@pytest.mark.parametrize(
    ("target", "draft"),
    [
        pytest.param(TARGET, BAD, id="bad"),
        pytest.param(TARGET, TARGET, id="perfect"),
        pytest.param(TARGET, random_table(9), id="random"),
        pytest.param(IMPOSSIBLE, ADVERSARY, id="adversary"),
        pytest.param(TARGET, IMPOSSIBLE, id="never-drafts-a-token"),
    ],
)
def test_answers_have_the_targets_law(target: Tensor, draft: Tensor, policy: LengthPolicy) -> None:
    found = answers(TableTarget(target), drafter_of(draft), policy=policy)[0]
    assert p_value(found, table_law(target, first=0)) > 1e-3


def test_plain_sampling_has_the_targets_law() -> None:
    assert p_value(answers(TableTarget(TARGET), None)[0], table_law(TARGET, first=0)) > 1e-3


def test_filters_and_temperatures_mixed_in_one_batch_each_keep_their_own_law() -> None:
    """Also greedy rows among sampled ones; the drafter samples at the temperature but knows no filters."""
    samplings = (
        Sampling(temperature=0.7, top_p=0.8),
        Sampling(temperature=0.0),
        Sampling(temperature=1.3, top_k=3),
        Sampling(temperature=0.9, top_k=4, top_p=0.9),
    )
    found = answers(
        TableTarget(TARGET), drafter_of(random_table(9)), policy=by_earlier_slots, samplings=samplings, count=4 * 6000
    )
    for sampling, part in zip(samplings, found, strict=True):
        assert p_value(part, table_law(TARGET, first=0, sampling=sampling)) > 1e-3
    assert len(set(found[1])) == 1


# Power: the same test rejects engines that are wrong


def accept_always(tokens: Tensor, *, draft: Tensor, target: Tensor, lengths: Tensor, numbers: Tensor) -> Verdict:
    rows = torch.arange(len(tokens))
    return Verdict(lengths, target[rows, lengths.clamp(max=target.shape[1] - 1)])


def no_residual(tokens: Tensor, *, draft: Tensor, target: Tensor, lengths: Tensor, numbers: Tensor) -> Verdict:
    """The right acceptance, but a rejected token is replaced by a sample of p_t instead of the residual."""
    verdict = engine_verify(tokens, draft=draft, target=target, lengths=lengths, numbers=numbers)
    return Verdict(verdict.accepted, target[torch.arange(len(tokens)), verdict.accepted.clamp(max=target.shape[1] - 1)])


engine_verify = verification.verify_sampled


@pytest.mark.parametrize("wrong", [accept_always, no_residual])
def test_a_wrong_acceptance_is_found(wrong: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "verify_sampled", wrong)
    found = answers(TableTarget(TARGET), drafter_of(random_table(9)))[0]
    assert p_value(found, table_law(TARGET, first=0)) < 1e-9


def test_a_draft_law_that_is_not_the_one_sampled_from_is_found() -> None:
    """Verification against p_d of another temperature than the drafts were sampled at."""

    class Misquoting(ScriptedDrafter):
        def propose(self, anchors, *, positions, rows, sample):  # type: ignore[no-untyped-def]
            def misquote(logits: Tensor, slot: int) -> tuple[Tensor, Tensor]:
                tokens, law = sample(logits, slot)
                return tokens, (law.sqrt() / law.sqrt().sum(1, keepdim=True))

            return super().propose(anchors, positions=positions, rows=rows, sample=misquote)

    found = answers(
        TableTarget(TARGET), Misquoting(table_draft(random_table(9)), target=TableTarget(TARGET), block_size=3)
    )[0]
    assert p_value(found, table_law(TARGET, first=0)) < 1e-9


def test_the_counterexample_of_a_retrospective_schedule() -> None:
    """DSpark appendix A: p_t = (0.7, 0.3), p_d = (0.5, 0.5), c_2 = 0.9 after A and 0 after B.

    Verifying token 1 only when c_2, which has seen it, is high emits (0.85, 0.15); deciding by c_1 keeps (0.7, 0.3).
    """
    table = torch.full((VOCAB, VOCAB), -math.inf)
    table[:, :2] = torch.tensor([0.7, 0.3]).log()
    even = torch.full((VOCAB, VOCAB), -math.inf)
    even[:, :2] = 0.0

    def confidence(texts: list[Text]) -> list[float]:
        return [math.log(4) if len(text) == 2 else (math.log(9) if text[-1] == 0 else -20.0) for text in texts]

    def retrospective(blocks: DraftedBlocks) -> list[int]:
        assert blocks.confidence is not None
        return (blocks.confidence[:, 1] > 0.5).astype(int).tolist()

    def admitted_by_itself(blocks: DraftedBlocks) -> list[int]:
        assert blocks.confidence is not None
        return (blocks.confidence[:, 0] > 0.5).astype(int).tolist()

    drafter = ScriptedDrafter(table_draft(even), target=TableTarget(table), block_size=2, confidence=confidence)
    shares = {}
    for policy in (retrospective, admitted_by_itself):
        engine = Engine(as_target(TableTarget(table)), drafter=drafter, end_ids=[], batch_size=2000, policy=policy)
        found = engine.generate([Request(str(seed), (0,), 2, PLAIN, seed) for seed in range(NUM_ANSWERS)])
        shares[policy] = [one.token_ids[1:] for one in found]
    right, biased = {(0,): 0.7, (1,): 0.3}, {(0,): 0.85, (1,): 0.15}
    assert p_value(shares[admitted_by_itself], right) > 1e-3
    assert p_value(shares[retrospective], biased) > 1e-3
    assert p_value(shares[retrospective], right) < 1e-9


# The same on a real layer stack with a real drafter


@pytest.fixture(scope="module")
def tiny_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Law]]:
    """Family -> a target with a vocabulary of 6, and the law of three tokens after PROMPT.

    Enumerated with Hugging Face's model in float64.
    """
    found, texts = {}, list(itertools.product(range(TINY_VOCAB), repeat=3))
    for family in FAMILIES:
        changes = (
            {"layer_types": ["sliding_attention", "full_attention", "full_attention"]} if family == "gemma4" else {}
        )
        folder = save_tiny(
            tmp_path_factory.mktemp(family), family=family, seed=3, std=0.2, vocab_size=TINY_VOCAB,
            num_hidden_layers=3, eos_token_id=5, **changes,
        )  # fmt: skip
        model = reference(folder, dtype=torch.float64)
        with torch.inference_mode():
            rows = model(torch.tensor([[*PROMPT, *text[:2]] for text in texts])).logits[:, -3:].softmax(-1).numpy()
        law = {text: float(np.prod([rows[i, at, text[at]] for at in range(3)])) for i, text in enumerate(texts)}
        assert sum(law.values()) == pytest.approx(1.0)
        found[family] = (folder, law)
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_random_drafter_keeps_the_law_of_a_tiny_target(
    kind: str, family: str, tiny_vocabulary: dict[str, tuple[Path, Law]]
) -> None:
    """Every kind on every family, with verification lengths that differ from round to round."""
    folder, law = tiny_vocabulary[family]
    row = target_row(folder, capture_layers=(0, 1), vocab_size=TINY_VOCAB, num_layers=3, mask_token_id=5)
    config = drafter_config(
        drafter_row(kind, block_size=2, head_norms=family != "llama", layers=1), target=row, target_folder=folder
    )
    drafter = build_drafter(config, target_folder=folder)
    randomize(drafter, seed=8, std=0.4)
    drafter.eval().requires_grad_(False)
    lengths = Counter[int]()

    def policy(blocks: DraftedBlocks) -> list[int]:
        chosen = [row % (blocks.block_size + 1) for row in range(blocks.num_requests)]
        if blocks.confidence is not None:
            scattered = np.sin(500 * blocks.confidence) / 2 + 0.5
            chosen = by_earlier_slots(replace(blocks, confidence=scattered))
        lengths.update(chosen)
        return chosen

    target = tiny_target(folder, capture_layers=(0, 1))
    found = answers(target, drafter, policy=policy, prompt=PROMPT, num=3, end_ids=(), count=6000)[0]
    assert p_value(found, law) > 1e-3
    assert set(lengths) == set(range(config.block_size + 1))  # the policy was ragged
