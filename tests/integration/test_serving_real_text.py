"""The schedulers inside the engine on the real target and real text: lossless, and foretold by the simulator.

The drafter copies what the target wrote before after the same tokens, and is as sure as it was often right.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from draftsmith.decoding.engine import Engine, Request
from draftsmith.decoding.policies import DraftedBlocks, LengthPolicy, verify_all
from draftsmith.nn.kv import FlatBatch
from draftsmith.params import Sampling
from draftsmith.serving.cost_table import CostTable
from draftsmith.serving.engine_comparison import compare_with_engine
from draftsmith.serving.policies import AsynchronousPolicy, SynchronousPolicy
from draftsmith.serving.recorded import record_rounds
from draftsmith.targets.base import Target
from draftsmith.targets.fetch import load_chat_format
from draftsmith.text.chat import ChatFormat
from tests.target_fixtures import real_target
from tests.tiny_models import loaded_real_target
from tests.unit.decoding.laws import Law, p_value, transformed_rows
from tests.unit.decoding.toys import ScriptedDrafter, Text

__all__ = ["real_target"]

pytestmark = pytest.mark.xdist_group("real-text")

SIZE = 5
SUBJECTS = ("a river", "the moon", "bread", "a train", "winter", "a garden", "music", "the sea")
ASKED = ("Write two sentences about {}.", "Write a list of three facts about {}.", "Tell a child what {} is.")
COOL = Sampling(temperature=0.5)
NUM_TOKENS, LIMITS = 40, (2, 6, 16)
AFTER = CostTable(np.arange(1, 200), steps_per_s=1 / (1 + np.arange(1, 200) / 24))
"""A step takes twice as long with 24 tokens as with none."""


def requests(chat: ChatFormat, *, seed: int) -> list[Request]:
    texts = [how.format(what) for how, what in itertools.product(ASKED, SUBJECTS)]
    return [
        Request(f"{seed}-{number}", tuple(chat.prompt_ids([text], [], system_prompt=None)), NUM_TOKENS, COOL,
                seed=100 * seed + number)
        for number, text in enumerate(texts)
    ]  # fmt: skip


def copier(texts: list[Text], *, target: Target) -> ScriptedDrafter:
    """Drafts what followed the same two tokens, or the same one, in `texts`."""
    followers: dict[Text, Counter[int]] = defaultdict(Counter)
    for text in texts:
        for place in range(1, len(text)):
            followers[text[place - 1 : place]][text[place]] += 1
            followers[text[max(0, place - 2) : place]][text[place]] += 1

    def seen(text: Text) -> Counter[int]:
        return followers.get(text[-2:]) or followers.get(text[-1:]) or Counter({text[-1]: 1})

    def draft(texts: list[Text], slot: int) -> Tensor:
        del slot
        logits = torch.full((len(texts), target.config.vocab_size), -12.0)
        for row, text in enumerate(texts):
            for token, count in seen(text).items():
                logits[row, token] = math.log(count)
        return logits

    def confidence(texts: list[Text]) -> list[float]:
        """The share of the likeliest follower, less where few were seen."""
        shares = [max(counts.values()) / (counts.total() + 1) for counts in map(seen, texts)]
        return [math.log(share / (1 - share)) for share in shares]

    return ScriptedDrafter(draft, target=target, block_size=SIZE, confidence=confidence)


def test_the_simulator_foretells_verification_lengths_at_three_loads(real_target: Path) -> None:
    """Rounds of other answers to the same prompts; mean verification length within 10 %, as the load changes it."""
    target, chat = loaded_real_target(real_target, "bfloat16"), load_chat_format(real_target)
    plain = Engine(target, drafter=None, end_ids=chat.end_ids, batch_size=24).generate(requests(chat, seed=1))
    drafter = copier([one.token_ids for one in plain], target=target)
    full = Engine(target, drafter=drafter, end_ids=chat.end_ids, batch_size=24, policy=verify_all)
    rounds = record_rounds({"chat": full.generate(requests(chat, seed=2))}, block_size=SIZE)
    assert rounds.accepted_length > 1.3, "the drafter is of no use"
    offered = requests(chat, seed=3)
    found = compare_with_engine(
        offered, domain=["chat"] * len(offered), target=target, drafter=drafter, end_ids=chat.end_ids,
        new_policy=lambda: SynchronousPolicy(AFTER), temperatures=None, rounds=rounds, max_requests=LIMITS,
        seeds=range(8),
    )  # fmt: skip
    lengths = [one.engine_length for one in found]
    assert lengths[0] > 1.2 * lengths[1] > 1.44 * lengths[2] > 0, "the load changes nothing"
    for one in found:
        assert abs(one.length_error) < 0.10, one
        assert abs(one.accepted_length_error) < 0.10, one


# Lossless on real text

WARM = Sampling(temperature=0.7)
PROMPT, BATCH_SIZE, NUM_ANSWERS, NUM_LAW = "The weather today is", 200, 900, 3
LIKELY, OTHER = 10, (-1,)
RIGHT, WRONG = 1e-3, 1e-6


@cache
def law_of(target: Target, prompt: Text) -> Law:
    """Of the first three tokens after the prompt: the target's own logits, text by text.

    Texts of the ten likeliest tokens in each place; all the others are one.
    """
    law: Law = {(): 1.0}
    for _ in range(NUM_LAW):
        texts = list(law)
        lengths = [len(prompt) + len(text) for text in texts]
        batch = FlatBatch.make([0] * len(texts), counts=lengths, slots=range(len(texts)), device=target.device)
        ids = torch.tensor([token for text in texts for token in (*prompt, *text)])
        with torch.inference_mode():
            states = target.forward(ids, batch=batch, rows=target.new_rows()).last_hidden
            logits = target.logits(states[torch.tensor(lengths).cumsum(0) - 1]).double().numpy()
        rows = transformed_rows(logits, WARM)
        law = {
            (*text, int(token)): law[text] * float(row[token])
            for text, row in zip(texts, rows, strict=True)
            for token in np.argsort(-row)[:LIKELY]
        }
    return {**law, OTHER: 1 - sum(law.values())}


def wavering(text: Text) -> float:
    """A logit that depends on the token before the slot that it speaks of."""
    return 3.0 if text[-1] % 2 else -2.0


def p_of(folder: Path, policy: LengthPolicy) -> float:
    """p-value of the answers to the prompt; the drafter knows pairs of tokens, and likes some too much."""
    target = loaded_real_target(folder, "float32")
    prompt = tuple(AutoTokenizer.from_pretrained(folder)(PROMPT).input_ids)
    law = law_of(target, prompt)
    after = dict[Text, dict[int, float]]()
    for text, probability in law.items():
        for place in range(1, len(text)):
            shares = after.setdefault(text[place - 1 : place], {})
            shares[text[place]] = shares.get(text[place], 0.0) + probability

    def draft(texts: list[Text], slot: int) -> Tensor:
        del slot
        logits = torch.full((len(texts), target.config.vocab_size), -20.0)
        for row, text in enumerate(texts):
            for token, share in after.get(text[-1:], {text[-1]: 1.0}).items():
                logits[row, token] = math.log(share) + float(token % 3)
        return logits

    drafter = ScriptedDrafter(
        draft, target=target, block_size=2, confidence=lambda texts: [wavering(text) for text in texts]
    )
    engine = Engine(target, drafter=drafter, end_ids=[], batch_size=BATCH_SIZE, policy=policy)
    answers = engine.generate([Request(str(seed), prompt, NUM_LAW, WARM, seed) for seed in range(NUM_ANSWERS)])
    return p_value([one.token_ids if one.token_ids in law else OTHER for one in answers], law)


SLOWER = CostTable([1, 210, 300, 400, 550], steps_per_s=[1.0, 0.9, 0.65, 0.6, 0.5])


def looks_back(blocks: DraftedBlocks) -> list[int]:
    """Verifies all where the last confidence, which has seen the other tokens, is high, otherwise nothing."""
    assert blocks.confidence is not None
    return [blocks.block_size * int(row[-1] > 0.5) for row in blocks.confidence]


@pytest.mark.parametrize("policy", [SynchronousPolicy, lambda table: AsynchronousPolicy(table, staleness=1)])
def test_answers_have_the_targets_law(policy: Callable[[CostTable], LengthPolicy], real_target: Path) -> None:
    """Chi-square of the first three tokens against the target's own probabilities, with fixed seeds."""
    chosen, seen = policy(SLOWER), set[int]()

    def noted(blocks: DraftedBlocks) -> list[int]:
        lengths = list(chosen(blocks))
        seen.update(lengths)
        return lengths

    assert p_of(real_target, noted) > RIGHT
    assert len(seen) > 1, "the load changes nothing"


def test_a_schedule_that_looks_back_is_found(real_target: Path) -> None:
    assert p_of(real_target, looks_back) < WRONG
