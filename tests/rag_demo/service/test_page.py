"""The page: its files by a parser, and what it does in a real browser."""

from __future__ import annotations

import asyncio
import re
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from serving import serving

FOLDER = resources.files("rag_demo.service") / "page"


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, Any]]] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.found.append((tag, dict(attrs)))


def test_files_come_from_here_and_have_no_inline_code() -> None:
    """As the policy wants it; every field has a label."""
    parser = Elements()
    parser.feed((FOLDER / "page.html").read_text(encoding="utf-8"))
    labels = {attrs.get("for") for tag, attrs in parser.found if tag == "label"}
    for tag, attrs in parser.found:
        assert not any(name.startswith("on") or name == "style" for name in attrs), tag
        for name in ("src", "href"):
            assert not re.match(r"(https?:)?//", attrs.get(name) or ""), attrs
        if tag in ("input", "select"):
            assert attrs["id"] in labels
    script = (FOLDER / "page.js").read_text(encoding="utf-8")
    for dangerous in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert dangerous not in script


def test_page_is_served_with_its_policy(index: Path) -> None:
    """To whoever asks, without a token too: it holds nothing."""

    async def main() -> list[Any]:
        async with serving(index, token="secret") as client:
            return [await client.get(path) for path in ("/", "/page.css", "/page.js")]

    for answer in asyncio.run(main()):
        assert answer.status_code == 200
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "unsafe" not in answer.headers["content-security-policy"]


@pytest.mark.slow
def test_in_a_browser(index: Path) -> None:
    """Asked by keyboard; what is indexed stays text; the memory is seen to come back."""
    from browsing import CHROMIUM, HOW, browser, serving_on_a_port

    pytest.importorskip("playwright", reason=HOW)
    if not CHROMIUM.exists():
        pytest.skip(HOW)
    with serving_on_a_port(index) as url, browser() as chromium:
        page = chromium.new_page(viewport={"width": 360, "height": 740}, color_scheme="dark")
        complaints: list[str] = []
        page.on("console", lambda said: complaints.append(said.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append(dialog.message))
        page.goto(url)
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
        width = "document.documentElement.scrollWidth <= window.innerWidth"
        assert page.evaluate(width), "it is wider than a phone"
        page.get_by_role("button", name="Give back index").click()
        page.locator("#returned", has_text="freed").wait_for()
        page.locator("#picture .unload").first.wait_for(state="attached")
        page.get_by_text("index: unloaded").wait_for()
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert background == "rgb(22, 23, 27)"
        assert complaints == []
