"""The page that one opens to decide which drafter ships: all that an evaluation measured, in one HTML file.

Everything is inside, see `page_document`. What a switch changes is in the page in every position, made here; the
page's script only shows, hides and draws.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.evaluation.page_differences import Differences
from draftsmith.evaluation.page_document import document
from draftsmith.evaluation.page_figures import (
    MIN_ROUNDS,
    acceptance_figure,
    accepted_length_figure,
    place_figure,
    threshold_figures,
    turn_figures,
)
from draftsmith.evaluation.page_head import facts_html, notices
from draftsmith.evaluation.page_html import (
    Block,
    Choice,
    When,
    blocks,
    details,
    paragraph,
    section,
    switch,
    table,
)
from draftsmith.evaluation.page_model import Page, page_of
from draftsmith.evaluation.page_plot import Figure, basis, figure_html
from draftsmith.evaluation.page_speed import (
    accepted_histogram,
    batch_sizes,
    length_histogram,
    speed_basis,
    speed_grid,
    step_histogram,
    step_time_figure,
    throughput_figure,
)
from draftsmith.evaluation.page_tables import counts_grid, glance_grid, length_table
from draftsmith.evaluation.page_tokens import sample_data, token_view
from draftsmith.evaluation.paired import BONUSES

INTERVALS = "Intervals: 95 % by bootstrap over prompts; another training seed is not in them."
BONUS_LABELS = {"with": "counted", "without": "not counted"}
SECTIONS = (
    ("evaluated", "What was evaluated"),
    ("lengths", "Accepted length by drafter and benchmark"),
    ("benchmarks", "Accepted length by benchmark"),
    ("positions", "Acceptance by position in the block"),
    ("thresholds", "What a confidence threshold would do"),
    ("places", "Over the answer and by turn"),
    ("histograms", "Distributions"),
    ("speed", "Speed"),
    ("tokens", "Answers, token by token"),
)
TITLES = dict(SECTIONS)


@dataclass(frozen=True)
class PageInput:
    """The reports of one key: the body of its evaluate.json, and of its samples.json if there is one."""

    evaluate: Mapping[str, Any]
    samples: Mapping[str, Any] | None


def evaluation_page(reports: Sequence[PageInput], *, title: str) -> str:
    """The whole page as HTML, one drafter or several side by side in the order of `reports`.

    Differences are to the first. Raises DraftsmithError if there is nothing to show, a key comes twice, samples are of
    another key, or a body is of another schema version.
    """
    page = page_of([(report.evaluate, report.samples) for report in reports])
    body = "".join(make(page) for make in _MAKERS)
    return document(title=title, sections=SECTIONS, body=body, without_script="figures, switches and the token view")


def _evaluated(page: Page) -> str:
    lead = (
        "A round is one draft and one verification by the target. Accepted length is the number of tokens that a round "
        "adds to the answer, averaged over all rounds; plain decoding adds 1."
    )

    def at(temperature: float) -> str:
        how = (
            "Means over benchmarks, each counting the same, with 95 % intervals over prompts in brackets; speed at the "
            "batch size of the evaluation."
        )
        return table(glance_grid(page, temperature), caption="Means over benchmarks") + paragraph(how, kind="basis")

    items = [*_by_temperature(page, at), Block(facts_html(page), {})]
    return _section(page, "evaluated", lead=lead, before="".join(notices(page)), items=items)


def _lengths(page: Page) -> str:
    lead = (
        "Tokens that a round adds to the answer, averaged over all rounds of a benchmark. With the bonus counted, the "
        "target's own token of each round (bonus or correction) is in it and plain decoding is exactly 1; not counted, "
        f"only the drafter's tokens are, and plain decoding is 0. {INTERVALS}"
    )
    how = (
        "Bold: the highest of its column where it is better than the next on the same prompts, by a paired interval "
        "that excludes 0. n: prompts. Means: over benchmarks, each counting the same."
    )
    differences = Differences(page)
    tables = [
        Block(
            length_table(page, temperature, bonus, differences) + paragraph(how, kind="basis"),
            {"temperature": f"{temperature:g}", "bonus": bonus},
        )
        for temperature in page.temperatures
        for bonus in BONUSES
    ]
    behind = _by_temperature(page, lambda temperature: _behind(page, differences, temperature))
    return _section(page, "lengths", lead=lead, items=[*tables, *behind], switches=("temperature", "bonus"))


def _behind(page: Page, differences: Differences, temperature: float) -> str:
    text = (
        "Accepted length, bonus included, paired by prompt: the same prompts are drawn for both drafters, so what "
        "makes a prompt easy or hard for both cancels. Of twenty differences that are none, one excludes 0 by chance."
    )
    counts = (
        "A cell of the table divides the tokens of all rounds by their number, so long answers weigh more; the mean "
        "over prompts takes each prompt's own ratio. A round cut by the length limit adds only what fitted; one that "
        "ends on an accepted end of text has no bonus token."
    )
    parts = []
    grid = differences.grid(temperature)
    if grid is not None:
        title = f"Differences to {page.drafters[0].label} on the same prompts"
        parts.append(details(title, paragraph(text) + table(grid, caption=title)))
    title = "Behind each cell: prompts, rounds, tokens"
    parts.append(details(title, paragraph(counts) + table(counts_grid(page, temperature), caption=title)))
    return "".join(parts) + _basis(page, temperature)


def _benchmarks(page: Page) -> str:
    lead = f"The table above as bars: tokens a round. The dashed line is plain decoding. {INTERVALS}"
    items = [
        Block(
            _plot(page, accepted_length_figure(page, temperature, bonus)) + _basis(page, temperature),
            {"temperature": f"{temperature:g}", "bonus": bonus},
        )
        for temperature in page.temperatures
        for bonus in BONUSES
    ]
    return _section(page, "benchmarks", lead=lead, items=items, switches=("temperature", "bonus"))


def _positions(page: Page) -> str:
    lead = (
        "Of the rounds in which every earlier draft token was accepted, the share in which this one was too; the bonus "
        f"token has no part in it. Points of fewer than {MIN_ROUNDS} rounds are grey and hollow. {INTERVALS}"
    )

    def at(temperature: float) -> str:
        asked = {name for item in page.drafters for name in item.rows(temperature)}
        names = [benchmark.name for benchmark in page.benchmarks if benchmark.name in asked]
        figures = [acceptance_figure(page, temperature, name) for name in names]
        return _panels(page, figures) + _basis(page, temperature)

    return _section(page, "positions", lead=lead, items=_by_temperature(page, at))


def _thresholds(page: Page) -> str:
    lead = (
        "What a verification that stops before the first draft token of lower raw confidence than the threshold would "
        "accept and reject (0: the whole block), replayed from rounds that were verified in full, all benchmarks "
        "together. Draft tokens alone, without the bonus; rejected are the first refused token and those behind it; "
        f"shares of fewer than {MIN_ROUNDS} verified tokens are grey. No intervals."
    )
    without = [item.label for item in page.drafters if not item.has_confidence]
    named = paragraph(f"No confidence head, so no threshold to sweep: {', '.join(without)}.") if without else ""

    def at(temperature: float) -> str:
        figures = threshold_figures(page, temperature)
        if not figures:
            return paragraph(f"At temperature {temperature:g} no round was verified in full.")
        return _panels(page, figures) + _basis(page, temperature)

    items = _by_temperature(page, at) if len(without) < len(page.drafters) else []
    return _section(page, "thresholds", lead=lead, before=named, items=items)


def _places(page: Page) -> str:
    lead = (
        "Accepted length, bonus included, of rounds by the place in the answer where they begin (all benchmarks "
        "together) and by turn. Only long answers have late tokens, so points to the right rest on fewer and other "
        f"prompts; those of fewer than {MIN_ROUNDS} rounds are grey. {INTERVALS}"
    )

    def at(temperature: float) -> str:
        turns = turn_figures(page, temperature)
        single = paragraph("Every benchmark evaluated here has a single turn, so there is nothing to show by turn.")
        body = _plot(page, place_figure(page, temperature)) + (_panels(page, turns) if turns else single)
        return body + _basis(page, temperature)

    return _section(page, "places", lead=lead, items=_by_temperature(page, at))


def _histograms(page: Page) -> str:
    lead = (
        "All benchmarks together, as shares of each drafter's own rounds, answers or steps; counts are in the tooltip. "
        "Accepted draft tokens are without the bonus; at temperature 0 every drafter should write the same answers; "
        "the last bin of the step times holds all slower steps."
    )

    def at(temperature: float) -> str:
        steps = [step_histogram(page, temperature, size) for size in batch_sizes(page, temperature)]
        figures = [accepted_histogram(page, temperature), length_histogram(page, temperature)]
        times = _no_speed(page, temperature)
        if steps:
            times = _panels(page, steps) + paragraph(speed_basis(page, temperature), kind="basis")
        return _panels(page, figures) + _basis(page, temperature) + times

    return _section(page, "histograms", lead=lead, items=_by_temperature(page, at))


def _speed(page: Page) -> str:
    lead = (
        "Tokens of all requests in flight together a second of decoding, reading the prompts not included, beside "
        "plain decoding of the same requests by the same engine in the same run. A step is one round of the whole "
        "batch; its parts are medians over full batches, and the percentage behind a bar is overhead: what lies "
        "outside the forward passes of target and drafter. No intervals: times hold for this machine."
    )

    def at(temperature: float) -> str:
        sizes = batch_sizes(page, temperature)
        measured = _no_speed(page, temperature)
        if sizes:
            steps = [step_time_figure(page, temperature, size) for size in sizes]
            measured = (
                _plot(page, throughput_figure(page, temperature))
                + _panels(page, steps)
                + paragraph(speed_basis(page, temperature), kind="basis")
            )
        how = (
            "Tokens of all answers over the wall time of the whole evaluation, reading the prompts included. Identical "
            "to plain decoding: the share of prompts answered token for token alike; at temperature 0 it should be "
            "100 %, above it says nothing and is not given."
        )
        title = "By benchmark, at the batch size of the evaluation, and whether answers are those of plain decoding"
        grid = table(speed_grid(page, temperature), caption=title)
        return measured + details(title, paragraph(how) + grid + _basis(page, temperature))

    return _section(page, "speed", lead=lead, items=_by_temperature(page, at))


def _tokens(page: Page) -> str:
    lead = (
        "Real answers of this evaluation; colour and underline say where a token comes from. Point at a token, or step "
        "through an answer with the arrow keys, for its round, its raw confidence and, at a correction, the draft "
        "token that was rejected."
    )
    without = [item.label for item in page.drafters if item.samples is None]
    named = paragraph(f"No samples were given: {', '.join(without)}.") if without else ""
    view = token_view(page) if sample_data(page) else ""
    return section("tokens", TITLES["tokens"], lead=lead, before=named, body=view)


_MAKERS: tuple[Callable[[Page], str], ...] = (
    _evaluated, _lengths, _benchmarks, _positions, _thresholds, _places, _histograms, _speed, _tokens,
)  # fmt: skip


def _section(
    page: Page,
    name: str,
    *,
    lead: str,
    items: Sequence[Block],
    before: str = "",
    switches: Sequence[str] = ("temperature",),
) -> str:
    """A section and its switches; one without anything to switch has none."""
    initial: When = {"temperature": f"{page.first_temperature:g}", "bonus": "with"}
    made = {
        "temperature": ("Temperature", [Choice(f"{value:g}", f"{value:g}") for value in page.temperatures]),
        "bonus": ("Bonus token", [Choice(bonus, BONUS_LABELS[bonus]) for bonus in BONUSES]),
    }
    controls = [switch(which, *made[which], chosen=initial[which], place=name) for which in switches if items]
    body = blocks(items, initial=initial)
    return section(name, TITLES[name], lead=lead, before=before, switches="".join(controls), body=body)


def _by_temperature(page: Page, at: Callable[[float], str]) -> list[Block]:
    """What is made anew for each temperature, and who was not evaluated at it."""
    found = []
    for temperature in page.temperatures:
        evaluated = page.evaluated(temperature)
        absent = [item.label for item in page.drafters if item not in evaluated]
        named = paragraph(f"Not evaluated at temperature {temperature:g}: {', '.join(absent)}.") if absent else ""
        found.append(Block(named + at(temperature), {"temperature": f"{temperature:g}"}))
    return found


def _plot(page: Page, figure: Figure) -> str:
    targets = ", ".join(dict.fromkeys(str(item.evaluate["target"]) for item in page.drafters))
    machines = "; ".join(dict.fromkeys(str(item.evaluate["machine"]) for item in page.drafters))
    return figure_html(figure, subtitle=f"target {targets}; {machines}")


def _panels(page: Page, figures: Sequence[Figure]) -> str:
    return f'<div class="panels">{"".join(_plot(page, figure) for figure in figures)}</div>'


def _basis(page: Page, temperature: float) -> str:
    return paragraph(basis(page.evaluated(temperature), temperature), kind="basis")


def _no_speed(page: Page, temperature: float) -> str:
    measured = [f"{value:g}" for value in page.temperatures if batch_sizes(page, value)]
    if measured:
        return paragraph(
            f"Times of steps were not measured at temperature {temperature:g}, only at {', '.join(measured)}."
        )
    return paragraph("Times of steps were not measured: the evaluation had no speed run.")
