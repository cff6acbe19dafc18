"""The pages in a real browser: nothing fails, nothing is loaded, nothing runs over the edge."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_runs import (
    make_events,
    make_frames,
    make_gradient_frames,
    make_gradient_result,
    make_result,
    make_switch_events,
    page_of,
)
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from shadowsync.metrics.history import RoleEvent
from shadowsync.report.compare import PastRun, render_comparison
from shadowsync.report.page import render_page

CHROMIUM = shutil.which("chromium")
CHROMEDRIVER = shutil.which("chromedriver")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
SIZES = [(320, 640), (390, 844), (768, 1024), (1280, 900), (2200, 1200)]

pytestmark = pytest.mark.skipif(
    CHROMIUM is None or CHROMEDRIVER is None, reason="needs a browser: apt-get install chromium chromium-driver"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    assert CHROMIUM is not None
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, Service(CHROMEDRIVER))
    yield driver
    driver.quit()


def crowded_page() -> str:
    return render_page(make_gradient_result(200), make_gradient_frames(60, 200), make_switch_events())


def unruly_page() -> str:
    long = "unbroken" * 60
    config = {"data": {"path": long, "name": long}, "model": {"name": "<script>throw 1</script>"}}
    roles = [f"{long}-{rank}" for rank in range(40)]
    events = [RoleEvent(float(k), role, "dead", long) for k, role in enumerate(roles)]
    return render_page(make_result(9, config=config, machine={"system": long}), make_frames(400, 9), events)


def comparison_page() -> str:
    runs = [PastRun(f"run-{i}", make_result(i), make_frames(20, i, seed=i)) for i in range(1, 11)]
    return render_comparison([*runs, PastRun("with-a-rather-long-name-of-its-own", make_result(2), make_frames(1))])


OF_A_RUN = ("full", "cluster", "recovery", "gradients", "bare")
OTHERS = {"crowded": crowded_page, "unruly": unruly_page, "comparison": comparison_page}
SECTIONS = ("headlines", "quality", "speed", "numbers", "terms", "setup")


@pytest.fixture(scope="module", params=[*OF_A_RUN, *OTHERS])
def page(
    request: pytest.FixtureRequest, browser: webdriver.Chrome, tmp_path_factory: pytest.TempPathFactory
) -> webdriver.Chrome:
    """The browser with one of the pages open, its logs of earlier pages read."""
    browser.get_log("browser")
    browser.get_log("performance")
    html = OTHERS[request.param]() if request.param in OTHERS else page_of(request.param)
    open_page(browser, tmp_path_factory.mktemp("page"), html)
    return browser


def resize(browser: webdriver.Chrome, width: int, height: int) -> None:
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def run(browser: webdriver.Chrome, script: str) -> Any:
    return browser.execute_script(script)


def test_no_errors_and_nothing_loaded(page: webdriver.Chrome) -> None:
    assert page.get_log("browser") == []
    requests = [entry for entry in page.get_log("performance") if "Network.requestWillBeSent" in entry["message"]]
    assert len([entry for entry in requests if '"url":"file:' in entry["message"]]) == 1
    assert [entry for entry in requests if '"url":"http' in entry["message"]] == []
    assert run(page, "return performance.getEntriesByType('resource').length") == 0
    assert run(page, "return document.scripts.length") == 0


def test_no_page_is_wider_than_its_window(page: webdriver.Chrome) -> None:
    run(page, "document.querySelectorAll('details').forEach(details => details.open = true)")
    for width, height in SIZES:
        resize(page, width, height)
        wider = run(page, "return document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wider <= 0, width


def test_plots_are_drawn_and_fill_their_cards(page: webdriver.Chrome) -> None:
    for width, height in ((390, 844), (1280, 900)):
        resize(page, width, height)
        boxes = run(
            page,
            "return [...document.querySelectorAll('figure svg')].map(svg => {const box = svg.getBoundingClientRect();"
            "return [box.width, box.height, svg.querySelectorAll('text').length]})",
        )
        for box_width, box_height, texts in boxes:
            assert box_width > 250
            assert box_height > 80
            assert texts > 3


def test_texts_of_plots_stay_inside_them(page: webdriver.Chrome) -> None:
    resize(page, 1280, 900)
    outside = run(
        page,
        "return [...document.querySelectorAll('figure svg')].flatMap(svg => {const frame = svg.getBoundingClientRect();"
        "return [...svg.querySelectorAll('text')].filter(text => {const box = text.getBoundingClientRect();"
        "return box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1})"
        ".map(text => text.textContent)})",
    )
    assert outside == []


def open_page(browser: webdriver.Chrome, folder: Path, html: str) -> None:
    (folder / "page.html").write_text(html)
    browser.get((folder / "page.html").as_uri())


def test_every_section_of_a_run_is_there(browser: webdriver.Chrome, tmp_path: Path) -> None:
    resize(browser, 1280, 900)
    open_page(browser, tmp_path, page_of("full"))
    for section in SECTIONS:
        assert browser.find_element("id", section).is_displayed()
    assert len(browser.find_elements("css selector", "figure svg")) == 7


ROLES = ["driver", "trainer-2", "embedding-1", "dense-0"]
LOSSES = ["target 0.1", "failure", "checkpoint", "training repeated"]
STEPS = ["4 steps", "sync", "gba", "0.7", "gradients dropped so far", "milliseconds a batch"]


@pytest.mark.parametrize(
    ("name", "section", "drawn", "written", "details", "unfolded"),
    [
        ("full", "setup", [], [], "configuration", "train.batch_size"),
        ("cluster", "roles", ROLES, [], "events", "its process was killed by signal 9"),
        ("recovery", "recovery", LOSSES, ["emulated time between saves"], "decisions", "chosen anew"),
        ("gradients", "aggregation", STEPS, ["44.5 / 90 ms", "6.3 MB"], "switches", "synchronous rounds 61 %"),
    ],
)
def test_sections_have_their_charts_and_numbers_and_their_details_unfold(
    browser: webdriver.Chrome,
    tmp_path: Path,
    name: str,
    section: str,
    drawn: list[str],
    written: list[str],
    details: str,
    unfolded: str,
) -> None:
    resize(browser, 1280, 900)
    open_page(browser, tmp_path, page_of(name))
    shown = browser.find_element("id", section)
    assert set(drawn) <= {text.text for text in shown.find_elements("css selector", "svg text")}
    assert all(text in shown.text for text in written)
    folded = browser.find_element("id", details)
    assert not folded.find_element("tag name", "table").is_displayed()
    folded.find_element("tag name", "summary").click()
    assert folded.find_element("tag name", "table").is_displayed()
    assert unfolded in folded.text
    if details == "events":
        rows = [row for row in folded.find_elements("tag name", "tr") if row.is_displayed()]
        assert len(rows) == len(make_events()) + 1
    if details == "switches":
        assert len(shown.find_elements("css selector", "figure svg")) == 5


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_curves_stand_out_in_light_and_dark(browser: webdriver.Chrome, tmp_path: Path, scheme: str) -> None:
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    open_page(browser, tmp_path, page_of("full"))
    card = colour(browser, "figure.card", "backgroundColor")
    assert (luminance(card) > 0.5) == (scheme == "light")
    for selector, what, least in [("h3", "color", 7), ("figcaption", "color", 4.5), ("svg text", "fill", 4.5)]:
        assert contrast(colour(browser, selector, what), card) > least, selector
    for number in range(8):
        series = run(browser, f"return getComputedStyle(document.body).getPropertyValue('--series-{number}')")
        assert contrast([int(series.strip()[i : i + 2], 16) for i in (1, 3, 5)], card) > 3


def colour(browser: webdriver.Chrome, selector: str, what: str) -> list[int]:
    found = run(browser, f"return getComputedStyle(document.querySelector('{selector}')).{what}")
    return [int(part) for part in found.removeprefix("rgb(").removesuffix(")").split(",")]


def luminance(rgb: list[int]) -> float:
    """Relative luminance as the web's accessibility guidelines define it."""
    linear = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in rgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: list[int], other: list[int]) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)
