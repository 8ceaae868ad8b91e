"""The page with the default model in a real browser: what it shows is what the model writes alone."""

from __future__ import annotations

import pytest
from headless_browser import asked_for, open_browser, open_page
from scripted_page_server import serving

from hierspec.async_language_model import AsyncLanguageModel
from hierspec.serve.app import create_app
from hierspec.serve.settings import Settings

pytestmark = pytest.mark.model
WebDriverWait = pytest.importorskip("selenium.webdriver.support.ui").WebDriverWait
Keys = pytest.importorskip("selenium.webdriver.common.keys").Keys

QUESTION = "Name three rivers in Europe and the countries they run through."


@pytest.fixture
def address(default_model):
    model = AsyncLanguageModel(default_model)
    try:
        with serving(create_app(model, Settings(model_name="default"))) as url:
            yield url
    finally:
        model.worker.close(finish=False)


def test_chat_and_comparison_show_what_the_model_writes(default_model, address, tmp_path):
    with open_browser(tmp_path) as browser:

        def until(script: str) -> None:
            WebDriverWait(browser, 120, 0.05).until(lambda b: b.execute_script(f"return {script}"))

        asked_for(browser)
        open_page(browser, address)
        until("document.querySelector('#plan option') !== null")
        longest = browser.find_element("id", "max-tokens")
        longest.clear()
        longest.send_keys("48", Keys.TAB)
        browser.find_element("id", "prompt").send_keys(QUESTION, Keys.ENTER)
        until("document.querySelector('.answer') && !document.querySelector('.answer.writing')")
        alone = default_model.generate(QUESTION, plan="plain", max_tokens=48, temperature=0)
        assert browser.execute_script("return document.querySelector('.words').textContent") == alone.text
        assert browser.execute_script("return document.querySelectorAll('.words .tok:not(.own)').length") > 0
        browser.find_element("id", "tab-compare").click()
        browser.find_element("id", "run").click()
        until("!document.getElementById('verdict').hidden")
        assert browser.find_element("id", "verdict").text.startswith("Identical: both plans wrote the same 48 tokens")
        assert browser.get_log("browser") == []
        assert all(url.startswith(address) for url in asked_for(browser))
