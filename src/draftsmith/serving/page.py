"""The page of a serving study: which policy serves best at which load, in one HTML file that loads nothing.

What a switch changes is in the page in every position; the page's script, that of the evaluation's page, only shows,
hides and draws.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from draftsmith.evaluation.page_document import document
from draftsmith.evaluation.page_html import (
    Block,
    Choice,
    blocks,
    details,
    escape,
    paragraph,
    section,
    switch,
    table,
)
from draftsmith.evaluation.page_plot import Figure, figure_html
from draftsmith.serving.headline import headline
from draftsmith.serving.page_closed import by_load_figures, early_exit_figures, pareto_figure
from draftsmith.serving.page_marks import made_up
from draftsmith.serving.page_model import Body, Scenario, scenarios_of
from draftsmith.serving.page_open import (
    latency_figures,
    profile_figures,
    staleness_figures,
    workload_rows,
    workloads,
)
from draftsmith.serving.page_tables import (
    anchors_grid,
    facts_grid,
    latency_grid,
    matched_grid,
    overall_grid,
    settings_html,
)

SECTIONS = (
    ("answer", "What to serve with"),
    ("frontier", "Throughput against speed for one user"),
    ("anchors", "At the speed that users must get"),
    ("budget", "How much is verified as load grows"),
    ("loads", "Latency and requests in time"),
    ("staleness", "Stale budgets under bursts"),
    ("early-exit", "Requests that stop drafting"),
    ("profile", "What a step costs"),
    ("settings", "Settings for vLLM and SGLang"),
)
TITLES = dict(SECTIONS)
WORKLOAD_LABELS = {
    "poisson": "even (Poisson)", "bursty": "bursts", "diurnal": "daily rhythm", "agentic": "agents", "trace": "trace",
}  # fmt: skip


@dataclass(frozen=True)
class _Page:
    scenarios: tuple[Scenario, ...]
    sample_from_anchor: bool

    def initial(self) -> dict[str, str]:
        return {"scenario": self.scenarios[0].name, "workload": workloads(self.scenarios)[0]}


def serve_page(
    body: Body, *, title: str, profiles: Mapping[str, Body] | None = None, sample_from_anchor: bool = True
) -> str:
    """The whole page as HTML, from the body of serve.json.

    `profiles`: bodies of profile.json (or of an example) by the name of the scenario that ran on it; without one its
    curve is left out. `sample_from_anchor` as in the drafter's row, for the engine settings.
    Raises DraftsmithError for another schema version, or two scenarios of one name.
    """
    page = _Page(scenarios_of(body, profiles=profiles or {}), sample_from_anchor)
    made = "".join(make(page) for make in _MAKERS)
    return document(title=title, sections=SECTIONS, body=made, without_script="figures and switches")


def _answer(page: _Page) -> str:
    lead = (
        "Simulated service of one drafter: requests arrive, steps cost what a profile says, and each request replays "
        "rounds of real or drawn acceptance. Policies decide how many draft tokens are verified."
    )

    def of(scenario: Scenario) -> str:
        told = "".join(f"<li>{escape(text)}</li>" for text in headline(scenario.study))
        facts = table(facts_grid(scenario), caption="What was studied")
        title = "One policy for all loads: how far each falls behind at its worst"
        return (
            f'<ul class="headline">{told}</ul>'
            + paragraph(str(scenario.study["note"]))
            + details(title, table(overall_grid(scenario), caption=title))
            + facts
        )

    return _section(page, "answer", lead=lead, of=of)


def _frontier(page: _Page) -> str:
    lead = (
        "A closed loop: so many users, each of whom asks again as soon as the answer is there. Each point is a number "
        "of users under one policy; errors are two standard errors."
    )
    return _section(page, "frontier", lead=lead, of=lambda scenario: _plot(scenario, pareto_figure(scenario)))


def _anchors(page: _Page) -> str:
    lead = (
        "Tokens a second of all users together while the median user still gets a given speed, read between the points "
        "of the closed loop; then the speed at equal throughput. Percentages are over no drafter; >= where no higher "
        "load was studied."
    )

    def of(scenario: Scenario) -> str:
        first, second = "Throughput at a speed for each user", "Speed for each user at equal throughput"
        return (
            f"<h3>{first}</h3>{table(anchors_grid(scenario), caption=first)}"
            f"<h3>{second}</h3>{table(matched_grid(scenario), caption=second)}"
        )

    return _section(page, "anchors", lead=lead, of=of)


def _budget(page: _Page) -> str:
    lead = (
        "The same points by the number of users. The budget is tokens verified a round, the anchor included: one for "
        "plain decoding, K + 1 for whole blocks; schedulers shrink it as load grows."
    )
    return _section(page, "budget", lead=lead, of=lambda scenario: _panels(scenario, by_load_figures(scenario)))


def _loads(page: _Page) -> str:
    lead = (
        "Requests that arrive on their own, at shares of the best throughput in the closed loop. In time: first token "
        "and each further one within the deadline above. A hatched bar is overloaded: its latencies grow with the run."
    )
    names = workloads(page.scenarios)
    items = []
    for scenario in page.scenarios:
        for name in names:
            rows = workload_rows(scenario, name)
            title = f"All numbers: {WORKLOAD_LABELS[name]}"
            made = paragraph("This scenario was not studied under this workload.")
            if rows:
                numbers = details(title, table(latency_grid(scenario, rows), caption=title))
                made = _marked(scenario, _panels(scenario, latency_figures(scenario, name)) + numbers)
            items.append(Block(made, {"scenario": scenario.name, "workload": name}))
    chosen = page.initial()
    choices = [Choice(name, WORKLOAD_LABELS[name]) for name in names]
    controls = _scenario_switch(page, "loads") + switch(
        "workload", "Workload", choices, chosen=chosen["workload"], place="loads"
    )
    return section("loads", TITLES["loads"], lead=lead, switches=controls, body=blocks(items, initial=chosen))


def _staleness(page: _Page) -> str:
    lead = (
        "An asynchronous scheduler takes its budget from confidences of some steps before, so traffic that comes in "
        "bursts may find it sized for another load. Same mean load in every cell; the synchronous scheduler stops at "
        "the first step that does not gain and is no fresher version of the others."
    )

    def of(scenario: Scenario) -> str:
        figures = staleness_figures(scenario)
        if not figures:
            return paragraph("This drafter has no confidence head, so nothing can be scheduled by it.")
        answer = scenario.study["answers"]["staleness"]
        return (paragraph(str(answer)) if answer is not None else "") + _panels(scenario, figures)

    return _section(page, "staleness", lead=lead, of=of)


def _early_exit(page: _Page) -> str:
    lead = (
        "Drafting a block costs the same whether it is accepted or not. Here single requests stop drafting while "
        "little of theirs is accepted, and try again from time to time. Neither engine of the last section can do "
        "this; it shows what it would bring."
    )

    def of(scenario: Scenario) -> str:
        answer = scenario.study["answers"]["early_exit"]
        return paragraph(str(answer)) + _panels(scenario, early_exit_figures(scenario))

    return _section(page, "early-exit", lead=lead, of=of)


def _profile(page: _Page) -> str:
    lead = (
        "How long a verification takes by the tokens in it. The simulated machine behaves as measured, with its "
        "stairs; schedulers believe in the monotone table unless the last figure says otherwise."
    )

    def of(scenario: Scenario) -> str:
        missing = paragraph("No profile was given for this scenario.") if scenario.profile is None else ""
        return missing + _panels(scenario, profile_figures(scenario))

    return _section(page, "profile", lead=lead, of=of)


def _settings(page: _Page) -> str:
    lead = (
        "What each engine can be told, chosen from the closed loop above: the best of what it can run at each load, or "
        "what is simpler and as good. TARGET and DRAFTER stand for the folders of both models."
    )
    return _section(
        page, "settings", lead=lead,
        of=lambda scenario: settings_html(scenario, sample_from_anchor=page.sample_from_anchor),
    )  # fmt: skip


_MAKERS: tuple[Callable[[_Page], str], ...] = (
    _answer, _frontier, _anchors, _budget, _loads, _staleness, _early_exit, _profile, _settings,
)  # fmt: skip


def _section(page: _Page, name: str, *, lead: str, of: Callable[[Scenario], str]) -> str:
    """A section that is made anew for each scenario."""
    items = [Block(_marked(item, of(item)), {"scenario": item.name}) for item in page.scenarios]
    body = blocks(items, initial=page.initial())
    return section(name, TITLES[name], lead=lead, switches=_scenario_switch(page, name), body=body)


def _scenario_switch(page: _Page, place: str) -> str:
    choices = [Choice(item.name, item.label) for item in page.scenarios]
    return switch("scenario", "Scenario", choices, chosen=page.scenarios[0].name, place=place)


def _marked(scenario: Scenario, made: str) -> str:
    """Under a large sign where nothing was measured."""
    return made_up(scenario.name) + made if scenario.synthetic else made


def _plot(scenario: Scenario, figure: Figure) -> str:
    kind = "synthetic" if scenario.synthetic else "measured"
    return figure_html(figure, subtitle=f"{scenario.study['key']}; {kind}: {scenario.study['profile']['source']}")


def _panels(scenario: Scenario, figures: Sequence[Figure]) -> str:
    return f'<div class="panels">{"".join(_plot(scenario, figure) for figure in figures)}</div>'
