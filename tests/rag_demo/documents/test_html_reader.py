"""Unit tests of the HTML reader (private): visible text and its position."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rag_demo.documents.html import read_html
from support.programs import assert_clean, run


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("<p>a<p>b", "a\n\nb"),
        ("<h2>Port &amp; <i>host</i></h2>x", "## Port & host\n\nx"),
        ("a < b, a<b>c</b> &lt;", "a < b, ac <"),
        ("<script>if (a<b) '</p>'</script>x<style>p{}</style>", "x"),
        ("<!-- <p>no --> y <!DOCTYPE html><?pi?>z", "y z"),
        ("<a title=\"a>b\" x='>' y=it's>stop</a>", "stop"),
        ("<template><p>no</template>yes", "yes"),
        ("x<textarea><b>raw</b></TEXTAREA >y", "x<b>raw</b>y"),
        ("a\n\n  b<br>c&nbsp;d", "a b\n\nc d"),
        ("&#" + "9" * 5000 + ";&#x41;", "\N{REPLACEMENT CHARACTER}A"),
        ("end <a href='", "end "),
        ("a<!-->b<!--->c<!-- d -->e", "abce"),
        ("<p>a\nb<pre>def f():\n    return 1\n</pre><p>c", "a b\n\ndef f():\n    return 1\n\n\nc"),
        ("x<", "x<"),
        ("", ""),
    ],
)
def test_read_html_returns_visible_text(page: str, text: str) -> None:
    """Blocks become paragraphs; an element that is not closed ends with the page."""
    assert read_html(page).text == text


def test_read_html_reports_lines_and_anchors() -> None:
    page = '<body>\n<p>one\ntwo</p>\n\n<h2 id="port">Port</h2>\n<p>8443</p>\n'
    found = read_html(page)
    assert found.place(0) == {"line": 2}
    assert found.place(found.text.index("two")) == {"line": 3}
    assert found.place(found.text.index("## Port")) == {"line": 5, "anchor": "port"}
    assert found.place(found.text.index("8443")) == {"line": 6, "anchor": "port"}


@given(st.text(alphabet="<>/!-?='\"& ab#;px\n", max_size=60))
@settings(max_examples=300, deadline=None)
def test_read_html_accepts_any_input(page: str) -> None:
    """Every place is a line of the page."""
    found = read_html(page)
    lines = page.count("\n") + 1
    assert all(1 <= int(found.place(offset).get("line", 1)) <= lines for offset in range(len(page)))


HOSTILE = """
from rag_demo.documents.html import read_html
for part in ("<a ", "<a x='", '<a x= ', "<!--", "</", "<script>", "<p>", "<", "&#", "<a id=x>t"):
    page = part * (400_000 // len(part))
    assert len(read_html(page).text) <= 2 * len(page)
print("done")
"""


@pytest.mark.slow
def test_read_html_takes_linear_time() -> None:
    """For a megabyte of tags that are not closed."""
    result = run(HOSTILE)
    assert_clean(result)
    assert result.stdout == "done\n"


@pytest.mark.slow
def test_read_html_takes_linear_memory() -> None:
    """Some dozens of bytes for each character."""
    for part in ("<p>", "a\n", "<a id=x>t", "<"):
        page = part * (30_000 // len(part))
        tracemalloc.start()
        read_html(page)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 60 * len(page), part
