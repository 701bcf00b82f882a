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
    """Answer every turn: a later turn joins the batch as soon as the one before it is answered.

    Generations come in the order of conversations, then turns.
    """
    by_id = {item.id: item for item in conversations}
    said: dict[str, list[str]] = {item.id: [] for item in conversations}
    done: dict[str, Generation] = {}
    session = engine.session()

    def submit(item: Conversation) -> None:
        turn = len(said[item.id])
        ids = chat.prompt_ids(item.turns[: turn + 1], said[item.id], system_prompt=system_prompt)
        name = answer_id(item.id, turn)
        session.submit(Request(name, tuple(ids), max_new_tokens, sampling, sample_seed(seed, name)))

    for item in conversations:
        submit(item)
    started = time.perf_counter()
    while not session.is_idle:
        for generation in session.step():
            done[generation.request_id] = generation
            item = by_id[generation.prompt_id]
            said[item.id].append(chat.decode(generation.token_ids))
            if len(said[item.id]) < len(item.turns):
                submit(item)
            if on_finish is not None:
                on_finish(generation)
    wall_s = time.perf_counter() - started
    ordered = [done[answer_id(item.id, turn)] for item in conversations for turn in range(len(item.turns))]
    return Answered(tuple(ordered), wall_s)
