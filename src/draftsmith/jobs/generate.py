"""`draftsmith generate`: one answer, streamed, with the tokens that the drafter wrote marked."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from draftsmith.decoding.engine import Engine, Request
from draftsmith.jobs.parts import open_drafter, open_target
from draftsmith.params import Params, Sampling
from draftsmith.paths import Workspace

DRAFTED = ("\x1b[32m", "\x1b[0m")
BRACKETS = ("[", "]")


@dataclass(frozen=True)
class Streamed:
    """What was written: tokens, rounds, tokens the drafter wrote, tokens a second."""

    num_tokens: int
    num_rounds: int
    num_drafted: int
    tokens_per_s: float


def run(
    workspace: Workspace,
    params: Params,
    key: str,
    *,
    prompt: str,
    temperature: float,
    max_new_tokens: int,
    seed: int,
    write: Callable[[str], None],
) -> Streamed:
    """Answer `prompt`; drafted tokens are green on a terminal, in [brackets] elsewhere."""
    opened = open_target(workspace, params, params.run(key).target)
    drafter = open_drafter(workspace, params, key, opened=opened)
    before, after = DRAFTED if sys.stdout.isatty() else BRACKETS
    ids = opened.chat.prompt_ids([prompt], [], system_prompt=opened.place.row.system_prompt)
    engine = Engine(opened.target, drafter=drafter, end_ids=opened.chat.end_ids, batch_size=1)
    shown: list[int] = []
    text = ""

    def on_commit(_: str, tokens: list[int], drafted: list[bool]) -> None:
        nonlocal text
        for token, is_draft in zip(tokens, drafted, strict=True):
            shown.append(token)
            longer = opened.chat.decode(shown)
            if longer.endswith("\N{REPLACEMENT CHARACTER}"):
                continue
            piece, text = longer[len(text) :], longer
            write(f"{before}{piece}{after}" if is_draft and piece else piece)

    request = Request("prompt", tuple(ids), max_new_tokens, Sampling(temperature=temperature), seed)
    generation = engine.generate([request], on_commit=on_commit)[0]
    return Streamed(
        num_tokens=len(generation.token_ids),
        num_rounds=len(generation.rounds),
        num_drafted=sum(generation.drafted),
        tokens_per_s=len(generation.token_ids) / engine.times.total_s,
    )
