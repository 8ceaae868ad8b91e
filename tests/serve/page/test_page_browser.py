"""The page in a real browser: send, stream, stop, replay, compare, on a phone, by keyboard, with hostile text."""

from __future__ import annotations

import pytest
from headless_browser import asked_for, colours, contrast, open_browser, open_page, sticking_out
from scripted_page_server import EVIL, FABLE, scripted_server

WebDriverWait = pytest.importorskip("selenium.webdriver.support.ui").WebDriverWait
Select = pytest.importorskip("selenium.webdriver.support.ui").Select
Keys = pytest.importorskip("selenium.webdriver.common.keys").Keys

TEXT = "".join(piece["text"] for step in FABLE for piece in step["pieces"])
PATIENCE = 30  # seconds until something that must happen counts as missing


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with open_browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def scripted():
    with scripted_server() as each:
        yield each


@pytest.fixture
def page(browser, scripted):
    """The page as a new reader meets it; at the end it must not have complained, or asked anybody else."""
    asked_for(browser)
    visit(browser, scripted.url)
    browser.execute_script("localStorage.clear()")
    visit(browser, scripted.url)
    browser.get_log("browser")
    yield browser
    assert [entry for entry in browser.get_log("browser") if "favicon" not in entry["message"]] == []
    assert {url for url in asked_for(browser) if not url.startswith(scripted.url)} == set()
    assert browser.execute_script("return window.broken === undefined")


def visit(browser, url: str, **how) -> None:
    open_page(browser, url, **how)
    until(
        browser, "return document.querySelector('#plan option') !== null || !document.getElementById('notice').hidden"
    )


def until(browser, script: str):
    return WebDriverWait(browser, PATIENCE, 0.02).until(lambda b: b.execute_script(script))


def by_id(browser, name: str):
    return browser.find_element("id", name)


def ask(browser, text: str) -> None:
    by_id(browser, "prompt").send_keys(text, Keys.ENTER)


def finished(browser) -> None:
    until(browser, "return document.querySelector('.answer') && !document.querySelector('.answer.writing')")


def shown(browser) -> str:
    """What the last answer shows."""
    return browser.execute_script("return [...document.querySelectorAll('.answer .words')].at(-1).textContent")


# Sending and streaming


def test_an_answer_streams_in_coloured_by_source(page, scripted):
    ask(page, "Tell me a fable")
    finished(page)
    assert shown(page) == TEXT
    by_source = page.execute_script(
        "return [...document.querySelectorAll('.words .tok')].map(t => [t.textContent, t.className])"
    )
    looks = {text: look.split()[1] for text, look in by_source}
    assert looks["The"] == "own"
    assert looks[" fox"] == looks[" ran"] != looks[" hid"] != "own"
    assert page.find_element("css selector", ".code").text.startswith("```py\nx = 1")
    body = scripted.bodies[-1]
    assert (body["plan"], body["stream"], body["details"]) == ("two", True, True)
    assert [message["content"] for message in body["messages"]] == ["Tell me a fable"]
    assert by_id(page, "per-pass").text == f"{sum(s['tokens'] for s in FABLE) / len(FABLE):.2f}"
    assert by_id(page, "plain").text == "≈ 20.0"
    assert "drafter" in by_id(page, "legend").text
    assert "The fox ran away" in by_id(page, "spoken").get_attribute("textContent")  # for those who hear the page


def test_the_conversation_goes_on(page, scripted):
    ask(page, "one")
    finished(page)
    ask(page, "two")
    until(page, "return document.querySelectorAll('.answer:not(.writing)').length === 2")
    assert [(m["role"], m["content"]) for m in scripted.bodies[-1]["messages"]] == [
        ("user", "one"),
        ("assistant", TEXT),
        ("user", "two"),
    ]


def test_stop_ends_the_request(page, scripted):
    scripted.vanished.clear()
    ask(page, "slow")
    until(page, "return document.querySelector('.words')?.textContent.endsWith('End')")
    assert by_id(page, "send").text == "Stop"
    by_id(page, "send").click()
    finished(page)
    assert scripted.vanished.wait(PATIENCE)
    assert "stopped" in page.find_element("css selector", ".answer footer").text
    assert by_id(page, "send").text == "Send"


