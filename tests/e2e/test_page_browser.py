"""The page of an evaluation in a real browser: what is drawn, what the switches, the mouse and the keys do."""

from __future__ import annotations

import copy
import json
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from draftsmith.evaluation.page import PageInput
from tests.page_browser import BROWSER, DRIVER, WAIT_S, Browser, Values, of_drafter
from tests.page_fixtures import DFLASH, DSPARK, MTP, WORDS, page_input, without_intervals

NARROW = 400
NASTY = "</script><script>alert(1)</script><!-- \"'`&\u2028\u2029\ud800<b>\t "

pytestmark = pytest.mark.browser

PLOT_WIDTHS = "[...document.querySelectorAll('.plot svg.main-svg')].map(item => item.clientWidth)"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if not (BROWSER.exists() and DRIVER.exists()):
        pytest.skip(f"needs {BROWSER} and {DRIVER}: apt-get install chromium chromium-driver")
    made = Browser(tmp_path_factory.mktemp("pages"))
    yield made
    made.driver.quit()


SCENES: dict[str, Callable[[], list[PageInput]]] = {
    "one drafter": lambda: [page_input(DSPARK)],
    "three drafters": lambda: [page_input(DSPARK), page_input(DFLASH), page_input(MTP)],
    "no confidence head": lambda: [page_input(DFLASH)],
    "one draft token": lambda: [page_input(MTP)],
    "no intervals": lambda: [without_intervals(page_input(DSPARK)), page_input(DFLASH)],
    "no speed run": lambda: [page_input(replace(DSPARK, batch_sizes=()))],
    "no samples": lambda: [page_input(DSPARK, samples=False)],
}


def expected_values(body: Any, temperature: float) -> Iterator[tuple[str, str, Values]]:
    """From a report: plot, name of the series, value by place; for every figure whose values stand in the report."""
    label = body["drafter"]["name"]
    at = f"{temperature:g}"
    here = {
        part: [item for item in body[part] if item["temperature"] == temperature]
        for part in ("rows", "averages", "thresholds", "output_positions", "accepted_histogram", "speed")
    }
    lengths = {row["benchmark"]: row["accepted_length"] for row in here["rows"]}
    yield f"accepted-length-{at}-with", label, lengths | {"mean": here["averages"][0]["accepted_length"]}
    for row in here["rows"]:
        shares = enumerate(row["conditional_acceptance"], start=1)
        positions = {str(place): share for place, share in shares if share is not None}
        yield f"acceptance-{row['benchmark']}-{at}", label, positions
        if len(row["turns"]) > 1:
            turns = {f"turn {turn['turn'] + 1}": turn["accepted_length"] for turn in row["turns"]}
            yield f"turns-{row['benchmark']}-{at}", label, turns
    if here["thresholds"]:
        for part in ("accepted", "rejected"):
            rates = {f"{point['threshold']:g}": point[part] / point["num_rounds"] for point in here["thresholds"]}
            yield f"threshold-tokens-{at}", f"{label}: {part}", rates
        shares = {
            f"{point['threshold']:g}": point["acceptance_rate"]
            for point in here["thresholds"]
            if point["acceptance_rate"] is not None
        }
        yield f"threshold-rate-{at}", label, shares
    places = {f"{row['first']}–{row['last']}": row["accepted_length"] for row in here["output_positions"]}
    yield f"output-position-{at}", label, places
    counts = here["accepted_histogram"][0]["counts"]
    yield f"accepted-histogram-{at}", label, {str(place): n / sum(counts) for place, n in enumerate(counts)}
    if here["speed"]:
        speeds = {str(point["batch_size"]): point["tokens_per_s"] for point in here["speed"]}
        plain = {str(point["batch_size"]): point["plain_tokens_per_s"] for point in here["speed"]}
        yield f"throughput-{at}", label, speeds
        yield f"throughput-{at}", f"plain decoding (run of {label})", plain
    for point in here["speed"]:
        for name, column in (("draft", "draft_ms"), ("verify", "verify_ms"), ("sampling", "sample_ms")):
            yield f"step-parts-{point['batch_size']}-{at}", name, {label: point[column]}


