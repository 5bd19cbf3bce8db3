"""The browser that the tests of pages run in shows pages, and tells of their errors."""

from __future__ import annotations

from typing import Any

import pytest
from browser import browser, page, watched  # noqa: F401


def test_it_runs_a_page(page: Any) -> None:  # noqa: F811
    page.set_content("<p id=sum></p><script>document.getElementById('sum').textContent = 2 + 3</script>")
    assert page.inner_text("#sum") == "5"


@pytest.mark.parametrize("script", ("console.error('wrong')", "console.warn('odd')", "setTimeout(() => undefined.x)"))
def test_trouble_on_a_page_is_told(script: str, browser: Any) -> None:  # noqa: F811
    with pytest.raises(AssertionError, match="console says"), watched(browser) as opened:
        opened.set_content(f"<script>{script}</script>")
        opened.wait_for_timeout(50)
