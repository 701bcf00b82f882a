"""Decoding as it is usually written: Hugging Face's model and caches, one prompt at a time, or its `generate`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig

from draftsmith.drafters.base import Drafter, Observation
from draftsmith.drafters.registry import load_drafter
from draftsmith.nn.kv import FlatBatch, KeyValueRows
from draftsmith.targets.base import Family, TargetOutput, load_shared

PADDING_ID = 0


@dataclass(frozen=True)
class Written:
    """Answers as token ids, the rounds that it took, and seconds from the first prompt to the last token."""

    answers: list[list[int]]
    num_rounds: int
    seconds: float

    @property
    def num_tokens(self) -> int:
        return sum(len(answer) for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


def load_model(folder: Path, *, dtype: torch.dtype) -> Any:
    """The target as anybody loads it: Hugging Face's own attention and caches."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa", local_files_only=True)
    return model.eval().requires_grad_(False)


def load_plain_drafter(folder: Path, *, target_folder: Path, family: Family, dtype: torch.dtype) -> Drafter:
    """The drafter with matrices as they are saved (float32 matrices are not packed; it is converted afterwards)."""
    shared = load_shared(target_folder, family=family)
    drafter = load_drafter(folder, target_folder=target_folder, shared=shared, dtype=torch.float32)
    drafter.shared = shared.to(dtype=dtype, device=torch.device("cpu"))
    return drafter.to(dtype)


class OneByOne:
    """Greedy speculative decoding at batch 1: prefill, then draft, verify, crop the cache, and again."""

    def __init__(self, model: Any, *, drafter: Drafter, end_ids: Sequence[int]) -> None:
        self._model, self._drafter, self._end_ids = model, drafter, set(end_ids)
        self._layers = drafter.config.capture_layers

    @torch.inference_mode()
    def write(self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int) -> Written:
        started, answers, num_rounds = time.perf_counter(), [], 0
        for prompt in prompts:
            answer, rounds = self._answer(list(prompt), max_new_tokens)
            answers.append(answer)
            num_rounds += rounds
        return Written(answers, num_rounds, time.perf_counter() - started)

    def _answer(self, prompt: list[int], max_new_tokens: int) -> tuple[list[int], int]:
        cache, rows = DynamicCache(), self._drafter.new_rows()
        tokens, num_rounds = list(prompt), 0
        logits, output = self._forward(prompt, cache, last_only=True)
        self._observe(prompt, output, start=0, rows=rows)
        tokens.append(int(logits[-1].argmax()))
        while len(tokens) - len(prompt) < max_new_tokens and tokens[-1] not in self._end_ids:
            start = len(tokens) - 1
            proposal = self._drafter.propose(
                torch.tensor(tokens[-1:]),
                positions=[start],
                rows=rows,
                sample=lambda logits, _: (logits.argmax(1), None),
            )
            drafts = proposal.tokens[0].tolist()
            block = [tokens[-1], *drafts]
            logits, output = self._forward(block, cache, last_only=False)
            choices = logits.argmax(-1).tolist()
            accepted = next((k for k, token in enumerate(drafts) if token != choices[k]), len(drafts))
            if accepted < len(drafts):
                cache.crop(accepted - len(drafts))
            new = [*drafts[:accepted], choices[accepted]]
            ended = next((k for k, token in enumerate(new) if token in self._end_ids), len(new) - 1)
            tokens += new[: ended + 1]
            kept = TargetOutput(output.captured[: accepted + 1], output.last_hidden[: accepted + 1])
            self._observe(block[: accepted + 1], kept, start=start, rows=rows)
            num_rounds += 1
        return tokens[len(prompt) : len(prompt) + max_new_tokens], num_rounds

    def _forward(self, ids: list[int], cache: DynamicCache, *, last_only: bool) -> tuple[torch.Tensor, TargetOutput]:
        output = self._model(
            input_ids=torch.tensor([ids]), cache=cache, use_cache=True, output_hidden_states=True,
            logits_to_keep=1 if last_only else 0,
        )  # fmt: skip
        captured = torch.stack([output.hidden_states[layer + 1][0] for layer in self._layers], dim=1)
        return output.logits[0].float(), TargetOutput(captured, output.hidden_states[-1][0])

    def _observe(self, ids: list[int], output: TargetOutput, *, start: int, rows: KeyValueRows) -> None:
        batch = FlatBatch.make([start], counts=[len(ids)], slots=[0], device=torch.device("cpu"))
        self._drafter.observe(Observation(torch.tensor(ids), output.captured, output.last_hidden, batch), rows=rows)


def generate_padded(model: Any, prompts: Sequence[Sequence[int]], *, num_tokens: int) -> Written:
    """Hugging Face's greedy `generate` on one left-padded batch, exactly `num_tokens` tokens each."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[PADDING_ID] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    settings = GenerationConfig(
        do_sample=False, max_new_tokens=num_tokens, eos_token_id=None, pad_token_id=PADDING_ID, use_cache=True
    )
    started = time.perf_counter()
    with torch.inference_mode():
        found = model.generate(input_ids=ids, attention_mask=mask, generation_config=settings)
    return Written(found[:, width:].tolist(), num_tokens * len(prompts), time.perf_counter() - started)