def check_values(browser: Browser, reports: list[PageInput], temperature: float) -> None:
    plots = browser.plots()
    checked = set()
    for report in reports:
        for plot, name, values in expected_values(report.evaluate, temperature):
            found = of_drafter(plots[plot], name, along="y" if plot.startswith("step-parts") else "x")
            if plot.startswith("acceptance-"):  # drafters stand side by side at a position
                found = {str(round(float(place))): value for place, value in found.items()}
            if plot.startswith("step-parts"):  # one bar of several drafters
                found = {place: found[place] for place in values}
            assert found == pytest.approx(values), (plot, name)
            checked.add(plot)
    rest = {plot for plot in plots if not plot.startswith(("answer-lengths-", "step-times-"))}
    assert checked == rest
    for plot in plots.keys() - rest:
        for trace in plots[plot]:
            assert trace["shape"] == "hv"
            assert sum(trace["y"][:-1]) == pytest.approx(1), plot


@pytest.mark.parametrize("scene", SCENES)
def test_every_figure_is_drawn_from_the_reports(browser: Browser, scene: str) -> None:
    reports = SCENES[scene]()
    browser.open(reports)
    browser.check()
    check_values(browser, reports, 1.0)
    browser.choose("temperature", "0", place="speed")
    check_values(browser, reports, 0.0)
    browser.resize(NARROW)
    browser.check()
    browser.choose("temperature", "1", place="positions")  # drawn before, for a wide screen
    check_values(browser, reports, 1.0)
    browser.check()
    assert max(browser.ask(PLOT_WIDTHS)) < NARROW
    assert len(browser.ask("[...document.querySelectorAll('#answers .token')]")) > 20 or scene == "no samples"


def test_a_narrow_screen_from_the_start(browser: Browser) -> None:
    browser.open(SCENES["three drafters"](), width=NARROW)
    browser.check()
    assert 0 < max(browser.ask(PLOT_WIDTHS)) < NARROW
    # What is wider than the screen scrolls in a place of its own, which the keyboard can reach.
    assert browser.ask("document.querySelector('#lengths .when:not([hidden]) .scroll').tabIndex") == 0


def shown_table(browser: Browser) -> list[str]:
    return browser.ask(
        """[...[...document.querySelectorAll('#lengths .lengths')].find(table => table.offsetParent)
            .querySelectorAll('tbody tr:first-child td')].map(cell => cell.firstChild.textContent)"""
    )


def shown_bars(browser: Browser) -> dict[str, Values]:
    [plot] = [traces for name, traces in browser.plots().items() if name.startswith("accepted-length-")]
    return {trace["name"]: of_drafter(plot, trace["name"]) for trace in plot}


def test_switches_move_together_and_change_table_and_bars(browser: Browser) -> None:
    reports = SCENES["three drafters"]()
    browser.open(reports)
    body = reports[0].evaluate
    for temperature, bonus in (("1", "with"), ("0", "with"), ("0", "without"), ("1", "without")):
        browser.choose("temperature", temperature, place="lengths")
        browser.choose("bonus", bonus, place="benchmarks")
        name = "accepted_length" if bonus == "with" else "accepted_length_without_bonus"
        rows = {row["benchmark"]: row[name] for row in body["rows"] if row["temperature"] == float(temperature)}
        [mean] = [row[name] for row in body["averages"] if row["temperature"] == float(temperature)]
        assert shown_table(browser) == [f"{value:.2f}" for value in (mean, *rows.values())]
        assert shown_bars(browser)["dspark_b7"] == pytest.approx(rows | {"mean": mean})
        checked = browser.ask("[...document.querySelectorAll('input:checked')].map(item => item.value)")
        assert checked.count(temperature) == 8
        assert checked.count(bonus) == 2
    browser.check()