def test_settings_are_sent_and_outlive_a_reload(page, scripted):
    Select(by_id(page, "plan")).select_by_visible_text("plain")
    for name, value in (("temperature", "0.7"), ("seed", "5"), ("max-tokens", "33")):
        by_id(page, name).clear()
        by_id(page, name).send_keys(value, Keys.TAB)
    by_id(page, "key").send_keys("secret", Keys.TAB)
    visit(page, scripted.url)
    assert by_id(page, "key").get_attribute("value") == ""
    ask(page, "again")
    finished(page)
    body = scripted.bodies[-1]
    assert (body["plan"], body["temperature"], body["seed"], body["max_tokens"]) == ("plain", 0.7, 5, 33)
    assert not page.execute_script("return JSON.stringify({...localStorage, ...sessionStorage}).includes('secret')")


def test_a_plan_that_cannot_run_cannot_be_chosen(page):
    enabled = [option.text for option in Select(by_id(page, "plan")).options if option.is_enabled()]
    assert enabled == ["two", "plain"]


# What goes wrong


def test_errors_are_words(browser, scripted):
    visit(browser, scripted.url)
    ask(browser, "refused")
    until(browser, "return document.querySelector('.answer .error') !== null")
    assert browser.find_element("css selector", ".answer .error").text == "The prompt is too <b>long</b>."
    ask(browser, "broken")
    until(browser, "return document.querySelectorAll('.answer .error').length === 2")
    assert "ended before the answer did" in browser.find_elements("css selector", ".answer .error")[1].text
    browser.get_log("browser")  # the browser itself notes the status 400


def test_a_key_is_asked_for_and_kept_in_memory(browser, scripted):
    scripted.key = "secret"
    try:
        open_page(browser, scripted.url)
        until(browser, "return !document.getElementById('notice').hidden")
        assert "needs an API key" in by_id(browser, "notice").text
        assert browser.switch_to.active_element.get_attribute("id") == "key"
        browser.switch_to.active_element.send_keys("secret", Keys.TAB)
        until(browser, "return document.querySelector('#plan option') !== null")
        assert not by_id(browser, "notice").is_displayed()
    finally:
        scripted.key = ""
        browser.get_log("browser")  # the browser itself notes the status 401


def test_hostile_text_is_shown_as_text(page):
    ask(page, "hostile")
    finished(page)
    assert shown(page) == EVIL * 2
    words = page.find_element("css selector", ".answer .words")
    words.send_keys(Keys.ARROW_RIGHT)
    assert EVIL[:30] in by_id(page, "tip").text
    assert page.execute_script("return document.querySelectorAll('main script, main img, #tip img').length") == 0


def test_the_policy_stops_what_the_page_does_not_hold(browser, scripted):
    visit(browser, scripted.url)
    stopped = browser.execute_async_script(
        "const done = arguments[0], seen = [];"
        "document.addEventListener('securitypolicyviolation', e => {"
        "  seen.push(e.effectiveDirective); if (seen.length === 2) done(seen.sort()); });"
        "const image = new Image(); image.src = 'http://127.0.0.1:9/x.png'; document.body.append(image);"
        "try { document.body.innerHTML = '<b>text</b>'; } catch {}"
    )
    assert stopped == ["img-src", "require-trusted-types-for"]
    browser.get_log("browser")
    asked_for(browser)


# Looking closer


def test_pointing_at_a_token_tells_source_depth_and_what_was_rejected(page):
    ask(page, "fable")
    finished(page)
    words = page.find_element("css selector", ".answer .words")
    told = []
    for _ in range(5):
        words.send_keys(Keys.ARROW_RIGHT)
        told.append(by_id(page, "tip").text.replace("\u00a0", " "))
        assert by_id(page, "spoken").get_attribute("textContent")
    assert "written by the model itself" in told[0]
    assert "drafted by drafter" in told[1]
    assert "Place 1 of a draft of 3 tokens" in told[1]
    assert "Rejected here:\n home drafter" in told[3]
    assert "Rejected here:\n. The copy, drafter" in told[4]  # a branch of two tokens
    words.send_keys(Keys.ESCAPE)
    assert not by_id(page, "tip").is_displayed()


