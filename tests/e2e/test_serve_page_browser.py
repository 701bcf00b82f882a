"""The serving pages in a real browser: everything is drawn, switches and the legend work, nothing is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from draftsmith.serving.overlay import overlay
from draftsmith.serving.overlay_page import overlay_page
from draftsmith.serving.page import serve_page
from tests.page_browser import BROWSER, DRIVER, WIDE, Browser
from tests.serve_bodies import profile, study

NARROW = 400

pytestmark = pytest.mark.browser

PLOTS = """[...document.querySelectorAll('.plot')].filter(plot => plot.offsetParent).map(plot => [plot.id, {
    held: (plot.data || []).filter(trace => trace.visible !== 'legendonly').length,
    drawn: plot.querySelectorAll('.barlayer .trace, .scatterlayer .trace, .heatmaplayer .hm').length,
    width: plot.querySelector('svg.main-svg').clientWidth,
}])"""


class ServeBrowser(Browser):
    """A browser that opens any page."""

    def show(self, page: str, *, width: int = WIDE, scheme: str = "light") -> None:
        path = self.folder / f"{next(self.numbers)}.html"
        path.write_text(page, encoding="utf-8")
        self.resize(width)
        self.prefer(scheme)
        self.driver.get_log("browser")
        self.driver.get(path.as_uri())
        self.wait_until_drawn()

    def drawn(self) -> set[str]:
        """Names of the plots that show; each has drawn all that is not waiting in its legend."""
        found = self.ask(PLOTS)
        for name, plot in found:
            assert plot["drawn"] == plot["held"] > 0, (name, plot)
            assert 0 < plot["width"] <= self.width, name
        return {name for name, _ in found}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeBrowser]:
    if not (BROWSER.exists() and DRIVER.exists()):
        pytest.skip(f"needs {BROWSER} and {DRIVER}: apt-get install chromium chromium-driver")
    made = ServeBrowser(tmp_path_factory.mktemp("pages"))
    yield made
    made.driver.quit()


def tiles(**more: Any) -> dict[str, Any]:
    return study(name="tiles", synthetic=True, loads=(1, 4, 16, 64), gain=1.5, temperature=None, **more)


def page() -> str:
    profiles = {"measured": profile(), "tiles": profile(synthetic=True)}
    return serve_page(study(what_if=[tiles()]), title="Serving", profiles=profiles)


FIGURES = (
    "frontier", "speedup", "budget", "accepted", "acceptance", "staleness-speed", "staleness-tail", "exit-gain",
    "exit-gain-over-none", "exit-drafting-share", "profile-rate", "profile-time", "believed",
)  # fmt: skip
LOADED = ("ttft", "tpot", "end-to-end", "goodput")


def expected(scenario: str, workload: str) -> set[str]:
    return {f"{name}-{scenario}" for name in FIGURES} | {f"{name}-{workload}-{scenario}" for name in LOADED}


def test_every_figure_is_drawn_in_every_position_of_the_switches(browser: ServeBrowser) -> None:
    browser.show(page())
    assert browser.drawn() == expected("measured", "poisson")
    browser.choose("workload", "bursty", place="loads")
    assert browser.drawn() == expected("measured", "bursty")
    browser.choose("scenario", "tiles", place="budget")
    assert browser.drawn() == expected("tiles", "bursty")
    signs = "[...document.querySelectorAll('.made-up')].filter(sign => sign.offsetParent).length"
    assert browser.ask(signs) == 9
    browser.check()
    browser.resize(NARROW)
    browser.wait_until_drawn()
    browser.drawn()
    browser.check()


def test_the_legend_shows_and_hides_a_policy(browser: ServeBrowser) -> None:
    browser.show(page())
    held = "document.getElementById('frontier-measured').data.map(trace => [trace.name, trace.visible])"
    click = """const item = [...document.querySelectorAll('#frontier-measured .legend .traces')].find(
        item => item.querySelector('.legendtext').textContent === arguments[0]).querySelector('.legendtoggle');
        for (const kind of ['mousedown', 'mouseup']) item.dispatchEvent(new MouseEvent(kind, {bubbles: true}));"""
    for name, before, after in (("fixed 1", "legendonly", True), ("no drafter", True, "legendonly")):
        assert dict(browser.ask(held))[name] == before
        browser.driver.execute_script(click, name)
        wait_for(browser, lambda _, name=name, after=after: dict(browser.ask(held))[name] == after)
    browser.check()


def wait_for(browser: ServeBrowser, reached: Any) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser.driver, 10).until(reached)


def test_the_pointer_reads_a_point(browser: ServeBrowser) -> None:
    browser.show(page())
    browser.driver.execute_script(
        """const plot = document.getElementById('frontier-measured');
        const at = plot.data.findIndex(trace => trace.name === 'fixed 7');
        Plotly.Fx.hover(plot, [{curveNumber: at, pointNumber: 2}]);"""
    )
    read = "[...document.querySelectorAll('#frontier-measured .hovertext .line')].map(line => line.textContent)"
    wait_for(browser, lambda _: browser.ask(read) != [])
    texts = browser.ask(read)
    assert texts[0] == "fixed 7, 4 users"
    assert any("of 8.00 verified" in text for text in texts)
    assert any("acceptance 40.0 %" in text for text in texts)


def test_dark_colours_reach_the_heat_map(browser: ServeBrowser) -> None:
    scale = "document.getElementById('staleness-speed-measured').data[0].colorscale.map(step => step[1])"
    browser.show(page())
    light = browser.ask(scale)
    browser.show(page(), scheme="dark")
    dark = browser.ask(scale)
    assert light == ["rgb(255, 191, 153)", "rgb(255, 255, 255)", "rgb(165, 202, 255)"]
    assert dark == ["rgb(122, 52, 19)", "rgb(23, 26, 32)", "rgb(36, 80, 143)"]
    browser.check()


def test_the_overlay_draws_each_group(browser: ServeBrowser) -> None:
    bodies = [study(what_if=[tiles()]), study(key="dflash_b7-toy", kind="dflash", confidence=False, gain=0.2)]
    browser.show(
        overlay_page(overlay(bodies, targets=dict.fromkeys(("dspark_b7-toy", "dflash_b7-toy"), "toy")), title="t")
    )
    assert browser.drawn() == {"frontiers-group-1", "frontiers-group-2"}
    browser.check()
    browser.resize(NARROW)
    browser.wait_until_drawn()
    browser.drawn()
    browser.check()
