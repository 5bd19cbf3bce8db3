"""The chat page in a headless browser: ask, stream, stop, retry. The console stays empty."""

from __future__ import annotations

from typing import Any, Iterator

import pytest
from browser import browser, page  # noqa: F401 (fixtures)
from serving import Running, serving


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving() as running:
        yield running


def ask(opened: Any, text: str) -> None:
    opened.fill("#text", text)
    opened.press("#text", "Enter")


def test_ask_and_see_it_stream(page: Any, server: Running) -> None:  # noqa: F811
    page.goto(server.url)
    page.wait_for_function("() => document.getElementById('model').textContent === 'tiny'")
    page.fill("#temperature", "0")
    page.fill("#most", "150")
    page.evaluate("""() => {
        window.lengths = [];
        new MutationObserver(() => {
            const last = document.querySelector("article.assistant:last-child");
            if (last) window.lengths.push(last.textContent.length);
        }).observe(document.getElementById("talk"), { childList: true, subtree: true });
    }""")
    ask(page, "Please bring a notebook")
    page.wait_for_selector("article.assistant footer:has-text('tokens/s')")
    assert len(set(page.evaluate("window.lengths"))) > 10, "the text came all at once"
    wanted = server.chat(prompt="Please bring a notebook", temperature=0, max_tokens=150)["choices"][0]["message"]["content"]
    footer = page.text_content("article.assistant footer")
    assert page.text_content("article.assistant").removesuffix(footer) == wanted
    assert "150 tokens" in footer and "tokens per pass" in footer and "drafted tokens kept" in footer
    marked = page.locator("article.assistant mark").first
    colour = "e => getComputedStyle(e).textDecorationLine"
    assert marked.evaluate(colour) == "underline"
    page.uncheck("#marks")
    assert marked.evaluate(colour) == "none"


def test_stop_retry_and_go_on(page: Any, server: Running) -> None:  # noqa: F811
    page.goto(server.url)
    page.wait_for_function("() => document.getElementById('model').textContent === 'tiny'")
    page.fill("#temperature", "0")
    page.fill("#most", "480")
    ask(page, "A long story")
    page.wait_for_function("() => document.querySelector('article.assistant')?.textContent.length > 5")
    page.click("#stop")
    page.wait_for_selector("article.assistant footer:has-text('stopped')")
    server.until_idle(5)
    stopped = page.text_content("article.assistant").removesuffix("stopped")
    page.fill("#most", "60")
    page.click("#retry")
    page.wait_for_selector("article.assistant footer:has-text('tokens/s')")
    assert page.locator("article").count() == 2
    again = page.text_content("article.assistant")
    assert again.startswith(stopped[:40]) or stopped.startswith(again[:40])
    ask(page, "And then?")
    page.wait_for_function("() => document.querySelectorAll('article.assistant footer').length === 2")
    page.wait_for_function(
        "() => document.querySelectorAll('article.assistant footer')[1].textContent.includes('from the cache')"
    )
    cached = page.locator("article.assistant footer").nth(1).text_content()
    assert " 0 of" not in cached, "the conversation so far is not computed again"
    page.click("#clear")
    assert page.locator("article").count() == 0


def test_trouble_is_shown(browser: Any) -> None:  # noqa: F811
    with serving(api_key="secret") as server, browser.new_context() as context:
        opened = context.new_page()
        opened.goto(server.url)
        opened.wait_for_selector("article.trouble:has-text('API key')")
        opened.fill("#key", "secret")
        opened.press("#key", "Tab")
        opened.wait_for_function("() => document.getElementById('model').textContent === 'tiny'")
        opened.fill("#most", "5")
        ask(opened, "hello")
        opened.wait_for_selector("article.assistant footer:has-text('5 tokens')")
        ask(opened, "x" * 3000)
        opened.wait_for_selector("article.trouble:has-text('context')")
        ask(opened, "shorter")
        opened.wait_for_function("() => document.querySelectorAll('article.assistant footer').length === 2")
