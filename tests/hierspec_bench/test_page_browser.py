"""The page of a bench record in a real browser."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from headless_browser import asked_for, colours, contrast, open_browser, open_page, sticking_out
from made_up_record import RESULTS, made_up_record

from hierspec_bench.page import write_report
from hierspec_bench.record import Record

Select = pytest.importorskip("selenium.webdriver.support.ui").Select


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with open_browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


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
    open_page(browser, path.as_uri(), width, scheme)


@pytest.mark.parametrize("name", ["full", "many", "hostile"])
def test_the_page_loads_nothing_and_complains_of_nothing(browser, pages, name):
    browser.get_log("performance")
    browser.get_log("browser")
    _open(browser, pages[name])
    asked = asked_for(browser)
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
        out = sticking_out(browser, ".scroll, .words, .asked, svg, select")
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


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_follows_the_reader_and_the_button(browser, pages, scheme):
    _open(browser, pages["full"], scheme=scheme)
    ground, ink = colours(browser)
    assert (contrast(ground, "rgb(0,0,0)") > 10) == (scheme == "light")
    assert contrast(ground, ink) > 7
    browser.find_element("id", "theme").click()
    turned, _ = colours(browser)
    assert (contrast(turned, "rgb(0,0,0)") > 10) == (scheme == "dark")
    browser.find_element("id", "theme").click()
    assert colours(browser) == (ground, ink)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_small_text_can_be_read(browser, pages, scheme):
    """4.5 to 1, whatever stands on cards or on the page itself."""
    _open(browser, pages["full"], scheme=scheme)
    card = browser.execute_script("return getComputedStyle(document.querySelector('figure')).backgroundColor")
    ground, _ = colours(browser)
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
        assert min(contrast(colour, card), contrast(colour, ground)) >= 4.5, (chosen, colour)


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
