"""The page: its files, and its behaviour in a real browser."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.serving import ask


def test_page_is_served_without_token_and_with_policy(index: Path) -> None:
    requests: list[Any] = [("GET", path, {}) for path in ("/", "/page.css", "/page.js", "/docs")]
    for answer in ask(index, *requests, token=("secret-secret-secret",)):
        assert answer.status_code == 200
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "unsafe" not in answer.headers["content-security-policy"]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """Return a browser for all tests of this module."""
    from tests.support.browsing import CHROMIUM, HOW, browser

    pytest.importorskip("playwright", reason=HOW)
    if not CHROMIUM.exists():
        pytest.skip(HOW)
    with browser() as started:
        yield started


@contextlib.contextmanager
def open_page(
    chromium: Any, index: Path, *, scheme: str = "light", width: int = 1100, **options: Any
) -> Iterator[tuple[Any, list[str]]]:
    """Open the page of a new service; yield it and the list of its messages."""
    from tests.support.browsing import serving_on_a_port

    with serving_on_a_port(index, **options) as url:
        page = chromium.new_page(viewport={"width": width, "height": 740}, color_scheme=scheme)
        complaints: list[str] = []
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append(dialog.message))
        page.goto(url)
        yield page, complaints
        page.close()


@pytest.mark.slow
def test_search_shows_results_as_text(chromium: Any, index: Path) -> None:
    with open_page(chromium, index, scheme="dark", width=360) as (page, complaints):
        page.keyboard.type("script indexed")  # The field has the focus.
        page.keyboard.press("Enter")
        page.locator("#results li").first.wait_for()
        assert "<script>alert('indexed')</script>" in page.locator("#results").inner_text()
        assert page.locator("#results script").count() == 0
        assert {each.lower() for each in page.locator("mark").all_inner_texts()} == {
            "script",
            "indexed",
        }
        assert page.locator(".best").count() >= 1
        page.get_by_text("ready, 4 documents").wait_for()
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert background == "rgb(16, 17, 20)"
        page.get_by_role("link", name="API").click()
        page.get_by_role("heading", name="POST /search").wait_for()
        assert "include_text" in page.locator("main").inner_text()
        assert complaints == []


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "width"), [("light", 1100), ("dark", 320)])
def test_page_is_accessible(chromium: Any, index: Path, scheme: str, width: int) -> None:
    """By axe: WCAG 2.2 AA, and nothing is wider than the screen. Pale text is the control."""
    from tests.support.browsing import HOW

    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason=HOW).Axe()
    rules = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]

    def violations() -> list[str]:
        found = axe.run(page, options={"runOnly": rules}).response["violations"]
        return [f"{each['id']}: {[node['html'] for node in each['nodes']]}" for each in found]

    with open_page(chromium, index, scheme=scheme, width=width) as (page, _):
        assert violations() == []
        page.get_by_label("Question").fill("script indexed")
        page.keyboard.press("Enter")
        page.locator("#results li").first.wait_for()
        assert violations() == []
        fits = "document.documentElement.scrollWidth <= window.innerWidth"
        assert page.evaluate(fits), "it is wider than the screen"
        page.evaluate("document.documentElement.style.fontSize = '200%'")
        assert page.evaluate(fits), "it is wider than the screen where letters are larger"
        page.evaluate("document.getElementById('status').style.color = 'var(--edge)'")
        assert any("color-contrast" in each for each in violations())


@pytest.mark.slow
def test_invalid_token_can_be_corrected(chromium: Any, index: Path) -> None:
    with open_page(chromium, index, token=("right-right-right",)) as (page, _):
        page.get_by_text("ready, 4 documents").wait_for()
        page.get_by_label("Question").fill("lease")
        page.keyboard.press("Enter")
        for token in ("g\u03b5heim", "wrong"):
            page.locator("#token").fill(token)
            with page.expect_response("**/search") as answer:
                page.get_by_role("button", name="Use it").click()
            assert answer.value.status == 401
            page.locator("#token").wait_for()
        page.locator("#token").fill(" right-right-right\u00a0")
        page.keyboard.press("Enter")
        page.locator("#results li").first.wait_for()
        assert not page.locator("#token").is_visible()
