"""A headless Chromium for tests of pages. A test module imports the fixtures `browser` and `page` from here.

It is the system's own, so nothing is fetched. Where there is none the tests skip; in continuous integration they fail.
"""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from typing import Any, Iterator

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser for one module: while it runs, its thread has an event loop, which other modules' tests would stumble over."""
    if CHROMIUM is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("there is no Chromium: apt-get install chromium")
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install 'outrider[dev]'")
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])  # tests may run as root
        yield started
        started.close()


@contextmanager
def watched(browser: Any, **options: Any) -> Iterator[Any]:
    """A fresh page; AssertionError at its end if it wrote an error or a warning to its console, or threw. options: the context's."""
    with browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options}) as context:
        opened = context.new_page()
        troubles: list[str] = []
        opened.on("console", lambda message: message.type in ("error", "warning") and troubles.append(message.text))
        opened.on("pageerror", lambda error: troubles.append(str(error)))
        yield opened
        assert not troubles, f"the page's console says: {troubles}"


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A watched page."""
    with watched(browser) as opened:
        yield opened
