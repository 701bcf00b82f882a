"""Answer prompts of one or more turns through the decoding engine, turn by turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from draftsmith.decoding.engine import Engine, Request
from draftsmith.decoding.rounds import Generation
from draftsmith.params import Sampling
from draftsmith.text.answers import answer_id, sample_seed
from draftsmith.text.chat import ChatFormat


@dataclass(frozen=True)
class Conversation:
    """A prompt to be answered: the user's turns."""

    id: str
    turns: tuple[str, ...]


@dataclass(frozen=True)
class Answered:
    """Generations of all turns (request ids `<id>/t<turn>`), and the wall time of the engine in seconds."""

    generations: tuple[Generation, ...]
    wall_s: float

    @property
    def tokens_per_s(self) -> float:
        return sum(len(item.token_ids) for item in self.generations) / self.wall_s


def answer_conversations(
    engine: Engine,
    conversations: Sequence[Conversation],
    *,
    chat: ChatFormat,
    system_prompt: str | None,
    sampling: Sampling,
    max_new_tokens: int,
    seed: int,
    on_finish: Callable[[Generation], None] | None = None,
) -> Answered:
    """Answer all first turns together, then all second turns with the answers so far in the prompt, and so on."""
    generations: list[Generation] = []
    said: dict[str, list[str]] = {item.id: [] for item in conversations}
    wall_s = 0.0
    for turn in range(max(len(item.turns) for item in conversations)):
        requests = []
        for item in (item for item in conversations if len(item.turns) > turn):
            ids = chat.prompt_ids(item.turns[: turn + 1], said[item.id], system_prompt=system_prompt)
            name = answer_id(item.id, turn)
            requests.append(Request(name, tuple(ids), max_new_tokens, sampling, sample_seed(seed, name)))
        started = time.perf_counter()
        found = engine.generate(requests, on_finish=on_finish)
        wall_s += time.perf_counter() - started
        for generation in found:
            said[generation.prompt_id].append(chat.decode(generation.token_ids))
        generations += found
    return Answered(tuple(generations), wall_s)
