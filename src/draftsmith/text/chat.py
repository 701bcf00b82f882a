"""Messages to token ids through the target's own chat template; the one path for answering, training, evaluating."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import Tokenizer

from draftsmith.errors import TargetError
from draftsmith.manifest import json_digest, sha256_hex

_FIRST_SENTINEL = 0xF0000  # a private-use plane: no text standard gives these characters a meaning
_PROBE = (("Name three rivers.\n\n  - one a line", "And one lake?"), ("The Nile, the Rhine, the Po.",))


class ChatFormat:
    """A fast tokenizer with its chat template, its end-of-turn ids and a digest of both.

    Control tokens (the tokenizer's special tokens, and added tokens that the template itself writes) come from the
    template alone: the same characters typed in a message are tokenised as ordinary text. To that end they are replaced
    in the messages by private characters, the rendered text is cut at the control tokens that are left, and each run
    between them goes, with the typed characters restored, through a copy of the tokenizer that matches none of them.
    On text without control tokens the ids equal those of the tokenizer's own `apply_chat_template`.
    """

    def __init__(self, tokenizer: Any, *, end_ids: Iterable[int] = ()) -> None:
        """Take a Hugging Face fast tokenizer and further ids that end an answer (of the generation config).

        Raises TargetError if there is no chat template, no end id, or if the tokenizer cannot be cut as described.
        """
        self._tokenizer = tokenizer
        self._template = chat_template(tokenizer)
        self._control = _control_tokens(tokenizer, self._template)
        ordered = sorted(self._control, key=lambda text: (-len(text), text))
        self._control_order = ordered
        self._control_pattern = re.compile("|".join(re.escape(text) for text in ordered)) if ordered else None
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        backend["truncation"] = backend["padding"] = None
        self._tokenizer_digest = json_digest(backend)
        self._whole = Tokenizer.from_str(json.dumps(backend))
        self._plain = _plain_tokenizer(backend, self._control)
        ends = {*end_ids, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])}
        if not ends:
            raise TargetError("the tokenizer has no end-of-text token", expected="an eos token or a generation config")
        self._end_ids = tuple(sorted(ends))
        self._check_cutting()

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Ids that end an answer, ascending; the first one met is part of the answer."""
        return self._end_ids

    @property
    def control_ids(self) -> frozenset[int]:
        """Ids that only the template may write."""
        return frozenset(self._control.values())

    @property
    def tokenizer_digest(self) -> str:
        """sha256 over the tokenizer's canonical JSON."""
        return self._tokenizer_digest

    @property
    def template_digest(self) -> str:
        """sha256 over the chat template's source."""
        return sha256_hex(self._template.encode())

    def digest(self) -> str:
        """sha256 over tokenizer, template and end ids: all that decides which ids a chat becomes."""
        return json_digest([self.tokenizer_digest, self.template_digest, list(self.end_ids)])

    def prompt_ids(self, turns: Sequence[str], answers: Sequence[str], *, system_prompt: str | None) -> list[int]:
        """Ids [T] of a chat up to and including the generation prompt of answer number `len(answers)`.

        `turns` are the user's, one more than `answers`; without a system prompt the template's own default holds.

        Raises TargetError if the template refuses the chat or the counts do not alternate.
        """
        if len(turns) != len(answers) + 1:
            raise TargetError(
                "a chat must end on a user turn",
                got=f"{len(turns)} turns, {len(answers)} answers",
                expected="one more turn",
            )
        messages = [] if system_prompt is None else [("system", system_prompt)]
        for index, turn in enumerate(turns):
            messages.append(("user", turn))
            if index < len(answers):
                messages.append(("assistant", answers[index]))
        sentinel = _unused_character(text for _, text in messages)
        hidden = [{"role": role, "content": self._hide(text, sentinel)} for role, text in messages]
        return self._cut_and_encode(self._render(hidden), sentinel)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of an answer's ids, without control tokens such as the end of turn."""
        kept = [token for token in ids if token not in self.control_ids and token not in self._end_ids]
        return str(self._tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _render(self, messages: list[dict[str, str]]) -> str:
        from jinja2 import TemplateError

        known = {"enable_thinking": False} if "enable_thinking" in self._template else {}
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **known)
        except TemplateError as error:
            raise TargetError(f"the chat template refuses the chat: {' '.join(str(error).split())}") from None
        return str(text)

    def _hide(self, text: str, sentinel: str) -> str:
        """`text` with each typed control token as sentinel, number, sentinel."""
        if self._control_pattern is None:
            return text
        return self._control_pattern.sub(
            lambda match: f"{sentinel}{self._control_order.index(match.group())}{sentinel}", text
        )

    def _cut_and_encode(self, rendered: str, sentinel: str) -> list[int]:
        ids: list[int] = []
        start = 0
        matches = [] if self._control_pattern is None else list(self._control_pattern.finditer(rendered))
        for match in matches:
            ids += self._encode_run(rendered[start : match.start()], sentinel)
            ids.append(self._control[match.group()])
            start = match.end()
        return ids + self._encode_run(rendered[start:], sentinel)

    def _encode_run(self, run: str, sentinel: str) -> list[int]:
        shown = re.sub(f"{sentinel}(\\d+){sentinel}", lambda match: self._control_order[int(match.group(1))], run)
        return list(self._plain.encode(shown, add_special_tokens=False).ids) if shown else []

    def _check_cutting(self) -> None:
        """Refuse a tokenizer whose ids change when text is cut at its control tokens, or that writes one from text."""
        for text, token in self._control.items():
            if token in self._plain.encode(text, add_special_tokens=False).ids:
                raise TargetError(f"the tokenizer turns typed text into the control token {text!r} (id {token})")
        turns, answers = _PROBE
        ours = self.prompt_ids(turns, answers, system_prompt=None)
        messages = [
            {"role": "user", "content": turns[0]},
            {"role": "assistant", "content": answers[0]},
            {"role": "user", "content": turns[1]},
        ]
        theirs = self._whole.encode(self._render(messages), add_special_tokens=False).ids
        if ours != list(theirs):
            raise TargetError(
                "the tokenizer gives other ids when a chat is cut at its control tokens",
                got=f"{len(ours)} ids",
                expected=f"the {len(theirs)} of the whole text",
            )


def chat_template(tokenizer: Any) -> str:
    """The tokenizer's chat template; raises TargetError if it has none or several without a default."""
    try:
        template = tokenizer.get_chat_template()
    except ValueError as error:
        raise TargetError(
            f"the tokenizer has no usable chat template: {' '.join(str(error).split())[:160]}",
            expected="an instruction-tuned target, or a chat_template.jinja in its folder",
        ) from None
    return str(template)


def turns_problem(turns: object) -> str | None:
    """Why `turns` cannot be asked, or None if they can: a non-empty list of non-empty Unicode strings."""
    if not isinstance(turns, list | tuple):
        return "turns is not a list"
    if not turns:
        return "no turns"
    for turn in turns:
        if not isinstance(turn, str):
            return "a turn is not text"
        if not turn.strip():
            return "a turn is empty"
        if any(0xD800 <= ord(character) <= 0xDFFF for character in turn):
            return "a turn is not valid Unicode"
    return None


def _control_tokens(tokenizer: Any, template: str) -> dict[str, int]:
    """Text -> id of the special tokens and of added tokens that the template's source mentions."""
    added = tokenizer.added_tokens_decoder
    return {
        token.content: index
        for index, token in added.items()
        if token.content.strip() and (token.special or token.content in template)
    }


def _plain_tokenizer(backend: dict[str, Any], control: dict[str, int]) -> Tokenizer:
    """A copy of the tokenizer to which the control tokens are ordinary text.

    They stay in its list, marked special: left out, they would shift the ids of the added tokens after them.
    """
    marked = [{**token, "special": token["content"] in control} for token in backend["added_tokens"]]
    plain = Tokenizer.from_str(json.dumps({**backend, "added_tokens": marked, "post_processor": None}))
    plain.encode_special_tokens = True
    return plain


def _unused_character(texts: Iterable[str]) -> str:
    used = set().union(*texts)
    return next(chr(code) for code in range(_FIRST_SENTINEL, _FIRST_SENTINEL + 0xFFFD) if chr(code) not in used)
