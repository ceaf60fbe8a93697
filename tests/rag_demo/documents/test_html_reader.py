"""Unit tests of the HTML reader (private): visible text and its position."""

from __future__ import annotations

import time

import pytest

from rag_demo.documents.formats import read_html


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
        ("a\n\n  b<br>c&nbsp;d", "a b\n\nc d"),
        ("<p>a\nb<pre>def f():\n    return 1\n</pre><p>c", "a b\n\ndef f():\n    return 1\n\n\nc"),
        ("lone \ud800 half", "lone ? half"),
        ("", ""),
    ],
)
def test_read_html_returns_visible_text(page: str, text: str) -> None:
    """Blocks become paragraphs; an element that is not closed ends with the page."""
    assert read_html(page).text.rstrip() == text


@pytest.mark.parametrize("part", ["<a ", "<a x='", "<!--", "<script>", "<p>", "&#", "<a id=x>t"])
def test_tags_that_are_not_closed_take_no_quadratic_time(part: str) -> None:
    started_s = time.perf_counter()
    read_html(part * (400_000 // len(part)))
    assert time.perf_counter() - started_s < 30
