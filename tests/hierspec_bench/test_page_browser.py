"""The page of a bench record in a real browser: Debian's chromium and chromium-driver. Without them these skip."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from made_up_record import RESULTS, made_up_record

from hierspec_bench.page import write_report
from hierspec_bench.record import Record

_BROWSER, _DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
if not _BROWSER or not _DRIVER:
    pytest.skip("no browser: install chromium and chromium-driver to run these", allow_module_level=True)
webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
Select = pytest.importorskip("selenium.webdriver.support.ui").Select

_QUIET = (
    "--headless",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = _BROWSER
    for flag in _QUIET:
        options.add_argument(flag)
    if os.geteuid() == 0:  # chromium refuses its sandbox to root
        options.add_argument("--no-sandbox")
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('profile')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(_DRIVER))
    driver.get("about:blank")  # the browser's own first page loads its own things
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    """A full record, one with many plans, and one whose texts want to break out."""
    folder = tmp_path_factory.mktemp("pages")
    hostile = made_up_record()
    evil = "<script>window.broken = true</script><img src=x onerror='window.broken = true'>" + "w" * 300
    hostile["texts"][0]["answers"]["eagle+"] = [[evil, "copy"], [evil, evil]]
    hostile["texts"][0]["asked"] = hostile["command"] = hostile["model"] = evil
    hostile["plans"][evil] = hostile["plans"]["eagle+"]
    hostile["absent_peers"] = {evil: evil}
    records = {
        "full": made_up_record(),
        "many": json.loads((RESULTS / "joined-sampled.json").read_text(encoding="utf-8")),
        "hostile": hostile,
    }
    for name, record in records.items():
        write_report(Record.of(record), folder / f"{name}.html")
    return {name: folder / f"{name}.html" for name in records}


def _open(browser, path: Path, width: int = 1280, scheme: str = "light") -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    wish = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", wish)
    browser.get(path.as_uri())


@pytest.mark.parametrize("name", ["full", "many", "hostile"])
def test_the_page_loads_nothing_and_complains_of_nothing(browser, pages, name):
    browser.get_log("performance")
    browser.get_log("browser")
    _open(browser, pages[name])
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    asked = [url for url in asked if not url.startswith("data:")]
    assert asked == [pages[name].as_uri()]
    assert browser.get_log("browser") == []
    assert browser.execute_script("return window.broken === undefined")


@pytest.mark.parametrize("name", ["full", "many", "hostile"])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_never_scrolls_sideways(browser, pages, name, width):
    _open(browser, pages[name], width)
    for fold in (False, True):
        browser.execute_script("for (const d of document.querySelectorAll('details')) d.open = arguments[0]", fold)
        assert browser.execute_script("return document.documentElement.scrollWidth") == width
        # What sticks out of a card is not seen by the page's own width when it is only text.
        out = browser.execute_script(
            "return [...document.querySelectorAll('body *')]"
            ".filter(e => !e.closest('.scroll, .words, .asked, svg, select')"
            "  && e.getClientRects().length && e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML)"
        )
        assert out == []


def test_the_policy_stops_what_the_page_does_not_hold(browser, pages):
    _open(browser, pages["full"])
    stopped = browser.execute_async_script(
        "const done = arguments[0], seen = [];"
        "document.addEventListener('securitypolicyviolation', e => {"
        "  seen.push(e.effectiveDirective); if (seen.length === 2) done(seen.sort()); });"
        "const script = document.createElement('script'); script.textContent = 'window.broken = true';"
        "document.body.append(script);"
        "const image = new Image(); image.src = 'http://127.0.0.1:9/x.png'; document.body.append(image);"
    )
    assert stopped == ["img-src", "script-src-elem"]
    assert browser.execute_script("return window.broken === undefined")
    browser.get_log("browser")


def _colours(browser) -> tuple[str, str]:
    return tuple(
        browser.execute_script(
            "return [getComputedStyle(document.documentElement).backgroundColor, getComputedStyle(document.body).color]"
        )
    )


def _contrast(one: str, two: str) -> float:
    """WCAG 2 contrast of two rgb(...) colours."""

    def light(colour: str) -> float:
        parts = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
        red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    lights = sorted((light(one), light(two)))
    return (lights[1] + 0.05) / (lights[0] + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_follows_the_reader_and_the_button(browser, pages, scheme):
    _open(browser, pages["full"], scheme=scheme)
    ground, ink = _colours(browser)
    assert (_contrast(ground, "rgb(0,0,0)") > 10) == (scheme == "light")
    assert _contrast(ground, ink) > 7
    browser.find_element("id", "theme").click()
    turned, _ = _colours(browser)
    assert (_contrast(turned, "rgb(0,0,0)") > 10) == (scheme == "dark")
    browser.find_element("id", "theme").click()
    assert _colours(browser) == (ground, ink)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_small_text_can_be_read(browser, pages, scheme):
    """4.5 to 1, whatever stands on cards or on the page itself."""
    _open(browser, pages["full"], scheme=scheme)
    card = browser.execute_script("return getComputedStyle(document.querySelector('figure')).backgroundColor")
    ground, _ = _colours(browser)
    for chosen in (
        ".muted",
        ".good",
        ".bad",
        ".tag",
        "figcaption",
        "summary",
        "thead th",
        ".eyebrow",
        ".conditions dt",
    ):
        colour = browser.execute_script("return getComputedStyle(document.querySelector(arguments[0])).color", chosen)
        assert min(_contrast(colour, card), _contrast(colour, ground)) >= 4.5, (chosen, colour)


def test_prompt_and_plan_choose_the_text(browser, pages):
    record = made_up_record()
    _open(browser, pages["full"])

    def shown() -> list[str]:
        return browser.execute_script(
            "return [...document.querySelectorAll('.answer')].filter(a => a.offsetParent)"
            ".map(a => a.querySelector('.words').textContent + '|' + [...a.querySelectorAll('.words .run')]"
            ".map(r => r.title).join())"
        )

    first = shown()
    assert len(first) == 1
    Select(browser.find_element("id", "choose-plan")).select_by_visible_text("lookup")
    second = shown()
    Select(browser.find_element("id", "choose-prompt")).select_by_index(1)
    third = shown()
    assert len(second) == len(third) == 1
    assert len({*first, *second, *third}) == 3
    assert third[0].split("|")[0] == "".join(text for text, _, _ in record["texts"][1]["answers"]["lookup"])
    visible = [quote.text for quote in browser.find_elements("css selector", ".asked") if quote.is_displayed()]
    assert visible == [record["texts"][1]["asked"]]


def test_arrow_keys_and_legend_tell_who_drafted(browser, pages):
    _open(browser, pages["full"])
    words = next(one for one in browser.find_elements("css selector", ".words") if one.is_displayed())
    runs = words.find_elements("css selector", ".run")
    said = browser.find_element("id", "piece")
    for place in (0, 1, 2):
        words.send_keys("\ue014")  # arrow right
        assert said.text.endswith(runs[place].get_attribute("title"))
    words.send_keys("\ue012")  # arrow left
    assert said.text.endswith(runs[1].get_attribute("title"))
    key = next(one for one in browser.find_elements("css selector", ".keys button") if one.is_displayed())
    key.click()
    assert key.get_attribute("aria-pressed") == "true"
    look = key.get_attribute("data-look")
    for run in runs:
        looks = run.get_attribute("class").split()
        assert ("dim" in looks) == (look not in looks)
    key.click()
    assert not words.find_elements("css selector", ".dim")


def test_without_script_the_first_text_is_there(browser, pages):
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        _open(browser, pages["full"])
        shown = [one for one in browser.find_elements("css selector", ".words") if one.is_displayed()]
        assert len(shown) == 1
        assert not browser.find_element("id", "theme").is_displayed()
        assert not browser.find_element("id", "choices").is_displayed()
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
