"""Answering the training prompts and evaluating the benchmarks: equal turns reach the target as equal ids."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.decoding.engine import Engine
from draftsmith.evaluation.benchmarks import load_benchmark
from draftsmith.evaluation.conversations import Conversation, answer_conversations
from draftsmith.jobs.answers import answer_batch
from draftsmith.nn.kv import FlatBatch, KeyValueRows
from draftsmith.params import Answers, Sampling
from draftsmith.targets.base import TargetOutput
from draftsmith.text.answers import AnswerRow, answer_requests, plan_answer_batches
from draftsmith.text.chat import ChatFormat
from draftsmith.text.rows import Prompt
from tests.unit.decoding.toys import TableTarget, as_target
from tests.unit.text.toy_tokenizer import CHATML, THINKING, TRIMMING, byte_tokenizer

VOCAB = 261
LETTER, END = 72, 258  # what the target answers to everything
GREEDY = Sampling(temperature=0.0)


class RecordingTarget(TableTarget):
    """Says one letter, then ends; keeps the ids of each prompt that it is shown, one request in flight at a time."""

    def __init__(self) -> None:
        table = torch.zeros(VOCAB, VOCAB)
        table[:, LETTER] = 1.0
        table[LETTER, END] = 2.0
        super().__init__(table)
        self.shown: list[list[int]] = []

    def forward(self, token_ids: Tensor, *, batch: FlatBatch, rows: KeyValueRows) -> TargetOutput:
        if tuple(batch.starts) == (0,):
            self.shown.append(token_ids.tolist())
        return super().forward(token_ids, batch=batch, rows=rows)


def shown_by_evaluation(turns: tuple[str, ...], chat: ChatFormat, system: str | None) -> list[list[int]]:
    target = RecordingTarget()
    engine = Engine(as_target(target), drafter=None, end_ids=chat.end_ids, batch_size=1)
    asked = [Conversation("some", turns)]
    answer_conversations(engine, asked, chat=chat, system_prompt=system, sampling=GREEDY, max_new_tokens=4, seed=1)
    return target.shown


def shown_by_answers(turns: tuple[str, ...], chat: ChatFormat, system: str | None) -> list[list[int]]:
    target = RecordingTarget()
    row = SimpleNamespace(system_prompt=system, sampling=GREEDY)
    opened: Any = SimpleNamespace(chat=chat, target=target, place=SimpleNamespace(row=row))
    earlier: dict[str, AnswerRow] = {}
    requests = answer_requests({"train": [Prompt("chat", "test", turns)]})
    for batch in plan_answer_batches(requests, batch_size=1, seed=1):
        made = answer_batch(batch, earlier, opened=opened, row=Answers(max_new_tokens=4, batch_size=1))
        earlier |= {item.id: item for item in made}
    return target.shown


@pytest.mark.parametrize("system", [None, "Be brief."])
@pytest.mark.parametrize("template", [CHATML, THINKING, TRIMMING], ids=["chatml", "thinking", "trimming"])
@pytest.mark.parametrize("name", ["humaneval", "gsm8k", "mt_bench"])
def test_evaluation_asks_as_training_was_asked(name: str, template: str, system: str | None) -> None:
    tokenizer = byte_tokenizer(template)
    chat = ChatFormat(tokenizer)
    for prompt in load_benchmark(name, cap=2):
        shown = shown_by_evaluation(prompt.turns, chat, system)
        assert shown == shown_by_answers(prompt.turns, chat, system)
        assert len(shown) == len(prompt.turns)
        text = tokenizer.decode(shown[-1])
        assert all(turn.strip() in text for turn in prompt.turns)
        assert ("<|im_start|>system\nBe brief.<|im_end|>" in text) == (system is not None)


def test_the_comparison_can_fail() -> None:
    chat = ChatFormat(byte_tokenizer(CHATML))
    turns = load_benchmark("gsm8k", cap=1)[0].turns
    assert shown_by_evaluation(turns, chat, None) != shown_by_answers(turns, chat, "Be brief.")
