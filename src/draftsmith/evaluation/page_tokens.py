"""The token view of the evaluation's page: real answers, each token with where it came from."""

from __future__ import annotations

from typing import Any

from draftsmith.errors import DraftsmithError
from draftsmith.evaluation.page_html import escape, script_json
from draftsmith.evaluation.page_model import Body, Page

SOURCES = {
    "first": ("First token", "written by the target while it read the prompt; it belongs to no round"),
    "drafted": ("Drafted", "proposed by the drafter and accepted by the target"),
    "bonus": ("Bonus", "added by the target to a round in which every draft token was accepted"),
    "correction": ("Correction", "written by the target in place of the first draft token that it rejected"),
}
CONFIDENCE_DIGITS = 3
"""As many as are shown."""
CHOICES = ("drafter", "benchmark", "prompt", "temperature")


def sample_data(page: Page) -> list[dict[str, Any]]:
    """The answers of all drafters, a column a field, so that thousands of tokens stay small."""
    return [
        {
            "drafter": item.label,
            "confident": item.has_confidence,
            "benchmark": sample["benchmark"],
            "prompt": sample["prompt_id"],
            "temperature": f"{sample['temperature']:g}",
            "turn": sample["turn"],
            "asked": sample["prompt"],
            "finish": sample["finish"],
            **_columns(sample),
        }
        for item in page.drafters
        if item.samples is not None
        for sample in item.samples["samples"]
    ]


def token_view(page: Page) -> str:
    """The selectors, the legend, the place for the answers, and their data."""
    selectors = "".join(
        f'<label>{name.capitalize()} <select data-choice="{name}"></select></label>' for name in CHOICES
    )
    legend = "".join(
        f'<li><span class="token {source}">{escape(title)}</span> {escape(text)}</li>'
        for source, (title, text) in SOURCES.items()
    )
    return (
        f'<div class="chooser">{selectors}</div><ul class="legend">{legend}</ul>'
        '<div id="answers" aria-live="polite"></div>'
        '<div id="tip" role="tooltip" hidden></div>'
        f'<script type="application/json" id="samples">{script_json(sample_data(page))}</script>'
    )


def _columns(sample: Body) -> dict[str, Any]:
    tokens = sample["tokens"]
    unknown = sorted({token["source"] for token in tokens} - SOURCES.keys())
    if unknown:
        raise DraftsmithError(
            "a token of an unknown source", got=unknown, expected=list(SOURCES), where=f"sample {sample['prompt_id']}"
        )
    names = list(SOURCES)
    return {
        "text": [token["text"] for token in tokens],
        "source": [names.index(token["source"]) for token in tokens],
        "round": [token["round"] for token in tokens],
        "confidence": [
            None if token["confidence"] is None else round(token["confidence"], CONFIDENCE_DIGITS) for token in tokens
        ],
        "rejected": {place: token["rejected"] for place, token in enumerate(tokens) if token["rejected"] is not None},
    }
