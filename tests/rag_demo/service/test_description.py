"""The description of the API, which a fuzzer checks, and the page in a real browser."""

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rag_demo.search_request import RANK_CONSTANT
from tests.support.programs import ROOT
from tests.support.serving import ask, make_index, search, settings_table

FUZZ_S = 45
TOKEN = "of-the-admin-of-the-admin"
SETTINGS = """
[checks.negative_data_rejection]
expected-statuses = [400, 401, 403, 404, 405, 406, 408, 413, 415, 422, 429]
[[operations]]
# A description cannot contain the number of dimensions of a model.
include-name = "POST /v1/embeddings"
checks.positive_data_acceptance.expected-statuses = [200, 400, 413, 429]
[[operations]]
# It describes filters in words, and cannot say that ids must differ.
include-name = ["POST /documents/delete", "PUT /documents", "POST /embed", "GET /documents"]
checks.positive_data_acceptance.expected-statuses = [200, 413, 422, 429]
[[operations]]
include-name = "POST /search"  # This service has no reranker.
checks.positive_data_acceptance.expected-statuses = [200, 404, 413, 422, 429]
"""


@pytest.mark.slow
def test_service_passes_schemathesis(tmp_path: Path) -> None:
    from tests.support.browsing import serving_on_a_port

    index = make_index(tmp_path / "index")
    pytest.importorskip("schemathesis", reason="needs the dependency group service-test")
    (tmp_path / "settings.toml").write_text(SETTINGS)
    program = [sys.executable, "-m", "schemathesis.cli", "--config-file", "settings.toml"]
    options = ["-H", f"Authorization: Bearer {TOKEN}", "--max-time", str(FUZZ_S)]
    limits: Any = {"token": ("of-a-client-of-a-client",), "admin_token": TOKEN, "writable": True}
    with serving_on_a_port(index, **limits) as url:
        done = subprocess.run(
            [*program, "run", f"{url}/openapi.json", "--checks", "all", "--no-color", *options],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
    output = re.sub(r"(\S{200})\S+", r"\1...", done.stdout + done.stderr)
    assert "Traceback" not in output
    assert str(index) not in output
    assert done.returncode == 0, output[-8000:]


@pytest.fixture(scope="module")
def described(index: Path) -> Any:
    (answer,) = ask(index, ("GET", "/openapi.json", {}))
    return answer.json()


def test_examples_of_the_description_are_accepted(index: Path, described: Any) -> None:
    fields = described["components"]["schemas"]["SearchRequest"]["properties"]
    (query,) = fields["query"]["examples"]
    (where,) = fields["where"]["anyOf"][0]["examples"]
    (accepted,) = ask(index, search({"query": query, "where": where}))
    assert accepted.status_code == 200


def test_description_is_valid(described: Any) -> None:
    """Every default fits its own schema, and routes name the token that they need."""
    jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema: the extra test")
    defaults = 0

    def look(schema: Any) -> None:
        nonlocal defaults
        if isinstance(schema, dict) and isinstance(schema.get("default"), (list, dict, str, int)):
            whole = {**schema, "components": described["components"]}
            jsonschema.Draft202012Validator(whole).validate(schema["default"])
            defaults += 1
        for each in schema.values() if isinstance(schema, dict) else schema:
            if isinstance(each, (dict, list)):
                look(each)

    look(described["components"]["schemas"])
    assert defaults > 5
    (scheme,) = described["components"]["securitySchemes"]
    for path, methods in described["paths"].items():
        is_open = path in ("/livez", "/readyz", "/health")
        for operation in methods.values():
            assert operation.get("security", []) == ([] if is_open else [{scheme: []}]), path


def test_settings_are_documented() -> None:
    """The table in docs/rag_demo/service.md is made of the settings."""
    page = (ROOT / "docs" / "rag_demo" / "service.md").read_text(encoding="utf-8")
    assert settings_table() in page


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
def open_page(chromium: Any, index: Path, **options: Any) -> Iterator[Any]:
    """Open the page of a new service. It must not complain."""
    from tests.support.browsing import serving_on_a_port

    look = {"viewport": {"width": options.pop("width", 1100), "height": 740}}
    look["color_scheme"] = options.pop("scheme", "light")
    with serving_on_a_port(index, **options) as url:
        page = chromium.new_page(**look)
        complaints: list[str] = []
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append(dialog.message))
        page.goto(url)
        yield page
        page.close()
        assert not [each for each in complaints if "401" not in each]  # A wrong token gets 401.


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "width"), [("light", 1100), ("dark", 320)])
def test_search_shows_results_as_text(chromium: Any, index: Path, scheme: str, width: int) -> None:
    """Accessibly, by axe: WCAG 2.2 AA, nothing wider than the screen. Pale text is the control."""
    from tests.support.browsing import HOW

    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason=HOW).Axe()
    rules = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]

    def violations() -> list[str]:
        found = axe.run(page, options={"runOnly": rules}).response["violations"]
        return [f"{each['id']}: {[node['html'] for node in each['nodes']]}" for each in found]

    with open_page(chromium, index, scheme=scheme, width=width) as page:
        assert violations() == []
        page.keyboard.type("script indexed")  # The field has the focus.
        page.keyboard.press("Enter")
        page.locator("#results li").first.wait_for()
        assert "<script>alert('indexed')</script>" in page.locator("#results").inner_text()
        assert page.locator("#results script").count() == 0
        marks = page.locator("mark").all_inner_texts()
        assert {each.lower() for each in marks} == {"script", "indexed"}
        assert page.locator(".best").count() >= 1
        page.get_by_text("ready, 4 documents").wait_for()
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(16, 17, 20)") == (scheme == "dark")
        assert violations() == []
        fits = "document.documentElement.scrollWidth <= window.innerWidth"
        assert page.evaluate(fits), "it is wider than the screen"
        page.evaluate("document.documentElement.style.fontSize = '200%'")
        assert page.evaluate(fits), "it is wider than the screen where letters are larger"
        page.evaluate("document.getElementById('status').style.color = 'var(--edge)'")
        assert any("color-contrast" in each for each in violations())
        page.get_by_role("link", name="API").click()
        page.get_by_role("heading", name="POST /search").wait_for()
        assert "include_text" in page.locator("main").inner_text()


@pytest.mark.slow
def test_invalid_token_can_be_corrected(chromium: Any, index: Path) -> None:
    with open_page(chromium, index, token=("right-right-right",)) as page:
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


def test_page_knows_the_best_score_of_a_hybrid_search() -> None:
    script = (ROOT / "rag_demo/service/page/page.js").read_text(encoding="utf-8")
    assert f"BEST_FUSED = 2 / {RANK_CONSTANT + 1};" in script
