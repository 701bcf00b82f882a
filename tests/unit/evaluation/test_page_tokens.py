"""Data of the token view."""

from __future__ import annotations

import json

import pytest

from draftsmith.errors import DraftsmithError
from draftsmith.evaluation.page_tokens import sample_data, token_view
from tests.html_reader import read_html
from tests.page_fixtures import DFLASH, DSPARK, page_of_made

SOURCES = ["first", "drafted", "bonus", "correction"]


def test_columns_read_back_as_the_tokens_of_the_report() -> None:
    page = page_of_made(DSPARK, DFLASH)
    expected = [(item, sample) for item in page.drafters for sample in (item.samples or {})["samples"]]
    found = sample_data(page)
    assert len(found) == len(expected) == 2 * 2 * 4
    for made, (item, sample) in zip(found, expected, strict=True):
        assert (made["drafter"], made["confident"]) == (item.label, item.has_confidence)
        assert (made["benchmark"], made["prompt"]) == (sample["benchmark"], sample["prompt_id"])
        assert (made["turn"], made["asked"]) == (sample["turn"], sample["prompt"])
        assert float(made["temperature"]) == sample["temperature"]
        tokens = [
            {
                "text": made["text"][place],
                "source": SOURCES[made["source"][place]],
                "round": made["round"][place],
                "confidence": made["confidence"][place],
                "rejected": made["rejected"].get(place),
            }
            for place in range(len(made["text"]))
        ]
        rounded = [
            token | {"confidence": None if token["confidence"] is None else round(token["confidence"], 3)}
            for token in sample["tokens"]
        ]
        assert tokens == rounded


def test_the_view_embeds_the_data_whatever_is_in_it() -> None:
    page = page_of_made(DSPARK)
    assert page.drafters[0].samples is not None
    token = page.drafters[0].samples["samples"][0]["tokens"][1]
    token["text"] = "</script><!--\u2028\ud800'\""
    root = read_html(token_view(page))
    data = json.loads(root.one("script", id="samples").text)
    assert data[0]["text"][1] == "</script><!--\u2028\ud800'\""
    assert [node.attributes["data-choice"] for node in root.all("select")] == [
        "drafter", "benchmark", "prompt", "temperature",
    ]  # fmt: skip
    assert [node.text for node in root.one("ul", class_="legend").all("span")] == [
        "First token", "Drafted", "Bonus", "Correction",
    ]  # fmt: skip


def test_a_source_that_nobody_knows_is_refused() -> None:
    page = page_of_made(DSPARK)
    assert page.drafters[0].samples is not None
    page.drafters[0].samples["samples"][0]["tokens"][1]["source"] = "guessed"
    with pytest.raises(DraftsmithError, match=r"unknown source: got \['guessed'\].*sample gsm8k/0"):
        sample_data(page)