def test_replay_shows_drafts_and_erases_them(page):
    ask(page, "fable")
    finished(page)
    page.find_element("css selector", ".answer footer button").click()
    slider = page.switch_to.active_element
    assert slider.get_attribute("type") == "range"
    assert shown(page) == ""
    moments = []
    for _ in range(5):
        slider.send_keys(Keys.ARROW_RIGHT)
        marks = page.execute_script(
            "return [...document.querySelectorAll('.tray .tok')]"
            ".map(t => t.textContent + ':' + t.className.split(' ').at(-1))"
        )
        moments.append((shown(page), marks))
    assert moments[0] == ("The", [])
    assert moments[1] == ("The fox ran home", [" fox:open", " ran:open", " home:open"])  # with a ghost of the draft
    assert moments[2] == ("The fox ran away", [" fox:accepted", " ran:accepted", " home:erased"])
    assert moments[3][1] == [".:open", " The:open"]
    assert moments[4] == ("The fox ran away and", [".:erased", " The:erased"])
    assert "2 erased" in page.find_element("css selector", ".replay [role=status]").text
    slider.send_keys(Keys.ARROW_LEFT)
    assert shown(page) == moments[3][0]
    Select(page.find_element("css selector", ".replay select")).select_by_visible_text("quick")
    slider.send_keys(Keys.SPACE)  # plays to the end
    until(page, "const s = document.querySelector('.replay input'); return s.value === s.max")
    assert shown(page) == TEXT
    slider.send_keys(Keys.ESCAPE)
    assert not page.find_elements("css selector", ".replay")
    assert page.switch_to.active_element.text == "Replay slowly"


def test_two_plans_are_compared(page, scripted):
    by_id(page, "tab-compare").click()
    by_id(page, "run").click()
    until(page, "return !document.getElementById('verdict').hidden")
    assert by_id(page, "verdict").text.startswith("Identical: both plans wrote the same 9 tokens")
    first, second = scripted.bodies[-2:]
    assert (first["plan"], second["plan"]) == ("plain", "two")
    assert first["seed"] == second["seed"]
    assert first["namespace"] != second["namespace"]  # the second must not draft from what the first wrote
    by_id(page, "race").click()
    until(page, "return [...document.querySelectorAll('.lane .words')].every(w => w.textContent.endsWith('End'))")
    by_id(page, "question").clear()
    by_id(page, "question").send_keys("different")
    by_id(page, "run").click()
    until(page, "return document.getElementById('verdict').textContent.startsWith('Different')")
    assert (
        f"from character {len(TEXT) - len('End') - len(FABLE[-1]['pieces'][0]['text'])} on"
        in by_id(page, "verdict").text
    )


# For everybody


@pytest.mark.parametrize("width", [360, 768, 1280])
def test_nothing_scrolls_sideways(page, scripted, width):
    visit(page, scripted.url, width=width)
    ask(page, "hostile")
    finished(page)
    page.find_element("css selector", ".answer footer button").click()
    page.execute_script("for (const d of document.querySelectorAll('details')) d.open = true")
    for tab in ("tab-chat", "tab-compare"):
        page.execute_script("document.getElementById(arguments[0]).click()", tab)
        assert page.execute_script("return document.documentElement.scrollWidth") == width
        assert sticking_out(page, "svg, select, .unseen, .tray") == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_dark_and_light_by_wish_and_by_button(page, scripted, scheme):
    visit(page, scripted.url, scheme=scheme)
    ground, ink = colours(page)
    assert (contrast(ground, "rgb(0,0,0)") > 10) == (scheme == "light")
    assert contrast(ground, ink) > 7
    small = page.execute_script("return getComputedStyle(document.querySelector('.muted')).color")
    assert contrast(ground, small) >= 4.5
    by_id(page, "theme").click()
    visit(page, scripted.url, scheme=scheme)  # the choice outlives a reload
    turned, _ = colours(page)
    assert (contrast(turned, "rgb(0,0,0)") > 10) == (scheme == "dark")