def test_bars_are_as_high_as_their_values(browser: Browser) -> None:
    reports = SCENES["three drafters"]()
    browser.open(reports)
    heights = browser.ask(
        """(() => {
            const plot = document.getElementById('accepted-length-1-with'), axis = plot._fullLayout.yaxis;
            return [...plot.querySelectorAll('.barlayer .trace')].map(trace =>
                [...trace.querySelectorAll('.point path')].map(bar =>
                    bar.getBBox().height / axis._length * (axis.range[1] - axis.range[0])));
        })()"""
    )
    for drawn, report in zip(heights, reports, strict=True):
        rows = [*report.evaluate["rows"], *report.evaluate["averages"]]
        values = [row["accepted_length"] for row in rows if row["temperature"] == 1.0]
        assert drawn == pytest.approx(values, abs=0.02)


def test_the_keyboard_moves_a_switch(browser: Browser) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.open(SCENES["one drafter"]())
    browser.find("#lengths [data-switch=temperature] [value='1']").send_keys(Keys.ARROW_LEFT)
    browser.wait_until_drawn()
    assert "accepted-length-0-with" in browser.plots()


def test_dark_and_light_follow_the_system_and_the_reader(browser: Browser) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    browser.open(SCENES["one drafter"](), scheme="dark")

    def wait_for(colour: str) -> None:
        def reached(_: Any) -> bool:
            paper = browser.ask("getComputedStyle(document.querySelector('section')).backgroundColor")
            plots = "[...document.querySelectorAll('.plot')].filter(plot => plot.offsetParent)"
            return {paper, *browser.ask(f"{plots}.map(plot => plot.layout.paper_bgcolor)")} == {colour}

        WebDriverWait(browser.driver, WAIT_S).until(reached)

    wait_for("rgb(23, 26, 32)")
    browser.prefer("light")
    wait_for("rgb(255, 255, 255)")
    browser.driver.execute_script(
        "const box = document.getElementById('theme'); box.value = 'dark'; box.dispatchEvent(new Event('change'))"
    )
    wait_for("rgb(23, 26, 32)")
    browser.check()


def test_a_figure_is_saved_with_what_it_is_about(browser: Browser) -> None:
    browser.open(SCENES["one drafter"]())
    name, url = browser.driver.execute_async_script(
        """const done = arguments[0];
        HTMLAnchorElement.prototype.click = function () { done([this.download, this.href]); };
        document.getElementById('acceptance-gsm8k-1').closest('figure').querySelector('.save').click();"""
    )
    assert name == "acceptance-gsm8k-1.svg"
    kind, _, content = url.partition(",")
    assert kind == "data:image/svg+xml"
    image = urllib.parse.unquote(content)
    for text in ("gsm8k, temperature 1", "target smollm2_135m; 2 x CPU, 8 GiB, no GPU, Linux x86_64", "dspark_b7"):
        assert text in image
    browser.check()


def samples_of(report: PageInput) -> list[Any]:
    assert report.samples is not None
    return list(report.samples["samples"])


def tip(browser: Browser) -> list[str]:
    return browser.ask(
        "document.getElementById('tip').hidden ? [] : document.getElementById('tip').innerText.split('\\n')"
    )


def hover(browser: Browser, place: int) -> list[str]:
    from selenium.webdriver.common.action_chains import ActionChains

    token = browser.ask("document.querySelectorAll('#answers .token')[arguments[0]]", place)
    browser.driver.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", token)
    ActionChains(browser.driver).move_to_element(token).perform()
    return tip(browser)


def first_of(tokens: list[Any], source: str) -> int:
    # A token with letters: the middle of a line end's box may lie beside it.
    return next(place for place, token in enumerate(tokens) if token["source"] == source and token["text"].strip())


