"""A real browser for tests of pages: Debian's chromium and chromium-driver. Without them those tests skip."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_BROWSER, _DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
if not _BROWSER or not _DRIVER:
    pytest.skip("no browser: install chromium and chromium-driver to run these", allow_module_level=True)
webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")

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


@contextmanager
def open_browser(profile: Path) -> Iterator[Any]:
    """Chromium with a profile of its own, which logs what pages complain of and ask for."""
    options = webdriver.ChromeOptions()
    options.binary_location = _BROWSER
    for flag in _QUIET:
        options.add_argument(flag)
    if os.geteuid() == 0:  # chromium refuses its sandbox to root
        options.add_argument("--no-sandbox")
    options.add_argument(f"--user-data-dir={profile}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(_DRIVER))
    try:
        driver.get("about:blank")  # the browser's own first page loads its own things
        yield driver
    finally:
        driver.quit()


def open_page(browser: Any, url: str, width: int = 1280, scheme: str = "light", motion: bool = True) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    if not motion:
        features.append({"name": "prefers-reduced-motion", "value": "reduce"})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get(url)


def asked_for(browser: Any) -> list[str]:
    """Addresses that pages asked for since the last call."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    return [url for url in asked if not url.startswith("data:")]


def colours(browser: Any) -> tuple[str, str]:
    """Of the page's ground and its text."""
    return tuple(
        browser.execute_script(
            "return [getComputedStyle(document.documentElement).backgroundColor, getComputedStyle(document.body).color]"
        )
    )


def contrast(one: str, two: str) -> float:
    """WCAG 2 contrast of two rgb(...) colours."""

    def light(colour: str) -> float:
        parts = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
        red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    lights = sorted((light(one), light(two)))
    return (lights[1] + 0.05) / (lights[0] + 0.05)


def sticking_out(browser: Any, inside: str) -> list[str]:
    """Elements wider than the page, but for those `inside` something that scrolls or wraps by itself."""
    return browser.execute_script(
        "return [...document.querySelectorAll('body *')].filter(e => !e.closest(arguments[0])"
        "  && e.getClientRects().length && e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML)",
        inside,
    )