def test_the_keyboard_is_enough(page, scripted):
    """From the top of the page: skip to the prompt, ask, look at the answer, switch to the comparison and back."""
    body = page.find_element("css selector", "body")
    body.send_keys(Keys.TAB)
    page.switch_to.active_element.send_keys(Keys.ENTER)
    until(page, "return document.activeElement.id === 'prompt'")
    page.switch_to.active_element.send_keys("by keyboard", Keys.ENTER)
    finished(page)
    page.switch_to.active_element.send_keys(Keys.SHIFT, Keys.TAB)
    assert page.switch_to.active_element.text == "Replay slowly"
    page.switch_to.active_element.send_keys(Keys.ENTER)
    assert page.switch_to.active_element.get_attribute("type") == "range"
    page.switch_to.active_element.send_keys(Keys.ESCAPE)
    tab = by_id(page, "tab-chat")
    tab.send_keys(Keys.ARROW_RIGHT)
    assert page.switch_to.active_element.get_attribute("id") == "tab-compare"
    assert by_id(page, "contest").is_displayed()
    page.switch_to.active_element.send_keys(Keys.ARROW_LEFT)
    assert by_id(page, "composer").is_displayed()


def test_everything_has_a_name(page):
    """Fields have labels, buttons words, drawings a description, and no two things share an id."""
    ask(page, "fable")
    finished(page)
    page.find_element("css selector", ".answer footer button").click()
    nameless = page.execute_script(
        "return [...document.querySelectorAll('input, select, textarea, button, svg, [role=group], [role=tabpanel]')]"
        ".filter(e => !e.labels?.length && !e.getAttribute('aria-label') && !e.getAttribute('aria-labelledby')"
        "  && !(e.matches('button') && e.textContent.trim())).map(e => e.outerHTML.slice(0, 120))"
    )
    assert nameless == []
    ids = page.execute_script("return [...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))


def test_nothing_moves_for_those_who_wish_so(page, scripted):
    visit(page, scripted.url, motion=False)
    ask(page, "slow")
    until(page, "return document.querySelector('.words')?.textContent.endsWith('End')")
    assert page.execute_script("return document.getAnimations().length") == 0
    assert page.find_elements("css selector", ".drawing circle") == []
    assert len(page.find_elements("css selector", ".drawing .token")) == 9  # the tape still tells
    by_id(page, "send").click()
    finished(page)


# With a model


@pytest.fixture(scope="module")
def served(browser, server):
    """A tiny model behind the real server, plans that draft."""
    return server


def test_a_model_answers_and_plans_agree(browser, served):
    visit(browser, served.url + "/")
    browser.execute_script("localStorage.clear()")
    visit(browser, served.url + "/")
    browser.get_log("browser")
    for name, value in (("temperature", "0.8"), ("seed", "3"), ("max-tokens", "40")):
        by_id(browser, name).clear()
        by_id(browser, name).send_keys(value, Keys.TAB)
    for plan in ("plain", "lookup", "hispec"):
        Select(by_id(browser, "plan")).select_by_visible_text(plan)
        visit(browser, served.url + "/")  # a new conversation, with the same wishes
        ask(browser, "ab ab ab ab")
        finished(browser)
        alone = served.language_model.generate(
            [{"role": "user", "content": "ab ab ab ab"}], plan="plain", temperature=0.8, seed=3, max_tokens=40
        )
        assert browser.execute_script("return document.querySelector('.words').textContent") == alone.text
    by_id(browser, "tab-compare").click()
    Select(by_id(browser, "plan-b")).select_by_visible_text("hispec")
    by_id(browser, "run").click()
    until(browser, "return !document.getElementById('verdict').hidden")
    assert by_id(browser, "verdict").text.startswith("Identical: both plans wrote the same 40 tokens")
    assert browser.get_log("browser") == []