def test_pointing_at_a_token_tells_where_it_comes_from(browser: Browser) -> None:
    report = SCENES["one drafter"]()[0]
    browser.open([report])
    sample = next(item for item in samples_of(report) if (item["benchmark"], item["temperature"]) == ("gsm8k", 1.0))
    tokens = sample["tokens"]
    classes = browser.ask("[...document.querySelectorAll('#answers .token')].map(item => item.classList[1])")
    assert classes == [token["source"] for token in tokens]

    place = first_of(tokens, "drafted")
    number = tokens[place]["round"]
    members = [index for index, token in enumerate(tokens) if token["round"] == number]
    first, second, third = hover(browser, place)
    assert first == f"{json.dumps(tokens[place]['text'])} · drafted"
    assert second == f"round {number + 1}, token {members.index(place) + 1} of the {len(members)} that it added"
    assert third == f"confidence: {tokens[place]['confidence']:.3f}"
    outlined = browser.ask("[...document.querySelectorAll('#answers .token')].map(item => item.matches('.round'))")
    assert [index for index, marked in enumerate(outlined) if marked] == members

    place = first_of(tokens, "correction")
    _, _, third, fourth = hover(browser, place)
    assert third == f"rejected draft token: {json.dumps(tokens[place]['rejected'])}"
    assert fourth == f"its confidence: {tokens[place]['confidence']:.3f}"
    browser.check()


def test_the_keyboard_steps_through_an_answer(browser: Browser) -> None:
    from selenium.webdriver.common.keys import Keys

    report = SCENES["one drafter"]()[0]
    browser.open([report], width=NARROW)
    sample = next(item for item in samples_of(report) if (item["benchmark"], item["temperature"]) == ("gsm8k", 1.0))
    tokens = sample["tokens"]

    def press(key: str) -> int:
        browser.driver.switch_to.active_element.send_keys(key)
        return browser.ask("[...document.querySelectorAll('#answers .token')].indexOf(document.activeElement)")

    # One stop of the Tab key an answer: it comes after the last selector that can be changed.
    browser.driver.execute_script("document.querySelector('[data-choice=temperature]').focus()")
    assert press(Keys.TAB) == 0
    assert browser.ask("document.querySelectorAll('#answers .token[tabindex=\"0\"]').length") == 1
    assert tip(browser)[1] == "of no round: the target wrote it while it read the prompt"
    assert press(Keys.ARROW_RIGHT) == 1
    assert tip(browser)[1].startswith("round 1, token 1 of the ")
    assert browser.ask("document.activeElement.getAttribute('aria-describedby')") == "tip"
    starts = [next(index for index, token in enumerate(tokens) if token["round"] == number) for number in (0, 1, 2)]
    assert press(Keys.ARROW_DOWN) == starts[1]
    assert press(Keys.ARROW_DOWN) == starts[2]
    assert press(Keys.ARROW_UP) == starts[1]
    assert press(Keys.END) == len(tokens) - 1
    assert press(Keys.ARROW_LEFT) == len(tokens) - 2
    box = browser.ask("document.getElementById('tip').getBoundingClientRect().toJSON()")
    assert box["left"] >= 0
    assert box["right"] <= NARROW
    assert press(Keys.HOME) == 0
    press(Keys.ESCAPE)
    assert tip(browser) == []
    browser.check()


