"""Colours of the page's style sheet: strong enough on both backgrounds, and apart for colour-blind readers."""

from __future__ import annotations

import itertools
import re
from importlib.resources import files

import numpy as np
import pytest
from numpy.typing import NDArray

# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
VISION = {
    "full": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
# Ottosson 2020: linear RGB to the cube roots of cone responses, and those to OKLab.
CONES = [
    [0.4122214708, 0.5363325363, 0.0514459929],
    [0.2119034982, 0.6806995451, 0.1073969566],
    [0.0883024619, 0.2817188376, 0.6299787005],
]
OKLAB = [
    [0.2104542553, 0.7936177850, -0.0040720468],
    [1.9779984951, -2.4285922050, 0.4505937099],
    [0.0259040371, 0.7827717662, -0.8086757660],
]
MIN_DISTANCE = 0.1  # in OKLab; black and white are 1 apart
MODES = ("light", "dark")
SHEET = files("draftsmith.evaluation").joinpath("page.css").read_text(encoding="utf-8")


def colours(mode: str) -> dict[str, str]:
    pairs = re.findall(
        r"--([\w-]+): light-dark\((#[0-9a-f]{6})(?:[0-9a-f]{2})?, (#[0-9a-f]{6})(?:[0-9a-f]{2})?\)", SHEET
    )
    return {name: (light, dark)[MODES.index(mode)] for name, light, dark in pairs}


def linear(colour: str) -> NDArray[np.float64]:
    channels = np.array([int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)])
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """WCAG 2.2, relative luminance."""
    low, high = sorted(float(linear(colour) @ [0.2126, 0.7152, 0.0722]) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def distance(one: str, other: str, *, vision: str) -> float:
    seen = [np.clip(np.asarray(VISION[vision]) @ linear(colour), 0, 1) for colour in (one, other)]
    first, second = (np.asarray(OKLAB) @ np.cbrt(np.asarray(CONES) @ colour) for colour in seen)
    return float(np.linalg.norm(first - second))


def test_the_measures_are_right() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert distance("#000000", "#ffffff", vision="full") == pytest.approx(1, abs=1e-3)
    assert distance("#ff0000", "#008000", vision="deuteranopia") < distance("#ff0000", "#008000", vision="full") / 2


@pytest.mark.parametrize("mode", MODES)
def test_graphics_have_the_contrast_of_graphics_and_text_that_of_text(mode: str) -> None:
    found = colours(mode)
    graphics = [name for name in found if re.fullmatch(r"(series|stage)-\d|faint", name)]
    assert len(graphics) == 10
    for name in graphics:
        assert contrast(found[name], found["card"]) >= 3, name
    for text, below in itertools.product(("ink", "quiet", "link"), ("paper", "card")):
        assert contrast(found[text], found[below]) >= 4.5, (text, below)
    for below in ("warn", "token-first", "token-drafted", "token-bonus", "token-correction"):
        assert contrast(found["ink"], found[below]) >= 4.5, below


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("group", ["series", "stage"])
def test_colours_of_one_figure_stay_apart(group: str, mode: str, vision: str) -> None:
    found = [value for name, value in colours(mode).items() if re.fullmatch(rf"{group}-\d", name)]
    assert len(found) == {"series": 6, "stage": 3}[group]
    for one, other in itertools.combinations(found, 2):
        assert distance(one, other, vision=vision) >= MIN_DISTANCE, (one, other)
