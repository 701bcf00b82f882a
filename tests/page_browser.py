"""A page of an evaluation in a headless Chromium, for tests."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from draftsmith.evaluation.page import PageInput, evaluation_page

BROWSER, DRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")
WIDE = 1280
WAIT_S = 60

Values = dict[str, float]


class Browser:
    """A headless Chromium that can be asked about the page in it."""

    def __init__(self, folder: Path) -> None:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        options = webdriver.ChromeOptions()
        options.binary_location = str(BROWSER)
        for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
        self.folder = folder
        self.numbers = itertools.count()

    def open(self, reports: list[PageInput], *, width: int = WIDE, scheme: str = "light") -> None:
        """Writes the page to a file, opens it and waits until all of it is drawn."""
        path = self.folder / f"{next(self.numbers)}.html"
        path.write_text(evaluation_page(reports, title="Drafters"), encoding="utf-8")
        self.resize(width)
        self.prefer(scheme)
        self.driver.get_log("browser")
        self.driver.get(path.as_uri())
        self.wait_until_drawn()

    def resize(self, width: int) -> None:
        self.width = width
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600},
        )

    def prefer(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def wait_until_drawn(self) -> None:
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.driver, WAIT_S).until(lambda _: self.ask("document.documentElement.dataset.drawn") == "yes")

    def ask(self, expression: str, *arguments: Any) -> Any:
        return self.driver.execute_script(f"return {expression}", *arguments)

    def find(self, selector: str) -> Any:
        from selenium.webdriver.common.by import By

        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def choose(self, name: str, value: str, *, place: str) -> None:
        """Clicks on a position of a switch in a section."""
        self.driver.execute_script(
            "arguments[0].click()", self.find(f'#{place} [data-switch="{name}"] [value="{value}"]')
        )
        self.wait_until_drawn()

    def check(self) -> None:
        """Nothing was loaded, nothing complained, and nothing is wider than the screen."""
        assert self.ask("performance.getEntriesByType('resource').map(item => item.name)") == []
        assert self.driver.get_log("browser") == []
        assert self.ask("document.documentElement.scrollWidth") <= self.width

    def plots(self) -> dict[str, list[dict[str, Any]]]:
        """Every plot that shows, with the traces that Plotly holds and how many of them it drew."""
        found = self.ask(
            """[...document.querySelectorAll('.plot')].filter(plot => plot.offsetParent).map(plot => [plot.id, {
                svg: plot.querySelectorAll('svg.main-svg').length > 0,
                drawn: plot.querySelectorAll('.barlayer .trace, .scatterlayer .trace').length,
                traces: (plot.data || []).map(({type, name, orientation, x, y, error_y, line}) =>
                    ({type, name, orientation, x: [...x], y: [...y], error_y, shape: line && line.shape})),
            }])"""
        )
        for name, plot in found:
            assert plot["svg"], name
            assert plot["drawn"] == len(plot["traces"]) > 0, name
        return {name: plot["traces"] for name, plot in found}


def of_drafter(traces: list[dict[str, Any]], label: str, *, along: str = "x") -> Values:
    """What is plotted for a drafter: value by place, whichever of its traces holds it."""
    other = "y" if along == "x" else "x"
    found: Values = {}
    for trace in traces:
        if trace["name"] == label:
            values = zip(trace[along], trace[other], strict=True)
            found |= {str(place): value for place, value in values if value is not None}
    return found