def test_selectors_show_every_answer_with_its_statistics(browser: Browser) -> None:
    reports = SCENES["three drafters"]()
    browser.open(reports)

    def choose(name: str, value: str) -> None:
        browser.driver.execute_script(
            """const box = document.querySelector(`[data-choice="${arguments[0]}"]`);
            box.value = arguments[1]; box.dispatchEvent(new Event('change'))""",
            name,
            value,
        )

    for report in reports:
        choose("drafter", report.evaluate["drafter"]["name"])
        for benchmark, temperature in (("gsm8k", 0.0), ("mt_bench", 1.0)):
            choose("benchmark", benchmark)
            choose("temperature", f"{temperature:g}")
            wanted = [
                item
                for item in samples_of(report)
                if (item["benchmark"], item["temperature"]) == (benchmark, temperature)
            ]
            asked = browser.ask("[...document.querySelectorAll('.asked')].map(item => item.textContent)")
            assert [text.removeprefix("Turn 2, asked:\n") for text in asked] == [item["prompt"] for item in wanted]
            texts = browser.ask("[...document.querySelectorAll('.answer')].map(item => item.textContent)")
            assert texts == ["".join(token["text"] for token in item["tokens"]) for item in wanted]
            assert browser.ask("getComputedStyle(document.querySelector('.answer')).whiteSpaceCollapse") == "preserve"
            told = browser.ask("[...document.querySelectorAll('.stats')].map(item => item.textContent)")
            for text, item in zip(told, wanted, strict=True):
                rounds = len({token["round"] for token in item["tokens"]} - {None})
                drafted = sum(token["source"] == "drafted" for token in item["tokens"])
                committed = len(item["tokens"]) - 1
                assert text == (
                    f"{len(item['tokens'])} tokens · {rounds} rounds · accepted length of this answer "
                    f"{committed / rounds:.2f} with the bonus token, {drafted / rounds:.2f} without · "
                    + {"length": "cut by the length limit", "end_of_text": "ended by itself"}[item["finish"]]
                )
    # The temperature of the page reaches the answers as well.
    browser.choose("temperature", "0", place="lengths")
    assert browser.ask("document.querySelector('[data-choice=temperature]').value") == "0"
    tokens = browser.ask("document.querySelectorAll('#answers .token.drafted').length")
    assert tokens > 0
    browser.check()


def test_a_drafter_without_confidence_says_so(browser: Browser) -> None:
    report = SCENES["one draft token"]()[0]
    browser.open([report])
    sample = next(item for item in samples_of(report) if (item["benchmark"], item["temperature"]) == ("gsm8k", 1.0))
    tokens = sample["tokens"]
    assert hover(browser, first_of(tokens, "drafted"))[2] == "no confidence: this drafter has no confidence head"
    rejected, confidence = hover(browser, first_of(tokens, "correction"))[2:]
    assert rejected.startswith("rejected draft token: ")
    assert confidence == "no confidence: this drafter has no confidence head"
    [_, told] = hover(browser, first_of(tokens, "bonus"))  # the target's own has none anyway
    assert told.endswith(", token 2 of the 2 that it added")
    assert "no threshold to sweep: mtp1." in browser.find("#thresholds").text


def test_text_of_others_is_shown_and_not_run(browser: Browser) -> None:
    made = replace(
        DSPARK, name="d<i>&\"'", machine="m</script>", words=(NASTY, *WORDS[1:]), contaminated=("gsm8k/<img src=x>",)
    )
    report = page_input(made)
    changed = copy.deepcopy(samples_of(report))
    changed[0]["prompt"] = NASTY
    browser.open([PageInput(report.evaluate, {**(report.samples or {}), "samples": changed})])
    browser.choose("temperature", "0", place="lengths")
    browser.check()
    check_names = {trace["name"] for trace in browser.plots()["accepted-length-0-with"]}
    assert check_names == {"d&lt;i&gt;&amp;\"'"}
    legend = browser.ask("document.querySelector('#accepted-length-0-with .legendtext').textContent")
    assert legend == "d<i>&\"'"
    # JSON keeps halves of surrogate pairs, which text on its way out of the browser would lose.
    asked, answer = json.loads(
        browser.ask("JSON.stringify(['.asked', '.answer'].map(name => document.querySelector(name).textContent))")
    )
    assert asked == NASTY
    assert answer == "".join(token["text"] for token in changed[0]["tokens"])
    assert NASTY in answer
    assert browser.ask("document.querySelectorAll('#answers b, #answers script, img').length") == 0
    assert "gsm8k/<img src=x>" in browser.find(".notice").text
